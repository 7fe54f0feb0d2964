"""Where the chunks of many tensors lie: a table that one launch reads, instead of a launch per tensor."""

import functools
import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.core.exact import integer_basis
from thinwire.core.transform import dct_basis
from thinwire.wire.codec import ChunkCodec
from thinwire.wire.indices import elias_fano_low_bits

# The columns of a table: three addresses, the chunk at which the tensor begins in the launch and in its stack, its cut, the
# address of its update rule's state, its number in the plan, and what `kernels.balance` needs: the addresses of its weights
# and of the energies of its rows and columns.
GRADIENT = tl.constexpr(0)
MOMENTUM = tl.constexpr(1)
PARAMETER = tl.constexpr(2)
FIRST_CHUNK = tl.constexpr(3)
FIRST_RECORD = tl.constexpr(4)
NUM_ROWS = tl.constexpr(5)
NUM_COLS = tl.constexpr(6)
CHUNKS_PER_BAND = tl.constexpr(7)
BANDS_PER_MATRIX = tl.constexpr(8)
RULE_STATE = tl.constexpr(9)
TENSOR = tl.constexpr(10)
WEIGHTS = tl.constexpr(11)
ROW_ENERGY = tl.constexpr(12)
COL_ENERGY = tl.constexpr(13)
NUM_COLUMNS = tl.constexpr(14)

_turn = threading.Lock()

# How tensor cores take float32 factors. Exact decoding, where it is built, replaces the products of `decode`.
PRECISION = "tf32"
TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True)
class Cut:
    """How the chunks of a launch are cut. Blocks are powers of two that tensor cores can multiply."""

    row_edge: int
    col_edge: int
    dense: bool
    padded: bool
    aligned: bool

    @property
    def block_rows(self) -> int:
        """Rows of a tile."""
        return max(16, int(triton.next_power_of_2(self.row_edge)))

    @property
    def block_cols(self) -> int:
        """Columns of a tile."""
        return max(16, int(triton.next_power_of_2(self.col_edge)))

    @property
    def num_elements(self) -> int:
        """E."""
        return self.row_edge * self.col_edge

    @property
    def full(self) -> bool:
        """Whether every element of every tile exists."""
        return not self.padded and (self.block_rows, self.block_cols) == (self.row_edge, self.col_edge)

    @property
    def num_warps(self) -> int:
        """Enough for about 32 elements per thread."""
        return min(8, max(1, self.block_rows * self.block_cols // 1024))

    def register_limit(self, registers: int) -> dict[str, int]:
        """A compile option that lets more programs share a processor, where that was seen to pay."""
        return {"maxnreg": registers} if self.num_warps == 4 and not triton.knobs.runtime.interpret else {}


@dataclass(frozen=True)
class Row:
    """The addresses of one tensor and what belongs to it; 0 where there is none, or it is not needed."""

    gradient: int = 0
    momentum: int = 0
    parameter: int = 0
    rule_state: int = 0
    weights: int = 0
    row_energy: int = 0
    col_energy: int = 0


class Starts(NamedTuple):
    """The chunks (int32) at which something begins where gradients are balanced: every band of chunks, every column of
    chunks in a matrix, and every matrix."""

    bands: Tensor
    columns: Tensor
    matrices: Tensor


@dataclass(frozen=True)
class ChunkTable:
    """``rows_NT`` (int64) has a row per tensor, ``row_of_chunk_C`` (int32) says to which one each chunk belongs.

    Without a gradient dtype the tensors have no gradients. ``balance`` is there if they are balanced.
    """

    rows_NT: Tensor
    row_of_chunk_C: Tensor
    cut: Cut
    gradient_dtype: torch.dtype | None
    momentum_dtype: torch.dtype
    parameter_dtype: torch.dtype
    balance: Starts | None = None

    @property
    def num_chunks(self) -> int:
        """Chunks of the launch."""
        return len(self.row_of_chunk_C)


def launching(device: torch.device) -> AbstractContextManager[Any]:
    """Launch inside: Triton takes the current GPU, and its interpreter cannot run kernels in two threads at once."""
    return torch.cuda.device(device) if device.type == "cuda" else _turn


def upload(numbers: Tensor, device: torch.device) -> Tensor:
    """Numbers of the CPU on the device. Does not wait for it."""
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers


def num_programs(device: torch.device, num_chunks: int, per_processor: int) -> int:
    """Programs that share the chunks among them, each with scratch memory of its own."""
    if device.type != "cuda":
        return min(num_chunks, 3)  # the interpreter runs them one after the other
    return min(num_chunks, torch.cuda.get_device_properties(device).multi_processor_count * per_processor)


@triton.jit
def tile_of(row_ptr, local, rows, cols, ROW_EDGE: tl.constexpr, COL_EDGE: tl.constexpr, PADDED: tl.constexpr,
            ALIGNED: tl.constexpr):  # fmt: skip
    """Where the elements of a tensor's chunk ``local`` lie, from the tensor's first, and which of them there are."""
    num_cols = tl.load(row_ptr + NUM_COLS).to(tl.int32)
    chunks_per_band = tl.load(row_ptr + CHUNKS_PER_BAND).to(tl.int32)
    band = local // chunks_per_band
    first_col = (local - band * chunks_per_band) * COL_EDGE
    if ALIGNED:
        num_cols = tl.multiple_of(num_cols, 16)
        first_col = tl.multiple_of(first_col, 16)
    exists = (rows < ROW_EDGE) & (cols < COL_EDGE)
    if PADDED:
        num_rows = tl.load(row_ptr + NUM_ROWS).to(tl.int32)
        bands_per_matrix = tl.load(row_ptr + BANDS_PER_MATRIX).to(tl.int32)
        matrix = band // bands_per_matrix
        first_row = (band - matrix * bands_per_matrix) * ROW_EDGE
        exists = exists & (first_row + rows < num_rows) & (first_col + cols < num_cols)
        first = (matrix.to(tl.int64) * num_rows + first_row) * num_cols + first_col
    else:
        first = band.to(tl.int64) * ROW_EDGE * num_cols + first_col
    if ALIGNED:
        first = tl.multiple_of(first, 16)
    return first, rows * num_cols + cols, exists


@triton.jit
def vectors_of(row_ptr, local):
    """Of the matrix in which a balanced tensor's chunk ``local`` lies: where its four vectors begin, its number, its rows
    and its columns. The vectors lie one after the other: the weights of rows, those of columns, and both energies as they
    were before the step."""
    num_rows = tl.load(row_ptr + NUM_ROWS).to(tl.int32)
    num_cols = tl.load(row_ptr + NUM_COLS).to(tl.int32)
    chunks_per_matrix = (tl.load(row_ptr + CHUNKS_PER_BAND) * tl.load(row_ptr + BANDS_PER_MATRIX)).to(tl.int32)
    matrix = local // chunks_per_matrix
    vectors_ptr = tl.load(row_ptr + WEIGHTS).to(tl.pointer_type(tl.float32)) + matrix * 2 * (num_rows + num_cols)
    return vectors_ptr, matrix, num_rows, num_cols


@triton.jit
def weights_of(row_ptr, local, rows, cols, ROW_EDGE: tl.constexpr, COL_EDGE: tl.constexpr):
    """What the elements of a tensor's chunk ``local`` are multiplied with, where gradients are balanced."""
    vectors_ptr, matrix, num_rows, num_cols = vectors_of(row_ptr, local)
    chunks_per_band = tl.load(row_ptr + CHUNKS_PER_BAND).to(tl.int32)
    bands_per_matrix = tl.load(row_ptr + BANDS_PER_MATRIX).to(tl.int32)
    band = local // chunks_per_band
    col = (local - band * chunks_per_band) * COL_EDGE + cols
    row = (band - matrix * bands_per_matrix) * ROW_EDGE + rows
    exists_R = (rows < ROW_EDGE) & (row < num_rows)
    exists_C = (cols < COL_EDGE) & (col < num_cols)
    row_weights = tl.load(vectors_ptr + row, mask=exists_R, other=0.0)
    return row_weights * tl.load(vectors_ptr + num_rows + col, mask=exists_C, other=0.0)


@triton.jit
def address(row_ptr, COLUMN: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """A pointer from the table."""
    pointer = tl.load(row_ptr + COLUMN).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def record_place(words_ptr, stack_bytes, records, RECORD_BYTES: tl.constexpr, BEGINS_WORDS: tl.constexpr):
    """The word at which each record begins, and the bit in it, as columns. Where all begin words, the compiler may know."""
    bytes_ = stack_bytes + records * RECORD_BYTES
    if BEGINS_WORDS:
        bytes_ = tl.multiple_of(bytes_, 4)
        return (words_ptr + (bytes_ >> 2))[:, None], (bytes_ * 0).to(tl.int32)[:, None]
    return (words_ptr + (bytes_ >> 2))[:, None], ((bytes_ & 3).to(tl.int32) * 8)[:, None]


@triton.jit
def load_tile(pointers, exists, FULL: tl.constexpr):
    """A tile as float32; 0 where nothing exists."""
    if FULL:
        return tl.load(pointers).to(tl.float32)
    return tl.load(pointers, mask=exists, other=0.0).to(tl.float32)


@triton.jit
def load_as_is(pointers, exists, FULL: tl.constexpr):
    """A tile in its own dtype; 0 where nothing exists."""
    if FULL:
        return tl.load(pointers)
    return tl.load(pointers, mask=exists, other=0)


@triton.jit
def store_tile(pointers, values, exists, FULL: tl.constexpr):
    """Write a tile."""
    if FULL:
        tl.store(pointers, values)
    else:
        tl.store(pointers, values, mask=exists)


@functools.lru_cache(maxsize=64)
def padded_basis(edge: int, block: int, device: torch.device, exact_bits: int = 0) -> Tensor:
    """The DCT basis of an edge, or its integers of so many bits, in the upper left corner of ``block x block`` zeros."""
    padded = torch.zeros(block, block, device=device, dtype=torch.float16 if exact_bits else torch.float32)
    kind = (torch.float32, device)
    padded[:edge, :edge] = integer_basis(edge, exact_bits, *kind) if exact_bits else dct_basis(edge, *kind)
    return padded


def cut_constants(cut: Cut) -> dict[str, object]:
    """What every kernel over chunks is compiled for."""
    return {
        "ROW_EDGE": cut.row_edge,
        "COL_EDGE": cut.col_edge,
        "BLOCK_R": cut.block_rows,
        "BLOCK_C": cut.block_cols,
        "DENSE": cut.dense,
        "PADDED": cut.padded,
        "ALIGNED": cut.aligned,
        "FULL": cut.full,
    }


def codec_constants(codec: ChunkCodec, offset_bytes: int) -> dict[str, object]:
    """The form of a record of a stack that begins at ``offset_bytes``."""
    indices = codec.index_codec.name
    low_bits = {"fixed_width": codec.num_elements.bit_length(), "elias_fano": codec_low_bits(codec)}
    return {
        "K": codec.num_kept,
        "RECORD_BYTES": codec.record_bytes,
        "BEGINS_WORDS": codec.record_bytes % 4 == offset_bytes % 4 == 0,
        "INDICES": indices,
        "INDEX_BITS": codec.index_bits,
        "LOW_BITS": low_bits.get(indices, 0),
        "VALUES": codec.value_name,
        "VALUE_BITS": codec.value_codec.num_bits,
        "HAS_SCALE": codec.value_codec.has_scale,
    }


def codec_low_bits(codec: ChunkCodec) -> int:
    """l of an Elias-Fano code."""
    return elias_fano_low_bits(codec.num_elements, codec.num_kept)
