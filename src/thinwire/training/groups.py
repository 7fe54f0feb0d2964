"""Which parameters an optimizer treats how."""

from typing import Any

from torch import nn

Named = tuple[str, nn.Parameter]


def trained(model: nn.Module) -> list[Named]:
    """The parameters that are trained."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def decay_groups(named: list[Named], weight_decay: float) -> list[dict[str, Any]]:
    """Matrices with weight decay, the rest without."""
    matrices = [(name, parameter) for name, parameter in named if parameter.dim() >= 2]
    others = [(name, parameter) for name, parameter in named if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def split_hidden(model: nn.Module, named: list[Named]) -> tuple[list[Named], list[Named]]:
    """The matrices between input and output, and all else: Muon and GaLore are for the former."""
    outer = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1:]
    outer |= {id(module.weight) for module in last}
    hidden = [(name, parameter) for name, parameter in named if parameter.dim() == 2 and id(parameter) not in outer]
    inside = {id(parameter) for _, parameter in hidden}
    return hidden, [(name, parameter) for name, parameter in named if id(parameter) not in inside]
