"""Bits to bytes and back, for many rows at once, on any device.

Bit i of a row is bit ``i % 8`` of byte ``i // 8``, counted from the least significant; integers are little-endian in both
senses. A row is padded with zero bits to a whole byte. Bits are held as uint8 tensors of zeros and ones.
"""

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

# Eight bytes of 0 or 1, taken as one 64-bit number and multiplied by this, have their bits side by side in the top byte.
_GATHER_BITS = 0x0102040810204080


@functools.lru_cache(maxsize=16)
def _bits_of_bytes(device: torch.device) -> Tensor:
    """The eight bits of every byte, as eight bytes in one int64."""
    bits = (torch.arange(256, device="cpu")[:, None] >> torch.arange(8, device="cpu")) & 1
    return bits.to(torch.uint8).view(torch.int64).view(256).to(device)


def pack_bits(bits: Tensor) -> Tensor:
    """(..., n) zeros and ones to (..., ceil(n / 8)) bytes."""
    missing = -bits.shape[-1] % 8
    padded = F.pad(bits, (0, missing)) if missing else bits.contiguous()
    if padded.storage_offset() % 8:
        padded = padded.clone()  # a single row may be contiguous and yet begin where no 64-bit number can
    return (padded.view(torch.int64) * _GATHER_BITS).bitwise_right_shift_(56).to(torch.uint8)


def unpack_bits(packed: Tensor) -> Tensor:
    """(..., B) bytes to (..., 8 * B) zeros and ones, padding included."""
    table = _bits_of_bytes(packed.device)
    spread = table.index_select(0, packed.reshape(-1).to(torch.int32))
    return spread.view(torch.uint8).view(*packed.shape[:-1], packed.shape[-1] * 8)


def ints_to_bits(values: Tensor, width: int) -> Tensor:
    """(..., n) int64 to (..., n * width): the lowest ``width`` bits of each."""
    num_bytes = -(-width // 8)
    as_bytes = values.contiguous().view(torch.uint8).unflatten(-1, (-1, 8))[..., :num_bytes]
    return unpack_bits(as_bytes)[..., :width].flatten(-2)


def bits_to_ints(bits: Tensor, width: int) -> Tensor:
    """(..., n * width) bits to (..., n) int64, not negative: the inverse of `ints_to_bits` for ``width`` < 64."""
    as_bytes = pack_bits(bits.unflatten(-1, (-1, width)))
    if width <= 8:
        return as_bytes.squeeze(-1).to(torch.int64)
    return F.pad(as_bytes, (0, 8 - as_bytes.shape[-1])).contiguous().view(torch.int64).squeeze(-1)
