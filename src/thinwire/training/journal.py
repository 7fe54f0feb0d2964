"""What the replicas tell each other about the run itself, about once a second: losses, and the wish to stop.

Losses stay where they were computed until then, so that a step never waits for a number. How often the replicas talk does
not change what is written down: one row per step, with the mean loss over all replicas.
"""

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.exchange.transport import Transport, all_gather
from thinwire.training.divergence import check_loss

_SECONDS_BETWEEN = 1.0
_MOST_STEPS_BETWEEN = 100
# Before the losses: the wish to stop, and how many steps replica 0 would wait for the next exchange.
_HEADER = 2


@dataclass(frozen=True)
class News:
    """What all replicas know after an exchange: the mean losses of steps ``first_step`` and on, and whether to stop."""

    first_step: int
    losses: list[float]
    stop: bool
    num_replicas: int = 1


class Journal:
    """Collects one replica's losses and exchanges them. ``allows_nonfinite``: steps with losses that are no numbers are left
    out by the optimizer, and do not end the run."""

    def __init__(self, transport: Transport, num_steps: int, allows_nonfinite: bool = False) -> None:
        self._transport, self._allows_nonfinite = transport, allows_nonfinite
        self._losses: list[Tensor] = []
        self._num_steps = num_steps
        self._next_exchange = num_steps + 1
        self._began = time.perf_counter()

    def restart(self, num_steps: int) -> None:
        """Forget what was not exchanged, after replicas have come or gone: the others have not noted the same steps."""
        self._losses.clear()
        self._num_steps, self._next_exchange = num_steps, num_steps + 1

    def add(self, loss: Tensor) -> None:
        """Note the loss of the step that was just taken."""
        self._losses.append(loss)
        self._num_steps += 1

    @property
    def is_due(self) -> bool:
        """Whether all replicas exchange news after this step."""
        return self._num_steps >= self._next_exchange

    def exchange(self, wants_stop: bool) -> News:
        """Tell the others, and hear from them. Every replica calls it after the same step."""
        steps = len(self._losses)
        losses = torch.stack(self._losses).double().cpu() if steps else torch.empty(0, dtype=torch.float64)
        seconds_per_step = (time.perf_counter() - self._began) / max(1, steps)
        interval = min(_MOST_STEPS_BETWEEN, max(1, int(_SECONDS_BETWEEN / max(seconds_per_step, 1e-6))))
        message = torch.cat([torch.tensor([float(wants_stop), float(interval)], dtype=torch.float64), losses])
        everyone = all_gather(self._transport, message.view(torch.uint8), f"news after step {self._num_steps}")
        table = everyone.contiguous().view(torch.float64)
        self._losses.clear()
        self._began = time.perf_counter()
        # A damaged number from a peer must not become an endless wait.
        said = float(table[0, 1])
        self._next_exchange = self._num_steps + (int(said) if 1 <= said <= _MOST_STEPS_BETWEEN else 1)
        return self._read(table, self._num_steps - steps + 1)

    def _read(self, table: Tensor, first_step: int) -> News:
        losses: list[float] = table[:, _HEADER:].mean(dim=0).tolist()
        for offset, loss in enumerate(losses if not self._allows_nonfinite else ()):
            check_loss(f"the loss of step {first_step + offset}", loss)
        return News(first_step, losses, bool((table[:, 0] != 0).any()), len(table))
