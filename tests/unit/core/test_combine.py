import pytest
import torch

from thinwire.core.combine import Decoding, combine


def test_replicas_are_summed_in_replica_order() -> None:
    # In float32 (2**24 + 1) - 2**24 is 0 and (2**24 - 2**24) + 1 is 1: the order shows.
    index = torch.tensor([[2]])
    large, small = torch.tensor([[2.0**24]]), torch.tensor([[1.0]])
    messages = [(index, large), (index, small), (index, -large)]
    assert combine(messages, torch.empty(1, 4), "mean_over_replicas").tolist() == [[0.0, 0.0, 0.0, 0.0]]
    messages = [(index, large), (index, -large), (index, small)]
    assert combine(messages, torch.empty(1, 4), "mean_over_replicas")[0, 2] == torch.tensor(1.0) / 3


def test_means_over_senders_and_over_replicas() -> None:
    messages = [
        (torch.tensor([[0, 3]]), torch.tensor([[4.0, 1.0]])),
        (torch.tensor([[0, 4]]), torch.tensor([[2.0, 0.0]])),  # 4 is void here
        (torch.tensor([[1, 3]]), torch.tensor([[6.0, 0.0]])),  # a 0 is no vote
    ]
    assert combine(messages, torch.empty(1, 4), "mean_over_senders").tolist() == [[3.0, 6.0, 0.0, 1.0]]
    assert combine(messages, torch.empty(1, 4), "mean_over_replicas").tolist() == [
        [2.0, 2.0, 0.0, torch.tensor(1 / 3).item()]
    ]


def test_a_single_replica_is_taken_as_it_is() -> None:
    messages = [(torch.tensor([[1]]), torch.tensor([[7.0]]))]
    for rule in ("mean_over_senders", "mean_over_replicas"):
        assert combine(messages, torch.full((1, 3), 9.0), rule).tolist() == [[0.0, 7.0, 0.0]]


def test_most_replicas_decide_a_vote_whatever_the_sizes() -> None:
    messages = [
        (torch.tensor([[0, 1, 2, 5]]), torch.tensor([[1e30, 3.0, 2.0, 9.0]])),  # 5 is void here
        (torch.tensor([[0, 1, 3, 4]]), torch.tensor([[-1e-30, -8.0, -0.0, -5.0]])),
        (torch.tensor([[0, 2, 3, 4]]), torch.tensor([[-1.0, 0.0, -2.0, -1.0]])),
    ]
    messages[0][1][0, 3] = 0.0
    found = combine(messages, torch.full((1, 5), 9.0), "majority_vote")
    assert found.tolist() == [[-1.0, 0.0, 1.0, -1.0, -1.0]]
    assert combine(messages[:2], torch.empty(1, 5), "majority_vote").tolist() == [[0.0, 0.0, 1.0, 0.0, -1.0]]


def test_alone_a_vote_is_a_sign_too() -> None:
    messages = [(torch.tensor([[0, 1, 2]]), torch.tensor([[7.0, -0.1, 0.0]]))]
    assert combine(messages, torch.empty(1, 4), "majority_vote").tolist() == [[1.0, -1.0, 0.0, 0.0]]


def test_what_has_no_effect_is_refused() -> None:
    assert Decoding.checked("mean_over_replicas", False, True) == ("mean_over_replicas", False, True)
    with pytest.raises(ValueError, match="clip_to_median=True has no effect with combine='majority_vote'"):
        Decoding.checked("majority_vote", True, True)
