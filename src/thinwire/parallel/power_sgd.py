"""PowerSGD (Vogels, Karimireddy and Jaggi 2019) as torch has it: its hook for DDP, metered, and with a state to save.

torch keeps errors and factors per bucket of DDP, and buckets change after DDP's first step. Here they are taken apart into
parameters whenever a bucket is not what it was in the step before: so a resumed run, whose first step has other buckets
again, goes on with the memory that it had.
"""

import logging
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

# DDP's buckets are rebuilt after its first step, which torch's hook must not see.
LEAST_DENSE_STEPS = 2
_MIB = 2**20


class PowerSGD:
    """The hook: whole gradients in the first ``dense_steps`` steps, then two factors of ``rank`` columns for each matrix
    that is worth it, with error feedback and warm start."""

    def __init__(self, model: nn.Module, rank: int, dense_steps: int) -> None:
        logging.getLogger("torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook").setLevel(logging.WARNING)
        options: dict[str, Any] = {"use_error_feedback": True, "warm_start": True}
        self._torch = PowerSGDState(None, rank, max(LEAST_DENSE_STEPS, dense_steps), **options)
        self._numbers = {id(p): number for number, p in enumerate(p for p in model.parameters() if p.requires_grad)}
        self._buckets: dict[int, list[Tensor]] = {}
        self._errors: dict[int, Tensor] = {}
        self._factors: dict[int, Tensor] = {}

    @staticmethod
    def bucket_cap_mb(model: nn.Module) -> float | None:
        """DDP's bucket size: over gloo one bucket must hold all. torch's hook waits for an all-reduce in the callback of
        another; with two buckets that blocks both of gloo's threads, or mixes the order of the all-reduces up."""
        num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        return math.ceil(num_bytes / _MIB) + 1 if dist.get_backend() == "gloo" else None

    def __call__(self, bucket: GradBucket) -> tuple[int, int, torch.futures.Future[Tensor]]:
        """Bytes and number of all-reduces from what torch's hook says that it reduces."""
        state, buffer = self._torch, bucket.buffer()
        if state.iter < state.start_powerSGD_iter:
            return buffer.numel() * buffer.element_size(), 1, powerSGD_hook(state, bucket)
        index, parameters = bucket.index(), bucket.parameters()
        if [id(p) for p in self._buckets.get(index, [])] != [id(p) for p in parameters]:
            self._take_apart()
            self._buckets[index] = parameters
        if index not in state.error_dict and self._errors:
            self._put_together(index)
        before = state.total_numel_after_compression
        future = powerSGD_hook(state, bucket)
        return (state.total_numel_after_compression - before) * buffer.element_size(), 3, future

    def _take_apart(self) -> None:
        """From buckets to parameters."""
        for index, parameters in self._buckets.items():
            if index in self._torch.error_dict:
                parts = self._torch.error_dict[index].split([p.numel() for p in parameters])
                self._errors |= {self._number(p): part.clone() for p, part in zip(parameters, parts, strict=True)}
                ordered = self._compressed(parameters)
                factors = self._torch.q_memory_dict[index].split([self._factor_size(p) for p in ordered])
                self._factors |= {self._number(p): part.clone() for p, part in zip(ordered, factors, strict=True)}
        for memory in (self._torch.error_dict, self._torch.p_memory_dict, self._torch.q_memory_dict, self._buckets):
            memory.clear()

    def _put_together(self, index: int) -> None:
        """From parameters to a bucket. The left factors are computed anew in each step, so any numbers will do for them."""
        parameters = self._buckets[index]
        ordered, device = self._compressed(parameters), parameters[0].device
        nothing = torch.empty(0, device=device)
        errors = [self._errors.pop(self._number(p)).to(device) for p in parameters]
        factors = [self._factors.pop(self._number(p)).to(device) for p in ordered]
        rank = self._torch.matrix_approximation_rank
        left_size = sum(p.shape[0] * min(p.shape[0], p.numel() // p.shape[0], rank) for p in ordered)
        self._torch.error_dict[index] = torch.cat(errors)
        self._torch.q_memory_dict[index] = torch.cat([nothing, *factors])
        self._torch.p_memory_dict[index] = torch.zeros(left_size, device=device)

    def _number(self, parameter: Tensor) -> int:
        return self._numbers[id(parameter)]

    def _compressed(self, parameters: list[Tensor]) -> list[Tensor]:
        """Those that are factored, in the order of torch's factors: one shape after the other."""
        groups: dict[tuple[int, int], list[Tensor]] = {}
        for parameter in parameters:
            if factored_size(parameter, self._torch.matrix_approximation_rank) < parameter.numel():
                groups.setdefault((parameter.shape[0], parameter.numel() // parameter.shape[0]), []).append(parameter)
        return [parameter for group in groups.values() for parameter in group]

    def _factor_size(self, parameter: Tensor) -> int:
        rows, columns = parameter.shape[0], parameter.numel() // parameter.shape[0]
        return int(columns * min(rows, columns, self._torch.matrix_approximation_rank))

    def state_dict(self) -> dict[str, Any]:
        """Per parameter; this replica's own."""
        buckets = dict(self._buckets)
        if self._torch.error_dict:
            self._take_apart()
        state = {"steps": self._torch.iter, "errors": dict(self._errors), "factors": dict(self._factors)}
        self._buckets = buckets
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from it."""
        self._torch.iter = state["steps"]
        self._errors, self._factors = dict(state["errors"]), dict(state["factors"])
        for memory in (self._torch.error_dict, self._torch.p_memory_dict, self._torch.q_memory_dict, self._buckets):
            memory.clear()


def factored_size(parameter: Tensor, rank: int) -> int:
    """How many elements of a parameter's gradient are all-reduced: two factors, or all where those are not half as many."""
    if parameter.dim() == 0:
        return 1
    rows, columns = parameter.shape[0], parameter.numel() // max(1, parameter.shape[0])
    factors = (rows + columns) * min(rows, columns, rank)
    return factors if 2 * factors < parameter.numel() else parameter.numel()
