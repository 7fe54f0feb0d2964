"""How a run ended."""

from dataclasses import dataclass

import torch
from torch import nn

from thinwire.training.checkpoints import RunState
from thinwire.training.job import Data, Job


@dataclass(frozen=True)
class Outcome:
    """What the report needs to know."""

    job: Job
    model: nn.Module
    data: Data
    device: torch.device
    state: RunState
    seconds: dict[str, float]
    is_finished: bool
    stop_signal: int
    is_first: bool
    """Whether it is this replica that tells the rest of the world."""
