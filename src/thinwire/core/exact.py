"""The inverse transform in whole numbers: the same bits on every device, whatever the order of its additions.

Coefficients are rounded to integers of 8 bits, relative to the largest of their chunk, and so is the DCT basis. Then every
partial sum of ``N B`` is an integer of at most 24 bits, which float32 holds exactly: no order of additions, no fused
multiply-add, no TF32 or bfloat16 unit can change it. What lies between the two products is rounded to 16 bits, and
multiplied in two halves of 8:

    N = round(2^(8-e) Q)          2^e: the power of two above the chunk's largest coefficient
    T = round(2^-l N B')          B' = round(2^b B), l: bits of the number of columns
    D = 2^8 (A'^T H) + A'^T L     T = 2^8 H + L; the one addition that rounds, once, as IEEE 754 says

and D, times a power of two, is the direction. About 0.1 % of its signs are not those of real arithmetic, the ones nearest to
0 (docs/reliability.md).
"""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.core.layout import ChunkLayout
from thinwire.core.transform import dct_basis

_EXACT_BITS = 24
_MOST_BITS = 8
LEAST_EXPONENT, MOST_EXPONENT = -100, 100


class Scales(NamedTuple):
    """``bits`` of coefficients and basis; ``drop`` bits of the first product are rounded away; D is in units of ``2^unit``
    times the scale of the chunk."""

    bits: int
    drop: int
    unit: int


@functools.lru_cache(maxsize=256)
def scales_of(row_edge: int, col_edge: int) -> Scales:
    """The scales for chunks of this size. Edges above 256 leave fewer than 8 bits."""
    drop = (col_edge - 1).bit_length()
    bits = min(_MOST_BITS, (_EXACT_BITS - max(drop, (row_edge - 1).bit_length())) // 2)
    return Scales(bits, drop, drop - bits - _basis_exponent(row_edge, bits) - _basis_exponent(col_edge, bits))


def _basis_exponent(size: int, bits: int) -> int:
    """The power of two that makes the largest element of a basis, ``sqrt(2 / size)``, an integer of so many bits."""
    return 0 if size == 1 else math.floor(bits + math.log2(size / 2) / 2)


@functools.lru_cache(maxsize=256)
def integer_basis(size: int, bits: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The DCT matrix times a power of two, rounded to integers."""
    basis = dct_basis(size, torch.float64, torch.device("cpu")) * 2.0 ** _basis_exponent(size, bits)
    return basis.round().to(dtype=dtype, device=device)


def inverse_exact(coefficients_CE: Tensor, layout: ChunkLayout, largest: float | None) -> Tensor:
    """Combined coefficients (C, E) back to elements (C, row_edge, col_edge).

    ``largest``: no coefficient is larger than that, a power of two; None: the largest of each chunk is looked for.
    """
    chunks = coefficients_CE.view(-1, layout.row_edge, layout.col_edge)
    if layout.dense:
        return chunks
    bits, drop, unit = scales_of(layout.row_edge, layout.col_edge)
    exponent = _exponent(chunks, largest)
    elements = (chunks * _power_of_2(bits - exponent, chunks.dtype)).round_()
    if layout.col_edge > 1:
        basis = integer_basis(layout.col_edge, bits, chunks.dtype, chunks.device)
        elements = (elements.view(-1, layout.col_edge) @ basis).mul_(2.0**-drop).round_().view(chunks.shape)
    if layout.row_edge > 1:
        basis = integer_basis(layout.row_edge, bits, chunks.dtype, chunks.device).T.expand(len(chunks), -1, -1)
        high = (elements * 2.0**-bits).round_()
        low = elements.sub_(high, alpha=2**bits)
        elements = torch.bmm(basis, low).add_(torch.bmm(basis, high), alpha=2**bits)
    return elements * _power_of_2(exponent + unit, chunks.dtype)


def _exponent(chunks: Tensor, largest: float | None) -> Tensor:
    """The least e with ``|q| <= 2^e`` for all of a chunk, (C, 1, 1)."""
    if largest is not None:
        return torch.full((1, 1, 1), int(math.log2(largest)), dtype=torch.int32, device=chunks.device)
    found = chunks.abs().amax(dim=(1, 2), keepdim=True)
    mantissa, exponent = torch.frexp(found)
    exponent = exponent.to(torch.int32) - (mantissa == 0.5).to(torch.int32)
    return exponent.clamp_(LEAST_EXPONENT, MOST_EXPONENT).masked_fill_(found == 0, LEAST_EXPONENT)


def _power_of_2(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """Made from bits, since a device's own power may be off by one."""
    if dtype == torch.float64:
        return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)
    return ((exponent + 127) << 23).view(torch.float32)
