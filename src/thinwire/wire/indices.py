"""Index codecs: K ascending indices in [0, E], where E itself marks a void slot (voids come last).

Each codec is a row of `INDEX_CODECS`: its size in bits from (E, K) alone, and a pair of pure functions between
indices (C, K) and bits (C, n). Decoding never fails and never leaves the range [0, E]; `decode` also returns a flag per
chunk that says whether the bits were such as `encode` writes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.wire.bitpack import bits_to_ints, ints_to_bits


@dataclass(frozen=True)
class IndexCodec:
    """``encode(indices_CK, E) -> bits_CN`` and ``decode(bits_CN, E, K) -> (indices_CK, valid_C)``."""

    name: str
    num_bits: Callable[[int, int], int]
    encode: Callable[[Tensor, int], Tensor]
    decode: Callable[[Tensor, int, int], tuple[Tensor, Tensor]]


def fixed_width_bits(num_elements: int, num_kept: int) -> int:
    """K indices of ceil(log2(E + 1)) bits."""
    return num_kept * num_elements.bit_length()


def encode_fixed_width(indices_CK: Tensor, num_elements: int) -> Tensor:
    """Each index by itself."""
    return ints_to_bits(indices_CK, num_elements.bit_length())


def decode_fixed_width(bits_CN: Tensor, num_elements: int, num_kept: int) -> tuple[Tensor, Tensor]:
    """Inverse of `encode_fixed_width`."""
    return _checked(bits_to_ints(bits_CN, num_elements.bit_length()), num_elements)


def elias_fano_low_bits(num_elements: int, num_kept: int) -> int:
    """l: how many low bits of an index are written as they are."""
    return (num_elements // num_kept).bit_length() - 1


def elias_fano_bits(num_elements: int, num_kept: int) -> int:
    """``K*l + K + (E >> l)``: the low bits, a one per index, and a zero per step of the high part."""
    low = elias_fano_low_bits(num_elements, num_kept)
    return num_kept * low + num_kept + (num_elements >> low)


def encode_elias_fano(indices_CK: Tensor, num_elements: int) -> Tensor:
    """All low parts, then the high parts in unary: index i with high part h sets bit ``h + i``."""
    num_kept = indices_CK.shape[1]
    low = elias_fano_low_bits(num_elements, num_kept)
    place = (indices_CK >> low) + torch.arange(num_kept, device=indices_CK.device)
    unary = torch.zeros(
        len(indices_CK), num_kept + (num_elements >> low), dtype=torch.uint8, device=indices_CK.device
    ).scatter_(1, place, 1)
    return torch.cat((ints_to_bits(indices_CK, low), unary), dim=1) if low else unary


def decode_elias_fano(bits_CN: Tensor, num_elements: int, num_kept: int) -> tuple[Tensor, Tensor]:
    """Inverse of `encode_elias_fano`."""
    low = elias_fano_low_bits(num_elements, num_kept)
    unary = bits_CN[:, num_kept * low :]
    place, num_ones = _places_of_ones(unary, num_kept)
    indices = (place - torch.arange(num_kept, device=bits_CN.device)).clamp_(min=0) << low
    if low:
        indices |= bits_to_ints(bits_CN[:, : num_kept * low], low)
    indices, valid = _checked(indices, num_elements)
    return indices, valid & (num_ones == num_kept)


def bitmap_bits(num_elements: int, num_kept: int) -> int:
    """One bit per element."""
    return num_elements


def encode_bitmap(indices_CK: Tensor, num_elements: int) -> Tensor:
    """A one where an element is kept; voids leave no mark."""
    marks = torch.zeros(len(indices_CK), num_elements + 1, dtype=torch.uint8, device=indices_CK.device)
    return marks.scatter_(1, indices_CK, 1)[:, :num_elements]


def decode_bitmap(bits_CN: Tensor, num_elements: int, num_kept: int) -> tuple[Tensor, Tensor]:
    """Inverse of `encode_bitmap`."""
    place, num_ones = _places_of_ones(bits_CN, num_kept)
    slot = torch.arange(num_kept, device=bits_CN.device)
    indices = torch.where(slot < num_ones[:, None], place, num_elements)
    return indices, num_ones <= num_kept


def all_bits(num_elements: int, num_kept: int) -> int:
    """Nothing to write, but only where all elements are kept."""
    return 0 if num_kept == num_elements else num_elements * 64


def encode_all(indices_CK: Tensor, num_elements: int) -> Tensor:
    """No bits."""
    return torch.empty(len(indices_CK), 0, dtype=torch.uint8, device=indices_CK.device)


def decode_all(bits_CN: Tensor, num_elements: int, num_kept: int) -> tuple[Tensor, Tensor]:
    """Every index in turn."""
    indices = torch.arange(num_elements, device=bits_CN.device).expand(len(bits_CN), -1)
    return indices, torch.ones(len(bits_CN), dtype=torch.bool, device=bits_CN.device)


def _places_of_ones(bits_CN: Tensor, num_kept: int) -> tuple[Tensor, Tensor]:
    """Where the first K ones of each row are (0 where there are fewer), and how many ones the row has."""
    rank = bits_CN.cumsum(dim=1, dtype=torch.int32)
    num_ones = rank[:, -1].to(torch.int64)
    slot = torch.where((bits_CN == 1) & (rank <= num_kept), rank - 1, num_kept).to(torch.int64)
    place = torch.arange(bits_CN.shape[1], device=bits_CN.device).expand(len(bits_CN), -1)
    found = torch.zeros(len(bits_CN), num_kept + 1, dtype=torch.int64, device=bits_CN.device)
    return found.scatter_(1, slot, place)[:, :num_kept], num_ones


def _checked(indices_CK: Tensor, num_elements: int) -> tuple[Tensor, Tensor]:
    """Bring indices into range, and say per chunk if they were in range and ascending, each named once, voids last."""
    before, after = indices_CK[:, :-1], indices_CK[:, 1:]
    in_order = ((before < after) | ((before == num_elements) & (after == num_elements))).all(dim=1)
    return indices_CK.clamp(max=num_elements), in_order & (indices_CK <= num_elements).all(dim=1)


INDEX_CODECS: dict[str, IndexCodec] = {
    codec.name: codec
    for codec in (
        IndexCodec("all", all_bits, encode_all, decode_all),
        IndexCodec("fixed_width", fixed_width_bits, encode_fixed_width, decode_fixed_width),
        IndexCodec("elias_fano", elias_fano_bits, encode_elias_fano, decode_elias_fano),
        IndexCodec("bitmap", bitmap_bits, encode_bitmap, decode_bitmap),
    )
}


def smallest_index_codec(num_elements: int, num_kept: int, values_hold_zero: bool) -> IndexCodec:
    """The codec with the fewest bits; the first in the table where two are equal.

    ``all`` needs values that can be 0: with signs alone a void could not be told from a vote.
    """
    allowed = [codec for codec in INDEX_CODECS.values() if values_hold_zero or codec.name != "all"]
    return min(allowed, key=lambda codec: codec.num_bits(num_elements, num_kept))


def entropy_bound_bits(num_elements: int, num_kept: int) -> float:
    """``log2(E choose K) / K``: the fewest bits per index that any code can have on average."""
    ways = math.lgamma(num_elements + 1) - math.lgamma(num_kept + 1) - math.lgamma(num_elements - num_kept + 1)
    return ways / math.log(2) / num_kept
