"""The inverse transform in whole numbers: the same bits on every device, whatever the order of its additions.

Coefficients are rounded to integers of 8 bits, relative to the largest of their chunk, and so is the DCT basis (7 bits for
edges above 64); what lies between the two products is rounded to 11 bits:

    N = round(2^(8-e) Q)     2^e: the power of two above the chunk's largest coefficient
    T = round(2^-l N B')     B' = round(2^b B)
    D = A'^T T               and D, times a power of two, is the direction

``l`` is such that no partial sum, of whatever chunk, leaves the 24 bits in which float32 holds every integer exactly: so no
order of additions, no fused multiply-add and no TF32 or float16 unit can change it. About 0.3 % of the signs of D are not
those of real arithmetic, the ones nearest to 0 (docs/reliability.md). Chunks with edges above 128, which would leave too few
bits, are computed in float64 instead.
"""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.core.layout import ChunkLayout
from thinwire.core.scratch import Scratch
from thinwire.core.transform import along_cols, along_rows, dct_basis

_LARGEST_SUM, _LARGEST_FACTOR, _BITS = 2**24, 2**11, 8
"""Integers up to the factor are exact in float16 and in TF32."""
_LARGEST_EDGE, _EDGE_OF_FULL_BITS = 128, 64
_WIDE_SUM, _WIDE_FACTOR, _WIDE_BITS = 2**53, 2**24, 12
LEAST_EXPONENT, MOST_EXPONENT = -100, 100


class Scales(NamedTuple):
    """``bits`` of coefficients, ``basis_bits`` of the basis; ``drop`` bits of the first product are rounded away; D is in
    units of ``2^unit`` times the scale of the chunk."""

    bits: int
    basis_bits: int
    drop: int
    unit: int


@functools.lru_cache(maxsize=256)
def scales_of(row_edge: int, col_edge: int) -> Scales:
    """The scales for chunks of this size."""
    is_wide = max(row_edge, col_edge) > _LARGEST_EDGE
    most, factor, bits = (_WIDE_SUM, _WIDE_FACTOR, _WIDE_BITS) if is_wide else (_LARGEST_SUM, _LARGEST_FACTOR, _BITS)
    basis_bits = bits if is_wide or max(row_edge, col_edge) <= _EDGE_OF_FULL_BITS else bits - 1
    limit = min(factor, most // _largest_sum(row_edge, basis_bits))
    drop = max(0, math.ceil(math.log2((_largest_sum(col_edge, basis_bits) << bits) / limit)))
    unit = drop - bits - _basis_exponent(row_edge, basis_bits) - _basis_exponent(col_edge, basis_bits)
    return Scales(bits, basis_bits, drop, unit)


def _largest_sum(size: int, bits: int) -> int:
    """The largest sum of absolute values down a column of the integer basis."""
    return int(integer_basis(size, bits, torch.float64, torch.device("cpu")).abs().sum(dim=0).max())


def _basis_exponent(size: int, bits: int) -> int:
    """The power of two that makes the largest element of a basis, ``sqrt(2 / size)``, an integer of so many bits."""
    return 0 if size == 1 else math.floor(bits + math.log2(size / 2) / 2)


@functools.lru_cache(maxsize=256)
def integer_basis(size: int, bits: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The DCT matrix times a power of two, rounded to integers."""
    basis = dct_basis(size, torch.float64, torch.device("cpu")) * 2.0 ** _basis_exponent(size, bits)
    return basis.round().to(dtype=dtype, device=device)


def inverse_exact_(coefficients_CE: Tensor, layout: ChunkLayout, scratch: Scratch, largest: float | None) -> Tensor:
    """Combined coefficients (C, E) back to elements (C, row_edge, col_edge), overwriting them.

    ``largest``: no coefficient is larger than that, a power of two; None: the largest of each chunk is looked for.
    """
    chunks = coefficients_CE.view(-1, layout.row_edge, layout.col_edge)
    if layout.dense:
        return chunks
    bits, basis_bits, drop, unit = scales_of(layout.row_edge, layout.col_edge)
    dtype = chunks.dtype
    if bits > _BITS or _may_cut_factors():
        chunks = chunks.double()
    exponent = int(math.log2(largest)) if largest is not None else _exponent(chunks)
    elements = chunks.mul_(_power_of_2(bits - exponent, chunks.dtype)).round_()
    if layout.col_edge > 1:
        basis = integer_basis(layout.col_edge, basis_bits, chunks.dtype, chunks.device)
        elements = along_cols(elements, basis, scratch.like("second", chunks))
    elements.mul_(2.0**-drop).round_()
    if layout.row_edge > 1:
        basis = integer_basis(layout.row_edge, basis_bits, chunks.dtype, chunks.device)
        elements = along_rows(basis.T, elements, chunks if layout.col_edge > 1 else scratch.like("second", chunks))
    return elements.mul_(_power_of_2(exponent + unit, elements.dtype)).to(dtype)


def _may_cut_factors() -> bool:
    """Whether float32 products may have factors of bfloat16, which holds 8 bits: those of precision "medium"."""
    try:
        return torch.get_float32_matmul_precision() == "medium"
    except RuntimeError:  # the precision was set per backend, and torch then refuses to name one for all
        return True


def _exponent(chunks: Tensor) -> Tensor:
    """The least e with ``|q| <= 2^e`` for all of a chunk, (C, 1, 1)."""
    found = chunks.abs().amax(dim=(1, 2), keepdim=True)
    mantissa, exponent = torch.frexp(found)
    exponent = exponent.to(torch.int32) - (mantissa == 0.5).to(torch.int32)
    return exponent.clamp_(LEAST_EXPONENT, MOST_EXPONENT).masked_fill_(found == 0, LEAST_EXPONENT)


def _power_of_2(exponent: Tensor | int, dtype: torch.dtype) -> Tensor | float:
    """Made from bits, since a device's own power may be off by one."""
    if isinstance(exponent, int):
        return 2.0**exponent
    if dtype == torch.float64:
        return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)
    return ((exponent + 127) << 23).view(torch.float32)
