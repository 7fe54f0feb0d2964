"""Payloads cut for their owners: in an owner exchange each replica owns a run of the chunks of every stack.

A *slice* holds, for each stack of a bucket, as many records as an owner has chunks at most, so that all slices are equally
long. Where an owner has fewer, empty records fill it up. Slices of payloads go to their owners; an owner's answer is cut
alike, and all answers together are one payload again. Letters: R replicas, which are owners, C chunks, B bytes.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from thinwire.exchange.plan import Bucket, stack_records
from thinwire.wire.codec import ChunkCodec
from thinwire.wire.payload import HEADER_BYTES, payload_bytes


@dataclass(frozen=True)
class Run:
    """One stack's records in a slice."""

    codec: ChunkCodec
    num_chunks: int
    offset_bytes: int

    @cached_property
    def num_bytes(self) -> int:
        """Their length."""
        return self.num_chunks * self.codec.record_bytes


@dataclass(frozen=True)
class Slice:
    """What one owner gets of the payload of a bucket, or sends as its answer."""

    index: int
    stacks: tuple[Run, ...]

    @cached_property
    def payload_bytes(self) -> int:
        """Header, records and padding."""
        return payload_bytes(sum(run.num_bytes for run in self.stacks))


def slice_of(bucket: Bucket, num_owners: int) -> Slice:
    """The form of all slices of a bucket."""
    runs, offset = [], HEADER_BYTES
    for stack in bucket.stacks:
        run = Run(stack.codec, chunks_per_owner(stack.num_chunks, num_owners), offset)
        offset += run.num_bytes
        runs.append(run)
    return Slice(bucket.index, tuple(runs))


def chunks_per_owner(num_chunks: int, num_owners: int) -> int:
    """As many as an owner has at most; the last owners may have fewer, or none."""
    return -(-num_chunks // num_owners)


def owned_chunks(num_chunks: int, owner: int, num_owners: int) -> range:
    """Which chunks of a stack an owner has."""
    most = chunks_per_owner(num_chunks, num_owners)
    return range(min(num_chunks, owner * most), min(num_chunks, (owner + 1) * most))


def split_(payload_B: Tensor, bucket: Bucket, slices_RB: Tensor) -> None:
    """Write the records of a payload into the slices of their owners. Headers are left to the caller."""
    for stack, run in zip(bucket.stacks, slice_of(bucket, len(slices_RB)).stacks, strict=True):
        runs_RCB = stack_records(slices_RB, run)
        records_CB = stack_records(payload_B, stack)
        num_missing = len(slices_RB) * run.num_chunks - stack.num_chunks
        if num_missing:
            filling_CB = empty_records(stack.codec, num_missing, payload_B)
            records_CB = torch.cat([records_CB, filling_CB])
        runs_RCB.copy_(records_CB.view(runs_RCB.shape))


def join_(slices_RB: Tensor, bucket: Bucket, payload_B: Tensor) -> None:
    """The inverse of `split_`."""
    for stack, run in zip(bucket.stacks, slice_of(bucket, len(slices_RB)).stacks, strict=True):
        records_CB = stack_records(slices_RB, run).reshape(-1, stack.codec.record_bytes)
        stack_records(payload_B, stack).copy_(records_CB[: stack.num_chunks])


def clear_(slice_B: Tensor, form: Slice) -> None:
    """Fill a slice with empty records."""
    for run in form.stacks:
        stack_records(slice_B, run).copy_(empty_records(run.codec, 1, slice_B).expand(run.num_chunks, -1))


def empty_records(codec: ChunkCodec, number: int, like: Tensor) -> Tensor:
    """Records (C, B) of chunks of which nothing is sent."""
    return codec.empty_record_B.to(like.device).expand(number, -1)
