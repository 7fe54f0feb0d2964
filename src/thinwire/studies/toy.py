"""A problem in which fast and slow components can be seen.

The error of a matrix is a sum of waves. A few *fast* ones are steep: their gradient is larger than its noise and points the
same way step after step, until they are gone. All others are *slow*: their gradient is below the noise, and only a sum over
many steps shows its direction. DeMo's step is applied to it: gather the gradient, send the strongest, keep the rest.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from thinwire.core.selection import select_topk, subtract_sent_
from thinwire.studies.bases import FIXED, share_of_strongest

EDGE = 64
NUM_SENT = 32
STEPS = 1500
_NUM_FAST_PER_DIM = 3
_FAST_SLOPE, _SLOW_SLOPE = 1.0, 0.05
_FAST_ERROR, _SLOW_ERROR = 8.0, 1.0
_NOISE = 0.25
_RATE, _DECAY = 0.03, 0.99
_LOOKS = tuple(sorted({round(1.2**power) for power in range(40)} | {STEPS}))
_SHARES_AT = 10


@dataclass(frozen=True)
class Course:
    """How a training of the toy went: at ``steps``, the share of the squared error that is left of fast and of slow
    components; and the energy of the momentum in its strongest 1, 2, 4, ... coefficients, while the fast ones are in it."""

    steps: list[int]
    fast: list[float]
    slow: list[float]
    counts: list[int]
    shares: list[float]

    def steps_to(self, share: float, of_fast: bool) -> int | None:
        """The first look at which so little was left."""
        left = self.fast if of_fast else self.slow
        return next((step for step, one in zip(self.steps, left, strict=True) if one <= share), None)


@lru_cache(maxsize=8)
def run_toy(basis: str, kept: float = 1.0, num_sent: int = NUM_SENT) -> Course:
    """Train with the strongest ``num_sent`` coefficients in a basis of `FIXED`; ``kept`` is the share of what is not sent
    that stays after a step."""
    transform = FIXED[basis](EDGE)
    waves = FIXED["DCT"](EDGE)
    slope, error = torch.full((EDGE, EDGE), _SLOW_SLOPE).double(), torch.full((EDGE, EDGE), _SLOW_ERROR).double()
    is_fast = torch.zeros(EDGE, EDGE, dtype=torch.bool)
    is_fast[1 : 1 + _NUM_FAST_PER_DIM, 1 : 1 + _NUM_FAST_PER_DIM] = True
    slope[is_fast], error[is_fast] = _FAST_SLOPE, _FAST_ERROR
    chance = torch.Generator().manual_seed(0)
    error *= torch.randint(0, 2, error.shape, generator=chance) * 2 - 1
    starts = _squares(error, is_fast)
    momentum_1E = torch.zeros(1, EDGE * EDGE, dtype=torch.float64)
    course = Course([], [], [], [2**power for power in range(13)], [])
    for step in range(STEPS):
        gradient = slope * error + _NOISE * torch.randn(error.shape, dtype=torch.float64, generator=chance)
        seen = transform @ (waves.T @ gradient @ waves) @ transform.T
        momentum_1E.mul_(_DECAY).add_(seen.view(1, -1))
        if step == _SHARES_AT:
            course.shares.extend(share_of_strongest(momentum_1E, course.counts))
        indices_1K, values_1K = select_topk([momentum_1E], num_sent)
        sent_1E = torch.zeros_like(momentum_1E).scatter_(1, indices_1K, values_1K)
        subtract_sent_([momentum_1E], indices_1K, values_1K)
        momentum_1E.mul_(kept)
        error -= _RATE * waves @ (transform.T @ sent_1E.view(EDGE, EDGE) @ transform) @ waves.T
        if step + 1 in _LOOKS:
            course.steps.append(step + 1)
            for left, now, start in zip((course.fast, course.slow), _squares(error, is_fast), starts, strict=True):
                left.append(now / start)
    return course


def _squares(error: Tensor, is_fast: Tensor) -> tuple[float, float]:
    return float(error[is_fast].square().sum()), float(error[~is_fast].square().sum())
