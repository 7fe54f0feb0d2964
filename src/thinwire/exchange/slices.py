"""Payloads cut for their owners: in an owner exchange each replica owns some consecutive chunks of every stack.

A *slice* holds the records of one owner's chunks. Chunks are dealt out so that owners have about equally many bytes. Slices
are as long as the longest, with zeros at the end. Slices of payloads go to their owners; an owner's answer is cut alike, and
all answers together are one payload again. Letters: R replicas, which are owners, C chunks, B bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from thinwire.exchange.plan import Bucket, Message, stack_records
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
    """Give every chunk of a bucket an owner: of each stack some consecutive ones, those with the longest records first."""
    loads = [0] * num_owners
    dealt: list[list[range]] = [[range(0)] * len(bucket.stacks) for _ in range(num_owners)]
    order = sorted(range(len(bucket.stacks)), key=lambda place: -bucket.stacks[place].codec.record_bytes)
    for place in order:
        stack, first = bucket.stacks[place], 0
        for owner, count in enumerate(_fill_(loads, stack.num_chunks, stack.codec.record_bytes)):
            dealt[owner][place] = range(first, first + count)
            first += count
    return dealt


def _fill_(loads: list[int], number: int, size: int) -> list[int]:
    """How many of so many records, equally long, each owner gets, so that loads become as equal as can be."""

    def counts(level: int) -> list[int]:
        return [max(0, level - load) // size for load in loads]

    low, high = min(loads), max(loads) + size * (number // len(loads) + 1)
    while high - low > 1:  # the highest level at which there are not too few
        middle = (low + high) // 2
        low, high = (middle, high) if sum(counts(middle)) <= number else (low, middle)
    found = counts(low)
    emptiest = sorted(range(len(loads)), key=lambda owner: loads[owner] + found[owner] * size)
    for owner in emptiest[: number - sum(found)]:
        found[owner] += 1
    for owner, count in enumerate(found):
        loads[owner] += count * size
    return found


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
