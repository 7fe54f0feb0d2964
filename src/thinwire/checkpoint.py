"""What a checkpoint of the optimizer holds, and what may be loaded from it.

The parameters and the state of the update rules are the same on every replica; the residual momentum is each replica's
own. So a checkpoint says whose it is, and by default is refused by any other.
"""

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from thinwire.core.balance import ENERGIES
from thinwire.core.errors import CheckpointError, check_int
from thinwire.core.update_rules import UPDATE_RULES
from thinwire.exchange.plan import first_difference
from thinwire.options import STRUCTURAL_OPTIONS, check_group
from thinwire.ownership import FIRST, RESIDUAL
from thinwire.planning import specs_of

if TYPE_CHECKING:
    from thinwire.optimizer import DeMo

KEY = "thinwire"
FORMAT = 2
RESIDUAL_POLICIES = ("exact", "keep", "zero")


def identity(optimizer: "DeMo") -> dict[str, Any]:
    """Whose checkpoint it is, and which part of each parameter it is about."""
    return {
        "format": FORMAT,
        "replica": optimizer.replica,
        "num_replicas": optimizer.num_replicas,
        "plan": list(optimizer.plan.description),
        "parts": _parts(optimizer),
        "num_skipped_steps": optimizer.num_skipped_steps,
    }


def _parts(optimizer: "DeMo") -> dict[int, dict[str, list[int]]]:
    shares = optimizer._company.dealing.shares
    pairs = (pair for index, group in enumerate(optimizer.param_groups) for pair in specs_of(group, index, shares))
    parts: dict[int, dict[str, list[int]]] = {}
    for number, (spec, parameter) in enumerate(pairs):
        if parameter in optimizer.state:
            parts[number] = {"shape": list(spec.shape)}
            if spec.part is not None:
                parts[number] |= {"whole_shape": list(spec.part.whole_shape), "offset": list(spec.part.offset)}
    return parts


def load(optimizer: "DeMo", state_dict: dict[str, Any], residual: str) -> None:
    """Check everything first, then overwrite settings and state in place; on an error nothing has changed."""
    for pre_hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        state_dict = pre_hook(optimizer, state_dict) or state_dict
    wanted = check(optimizer, state_dict, residual)
    for mine, theirs in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        mine.update(copy.deepcopy(_taken(theirs)))  # a learning rate may be a tensor, which its scheduler changes in place
    for tensor, value in wanted:
        if value is None:
            tensor.zero_()
        else:
            tensor.copy_(value)
    _keep_for_later(optimizer, state_dict["state"], residual)
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)
    optimizer._num_skipped_steps = int(state_dict[KEY]["num_skipped_steps"])
    optimizer._company.received, optimizer._company.is_torn = "", False


def check(optimizer: "DeMo", state_dict: dict[str, Any], residual: str) -> list[tuple[Tensor, Tensor | None]]:
    """Raise if it cannot be loaded; else pairs of (this optimizer's tensor, the saved one or None for zeros)."""
    _check_identity(optimizer, state_dict, residual)
    _check_groups(optimizer, state_dict, residual)
    return _check_state(optimizer, state_dict["state"], residual)


def check_form(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Whose checkpoint it is; raises if it is none of ours."""
    if not isinstance(state_dict, dict) or not {KEY, "state", "param_groups"} <= state_dict.keys():
        raise CheckpointError(
            f"this is not a checkpoint of thinwire.DeMo: it needs the keys {KEY!r}, state, param_groups (torch's "
            "get_state_dict drops the first; use thinwire.parallel.distributed_checkpoint)"
        )
    saved = state_dict[KEY]
    found = saved.get("format") if isinstance(saved, dict) else None
    if not isinstance(saved, dict) or found != FORMAT:
        raise CheckpointError(f"the checkpoint has format {found!r}, this version reads {FORMAT}")
    for name, kind in {"replica": int, "num_replicas": int, "plan": list, "num_skipped_steps": int}.items():
        if not isinstance(saved.get(name), kind):
            raise CheckpointError(f"the checkpoint has {saved.get(name)!r} as {name}: it is damaged")
    return saved


def _check_identity(optimizer: "DeMo", state_dict: dict[str, Any], residual: str) -> None:
    saved = check_form(state_dict)
    if residual != "exact":
        return
    advice = "load that replica's own file, or pass residual='zero' (start without) or 'keep' (take it as it is)"
    for name, what in (("num_replicas", "number of replicas"), ("replica", "replica")):
        mine = getattr(optimizer, name)
        if saved[name] != mine:
            raise CheckpointError(f"the checkpoint's {what} is {saved[name]}, this optimizer's is {mine}; {advice}")
    difference = first_difference(saved["plan"], optimizer.plan.description)
    if difference is not None:
        raise CheckpointError(
            f"the checkpoint was made with another plan: it has [{difference[0]}], this optimizer has [{difference[1]}]; "
            "build the optimizer as it was, or pass residual='zero' or 'keep'"
        )


def _check_groups(optimizer: "DeMo", state_dict: dict[str, Any], residual: str) -> None:
    saved = [len(group["params"]) for group in state_dict["param_groups"]]
    mine = [len(group["params"]) for group in optimizer.param_groups]
    if saved != mine:
        raise CheckpointError(f"the checkpoint's groups hold {saved} parameters, this optimizer's hold {mine}")
    for index, (own, theirs) in enumerate(zip(optimizer.param_groups, state_dict["param_groups"], strict=True)):
        try:
            check_group({**own, **_taken(theirs)})
            check_int("num_steps", theirs.get("num_steps"), 0)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"group {index} of the checkpoint: {error}") from error
        was, now = theirs.get("balance", 0.0), own["balance"]
        if not isinstance(was, (int, float)):
            raise CheckpointError(f"group {index} of the checkpoint has {was!r} as balance: it is damaged")
        if residual == "exact" and (was > 0) != (now > 0):
            raise CheckpointError(
                f"group {index} of the checkpoint was trained with balance={was}, this optimizer has balance={now}; build "
                "it as it was, or pass residual='zero' or 'keep'"
            )


def _taken(group: dict[str, Any]) -> dict[str, Any]:
    """What of a saved group replaces this optimizer's own."""
    kept_back = {*STRUCTURAL_OPTIONS, "params", "param_names"}
    return {name: value for name, value in group.items() if name not in kept_back}


def _check_state(
    optimizer: "DeMo", saved_state: dict[int, dict[str, Any]], residual: str
) -> list[tuple[Tensor, Tensor | None]]:
    """Pairs of (this optimizer's tensor, the saved one or None for zeros), all known to fit."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    groups = [group for group in optimizer.param_groups for _ in group["params"]]
    wanted: list[tuple[Tensor, Tensor | None]] = []
    for index, (parameter, group) in enumerate(zip(parameters, groups, strict=True)):
        if _was_never_trained(parameter, index, saved_state):
            continue
        names = ("momentum", *UPDATE_RULES[group["update"]].state_names, *(ENERGIES if group["balance"] else ()))
        for name in names if parameter in optimizer.state else ():
            mine = optimizer.state[parameter].get(name)
            if mine is None:  # frozen since before its group had this rule, or not balanced
                continue
            theirs: Any = saved_state.get(index, {}).get(name)
            is_found_anew = name in ENERGIES and residual != "exact" and not _fits(theirs, mine)
            if is_found_anew or (name == "momentum" and residual == "zero"):
                wanted.append((mine, None))
                continue
            if not _fits(theirs, mine):
                found = f"{tuple(theirs.shape)} {theirs.dtype}" if isinstance(theirs, torch.Tensor) else "nothing"
                raise CheckpointError(
                    f"the checkpoint has {found} as {name} of parameter {index}, this optimizer needs "
                    f"{tuple(mine.shape)} {mine.dtype}"
                )
            if not bool(torch.isfinite(theirs).all()):
                raise CheckpointError(f"the checkpoint has NaN or Inf in {name} of parameter {index}")
            wanted.append((mine, theirs))
        if RESIDUAL in optimizer.state.get(parameter, {}):
            wanted.append(_owner_residual(optimizer.state[parameter], saved_state.get(index, {}), residual))
    return wanted


def _fits(theirs: Any, mine: Tensor) -> bool:
    return isinstance(theirs, torch.Tensor) and theirs.shape == mine.shape and theirs.dtype == mine.dtype


def _was_never_trained(parameter: Tensor, index: int, saved_state: dict[int, dict[str, Any]]) -> bool:
    """Frozen now, and without a state in the checkpoint: it was unfrozen after that, and frozen again."""
    return not parameter.requires_grad and index not in saved_state


def _owner_residual(mine: dict[str, Any], theirs: dict[str, Any], residual: str) -> tuple[Tensor, Tensor | None]:
    """It belongs to chunks, not to a replica: it is taken where these are the same, and else begins at 0."""
    saved = theirs.get(RESIDUAL)
    is_same = isinstance(saved, Tensor) and saved.shape == mine[RESIDUAL].shape and int(theirs[FIRST]) == int(mine[FIRST])
    return mine[RESIDUAL], saved if is_same and residual != "zero" else None


def _keep_for_later(optimizer: "DeMo", saved_state: dict[int, dict[str, Any]], residual: str) -> None:
    """Parameters that are frozen now may have been trained before, and may be again: their state waits for that."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in enumerate(parameters):
        if _was_never_trained(parameter, index, saved_state):
            optimizer.state.pop(parameter, None)
        if parameter not in optimizer.state and residual != "zero" and index in saved_state:
            tensors = saved_state[index].items()
            optimizer.state[parameter] = {name: t.to(parameter.device, copy=True) for name, t in tensors}
