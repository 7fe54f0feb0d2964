"""Checksums of payloads, whether their records are such as `ChunkCodec.encode` writes, and the verdict on a step: what
`thinwire.wire` checks, in one pass over the bytes and without memory of their size.

What is found is kept in a table of int64, *findings*, a row per replica: the header's words, the checksum, and the first
bad record of each stack.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.core.exact import MOST_EXPONENT
from thinwire.kernels.bits import get_bits
from thinwire.kernels.selection import popcount
from thinwire.kernels.table import codec_constants, codec_low_bits, launching, record_place
from thinwire.kernels.values import decode_values
from thinwire.wire.codec import ChunkCodec
from thinwire.wire.payload import (
    CHECKSUM_WORD,
    FIRST_WORD,
    FLAG_CALLS_MEETING,
    FLAG_GAVE_UP,
    FLAGS_BIT,
    HEADER_WORDS,
    PLACE_WORD,
    PROBLEM_WORD,
    Problem,
    Verdict,
)

_BLOCK_WORDS = 1024
_BLOCK_RECORDS = 128
# The bits of the largest value that is accepted, a power of two.
_LARGEST: tl.constexpr = tl.constexpr((MOST_EXPONENT + 127) << 23)
NO_BAD_RECORD = (1 << 63) - 1
_NONE: tl.constexpr = tl.constexpr(NO_BAD_RECORD)
_REFUSED: tl.constexpr = tl.constexpr(int(Verdict.REFUSED))
_GAVE_UP: tl.constexpr = tl.constexpr(FLAG_GAVE_UP << FLAGS_BIT)
_FLAGS: tl.constexpr = tl.constexpr((FLAG_GAVE_UP | FLAG_CALLS_MEETING) << FLAGS_BIT)
_MOST_PROBLEM: tl.constexpr = tl.constexpr(int(max(Problem)))


@triton.jit(do_not_specialize=["num_words", "sums_stride"])
def _checksum_kernel(words_ptr, num_words, sums_ptr, sums_stride, SKIPPED: tl.constexpr, BLOCK: tl.constexpr):
    """``sum of half_i * weight_i`` modulo 2**64 of each payload; integers, so that any order gives the same sum."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = (index < num_words) & (index != SKIPPED)
    words = tl.load(words_ptr + tl.program_id(1).to(tl.int64) * num_words + index, mask=there, other=0)
    terms = (words & 0xFFFFFFFF) * _weight(2 * index + 1) + ((words >> 32) & 0xFFFFFFFF) * _weight(2 * index + 2)
    tl.atomic_add(sums_ptr + tl.program_id(1) * sums_stride, tl.sum(terms, axis=0), sem="relaxed")


@triton.jit
def _weight(number):
    """`wire.payload._weights`, of which this is the one with this number, from 1."""
    mixed = number.to(tl.uint64) * 0x9E3779B97F4A7C15
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB
    return ((mixed ^ (mixed >> 31)) | 1).to(tl.int64, bitcast=True)


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


@triton.jit(do_not_specialize=["payload_words", "num_records", "stack_bytes", "first_bad_stride"])
def _records_kernel(
    words_ptr, payload_words, num_records, stack_bytes, first_bad_ptr, first_bad_stride,
    NUM_ELEMENTS: tl.constexpr, K: tl.constexpr, RECORD_BYTES: tl.constexpr, BEGINS_WORDS: tl.constexpr,
    RECORD_BITS: tl.constexpr, INDICES: tl.constexpr, INDEX_BITS: tl.constexpr, LOW_BITS: tl.constexpr,
    VALUES: tl.constexpr, VALUE_BITS: tl.constexpr, HAS_SCALE: tl.constexpr, NUM_MARKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The first record of each payload that is not valid, a lane per record."""
    record = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = record < num_records
    payload_ptr = words_ptr + tl.program_id(1).to(tl.int64) * payload_words
    record_ptrs, begins = record_place(payload_ptr, stack_bytes, record.to(tl.int64), RECORD_BYTES, BEGINS_WORDS)
    record_ptr = tl.reshape(record_ptrs, (BLOCK,))
    begin = tl.reshape(begins, (BLOCK,))

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
        is_possible = (value.to(tl.int32, bitcast=True) & 0x7FFFFFFF) <= _LARGEST
        valid = valid & is_possible & ((place < num_live) | (code == 0))
    if RECORD_BITS < RECORD_BYTES * 8:
        valid = valid & (get_bits(record_ptr, begin + RECORD_BITS, there, RECORD_BYTES * 8 - RECORD_BITS) == 0)
    bad = tl.min(tl.where(there & ~valid, record.to(tl.int64), _NONE), axis=0)
    tl.atomic_min(first_bad_ptr + tl.program_id(1) * first_bad_stride, bad, sem="relaxed")


@triton.jit(do_not_specialize=["payload_words", "own", "width"])
def _judge_kernel(
    words_ptr, payload_words, own, findings_ptr, width, verdict_ptr, DAMAGE: tl.constexpr, FIRST_WORD: tl.constexpr,
    PLACE: tl.constexpr, PROBLEM: tl.constexpr, CHECKSUM: tl.constexpr, HEADER_WORDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A replica's header goes to its findings, and the verdict on the step is raised as `sealing.read_findings` and the
    headers would have it."""
    replica = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    in_header = column < HEADER_WORDS
    header = tl.load(words_ptr + replica.to(tl.int64) * payload_words + column, mask=in_header, other=0)
    wanted = tl.load(words_ptr + own.to(tl.int64) * payload_words + column, mask=in_header, other=0)
    wanted = tl.where(column == 0, FIRST_WORD, wanted + tl.where(column == PLACE, replica - own, 0))
    differs = in_header & (tl.where(column == 0, header & ~_FLAGS, header) != wanted)
    row_ptr = findings_ptr + replica * width + column
    found = tl.load(row_ptr, mask=(column >= HEADER_WORDS) & (column < width), other=_NONE)
    tl.store(row_ptr, header, mask=in_header)
    problem = tl.sum(tl.where(column == PROBLEM, header, 0))
    other_digest = _any(differs & ((column == 1) | (column == 2)))
    says_no = _any((column == 0) & ((header & _GAVE_UP) != 0)) | (problem != 0)
    is_bad = _any(differs & ((column == 0) | (column == PLACE))) | (_any(differs & (column == 3)) & (other_digest == 0))
    is_bad = is_bad | ((problem != 0) & (((problem >> 32) < 1) | ((problem >> 32) > _MOST_PROBLEM)))
    is_bad = is_bad | (_any((column > HEADER_WORDS) & (found != _NONE)) & (says_no == 0))
    stated = tl.sum(tl.where(column == CHECKSUM, header, 0))
    computed = tl.sum(tl.where(column == HEADER_WORDS, found, 0))
    is_bad = is_bad | (stated != computed)
    verdict = tl.where(is_bad, DAMAGE, tl.where(says_no | other_digest, _REFUSED, 0))
    tl.atomic_max(verdict_ptr, verdict, sem="relaxed")


@triton.jit
def _any(flags):
    return tl.sum(flags.to(tl.int32)) > 0


def add_checksum_(payload_B: Tensor) -> None:
    """Add its checksum to the payload's own word for it."""
    words = payload_B.view(torch.int64)
    _add_checksums_(words[None], words[CHECKSUM_WORD:], 0)


def inspect_(payloads_RB: Tensor, stacks: Sequence[tuple[ChunkCodec, int, int]], findings_RW: Tensor) -> None:
    """Find checksums and bad records; ``stacks`` are (codec, offset in bytes, number of chunks). Headers come with
    `judge_`."""
    findings_RW.fill_(NO_BAD_RECORD)
    findings_RW[:, HEADER_WORDS] = 0
    _add_checksums_(payloads_RB.view(torch.int64), findings_RW[:, HEADER_WORDS], findings_RW.stride(0))
    for column, (codec, offset_bytes, num_chunks) in enumerate(stacks, HEADER_WORDS + 1):
        if num_chunks:
            _find_bad_records_(payloads_RB, codec, offset_bytes, num_chunks, findings_RW[:, column])


def judge_(
    payloads_RB: Tensor, own_replica: int, findings_RW: Tensor, verdict: Tensor, damage_verdict: Verdict = Verdict.DAMAGED
) -> None:
    """Complete the findings with the headers, and raise ``verdict`` (int32) if the step must not be applied as it is: to
    REFUSED, or to ``damage_verdict`` for a bad payload."""
    num_replicas, width = findings_RW.shape
    with launching(payloads_RB.device):
        _judge_kernel[(num_replicas,)](
            payloads_RB.view(torch.int64),
            payloads_RB.shape[1] // 8,
            own_replica,
            findings_RW,
            width,
            verdict,
            DAMAGE=int(damage_verdict),
            FIRST_WORD=FIRST_WORD,
            PLACE=PLACE_WORD,
            PROBLEM=PROBLEM_WORD,
            CHECKSUM=CHECKSUM_WORD,
            HEADER_WORDS=HEADER_WORDS,
            BLOCK=triton.next_power_of_2(width),
            num_warps=1,
            enable_fp_fusion=False,
        )


def _add_checksums_(words_RN: Tensor, sums: Tensor, stride: int) -> None:
    grid = (triton.cdiv(words_RN.shape[1], _BLOCK_WORDS), words_RN.shape[0])
    with launching(words_RN.device):
        _checksum_kernel[grid](
            words_RN, words_RN.shape[1], sums, stride, SKIPPED=CHECKSUM_WORD, BLOCK=_BLOCK_WORDS, enable_fp_fusion=False
        )


def _find_bad_records_(
    payloads_RB: Tensor, codec: ChunkCodec, offset_bytes: int, num_records: int, first_bad_R: Tensor
) -> None:
    form = codec_constants(codec, offset_bytes)
    marks = codec.num_kept + (codec.num_elements >> codec_low_bits(codec))
    with launching(payloads_RB.device):
        _records_kernel[(triton.cdiv(num_records, _BLOCK_RECORDS), len(payloads_RB))](
            payloads_RB.view(torch.int32),
            payloads_RB.shape[1] // 4,
            num_records,
            offset_bytes,
            first_bad_R,
            first_bad_R.stride(0),
            NUM_ELEMENTS=codec.num_elements,
            RECORD_BITS=codec.record_bits,
            NUM_MARKS=marks if form["INDICES"] == "elias_fano" else codec.num_elements,
            BLOCK=_BLOCK_RECORDS,
            enable_fp_fusion=False,
            **form,
        )
