"""DeMo as a `torch.optim.Optimizer`: `DeMo.step` reads as the algorithm does."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from thinwire import checkpoint
from thinwire.core.combine import COMBINE_RULES
from thinwire.core.errors import NonFiniteGradientError, ThinwireError, check_bool, check_choice, check_float, check_int
from thinwire.core.layout import empty_momentum
from thinwire.core.update_rules import UPDATE_RULES, Hyper
from thinwire.exchange.agreement import Answer, Problem, hold_roll_call
from thinwire.exchange.collective import default_transport, is_distributed
from thinwire.exchange.plan import Bucket, ExchangePlan, TensorSpec, make_plan
from thinwire.exchange.traffic import Count, Traffic
from thinwire.exchange.transport import Pending, Transport
from thinwire.gradients import check_own_gradients, fingerprint, first_problem
from thinwire.local_step import BACKENDS, Encoding, LocalStep
from thinwire.options import MOMENTUM_DTYPES, check_group, check_parameter, coding_of, lr_of, settings_lines
from thinwire.sealing import check_received, seal_
from thinwire.slabs import LocalTensor
from thinwire.stack_step import GroupStep
from thinwire.wire.payload import Header

_log = logging.getLogger("thinwire")
ON_NONFINITE = ("raise", "skip")
DEFAULT_DENSE_BELOW = 4096


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
        combine: ``mean_over_senders`` or ``mean_over_replicas``.
        on_nonfinite: what all replicas do when one has NaN or Inf in a gradient, or a norm that overflows: ``raise`` or
            ``skip`` the step. Under a `torch.amp.GradScaler` an overflow always skips.
        process_group: the replicas; the default group if `torch.distributed` is initialised, else one replica.
        transport: any other way to reach the replicas, e.g. `thinwire.exchange.loopback`; excludes ``process_group``.
        sync_parameters: start from replica 0's parameters.
        timeout_seconds: the longest wait for another replica.
        num_buckets: payloads, and so collectives, per step.
        backend: ``triton`` for fused kernels on NVIDIA GPUs, ``torch`` for plain tensor operations on any device; ``auto``
            takes the fastest that runs.
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
        update: str = "sign",
        values: str = "auto",
        lr_in_momentum: bool = False,
        layout: str = "adaptive",
        dense_below: int = DEFAULT_DENSE_BELOW,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8,
        maximize: bool = False,
        momentum_dtype: str = "float32",
        combine: str = "mean_over_senders",
        on_nonfinite: str = "raise",
        process_group: dist.ProcessGroup | None = None,
        transport: Transport | None = None,
        sync_parameters: bool = True,
        timeout_seconds: float = 300.0,
        num_buckets: int = 1,
        backend: str = "auto",
    ) -> None:
        self._combine = check_choice("combine", combine, COMBINE_RULES)
        self._on_nonfinite = check_choice("on_nonfinite", on_nonfinite, ON_NONFINITE)
        self._sync_parameters = check_bool("sync_parameters", sync_parameters)
        self._num_buckets = check_int("num_buckets", num_buckets, 1)
        check_float("timeout_seconds", timeout_seconds, 1e-3)
        self._backend = check_choice("backend", backend, BACKENDS)
        group_options = {
            "lr": lr,
            "momentum_decay": momentum_decay,
            "chunk": chunk,
            "topk": topk,
            "weight_decay": weight_decay,
            "update": update,
            "values": values,
            "lr_in_momentum": lr_in_momentum,
            "layout": layout,
            "dense_below": dense_below,
            "betas": betas,
            "eps": eps,
            "maximize": maximize,
            "momentum_dtype": momentum_dtype,
        }
        check_group(group_options)
        self._is_ready = False
        super().__init__(params, group_options)
        self.traffic = Traffic()
        self.num_skipped_steps = 0
        if transport is not None and process_group is not None:
            raise ValueError("pass process_group or transport, not both")
        self._transport = transport or default_transport(process_group, timeout_seconds)
        self._waits_for_group = transport is None and process_group is None and not is_distributed()
        self._has_checked_sync = False
        self._is_ready = True
        self._rebuild()
        self._agree_and_synchronise(self.param_groups)

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
        return cls(
            params,
            lr,
            momentum_decay=momentum_decay,
            chunk=chunk,
            topk=topk,
            weight_decay=weight_decay,
            update="sign",
            values="float32",
            lr_in_momentum=True,
            layout="published",
            combine="mean_over_senders",
            process_group=process_group,
            transport=transport,
        )

    @property
    def replica(self) -> int:
        """Which replica this is, from 0."""
        return self._transport.replica

    @property
    def num_replicas(self) -> int:
        """How many replicas train together."""
        return self._transport.num_replicas

    @property
    def num_steps(self) -> int:
        """Steps taken; skipped ones do not count."""
        return max(int(group["num_steps"]) for group in self.param_groups)

    @property
    def plan(self) -> ExchangePlan:
        """What this replica sends each step, down to the byte."""
        return self._plan

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step, together with all replicas. A closure is called first, to recompute the local gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            self._step_together()
        except BaseException:
            # A GradScaler removes these itself only where step() returns; left behind they would scale the next step twice.
            vars(self).pop("grad_scale", None)
            vars(self).pop("found_inf", None)
            raise
        return loss

    def _step_together(self) -> None:
        self._check_group_is_known()
        self.traffic.start_step()
        self._refresh()
        if not self._roll_call():
            self.num_skipped_steps += 1
            return
        groups = [self._group_step(group) for group in self.param_groups]
        everyone = self._exchange(groups)
        for bucket, payloads_RB in zip(self._plan.buckets, everyone, strict=True):
            self._local.apply_(bucket, groups, payloads_RB, self._combine)
        for group in self.param_groups:
            group["num_steps"] += 1

    def _exchange(self, groups: list[GroupStep]) -> list[Tensor]:
        """Encode every bucket, send it, and return everyone's checked payloads (R, B) per bucket.

        If anything fails, the momenta are given back what was taken from them, and payloads that are still owed are sent as
        given up: the others then stop at once too, and the next exchange finds all replicas at the same place.
        """
        encodings = [self._local.empty(bucket) for bucket in self._plan.buckets]
        pending: list[Pending] = []
        try:
            for bucket, encoding in zip(self._plan.buckets, encodings, strict=True):
                self._local.encode_(bucket, groups, encoding)
                pending.append(self._send(bucket, encoding, self._header(bucket, self.replica)))
            with self.traffic.waiting():
                everyone = [exchange.wait() for exchange in pending]
            for bucket, payloads_RB in zip(self._plan.buckets, everyone, strict=True):
                others = [replica for replica in range(self.num_replicas) if replica != self.replica]
                check_received(bucket, payloads_RB, partial(self._header, bucket), others, self._is_fused)
        except BaseException as error:
            for bucket, encoding in zip(self._plan.buckets, encodings, strict=True):
                self._local.undo_(bucket, groups, encoding)
            if not isinstance(error, ThinwireError):
                self._give_up(encodings, len(pending))
            raise
        return everyone

    @property
    def _is_fused(self) -> bool:
        """Whether payloads are made, and so sealed and checked, by the fused kernels alone."""
        return self._local.backends == {"triton"}

    def _send(self, bucket: Bucket, encoding: Encoding, header: Header) -> Pending:
        seal_(encoding.payload_B, header, self._is_fused)
        self.traffic.add(bucket.payload_bytes, self.num_replicas)
        return self._transport.start_all_gather(encoding.payload_B, f"exchange of step {header.step}, bucket {bucket.index}")

    def _give_up(self, encodings: list[Encoding], num_sent: int) -> None:
        """After an error of this replica's own: send what it still owes, marked as worthless."""
        owed = zip(self._plan.buckets[num_sent:], encodings[num_sent:], strict=True)
        try:
            pending = []
            for bucket, encoding in owed:
                header = replace(self._header(bucket, self.replica), gave_up=True)
                pending.append(self._send(bucket, encoding, header))
            for exchange in pending:
                exchange.wait()
        except ThinwireError as error:
            _log.warning("could not tell the other replicas that this one gave up: %s", error)

    def _header(self, bucket: Bucket, replica: int) -> Header:
        return Header(self._plan.digest, self.num_steps + 1, replica, bucket.index, bucket.body_bytes)

    def _group_step(self, group: dict[str, Any]) -> GroupStep:
        lr = float(lr_of(group))  # type: ignore[arg-type]
        scale = lr if group["lr_in_momentum"] else 1.0
        if (grad_scale := self._from_scaler("grad_scale")) is not None:
            scale /= grad_scale
        return GroupStep(
            decay=group["momentum_decay"],
            gradient_scale=-scale if group["maximize"] else scale,
            rule=UPDATE_RULES[group["update"]],
            hyper=Hyper(lr, group["num_steps"] + 1, tuple(group["betas"]), group["eps"]),
            weight_decay=group["weight_decay"],
            chunk=group["chunk"],
        )

    def _from_scaler(self, name: str) -> float | None:
        """What a GradScaler has set on this optimizer for the time of one step()."""
        value = getattr(self, name, None)
        return None if value is None else float(value)

    # Agreement: everything that must be known before anything is changed.

    def _roll_call(self) -> bool:
        """Whether all replicas can take this step. False: all skip it. Raises on every replica if they must not go on."""
        parameters = [local.parameter for local in self._local.tensors]
        problem, tensor = first_problem(parameters, self._from_scaler("found_inf"))
        if self.num_replicas == 1:
            answers = [Answer(problem, tensor)]
        else:
            compares = problem is Problem.NONE and not self._has_checked_sync
            mine = Answer(problem, tensor, fingerprint(parameters) if compares else 0)
            answers = hold_roll_call(self._description(), mine, lambda m, what: self._gather(m, what, self.traffic))
        for replica, answer in enumerate(answers):
            if answer.problem is not Problem.NONE:
                return self._handle_problem(replica, answer)
        if not self._has_checked_sync:
            self._has_checked_sync = check_own_gradients([answer.gradient_fingerprint for answer in answers], parameters)
        return True

    def _handle_problem(self, replica: int, answer: Answer) -> bool:
        name = self._plan.tensors[answer.tensor].name if 0 <= answer.tensor < len(self._plan.tensors) else "a tensor"
        if answer.problem is Problem.SPARSE:
            raise TypeError(f"replica {replica} has a sparse gradient for {name}; DeMo needs dense gradients")
        if answer.problem is Problem.NONFINITE and self._on_nonfinite == "raise":
            raise NonFiniteGradientError(
                f"replica {replica} has NaN or Inf in the gradient of {name} at step {self.num_steps + 1} (a norm that "
                "overflows counts as Inf); nothing was changed on any replica. on_nonfinite='skip' leaves such steps out"
            )
        _log.warning("step skipped on all replicas: replica %d has NaN or Inf in the gradient of %s", replica, name)
        return False

    def _description(self) -> list[str]:
        lines = [*self._plan.description, f"step: {self.num_steps}"]
        lines += [f"combine: {self._combine!r}", f"on_nonfinite: {self._on_nonfinite!r}"]
        for index, group in enumerate(self.param_groups):
            lines += settings_lines(index, group)
            # They are not trained, but must be the same on all replicas.
            lines += [f"frozen: {spec.fact}" for spec, parameter in self._specs(index) if not parameter.requires_grad]
        return lines

    def _gather(self, message_B: Tensor, what: str, meter: Traffic | Count) -> Tensor:
        meter.add(message_B.numel(), self.num_replicas)
        with meter.waiting():
            return self._transport.start_all_gather(message_B, what).wait()

    def _agree_and_synchronise(self, groups: list[dict[str, Any]]) -> None:
        """Compare descriptions with all replicas, then take over replica 0's parameters."""
        if self.num_replicas == 1:
            return
        setup = self.traffic.setup
        hold_roll_call(self._description(), Answer(), lambda message, what: self._gather(message, what, setup))
        if not self._sync_parameters:
            return
        for group in groups:
            for parameter in group["params"]:
                if parameter.numel() and parameter.layout == torch.strided:
                    setup.add(parameter.numel() * parameter.element_size(), self.num_replicas)
                    self._transport.broadcast_(parameter.data, "first copy of replica 0's parameters")

    def _check_group_is_known(self) -> None:
        if self._waits_for_group and is_distributed() and dist.get_world_size() > 1:
            raise ThinwireError(
                "torch.distributed was initialised after DeMo was built, so this replica would train alone; "
                "call init_process_group first, or pass process_group"
            )

    # Plan and state.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to train; collective, like the constructor."""
        if not isinstance(param_group, dict):
            raise TypeError(f"a parameter group must be a dict, got {type(param_group).__name__}")
        check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group["num_steps"] = 0
        try:
            if len(set(map(id, group["params"]))) < len(group["params"]):
                raise ValueError("a parameter group holds the same parameter twice")
            for spec, parameter in self._specs(len(self.param_groups) - 1):
                if parameter.requires_grad:
                    check_parameter(parameter, spec.name)
            if self._is_ready:
                self._rebuild()
                self._agree_and_synchronise([group])
        except Exception:
            for parameter in self.param_groups.pop()["params"]:
                self.state.pop(parameter, None)
            if self._is_ready:
                self._rebuild()
            raise

    def _specs(self, index: int) -> Iterator[tuple[TensorSpec, Tensor]]:
        """The parameters of a group, in order."""
        group = self.param_groups[index]
        names = group.get("param_names") or [f"parameter {place} of group {index}" for place in range(len(group["params"]))]
        for name, parameter in zip(names, group["params"], strict=True):
            yield TensorSpec(name, tuple(parameter.shape), str(parameter.dtype), index), parameter

    def _signature(self) -> list[object]:
        """All that plan and local step were built from, so that a change is noticed: a layer unfrozen, another topk,
        parameters or state moved to other tensors."""
        signature: list[object] = []
        for group in self.param_groups:
            signature.append((coding_of(group), group["update"], group["momentum_dtype"]))
            for parameter in group["params"]:
                kept = [id(tensor) for tensor in self.state[parameter].values()] if parameter in self.state else []
                tensor = (id(parameter), parameter.requires_grad, parameter.shape, parameter.dtype, parameter.device)
                signature.append((*tensor, kept))
        return signature

    def _refresh(self) -> None:
        """Check the groups, which schedulers and users write to, and rebuild the plan if need be."""
        for group in self.param_groups:
            check_group(group)
        if self._signature() != self._planned_signature:
            self._rebuild()

    def _rebuild(self) -> None:
        """Make the plan, and the state of every parameter that takes part and has none yet."""
        everything = [spec for index in range(len(self.param_groups)) for spec in self._specs(index)]
        trained = [(spec, parameter) for spec, parameter in everything if parameter.requires_grad]
        codings = [coding_of(group) for group in self.param_groups]
        plan = make_plan([spec for spec, _ in trained], codings, self._num_buckets)
        tensors = []
        for index, (spec, parameter) in enumerate(trained):
            tensors.append(self._local_tensor(plan, index, spec, parameter))
        self._plan, self._local, self._planned_signature = plan, LocalStep(plan, tensors, self._backend), self._signature()

    def _local_tensor(self, plan: ExchangePlan, index: int, spec: TensorSpec, parameter: Tensor) -> LocalTensor:
        check_parameter(parameter, spec.name)
        group, layout, state = self.param_groups[spec.group], plan.layout_of(index), self.state[parameter]
        momentum, dtype = state.get("momentum"), MOMENTUM_DTYPES[group["momentum_dtype"]]
        if momentum is None:
            momentum = empty_momentum(layout, dtype, parameter.device)
        if momentum.shape != (layout.num_chunks, layout.num_elements):
            raise ValueError(
                f"{spec.name} already has momentum in chunks of another size; its shape, chunk, layout and dense_below "
                "cannot change during training"
            )
        state["momentum"] = momentum.to(dtype=dtype, device=parameter.device).contiguous()
        local = LocalTensor(parameter, state["momentum"])
        for name in UPDATE_RULES[group["update"]].state_names:
            tensor = state.get(name, torch.zeros(parameter.shape, device="cpu"))
            state[name] = tensor.to(dtype=local.compute_dtype, device=parameter.device).contiguous()
            local.rule_state[name] = state[name]
        return local

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """torch's state dict, and under ``thinwire`` whose residual momentum it holds."""
        self._refresh()
        return {**super().state_dict(), checkpoint.KEY: checkpoint.identity(self)}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any], *, residual: str = "exact") -> None:
        """Go on from a checkpoint.

        ``residual`` says what becomes of the residual momentum: ``exact`` takes it and refuses a checkpoint of another
        replica, replica count or plan; ``keep`` takes it whosever it is, where the shapes fit; ``zero`` starts without.
        """
        check_choice("residual", residual, checkpoint.RESIDUAL_POLICIES)
        self._refresh()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        checkpoint.load(self, state_dict, residual)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        """Refused: a copy would share this replica's place among the others."""
        raise TypeError("DeMo cannot be copied or pickled; build another one and load this one's state_dict() into it")
