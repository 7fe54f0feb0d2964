"""Which parameters an optimizer treats how."""

from typing import TYPE_CHECKING, Any

from torch import nn

from thinwire.hidden import Named, hidden_and_rest
from thinwire.training.errors import TrainingError

if TYPE_CHECKING:
    from thinwire.training.config import OptimConfig


def trained(model: nn.Module) -> list[Named]:
    """The parameters that are trained."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def decay_groups(named: list[Named], weight_decay: float) -> list[dict[str, Any]]:
    """Matrices with weight decay, the rest without."""
    matrices = [(name, parameter) for name, parameter in named if parameter.dim() >= 2]
    others = [(name, parameter) for name, parameter in named if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def parse_topk_of(text: str) -> dict[str, int]:
    """k by a word in a parameter's name: ``attn=32,mlp=96``."""
    found: dict[str, int] = {}
    for part in text.split(",") if text else ():
        word, _, topk = (piece.strip() for piece in part.partition("="))
        if not word or word in found or not topk.isdecimal() or not int(topk):
            raise ValueError(f"topk_of={text!r}: {part!r} is not WORD=K with a word of its own and a whole number from 1 on")
        found[word] = int(topk)
    return found


def with_topk_of(groups: list[dict[str, Any]], topk_of: str) -> list[dict[str, Any]]:
    """The groups, those parameters apart that have another k (`parse_topk_of`)."""
    wanted = parse_topk_of(topk_of)
    names = [name for group in groups for name, _ in group["params"]]
    for word in wanted:
        if not any(word in name for name in names):
            raise ValueError(f"topk_of={topk_of!r}: no parameter has {word!r} in its name; names are like {names[0]}")
    found = []
    for group in groups:
        by_word: dict[str, list[Named]] = {}
        for name, parameter in group["params"]:
            by_word.setdefault(next((word for word in wanted if word in name), ""), []).append((name, parameter))
        found += [{**group, "params": its, **({"topk": wanted[word]} if word else {})} for word, its in by_word.items()]
    return found


def split_hidden(model: nn.Module, named: list[Named]) -> tuple[list[Named], list[Named]]:
    """Those of ``named`` that are matrices between input and output, or stacks of these, and all else."""
    inside = {id(parameter) for _, parameter in hidden_and_rest(model)[0]}
    hidden = [(name, parameter) for name, parameter in named if id(parameter) in inside]
    return hidden, [(name, parameter) for name, parameter in named if id(parameter) not in inside]


def split_matrices(model: nn.Module) -> tuple[list[Named], list[Named]]:
    """What torch's Muon and GaLore train, hidden matrices but no stacks of them, and all else that is trained."""
    hidden, rest = split_hidden(model, trained(model))
    stacks = [(name, parameter) for name, parameter in hidden if parameter.dim() > 2]
    return [(name, parameter) for name, parameter in hidden if parameter.dim() == 2], [*stacks, *rest]


def split_for_muon(model: nn.Module) -> tuple[list[Named], list[Named]]:
    """What Muon trains, which must be something, and what AdamW trains beside it."""
    hidden, rest = split_matrices(model)
    if not hidden:
        raise TrainingError(
            "optimizer=muon has nothing to do: this model has no hidden matrices (convolutions do not count)"
        )
    return hidden, rest


def decoupled_groups(config: "OptimConfig", model: nn.Module) -> list[dict[str, Any]]:
    """The groups of a DeMo: matrices apart from the rest, for which there may be another rule, and by their topk."""
    named = list(model.named_parameters())
    if not config.rest_update:
        return with_topk_of(decay_groups(named, config.weight_decay), config.topk_of)
    hidden, rest = split_hidden(model, named)
    own = {"update": config.rest_update, "lr": config.rest_lr or config.lr / 10}
    others = [{**group, **own} for group in decay_groups(rest, config.weight_decay)]
    return with_topk_of([*decay_groups(hidden, config.weight_decay), *others], config.topk_of)
