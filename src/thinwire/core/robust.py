"""How much of what each replica sent may count, so that none outweighs the others however large its values are.

A replica whose norm is above the median of all norms is scaled down to it. A factor decides bits of every parameter, so it
must come out the same on every device: nothing is added up in floating point, and quotient and root are taken on the host.

    |v| = m 2^e, with m rounded to 16 bits
    S[e] = sum of m^2 over the values with the exponent e        in int64, in any order
    norm^2 = sum of S[e] 4^e                                     in Python's integers, which have no limit
    factor = sqrt(median of norm^2 / norm^2)                     1 at or below the median
"""

import math
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

_DROPPED_BITS, _FRACTION_BITS = 8, 23


def squares_by_exponent(values: Tensor) -> Tensor:
    """The sums of squares of float32 values, one per exponent (256), as integers in units of the exponent's own."""
    bits = values.reshape(-1).view(torch.int32) & 0x7FFFFFFF
    exponents = bits >> _FRACTION_BITS
    is_normal = (exponents > 0).to(torch.int32)
    significands = (bits & ((1 << _FRACTION_BITS) - 1)) | (is_normal << _FRACTION_BITS)
    rounded = (significands + (1 << (_DROPPED_BITS - 1))) >> _DROPPED_BITS
    sums = torch.zeros(256, dtype=torch.int64, device=values.device)
    # Numbers below the normal ones have the exponent of the least normal ones.
    return sums.scatter_add_(0, exponents.clamp_(min=1).to(torch.int64), rounded.to(torch.int64).square_())


def squared_norm(sums: Tensor) -> int:
    """The square of the norm, in units that are the same for everyone, from what `squares_by_exponent` returned."""
    return sum(int(total) << (2 * exponent) for exponent, total in enumerate(sums.tolist()))


def clip_factors(squared_norms: Sequence[int]) -> list[float]:
    """What to multiply each replica's values with, rounded to float32.

    The median of an even number is the lower of the two in the middle: half of the replicas cannot raise it.
    """
    median = sorted(squared_norms)[(len(squared_norms) - 1) // 2]
    return [1.0 if square <= median else _to_float32(math.sqrt(median / square)) for square in squared_norms]


def _to_float32(number: float) -> float:
    rounded: float = struct.unpack("f", struct.pack("f", number))[0]
    return rounded
