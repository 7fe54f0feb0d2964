"""Balance: the usual size of the rows and columns of many gradients, and what they are multiplied with, in three launches.

They compute what `core.balance.note_` and `core.balance.weights_of` do, into the vectors that `kernels.table.vectors_of`
finds. The kernel that accumulates multiplies by the weights as it reads. No sum is added up with
atomics, so that a step taken again has the same bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.core.balance import LEAST_MEAN, LEAST_SHARE
from thinwire.core.scratch import Scratch
from thinwire.kernels.table import (
    BANDS_PER_MATRIX,
    CHUNKS_PER_BAND,
    COL_ENERGY,
    FIRST_CHUNK,
    GRADIENT,
    NUM_COLUMNS,
    ROW_ENERGY,
    TRITON_DTYPES,
    ChunkTable,
    address,
    cut_constants,
    launching,
    load_tile,
    tile_of,
    vectors_of,
)
from thinwire.wire.payload import Verdict

_REFUSED: tl.constexpr = tl.constexpr(int(Verdict.REFUSED))
_LEAST_SHARE: tl.constexpr = tl.constexpr(LEAST_SHARE)
_LEAST_MEAN: tl.constexpr = tl.constexpr(LEAST_MEAN)
_LARGEST: tl.constexpr = tl.constexpr(3.4028234663852886e38)
_BANDS_AT_ONCE: tl.constexpr = tl.constexpr(32)
_AT_ONCE: tl.constexpr = tl.constexpr(2048)


@triton.jit
def _squares_kernel(
    rows_ptr, row_of_chunk_ptr, bands_ptr, sums_ptr,
    ROW_EDGE: tl.constexpr, COL_EDGE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, DENSE: tl.constexpr,
    PADDED: tl.constexpr, ALIGNED: tl.constexpr, FULL: tl.constexpr, GRADIENT_DTYPE: tl.constexpr,
):  # fmt: skip
    """Of a band of chunks: the mean squares of its rows, to where their weights will be, and the sums of squares down the
    columns of each chunk."""
    first_chunk = tl.load(bands_ptr + tl.program_id(0))
    row_ptr = rows_ptr + tl.load(row_of_chunk_ptr + first_chunk) * NUM_COLUMNS
    first_local = first_chunk - tl.load(row_ptr + FIRST_CHUNK).to(tl.int32)
    chunks_per_band = tl.load(row_ptr + CHUNKS_PER_BAND).to(tl.int32)
    gradient_ptr = address(row_ptr, GRADIENT, GRADIENT_DTYPE, ALIGNED)
    rows = tl.arange(0, BLOCK_R)[:, None]
    cols = tl.arange(0, BLOCK_C)[None, :]
    side_R = tl.arange(0, BLOCK_R)
    side_C = tl.arange(0, BLOCK_C)
    squares_RC = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for place in range(0, chunks_per_band):
        first, offsets, exists = tile_of(row_ptr, first_local + place, rows, cols, ROW_EDGE, COL_EDGE, PADDED, ALIGNED)
        gradient = load_tile(gradient_ptr + first + offsets, exists, FULL)
        squares_RC += gradient * gradient
        tl.store(sums_ptr + (first_chunk + place).to(tl.int64) * BLOCK_C + side_C, tl.sum(gradient * gradient, axis=0))
    vectors_ptr, _, num_rows, num_cols = vectors_of(row_ptr, first_local)
    bands_per_matrix = tl.load(row_ptr + BANDS_PER_MATRIX).to(tl.int32)
    row = (first_local // chunks_per_band) % bands_per_matrix * ROW_EDGE + side_R
    exists_R = (side_R < ROW_EDGE) & (row < num_rows)
    tl.store(vectors_ptr + row, tl.sum(squares_RC, axis=1) / num_cols, mask=exists_R)


@triton.jit
def _columns_kernel(
    rows_ptr, row_of_chunk_ptr, columns_ptr, sums_ptr, COL_EDGE: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    """Of the chunks below each other in a matrix: the mean squares of their columns, to where their weights will be."""
    first_chunk = tl.load(columns_ptr + tl.program_id(0))
    row_ptr = rows_ptr + tl.load(row_of_chunk_ptr + first_chunk) * NUM_COLUMNS
    local = first_chunk - tl.load(row_ptr + FIRST_CHUNK).to(tl.int32)
    chunks_per_band = tl.load(row_ptr + CHUNKS_PER_BAND).to(tl.int32)
    bands_per_matrix = tl.load(row_ptr + BANDS_PER_MATRIX).to(tl.int32)
    side_C = tl.arange(0, BLOCK_C)
    sums_BC = tl.zeros((_BANDS_AT_ONCE, BLOCK_C), tl.float32)
    for first_band in range(0, bands_per_matrix, _BANDS_AT_ONCE):
        band = first_band + tl.arange(0, _BANDS_AT_ONCE)[:, None]
        chunk = (first_chunk + band * chunks_per_band).to(tl.int64)
        sums_BC += tl.load(sums_ptr + chunk * BLOCK_C + side_C[None, :], mask=band < bands_per_matrix, other=0.0)
    vectors_ptr, _, num_rows, num_cols = vectors_of(row_ptr, local)
    col = local % chunks_per_band * COL_EDGE + side_C
    exists_C = (side_C < COL_EDGE) & (col < num_cols)
    tl.store(vectors_ptr + num_rows + col, tl.sum(sums_BC, axis=0) / num_rows, mask=exists_C)


@triton.jit
def _side_of(rows_ptr, row_of_chunk_ptr, matrices_ptr):
    """(energies, weights, energies before) of the rows of a matrix, or of its columns, and how many there are."""
    first_chunk = tl.load(matrices_ptr + tl.program_id(0))
    row_ptr = rows_ptr + tl.load(row_of_chunk_ptr + first_chunk) * NUM_COLUMNS
    local = first_chunk - tl.load(row_ptr + FIRST_CHUNK).to(tl.int32)
    vectors_ptr, matrix, num_rows, num_cols = vectors_of(row_ptr, local)
    is_rows = tl.program_id(1) == 0
    length = tl.where(is_rows, num_rows, num_cols)
    energies = tl.where(is_rows, tl.load(row_ptr + ROW_ENERGY), tl.load(row_ptr + COL_ENERGY))
    energy_ptr = energies.to(tl.pointer_type(tl.float32)) + matrix * length
    weight_ptr = vectors_ptr + tl.where(is_rows, 0, num_rows)
    return energy_ptr, weight_ptr, weight_ptr + num_rows + num_cols, length


@triton.jit
def _weights_kernel(rows_ptr, row_of_chunk_ptr, matrices_ptr, rest):
    """Mean squares into energies, ``e <- e + rest * (mean(g^2) - e)``, and from these the weights.

    A matrix with NaN or Inf in it is not taken in: no step is taken with it, and not every way back undoes this one.
    """
    energy_ptr, weight_ptr, before_ptr, length = _side_of(rows_ptr, row_of_chunk_ptr, matrices_ptr)
    lane = tl.arange(0, _AT_ONCE)
    sums = tl.zeros((_AT_ONCE,), tl.float32)
    for first in range(0, length, _AT_ONCE):
        sums += tl.load(weight_ptr + first + lane, mask=first + lane < length, other=0.0)
    is_finite = tl.sum(sums) <= _LARGEST  # which NaN is not, either
    sums = tl.zeros((_AT_ONCE,), tl.float32)
    for first in range(0, length, _AT_ONCE):
        exists = first + lane < length
        energy = tl.load(energy_ptr + first + lane, mask=exists, other=0.0)
        tl.store(before_ptr + first + lane, energy, mask=exists)
        squares = tl.load(weight_ptr + first + lane, mask=exists, other=0.0)
        energy = tl.where(is_finite, energy + rest * (squares - energy), energy)
        tl.store(energy_ptr + first + lane, energy, mask=exists)
        sums += energy
    tl.debug_barrier()
    mean = tl.sum(sums) / length
    is_much = mean > _LEAST_MEAN
    for first in range(0, length, _AT_ONCE):
        exists = first + lane < length
        energy = tl.load(energy_ptr + first + lane, mask=exists, other=1.0)
        ratio = tl.div_rn(mean, tl.where(is_much, tl.maximum(energy, _LEAST_SHARE * mean), 1.0))
        tl.store(weight_ptr + first + lane, tl.where(is_much, tl.sqrt_rn(ratio), 1.0), mask=exists)


@triton.jit
def _restore_kernel(rows_ptr, row_of_chunk_ptr, matrices_ptr, verdict_ptr):
    """The energies as they were before the step, if the verdict is against it."""
    energy_ptr, _, before_ptr, length = _side_of(rows_ptr, row_of_chunk_ptr, matrices_ptr)
    length = tl.where(tl.load(verdict_ptr) == _REFUSED, length, 0)
    lane = tl.arange(0, _AT_ONCE)
    for first in range(0, length, _AT_ONCE):
        exists = first + lane < length
        tl.store(energy_ptr + first + lane, tl.load(before_ptr + first + lane, mask=exists, other=0.0), mask=exists)


def note_(table: ChunkTable, decay: float, scratch: Scratch) -> None:
    """Take the gradients of a balanced table into the energies, and find the weights."""
    cut, starts, device = table.cut, table.balance, table.rows_NT.device
    assert starts is not None
    assert table.gradient_dtype is not None
    sums = scratch.take("words", (table.num_chunks * cut.block_cols,), torch.int32, device).view(torch.float32)
    where, settings = (table.rows_NT, table.row_of_chunk_C), {"enable_fp_fusion": False}
    with launching(device):
        _squares_kernel[(len(starts.bands),)](
            *where,
            starts.bands,
            sums,
            **cut_constants(cut),
            GRADIENT_DTYPE=TRITON_DTYPES[table.gradient_dtype],
            num_warps=cut.num_warps,
            **settings,
        )
        _columns_kernel[(len(starts.columns),)](
            *where, starts.columns, sums, COL_EDGE=cut.col_edge, BLOCK_C=cut.block_cols, num_warps=4, **settings
        )
        _weights_kernel[(len(starts.matrices), 2)](*where, starts.matrices, 1 - decay, num_warps=8, **settings)


def undo_(table: ChunkTable, verdict: Tensor) -> None:
    """If ``verdict`` (int32) is REFUSED, take `note_` back."""
    starts = table.balance
    assert starts is not None
    with launching(verdict.device):
        _restore_kernel[(len(starts.matrices), 2)](
            table.rows_NT, table.row_of_chunk_C, starts.matrices, verdict, num_warps=8, enable_fp_fusion=False
        )
