"""The value codecs inside a kernel: the same codes, bit for bit, as `thinwire.wire.values`."""

import triton
import triton.language as tl

from thinwire.kernels.bits import bfloat16_bits, round_half_even


@triton.jit
def encode_values(values, live, VALUES: tl.constexpr, VALUE_BITS: tl.constexpr):
    """(codes, what the momentum loses, the scale's 16 bits, the sender's unit) of kept coefficients, a chunk per row.

    What is not live must be 0.
    """
    size = tl.abs(values)
    unit = tl.max(size, axis=1) * 0
    scale_code = unit.to(tl.int32)
    if VALUES == "float32":
        codes = values.to(tl.uint32, bitcast=True)
        removed = values
    elif VALUES == "bfloat16":
        upper = bfloat16_bits(values)
        codes = upper.to(tl.uint32)
        removed = (upper << 16).to(tl.float32, bitcast=True)
    elif (VALUES == "int8") or (VALUES == "int4"):
        largest_code: tl.constexpr = (1 << (VALUE_BITS - 1)) - 1
        # What decides the bytes is computed in float64 and rounded to float32, so that no device's way to divide shows.
        scale = (tl.max(size, axis=1).to(tl.float64) / largest_code).to(tl.float32)
        scale = tl.minimum(scale, 3.3895313892515355e38 / (largest_code + 1))
        scale_code = bfloat16_bits(scale)
        scale = (scale_code << 16).to(tl.float32, bitcast=True)
        scale = scale[:, None]
        steps = round_half_even(tl.div_rn(values, tl.where(scale > 0, scale, 1.0) + values * 0))
        steps = tl.minimum(tl.maximum(steps, -largest_code), largest_code)
        steps = tl.where(scale > 0, steps, 0.0)
        codes = (steps.to(tl.int32) & ((1 << VALUE_BITS) - 1)).to(tl.uint32)
        removed = steps * scale
    else:
        tl.static_assert((VALUES == "sign") or (VALUES == "sign_scale"))
        num_live = tl.maximum(tl.sum((values != 0).to(tl.int32), axis=1), 1)
        unit = tl.sum(size.to(tl.float64) / num_live.to(tl.float64)[:, None], axis=1).to(tl.float32)
        if VALUES == "sign_scale":
            scale_code = bfloat16_bits(unit)
            unit = (scale_code << 16).to(tl.float32, bitcast=True)
        codes = (values < 0).to(tl.uint32)
        removed = tl.where(values < 0, -unit[:, None], unit[:, None])
    return tl.where(live, codes, 0), tl.where(live, removed, 0.0), scale_code, unit


@triton.jit
def decode_values(codes, scale, VALUES: tl.constexpr, VALUE_BITS: tl.constexpr):
    """float32 values from codes (int32), with ``scale`` broadcast to them."""
    if VALUES == "float32":
        return codes.to(tl.float32, bitcast=True)
    if VALUES == "bfloat16":
        return (codes << 16).to(tl.float32, bitcast=True)
    if (VALUES == "int8") or (VALUES == "int4"):
        half: tl.constexpr = 1 << (VALUE_BITS - 1)
        return ((codes ^ half) - half).to(tl.float32) * scale
    return (1 - 2 * codes).to(tl.float32) * scale
