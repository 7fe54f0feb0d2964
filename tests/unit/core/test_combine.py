import torch

from thinwire.core.combine import combine


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
