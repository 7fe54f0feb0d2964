import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from thinwire.core import reference
from thinwire.core.selection import group_maxima, num_groups_of, select_topk, subtract_sent_


def by_hand(chunks: Tensor, num_kept: int) -> list[list[int]]:
    rows = []
    for chunk in chunks.tolist():
        kept = reference.strongest(chunk, num_kept)
        rows.append(kept + [len(chunk)] * (num_kept - len(kept)))
    return rows


def check(chunks: Tensor, num_kept: int) -> None:
    """Every way to select, from one tensor or from several, gives the choice made by hand, and the coefficients there."""
    expected = torch.tensor(by_hand(chunks, num_kept), device=chunks.device)
    maxima = torch.empty(len(chunks), num_groups_of(chunks.shape[1]), dtype=chunks.dtype, device=chunks.device)
    group_maxima(chunks, maxima)
    cut = len(chunks) // 2
    for parts in ([chunks], [chunks[:cut], chunks[cut:]]):
        for hint in (None, maxima) if chunks.device.type == "cpu" else (None,):
            indices, values = select_topk(parts, num_kept, hint)
            assert torch.equal(indices, expected)
            padded = torch.cat((chunks, torch.zeros_like(chunks[:, :1])), dim=1)
            assert torch.equal(values, padded.gather(1, expected))


@given(data=st.data(), num_elements=st.integers(1, 40), num_chunks=st.integers(1, 5))
def test_ties_go_to_the_lower_index_and_zeros_are_void(data: st.DataObject, num_elements: int, num_chunks: int) -> None:
    num_kept = data.draw(st.integers(1, num_elements))
    numbers = st.lists(st.integers(-3, 3), min_size=num_elements, max_size=num_elements)
    chunks = torch.tensor([data.draw(numbers) for _ in range(num_chunks)], dtype=torch.float32)
    check(chunks, num_kept)


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
    check(chunks.to(device), num_kept)
    check(chunks.double().to(device), num_kept)


def test_sent_is_subtracted_where_it_was_taken_and_voids_change_nothing() -> None:
    momentum = torch.tensor([[0.0, 3.0, 0.0, -2.0], [0.0, 0.0, 0.0, 5.0]])
    indices, kept = select_topk([momentum], 2)
    assert indices.tolist() == [[1, 3], [3, 4]]
    assert kept.tolist() == [[3.0, -2.0], [5.0, 0.0]]
    subtract_sent_([momentum[:1], momentum[1:]], indices, kept)
    assert not momentum.any()
