"""The replicas that train together, as one of them knows them: how they are reached, and what all have agreed on."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor

from thinwire.attempt import Attempt, announce_plan, give_up_
from thinwire.core.combine import Decoding
from thinwire.core.errors import ThinwireError, check_float
from thinwire.exchange.agreement import AllGather, hold_roll_call
from thinwire.exchange.apart import group_apart, says_apart
from thinwire.exchange.collective import is_distributed
from thinwire.exchange.dealing import Dealing
from thinwire.exchange.islands import divide
from thinwire.exchange.plan import ExchangePlan, digest_of
from thinwire.exchange.sharding import Island, find_island
from thinwire.exchange.signed import choose_transport
from thinwire.exchange.traffic import Traffic
from thinwire.exchange.transport import Transport, metered
from thinwire.gradients import check_own_gradients
from thinwire.routes import Route
from thinwire.shared_island import SharedIsland
from thinwire.slabs import LocalTensor
from thinwire.wire.payload import Header

_log = logging.getLogger("thinwire")


class Company:
    """``process_group`` or ``transport`` leads to the others; with neither, the default group does, if there is one.
    ``secret`` is the key that all have. ``islands`` says which ranks are one replica together. ``keeps_apart``: exchanges
    must not meet those that the caller makes over the default group."""

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        transport: Transport | None,
        timeout_seconds: float,
        secret: bytes | None,
        islands: object = None,
        keeps_apart: bool = False,
    ) -> None:
        self._timeout_seconds = check_float("timeout_seconds", timeout_seconds, 1e-3)
        self.traffic = Traffic()
        self.is_torn = False
        """Whether an error has ended an update halfway."""
        ways = divide(islands, transport, process_group, timeout_seconds, secret, self.traffic.setup)
        self.transport, self.inside = ways
        is_apart = keeps_apart and islands is None and transport is None and process_group is None and not self.is_alone
        if is_apart:
            group = group_apart(metered(self.transport, self.traffic.setup), timeout_seconds)
            self.transport = choose_transport(None, group, timeout_seconds, secret, self.traffic.setup)
        # Ranks with islands compare those first: who has none must say so in the same place.
        self._says_first = says_apart(is_apart) if islands is None else []
        self.dealing = Dealing(self.inside.rank, self.inside.num_ranks)
        self.refused: Counter[int] = Counter()
        self.received = ""
        """What all must have received at the last step, as a hash."""
        self.is_meeting_called = False
        """Whether a replica wanted, at the last step, that all meet."""
        self._waits_for_group = transport is None and process_group is None and not is_distributed()
        self.has_compared = False
        self._agreed_plan: ExchangePlan
        self._agreed_route: Route

    @contextmanager
    def torn_on_error(self) -> Iterator[None]:
        """What fails inside leaves parameters of which some have taken the step and others not."""
        before, self.is_torn = self.is_torn, True
        yield
        self.is_torn = before  # a later step does not mend an earlier one

    def apply_late_(self, attempt: Attempt, decoding: Decoding) -> None:
        """See `Attempt.apply_late_`."""
        with self.torn_on_error():
            attempt.apply_late_(decoding)

    def check_whole(self) -> None:
        """Raise where such parameters would be trained or saved."""
        if self.is_torn:
            raise ThinwireError(
                "an error has ended the last step halfway, so that some parameters have taken it and others not; load a "
                "checkpoint of model and optimizer, and go on from there"
            )

    @property
    def is_alone(self) -> bool:
        """Whether there is only this replica."""
        return self.transport.num_replicas == 1

    @property
    def compares(self) -> bool:
        """Whether to look if all replicas have the same gradients, which has not been done yet."""
        return not self.is_alone and not self.has_compared

    @property
    def all_gather(self) -> AllGather:
        """Everyone's messages, counted as traffic of the step at hand."""
        return metered(self.transport, self.traffic)

    def header(self, description: Sequence[str], step: int, calls_meeting: bool) -> Header:
        """This replica's for a step. Alone, nobody compares digests."""
        digest = digest_of(() if self.is_alone else description)
        return Header(digest, step, self.transport.replica, 0, calls_meeting=calls_meeting)

    def island_of(self, plan: ExchangePlan, tensors: Sequence[LocalTensor]) -> Island:
        """The ranks that are one replica together, this one among them."""
        if self.dealing.is_on:
            return SharedIsland(self.inside, plan, tensors, self.traffic)
        named = zip((spec.name for spec in plan.tensors), (local.source for local in tensors), strict=True)
        return find_island(named, getattr(self.transport, "ranks", ()), self._timeout_seconds)

    def agree(self, plan: ExchangePlan, route: Route, description: Sequence[str]) -> None:
        """Compare descriptions with all replicas; raises on all of them if they differ."""
        if not self.is_alone:
            hold_roll_call([*self._says_first, *description], metered(self.transport, self.traffic.setup))
        self._agreed_plan, self._agreed_route = plan, route

    def has_agreed_on(self, plan: ExchangePlan) -> bool:
        """Whether it is the plan that all know of."""
        return plan.digest == self._agreed_plan.digest

    def renew(self, plan: ExchangePlan, route: Route, header: Callable[[], tuple[Header, list[str]]]) -> None:
        """Before a step: if the plan is a new one, all must have it from this step on. ``header`` makes that of the step,
        and what its digest was made from."""
        if self._waits_for_group and is_distributed() and dist.get_world_size() > 1:
            raise ThinwireError(
                "torch.distributed was initialised after DeMo was built, so this replica would train alone; "
                "call init_process_group first, or pass process_group"
            )
        if self.is_alone:
            return
        if not self._agreed_plan.buckets:
            hold_roll_call(header()[1], self.all_gather)  # no payload would tell
        elif not self.has_agreed_on(plan):
            # All replicas must change their plan at the same step, and must learn it if one of them did not.
            announce_plan(self._agreed_route, *header(), self.transport, self.traffic)
        self._agreed_plan, self._agreed_route = plan, route

    @contextmanager
    def given_up_on_error(self, island: Island, step: int) -> Iterator[None]:
        """If this rank fails inside, before it has an attempt, the other ranks of its island will give theirs up: so its
        counterparts in other islands, too, must get what they wait for."""
        try:
            yield
        except Exception as error:  # who is interrupted should not wait for others
            if not (island.is_one_rank or self.is_alone or isinstance(error, ThinwireError)):
                give_up_(self._agreed_route, step, self.transport.replica)
            raise

    def first_troubled(self, attempt: Attempt, parameters: Sequence[Tensor]) -> Header | None:
        """What keeps a replica from a step; None: all can take it. Raises on every replica if they must not go on."""
        headers = attempt.check()
        self.received = attempt.received
        self.is_meeting_called = any(header.calls_meeting for header in headers)
        for replica, why in [*attempt.refused.items(), *attempt.left_out]:
            self.refused[replica] += 1
            _log.warning("%s; it does not count at step %d", why, attempt.header.step)
        for header in headers:
            if header.trouble.problem:
                return header
        if attempt.compares and not attempt.refused:
            fingerprints = [header.fingerprint for header in headers]
            self.has_compared = check_own_gradients(fingerprints, self.transport.num_replicas, parameters)
        return None
