"""Is what backward left in ``.grad`` fit for a step, and is it this replica's own?"""

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.exchange.agreement import Problem

_FINGERPRINT_ELEMENTS = 4096


def first_problem(parameters: Sequence[Tensor], found_inf: float | None) -> tuple[Problem, int]:
    """What keeps this replica from stepping, and the first parameter concerned.

    ``found_inf`` is what a GradScaler found, None if there is no scaler.
    """
    present = [(index, parameter.grad) for index, parameter in enumerate(parameters) if parameter.grad is not None]
    for index, gradient in present:
        if gradient.layout != torch.strided:
            return Problem.SPARSE, index
    bad = _first_nonfinite(present)
    if found_inf is not None and (bad >= 0 or found_inf > 0):
        return Problem.OVERFLOW, max(bad, 0)
    return (Problem.NONFINITE if bad >= 0 else Problem.NONE), bad


def _first_nonfinite(gradients: Sequence[tuple[int, Tensor]]) -> int:
    """The first tensor with NaN or Inf in its gradient, or -1.

    A sum shows any NaN or Inf at the price of one pass; only where a sum is not finite is each element looked at, since
    large finite elements may overflow it too.
    """
    sums: dict[torch.device, list[Tensor]] = {}
    for _, gradient in gradients:
        wide = torch.promote_types(gradient.dtype, torch.float32)
        sums.setdefault(gradient.device, []).append(gradient.sum(dtype=wide).double())
    if all(bool(torch.stack(on_device).isfinite().all()) for on_device in sums.values()):
        return -1
    return next((index for index, gradient in gradients if not bool(gradient.isfinite().all())), -1)


def fingerprint(parameters: Sequence[Tensor]) -> int:
    """A number that is equal on two replicas only if their gradients are; 0 if there are none to compare."""
    for parameter in parameters:
        if parameter.grad is not None:
            head = parameter.grad.flatten()[:_FINGERPRINT_ELEMENTS].double()
            if bool(head.any()):
                return zlib.crc32(head.cpu().numpy().tobytes()) + 1
    return 0
