"""Encode the chunks of many tensors: accumulate and mark in one kernel, select, pack and subtract in a second.

For each chunk, with A and B the DCT bases of its edges: ``m <- decay * m + scale * A g B^T``, then the K largest |m| become
a record of the payload, and m loses what the peers will decode from it. The first kernel streams gradients and momenta
through once and leaves a bit per candidate; the second looks at these few only, so that its many short waits for memory
hold nothing up.

A chunk whose momentum would have NaN, Inf or a value too large in it keeps its old momentum, sends nothing, and reports its
tensor in the payload's header, by which everyone knows that this step must not be applied.
"""

import struct
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.core.scratch import Scratch
from thinwire.core.transform import GRADIENT_LIMIT
from thinwire.kernels.bits import put_bits, to_dtype
from thinwire.kernels.selection import among_largest, list_marks, settle_ties, store_marks, threshold
from thinwire.kernels.table import (
    FIRST_CHUNK,
    FIRST_RECORD,
    GRADIENT,
    MOMENTUM,
    NUM_COLUMNS,
    PRECISION,
    TENSOR,
    TRITON_DTYPES,
    ChunkTable,
    Cut,
    address,
    codec_constants,
    cut_constants,
    launching,
    load_tile,
    num_programs,
    padded_basis,
    record_place,
    store_tile,
    tile_of,
    weights_of,
)
from thinwire.kernels.values import encode_values
from thinwire.wire.codec import ChunkCodec
from thinwire.wire.payload import PROBLEM_WORD, Verdict

REFUSED: tl.constexpr = tl.constexpr(int(Verdict.REFUSED))

_LEFT_ALONE: tl.constexpr = tl.constexpr(-1)
_LIMIT_BITS: tl.constexpr = tl.constexpr(struct.unpack("<i", struct.pack("<f", GRADIENT_LIMIT))[0])


@triton.jit(do_not_specialize=["first_chunk", "last_chunk", "trouble"])
def _accumulate_kernel(
    rows_ptr, row_of_chunk_ptr, first_chunk, last_chunk, row_basis_ptr, col_basis_ptr, marks_ptr, hints_ptr, decay,
    gradient_scale, trouble_ptr, trouble, verdict_ptr,
    ROW_EDGE: tl.constexpr, COL_EDGE: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr, DENSE: tl.constexpr, PADDED: tl.constexpr, ALIGNED: tl.constexpr, FULL: tl.constexpr,
    GRADIENT_DTYPE: tl.constexpr, MOMENTUM_DTYPE: tl.constexpr, FEWEST: tl.constexpr, MOST: tl.constexpr,
    STRIDE: tl.constexpr, WORD: tl.constexpr, PRECISION: tl.constexpr, UNDOES: tl.constexpr, BALANCED: tl.constexpr,
):  # fmt: skip
    """``m <- decay * m + scale * A g B^T``, and a mark for each of the largest |m|; none with ``MOST`` 0.

    One that undoes another does nothing unless the verdict is against the step.
    """
    NUM_ELEMENTS: tl.constexpr = ROW_EDGE * COL_EDGE
    MARKS: tl.constexpr = BLOCK_R * BLOCK_C // WORD
    rows = tl.arange(0, BLOCK_R)[:, None]
    cols = tl.arange(0, BLOCK_C)[None, :]
    in_chunk = (rows < ROW_EDGE) & (cols < COL_EDGE)
    index = rows * COL_EDGE + cols
    if not DENSE:
        side_R = tl.arange(0, BLOCK_R)
        side_C = tl.arange(0, BLOCK_C)
        row_basis = tl.load(row_basis_ptr + side_R[:, None] * BLOCK_R + side_R[None, :])
        col_basis = tl.load(col_basis_ptr + side_C[None, :] * BLOCK_C + side_C[:, None])
    if UNDOES:
        last_chunk = tl.where(tl.load(verdict_ptr) == REFUSED, last_chunk, first_chunk)
    begin = first_chunk + tl.program_id(0)
    next_row = tl.load(row_of_chunk_ptr + begin, mask=begin < last_chunk, other=0)
    for chunk in range(begin, last_chunk, tl.num_programs(0)):
        row_ptr = rows_ptr + next_row * NUM_COLUMNS
        after = chunk + tl.num_programs(0)
        next_row = tl.load(row_of_chunk_ptr + after, mask=after < last_chunk, other=0)
        local = chunk - tl.load(row_ptr + FIRST_CHUNK).to(tl.int32)
        hint_ptr = hints_ptr + tl.load(row_ptr + FIRST_RECORD) + local
        hint = tl.load(hint_ptr)  # early, to have it when it is needed
        momentum_ptr = address(row_ptr, MOMENTUM, MOMENTUM_DTYPE, ALIGNED) + local.to(tl.int64) * NUM_ELEMENTS
        momentum = load_tile(momentum_ptr + index, in_chunk, FULL)
        if GRADIENT_DTYPE is None:
            momentum = momentum * decay
        else:
            gradient_ptr = address(row_ptr, GRADIENT, GRADIENT_DTYPE, ALIGNED)
            first, offsets, exists = tile_of(row_ptr, local, rows, cols, ROW_EDGE, COL_EDGE, PADDED, ALIGNED)
            coefficients = load_tile(gradient_ptr + first + offsets, exists, FULL)
            if BALANCED:
                coefficients *= weights_of(row_ptr, local, rows, cols, ROW_EDGE, COL_EDGE)
            if not DENSE:
                coefficients = tl.dot(coefficients, col_basis, input_precision=PRECISION)
                coefficients = tl.dot(row_basis, coefficients, input_precision=PRECISION)
            momentum = momentum * decay + coefficients * gradient_scale
        rounded = to_dtype(momentum, MOMENTUM_DTYPE)
        bits = rounded.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        largest = tl.max(bits)
        fits = largest < _LIMIT_BITS
        if UNDOES:
            fits = fits & (hint != _LEFT_ALONE)
        if fits:
            store_tile(momentum_ptr + index, rounded, in_chunk, FULL)
        else:
            tl.atomic_max(trouble_ptr, trouble - tl.load(row_ptr + TENSOR), sem="relaxed")
        if MOST == 0:
            if not UNDOES:
                tl.store(hint_ptr, tl.where(fits, 0, _LEFT_ALONE))
        else:
            bits = tl.where(fits, bits, 0)
            if hint <= 0:
                hint = tl.maximum(largest - (1 << 24), 1)
            hint, num_low, num_high = threshold(bits, hint, FEWEST, MOST, BLOCK_R * BLOCK_C)
            tl.store(hint_ptr, tl.where(fits, hint, _LEFT_ALONE))
            chunk_marks_ptr = marks_ptr + (chunk - first_chunk) * STRIDE
            # Where those equal to the last one kept tie for the last places, they are marked later, by `settle_ties`.
            is_tied = (num_low > MOST) & (hint > 0)
            tl.store(chunk_marks_ptr + MARKS, tl.where(is_tied, hint, 0))
            tl.store(chunk_marks_ptr + MARKS + 1, FEWEST - num_high)
            store_marks(bits >= hint + (is_tied | (hint == 0)).to(tl.int32), rows, cols, chunk_marks_ptr, BLOCK_C, WORD)


@triton.jit(do_not_specialize=["first_chunk", "last_chunk", "stack_bytes"])
def _pack_kernel(
    rows_ptr, row_of_chunk_ptr, first_chunk, last_chunk, words_ptr, stack_bytes, marks_ptr, units_ptr, share,
    NUM_ELEMENTS: tl.constexpr, COL_EDGE: tl.constexpr, MOMENTUM_DTYPE: tl.constexpr,
    K: tl.constexpr, EXACT: tl.constexpr, BATCH: tl.constexpr, BLOCK_L: tl.constexpr, MARKS: tl.constexpr,
    ROW_WORDS: tl.constexpr, WORD: tl.constexpr, STRIDE: tl.constexpr, RECORD_BYTES: tl.constexpr,
    BEGINS_WORDS: tl.constexpr, INDICES: tl.constexpr, INDEX_BITS: tl.constexpr, LOW_BITS: tl.constexpr,
    VALUES: tl.constexpr, VALUE_BITS: tl.constexpr, HAS_SCALE: tl.constexpr,
):  # fmt: skip
    """A record from the marked coefficients of each chunk, and what the record says taken out of the momentum."""
    batch = tl.arange(0, BATCH)
    lane = tl.arange(0, BLOCK_L)[None, :]
    chunks = first_chunk + tl.program_id(0) * BATCH + batch
    in_batch = chunks < last_chunk
    row_ptrs = rows_ptr + tl.load(row_of_chunk_ptr + chunks, mask=in_batch, other=0) * NUM_COLUMNS
    locals_ = chunks - tl.load(row_ptrs + FIRST_CHUNK).to(tl.int32)
    records = tl.load(row_ptrs + FIRST_RECORD) + locals_
    momentum_ptrs = (tl.load(row_ptrs + MOMENTUM).to(tl.pointer_type(MOMENTUM_DTYPE)) + locals_.to(tl.int64) * NUM_ELEMENTS)[
        :, None
    ]
    if INDICES == "all":
        kept = in_batch[:, None] & (lane < K)
        slot = lane + batch[:, None] * 0
        where = slot
        before = tl.load(momentum_ptrs + where, mask=kept, other=0.0).to(tl.float32)
        num_kept = batch * 0 + K
    else:
        # The marks of a chunk make way for the list of its candidates, which makes way for the list of their magnitudes.
        mark = tl.arange(0, MARKS)[None, :]
        first_marked = (mark // ROW_WORDS) * COL_EDGE + (mark % ROW_WORDS) * WORD
        list_ptrs = (marks_ptr + (chunks - first_chunk) * STRIDE)[:, None]
        tied_bits = tl.load(list_ptrs + MARKS, mask=in_batch[:, None], other=0)
        if tl.max(tied_bits) > 0:
            num_wanted = tl.load(list_ptrs + MARKS + 1, mask=in_batch[:, None], other=0)
            settle_ties(
                tied_bits, num_wanted, momentum_ptrs, list_ptrs, MARKS, ROW_WORDS, WORD, NUM_ELEMENTS // COL_EDGE, COL_EDGE
            )
        words = tl.load(list_ptrs + mark, mask=in_batch[:, None], other=0)
        tl.debug_barrier()
        num_listed = list_marks(words, first_marked, list_ptrs)
        tl.debug_barrier()
        live = lane < num_listed[:, None]
        where = tl.load(list_ptrs + lane, mask=live, other=NUM_ELEMENTS)
        before = tl.load(momentum_ptrs + where, mask=live, other=0.0).to(tl.float32)
        kept = live
        if not EXACT:
            bits = before.to(tl.int32, bitcast=True) & 0x7FFFFFFF
            tl.debug_barrier()
            tl.store(list_ptrs + lane, bits, mask=live)
            tl.debug_barrier()
            kept = among_largest(bits, lane, live, list_ptrs, num_listed, K)
        slot = tl.cumsum(kept.to(tl.int32), axis=1) - 1
        num_kept = tl.minimum(num_listed, K)
    before = tl.where(kept, before, 0.0)
    codes, removed, scale_code, unit = encode_values(before * share, kept, VALUES, VALUE_BITS)
    tl.store(momentum_ptrs + where, to_dtype(before - removed, MOMENTUM_DTYPE), mask=kept)
    if VALUES == "sign":
        tl.store(units_ptr + records, unit, mask=in_batch)

    record_ptrs, begin = record_place(words_ptr, stack_bytes, records, RECORD_BYTES, BEGINS_WORDS)
    is_void = in_batch[:, None] & (lane >= num_kept[:, None]) & (lane < K)
    if tl.max(is_void.to(tl.int32)) > 0:  # void slots come last and have the index E
        nowhere = lane * 0 + batch[:, None] * 0 + NUM_ELEMENTS
        _put_indices(record_ptrs, begin, lane + batch[:, None] * 0, nowhere, is_void, K, INDICES, LOW_BITS)
    _put_indices(record_ptrs, begin, slot, where, kept, K, INDICES, LOW_BITS)
    if INDICES == "bitmap":
        put_bits(record_ptrs, begin + where, (slot * 0 + 1).to(tl.uint32), kept, 1)
    put_bits(record_ptrs, begin + INDEX_BITS + slot * VALUE_BITS, codes, kept, VALUE_BITS)
    if HAS_SCALE:
        scale_at = begin + INDEX_BITS + K * VALUE_BITS
        put_bits(record_ptrs, scale_at, scale_code[:, None].to(tl.uint32), in_batch[:, None], 16)


@triton.jit
def _put_indices(record_ptrs, begin, slot, where, mask, K: tl.constexpr, INDICES: tl.constexpr, LOW_BITS: tl.constexpr):
    """Write the indices of some slots, but for a bitmap."""
    if INDICES == "fixed_width":
        put_bits(record_ptrs, begin + slot * LOW_BITS, where.to(tl.uint32), mask, LOW_BITS)
    if INDICES == "elias_fano":
        if LOW_BITS > 0:
            low = (where & ((1 << LOW_BITS) - 1)).to(tl.uint32)
            put_bits(record_ptrs, begin + slot * LOW_BITS, low, mask, LOW_BITS)
        one = (slot * 0 + 1).to(tl.uint32)
        put_bits(record_ptrs, begin + K * LOW_BITS + (where >> LOW_BITS) + slot, one, mask, 1)


_PROGRAMS_PER_PROCESSOR = 3
_REGISTERS = 168
# Chunks between a launch that marks and the one that packs: few enough for little memory, many enough to fill a GPU.
_RUN_CHUNKS = 32768
# Up to so many, candidates are ranked by comparing all pairs; more are told apart by counting alone.
_FEW = 64


@dataclass(frozen=True)
class _Search:
    """How the kept coefficients of a chunk are found: ``most`` is how many candidates are marked at most."""

    is_exact: bool
    most: int
    block_listed: int
    word: int
    num_marks: int

    @property
    def stride(self) -> int:
        """Words of memory per chunk: marks and two words about ties, then a list."""
        return max(self.num_marks + 2, self.block_listed)


def _search(cut: Cut, codec: ChunkCodec) -> _Search:
    is_exact = codec.num_kept > _FEW or 2 * codec.num_kept > codec.num_elements
    most = codec.num_kept if is_exact else max(16, triton.next_power_of_2(2 * codec.num_kept))
    if codec.index_codec.name == "all":
        most = 0
    word = min(32, cut.block_cols)
    listed = max(16, triton.next_power_of_2(most or codec.num_kept))
    return _Search(is_exact, most, listed, word, cut.block_rows * cut.block_cols // word)


class Settings(NamedTuple):
    """The numbers of one step: ``m <- decay * m + gradient_scale * T(g)``, of which a ``share`` is sent. ``trouble`` is what
    a gradient that does not fit puts into the header, less the number of its tensor."""

    decay: float
    gradient_scale: float
    share: float
    trouble: int


def encode_(
    table: ChunkTable,
    codec: ChunkCodec,
    payload_B: Tensor,
    offset_bytes: int,
    units_C: Tensor,
    hints_C: Tensor,
    scratch: Scratch,
    settings: Settings,
) -> None:
    """Encode the chunks of ``table`` into the records of a stack that begins at ``offset_bytes``; these bytes must be 0.

    ``units_C`` gets the sender's unit of each record, if the codec has one. ``hints_C`` (int32, 0 at first) says where to
    look for the largest next time, which changes no result, and which chunks were left alone.
    """
    search = _search(table.cut, codec)
    shape = (min(table.num_chunks, _RUN_CHUNKS) * search.stride,)
    marks = scratch.take("words", shape, torch.int32, payload_B.device)
    with launching(payload_B.device):
        for first in range(0, table.num_chunks, _RUN_CHUNKS):
            chunks = (first, min(first + _RUN_CHUNKS, table.num_chunks))
            _accumulate(table, settings, payload_B, chunks, search, codec.num_kept, marks, hints_C)
            _pack(table, codec, payload_B, offset_bytes, settings.share, chunks, search, marks, units_C)


def undo_accumulate_(table: ChunkTable, payload_B: Tensor, hints_C: Tensor, settings: Settings, verdict: Tensor) -> None:
    """If ``verdict`` (int32) is REFUSED, take back ``m <- decay * m + gradient_scale * T(g)``, but for the chunks that were
    left alone, which ``hints_C`` knows. A decay of 0 gives 0."""
    decay = 1 / settings.decay if settings.decay else 0.0
    inverse = settings._replace(decay=decay, gradient_scale=-settings.gradient_scale * decay)
    nothing = table.row_of_chunk_C
    search = _Search(is_exact=True, most=0, block_listed=1, word=min(32, table.cut.block_cols), num_marks=1)
    with launching(payload_B.device):
        _accumulate(table, inverse, payload_B, (0, table.num_chunks), search, 1, nothing, hints_C, verdict)


def _accumulate(
    table: ChunkTable,
    settings: Settings,
    payload_B: Tensor,
    chunks: tuple[int, int],
    search: _Search,
    num_kept: int,
    marks: Tensor,
    hints_C: Tensor,
    verdict: Tensor | None = None,
) -> None:
    cut, device = table.cut, table.rows_NT.device
    _accumulate_kernel[(num_programs(device, chunks[1] - chunks[0], _PROGRAMS_PER_PROCESSOR),)](
        table.rows_NT,
        table.row_of_chunk_C,
        *chunks,
        padded_basis(cut.row_edge, cut.block_rows, device),
        padded_basis(cut.col_edge, cut.block_cols, device),
        marks,
        hints_C,
        settings.decay,
        settings.gradient_scale,
        payload_B.view(torch.int64)[PROBLEM_WORD:],
        settings.trouble,
        marks if verdict is None else verdict,
        **cut_constants(cut),
        GRADIENT_DTYPE=None if table.gradient_dtype is None else TRITON_DTYPES[table.gradient_dtype],
        MOMENTUM_DTYPE=TRITON_DTYPES[table.momentum_dtype],
        FEWEST=num_kept,
        MOST=search.most,
        STRIDE=search.stride,
        WORD=search.word,
        PRECISION=PRECISION,
        UNDOES=verdict is not None,
        BALANCED=table.balance is not None,
        num_warps=cut.num_warps,
        num_stages=1,
        enable_fp_fusion=True,
        **cut.register_limit(_REGISTERS),
    )


def _pack(
    table: ChunkTable,
    codec: ChunkCodec,
    payload_B: Tensor,
    offset_bytes: int,
    share: float,
    chunks: tuple[int, int],
    search: _Search,
    marks: Tensor,
    units_C: Tensor,
) -> None:
    cut, batch = table.cut, max(1, min(2, 256 // search.block_listed))
    _pack_kernel[(triton.cdiv(chunks[1] - chunks[0], batch),)](
        table.rows_NT,
        table.row_of_chunk_C,
        *chunks,
        payload_B.view(torch.int32),
        offset_bytes,
        marks,
        units_C,
        share,
        NUM_ELEMENTS=cut.num_elements,
        COL_EDGE=cut.col_edge,
        MOMENTUM_DTYPE=TRITON_DTYPES[table.momentum_dtype],
        **codec_constants(codec, offset_bytes),
        EXACT=search.is_exact,
        BATCH=batch,
        BLOCK_L=search.block_listed,
        MARKS=search.num_marks,
        ROW_WORDS=cut.block_cols // search.word,
        WORD=search.word,
        STRIDE=search.stride,
        num_warps=max(1, min(8, search.block_listed // 256)),
        enable_fp_fusion=False,  # the momentum loses what the peers see, which is a rounded product
    )
