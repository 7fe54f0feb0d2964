"""DeMo as a `torch.optim.Optimizer`: `DeMo.step` reads as the algorithm does."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from thinwire import checkpoint, options, planning
from thinwire.attempt import Attempt
from thinwire.company import Company
from thinwire.core.combine import Decoding
from thinwire.core.errors import ExchangeError, ReceivedDifferentlyError, ThinwireError, check_bool, check_choice, check_int
from thinwire.delay import Delay
from thinwire.drift import DriftCheck
from thinwire.exchange.agreement import RECEIVED
from thinwire.exchange.choice import OWNER, choose_exchange, islands_for
from thinwire.exchange.plan import ExchangePlan
from thinwire.exchange.transport import Transport
from thinwire.gradients import tell_trouble
from thinwire.local_step import BACKENDS, LocalStep
from thinwire.membership import is_meeting_due, make_alike, membership_of, try_step
from thinwire.overlap import Overlap, check_nothing_changed
from thinwire.routes import make_route
from thinwire.wire.payload import Header


class DeMo(Optimizer):
    """Decoupled momentum: each replica keeps its own momentum and exchanges only the strongest frequencies of it.

    Use it in place of another optimizer, on a model whose gradients are *not* averaged between replicas. With more than
    one replica the constructor is collective, as DDP's is: every rank must call it, and parameters start as replica 0's.

    Arguments:
        params: parameters, named parameters or parameter groups. Those that do not require a gradient are not trained, and
            only their first values are copied from replica 0.
        lr: learning rate. May differ per group, as may all options down to ``momentum_dtype``.
        momentum_decay: beta in ``m <- beta * m + g``.
        chunk: edge of the chunks a matrix is cut into.
        topk: coefficients kept per full ``chunk x chunk`` chunk; smaller chunks keep in proportion, at least one.
        weight_decay: decoupled, ``p <- p * (1 - lr * weight_decay)``.
        balance: above 0, divide rows and columns of gradients by their usual size, of which this is the decay, as 0.95.
        update: what the decoded direction does to the parameters: sign, sgd, adamw, lion or muon.
        values: how kept coefficients are written: float32, bfloat16, int8, int4, sign_scale or sign; ``auto`` is sign for
            the rules sign, lion and muon, and sign_scale for sgd and adamw.
        lr_in_momentum: accumulate ``lr * g`` instead of ``g``, as the published code does.
        layout: ``adaptive``, or ``published`` for the published code's cut (largest divisors, topk whatever the size).
        dense_below: tensors with fewer elements take the dense path: no transform, every element sent.
        betas: lion's two decays; the adamw rule uses the second.
        eps: added to the adamw rule's denominator.
        maximize: go up instead of down.
        momentum_dtype: float32, bfloat16 or float64.
        combine: ``mean_over_replicas``, ``mean_over_senders`` or ``majority_vote``, where only signs count.
        clip_to_median: scale replicas whose values have a norm above the median of all replicas down to it.
        exact_decode: decode in whole numbers, so that all kinds of devices find the same bits; does not concern muon.
        on_bad_payload: what to do about a payload that is damaged or forged: ``drop`` it, so that the others count, or
            ``raise``. Replicas that saw different bytes then copy what most of them hold.
        on_nonfinite: what all replicas do when one has NaN or Inf in a gradient, or values too large to be squared:
            ``raise`` or ``skip`` the step. Under a `torch.amp.GradScaler` an overflow always skips.
        check_drift_every: steps between checks that all replicas hold the same parameters; 0: none.
        on_drift: ``raise`` if they do not, ``warn``, or ``repair`` by copying what most of them hold.
        exchange: ``all_gather`` brings everyone's payload to everyone; with ``owner`` each replica combines a part of the
            chunks for all, and what is received hardly grows with their number; ``hierarchical`` is an all-gather between
            ``islands``, by default ``hosts``; ``auto`` is ``owner`` from 20 replicas, or islands, on.
        owner_topk: coefficients that owners keep per full chunk; eight times ``topk`` unless it is given.
        process_group: the replicas; the default group if `torch.distributed` is initialised, else one replica.
        transport: any other way to reach the replicas, e.g. `thinwire.exchange.loopback`; excludes ``process_group``.
        islands: ranks that are one replica together: they average their gradients in full and share the work, and islands
            exchange with islands. A number of consecutive ranks, a 2-D DeviceMesh (between islands, inside), or ``hosts``.
        secret: a key of at least 16 bytes, the same on all replicas, with which all that they send is signed.
        sync_parameters: start from replica 0's parameters.
        timeout_seconds: the longest wait for another replica.
        num_buckets: payloads, and so collectives, per step; 1, or 8 with ``overlap``.
        overlap: send each bucket as soon as backward has its gradients, see `accumulate`.
        delay: 1 applies what a step sends at the next one, so that the exchange hides behind all compute; see `drain`.
        look_ahead: with ``delay``, run ahead by the last update until the next is known; takes a copy of the parameters.
        backend: ``triton`` (fused kernels, NVIDIA GPUs), ``torch`` (any device), or ``auto``, the fastest that runs.
    """

    # torch.amp.GradScaler then leaves unscaling and the decision to skip to step(), where all replicas take it together.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        momentum_decay: float = 0.999,
        chunk: int = 64,
        topk: int = 32,
        weight_decay: float = 0.0,
        balance: float = 0.0,
        update: str = "sign",
        values: str = "auto",
        lr_in_momentum: bool = False,
        layout: str = "adaptive",
        dense_below: int = options.DEFAULT_DENSE_BELOW,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8,
        maximize: bool = False,
        momentum_dtype: str = "float32",
        combine: str = "mean_over_replicas",
        clip_to_median: bool = False,
        exact_decode: bool = True,
        on_bad_payload: str = "drop",
        on_nonfinite: str = "raise",
        check_drift_every: int = 100,
        on_drift: str = "raise",
        exchange: str = "all_gather",
        owner_topk: int | None = None,
        process_group: dist.ProcessGroup | None = None,
        transport: Transport | None = None,
        islands: Any = None,
        secret: bytes | None = None,
        sync_parameters: bool = True,
        timeout_seconds: float = 300.0,
        num_buckets: int | None = None,
        overlap: bool = False,
        delay: int = 0,
        look_ahead: bool = False,
        backend: str = "auto",
    ) -> None:
        self._decoding = Decoding.checked(combine, exact_decode, clip_to_median)
        self._on_nonfinite = check_choice("on_nonfinite", on_nonfinite, options.ON_NONFINITE)
        self._on_bad_payload = check_choice("on_bad_payload", on_bad_payload, options.ON_BAD_PAYLOAD)
        self._sync_parameters = check_bool("sync_parameters", sync_parameters)
        self._overlaps = check_bool("overlap", overlap)
        default_buckets = options.DEFAULT_OVERLAPPED_BUCKETS if overlap else 1
        self._num_buckets = default_buckets if num_buckets is None else check_int("num_buckets", num_buckets, 1)
        self._overlap: Overlap | None = None
        self._delay = Delay(delay, look_ahead, islands_for(exchange, islands) is not None)
        self.drift = DriftCheck(check_drift_every, on_drift)
        self._backend = check_choice("backend", backend, BACKENDS)
        group_options: dict[str, Any] = {"lr": lr, "momentum_decay": momentum_decay, "chunk": chunk, "topk": topk}
        group_options |= {"weight_decay": weight_decay, "update": update, "values": values, "betas": betas, "eps": eps}
        group_options |= {"lr_in_momentum": lr_in_momentum, "layout": layout, "dense_below": dense_below}
        group_options |= {"maximize": maximize, "momentum_dtype": momentum_dtype, "balance": balance}
        options.check_group(group_options)
        self._is_ready = False
        super().__init__(params, group_options)
        self._unsettled: Attempt | None = None
        self._num_skipped_steps, self._turn, self._timeout_seconds = 0, 0, timeout_seconds
        self._company = Company(process_group, transport, timeout_seconds, secret, islands_for(exchange, islands), overlap)
        self._transport, self.traffic = self._company.transport, self._company.traffic
        self.refused_payloads = self._company.refused
        """How many payloads of which replica did not count."""
        self.membership = membership_of(self._transport, delay)
        has_islands, can_change = self._company.dealing.is_on, self.membership.can_change
        self.exchange = choose_exchange(exchange, has_islands, self.num_replicas, delay, can_change)
        """What ``exchange`` came to."""
        self._owner_topk = None if owner_topk is None else check_int("owner_topk", owner_topk, 1)
        self._is_ready = True
        self._rebuild()
        self._delay.check(self.island)
        self._agree_and_synchronise(self.param_groups)

    @classmethod
    def recommended(cls, params: Any, lr: float = options.RECOMMENDED_LR, **others: Any) -> "DeMo":
        """The lowest losses for their bytes, in more time and on whole matrices alone; ``others`` are any other options."""
        return cls(params, lr, **{**options.RECOMMENDED_OPTIONS, **others})

    @classmethod
    def published(
        cls,
        params: Any,
        lr: float = 1e-3,
        *,
        momentum_decay: float = 0.999,
        chunk: int = 64,
        topk: int = 32,
        weight_decay: float = 0.0,
        process_group: dist.ProcessGroup | None = None,
        transport: Transport | None = None,
    ) -> "DeMo":
        """DeMo as its authors published it: the same trajectory as their code, on this wire and with these guards."""
        own: dict[str, Any] = {"momentum_decay": momentum_decay, "chunk": chunk, "topk": topk, "weight_decay": weight_decay}
        return cls(params, lr, **own, **options.PUBLISHED_OPTIONS, process_group=process_group, transport=transport)

    @property
    def replica(self) -> int:
        """Which replica this is, from 0."""
        return self._transport.replica

    @property
    def num_replicas(self) -> int:
        """How many replicas train together."""
        return self._transport.num_replicas

    @property
    def num_skipped_steps(self) -> int:
        """Steps left out for want of finite gradients. Waits for the last step, as `synchronize` does."""
        self.synchronize()
        return self._num_skipped_steps

    @property
    def num_steps(self) -> int:
        """Steps taken; skipped ones do not count. Waits for the last step, as `synchronize` does."""
        self.synchronize()
        return max(int(group["num_steps"]) for group in self.param_groups)

    @property
    def plan(self) -> ExchangePlan:
        """What this replica sends each step, down to the byte."""
        return self._plan

    @torch._disable_dynamo  # type: ignore[attr-defined]  # lazy, unlike the public one
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step, together with all replicas. A closure is called first, to recompute the local gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            while not try_step(self):
                pass
        except BaseException:
            # A GradScaler removes these itself only where step() returns; left behind they would scale the next step twice.
            vars(self).pop("grad_scale", None)
            vars(self).pop("found_inf", None)
            raise
        return loss

    def meet(self, carried: Iterable[torch.Tensor] = (), facts: Iterable[str] = ()) -> None:
        """Where replicas come and go (`thinwire.parallel.elastic`): meet the others, and take over their parameters and
        step. To be called once, when model and optimizer are as this replica would start by itself; and again, without
        arguments, when an exchange of the caller's own has failed. ``carried`` are tensors that a newcomer takes over, too,
        such as buffers; ``facts`` are lines that must be the same on all replicas."""
        with suppress(ExchangeError):  # that of the last step, of which all will have to speak anyway
            self._check_idle()
        self.membership.carried = list(carried) or self.membership.carried
        self.membership.facts = list(facts) or self.membership.facts
        self.membership.meet_(self, is_broken=not self.membership.is_newcomer)

    def _attempt_step(self) -> None:
        attempt = self._overlap.take() if self._overlap is not None else None
        with self._delay.settled_on_error(self._finish), self.island.told_of_failure():
            if attempt is None:
                with self._company.given_up_on_error(self.island, self.num_steps + 1):
                    self._prepare()
                    attempt = self._attempt()
            else:
                is_scaled = getattr(self, "found_inf", None) is not None
                check_nothing_changed(attempt, self._plan, self._header()[0].digest, is_scaled)
            with attempt.taken_back_on_error():
                attempt.send_rest_(attempt.first_trouble(self._from_scaler("found_inf")))
        sent = self._delay.swap(attempt)
        if sent is not None:
            self._finish(sent)
        else:
            self.island.first_troubled(attempt.header, None)

    def _finish(self, attempt: Attempt) -> None:
        """Receive what all have sent, and apply it or take it back."""
        needs_host = self._delay.is_on or attempt.compares or self._route.needs_host
        if self._local.is_fused and self.island.is_one_rank and not needs_host:
            attempt.receive_()
            with self._company.torn_on_error():
                attempt.finish_on_device_(self._decoding)
            self._count(1)
            self._unsettled = attempt
            if not any(device.type == "cuda" for device in self._local.verdicts):
                self.synchronize()
            return
        with self._delay.dropped_on_error(), attempt.taken_back_on_error():
            with self.island.told_of_failure():
                attempt.receive_()
                troubled = self._company.first_troubled(attempt, self._local.sources)
            troubled = self.island.first_troubled(attempt.header, troubled)
        if troubled is not None:
            attempt.take_back_()
            self._ended(None)
            self._handle_trouble(troubled, attempt.names)
            return
        with self._delay.at_true_parameters(self._local.tensors):
            self._company.apply_late_(attempt, self._decoding)
        self._count(1)
        self._ended(attempt)

    def _ended(self, attempt: Attempt | None) -> None:
        self.membership.end(attempt)
        self.drift.agreed_on = self.num_steps if attempt is not None else self.drift.agreed_on
        if self.membership.can_change and attempt is not None:
            self._turn ^= 1  # the payloads of the last step are kept, for those who lack them

    @torch.no_grad()
    def drain(self) -> None:
        """With ``delay``: wait for the exchange that is under way and apply it, so that nothing is. To be called on all
        replicas before evaluating, saving or ending; the next step sends without applying, as the first one does."""
        self._delay.drain_(self._finish)

    def synchronize(self) -> None:
        """Wait for the last step, and raise what is wrong with it.

        On a GPU the fused backend does not wait for the device: whether the step was taken, or why not, is known later. The
        next `step`, `state_dict` and the counts of steps wait for it, too. A step that was not taken has changed nothing.
        """
        attempt, self._unsettled = self._unsettled, None
        if attempt is None:
            return
        try:
            attempt.wait(self._timeout_seconds)
        except BaseException:
            self._unsettled = attempt  # interrupted: it is not known yet
            raise
        try:
            troubled = self._company.first_troubled(attempt, self._local.sources)
        except BaseException as error:
            self._count(-1)
            if not isinstance(error, ReceivedDifferentlyError):
                raise
            make_alike(self, error)
            return
        self._ended(attempt if troubled is None else None)
        if troubled is not None:
            self._count(-1)
            self._handle_trouble(troubled, attempt.names)
        elif attempt.refused:
            self._company.apply_late_(attempt, self._decoding)

    def _count(self, steps: int) -> None:
        for group in self.param_groups:
            group["num_steps"] += steps

    def accumulate(self) -> AbstractContextManager[None]:
        """Add up gradients inside, and leave them to `step()`. Only with ``overlap`` does it make a difference: there, all
        backward passes but the last before a step must run inside; or every one, if gradients are clipped or unscaled."""
        return self._overlap.held_back() if self._overlap is not None else nullcontext()

    def _prepare(self) -> None:
        """All that may change what replicas have agreed on, before a step begins."""
        self.synchronize()
        self._company.check_whole()
        self._delay.settle(self._finish)
        self.traffic.start_step()
        if self.num_replicas > 1 and self.drift.is_due(self.num_steps):
            self.check_drift()  # first, since one replica may be about to send another plan
        self._refresh()
        self._company.renew(self._plan, self._route, self._header)

    @torch.no_grad()
    def check_drift(self, policy: str | None = None) -> bool:
        """Compare the parameters of all replicas; collective. Whether they are the same; if not, do as ``policy`` says,
        ``on_drift`` unless it is given."""
        if self._overlap is not None:
            self._overlap.check_idle()
        self._delay.come_back_()
        wires = (self._transport, self._company.all_gather, self.island)
        is_same = self.drift.run(self._local.replicated(), self.num_steps, *wires, policy)
        for bucket in () if is_same else self._plan.buckets:
            self.island.spread_(bucket)  # what was repaired
        return is_same

    def _begin_early(self) -> Attempt | None:
        """The attempt of the step to come, during backward; None if something has changed that `step()` must see to."""
        self.synchronize()
        is_as_planned = planning.signature_of(self.param_groups, self.state) == self._planned_signature
        # What may change parameters, or fail where replicas come and go, must not do so inside backward.
        is_left = is_meeting_due(self) or self._delay.is_unsettled or self.drift.is_due(self.num_steps)
        if not is_as_planned or is_left or not self._company.has_agreed_on(self._plan):
            return None
        self._prepare()
        return self._attempt()

    def _check_idle(self) -> None:
        """Before anything that would meet half a step."""
        self.synchronize()
        if self._overlap is not None:
            self._overlap.check_idle()
        if self._delay.under_way is not None:
            raise ThinwireError("delay=1 has an exchange under way; call drain() first, before the model is saved, too")

    def _attempt(self) -> Attempt:
        """What all replicas are about to do together."""
        header, description = self._header()
        how = (self._company.compares, self._on_bad_payload == "drop" and self.num_replicas > 1)
        scaled = (self._from_scaler("grad_scale"), self._delay.num_under_way, self.island.unscales)
        groups = [planning.group_step(group, *scaled) for group in self.param_groups]
        self._turn = (self._turn + self._delay.num_under_way) % 2  # payloads under way keep their place
        rooms = self._local.rooms_for(self._turn, self._plan.buckets, self._route.room)
        own = (self._route, rooms, self._local, groups, header, description)
        attempt = self._delay.newest = Attempt(*own, self._transport, self.traffic, *how)
        self.membership.begin(attempt)
        self.island.begin(self._description, self._from_scaler("grad_scale"))
        return attempt

    def _header(self) -> tuple[Header, list[str]]:
        """Of the step to come, and what its digest was made from."""
        # Alone, nobody compares digests.
        description = self._description() if self.num_replicas > 1 else []
        number = self.num_steps + self._delay.num_under_way + 1
        return self._company.header(description, number, self.membership.calls_meeting), description

    def _from_scaler(self, name: str) -> float | None:
        """What a GradScaler has set on this optimizer for the time of one step()."""
        value = getattr(self, name, None)
        return None if value is None else float(value)

    def _handle_trouble(self, header: Header, names: Sequence[str]) -> None:
        """Raise, or say that the step is skipped."""
        tell_trouble(header, names, self._on_nonfinite == "raise")
        self._num_skipped_steps += 1

    def _description(self, is_of_step: bool = True) -> list[str]:
        """What all replicas must share, at this step or all the time."""
        facts = {**self._decoding._asdict(), **self.drift.facts, **self._delay.facts}
        facts |= {name: getattr(self, f"_{name}") for name in ("on_nonfinite", "on_bad_payload", "sync_parameters")}
        if is_of_step:
            facts |= {"step": self.num_steps, RECEIVED: self._company.received}
        return [*planning.describe(self._plan, self.param_groups if is_of_step else (), facts), *self.membership.facts]

    def _agree_and_synchronise(self, groups: list[dict[str, Any]]) -> None:
        """Compare descriptions with all replicas, then take over replica 0's parameters."""
        with self.island.told_early():
            self._company.agree(self._plan, self._route, self._description())
        self.island.agree(self._description)
        if self._sync_parameters:
            planning.copy_first_parameters(groups, self._transport, self._company.inside, self.traffic.setup)

    # Plan and state.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to train; collective, like the constructor."""
        if not isinstance(param_group, dict):
            raise TypeError(f"a parameter group must be a dict, got {type(param_group).__name__}")
        options.check_group({**self.defaults, **param_group})
        if self._is_ready:
            self._check_idle()
        planning.name_empty_groups_(self.param_groups, param_group)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group["num_steps"] = 0
        try:
            planning.check_members(group, len(self.param_groups) - 1)
            if self._is_ready:
                self._rebuild()
                self._agree_and_synchronise([group])
        except Exception:
            for parameter in self.param_groups.pop()["params"]:
                self.state.pop(parameter, None)
                if self._is_ready:
                    self._company.dealing.shares.pop(parameter, None)
            if self._is_ready:
                self._rebuild()
            raise

    def _refresh(self) -> None:
        """Check the groups, which schedulers and users write to, and rebuild the plan if need be."""
        for group in self.param_groups:
            options.check_group(options.with_plain_lr_(group))
        planning.check_codings(self._plan, self.param_groups)
        if planning.signature_of(self.param_groups, self.state) != self._planned_signature:
            self._rebuild()

    def _rebuild(self) -> None:
        """Make plan and state anew."""
        owning = planning.Owning(self._owner_topk, self.replica, self.num_replicas, self._decoding.combine)
        dealt = (self._num_buckets, self._company.dealing, owning if self.exchange == OWNER else None)
        self._plan, tensors = planning.plan_and_tensors(self.param_groups, self.state, *dealt)
        self.island = self._company.island_of(self._plan, tensors)
        self._local = LocalStep(self._plan, tensors, self._backend, self._decoding, self.island)
        how = (self._backend, self._decoding, self._on_bad_payload == "drop")
        self._route = make_route(self._plan, self._local, self._transport, self.traffic, *how)
        self._planned_signature = planning.signature_of(self.param_groups, self.state)
        if self._overlap is not None:
            self._overlap.remove()
            self._overlap = None
        if self._overlaps and (self.num_replicas > 1 or self.membership.can_change):
            self._overlap = Overlap(self._plan, self._local.sources, WeakMethod(self._begin_early), self.island)

    # Checkpoints.

    def check_between_steps(self) -> None:
        """Raise if a step is under way, so that state can be neither saved nor loaded; else take note of all changes."""
        self._check_idle()
        self._refresh()

    def state_dict(self) -> dict[str, Any]:
        """torch's state dict, and under ``thinwire`` whose residual momentum it holds."""
        self.check_between_steps()
        self._company.check_whole()
        return {**super().state_dict(), checkpoint.KEY: checkpoint.identity(self)}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any], *, residual: str = "exact") -> None:
        """Go on from a checkpoint.

        ``residual`` says what becomes of the residual momentum: ``exact`` takes it and refuses a checkpoint of another
        replica, replica count or plan; ``keep`` takes it whosever it is, where the shapes fit; ``zero`` starts without.
        """
        check_choice("residual", residual, checkpoint.RESIDUAL_POLICIES)
        self.check_between_steps()
        checkpoint.load(self, state_dict, residual)

    def __getstate__(self) -> dict[str, Any]:
        """Refused: a copy would share this replica's place among the others."""
        raise TypeError("DeMo cannot be copied or pickled; build another one and load this one's state_dict() into it")
