"""Value codecs: kept coefficients (C, K) as small integers, and for some a scale per chunk.

Each codec is a row of `VALUE_CODECS` with a pair of pure functions. What `decode` gives back is what the peers see, and
the sender subtracts just that from its residual momentum, so a rounding error stays behind and is sent later. The
exception is ``sign``: its votes carry no size, so the sender takes out ``unit`` times its vote, where ``unit`` is the mean
size of what it sent from that chunk, a number it keeps to itself.

Void slots hold the value 0 and the code 0. Scales are bfloat16: their rounding is part of what is fed back.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.core.exact import MOST_EXPONENT

LARGEST_VALUE = 2.0**MOST_EXPONENT
"""No sound gradient leads to a larger one, so none is accepted from a peer."""
_LARGEST_FLOAT32 = torch.finfo(torch.float32).max
_LARGEST_BFLOAT16 = torch.finfo(torch.bfloat16).max
SCALE_BITS = 16


@dataclass(frozen=True)
class ValueCodec:
    """``encode(values_CK) -> (codes_CK, scale_C1)`` and ``decode(codes_CK, scale_C1) -> values_CK``.

    Codes are int64 in [0, 2**num_bits). Without ``has_scale`` the scale is not sent and decodes as 1.
    """

    name: str
    num_bits: int
    has_scale: bool
    has_zero: bool
    encode: Callable[[Tensor], tuple[Tensor, Tensor]]
    decode: Callable[[Tensor, Tensor], Tensor]
    unit: Callable[[Tensor], Tensor] | None = None
    """How much of the momentum one unit of the sent value stands for, per chunk (C, 1); None means 1."""


def encode_float32(values_CK: Tensor) -> tuple[Tensor, Tensor]:
    """The bit pattern. Values too large for float32 are sent as its largest; the rest stays in the momentum."""
    finite = values_CK.clamp(-_LARGEST_FLOAT32, _LARGEST_FLOAT32).to(torch.float32)
    return finite.view(torch.int32).to(torch.int64) & 0xFFFFFFFF, _no_scale(values_CK)


def decode_float32(codes_CK: Tensor, scale_C1: Tensor) -> Tensor:
    """Inverse of `encode_float32`."""
    return codes_CK.to(torch.int32).view(torch.float32)


def encode_bfloat16(values_CK: Tensor) -> tuple[Tensor, Tensor]:
    """The bit pattern after rounding to nearest even."""
    return _bfloat16_code(values_CK), _no_scale(values_CK)


def decode_bfloat16(codes_CK: Tensor, scale_C1: Tensor) -> Tensor:
    """Inverse of `encode_bfloat16`."""
    return codes_CK.to(torch.int32).bitwise_left_shift(16).view(torch.float32)


def encode_integers(values_CK: Tensor, num_bits: int) -> tuple[Tensor, Tensor]:
    """Multiples of ``scale = max |v| / (2**(num_bits-1) - 1)``, in two's complement."""
    largest_code = 2 ** (num_bits - 1) - 1
    # In float64, so that how a device divides does not show in the rounded scale.
    scale = _round_scale(values_CK.abs().amax(dim=1, keepdim=True).double() / largest_code, largest_code)
    steps = (values_CK / scale.where(scale > 0, 1)).round_().clamp_(-largest_code, largest_code)
    steps = steps.where(scale > 0, 0)
    return steps.to(torch.int64) & (2**num_bits - 1), scale


def decode_integers(codes_CK: Tensor, scale_C1: Tensor, num_bits: int) -> Tensor:
    """Inverse of `encode_integers`."""
    half = 2 ** (num_bits - 1)
    steps: Tensor = (codes_CK ^ half) - half
    return steps.to(torch.float32) * scale_C1


def encode_sign(values_CK: Tensor) -> tuple[Tensor, Tensor]:
    """1 where the value is negative."""
    return (values_CK < 0).to(torch.int64), _no_scale(values_CK)


def encode_sign_scale(values_CK: Tensor) -> tuple[Tensor, Tensor]:
    """The sign, and the mean magnitude of the chunk's live slots as the scale."""
    return (values_CK < 0).to(torch.int64), _round_scale(mean_magnitude(values_CK), 1)


def decode_sign(codes_CK: Tensor, scale_C1: Tensor) -> Tensor:
    """Plus or minus the scale."""
    return (1 - 2 * codes_CK).to(torch.float32) * scale_C1


def mean_magnitude(values_CK: Tensor) -> Tensor:
    """Mean of |v| over the slots that are not 0, per chunk (C, 1); 0 where there are none.

    In float64, so that in which order a device adds does not show in the rounded mean.
    """
    num_live = (values_CK != 0).sum(dim=1, keepdim=True).clamp_(min=1)
    return (values_CK.abs().double() / num_live).sum(dim=1, keepdim=True).to(values_CK.dtype)


def scale_to_code(scale_C1: Tensor) -> Tensor:
    """A scale, already rounded to bfloat16, as 16 bits."""
    return _bfloat16_code(scale_C1)


def code_to_scale(codes_C1: Tensor) -> Tensor:
    """Inverse of `scale_to_code`."""
    return decode_bfloat16(codes_C1, codes_C1)


def _bfloat16_code(values: Tensor) -> Tensor:
    finite = values.clamp(-_LARGEST_BFLOAT16, _LARGEST_BFLOAT16).to(torch.bfloat16)
    return finite.view(torch.int16).to(torch.int64) & 0xFFFF


def _round_scale(scale_C1: Tensor, largest_code: int) -> Tensor:
    """Round, and keep the largest code times the scale finite."""
    largest = _LARGEST_BFLOAT16 if largest_code == 1 else _LARGEST_BFLOAT16 / (largest_code + 1)
    return scale_C1.clamp(max=largest).to(torch.float32).to(torch.bfloat16).to(torch.float32)


def _no_scale(values_CK: Tensor) -> Tensor:
    return torch.ones(len(values_CK), 1, dtype=torch.float32, device=values_CK.device)


VALUE_CODECS: dict[str, ValueCodec] = {
    codec.name: codec
    for codec in (
        ValueCodec("float32", 32, False, True, encode_float32, decode_float32),
        ValueCodec("bfloat16", 16, False, True, encode_bfloat16, decode_bfloat16),
        ValueCodec("int8", 8, True, True, lambda v: encode_integers(v, 8), lambda c, s: decode_integers(c, s, 8)),
        ValueCodec("int4", 4, True, True, lambda v: encode_integers(v, 4), lambda c, s: decode_integers(c, s, 4)),
        ValueCodec("sign_scale", 1, True, False, encode_sign_scale, decode_sign),
        ValueCodec("sign", 1, False, False, encode_sign, decode_sign, unit=mean_magnitude),
    )
}
