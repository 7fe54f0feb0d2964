"""Is what backward left in ``.grad`` fit for a step, and is it this replica's own?"""

import logging
import warnings
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.core.errors import NonFiniteGradientError, ThinwireError
from thinwire.exchange.gradient_sync import is_synchronised_by_ddp
from thinwire.wire.payload import Header, Problem, Trouble

_log = logging.getLogger("thinwire")
_FINGERPRINT_ELEMENTS = 4096


def first_trouble(
    gradients: Sequence[tuple[int, Tensor | None]], found_inf: float | None, finite_checked_later: bool = False
) -> Trouble:
    """What keeps this replica from stepping, and the number of the first gradient concerned.

    ``found_inf`` is what a GradScaler found, None if there is no scaler. Values are not looked at if that is done later, and
    no scaler says that it is worth while.
    """
    present = [(index, gradient) for index, gradient in gradients if gradient is not None]
    for index, gradient in present:
        if gradient.layout != torch.strided:
            return Trouble(Problem.SPARSE, index)
    bad = -1 if finite_checked_later and not found_inf else _first_nonfinite(present)
    if found_inf is not None and (bad >= 0 or found_inf > 0):
        return Trouble(Problem.OVERFLOW, max(bad, 0))
    return Trouble(Problem.NONFINITE, bad) if bad >= 0 else Trouble()


def _first_nonfinite(gradients: Sequence[tuple[int, Tensor]]) -> int:
    """The first tensor whose gradient has NaN or Inf in it, or is so large that its norm overflows; or -1.

    No coefficient of a chunk exceeds the norm of the gradient, so a finite norm keeps the momentum finite too.
    """
    alike: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor]]] = {}
    for index, gradient in gradients:
        alike.setdefault((gradient.device, gradient.dtype), []).append((index, gradient))
    bad = []
    for (_, dtype), found in alike.items():  # one pass over those that are alike, and one wait
        wide = torch.promote_types(dtype, torch.float32)
        norms = torch._foreach_norm([gradient for _, gradient in found], 2, dtype=wide)
        is_finite = torch.stack(norms).float().square().isfinite().tolist()  # float64 has no larger limit than float32
        bad += [index for (index, _), fine in zip(found, is_finite, strict=True) if not fine]
    return min(bad, default=-1)


def fingerprint(gradients: Sequence[Tensor | None]) -> int:
    """A checksum of the first elements of the first gradient that is not all zero; 0 if there is none.

    Replicas that saw different data practically never have the same.
    """
    for gradient in gradients:
        if gradient is not None:
            head = gradient.flatten()[:_FINGERPRINT_ELEMENTS].double()
            if bool(head.any()):
                return zlib.crc32(head.cpu().numpy().tobytes()) + 1
    return 0


def check_own_gradients(fingerprints: Sequence[int], num_replicas: int, parameters: Sequence[Tensor]) -> bool:
    """Say so if the gradients of all replicas are the same; False if there were none to compare yet.

    ``fingerprints`` are those of every replica, part by part of the model; a part in which one has none is left out.
    """
    parts = [fingerprints[first : first + num_replicas] for first in range(0, len(fingerprints), num_replicas)]
    comparable = [part for part in parts if 0 not in part]
    if not comparable:
        return False
    if num_replicas < 2 or any(len(set(part)) > 1 for part in comparable):
        return True
    if is_synchronised_by_ddp(parameters):
        raise ThinwireError(
            "DistributedDataParallel averages the gradients before DeMo sees them, so nothing is saved; call "
            "thinwire.disable_gradient_sync(ddp_model) once before training"
        )
    warnings.warn(
        f"all {num_replicas} replicas have the same gradients: either something averages them before DeMo sees them, "
        "or every replica reads the same data",
        stacklevel=5,
    )
    return True


def tell_trouble(header: Header, names: Sequence[str], raises: bool) -> None:
    """Say that all replicas leave a step out because of what one of them has found; or raise, if that is wanted."""
    replica, problem, tensor = header.replica, header.trouble.problem, header.trouble.tensor
    name = names[tensor] if 0 <= tensor < len(names) else "a tensor"
    if problem is Problem.SPARSE:
        raise TypeError(f"replica {replica} has a sparse gradient for {name}; DeMo needs dense gradients")
    if problem is Problem.NONFINITE and raises:
        raise NonFiniteGradientError(
            f"replica {replica} has NaN or Inf in the gradient of {name} at step {header.step} (what is too large to be "
            "squared counts as Inf); no replica took the step. on_nonfinite='skip' leaves such steps out"
        )
    _log.warning("step skipped on all replicas: replica %d has NaN or Inf in the gradient of %s", replica, name)
