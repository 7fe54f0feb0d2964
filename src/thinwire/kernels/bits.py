"""Bits of a payload inside a kernel, and roundings that are the same in Triton's interpreter and on a GPU.

A payload is seen as 32-bit words. A field of up to 32 bits begins at any bit and may reach into the next word.
"""

import triton
import triton.language as tl


@triton.jit
def put_bits(words_ptr, position, field, mask, WIDTH: tl.constexpr):
    """OR the ``WIDTH`` low bits of ``field`` (uint32, other bits 0) into words that were 0 there. Any order, same result."""
    shift = position & 31
    tl.atomic_or(words_ptr + (position >> 5), (field << shift).to(tl.int32, bitcast=True), mask=mask, sem="relaxed")
    if WIDTH > 1:
        reaches = mask & (shift + WIDTH > 32)
        rest = (field >> 1) >> (31 - shift)
        tl.atomic_or(words_ptr + (position >> 5) + 1, rest.to(tl.int32, bitcast=True), mask=reaches, sem="relaxed")


@triton.jit
def get_bits(words_ptr, position, mask, WIDTH: tl.constexpr):
    """The field of ``WIDTH`` bits at each position, as int32; 0 where masked."""
    shift = position & 31
    field = tl.load(words_ptr + (position >> 5), mask=mask, other=0).to(tl.uint32, bitcast=True) >> shift
    if WIDTH > 1:
        reaches = mask & (shift + WIDTH > 32)
        rest = tl.load(words_ptr + (position >> 5) + 1, mask=reaches, other=0).to(tl.uint32, bitcast=True)
        field = field | ((rest << 1) << (31 - shift))
    if WIDTH < 32:
        field = field & ((1 << WIDTH) - 1)
    return field.to(tl.int32, bitcast=True)


@triton.jit
def bfloat16_bits(values):
    """The upper 16 bits of float32 values rounded to bfloat16, ties to even, too large ones to its largest."""
    bits = values.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    rounded = tl.minimum((size + 0x7FFF + ((size >> 16) & 1)) >> 16, 0x7F7F)
    return rounded | ((bits >> 16) & 0x8000)


@triton.jit
def to_dtype(values, DTYPE: tl.constexpr):
    """Round float32 values to ``DTYPE``; Triton's interpreter truncates to bfloat16, so that is done by bits."""
    if DTYPE.is_bf16():
        bits = values.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)  # NaN
        return rounded.to(tl.int16).to(tl.bfloat16, bitcast=True)
    return values.to(DTYPE)


@triton.jit
def round_half_even(values):
    """The nearest whole number, for values below 2**22."""
    big: tl.constexpr = 12582912.0
    return (values + big) - big
