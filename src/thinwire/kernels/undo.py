"""Take an encoding back where the verdict is against the step: what was sent goes back, the gradient comes out.

The launches are always made, and do nothing when the step is fine: so nobody has to wait for the verdict.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.bits import to_dtype
from thinwire.kernels.decode import num_lanes, read_records
from thinwire.kernels.encode import REFUSED, Settings, undo_accumulate_
from thinwire.kernels.table import (
    FIRST_CHUNK,
    FIRST_RECORD,
    MOMENTUM,
    NUM_COLUMNS,
    TRITON_DTYPES,
    ChunkTable,
    codec_constants,
    launching,
    num_programs,
    record_place,
)
from thinwire.wire.codec import ChunkCodec

_PROGRAMS_PER_PROCESSOR = 8
_LANES_AT_ONCE = 512


@triton.jit(do_not_specialize=["num_chunks", "stack_bytes"])
def _give_back_kernel(
    rows_ptr, row_of_chunk_ptr, num_chunks, words_ptr, stack_bytes, units_ptr, verdict_ptr,
    NUM_ELEMENTS: tl.constexpr, MOMENTUM_DTYPE: tl.constexpr, BATCH: tl.constexpr, BLOCK_LANES: tl.constexpr,
    K: tl.constexpr, RECORD_BYTES: tl.constexpr, BEGINS_WORDS: tl.constexpr, INDICES: tl.constexpr,
    INDEX_BITS: tl.constexpr, LOW_BITS: tl.constexpr, VALUES: tl.constexpr, VALUE_BITS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
):  # fmt: skip
    """``m[index] += value * unit`` for all that the own records say."""
    last = tl.where(tl.load(verdict_ptr) == REFUSED, num_chunks, 0)
    batch = tl.arange(0, BATCH)
    lane = tl.arange(0, BLOCK_LANES)[None, :]
    for first in range(tl.program_id(0) * BATCH, last, tl.num_programs(0) * BATCH):
        chunks = first + batch
        in_batch = chunks < last
        row_ptrs = rows_ptr + tl.load(row_of_chunk_ptr + chunks, mask=in_batch, other=0) * NUM_COLUMNS
        locals_ = chunks - tl.load(row_ptrs + FIRST_CHUNK)
        records = tl.load(row_ptrs + FIRST_RECORD) + locals_
        momentum_ptrs = (tl.load(row_ptrs + MOMENTUM).to(tl.pointer_type(MOMENTUM_DTYPE)) + locals_ * NUM_ELEMENTS)[:, None]
        record_ptrs, begin = record_place(words_ptr, stack_bytes, records, RECORD_BYTES, BEGINS_WORDS)
        index, value, live = read_records(
            record_ptrs, begin, in_batch[:, None], lane, NUM_ELEMENTS, K, INDICES, INDEX_BITS, LOW_BITS, VALUES, VALUE_BITS,
            HAS_SCALE,
        )  # fmt: skip
        if VALUES == "sign":
            value = value * tl.load(units_ptr + records, mask=in_batch, other=0.0)[:, None]
        kept = tl.load(momentum_ptrs + index, mask=live, other=0.0).to(tl.float32)
        tl.store(momentum_ptrs + index, to_dtype(kept + value, MOMENTUM_DTYPE), mask=live)


def give_back_(
    table: ChunkTable, codec: ChunkCodec, payload_B: Tensor, offset_bytes: int, units_C: Tensor, verdict: Tensor
) -> None:
    """Return what a payload took from the momenta, if ``verdict`` (int32) is REFUSED."""
    lanes = num_lanes(codec)
    batch = max(1, _LANES_AT_ONCE // lanes)
    with launching(payload_B.device):
        _give_back_kernel[(num_programs(payload_B.device, triton.cdiv(table.num_chunks, batch), _PROGRAMS_PER_PROCESSOR),)](
            table.rows_NT,
            table.row_of_chunk_C,
            table.num_chunks,
            payload_B.view(torch.int32),
            offset_bytes,
            units_C,
            verdict,
            NUM_ELEMENTS=table.cut.num_elements,
            MOMENTUM_DTYPE=TRITON_DTYPES[table.momentum_dtype],
            BATCH=batch,
            BLOCK_LANES=lanes,
            enable_fp_fusion=False,
            **codec_constants(codec, offset_bytes),
        )


def undo_(
    table: ChunkTable,
    codec: ChunkCodec,
    payload_B: Tensor,
    offset_bytes: int,
    units_C: Tensor,
    hints_C: Tensor,
    settings: Settings,
    verdict: Tensor,
) -> None:
    """Take `encode.encode_` back, to the rounding of momentum plus gradient, if ``verdict`` (int32) is REFUSED."""
    give_back_(table, codec, payload_B, offset_bytes, units_C, verdict)
    undo_accumulate_(table, payload_B, hints_C, settings, verdict)
