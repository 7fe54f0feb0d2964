"""How a run speaks of itself."""

import pytest

from thinwire.training.config import LaunchConfig, OptimConfig
from thinwire.training.wording import count, method_words, replica_words


def test_what_decides_about_the_bytes_is_named() -> None:
    assert method_words(OptimConfig(optimizer="adamw", topk_of="")) == "adamw"
    assert method_words(OptimConfig(update="muon", topk=64)) == "demo (muon rule, top 64 of 64 x 64)"
    optim = OptimConfig(update="muon", rest_update="sign", topk_of="attn=32,mlp=96")
    assert method_words(optim) == "demo (muon rule, sign for the rest, top 32 of 64 x 64, by name attn=32,mlp=96)"


@pytest.mark.parametrize(
    ("launch", "num_ranks", "words"),
    [
        (LaunchConfig(), 1, "1 replica"),
        (LaunchConfig(), 3, "3 replicas"),
        (LaunchConfig(mesh="replicate=2,shard=4"), 8, "2 replicas of 4 ranks each"),
        (LaunchConfig(mesh="replicate=2"), 2, "2 replicas"),
        (LaunchConfig(islands=2), 2, "1 island of 2 ranks each"),
    ],
)
def test_replicas_and_their_ranks_are_counted(launch: LaunchConfig, num_ranks: int, words: str) -> None:
    assert replica_words(launch, num_ranks) == words


def test_one_is_one() -> None:
    assert [count(number, "replica") for number in range(3)] == ["0 replicas", "1 replica", "2 replicas"]
