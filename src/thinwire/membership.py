"""Replicas that come and go: after a meeting, all that are there hold the same parameters and are at the same step.

When an exchange fails, some replicas may have all payloads of a step and have applied them while others have not. What a
replica holds is named by its *standing*: the meeting in whose company it took its last step, and how many steps it has
taken. The latest standing counts. Who lacks exactly the step that it had a part in gets the payloads of that step, which are
few bytes; everyone else whose standing is older, and every newcomer, gets parameters and state from one that is up to date.
"""

import logging
import struct
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from thinwire.attempt import Attempt
from thinwire.core.errors import (
    AgreementError,
    ExchangeError,
    ReceivedDifferentlyError,
    ThinwireError,
    TooFewReplicasError,
)
from thinwire.exchange.agreement import name_the_difference
from thinwire.exchange.plan import NOTE, digest_of
from thinwire.exchange.sharding import local_of
from thinwire.exchange.transport import Elastic, Transport, elastic, metered

if TYPE_CHECKING:
    from thinwire.optimizer import DeMo

_log = logging.getLogger("thinwire")
_MAGIC = b"TWST"
# magic, flags, meeting and number of the last step, meeting of the attempt under way, digest, what was received
_STANDING = struct.Struct("<4sI3q16s16s")
_NEWCOMER, _TORN, _HAS_PAYLOADS = 1, 2, 4
_PATIENCE_SECONDS, _PAUSE_SECONDS = 600.0, 0.2


class TornStateError(ThinwireError):
    """Nobody has the whole state that all were given a part of."""

    may_pass = True


@dataclass(frozen=True)
class Standing:
    """What a replica tells the others about itself when they meet."""

    is_newcomer: bool
    is_torn: bool
    """A copy of another's state broke off half-way: it holds nothing of use."""
    has_payloads: bool
    """It can give those of its last step to others."""
    meeting: int
    num_steps: int
    attempted: int
    """The meeting in whose company it attempted the next step; 0: it has not."""
    digest: bytes
    received: bytes
    """What it received at its last step, as a hash: of two that took the same step, each may have been sent other bytes."""

    @property
    def content(self) -> tuple[int, int]:
        """What names the parameters that it should hold."""
        return self.meeting, self.num_steps

    def can_follow(self, source: "Standing") -> bool:
        """Whether it lacks nothing but the payloads of the step that the source took last."""
        is_whole = not (self.is_newcomer or self.is_torn)
        return is_whole and source.has_payloads and (self.attempted, self.num_steps + 1) == source.content

    def pack(self) -> Tensor:
        """As bytes."""
        flags = _NEWCOMER * self.is_newcomer + _TORN * self.is_torn + _HAS_PAYLOADS * self.has_payloads
        raw = _STANDING.pack(_MAGIC, flags, *self.content, self.attempted, self.digest, self.received)
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8)

    @classmethod
    def unpack(cls, row_B: Tensor, replica: int) -> "Standing":
        """Of what a replica sent."""
        magic, flags, meeting, num_steps, attempted, digest, received = _STANDING.unpack(row_B.cpu().numpy().tobytes())
        if magic != _MAGIC or flags > 7 or min(meeting, num_steps, attempted) < 0:
            raise ExchangeError(f"replica {replica} told its standing in other bytes; does it run the same version?")
        said = (bool(flags & _NEWCOMER), bool(flags & _TORN), bool(flags & _HAS_PAYLOADS))
        return cls(*said, meeting, num_steps, attempted, digest, received)


def choose_source(standings: Sequence[Standing]) -> int:
    """The replica whose state counts: of those with the latest content what most of them have received, of these one that
    can give its last payloads to others, and of these the first."""
    whole = [number for number, one in enumerate(standings) if not one.is_torn]
    if not whole:
        raise TornStateError("every replica was in the middle of a copy; start again from a checkpoint")
    best = max((standings[number].content, not standings[number].is_newcomer) for number in whole)
    latest = [number for number in whole if (standings[number].content, not standings[number].is_newcomer) == best]
    counts = Counter(standings[number].received for number in latest)
    return max(latest, key=lambda one: (counts[standings[one].received], standings[one].has_payloads, -one))


class Fixed:
    """The membership of replicas that stay the same."""

    is_newcomer = calls_meeting = can_change = False
    num_copies = met_after = 0
    carried: Sequence[Tensor] = ()
    facts: Sequence[str] = ()

    def begin(self, attempt: Attempt) -> None:
        """Nobody will ask."""

    def end(self, attempt: Attempt | None) -> None:
        """Nobody will ask."""

    def meet_(self, optimizer: "DeMo", is_broken: bool) -> bool:
        """There is nobody else to meet."""
        return False


class Membership:
    """This replica among others that come and go."""

    can_change = True

    def __init__(self, transport: Elastic) -> None:
        self._transport = transport
        self.is_newcomer = True
        self.carried: Sequence[Tensor] = ()
        """What newcomers are given beside the optimizer's own."""
        self.facts: Sequence[str] = ()
        self.num_copies = 0
        """How often this replica was given the state of another."""
        self.met_after = 0
        """After how many steps of the optimizer the last meeting was."""
        self._meeting = 0
        self._attempt: Attempt | None = None
        self._attempted = 0
        self._applied: Attempt | None = None
        self._is_torn = False

    @property
    def calls_meeting(self) -> bool:
        """Whether this replica, being the first, thinks that it is time to let others in."""
        return self._transport.replica == 0 and self._transport.is_meeting_due

    def begin(self, attempt: Attempt) -> None:
        """Take note of an attempt at a step; if its exchange fails, it is left as it is until the next meeting."""
        self._attempt, self._attempted = attempt, self._transport.meeting

    def end(self, attempt: Attempt | None) -> None:
        """The attempt was applied, or taken back (None)."""
        if attempt is not None:
            self._applied, self._meeting = attempt, self._transport.meeting
        self._attempt, self._attempted = None, 0

    def meet_(self, optimizer: "DeMo", is_broken: bool) -> bool:
        """Meet those who are there, and become alike. ``is_broken``: the wires to the others cannot be used any more.

        Whether the step that was attempted has been taken meanwhile, here or by the others; False: all try it (again).
        """
        if not optimizer.island.is_one_rank:
            raise ThinwireError("sharded replicas cannot come and go; start again from a checkpoint")
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            optimizer._company.is_meeting_called = False
            try:
                if not self._transport.meet(is_broken, not self.is_newcomer):
                    return False
                return self._become_alike_(optimizer)
            except TooFewReplicasError:
                raise
            except ExchangeError as error:
                if time.monotonic() > deadline:
                    raise TooFewReplicasError(f"no meeting succeeded within {_PATIENCE_SECONDS:g} s: {error}") from error
                _log.warning("%s; the replicas meet again", error)
                is_broken = True
            time.sleep(_PAUSE_SECONDS)

    def _become_alike_(self, optimizer: "DeMo") -> bool:
        transport, description = self._transport, [*optimizer._description(is_of_step=False), *self._copied_lines(optimizer)]
        all_gather = metered(transport, optimizer.traffic.setup)
        num_steps = max(int(group["num_steps"]) for group in optimizer.param_groups)
        flags = (self.is_newcomer, self._is_torn or optimizer._company.is_torn, self._applied is not None)
        received = digest_of([optimizer._company.received])
        mine = Standing(*flags, self._meeting, num_steps, self._attempted, digest_of(description), received)
        standings = [Standing.unpack(row, number) for number, row in enumerate(all_gather(mine.pack(), "standings"))]
        source = choose_source(standings)
        best = standings[source]
        self._check_alike(standings, source, description, optimizer)
        stale = [r for r, one in enumerate(standings) if r != source and _is_stale(one, best)]
        followers = [r for r in stale if standings[r].can_follow(best)]
        copiers = [r for r in stale if r not in followers]
        _log.info("replicas %s meet after step %d; %s catch up, %s start from a copy",
                  transport.members, best.num_steps, followers, copiers)  # fmt: skip
        is_taken = self._settle_attempt_(optimizer, source, followers, copiers)
        if copiers:
            # After a restart of all, each has its own residual momentum from the checkpoint that all started from.
            is_restart = best.is_newcomer and best.num_steps > 0
            self._copy_(optimizer, source, copiers, is_restart and mine.content == best.content)
        if transport.replica in stale:
            self._meeting = best.meeting
        self.is_newcomer, self.met_after = False, best.num_steps
        if not all(one.is_newcomer for one in standings):
            optimizer._company.has_compared = True  # the others no longer tell of their gradients
        optimizer._local.rooms.clear()  # of as many replicas as there were
        if optimizer.plan.answers is not None:
            optimizer._rebuild()  # others own other chunks now
        optimizer._company.received = f"meeting {transport.meeting}"
        optimizer.drift.agreed_on = max(int(group["num_steps"]) for group in optimizer.param_groups)
        return is_taken

    def _copied(self, optimizer: "DeMo") -> list[tuple[str, Tensor]]:
        """All tensors that a newcomer gets, with names."""
        everything = (parameter for group in optimizer.param_groups for parameter in group["params"])
        frozen = [local_of(parameter).detach() for parameter in everything if not parameter.requires_grad]
        found = [*optimizer._local.replicated(), *(("frozen", tensor) for tensor in frozen)]
        return [*found, *(("carried", tensor) for tensor in self.carried)]

    def _copied_lines(self, optimizer: "DeMo") -> list[str]:
        """The same in words: were a tensor of another size on one replica, its copy would be filled in part."""
        rules = [f"group {number} update: {group['update']!r}" for number, group in enumerate(optimizer.param_groups)]
        copied = enumerate(self._copied(optimizer))
        return rules + [f"copied tensor {n}: shape {tuple(one.shape)}, {one.dtype}{NOTE}{name}" for n, (name, one) in copied]

    def _check_alike(
        self, standings: Sequence[Standing], source: int, description: Sequence[str], optimizer: "DeMo"
    ) -> None:
        """Those who train something else than the source must go; the others meet again without them."""
        others = [number for number, one in enumerate(standings) if one.digest != standings[source].digest]
        if not others:
            return
        try:
            name_the_difference(description, metered(self._transport, optimizer.traffic.setup))
        except AgreementError as error:
            if self._transport.replica in others:
                raise
            raise ExchangeError(f"replicas {others} train something else ({error})") from error

    def _settle_attempt_(self, optimizer: "DeMo", source: int, followers: list[int], copiers: list[int]) -> bool:
        """What becomes of the attempt whose exchange failed: whether its step is taken."""
        attempt, own = self._attempt, self._transport.replica
        if followers and own in (source, *followers):
            known = self._applied if own == source else attempt
            if known is None:
                raise ThinwireError("a replica lacks a step whose payloads nobody has; start again from a checkpoint")
            given = [payloads_RB.clone() for payloads_RB in known.payloads]
            for bucket, payloads_RB in enumerate(given):
                self._transport.copy_(payloads_RB, f"payloads of the last step, bucket {bucket}", source, followers)
            if own in followers:
                self._attempted = 0  # if it cannot follow now, it will not be able to later
                known.take_over_(given)
                optimizer._company.apply_late_(known, optimizer._decoding)
                optimizer._count(1)
                self.end(known)
                return True
        if attempt is None:
            return own in copiers
        if optimizer._company.is_torn:
            pass  # everyone had received it, and others may have applied it
        elif own in copiers:
            # The gradient stays in the momentum, and so does what was sent: nobody has received it.
            attempt.be_late().take_back_()
        else:
            attempt.take_back_()
        self.end(None)
        return own in copiers

    def _copy_(self, optimizer: "DeMo", source: int, copiers: list[int], keeps_residual: bool) -> None:
        """Parameters, the state of their rules, counts, and what is carried along. No residual momentum: it is each
        replica's own, and a newcomer has none."""
        own = self._transport.replica
        counts = torch.tensor([int(group["num_steps"]) for group in optimizer.param_groups], device="cpu")
        self._is_torn = own in copiers
        for number, (_, tensor) in enumerate([*self._copied(optimizer), ("counts", counts)]):
            self._transport.copy_(tensor, f"copy of replica {source}'s state, tensor {number}", source, copiers)
        if own not in copiers:
            return
        for group, count in zip(optimizer.param_groups, counts.tolist(), strict=True):
            group["num_steps"] = count
        self.num_copies += 1
        self._is_torn, self._applied, optimizer._company.is_torn = False, None, False
        if self.is_newcomer and not keeps_residual:
            optimizer._local.clear_residual_()


def _is_stale(one: Standing, best: Standing) -> bool:
    is_other = (one.content, one.received) != (best.content, best.received)
    return one.is_newcomer or one.is_torn or is_other


def membership_of(transport: Transport, delay: int) -> Membership | Fixed:
    """What kind of membership a transport has."""
    reach = elastic(transport)
    if reach is not None and delay:
        raise ValueError(f"delay={delay} does not go with a transport whose replicas come and go; leave it out")
    return Fixed() if reach is None else Membership(reach)


def is_meeting_due(optimizer: "DeMo") -> bool:
    """Whether replicas that come and go must meet before the next step."""
    return optimizer.membership.is_newcomer or optimizer._company.is_meeting_called


def try_step(optimizer: "DeMo") -> bool:
    """One step, together with all replicas. False: they had to meet or to be made alike first, and all try again."""
    words = ""
    try:
        try:
            optimizer.synchronize()
            if is_meeting_due(optimizer) and optimizer.membership.meet_(optimizer, is_broken=False):
                return True  # this replica was given another's parameters, and has no gradients of them
            optimizer._attempt_step()
            return True
        except ReceivedDifferentlyError as error:
            make_alike(optimizer, error)
            return False
    except ExchangeError as error:
        if not optimizer.membership.can_change or isinstance(error, TooFewReplicasError):
            raise
        words = str(error)
    # Not above, where the error holds on to connections that the others must see closed.
    _log.warning("%s; the replicas meet", words)
    return optimizer.membership.meet_(optimizer, is_broken=True)


def make_alike(optimizer: "DeMo", error: ReceivedDifferentlyError) -> None:
    """The last step was not the same for all replicas: all take over what most of them hold, where they can."""
    if optimizer._on_bad_payload == "raise" or optimizer._delay.is_on or not optimizer.island.is_one_rank:
        raise error
    _log.warning("%s; what most of them hold is copied", error)
    optimizer._company.received = "repaired"
    optimizer.check_drift("repair")
