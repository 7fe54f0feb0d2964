import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire.wire.bitpack import bits_to_ints, ints_to_bits, pack_bits, unpack_bits


@given(num_rows=st.integers(0, 5), num_bits=st.integers(1, 70))
def test_bits_are_packed_as_numpy_packs_them(num_rows: int, num_bits: int) -> None:
    bits = torch.randint(0, 2, (num_rows, num_bits), dtype=torch.uint8)
    packed = pack_bits(bits)
    assert np.array_equal(packed.numpy(), np.packbits(bits.numpy(), axis=1, bitorder="little"))
    assert torch.equal(unpack_bits(packed)[:, :num_bits], bits)


@given(width=st.integers(1, 40), count=st.integers(1, 20))
def test_integers_survive(width: int, count: int) -> None:
    values = torch.randint(0, 2**width, (3, count))
    values[0, 0], values[-1, -1] = 0, 2**width - 1
    bits = ints_to_bits(values, width)
    assert bits.shape == (3, count * width)
    assert torch.equal(bits_to_ints(bits, width), values)


def test_the_order_of_bits_is_the_documented_one() -> None:
    assert pack_bits(ints_to_bits(torch.tensor([[5, 1]]), 4)).tolist() == [[5 + (1 << 4)]]
