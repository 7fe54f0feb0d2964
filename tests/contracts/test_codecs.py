"""Every row of the codec tables, and every pair of them as a record, keeps the same promises."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from thinwire.core.selection import select_topk
from thinwire.wire.bitpack import pack_bits, unpack_bits
from thinwire.wire.codec import ChunkCodec
from thinwire.wire.indices import INDEX_CODECS, entropy_bound_bits, smallest_index_codec
from thinwire.wire.values import VALUE_CODECS

SIZES = [(4096, 32), (4096, 1), (4096, 512), (64, 1), (2450, 19), (7, 3), (1, 1), (3, 2), (33, 33), (100, 60)]


def sorted_indices(num_chunks: int, num_elements: int, num_kept: int, with_voids: bool = True) -> Tensor:
    indices = torch.rand(num_chunks, num_elements).topk(num_kept).indices.sort(dim=1).values
    if with_voids:
        num_live = torch.randint(0, num_kept + 1, (num_chunks, 1))
        num_live[0], num_live[-1] = num_kept, 0
        indices = torch.where(torch.arange(num_kept) < num_live, indices, num_elements)
    return indices


@pytest.mark.parametrize(("num_elements", "num_kept"), SIZES)
@pytest.mark.parametrize("name", [name for name in INDEX_CODECS if name != "all"])
def test_index_codecs_return_what_they_were_given(name: str, num_elements: int, num_kept: int) -> None:
    codec = INDEX_CODECS[name]
    indices = sorted_indices(9, num_elements, num_kept)
    bits = codec.encode(indices, num_elements)
    assert bits.shape == (9, codec.num_bits(num_elements, num_kept))
    decoded, valid = codec.decode(bits, num_elements, num_kept)
    assert torch.equal(decoded, indices)
    assert valid.all()


@pytest.mark.parametrize(("num_elements", "num_kept"), SIZES)
@pytest.mark.parametrize("name", [name for name in INDEX_CODECS if name != "all"])
def test_index_codecs_take_any_bits_without_leaving_the_range(name: str, num_elements: int, num_kept: int) -> None:
    codec = INDEX_CODECS[name]
    bits = torch.randint(0, 2, (50, codec.num_bits(num_elements, num_kept)), dtype=torch.uint8)
    bits[0], bits[1] = 0, 1
    indices, valid = codec.decode(bits, num_elements, num_kept)
    assert indices.min() >= 0
    assert indices.max() <= num_elements
    live = indices < num_elements
    ascending = ((indices[:, 1:] > indices[:, :-1]) | ~live[:, 1:]).all(dim=1)
    assert (ascending | ~valid).all(), "bits that name an index twice or out of order were called valid"
    again = codec.encode(indices[valid], num_elements)
    assert torch.equal(again, bits[valid]), "bits that encode() would not write were called valid"


def test_all_needs_no_bits_and_is_only_taken_for_all() -> None:
    assert smallest_index_codec(9, 9, values_hold_zero=True).name == "all"
    assert smallest_index_codec(9, 9, values_hold_zero=False).name == "bitmap"
    assert smallest_index_codec(9, 8, values_hold_zero=True).name != "all"
    indices, valid = INDEX_CODECS["all"].decode(torch.empty(2, 0, dtype=torch.uint8), 3, 3)
    assert indices.tolist() == [[0, 1, 2], [0, 1, 2]]
    assert valid.all()


@given(num_elements=st.integers(1, 5000), data=st.data())
def test_the_chosen_index_codec_is_the_smallest_and_near_the_bound(num_elements: int, data: st.DataObject) -> None:
    num_kept = data.draw(st.integers(1, num_elements))
    chosen = smallest_index_codec(num_elements, num_kept, values_hold_zero=False)
    sizes = [codec.num_bits(num_elements, num_kept) for name, codec in INDEX_CODECS.items() if name != "all"]
    assert chosen.num_bits(num_elements, num_kept) == min(sizes)
    assert min(sizes) / num_kept >= entropy_bound_bits(num_elements, num_kept)
    assert min(sizes) / num_kept <= entropy_bound_bits(num_elements, num_kept) + 3


@pytest.mark.parametrize("scale", [1e-42, 1e-20, 1.0, 1e20, 1e37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", sorted(VALUE_CODECS))
def test_value_codecs_are_close_finite_and_keep_zero(name: str, dtype: torch.dtype, scale: float) -> None:
    codec = VALUE_CODECS[name]
    values = torch.randn(20, 16, dtype=dtype) * scale
    values[0] = 0
    codes, rounded_scale = codec.encode(values)
    assert codes.min() >= 0
    assert codes.max() < 2**codec.num_bits
    decoded = codec.decode(codes, rounded_scale)
    assert decoded.dtype == torch.float32
    assert decoded.isfinite().all()
    if codec.has_zero:
        assert not decoded[0].any()
    if name == "sign":
        assert torch.equal(decoded[1:].double().sign(), values[1:].double().sign().where(values[1:] != 0, 1))
        return
    if scale < 1e-37:
        return  # below the normal range of float32 nothing but the above is promised
    largest = values.abs().amax(dim=1, keepdim=True)
    tolerance = {"float32": 1e-7, "bfloat16": 2**-8, "int8": 1 / 120, "int4": 1 / 12, "sign_scale": 1.0}[name]
    worst = ((decoded.double() - values.double()).abs() / largest.clamp(min=1e-300).double())[1:].max()
    assert worst <= tolerance


@pytest.mark.parametrize("name", sorted(VALUE_CODECS))
@pytest.mark.parametrize(("num_elements", "num_kept"), SIZES)
def test_records_hold_what_was_sent_and_nothing_is_lost(
    name: str, num_elements: int, num_kept: int, device: torch.device
) -> None:
    codec = ChunkCodec(num_elements, num_kept, name)
    momentum = torch.randn(20, num_elements, device=device)
    momentum[3], momentum[4, 1:] = 0, 0
    if codec.index_codec.name == "all":
        indices, kept = torch.arange(num_elements, device=device).expand(20, -1), momentum
    else:
        indices, kept = select_topk([momentum], num_kept)
    encoded = codec.encode(indices, kept)
    assert encoded.records_CB.shape == (20, codec.record_bytes)
    assert encoded.records_CB.dtype == torch.uint8
    decoded_indices, decoded_values = codec.decode(encoded.records_CB)
    assert torch.equal(decoded_indices, indices)
    assert torch.equal(decoded_values, encoded.sent_CK)
    assert not decoded_values[3].any(), "a chunk without momentum voted"
    assert codec.is_valid(encoded.records_CB).all()
    if name == "float32":
        assert torch.equal(encoded.removed_CK, kept)


@pytest.mark.parametrize("name", sorted(VALUE_CODECS))
@pytest.mark.parametrize(("num_elements", "num_kept"), [(4096, 32), (64, 1), (7, 3), (33, 33)])
def test_what_is_called_valid_is_what_encode_writes(name: str, num_elements: int, num_kept: int) -> None:
    codec = ChunkCodec(num_elements, num_kept, name)
    indices = sorted_indices(200, num_elements, num_kept)
    if codec.index_codec.name == "all":
        indices = torch.arange(num_elements).expand(200, -1)
    values = torch.randn(200, num_kept).masked_fill(indices == num_elements, 0)
    records = codec.encode(indices, values).records_CB
    flips = torch.zeros_like(records)
    place = torch.randint(0, records.shape[1], (200,))
    flips[torch.arange(200), place] = (1 << torch.randint(0, 8, (200,))).to(torch.uint8)
    damaged = records ^ flips
    valid = codec.is_valid(damaged)
    decoded_indices, decoded_values = codec.decode(damaged)
    assert decoded_values[valid].isfinite().all()
    live = decoded_indices[valid]
    assert ((live[:, 1:] > live[:, :-1]) | (live[:, 1:] == num_elements)).all()
    assert not decoded_values[valid][decoded_indices[valid] == num_elements].any()
    padding = unpack_bits(damaged)[:, codec.record_bits :]
    assert not padding[valid].any()


def test_non_finite_values_and_negative_scales_are_refused() -> None:
    plain = ChunkCodec(16, 2, "float32")
    good = plain.encode(torch.tensor([[1, 5]]), torch.tensor([[1.0, 2.0]])).records_CB
    bits = unpack_bits(good)
    bits[:, plain.index_bits : plain.index_bits + 32] = 1  # NaN
    assert plain.is_valid(good).all()
    assert not plain.is_valid(pack_bits(bits)).any()
    scaled = ChunkCodec(16, 2, "sign_scale")
    bits = unpack_bits(scaled.encode(torch.tensor([[1, 5]]), torch.tensor([[1.0, 2.0]])).records_CB)
    bits[:, scaled.record_bits - 1] = 1  # the sign of the scale
    assert not scaled.is_valid(pack_bits(bits)).any()
