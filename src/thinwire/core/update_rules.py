"""Update rules: how the decoded direction d, the same on every replica, changes the parameters.

Each rule is one row of `UPDATE_RULES`. A rule changes ``p`` in place and may overwrite ``d``; all tensors have one shape
and one dtype, the compute dtype. Products are rounded before they are added (no fused multiply-add), so that a rule
gives the same bits wherever each single operation does.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Hyper:
    """The settings of one parameter group that its rule reads, at one step (the first step is 1)."""

    lr: float
    step: int
    betas: tuple[float, float]
    eps: float


@dataclass(frozen=True)
class UpdateRule:
    """``apply_(p, d, state, hyper)``; ``state_names`` are float tensors of p's shape, zero at first."""

    name: str
    apply_: Callable[[Tensor, Tensor, dict[str, Tensor], Hyper], None]
    state_names: tuple[str, ...] = ()
    whole_matrices: bool = False
    """Whether the rule needs d whole, as (matrices, rows, cols), instead of any part of it."""


def sign_(p: Tensor, d: Tensor, state: dict[str, Tensor], hyper: Hyper) -> None:
    """``p <- p - lr * sign(d)``: DeMo as published."""
    p.add_(d.sign_(), alpha=-hyper.lr)  # a product with 1, -1 or 0 is exact, so fusing it with the sum changes nothing


def sgd_(p: Tensor, d: Tensor, state: dict[str, Tensor], hyper: Hyper) -> None:
    """``p <- p - lr * d``."""
    p.sub_(d.mul_(hyper.lr))


def adamw_(p: Tensor, d: Tensor, state: dict[str, Tensor], hyper: Hyper) -> None:
    """``p <- p - lr * d / (sqrt(v) + eps)`` with v the bias-corrected mean of d^2 (decay ``betas[1]``).

    The correction is that of the group's steps. An element that is new at a later one, in a layer unfrozen then, begins with
    what makes v its own d^2: from 0 its first steps would be up to ``1 / sqrt(1 - beta)`` times too long."""
    second_moment, beta = state["second_moment"], hyper.betas[1]
    is_new, squares = second_moment == 0, d * d
    first = squares * (1 - beta**hyper.step)
    second_moment.mul_(beta).add_(squares.mul_(1 - beta))
    second_moment.copy_(torch.where(is_new, first, second_moment))
    # A tensor, since a GPU would multiply by the rounded inverse of a number.
    correction = torch.full((), 1 - beta**hyper.step, dtype=d.dtype, device=d.device)
    denominator = _rounded_sqrt(second_moment / correction).add_(hyper.eps)
    p.sub_(d.div_(denominator).mul_(hyper.lr))


def _rounded_sqrt(x: Tensor) -> Tensor:
    """The nearest float to the square root: on a CPU torch's own may be the one beside it. Through float64 it cannot be,
    since no root of a float32 comes that close to the middle between two."""
    return x.double().sqrt_().to(x.dtype) if x.device.type == "cpu" else x.sqrt_()


def lion_(p: Tensor, d: Tensor, state: dict[str, Tensor], hyper: Hyper) -> None:
    """``p <- p - lr * sign(b1*M + (1-b1)*d)``, then ``M <- b2*M + (1-b2)*d``."""
    average, (beta1, beta2) = state["direction_average"], hyper.betas
    blend = (average * beta1).add_(d * (1 - beta1))
    p.add_(blend.sign_(), alpha=-hyper.lr)
    average.mul_(beta2).add_(d.mul_(1 - beta2))


def muon_(p: Tensor, d: Tensor, state: dict[str, Tensor], hyper: Hyper) -> None:
    """``p <- p - lr * sqrt(max(1, rows/cols)) * U V^T`` with ``d = U S V^T``, per matrix; a vector is one row."""
    scale = max(1.0, d.shape[-2] / d.shape[-1]) ** 0.5
    p.add_(orthogonalise(d), alpha=-hyper.lr * scale)


# Coefficients of an odd quintic a*s + b*s^3 + c*s^5 that is applied five times; they push every singular value in (0, 1]
# quickly towards 1 and leave it between about 0.7 and 1.2 (Jordan et al., Muon, 2024).
_QUINTIC = (3.4445, -4.7750, 2.0315)
_NUM_ITERATIONS = 5


def orthogonalising_flops(num_rows: int, num_cols: int) -> int:
    """Floating-point operations of `orthogonalise` for one matrix: three products in each iteration."""
    short, long = sorted((num_rows, num_cols))
    return _NUM_ITERATIONS * 2 * short**2 * (2 * long + short)


def orthogonalise(matrices: Tensor, num_iterations: int = _NUM_ITERATIONS) -> Tensor:
    """Replace the singular values of each matrix by about 1 (Newton-Schulz); a zero matrix stays zero.

    On a GPU float32 is rounded to bfloat16 first, as is usual for Muon: the iteration forgives its rounding, and products in
    float32 take several times as long."""
    a, b, c = _QUINTIC
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    wide = (matrices.mT if is_tall else matrices).reshape(-1, *sorted(matrices.shape[-2:]))
    # In float64: the squares of a very small or large d would leave the range of float32.
    norm = torch.linalg.vector_norm(wide, dim=(-2, -1), keepdim=True, dtype=torch.float64).to(wide.dtype)
    is_rounded = wide.is_cuda and wide.dtype == torch.float32
    x = (wide / torch.where(norm > 0, norm, 1)).to(torch.bfloat16 if is_rounded else wide.dtype)
    with torch.autocast(x.device.type, enabled=False):  # the caller may be inside one
        for _ in range(num_iterations):
            gram = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    found = (x.mT if is_tall else x).to(matrices.dtype)
    return found.reshape(matrices.shape)


UPDATE_RULES: dict[str, UpdateRule] = {
    rule.name: rule
    for rule in (
        UpdateRule("sign", sign_),
        UpdateRule("sgd", sgd_),
        UpdateRule("adamw", adamw_, state_names=("second_moment",)),
        UpdateRule("lion", lion_, state_names=("direction_average",)),
        UpdateRule("muon", muon_, whole_matrices=True),
    )
}
