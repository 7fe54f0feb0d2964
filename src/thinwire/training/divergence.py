"""Training that has come to numbers that are none: noticed before a checkpoint is overwritten, and the way back."""

import math
from pathlib import Path

import torch
from torch import nn

from thinwire.exchange.sharding import local_of
from thinwire.exchange.transport import Transport, all_gather
from thinwire.training.checkpoints import available_steps, checkpoint_name
from thinwire.training.errors import DivergedError

ADVICE = "try a smaller --lr or a longer warm-up"
"""What the error of a training that has diverged has in it, whether losses or parameters showed it."""


def check_loss(what: str, loss: float) -> None:
    """Refuse a loss that is no number, which must be the same on all replicas."""
    if not math.isfinite(loss):
        raise DivergedError(f"{what} is {loss}: {ADVICE}")


@torch.no_grad()
def check_parameters(model: nn.Module, transport: Transport, step: int) -> None:
    """Refuse parameters with NaN or Inf in them on any replica, so that the newest checkpoint is always of use; collective.

    The losses do not show what the last step before a checkpoint has done.
    """
    finite = [local_of(parameter).isfinite().all() for parameter in model.parameters()]
    mine = torch.stack(finite).all().to(torch.uint8).reshape(1).cpu()
    if not all_gather(transport, mine, f"parameters after step {step}").all():
        raise DivergedError(f"the parameters have NaN or Inf after step {step}: {ADVICE}")


def way_back(run_folder: Path) -> str:
    """What to say to someone whose run has diverged: which checkpoints there are from before."""
    newest, older, *_ = (*available_steps(run_folder), None, None)
    if newest is None:
        return ""
    without = run_folder / "checkpoints" / checkpoint_name(newest)
    rest = "" if older is None else f" (after step {older} without {without})"
    return f"; --resume {run_folder} goes on after step {newest}{rest}"
