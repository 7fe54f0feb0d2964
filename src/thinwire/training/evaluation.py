"""The loss on the validation data, shared out among the replicas."""

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from thinwire.exchange.transport import Transport, all_gather
from thinwire.training.examples import Batch, Examples
from thinwire.training.models import loss_of


@dataclass(frozen=True)
class Score:
    """Mean loss in nats per token or image, and for images the share of right answers."""

    loss: float
    accuracy: float | None = None


@torch.no_grad()
def evaluate(
    model: nn.Module,
    examples: Examples,
    num_wanted: int,
    batch: int,
    transport: Transport,
    device: torch.device,
    autocast: AbstractContextManager[Any],
) -> Score:
    """Score ``num_wanted`` examples (0: all), spread evenly over the data. Every replica returns the same."""
    average_buffers_(model, transport)
    total = min(num_wanted or len(examples), len(examples))
    chosen = np.arange(total) * len(examples) // total
    mine = chosen[transport.replica :: transport.num_replicas]
    was_training = model.training
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64)
    # Replicas that are sharded need all their ranks in every forward pass: who has nothing left scores one for nothing.
    for first in range(0, math.ceil(total / transport.num_replicas), batch):
        some = mine[first : first + batch]
        with autocast:
            found = _sums(model, examples.fetch(some if len(some) else chosen[:1]).to(device))
        sums += found if len(some) else 0
    model.train(was_training)
    everyone = all_gather(transport, sums.view(torch.uint8), "evaluation")
    loss, right, count = everyone.contiguous().view(torch.float64).sum(dim=0).tolist()
    is_images = examples.fetch(np.arange(1)).targets.dim() == 1
    return Score(loss / count, right / count if is_images else None)


def _sums(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Sum of losses, number of right answers, number of answers."""
    loss, logits = loss_of(model, batch, reduction="sum")
    right = (logits.argmax(-1) == batch.targets).sum()
    return torch.tensor([float(loss), float(right), batch.targets.numel()], dtype=torch.float64)


@torch.no_grad()
def average_buffers_(model: nn.Module, transport: Transport) -> None:
    """Give all replicas the mean of their buffers (running statistics of batch norms), each replica's in order."""
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    if transport.num_replicas == 1 or not buffers:
        return
    mine = torch.cat([buffer.detach().double().flatten().cpu() for buffer in buffers])
    everyone = all_gather(transport, mine.view(torch.uint8), "average of the buffers")
    mean = everyone.contiguous().view(torch.float64).mean(dim=0)
    for buffer, values in zip(buffers, mean.split([buffer.numel() for buffer in buffers]), strict=True):
        buffer.copy_(values.view(buffer.shape))
