"""The exchange plan: which tensor's chunks lie where in which payload. Pure, frozen, the same on every replica.

A *bucket* is one payload and so one collective. Inside it, a *stack* holds the records of all chunks of one parameter
group that are cut and coded alike; an *entry* is one tensor's place in a stack. Devices are not part of the plan:
replicas on different hardware share it.
"""

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from torch import Tensor

from thinwire.core.layout import ChunkLayout, Part, plan_layout
from thinwire.wire.codec import ChunkCodec
from thinwire.wire.payload import DIGEST_BYTES, HEADER_BYTES, payload_bytes
from thinwire.wire.values import VALUE_CODECS

# Dense tensors need a codec in which 0 is 0: with signs alone a bias that got no gradient would still vote.
DENSE_VALUES = "int8"
# What owners answer with where replicas send votes, and how many times as many coefficients as a replica sends: with fewer,
# training loses (docs/many-replicas.md).
ANSWER_VALUES = "int4"
OWNER_TIMES = 8
NOTE = " # "
_NOTHING = "nothing"


class Records(Protocol):
    """A run of records in a message."""

    @property
    def codec(self) -> ChunkCodec:
        """How each is written."""
        ...

    @property
    def num_chunks(self) -> int:
        """How many there are."""
        ...

    @property
    def offset_bytes(self) -> int:
        """Where they begin."""
        ...

    @property
    def num_bytes(self) -> int:
        """How long they are."""
        ...


class Message(Protocol):
    """A header and runs of records: a bucket's payload, or a slice of it."""

    @property
    def index(self) -> int:
        """Of the bucket."""
        ...

    @property
    def stacks(self) -> Sequence[Records]:
        """The runs."""
        ...

    @property
    def payload_bytes(self) -> int:
        """Header, records and padding."""
        ...


def stack_records(messages: Tensor, records: Records) -> Tensor:
    """A run of records as (..., C, record_bytes), a view of one message (B) or of everyone's (R, B)."""
    body = messages[..., records.offset_bytes : records.offset_bytes + records.num_bytes]
    return body.view(*messages.shape[:-1], records.num_chunks, records.codec.record_bytes)


@dataclass(frozen=True)
class Coding:
    """The settings of a parameter group that decide how its tensors are cut and written."""

    chunk: int
    topk: int
    values: str
    layout: str
    dense_below: int


@dataclass(frozen=True)
class TensorSpec:
    """One parameter as all replicas must have it. ``name`` is for messages. Where a replica is sharded, ``shape`` is this
    rank's part and ``part`` says of what."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    group: int
    part: Part | None = None

    @property
    def fact(self) -> str:
        """All of it in words."""
        of = "" if self.part is None else f" at {self.part.offset} of {self.part.whole_shape}"
        return f"shape {self.shape}{of}, {self.dtype}, group {self.group}{NOTE}{self.name}"


@dataclass(frozen=True)
class Entry:
    """One tensor in a stack: its records are [first_chunk, first_chunk + layout.num_chunks)."""

    tensor: int
    layout: ChunkLayout
    first_chunk: int


@dataclass(frozen=True)
class Stack:
    """Chunks of one group with one cut and one codec. ``share`` is the part of a kept coefficient that is sent."""

    group: int
    codec: ChunkCodec
    share: float
    entries: tuple[Entry, ...]
    offset_bytes: int

    @cached_property
    def num_chunks(self) -> int:
        """Records in the stack."""
        return sum(entry.layout.num_chunks for entry in self.entries)

    @cached_property
    def num_bytes(self) -> int:
        """Length of the stack in the payload."""
        return self.num_chunks * self.codec.record_bytes


@dataclass(frozen=True)
class Bucket:
    """One payload. ``members`` are the tensors whose gradients must be there before it can be made: those that it carries
    chunks of, and those of which other ranks of an island do."""

    index: int
    stacks: tuple[Stack, ...]
    members: tuple[int, ...]

    @cached_property
    def body_bytes(self) -> int:
        """All records."""
        return sum(stack.num_bytes for stack in self.stacks)

    @cached_property
    def payload_bytes(self) -> int:
        """Header, records and padding."""
        return payload_bytes(self.body_bytes)

    @property
    def tensors(self) -> Iterator[int]:
        """The tensors whose chunks this bucket carries."""
        return (entry.tensor for stack in self.stacks for entry in stack.entries)


@dataclass(frozen=True)
class ExchangePlan:
    """What every replica sends, for tensors and group settings that all of them share."""

    tensors: tuple[TensorSpec, ...]
    codings: tuple[Coding, ...]
    buckets: tuple[Bucket, ...]
    answers: "ExchangePlan | None" = None
    """In an owner exchange, what all owners together answer: the same stacks, with as many coefficients as owners keep."""

    @cached_property
    def payload_bytes(self) -> int:
        """Bytes one replica sends per step, headers included."""
        return sum(bucket.payload_bytes for bucket in self.buckets)

    @cached_property
    def num_coefficients(self) -> int:
        """Coefficients one replica sends per step."""
        return sum(stack.num_chunks * stack.codec.num_kept for bucket in self.buckets for stack in bucket.stacks)

    def layout_of(self, tensor: int) -> ChunkLayout:
        """The cut of one tensor."""
        return _layout(self.tensors[tensor], self.codings)

    @cached_property
    def description(self) -> tuple[str, ...]:
        """The plan in words, a line per fact, so that two replicas can find the first that differs.

        What follows a `NOTE` in a line helps the reader and is not compared.
        """
        lines = [f"number of tensors: {len(self.tensors)}"]
        for index, spec in enumerate(self.tensors):
            lines.append(f"tensor {index}: {spec.fact}")
        for index, coding in enumerate(self.codings):
            lines.extend(f"group {index} {name}: {value!r}" for name, value in vars(coding).items())
        lines.extend(f"bucket {bucket.index}: {bucket.payload_bytes} bytes" for bucket in self.buckets)
        if self.answers is not None:
            topk = [coding.topk for coding in self.answers.codings]
            lines.append(f"exchange: owner, which keeps {topk} coefficients of each group's chunks")
        return tuple(lines)

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that differ between different plans."""
        return digest_of(self.description)


def digest_of(lines: Sequence[str]) -> bytes:
    """A short hash of a description, notes left out."""
    return hashlib.sha256("\n".join(map(without_note, lines)).encode()).digest()[:DIGEST_BYTES]


def without_note(line: str) -> str:
    """The part of a line that is compared."""
    return line.split(NOTE, 1)[0]


def first_difference(mine: Sequence[str], theirs: Sequence[str]) -> tuple[str, str] | None:
    """The first pair of lines that differ, "nothing" where only one description has that fact; None if there is none."""
    for here, there in itertools.zip_longest(mine, theirs, fillvalue=_NOTHING):
        if without_note(here) != without_note(there):
            is_only_here = here != _NOTHING and _fact_of(here) not in map(_fact_of, theirs)
            is_only_there = there != _NOTHING and _fact_of(there) not in map(_fact_of, mine)
            if is_only_here != is_only_there:  # else the other happens to have the next fact at this place
                return (here, _NOTHING) if is_only_here else (_NOTHING, there)
            return here, there
    return None


def _fact_of(line: str) -> str:
    return line.split(": ", 1)[0]


def with_owners(plan: ExchangePlan, owner_topk: int | None) -> ExchangePlan:
    """The plan for an owner exchange, where owners keep ``owner_topk`` coefficients per full chunk, by default eight times a
    sender's."""
    codings = tuple(replace(one, topk=owner_topk or OWNER_TIMES * one.topk) for one in plan.codings)
    buckets = tuple(_with_more_kept(bucket, codings) for bucket in plan.buckets)
    return replace(plan, answers=ExchangePlan(plan.tensors, codings, buckets))


def _with_more_kept(bucket: Bucket, codings: Sequence[Coding]) -> Bucket:
    stacks, offset = [], HEADER_BYTES
    for stack in bucket.stacks:
        coding, layout = codings[stack.group], stack.entries[0].layout
        kept, sent = layout.kept(coding.topk, coding.chunk, coding.layout), stack.codec.value_name
        # A mean of votes is not a vote: with one bit for each, what is left of it would be amplified step by step.
        value_name = sent if VALUE_CODECS[sent].has_zero else ANSWER_VALUES
        codec = replace(stack.codec, num_kept=kept, value_name=value_name)
        stacks.append(replace(stack, codec=codec, offset_bytes=offset))
        offset += stacks[-1].num_bytes
    return replace(bucket, stacks=tuple(stacks))


def make_plan(tensors: Sequence[TensorSpec], codings: Sequence[Coding], num_buckets: int = 1) -> ExchangePlan:
    """Lay out payloads, in the buckets of `split_into_buckets`."""
    return lay_out(tensors, codings, split_into_buckets(tensors, codings, num_buckets))


def split_into_buckets(tensors: Sequence[TensorSpec], codings: Sequence[Coding], num_buckets: int) -> list[list[int]]:
    """Which tensors share a bucket. They hold about equally many elements and follow backward: the last tensors come first.

    Dense tensors wait for the last bucket: norms and biases of all layers often form a group of their own, so that the first
    bucket would have them all and hold the others up until backward ends.
    """
    order = list(reversed(range(len(tensors))))
    if num_buckets > 1:
        order.sort(key=lambda index: _layout(tensors[index], codings).dense)
    return _split_evenly(order, tensors, num_buckets)


def lay_out(
    tensors: Sequence[TensorSpec], codings: Sequence[Coding], buckets: Sequence[Sequence[int]], shares: bool = False
) -> ExchangePlan:
    """Lay out payloads for tensors that were split into buckets. ``shares``: a tensor without elements here has some on
    another rank of the island, and the bucket must wait for its gradient all the same."""
    made = []
    for index, members in enumerate(buckets):
        stacks = _stacks(members, tensors, codings)
        held = {entry.tensor for stack in stacks for entry in stack.entries}
        made.append(Bucket(index, stacks, tuple(member for member in members if shares or member in held)))
    return ExchangePlan(tuple(tensors), tuple(codings), tuple(made))


def _split_evenly(order: list[int], tensors: Sequence[TensorSpec], num_parts: int) -> list[list[int]]:
    weights = [max(1, _numel(tensors[index])) for index in order]
    total, seen = sum(weights), 0
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    for index, weight in zip(order, weights, strict=True):
        parts[min(num_parts - 1, seen * num_parts // total)].append(index)
        seen += weight
    return [part for part in parts if part]


def _stacks(members: Sequence[int], tensors: Sequence[TensorSpec], codings: Sequence[Coding]) -> tuple[Stack, ...]:
    alike: dict[tuple[int, int, int, bool], list[tuple[int, ChunkLayout]]] = {}
    for index in members:
        layout = _layout(tensors[index], codings)
        if layout.num_chunks:
            key = (tensors[index].group, layout.row_edge, layout.col_edge, layout.dense)
            alike.setdefault(key, []).append((index, layout))
    stacks, offset = [], HEADER_BYTES
    for (group, _, _, dense), cuts in alike.items():
        coding, layout = codings[group], cuts[0][1]
        kept = layout.kept(coding.topk, coding.chunk, coding.layout)
        codec = ChunkCodec(layout.num_elements, kept, _value_name(coding, dense))
        share = _dense_share(coding) if dense else 1.0
        stack = Stack(group, codec, share, _entries(cuts), offset)
        offset += stack.num_bytes
        stacks.append(stack)
    return tuple(stacks)


def _entries(cuts: list[tuple[int, ChunkLayout]]) -> tuple[Entry, ...]:
    entries, first = [], 0
    for index, layout in cuts:
        entries.append(Entry(index, layout, first))
        first += layout.num_chunks
    return tuple(entries)


def _value_name(coding: Coding, dense: bool) -> str:
    return DENSE_VALUES if dense and not VALUE_CODECS[coding.values].has_zero else coding.values


def _dense_share(coding: Coding) -> float:
    """Each step a dense tensor sends the share of its momentum that coded tensors send of their coefficients.

    Sending all of it would leave no momentum behind, only this step's gradient.
    """
    return min(1.0, coding.topk / coding.chunk**2)


def _layout(spec: TensorSpec, codings: Sequence[Coding]) -> ChunkLayout:
    coding = codings[spec.group]
    return plan_layout(spec.shape, coding.chunk, coding.dense_below, coding.layout, spec.part)


def _numel(spec: TensorSpec) -> int:
    numel = 1
    for size in spec.shape:
        numel *= size
    return numel
