"""Decode all chunks of a stack in one launch: unpack everyone's records, combine, transform back, update the parameters.

For each chunk: ``S`` is the matrix of combined coefficients, ``d = A^T S B`` the direction, and the update rule changes p.
Each parameter is read once and written once. ``S`` is formed in a tile of scratch memory per program, which stays in the
cache: votes (the sign codec, or majority_vote with any) are counted in any order; other values are added replica by
replica.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.core.combine import Decoding
from thinwire.core.exact import LEAST_EXPONENT, MOST_EXPONENT, scales_of
from thinwire.core.scratch import Scratch
from thinwire.kernels.bits import get_bits, to_dtype
from thinwire.kernels.table import (
    FIRST_CHUNK,
    FIRST_RECORD,
    NUM_COLUMNS,
    PARAMETER,
    PRECISION,
    RULE_STATE,
    TRITON_DTYPES,
    ChunkTable,
    address,
    codec_constants,
    cut_constants,
    launching,
    load_as_is,
    load_tile,
    num_programs,
    padded_basis,
    record_place,
    store_tile,
    tile_of,
)
from thinwire.kernels.values import decode_values
from thinwire.wire.codec import ChunkCodec

MOST_LATER_DIVISOR = 511
"""Votes of so many replicas may be divided, less exactly or later, before they are rounded to 8 bits."""
_CLEARED: tl.constexpr = tl.constexpr(1024)
_LEAST_EXPONENT: tl.constexpr = tl.constexpr(LEAST_EXPONENT)
_MOST_EXPONENT: tl.constexpr = tl.constexpr(MOST_EXPONENT)


@triton.jit
def read_records(
    record_ptr, begin, exists, lane, NUM_ELEMENTS: tl.constexpr, K: tl.constexpr, INDICES: tl.constexpr,
    INDEX_BITS: tl.constexpr, LOW_BITS: tl.constexpr, VALUES: tl.constexpr, VALUE_BITS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
):  # fmt: skip
    """(index, value, whether there is one) for every lane of some records, a record per row.

    A lane is a slot of the record, or a bit of it where the set bits are the slots; so no lane waits for another.
    """
    if (INDICES == "elias_fano") or (INDICES == "bitmap"):
        num_lanes: tl.constexpr = K + (NUM_ELEMENTS >> LOW_BITS) if INDICES == "elias_fano" else NUM_ELEMENTS
        live = exists & (lane < num_lanes)
        bit = get_bits(record_ptr, begin + K * LOW_BITS + lane, live, 1)
        slot = tl.cumsum(bit, axis=1) - bit
        live = live & (bit == 1) & (slot < K)
    else:
        slot = lane
        live = exists & (lane < K)
    if INDICES == "elias_fano":
        index = lane - slot
        if LOW_BITS > 0:
            index = (index << LOW_BITS) | get_bits(record_ptr, begin + slot * LOW_BITS, live, LOW_BITS)
    elif INDICES == "fixed_width":
        index = get_bits(record_ptr, begin + slot * LOW_BITS, live, LOW_BITS)
    else:
        index = lane
    live = live & (index < NUM_ELEMENTS)
    codes = get_bits(record_ptr, begin + INDEX_BITS + slot * VALUE_BITS, live, VALUE_BITS)
    scale = 1.0
    if HAS_SCALE:
        scale_at = begin + INDEX_BITS + K * VALUE_BITS + exists.to(tl.int32) * 0
        scale_bits = get_bits(record_ptr, scale_at, exists, 16)
        scale = (scale_bits << 16).to(tl.float32, bitcast=True)
    return index, decode_values(codes, scale, VALUES, VALUE_BITS), live


@triton.jit
def _apply_rule(
    p, d, first_ptr, in_tile, FULL: tl.constexpr, RULE: tl.constexpr, lr, beta1, beta2, rest1, rest2, eps, correction
):  # fmt: skip
    """The update rules of `core.update_rules`; no product is fused with a sum (``enable_fp_fusion`` is off)."""
    tl.static_assert((RULE == "sign") or (RULE == "sgd") or (RULE == "adamw") or (RULE == "lion"))
    step = tl.where(d > 0, lr, tl.where(d < 0, -lr, 0.0))
    if RULE == "sgd":
        step = d * lr
    if RULE == "adamw":
        moment = load_tile(first_ptr, in_tile, FULL)
        moment = tl.where(moment == 0, d * d * correction, moment * beta2 + d * d * rest2)
        store_tile(first_ptr, moment, in_tile, FULL)
        step = tl.div_rn(d, tl.sqrt_rn(tl.div_rn(moment, correction + d * 0)) + eps) * lr
    if RULE == "lion":
        average = load_tile(first_ptr, in_tile, FULL)
        blend = average * beta1 + d * rest1
        step = tl.where(blend > 0, lr, tl.where(blend < 0, -lr, 0.0))
        store_tile(first_ptr, average * beta2 + d * rest2, in_tile, FULL)
    return p - step


@triton.jit
def _round(x):
    """To the nearest integer, of two the even one; for sizes below 2^22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _exact_inverse(
    q, divisor, row_basis, col_basis, HAS_KNOWN_SCALE: tl.constexpr, DROP: tl.constexpr, UNIT: tl.constexpr
):  # fmt: skip
    """`core.exact.inverse_exact_` of ``q / divisor``, with 8 bits: integers that float16 holds, and sums that float32 holds.

    ``divisor`` is 1, or up to `MOST_LATER_DIVISOR` where ``q`` are whole numbers up to it: a quotient times 2^s, s at least
    8, is then never halfway between two integers nor nearer than 1 / (2 * divisor) to that, so that a product with
    2^s / divisor, which is 32 divisions of a thread less, rounds to the same integer.
    """
    up, down = 256.0, UNIT  # no vote is larger than 1
    if not HAS_KNOWN_SCALE:
        largest = tl.div_rn(tl.max(tl.max(tl.abs(q), axis=1), axis=0), divisor)
        exponent = ((largest.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23) - 127
        exponent = tl.minimum(tl.maximum(exponent, _LEAST_EXPONENT), _MOST_EXPONENT)
        up = tl.div_rn(((8 - exponent + 127) << 23).to(tl.float32, bitcast=True), divisor)
        down = UNIT * ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    between = tl.dot(_round(q * up).to(tl.float16), col_basis)
    between = _round(between * (1.0 / (1 << DROP)))
    return tl.dot(row_basis, between.to(tl.float16)) * down


@triton.jit
def _clear(words_ptr, NUM_WORDS: tl.constexpr):
    """Write zeros, when all have done with what was there, and before anyone goes on."""
    tl.debug_barrier()
    for begin in range(0, NUM_WORDS, _CLEARED):
        at = begin + tl.arange(0, _CLEARED)
        tl.store(words_ptr + at, tl.zeros((_CLEARED,), tl.int32), mask=at < NUM_WORDS)
    tl.debug_barrier()


@triton.jit(do_not_specialize=["first_of_all", "last_of_all", "payload_words", "num_replicas", "stack_bytes"])
def _decode_kernel(
    rows_ptr, row_of_chunk_ptr, first_of_all, last_of_all, words_ptr, payload_words, num_replicas, stack_bytes,
    row_basis_ptr, col_basis_ptr, scratch_ptr, verdict_ptr, lr, weight_factor, beta1, beta2, rest1, rest2,
    eps, correction,
    ROW_EDGE: tl.constexpr, COL_EDGE: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr, DENSE: tl.constexpr, PADDED: tl.constexpr, ALIGNED: tl.constexpr, FULL: tl.constexpr,
    PARAMETER_DTYPE: tl.constexpr, K: tl.constexpr, RECORD_BYTES: tl.constexpr, BEGINS_WORDS: tl.constexpr,
    INDICES: tl.constexpr, INDEX_BITS: tl.constexpr, LOW_BITS: tl.constexpr, VALUES: tl.constexpr, VALUE_BITS: tl.constexpr,
    HAS_SCALE: tl.constexpr, BATCH: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK_LANES: tl.constexpr,
    COUNTER_BITS: tl.constexpr, TILE_WORDS: tl.constexpr, VOTES: tl.constexpr, MAJORITY: tl.constexpr,
    OVER_SENDERS: tl.constexpr, RULE: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr, EXACT_DROP: tl.constexpr,
    EXACT_UNIT: tl.constexpr, EXACT_SCALE: tl.constexpr, EXACT_DIVISION: tl.constexpr, DIVIDES_LATER: tl.constexpr,
):  # fmt: skip
    """A batch of chunks at a time: first all that was sent for them, into tiles of scratch memory, then the products."""
    last_of_all = tl.where(tl.load(verdict_ptr) == 0, last_of_all, first_of_all)
    NUM_ELEMENTS: tl.constexpr = ROW_EDGE * COL_EDGE
    WHOLE: tl.constexpr = BLOCK_R * BLOCK_C == NUM_ELEMENTS
    rows = tl.arange(0, BLOCK_R)[:, None]
    cols = tl.arange(0, BLOCK_C)[None, :]
    in_chunk = (rows < ROW_EDGE) & (cols < COL_EDGE)
    index = rows * COL_EDGE + cols
    lane = tl.arange(0, BLOCK_LANES)[None, :]
    place_of_row = tl.arange(0, BATCH * AT_ONCE) // AT_ONCE
    replica_of_row = (tl.arange(0, BATCH * AT_ONCE) % AT_ONCE)[:, None]
    program_ptr = scratch_ptr + tl.program_id(0) * (BATCH * TILE_WORDS)
    tile_ptrs = (program_ptr + place_of_row * TILE_WORDS)[:, None]
    if not DENSE:
        side_R = tl.arange(0, BLOCK_R)
        side_C = tl.arange(0, BLOCK_C)
        row_basis = tl.load(row_basis_ptr + side_R[None, :] * BLOCK_R + side_R[:, None])
        col_basis = tl.load(col_basis_ptr + side_C[:, None] * BLOCK_C + side_C[None, :])
    _clear(program_ptr, BATCH * TILE_WORDS)
    for first_chunk in range(first_of_all + tl.program_id(0) * BATCH, last_of_all, tl.num_programs(0) * BATCH):
        chunks = first_chunk + place_of_row
        in_batch = chunks < last_of_all
        row_ptrs = rows_ptr + tl.load(row_of_chunk_ptr + chunks, mask=in_batch, other=0) * NUM_COLUMNS
        records = tl.load(row_ptrs + FIRST_RECORD) + chunks - tl.load(row_ptrs + FIRST_CHUNK)
        record_ptrs, begin_bits = record_place(words_ptr, stack_bytes, records, RECORD_BYTES, BEGINS_WORDS)
        for first_replica in range(0, num_replicas, AT_ONCE):
            replica = first_replica + replica_of_row
            here, value, live = read_records(
                record_ptrs + replica.to(tl.int64) * payload_words, begin_bits,
                in_batch[:, None] & (replica < num_replicas), lane,
                NUM_ELEMENTS, K, INDICES, INDEX_BITS, LOW_BITS, VALUES, VALUE_BITS, HAS_SCALE,
            )  # fmt: skip
            if VOTES:
                if MAJORITY:
                    live = live & (value != 0)
                # Two counters per element: who voted for it, and who against. None can overflow.
                at = here * (2 * COUNTER_BITS) + tl.where(value < 0, COUNTER_BITS, 0)
                tl.atomic_add(tile_ptrs + (at >> 5), 1 << (at & 31), mask=live, sem="relaxed")
            else:
                sum_ptrs = (tile_ptrs + here).to(tl.pointer_type(tl.float32))
                tl.store(sum_ptrs, tl.load(sum_ptrs, mask=live, other=0.0) + value, mask=live)
                if OVER_SENDERS:
                    sender_ptrs = tile_ptrs + (TILE_WORDS // 2) + here
                    num_senders = tl.load(sender_ptrs, mask=live, other=0) + (value != 0).to(tl.int32)
                    tl.store(sender_ptrs, num_senders, mask=live)
                tl.debug_barrier()
        tl.debug_barrier()
        for place in range(0, tl.minimum(BATCH, last_of_all - first_chunk)):
            chunk = first_chunk + place
            row_ptr = rows_ptr + tl.load(row_of_chunk_ptr + chunk) * NUM_COLUMNS
            local = chunk - tl.load(row_ptr + FIRST_CHUNK).to(tl.int32)
            first, offsets, exists = tile_of(row_ptr, local, rows, cols, ROW_EDGE, COL_EDGE, PADDED, ALIGNED)
            parameter_ptr = address(row_ptr, PARAMETER, PARAMETER_DTYPE, ALIGNED) + first + offsets
            tile_ptr = program_ptr + place * TILE_WORDS
            if VOTES:
                if COUNTER_BITS == 4:
                    counter_ptr = tile_ptr.to(tl.pointer_type(tl.uint8))
                elif COUNTER_BITS == 8:
                    counter_ptr = tile_ptr.to(tl.pointer_type(tl.uint16))
                else:
                    counter_ptr = tile_ptr.to(tl.pointer_type(tl.uint32))
                both = load_as_is(counter_ptr + index, in_chunk, WHOLE).to(tl.int32)
                num_for = both & ((1 << COUNTER_BITS) - 1)
                num_against = (both >> COUNTER_BITS) & ((1 << COUNTER_BITS) - 1)
                direction = (num_for - num_against).to(tl.float32)
                num_senders = num_for + num_against
            else:
                sum_ptr = tile_ptr.to(tl.pointer_type(tl.float32))
                direction = load_as_is(sum_ptr + index, in_chunk, WHOLE)
                if OVER_SENDERS:
                    num_senders = load_as_is(tile_ptr + (TILE_WORDS // 2) + index, in_chunk, WHOLE)
            if MAJORITY:
                direction = tl.where(direction > 0, 1.0, tl.where(direction < 0, -1.0, 0.0))
            elif not DIVIDES_LATER:
                divisor = direction * 0 + num_replicas
                if OVER_SENDERS:
                    divisor = tl.maximum(num_senders, 1).to(tl.float32)
                # Products in TF32 are less exact than a quick division is; and a vote of known scale is rounded to 8 bits
                # next, which the last bit of a quotient of numbers up to `MOST_LATER_DIVISOR` cannot change.
                direction = tl.div_rn(direction, divisor) if EXACT_DIVISION else direction / divisor
            if not DENSE:
                if EXACT:
                    later_divisor = num_replicas.to(tl.float32) if DIVIDES_LATER else 1.0
                    direction = _exact_inverse(
                        direction, later_divisor, row_basis, col_basis, EXACT_SCALE, EXACT_DROP, EXACT_UNIT
                    )  # fmt: skip
                else:
                    direction = tl.dot(direction, col_basis, input_precision=PRECISION)
                    direction = tl.dot(row_basis, direction, input_precision=PRECISION)
            state_ptr = address(row_ptr, RULE_STATE, tl.float32, ALIGNED) + first + offsets
            if RULE == "whole":
                store_tile(state_ptr, direction, exists, FULL)
            else:
                parameter = load_tile(parameter_ptr, exists, FULL)
                parameter = _apply_rule(
                    parameter * weight_factor, direction, state_ptr, exists, FULL, RULE, lr, beta1, beta2, rest1, rest2,
                    eps, correction,
                )  # fmt: skip
                store_tile(parameter_ptr, to_dtype(parameter, PARAMETER_DTYPE), exists, FULL)
        _clear(program_ptr, BATCH * TILE_WORDS)


_PROGRAMS_PER_PROCESSOR = 4
_REGISTERS = 128
# Slots, or bits of slots, that a program unpacks together: more would not find room in its registers.
_LANES_AT_ONCE = 1024
# Chunks that a program decodes together, and scratch memory for their tiles, which should stay in the cache.
_MOST_IN_BATCH = 4
_BATCH_WORDS = 8192


class Settings(NamedTuple):
    """The numbers an update rule needs; ``rest1`` and ``rest2`` are 1 less each beta, before rounding."""

    lr: float
    weight_factor: float
    beta1: float
    beta2: float
    rest1: float
    rest2: float
    eps: float
    bias_correction: float


def decode_(
    table: ChunkTable,
    codec: ChunkCodec,
    payloads_RB: Tensor,
    offset_bytes: int,
    decoding: Decoding,
    rule: str,
    settings: Settings,
    scratch: Scratch,
    chunks: tuple[int, int],
    verdict: Tensor,
) -> None:
    """Apply everyone's records to the parameters of ``table`` whose chunks are in the range ``chunks``, if ``verdict``
    (int32) is 0.

    The rule ``whole`` writes the direction to where the rule's state would be, and leaves the parameter alone.
    """
    cut, device, (num_replicas, num_bytes) = table.cut, payloads_RB.device, payloads_RB.shape
    is_exact, scales = decoding.is_exact and not cut.dense, scales_of(cut.row_edge, cut.col_edge)
    exact_bits = scales.basis_bits if is_exact else 0
    lanes = num_lanes(codec)
    votes, has_known_scale = decoding.are_votes(codec.value_name), decoding.has_known_scale(codec.value_name, num_replicas)
    counter_bits = 4 if num_replicas < 16 else 8 if num_replicas < 256 else 16
    tile_words = triton.cdiv(cut.num_elements, 16) * (counter_bits if votes else 32)
    batch = _power_of_2_below(min(_MOST_IN_BATCH, _BATCH_WORDS // tile_words, _LANES_AT_ONCE // lanes))
    at_once = _power_of_2_below(min(num_replicas, _LANES_AT_ONCE // (lanes * batch))) if votes else 1
    programs = num_programs(device, triton.cdiv(chunks[1] - chunks[0], batch), _PROGRAMS_PER_PROCESSOR)
    with launching(device):
        _decode_kernel[(programs,)](
            table.rows_NT,
            table.row_of_chunk_C,
            *chunks,
            payloads_RB.view(torch.int32),
            num_bytes // 4,
            num_replicas,
            offset_bytes,
            padded_basis(cut.row_edge, cut.block_rows, device, exact_bits),
            padded_basis(cut.col_edge, cut.block_cols, device, exact_bits),
            scratch.take("words", (programs * batch * tile_words,), torch.int32, device),
            verdict,
            *settings,
            **cut_constants(cut),
            **codec_constants(codec, offset_bytes),
            PARAMETER_DTYPE=TRITON_DTYPES[table.parameter_dtype],
            BATCH=batch,
            AT_ONCE=at_once,
            BLOCK_LANES=lanes,
            COUNTER_BITS=counter_bits,
            TILE_WORDS=tile_words,
            VOTES=votes,
            MAJORITY=decoding.combine == "majority_vote",
            OVER_SENDERS=decoding.combine == "mean_over_senders" and num_replicas > 1,
            RULE=rule,
            PRECISION=PRECISION,
            EXACT=is_exact,
            EXACT_DROP=scales.drop,
            EXACT_UNIT=2.0**scales.unit,
            EXACT_SCALE=has_known_scale,
            EXACT_DIVISION=cut.dense or (is_exact and (not has_known_scale or num_replicas > MOST_LATER_DIVISOR)),
            DIVIDES_LATER=is_exact and votes and not has_known_scale and num_replicas <= MOST_LATER_DIVISOR,
            num_warps=cut.num_warps,
            num_stages=1,
            enable_fp_fusion=False,
            **cut.register_limit(_REGISTERS),
        )


def _power_of_2_below(number: int) -> int:
    return 1 << (max(1, number).bit_length() - 1)


def num_lanes(codec: ChunkCodec) -> int:
    """Lanes that `read_records` needs for a record, as a power of two."""
    constants = codec_constants(codec, 0)
    lanes = codec.num_elements if constants["INDICES"] == "bitmap" else codec.num_kept
    if constants["INDICES"] == "elias_fano":
        lanes = codec.index_bits - codec.num_kept * int(str(constants["LOW_BITS"]))
    return max(16, int(triton.next_power_of_2(lanes)))
