"""The options of a parameter group: their defaults' meaning, their checks, and what they say to the plan."""

import difflib
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from thinwire.core.errors import check_bool, check_choice, check_float, check_int
from thinwire.core.layout import LAYOUTS
from thinwire.core.update_rules import UPDATE_RULES
from thinwire.exchange.plan import Coding
from thinwire.wire.values import VALUE_CODECS

# One bit is enough where the size of the direction does not matter; plain gradient descent needs sizes.
_AUTO_VALUES = {"sign": "sign", "lion": "sign", "muon": "sign", "adamw": "sign_scale", "sgd": "sign_scale"}

MOMENTUM_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}

# What decides the plan or the shape of the state: a checkpoint does not overwrite these.
STRUCTURAL_OPTIONS = ("chunk", "topk", "values", "layout", "dense_below", "update", "momentum_dtype", "balance")
# What changes no byte of the plan but must be equal on all replicas at every step.
SETTINGS = ("lr", "momentum_decay", "weight_decay", "update", "lr_in_momentum", "betas", "eps", "maximize")
_OPTIONS = frozenset({*STRUCTURAL_OPTIONS, *SETTINGS})
DEFAULT_DENSE_BELOW = 4096
DEFAULT_OVERLAPPED_BUCKETS = 8
# What makes DeMo the algorithm that its authors published.
PUBLISHED_OPTIONS: dict[str, Any] = {
    "update": "sign",
    "values": "float32",
    "lr_in_momentum": True,
    "layout": "published",
    "combine": "mean_over_senders",
    "exact_decode": False,
}
# What had the lowest losses for its bytes: docs/choosing.md.
RECOMMENDED_LR = 4e-2
RECOMMENDED_OPTIONS: dict[str, Any] = {"update": "muon", "topk": 64, "momentum_decay": 0.98, "balance": 0.95}
ON_NONFINITE = ("raise", "skip")
ON_BAD_PAYLOAD = ("drop", "raise")
# What torch, its schedulers and its checkpoints keep in a group, besides the options.
_FOREIGN_KEYS = frozenset({"params", "param_names", "name", "initial_lr", "max_lr", "min_lr", "num_steps"})
# Options of other optimizers, which would be ignored in silence.
_OTHERS_OPTIONS = frozenset(
    {
        *("momentum", "dampening", "nesterov", "amsgrad", "foreach", "fused", "capturable", "differentiable", "alpha"),
        *("rho", "learning_rate", "wd", "beta1", "beta2"),
    }
)
# Of the constructor: in a group they would be ignored, too.
_OF_ALL_GROUPS = frozenset(
    {
        *("combine", "clip_to_median", "exact_decode", "on_bad_payload", "on_nonfinite", "check_drift_every", "on_drift"),
        *("exchange", "owner_topk", "process_group", "transport", "islands", "secret", "sync_parameters"),
        *("timeout_seconds", "num_buckets", "overlap", "delay", "look_ahead", "backend"),
    }
)
# A schedule that ends at 0 may end a rounding error below it.
_NEARLY_ZERO = 1e-12


def check_group(group: Mapping[str, Any]) -> None:
    """Raise a `TypeError` or `ValueError` that names the option, its value and what is allowed."""
    for key in group.keys() - _OPTIONS - _FOREIGN_KEYS:
        if key in _OF_ALL_GROUPS:
            raise ValueError(f"a parameter group has the option {key!r}, which is for all groups: pass it to DeMo itself")
        near = difflib.get_close_matches(key, sorted(_OPTIONS), n=1, cutoff=0.5 if key in _OTHERS_OPTIONS else 0.85)
        if near or key in _OTHERS_OPTIONS:
            hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(sorted(_OPTIONS))}"
            raise ValueError(f"a parameter group has the unknown option {key!r}{hint}")
    check_float("lr", lr_of(group), 0.0)
    check_float("momentum_decay", group["momentum_decay"], 0.0, 1.0)
    check_float("weight_decay", group["weight_decay"], 0.0)
    check_float("balance", group["balance"], 0.0, 1.0)
    if group["balance"] == 1:
        raise ValueError("balance must be a number from 0 to below 1, got 1: it is the decay of a running mean")
    check_int("chunk", group["chunk"], 1)
    check_int("topk", group["topk"], 1)
    check_int("dense_below", group["dense_below"], 0)
    check_choice("update", group["update"], UPDATE_RULES)
    check_choice("values", group["values"], ("auto", *VALUE_CODECS))
    check_choice("layout", group["layout"], LAYOUTS)
    check_choice("momentum_dtype", group["momentum_dtype"], MOMENTUM_DTYPES)
    check_bool("lr_in_momentum", group["lr_in_momentum"])
    check_bool("maximize", group["maximize"])
    check_float("eps", group["eps"], 0.0)
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise TypeError(f"betas must be two numbers from 0 to 1, got {betas!r}")
    for index, beta in enumerate(betas):
        check_float(f"betas[{index}]", beta, 0.0, 1.0)
    if group["update"] == "adamw" and (betas[1] == 1 or group["eps"] == 0):
        raise ValueError(
            f"update='adamw' needs betas[1] below 1 and eps above 0, got betas[1]={betas[1]} and eps={group['eps']}, which "
            "would divide by 0"
        )


def lr_of(group: Mapping[str, Any]) -> object:
    """The learning rate; schedulers may keep it as a tensor, or make a number of numpy's of it."""
    lr = group["lr"]
    if isinstance(lr, bool) or not (isinstance(lr, Real) or (isinstance(lr, Tensor) and lr.numel() == 1)):
        return lr
    return 0.0 if -_NEARLY_ZERO < float(lr) < 0 else float(lr)


def with_plain_lr_(group: dict[str, Any]) -> dict[str, Any]:
    """The group, with a learning rate that checkpoints can hold: a schedule may have made a number of numpy's of it."""
    if isinstance(group["lr"], Real) and not isinstance(group["lr"], (int, float)):
        group["lr"] = float(group["lr"])
    return group


def check_parameter(parameter: Tensor, name: str) -> None:
    """Refuse what cannot be trained here."""
    if not parameter.is_floating_point():
        raise TypeError(f"{name} has dtype {parameter.dtype}; DeMo trains real floating-point parameters only")
    if parameter.layout != torch.strided:
        raise TypeError(f"{name} has layout {parameter.layout}; DeMo trains strided parameters only")


def coding_of(group: Mapping[str, Any]) -> Coding:
    """The part of a group that the plan needs."""
    values = _AUTO_VALUES[group["update"]] if group["values"] == "auto" else group["values"]
    return Coding(group["chunk"], group["topk"], values, group["layout"], group["dense_below"])


def settings_lines(index: int, group: Mapping[str, Any]) -> list[str]:
    """A group's settings, a line each, for the agreement between replicas."""
    values = {**group, "lr": lr_of(group), "betas": tuple(group["betas"])}
    return [f"group {index} {name}: {values[name]!r}" for name in (*SETTINGS, "balance")]
