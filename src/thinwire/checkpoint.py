"""What a checkpoint of the optimizer holds, and what may be loaded from it.

The parameters and the state of the update rules are the same on every replica; the residual momentum is each replica's
own. So a checkpoint says whose it is, and by default is refused by any other.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.core.errors import CheckpointError
from thinwire.core.update_rules import UPDATE_RULES
from thinwire.options import STRUCTURAL_OPTIONS

if TYPE_CHECKING:
    from thinwire.optimizer import DeMo

KEY = "thinwire"
FORMAT = 1
RESIDUAL_POLICIES = ("exact", "keep", "zero")


def identity(optimizer: "DeMo") -> dict[str, Any]:
    """Whose checkpoint it is."""
    return {
        "format": FORMAT,
        "replica": optimizer.replica,
        "num_replicas": optimizer.num_replicas,
        "plan_digest": optimizer.plan.digest.hex(),
        "num_skipped_steps": optimizer.num_skipped_steps,
    }


def load(optimizer: "DeMo", state_dict: dict[str, Any], residual: str) -> None:
    """Check everything first, then overwrite settings and state in place; on an error nothing has changed."""
    saved = _check_identity(optimizer, state_dict, residual)
    _check_groups(optimizer, state_dict)
    wanted = _check_state(optimizer, state_dict["state"], residual)
    groups = []
    for group, mine in zip(state_dict["param_groups"], optimizer.param_groups, strict=True):
        groups.append({**group, **{name: mine[name] for name in STRUCTURAL_OPTIONS}})
    kept = dict(optimizer.state)
    # torch would cast the momentum to the parameter's dtype: it gets the settings alone, the state is copied below.
    Optimizer.load_state_dict(optimizer, {"state": {}, "param_groups": groups})
    optimizer.state.update(kept)
    for tensor, theirs in wanted:
        if theirs is None:
            tensor.zero_()
        else:
            tensor.copy_(theirs)
    optimizer.num_skipped_steps = int(saved["num_skipped_steps"])


def _check_identity(optimizer: "DeMo", state_dict: dict[str, Any], residual: str) -> dict[str, Any]:
    if not isinstance(state_dict, dict) or not {KEY, "state", "param_groups"} <= state_dict.keys():
        raise CheckpointError(f"this is not a checkpoint of thinwire.DeMo: it needs the keys {KEY!r}, state, param_groups")
    saved: dict[str, Any] = state_dict[KEY]
    if saved.get("format") != FORMAT:
        raise CheckpointError(f"the checkpoint has format {saved.get('format')!r}, this version reads {FORMAT}")
    if residual != "exact":
        return saved
    advice = "load that replica's own file, or pass residual='zero' (start without) or 'keep' (take it as it is)"
    mine = identity(optimizer)
    for name, what in (("num_replicas", "number of replicas"), ("replica", "replica"), ("plan_digest", "plan")):
        if saved[name] != mine[name]:
            raise CheckpointError(f"the checkpoint's {what} is {saved[name]}, this optimizer's is {mine[name]}; {advice}")
    return saved


def _check_groups(optimizer: "DeMo", state_dict: dict[str, Any]) -> None:
    saved = [len(group["params"]) for group in state_dict["param_groups"]]
    mine = [len(group["params"]) for group in optimizer.param_groups]
    if saved != mine:
        raise CheckpointError(f"the checkpoint's groups hold {saved} parameters, this optimizer's hold {mine}")


def _check_state(
    optimizer: "DeMo", saved_state: dict[int, dict[str, Any]], residual: str
) -> list[tuple[Tensor, Tensor | None]]:
    """Pairs of (this optimizer's tensor, the saved one or None for zeros), all known to fit."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    rules = [group["update"] for group in optimizer.param_groups for _ in group["params"]]
    wanted: list[tuple[Tensor, Tensor | None]] = []
    for index, (parameter, rule) in enumerate(zip(parameters, rules, strict=True)):
        for name in ("momentum", *UPDATE_RULES[rule].state_names) if parameter in optimizer.state else ():
            mine = optimizer.state[parameter][name]
            if name == "momentum" and residual == "zero":
                wanted.append((mine, None))
                continue
            theirs = saved_state.get(index, {}).get(name)
            if not isinstance(theirs, torch.Tensor) or theirs.shape != mine.shape or theirs.dtype != mine.dtype:
                found = f"{tuple(theirs.shape)} {theirs.dtype}" if isinstance(theirs, torch.Tensor) else "nothing"
                raise CheckpointError(
                    f"the checkpoint has {found} as {name} of parameter {index}, this optimizer needs "
                    f"{tuple(mine.shape)} {mine.dtype}"
                )
            wanted.append((mine, theirs))
    return wanted
