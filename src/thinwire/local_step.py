"""One replica's share of a step: its gradients into payloads, and everyone's payloads into its parameters.

Each stack of a bucket is handled by a backend: `TorchStack`, the readable one, or `FusedStack`, the fast one.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire.core.scratch import Scratch
from thinwire.exchange.plan import Bucket, ExchangePlan, Stack
from thinwire.fused import why_not
from thinwire.slabs import LocalTensor, limits_for
from thinwire.stack_step import GroupStep, StackStep
from thinwire.torch_stack import TorchStack

_log = logging.getLogger("thinwire")
BACKENDS = ("auto", "torch", "triton")


@dataclass
class Encoding:
    """A bucket's payload, and the stacks that are in it, at least in part."""

    payload_B: Tensor
    begun: list[Stack] = field(default_factory=list)


class LocalStep:
    """The tensors of one replica, and what a step does with them, bucket by bucket."""

    def __init__(self, plan: ExchangePlan, tensors: Sequence[LocalTensor], backend: str = "auto") -> None:
        self.tensors = tensors
        self.backends: set[str] = set()
        """Those in use."""
        self._reasons: set[str] = set()
        self._scratch = Scratch()
        self.steps: dict[Stack, StackStep] = {}
        for bucket in plan.buckets:
            for stack in bucket.stacks:
                self.steps[stack] = self._step_for(stack, bucket, plan, backend)

    def _step_for(self, stack: Stack, bucket: Bucket, plan: ExchangePlan, backend: str) -> StackStep:
        plain = TorchStack(stack, self.tensors, limits_for(self.tensors))
        device = self.tensors[stack.entries[0].tensor].parameter.device
        if backend == "torch" or (backend == "auto" and device.type == "cpu"):
            self.backends.add("torch")
            return plain
        reason = why_not(stack, self.tensors)
        if reason is None and device != self._payload_device(bucket):
            reason = f"it is on {device} and shares a payload with tensors on {self._payload_device(bucket)}"
        if reason is None:
            from thinwire.fused_stack import FusedStack  # here, since it imports triton, which not every machine has

            self.backends.add("triton")
            return FusedStack(stack, self.tensors, plain, self._scratch)
        name = plan.tensors[stack.entries[0].tensor].name
        if backend == "triton":
            raise ValueError(f"backend='triton' cannot train {name}: {reason}; backend='auto' uses torch where it must")
        if reason not in self._reasons:
            self._reasons.add(reason)
            _log.warning("the torch backend, which is slower, trains %s and others: %s", name, reason)
        self.backends.add("torch")
        return plain

    def empty(self, bucket: Bucket) -> Encoding:
        """A payload with nothing in it yet."""
        return Encoding(torch.zeros(bucket.payload_bytes, dtype=torch.uint8, device=self._payload_device(bucket)))

    def _payload_device(self, bucket: Bucket) -> torch.device:
        return next((self.tensors[index].parameter.device for index in bucket.tensors), torch.device("cpu"))

    def encode_(self, bucket: Bucket, groups: Sequence[GroupStep], encoding: Encoding) -> None:
        """Encode every stack of a bucket, see `StackStep.encode_`. The header is left to the caller."""
        for stack in bucket.stacks:
            encoding.begun.append(stack)
            self.steps[stack].encode_(groups[stack.group], encoding.payload_B)

    def undo_(self, bucket: Bucket, groups: Sequence[GroupStep], encoding: Encoding) -> None:
        """Take `encode_` back, see `StackStep.undo_`."""
        for stack in encoding.begun:
            self.steps[stack].undo_(groups[stack.group], encoding.payload_B)
        encoding.begun.clear()

    def apply_(self, bucket: Bucket, groups: Sequence[GroupStep], payloads_RB: Tensor, combine_rule: str) -> None:
        """Apply everyone's payloads to the parameters, see `StackStep.apply_`."""
        for stack in bucket.stacks:
            self.steps[stack].apply_(groups[stack.group], payloads_RB, combine_rule)
