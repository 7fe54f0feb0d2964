"""One record per chunk: its indices, its values and its scale as a fixed number of bytes.

A record is the index bits, the value codes and the scale, one after the other, padded with zero bits to a whole byte.
Its length follows from (E, K, value codec) alone, so record c of a stack lies at ``c * record_bytes``.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NoReturn

import torch
from torch import Tensor

from thinwire.core.errors import PayloadError
from thinwire.wire.bitpack import bits_to_ints, ints_to_bits, pack_bits, unpack_bits
from thinwire.wire.indices import IndexCodec, smallest_index_codec
from thinwire.wire.values import LARGEST_VALUE, SCALE_BITS, VALUE_CODECS, ValueCodec, code_to_scale, scale_to_code


@dataclass(frozen=True)
class Encoded:
    """Records (C, B), the values that the peers decode from them (C, K), and the sender's unit (C, 1) or None for 1."""

    records_CB: Tensor
    sent_CK: Tensor
    unit_C1: Tensor | None

    @property
    def removed_CK(self) -> Tensor:
        """The momentum that what was sent stands for."""
        return self.sent_CK if self.unit_C1 is None else self.sent_CK * self.unit_C1


@dataclass(frozen=True)
class ChunkCodec:
    """How K of E coefficients of a chunk are written."""

    num_elements: int
    num_kept: int
    value_name: str

    @cached_property
    def value_codec(self) -> ValueCodec:
        """The row of the value table."""
        return VALUE_CODECS[self.value_name]

    @cached_property
    def index_codec(self) -> IndexCodec:
        """The smallest row of the index table."""
        return smallest_index_codec(self.num_elements, self.num_kept, self.value_codec.has_zero)

    @cached_property
    def index_bits(self) -> int:
        """Bits for the indices of one chunk."""
        return self.index_codec.num_bits(self.num_elements, self.num_kept)

    @cached_property
    def record_bits(self) -> int:
        """Bits of one record before padding."""
        scale = SCALE_BITS if self.value_codec.has_scale else 0
        return self.index_bits + self.num_kept * self.value_codec.num_bits + scale

    @cached_property
    def record_bytes(self) -> int:
        """Bytes of one record."""
        return -(-self.record_bits // 8)

    def encode(self, indices_CK: Tensor, values_CK: Tensor) -> Encoded:
        """Write the kept coefficients of C chunks; void slots have index E and value 0."""
        codec = self.value_codec
        is_void = indices_CK == self.num_elements
        codes, scale = codec.encode(values_CK)
        codes = codes.masked_fill(is_void, 0)
        parts = [self.index_codec.encode(indices_CK, self.num_elements), ints_to_bits(codes, codec.num_bits)]
        if codec.has_scale:
            parts.append(ints_to_bits(scale_to_code(scale), SCALE_BITS))
        sent = codec.decode(codes, scale).masked_fill(is_void, 0).to(values_CK.dtype)
        unit = None if codec.unit is None else codec.unit(values_CK)
        return Encoded(pack_bits(torch.cat(parts, dim=1)), sent, unit)

    @cached_property
    def empty_record_B(self) -> Tensor:
        """The record of a chunk of which nothing is sent."""
        sends_all = self.index_codec.name == "all"
        indices_K = torch.arange(self.num_kept, device="cpu")
        indices_K = indices_K if sends_all else torch.full_like(indices_K, self.num_elements)
        return self.encode(indices_K[None], torch.zeros(1, self.num_kept, dtype=torch.float32, device="cpu")).records_CB[0]

    def decode(self, records_CB: Tensor) -> tuple[Tensor, Tensor]:
        """Read C records back: indices (C, K) in [0, E], and float32 values (C, K), 0 in void slots."""
        indices, codes, scale, _ = self._read(records_CB)
        values = self.value_codec.decode(codes, scale)
        return indices, values.masked_fill(indices == self.num_elements, 0)

    def is_valid(self, records_CB: Tensor) -> Tensor:
        """Whether each record (C) is one that a replica could have sent: order, range, possible values, zero padding."""
        indices, codes, scale, valid = self._read(records_CB)
        is_void = indices == self.num_elements
        valid = valid & (~is_void | (codes == 0)).all(dim=1)
        values = self.value_codec.decode(codes, scale)
        valid = valid & (values.abs() <= LARGEST_VALUE).all(dim=1) & (scale.isfinite() & (scale >= 0)).all(dim=1)
        padding = unpack_bits(records_CB[:, -1:])[:, 8 - (self.record_bytes * 8 - self.record_bits) :]
        return valid & (padding == 0).all(dim=1)

    def refuse(self, chunk: int, num_chunks: int, whose: str) -> NoReturn:
        """Raise `PayloadError` for the record of a chunk."""
        raise PayloadError(f"{whose} has a malformed record for chunk {chunk} of {num_chunks} ({self})")

    def _read(self, records_CB: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        codec = self.value_codec
        bits = unpack_bits(records_CB)
        indices, valid = self.index_codec.decode(bits[:, : self.index_bits], self.num_elements, self.num_kept)
        values_end = self.index_bits + self.num_kept * codec.num_bits
        codes = bits_to_ints(bits[:, self.index_bits : values_end], codec.num_bits)
        if codec.has_scale:
            scale = code_to_scale(bits_to_ints(bits[:, values_end : values_end + SCALE_BITS], SCALE_BITS))
        else:
            scale = torch.ones(len(bits), 1, device=bits.device)
        return indices, codes, scale, valid
