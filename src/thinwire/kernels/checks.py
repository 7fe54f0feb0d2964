"""Checksums of payloads, and whether their records are such as `ChunkCodec.encode` writes: what `thinwire.wire` checks, in
one pass over the bytes and without memory of their size."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.bits import get_bits
from thinwire.kernels.selection import popcount
from thinwire.kernels.table import codec_constants, codec_low_bits, launching
from thinwire.kernels.values import decode_values
from thinwire.wire.codec import ChunkCodec
from thinwire.wire.payload import CHECKSUM_WORD

_BLOCK_WORDS = 1024
_BLOCK_RECORDS = 128
_EXPONENT: tl.constexpr = tl.constexpr(0x7F800000)


@triton.jit(do_not_specialize=["num_words"])
def _checksum_kernel(words_ptr, num_words, sums_ptr, SKIPPED: tl.constexpr, BLOCK: tl.constexpr):
    """``sum of word_i * weight_i`` modulo 2**64 of each payload; integers, so that any order gives the same sum."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = index < num_words
    words = tl.load(words_ptr + tl.program_id(1).to(tl.int64) * num_words + index, mask=there, other=0)
    mixed = (index + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB
    weights = (mixed ^ (mixed >> 31)) | 1
    weights = tl.where(index == SKIPPED, 0, weights.to(tl.int64, bitcast=True))
    tl.atomic_add(sums_ptr + tl.program_id(1), tl.sum(words * weights, axis=0), sem="relaxed")


@triton.jit
def _follow_marks(
    marks, first, record_ptr, begin, valid, slot, before, num_live, NUM_ELEMENTS: tl.constexpr, K: tl.constexpr,
    INDICES: tl.constexpr, LOW_BITS: tl.constexpr,
):  # fmt: skip
    """Go from set bit to set bit of each lane's marks: indices must ascend, none beyond E, and only E may come again."""
    for _ in range(0, tl.max(popcount(marks))):
        is_set = marks != 0
        lowest = (marks & -marks).to(tl.uint32, bitcast=True).to(tl.float32)
        index = first + (lowest.to(tl.int32, bitcast=True) >> 23) - 127
        if INDICES == "elias_fano":
            low = index * 0
            if LOW_BITS > 0:
                low = get_bits(record_ptr, begin + slot * LOW_BITS, is_set & (slot < K), LOW_BITS)
            index = ((index - slot) << LOW_BITS) | low
        is_next = (index > before) | ((index == NUM_ELEMENTS) & (before == index))
        valid = valid & (~is_set | (is_next & (index <= NUM_ELEMENTS)))
        num_live += (is_set & (index < NUM_ELEMENTS)).to(tl.int32)
        before = tl.where(is_set, index, before)
        slot += is_set.to(tl.int32)
        marks = marks & (marks - 1)
    return valid, slot, before, num_live


@triton.jit(do_not_specialize=["payload_words", "num_records", "stack_bytes"])
def _records_kernel(
    words_ptr, payload_words, num_records, stack_bytes, first_bad_ptr,
    NUM_ELEMENTS: tl.constexpr, K: tl.constexpr, RECORD_BYTES: tl.constexpr, RECORD_BITS: tl.constexpr,
    INDICES: tl.constexpr, INDEX_BITS: tl.constexpr, LOW_BITS: tl.constexpr, VALUES: tl.constexpr,
    VALUE_BITS: tl.constexpr, HAS_SCALE: tl.constexpr, NUM_MARKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The first record of each payload that is not valid, a lane per record."""
    record = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = record < num_records
    byte = stack_bytes + record.to(tl.int64) * RECORD_BYTES
    record_ptr = words_ptr + tl.program_id(1).to(tl.int64) * payload_words + (byte >> 2)
    begin = (byte & 3).to(tl.int32) * 8

    slot = record * 0
    num_live = slot
    before = slot - 1
    valid = there
    if INDICES == "all":
        num_live = slot + K
    elif INDICES == "fixed_width":
        for _ in range(0, K):
            index = get_bits(record_ptr, begin + slot * LOW_BITS, there, LOW_BITS)
            valid = valid & (index <= NUM_ELEMENTS) & ((index > before) | ((index == NUM_ELEMENTS) & (before == index)))
            num_live += (index < NUM_ELEMENTS).to(tl.int32)
            before = index
            slot += 1
    else:
        marks_at = begin + K * LOW_BITS
        for first in range(0, NUM_MARKS // 32 * 32, 32):
            marks = get_bits(record_ptr, marks_at + first, there, 32)
            valid, slot, before, num_live = _follow_marks(
                marks, first, record_ptr, begin, valid, slot, before, num_live, NUM_ELEMENTS, K, INDICES, LOW_BITS
            )
        if NUM_MARKS % 32 > 0:
            first = NUM_MARKS // 32 * 32
            marks = get_bits(record_ptr, marks_at + first, there, NUM_MARKS % 32)
            valid, slot, before, num_live = _follow_marks(
                marks, first, record_ptr, begin, valid, slot, before, num_live, NUM_ELEMENTS, K, INDICES, LOW_BITS
            )
        valid = valid & ((slot == K) if INDICES == "elias_fano" else (slot <= K))

    scale = 1.0
    if HAS_SCALE:
        scale_code = get_bits(record_ptr, begin + INDEX_BITS + K * VALUE_BITS, there, 16)
        scale = (scale_code << 16).to(tl.float32, bitcast=True)
        valid = valid & ((scale_code & 0x7F80) != 0x7F80) & (scale >= 0)
    for place in range(0, K):
        code = get_bits(record_ptr, begin + INDEX_BITS + place * VALUE_BITS, there, VALUE_BITS)
        value = decode_values(code, scale, VALUES, VALUE_BITS)
        is_finite = (value.to(tl.int32, bitcast=True) & _EXPONENT) != _EXPONENT
        valid = valid & is_finite & ((place < num_live) | (code == 0))
    if RECORD_BITS < RECORD_BYTES * 8:
        valid = valid & (get_bits(record_ptr, begin + RECORD_BITS, there, RECORD_BYTES * 8 - RECORD_BITS) == 0)
    bad = tl.min(tl.where(there & ~valid, record, num_records), axis=0)
    tl.atomic_min(first_bad_ptr + tl.program_id(1), bad, sem="relaxed")


def add_checksums_(payloads_RB: Tensor, sums_R: Tensor) -> None:
    """Add the checksum of each payload to ``sums_R`` (int64)."""
    words = payloads_RB.view(torch.int64)
    grid = (triton.cdiv(words.shape[1], _BLOCK_WORDS), words.shape[0])
    with launching(payloads_RB.device):
        _checksum_kernel[grid](
            words, words.shape[1], sums_R, SKIPPED=CHECKSUM_WORD, BLOCK=_BLOCK_WORDS, enable_fp_fusion=False
        )


def find_bad_records_(
    payloads_RB: Tensor, codec: ChunkCodec, offset_bytes: int, first_bad_R: Tensor, num_records: int
) -> None:
    """Lower ``first_bad_R`` (int32) to the first record of each payload that is not valid."""
    form = codec_constants(codec)
    marks = codec.num_kept + (codec.num_elements >> codec_low_bits(codec))
    with launching(payloads_RB.device):
        _records_kernel[(triton.cdiv(num_records, _BLOCK_RECORDS), len(payloads_RB))](
            payloads_RB.view(torch.int32),
            payloads_RB.shape[1] // 4,
            num_records,
            offset_bytes,
            first_bad_R,
            NUM_ELEMENTS=codec.num_elements,
            RECORD_BITS=codec.record_bits,
            NUM_MARKS=marks if form["INDICES"] == "elias_fano" else codec.num_elements,
            BLOCK=_BLOCK_RECORDS,
            enable_fp_fusion=False,
            **form,
        )
