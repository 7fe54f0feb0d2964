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


class HeadFirst(nn.Module):
    """As many write it: what is called last is defined first."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 20)
        self.inside = nn.Linear(8, 8)


class Says(HeadFirst):
    def get_output_embeddings(self) -> nn.Module:
        return self.head


def test_the_output_layer_is_the_last_unless_somebody_says_so() -> None:
    def names(model: nn.Module, output: nn.Module | None = None) -> list[str]:
        return [name for name, _ in hidden_and_rest(model, output)[0]]

    model = HeadFirst()
    assert names(model) == ["head.weight"]
    assert names(model, output=model.head) == ["inside.weight"]
    assert names(Says()) == ["inside.weight"]
    assert names(nn.ModuleDict({"module": Says()})) == ["module.inside.weight"]
    # The whole ends in another layer than a part of it would.
    assert names(nn.Sequential(Says(), nn.Linear(20, 5))) == ["0.head.weight", "0.inside.weight"]
    with pytest.raises(ValueError, match="this Linear is not one of them"):
        hidden_and_rest(model, output=nn.Linear(8, 20))
    with pytest.raises(TypeError, match=r"such as model\.lm_head, got Parameter"):
        hidden_and_rest(model, output=model.head.weight)  # type: ignore[arg-type]


def test_an_output_layer_whose_weight_is_computed_is_not_hidden() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.utils.parametrizations.weight_norm(nn.Linear(8, 20)))
    assert [name for name, _ in hidden_and_rest(model)[0]] == ["0.weight"]


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


@pytest.mark.parametrize("is_empty_first", [True, False])
def test_an_empty_group_goes_with_named_ones(is_empty_first: bool) -> None:
    """As they are where an optimizer is made of another's groups."""
    empty, named = {"params": [], "param_names": []}, {"params": [nn.Parameter(torch.ones(3))], "param_names": ["w"]}
    optimizer = DeMo([empty, named] if is_empty_first else [named, empty])
    assert sorted(group["param_names"] for group in optimizer.param_groups) == [[], ["w"]]
    with pytest.raises(ValueError, match="with/without names"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})


@pytest.mark.parametrize(
    "model",
    [nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(16, 3)), nn.Linear(16, 3), nn.Sequential(nn.LayerNorm(16))],
    ids=["convolutions", "output only", "norm only"],
)
def test_a_model_without_hidden_matrices_has_an_empty_group(model: nn.Module) -> None:
    hidden, rest = hidden_and_rest(model)
    assert not hidden
    optimizer = DeMo.recommended([{"params": hidden}, {"params": rest, "update": "adamw", "lr": 4e-3}], lr=4e-2)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    before = [parameter.clone() for parameter in model.parameters()]
    optimizer.step()
    assert not any(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups[0]["params"] == []
