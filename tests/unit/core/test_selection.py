import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from thinwire.core import reference
from thinwire.core.selection import gather_kept, select_topk, subtract_sent_


def by_hand(chunks: Tensor, num_kept: int) -> list[list[int]]:
    rows = []
    for chunk in chunks.tolist():
        kept = reference.strongest(chunk, num_kept)
        rows.append(kept + [len(chunk)] * (num_kept - len(kept)))
    return rows


@given(data=st.data(), num_elements=st.integers(1, 40), num_chunks=st.integers(1, 5))
def test_ties_go_to_the_lower_index_and_zeros_are_void(data: st.DataObject, num_elements: int, num_chunks: int) -> None:
    num_kept = data.draw(st.integers(1, num_elements))
    numbers = st.lists(st.integers(-3, 3), min_size=num_elements, max_size=num_elements)
    chunks = torch.tensor([data.draw(numbers) for _ in range(num_chunks)], dtype=torch.float32)
    assert select_topk(chunks.abs(), num_kept).tolist() == by_hand(chunks, num_kept)


@pytest.mark.parametrize("kind", ["random", "ties", "zero rows", "few nonzero", "one tie", "huge", "tiny"])
@pytest.mark.parametrize("num_kept", [1, 32, 100])
def test_large_chunks_take_every_way_to_the_same_choice(kind: str, num_kept: int, device: torch.device) -> None:
    chunks = torch.randn(12, 4096)
    if kind == "ties":
        chunks = (chunks * 4).round()
    elif kind == "zero rows":
        chunks[3] = 0
    elif kind == "few nonzero":
        chunks[5, 20:] = 0
    elif kind == "one tie":
        smallest = chunks[7].abs().topk(num_kept).values[-1]
        chunks[7, 11] = chunks[7, 4000] = smallest
    elif kind == "huge":
        chunks *= 1e38
    elif kind == "tiny":
        chunks *= 1e-40
    expected = by_hand(chunks, num_kept)
    magnitude = chunks.abs().to(device)
    assert select_topk(magnitude, num_kept).tolist() == expected
    assert select_topk(magnitude, num_kept, torch.empty_like(magnitude)).tolist() == expected
    assert select_topk(magnitude.double(), num_kept).tolist() == expected


def test_sent_is_subtracted_where_it_was_taken_and_voids_change_nothing() -> None:
    momentum = torch.tensor([[0.0, 3.0, 0.0, -2.0], [0.0, 0.0, 0.0, 5.0]])
    indices = select_topk(momentum.abs(), 2)
    assert indices.tolist() == [[1, 3], [3, 4]]
    kept = gather_kept(momentum, indices)
    assert kept.tolist() == [[3.0, -2.0], [5.0, 0.0]]
    subtract_sent_(momentum, indices, kept)
    assert not momentum.any()
