"""GaLore (Zhao et al. 2024) from its authors' package, with a state that can be saved without pickles."""

import logging
import os
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

from torch.optim import Optimizer

from thinwire.training.errors import TrainingError

# As in the package's own examples: how often the projection is found anew, and how much its steps are scaled.
_SETTINGS = {"update_proj_gap": 200, "scale": 0.25, "proj_type": "std"}


def galore(hidden: list[Any], rest: list[dict[str, Any]], rank: int, weight_decay: float, **options: Any) -> Optimizer:
    """GaLoreAdamW: matrices in ``hidden`` are seen through a projection of ``rank``, ``rest`` are groups as they are."""
    kind, projector = _package()
    projected = {"params": hidden, "weight_decay": weight_decay, "rank": rank, **_SETTINGS}
    optimizer: Optimizer = kind([projected, *rest] if hidden else rest, no_deprecation_warning=True, **options)
    optimizer.register_state_dict_post_hook(_without_objects)
    optimizer.register_load_state_dict_post_hook(lambda loaded: _with_objects(loaded, projector))
    return optimizer


def _package() -> tuple[Any, Any]:
    """Its import brings bitsandbytes, which has remarks about this machine that nobody asked for."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            from galore_torch import GaLoreAdamW
            from galore_torch.galore_projector import GaLoreProjector
    except ImportError:
        raise TrainingError("optimizer=galore needs the package galore-torch: pip install galore-torch") from None
    finally:
        logging.disable(before)
    return GaLoreAdamW, GaLoreProjector


def _without_objects(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """The projector as its matrix."""
    plain = {}
    for number, entries in state["state"].items():
        plain[number] = {name: value for name, value in entries.items() if name != "projector"}
        if "projector" in entries:
            plain[number]["projection"] = entries["projector"].ortho_matrix
    return {**state, "state": plain}


def _with_objects(optimizer: Optimizer, projector: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if "projection" in state:
                settings = {name: group[name] for name in ("update_proj_gap", "scale", "proj_type")}
                state["projector"] = projector(group["rank"], **settings)
                state["projector"].ortho_matrix = state.pop("projection")
