"""Payloads cut for their owners: in an owner exchange each replica owns some consecutive chunks of a bucket.

A *slice* holds the records of one owner's chunks. Chunks are dealt out by where their records begin in the payload, so that
owners have about equally many bytes: none has more than its share and one record. Slices are as long as the longest, with
zeros at the end. Slices of payloads go to their owners; an owner's answer is cut alike, and all answers together are one
payload again. Letters: R replicas, which are owners, C chunks, B bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from torch import Tensor

from thinwire.exchange.plan import Bucket, Message, Stack, stack_records
from thinwire.wire.codec import ChunkCodec
from thinwire.wire.payload import HEADER_BYTES, payload_bytes

Dealt = Sequence[Sequence[range]]
"""Which chunks of each stack each owner has: owner, then stack."""


@dataclass(frozen=True)
class Run:
    """One stack's records in a slice; there may be none."""

    codec: ChunkCodec
    num_chunks: int
    offset_bytes: int

    @cached_property
    def num_bytes(self) -> int:
        """Their length."""
        return self.num_chunks * self.codec.record_bytes


@dataclass(frozen=True)
class Slice:
    """What one owner gets of the payload of a bucket, or sends as its answer: a run for each stack."""

    index: int
    stacks: tuple[Run, ...]
    payload_bytes: int


def deal(bucket: Bucket, num_owners: int) -> Dealt:
    """Give every chunk of a bucket an owner."""
    ends = [-(-owner * bucket.body_bytes // num_owners) for owner in range(num_owners + 1)]
    return [
        [range(_first_from(stack, start), _first_from(stack, stop)) for stack in bucket.stacks]
        for start, stop in pairwise(ends)
    ]


def _first_from(stack: Stack, place: int) -> int:
    """The first chunk of a stack whose record begins so far into the body of the payload, or further."""
    behind = place - (stack.offset_bytes - HEADER_BYTES)
    return min(stack.num_chunks, max(0, -(-behind // stack.codec.record_bytes)))


def slices_of(bucket: Bucket, dealt: Dealt) -> list[Slice]:
    """The forms of the slices for all owners."""
    all_runs = []
    for owned in dealt:
        runs, offset = [], HEADER_BYTES
        for stack, chunks in zip(bucket.stacks, owned, strict=True):
            runs.append(Run(stack.codec, len(chunks), offset))
            offset += runs[-1].num_bytes
        all_runs.append(tuple(runs))
    longest = max(sum(run.num_bytes for run in runs) for runs in all_runs)
    return [Slice(bucket.index, runs, payload_bytes(longest)) for runs in all_runs]


def split_(payload_B: Tensor, bucket: Bucket, dealt: Dealt, slices_RB: Tensor) -> None:
    """Write the records of a payload into the slices of their owners. Headers are left to the caller."""
    for slice_B, form, owned in zip(slices_RB, slices_of(bucket, dealt), dealt, strict=True):
        for stack, run, chunks in zip(bucket.stacks, form.stacks, owned, strict=True):
            if chunks:
                stack_records(slice_B, run).copy_(stack_records(payload_B, stack)[chunks.start : chunks.stop])


def join_(slices_RB: Tensor, bucket: Bucket, dealt: Dealt, payload_B: Tensor) -> None:
    """The inverse of `split_`."""
    for slice_B, form, owned in zip(slices_RB, slices_of(bucket, dealt), dealt, strict=True):
        for stack, run, chunks in zip(bucket.stacks, form.stacks, owned, strict=True):
            if chunks:
                stack_records(payload_B, stack)[chunks.start : chunks.stop].copy_(stack_records(slice_B, run))


def clear_(message_B: Tensor, form: Message) -> None:
    """Fill a message with records that send nothing."""
    for run in form.stacks:
        if run.num_chunks:
            empty_B = run.codec.empty_record_B.to(message_B.device)
            stack_records(message_B, run).copy_(empty_B.expand(run.num_chunks, -1))
