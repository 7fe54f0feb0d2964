"""The chunked orthonormal DCT-II, forward over gradients and inverse over combined coefficients.

A chunk X of ``row_edge x col_edge`` elements becomes ``A X B^T`` with A and B the DCT matrices of its edges; the inverse
is ``A^T Y B``. An edge of 1 needs no transform, and a *dense* chunk has none at all (its coefficients are its elements).
"""

import functools
import math

import torch
from torch import Tensor

from thinwire.core.layout import ChunkLayout, chunks_view
from thinwire.core.scratch import Scratch

GRADIENT_LIMIT = 2.0**64
"""Gradients with larger values count as infinite: their squares leave the range of float32."""


@functools.lru_cache(maxsize=256)
def dct_basis(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The orthonormal DCT-II matrix: row f holds the cosine of frequency f. Rounded once, from float64."""
    position = torch.arange(size, dtype=torch.float64, device="cpu") + 0.5
    frequency = torch.arange(size, dtype=torch.float64, device="cpu")[:, None]
    basis = torch.cos(frequency * position * (math.pi / size)) * math.sqrt(2.0 / size)
    basis[0] = math.sqrt(1.0 / size)
    return basis.to(dtype=dtype, device=device)


def accumulate_(
    momentum_CE: Tensor, bands: Tensor, layout: ChunkLayout, decay: float, gradient_scale: float, scratch: Scratch
) -> None:
    """``m <- decay * m + gradient_scale * T(g)``, with the gradient as (bands, row_edge, cols)."""
    if bands.device.type == "cpu" and layout.col_edge > 1 and not layout.dense:
        _accumulate_by_bands_(momentum_CE, bands, layout, decay, gradient_scale, scratch)
        return
    coefficients = forward(bands, layout, scratch)
    if gradient_scale != 1:
        coefficients = coefficients * gradient_scale
    chunks = momentum_CE.view(coefficients.shape)
    torch.add(coefficients, chunks, alpha=decay, out=chunks)


def _accumulate_by_bands_(
    momentum_CE: Tensor, bands: Tensor, layout: ChunkLayout, decay: float, gradient_scale: float, scratch: Scratch
) -> None:
    """The same with a product per band, which a CPU does not mind: it brings the band into chunk order at no cost.

    The product along the columns then adds to the momentum as it goes, so that no pass is spent on either.
    """
    chunks = chunks_view(bands, layout)
    if layout.row_edge > 1:
        basis = dct_basis(layout.row_edge, bands.dtype, bands.device).expand(layout.chunks_per_band, -1, -1)
        products = scratch.take("first", tuple(chunks.shape), bands.dtype, bands.device)
        for band, product in zip(chunks.unbind(), products.unbind(), strict=True):
            torch.bmm(basis, band, out=product)
        chunks = products
    basis = dct_basis(layout.col_edge, bands.dtype, bands.device)
    tall = momentum_CE.view(-1, layout.col_edge)
    torch.addmm(tall, chunks.reshape(tall.shape), basis.T, beta=decay, alpha=gradient_scale, out=tall)


def forward(bands: Tensor, layout: ChunkLayout, scratch: Scratch) -> Tensor:
    """Transform (bands, row_edge, cols) to coefficients seen as (bands, chunks_per_band, row_edge, col_edge).

    The gradient is multiplied where it lies: along its columns as one tall matrix product, then along the rows of each
    band, so no pass is spent on bringing it into chunk order; the result is a strided view in that order.
    """
    if layout.dense:
        return chunks_view(bands, layout)
    coefficients = bands
    if layout.col_edge > 1:
        basis = dct_basis(layout.col_edge, bands.dtype, bands.device)
        coefficients = along_cols(coefficients, basis.T, scratch.like("first", bands))
    if layout.row_edge > 1:
        basis = dct_basis(layout.row_edge, bands.dtype, bands.device)
        coefficients = along_rows(basis, coefficients, scratch.like("second", bands))
    return chunks_view(coefficients, layout)


def inverse_(coefficients_CE: Tensor, layout: ChunkLayout, scratch: Scratch) -> Tensor:
    """Transform combined coefficients (C, E) back to elements (C, row_edge, col_edge), overwriting them."""
    chunks = coefficients_CE.view(-1, layout.row_edge, layout.col_edge)
    if layout.dense:
        return chunks
    elements = chunks
    if layout.row_edge > 1:
        basis = dct_basis(layout.row_edge, chunks.dtype, chunks.device)
        elements = along_rows(basis.T, elements, scratch.like("second", chunks))
    if layout.col_edge > 1:
        basis = dct_basis(layout.col_edge, chunks.dtype, chunks.device)
        target = chunks if layout.row_edge > 1 else scratch.like("second", chunks)
        elements = along_cols(elements, basis, target)
    return elements


def frequencies_of(indices_CJ: Tensor, layout: ChunkLayout) -> tuple[Tensor, Tensor]:
    """The row and the column of each coefficient in its chunk; voids get those of the last."""
    indices = indices_CJ.clamp(max=layout.num_elements - 1)
    return indices // layout.col_edge, indices % layout.col_edge


def inverse_of_few(frequencies: tuple[Tensor, Tensor], values_CJ: Tensor, layout: ChunkLayout, scratch: Scratch) -> Tensor:
    """The same inverse from a list of J coefficients per chunk, in any order; voids hold the value 0.

    The sum of v * (row of A) x (row of B) over the list is one matrix product of gathered basis rows, and needs about
    J / (row_edge + col_edge) of the arithmetic of `inverse_`.
    """
    num_chunks, num_listed = values_CJ.shape
    dtype, device = values_CJ.dtype, values_CJ.device
    edges, factors = (layout.row_edge, layout.col_edge), []
    for which, edge, role in zip(frequencies, edges, ("rows_of_few", "cols_of_few"), strict=True):
        gathered = scratch.take(role, (num_chunks * num_listed, edge), dtype, device)
        torch.index_select(dct_basis(edge, dtype, device), 0, which.view(-1), out=gathered)
        factors.append(gathered.view(num_chunks, num_listed, edge))
    rows, cols = factors
    cols.mul_(values_CJ[:, :, None])
    return torch.bmm(rows.transpose(1, 2), cols, out=scratch.take("second", (num_chunks, *edges), dtype, device))


def along_cols(blocks: Tensor, basis: Tensor, product: Tensor) -> Tensor:
    """Every row of the blocks times the basis, into ``product``."""
    torch.mm(blocks.reshape(-1, len(basis)), basis, out=product.view(-1, len(basis)))
    return product


def along_rows(basis: Tensor, blocks: Tensor, product: Tensor) -> Tensor:
    """The basis times each block, into ``product``."""
    return torch.bmm(basis.expand(len(blocks), -1, -1), blocks, out=product)
