"""How the payload of a bucket gets from each replica to all: `Gather` or `Owners`, one contract.

`Gather` brings everyone's payload to everyone. With `Owners` each replica owns a part of the chunks: it gets everyone's
records of these, combines them, and sends what is strongest to all, so that what a replica receives hardly grows with their
number. Either way there are R messages in the end that all replicas have alike, one from each: what is decided, is decided
from their headers, and so in the same way everywhere.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from thinwire.core.combine import Decoding
from thinwire.core.errors import ExchangeError, PayloadError, ThinwireError
from thinwire.exchange.plan import Bucket, ExchangePlan, Message
from thinwire.exchange.slices import Slice, clear_, deal, join_, slices_of, split_
from thinwire.exchange.traffic import Traffic
from thinwire.exchange.transport import Transport, bytes_on_wire
from thinwire.local_step import Encoding, LocalStep
from thinwire.ownership import OwnedStack, places
from thinwire.sealing import empty_findings, inspect_, open_, read_findings, seal_
from thinwire.stack_step import GroupStep
from thinwire.wire.payload import HEADER_BYTES, Header


class Route(Protocol):
    """The way of all buckets of one plan."""

    @property
    def needs_host(self) -> bool:
        """Whether the host must see what has come before a step can be applied."""
        ...

    @property
    def buckets(self) -> Sequence[Bucket]:
        """Those of the plan."""
        ...

    def forms(self, bucket: Bucket, room: Encoding) -> Sequence[Message]:
        """Those of the rows of `Encoding.payloads_RB`."""
        ...

    def room(self, bucket: Bucket) -> Encoding:
        """Room for all that is exchanged of a bucket."""
        ...

    def start_(self, bucket: Bucket, room: Encoding, header: Header) -> None:
        """Begin to send the payload that is in the room, but for its checksum."""
        ...

    def turn_(self, bucket: Bucket, room: Encoding, header: Header, groups: Sequence[GroupStep]) -> None:
        """Do what is to be done half-way, with this replica's header, if that has not been done: the same on all replicas
        before the first wait for what all have alike. A replica that gives up needs no groups."""
        ...

    def apply_(
        self, bucket: Bucket, groups: Sequence[GroupStep], room: Encoding, refused: Collection[int], decoding: Decoding
    ) -> None:
        """Change the parameters by what all have sent but ``refused``."""
        ...

    def leave_out_(self, bucket: Bucket, room: Encoding) -> None:
        """The others had to leave this replica's message out, which they did not get as it was sent."""
        ...

    def take_back_(self, bucket: Bucket) -> None:
        """Nothing that was sent counts. What the payload took from the momentum is left to the caller."""
        ...


class Gather:
    """Everyone's payload to everyone."""

    needs_host = False

    def __init__(self, plan: ExchangePlan, local: LocalStep, transport: Transport, traffic: Traffic) -> None:
        self.buckets: Sequence[Bucket] = plan.buckets
        self._local, self._transport, self._traffic = local, transport, traffic

    def forms(self, bucket: Bucket, room: Encoding) -> Sequence[Message]:
        """See `Route`."""
        return [bucket] * len(room.payloads_RB)  # by now there may be other replicas

    def room(self, bucket: Bucket) -> Encoding:
        """See `Route`."""
        return self._local.empty(bucket, self._transport.replica, self._transport.num_replicas)

    def start_(self, bucket: Bucket, room: Encoding, header: Header) -> None:
        """See `Route`."""
        seal_(room.payload_B, self._local.is_fused)
        self._traffic.add(bytes_on_wire(self._transport, bucket.payload_bytes), self._transport.num_replicas)
        room.pending.append(self._transport.start_all_gather_(room.payloads_RB, name_of(header)))

    def turn_(self, bucket: Bucket, room: Encoding, header: Header, groups: Sequence[GroupStep]) -> None:
        """See `Route`."""

    def apply_(
        self, bucket: Bucket, groups: Sequence[GroupStep], room: Encoding, refused: Collection[int], decoding: Decoding
    ) -> None:
        """See `Route`."""
        payloads_RB = room.payloads_RB
        if refused:
            payloads_RB = payloads_RB[[row for row in range(len(payloads_RB)) if row not in refused]]
        self._local.apply_(bucket, groups, payloads_RB, decoding)

    def leave_out_(self, bucket: Bucket, room: Encoding) -> None:
        """See `Route`."""
        self._local.keep_units(room)
        self._local.give_back_(room)

    def take_back_(self, bucket: Bucket) -> None:
        """See `Route`."""


@dataclass(kw_only=True)
class OwnerRoom(Encoding):
    """``payloads_RB`` are everyone's answers. ``own_B`` is this replica's payload, ``sent_RB`` its slices for all owners,
    ``received_RB`` everyone's slices for this one, and ``joined_B`` all answers as one payload."""

    own_B: Tensor
    sent_RB: Tensor
    received_RB: Tensor
    joined_B: Tensor
    has_answered: bool = False

    @property
    def payload_B(self) -> Tensor:
        """The own one."""
        return self.own_B


class Owners:
    """Everyone's slices to their owners, and the owners' answers to everyone. ``answering`` applies the answers. ``drops``
    says whether bad slices are left out; else their owner gives the step up."""

    needs_host = True

    def __init__(
        self,
        plan: ExchangePlan,
        local: LocalStep,
        answering: LocalStep,
        transport: Transport,
        traffic: Traffic,
        decoding: Decoding,
        drops: bool,
    ) -> None:
        assert plan.answers is not None
        self.buckets: Sequence[Bucket] = plan.buckets
        self._answers = plan.answers.buckets
        self._local, self._answering = local, answering
        self._transport, self._traffic, self._decoding, self._drops = transport, traffic, decoding, drops
        # Where replicas come and go, the transport's numbers change before the last attempt is settled.
        self._owner, self._num_owners = transport.replica, transport.num_replicas
        self._dealt = [deal(bucket, self._num_owners) for bucket in plan.buckets]
        self._slices = [slices_of(*pair) for pair in zip(plan.buckets, self._dealt, strict=True)]
        self._forms = [slices_of(*pair) for pair in zip(self._answers, self._dealt, strict=True)]
        self._owned = [self._owned_stacks(bucket) for bucket in plan.buckets]

    def _owned_stacks(self, bucket: Bucket) -> list[OwnedStack]:
        chunks = self._dealt[bucket.index][self._owner]
        runs, answers = self._slices[bucket.index][self._owner].stacks, self._forms[bucket.index][self._owner].stacks
        found = []
        for stack, mine, run, answer in zip(bucket.stacks, chunks, runs, answers, strict=True):
            residuals = [self._local.tensors[place.tensor].owned_CE for place in places(stack, mine)]
            found.append(OwnedStack(run, answer, residuals))
        return found

    def forms(self, bucket: Bucket, room: Encoding) -> Sequence[Slice]:
        """See `Route`."""
        return self._forms[bucket.index]

    def room(self, bucket: Bucket) -> OwnerRoom:
        """See `Route`."""
        own_B = self._local.empty(bucket).payload_B
        answers_RB = own_B.new_zeros(self._num_owners, self._forms[bucket.index][0].payload_bytes)
        slices_RB = own_B.new_zeros(self._num_owners, self._slices[bucket.index][0].payload_bytes)
        findings_RW = empty_findings(bucket, self._num_owners, own_B.device)
        return OwnerRoom(
            answers_RB,
            self._owner,
            findings_RW,
            findings_RW,
            own_B=own_B,
            sent_RB=slices_RB,
            received_RB=slices_RB.clone(),
            joined_B=own_B.new_zeros(self._answers[bucket.index].payload_bytes),
        )

    def start_(self, bucket: Bucket, room: Encoding, header: Header) -> None:
        """See `Route`."""
        assert isinstance(room, OwnerRoom)
        room.has_answered = False
        split_(room.own_B, bucket, self._dealt[bucket.index], room.sent_RB)
        room.sent_RB[:, :HEADER_BYTES] = room.own_B[:HEADER_BYTES]
        seal_(room.sent_RB, fused=False)
        self._traffic.add_rows(bytes_on_wire(self._transport, room.sent_RB.shape[1]), self._num_owners)
        room.pending.append(self._transport.start_all_to_all_(room.sent_RB, room.received_RB, name_of(header)))

    def turn_(self, bucket: Bucket, room: Encoding, header: Header, groups: Sequence[GroupStep]) -> None:
        """Combine what has come for this owner, and answer. See `Route`."""
        assert isinstance(room, OwnerRoom)
        if room.has_answered:
            return
        with self._traffic.waiting():
            room.wait()
        with self._traffic.applying():
            answer_B = room.payloads_RB[room.replica]
            header, senders = self._judge(bucket, room, header)
            open_(answer_B, header)
            if not header.gave_up and not header.trouble.problem:
                clear_(answer_B, self._forms[bucket.index][self._owner])
                for stack, owned in zip(bucket.stacks, self._owned[bucket.index], strict=True):
                    owned.answer_(room.received_RB[senders], self._decoding, groups[stack.group].decay, answer_B)
            seal_(answer_B, fused=False)
        self._traffic.add(bytes_on_wire(self._transport, len(answer_B)), self._num_owners)
        room.pending.append(self._transport.start_all_gather_(room.payloads_RB, f"{name_of(header)}, answers"))
        room.has_answered = True

    def _judge(self, bucket: Bucket, room: OwnerRoom, header: Header) -> tuple[Header, list[int]]:
        """This replica's header for its answer, and whose slices count: those of all that take the step with it. If someone
        does not, all will know it from the answers."""
        if header.gave_up:
            return header, []
        forms, senders = [self._slices[bucket.index][self._owner]] * self._num_owners, []
        findings_RW = empty_findings(bucket, self._num_owners, room.received_RB.device)
        inspect_(forms, room.received_RB, findings_RW, self._local.is_fused)
        for sender, found in enumerate(read_findings(forms, findings_RW.cpu(), header)):
            if isinstance(found, PayloadError):
                room.left_out[sender] = found
            elif sender == self._owner:
                header = replace(header, trouble=found.trouble)  # the kernels may have found it while they encoded
                senders.append(sender)
            elif found.digest == header.digest and not found.gave_up and not found.trouble.problem:
                senders.append(sender)
        room.failure = self._failure(room, header)
        return replace(header, gave_up=room.failure is not None), senders

    def _failure(self, room: OwnerRoom, header: Header) -> ThinwireError | None:
        """Why this replica cannot answer for its chunks, if it cannot."""
        first = next(iter(room.left_out.values()), None)
        if first is None or (self._drops and len(room.left_out) < self._num_owners - 1):
            return None
        if not self._drops:
            return first
        return ExchangeError(
            f"step {header.step}: no slice of another replica is sound; is this one's own network at fault? ({first})"
        )

    def apply_(
        self, bucket: Bucket, groups: Sequence[GroupStep], room: Encoding, refused: Collection[int], decoding: Decoding
    ) -> None:
        """See `Route`. What was sent to an owner whose answer does not count returns to the momentum."""
        assert isinstance(room, OwnerRoom)
        for owner in refused:
            clear_(room.payloads_RB[owner], self._forms[bucket.index][owner])
        answers = self._answers[bucket.index]
        join_(room.payloads_RB, answers, self._dealt[bucket.index], room.joined_B)
        if refused:
            self._return_slices_(bucket, room, refused)
        self._answering.apply_(answers, groups, room.joined_B[None], for_answers(decoding))
        for owned in self._owned[bucket.index]:
            owned.commit_()
        for stack in bucket.stacks:
            self._local.steps[stack].forget()  # only `answering` has applied something

    def _return_slices_(self, bucket: Bucket, room: OwnerRoom, owners: Collection[int]) -> None:
        for owner, slice_B in enumerate(room.sent_RB):
            if owner not in owners:
                clear_(slice_B, self._slices[bucket.index][owner])
        join_(room.sent_RB, bucket, self._dealt[bucket.index], room.own_B)
        self._local.keep_units(room)
        self._local.give_back_(room)

    def leave_out_(self, bucket: Bucket, room: Encoding) -> None:
        """See `Route`."""
        self.take_back_(bucket)

    def take_back_(self, bucket: Bucket) -> None:
        """See `Route`."""
        for owned in self._owned[bucket.index]:
            owned.drop()


def make_route(
    plan: ExchangePlan,
    local: LocalStep,
    transport: Transport,
    traffic: Traffic,
    backend: str,
    decoding: Decoding,
    drops: bool,
) -> Route:
    """The one that the plan asks for; alone, there is nobody else to own anything."""
    if plan.answers is None or transport.num_replicas == 1:
        return Gather(plan, local, transport, traffic)
    answering = LocalStep(plan.answers, local.tensors, backend, for_answers(decoding), local.island)
    return Owners(plan, local, answering, transport, traffic, decoding, drops)


def for_answers(decoding: Decoding) -> Decoding:
    """How one message that is combined already becomes a direction."""
    return Decoding(is_exact=decoding.is_exact)


def name_of(header: Header) -> str:
    """Of an exchange, in errors."""
    return f"exchange of step {header.step}, bucket {header.bucket}"
