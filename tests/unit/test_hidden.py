"""Which parameters are hidden matrices, in models of several kinds."""

import pytest
import torch
from torch import nn

from thinwire import DeMo, hidden_and_rest
from thinwire.training import recipes
from thinwire.training.models import Sizes, build_model


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, 8)
        self.positions = nn.Parameter(torch.zeros(1, 5, 8))
        self.row = nn.Parameter(torch.zeros(1, 8))
        self.experts = nn.Parameter(torch.zeros(3, 8, 8))
        self.along = nn.Conv1d(8, 8, 3)
        self.inside = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.kernel = nn.Conv2d(1, 8, 3)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.last = nn.Linear(8, 20)


def test_matrices_between_input_and_output_are_hidden() -> None:
    model = Mixed()
    hidden, rest = hidden_and_rest(model)
    assert [name for name, _ in hidden] == ["experts", "inside.weight", "frozen.weight"]
    assert [name for name, _ in sorted([*hidden, *rest])] == sorted(name for name, _ in model.named_parameters())


def test_an_output_layer_that_is_the_embedding_is_there_once() -> None:
    model = Mixed()
    model.last.weight = model.tokens.weight
    hidden, rest = hidden_and_rest(model)
    assert "tokens.weight" in dict(rest)
    assert len(hidden) + len(rest) == len(list(model.parameters()))


@pytest.mark.parametrize(
    ("recipe", "expected"), [("quickstart", 4 * 7), ("vit", 4 * 6), ("cnn", 0)], ids=["llama", "vit", "cnn"]
)
def test_of_the_recipes_models(recipe: str, expected: int) -> None:
    config = recipes.build(recipe)
    hidden, _ = hidden_and_rest(build_model(config, Sizes(vocab_size=256, num_classes=10, num_channels=1)))
    assert len(hidden) == expected


def test_both_are_groups_of_an_optimizer() -> None:
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16))
    hidden, rest = hidden_and_rest(model)
    groups = [{"params": hidden}, {"params": rest, "update": "adamw", "lr": 4e-3}]
    optimizer = DeMo.recommended(groups, lr=4e-2)
    assert [(group["update"], group["lr"], group["topk"]) for group in optimizer.param_groups] == [
        ("muon", 4e-2, 64),
        ("adamw", 4e-3, 64),
    ]
    before = [parameter.clone() for parameter in model.parameters()]
    model(torch.arange(16)).square().mean().backward()
    optimizer.step()
    assert not any(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
