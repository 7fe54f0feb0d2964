"""One replica's share of a step: its gradients into payloads, and everyone's payloads into its parameters.

Each stack of a bucket is handled by a backend: `TorchStack`, the readable one, or `FusedStack`, the fast one.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire.core.combine import Decoding
from thinwire.core.errors import PayloadError, ThinwireError
from thinwire.core.scratch import Scratch
from thinwire.exchange.plan import Bucket, ExchangePlan, Stack
from thinwire.exchange.sharding import Island
from thinwire.exchange.transport import Pending
from thinwire.fused import why_not
from thinwire.sealing import empty_findings
from thinwire.slabs import LocalTensor, limits_for
from thinwire.stack_step import GroupStep, StackStep
from thinwire.torch_stack import TorchStack
from thinwire.wire.payload import Verdict

_log = logging.getLogger("thinwire")
BACKENDS = ("auto", "torch", "triton")
_USUAL = Decoding()


@dataclass
class Encoding:
    """Everyone's payloads of a bucket, what is found in them, the host's copy of that, and which stacks are in the own
    payload, at least in part."""

    payloads_RB: Tensor
    replica: int
    findings_RW: Tensor
    told_RW: Tensor
    begun: list[Stack] = field(default_factory=list)
    is_safe: bool = True
    """Whether no exchange that failed may still write to the payloads."""
    units: dict[Stack, Tensor | float] = field(default_factory=dict)
    """What `StackStep.units` were when the payload was made, if they are kept for `LocalStep.give_back_`."""
    pending: list[Pending] = field(default_factory=list)
    """The exchanges under way."""
    spans: list[tuple[float, float] | None] = field(default_factory=list)
    """When those that are over began and ended."""
    left_out: dict[int, PayloadError] = field(default_factory=dict)
    """Whose messages to this replica alone were bad, and why."""
    failure: ThinwireError | None = None
    """Why this replica has told the others that it gives the step up."""

    @property
    def payload_B(self) -> Tensor:
        """The own one."""
        return self.payloads_RB[self.replica]

    def reset(self) -> None:
        """Begin an attempt."""
        self.begun.clear()
        self.pending.clear()
        self.spans.clear()
        self.left_out.clear()
        self.failure = None

    def wait(self) -> None:
        """Wait for the exchanges under way."""
        while self.pending:
            exchange = self.pending.pop(0)
            exchange.wait()
            self.spans.append(exchange.span())


class LocalStep:
    """The tensors of one replica, and what a step does with them, bucket by bucket. ``decoding`` is what `apply_` will be
    asked for, which not every backend can do."""

    def __init__(
        self,
        plan: ExchangePlan,
        tensors: Sequence[LocalTensor],
        backend: str = "auto",
        decoding: Decoding = _USUAL,
        island: Island | None = None,
    ) -> None:
        self.tensors, self._decoding, self.island = tensors, decoding, island or Island(())
        self.names = [spec.name for spec in plan.tensors]
        self.backends: set[str] = set()
        """Those in use."""
        self.verdicts: dict[torch.device, Tensor] = {}
        """Per device of the fused backend: 0 while the step at hand may be applied."""
        self.rooms: dict[int, list[Encoding]] = {}
        self._reasons: set[str] = set()
        self._scratch = Scratch()
        self.steps: dict[Stack, StackStep] = {}
        for bucket in plan.buckets:
            for stack in bucket.stacks:
                self.steps[stack] = self._step_for(stack, bucket, plan, backend)

    @property
    def sources(self) -> list[Tensor]:
        """The parameters, as the model has them."""
        return [local.source for local in self.tensors]

    def replicated(self) -> list[tuple[str, Tensor]]:
        """All that must be the same on all replicas, with names."""
        found = []
        for name, local in zip(self.names, self.tensors, strict=True):
            found.append((name, local.parameter.detach()))
            found += [(f"{name} ({kind})", state) for kind, state in local.rule_state.items()]
        return found

    def clear_residual_(self) -> None:
        """Begin with empty momenta, and without knowing how large gradients are."""
        for local in self.tensors:
            for own in (local.momentum_CE, local.owned_CE, *(local.energies or ())):
                own.zero_()

    @property
    def is_fused(self) -> bool:
        """Whether the fused kernels do all of it on one device, so that its verdict decides for all."""
        return self.backends == {"triton"} and len(self.verdicts) == 1

    def _step_for(self, stack: Stack, bucket: Bucket, plan: ExchangePlan, backend: str) -> StackStep:
        device = self.tensors[stack.entries[0].tensor].parameter.device
        if backend == "torch" or (backend == "auto" and device.type in ("cpu", "meta")):
            return self._plain(stack)
        reason = why_not(stack, self.tensors, self._decoding)
        if reason is None and device != self._payload_device(bucket):
            reason = f"it is on {device} and shares a payload with tensors on {self._payload_device(bucket)}"
        if reason is None:
            from thinwire.fused_stack import FusedStack  # here, since it imports triton, which not every machine has

            self.backends.add("triton")
            if device not in self.verdicts:
                self.verdicts[device] = torch.zeros(1, dtype=torch.int32, device=device)
            return FusedStack(stack, self.tensors, self._scratch, self.verdicts[device])
        name = plan.tensors[stack.entries[0].tensor].name
        if backend == "triton":
            raise ValueError(f"backend='triton' cannot train {name}: {reason}; backend='auto' uses torch where it must")
        if reason not in self._reasons:
            self._reasons.add(reason)
            _log.warning("the torch backend, which is slower, trains %s and others: %s", name, reason)
        return self._plain(stack)

    def _plain(self, stack: Stack) -> StackStep:
        self.backends.add("torch")
        return TorchStack(stack, self.tensors, limits_for(self.tensors))

    def empty(self, bucket: Bucket, replica: int = 0, num_replicas: int = 1) -> Encoding:
        """Room for the payloads of a bucket; the own one has nothing in it yet."""
        device = self._payload_device(bucket)
        payloads_RB = torch.zeros(num_replicas, bucket.payload_bytes, dtype=torch.uint8, device=device)
        findings_RW = empty_findings(bucket, num_replicas, device)
        told_RW = torch.empty_like(findings_RW, device="cpu", pin_memory=True) if device.type == "cuda" else findings_RW
        return Encoding(payloads_RB, replica, findings_RW, told_RW)

    def rooms_for(self, turn: int, buckets: Sequence[Bucket], make: Callable[[Bucket], Encoding]) -> list[Encoding]:
        """Room for what is exchanged of all buckets, the same for every attempt of a turn, unless one that failed may still
        write to it."""
        if not all(encoding.is_safe for encoding in self.rooms.get(turn, ())):
            self.rooms.clear()
        if turn not in self.rooms:
            self.rooms[turn] = [make(bucket) for bucket in buckets]
        return self.rooms[turn]

    def _payload_device(self, bucket: Bucket) -> torch.device:
        devices = (self.tensors[index].parameter.device for index in bucket.tensors)
        return next(devices, self.tensors[0].parameter.device if self.tensors else torch.device("cpu"))

    def ready_(self, bucket: Bucket) -> None:
        """Bring the gradients of a bucket to what this rank works on, see `Island.ready_`."""
        self.island.ready_(bucket, self.sources)

    def encode_(self, bucket: Bucket, groups: Sequence[GroupStep], encoding: Encoding) -> None:
        """Encode every stack of a bucket, see `StackStep.encode_`. Header and checksum are left to the caller."""
        for stack in bucket.stacks:
            encoding.begun.append(stack)
            self.steps[stack].encode_(groups[stack.group], encoding.payload_B)

    def undo_(self, bucket: Bucket, groups: Sequence[GroupStep], encoding: Encoding) -> None:
        """Take `encode_` back, see `StackStep.undo_`; where the fused backend runs, if the verdict is against the step."""
        for stack in encoding.begun:
            self.steps[stack].undo_(groups[stack.group], encoding.payload_B)
        encoding.begun.clear()

    def keep_units(self, encoding: Encoding) -> None:
        """Remember what `give_back_` will need after the next encoding; `undo_` is no longer possible."""
        for stack in encoding.begun:
            units = self.steps[stack].units
            encoding.units[stack] = units.clone() if isinstance(units, Tensor) else units
            self.steps[stack].forget()

    def give_back_(self, encoding: Encoding) -> None:
        """Return to the momenta what the own payload took from them, see `StackStep.give_back_`."""
        for stack in encoding.begun:
            self.steps[stack].give_back_(encoding.payload_B, encoding.units[stack])
        encoding.begun.clear()

    def apply_(self, bucket: Bucket, groups: Sequence[GroupStep], payloads_RB: Tensor, decoding: Decoding) -> None:
        """Apply everyone's payloads to the parameters, see `StackStep.apply_`; where the fused backend runs, unless the
        verdict is against the step."""
        for stack in bucket.stacks:
            self.steps[stack].apply_(groups[stack.group], payloads_RB, decoding)
        self.island.spread_(bucket)

    def set_verdict_(self, verdict: Verdict) -> None:
        """Decide from the host, which is known before the next launch runs."""
        for known in self.verdicts.values():
            known.fill_(int(verdict))
