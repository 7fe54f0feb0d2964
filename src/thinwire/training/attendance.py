"""A run whose replicas come and go: where it is, as far as newcomers must know, and what changes when they meet."""

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.exchange.transport import Elastic
from thinwire.optimizer import DeMo
from thinwire.parallel.elastic import ElasticTransport
from thinwire.training.config import TrainConfig


def elastic_transport(config: TrainConfig) -> ElasticTransport:
    """This replica's end of the wire."""
    launch = config.launch
    return ElasticTransport(
        launch.lighthouse,
        f"slot-{launch.slot:05d}",
        num_expected=launch.replicas,
        min_replicas=launch.min_replicas or None,
        timeout_seconds=launch.timeout_seconds,
        meet_every_seconds=launch.meet_every_seconds,
    )


class Attendance:
    """This replica's knowledge of who is there. ``step`` and ``position`` are where the run is."""

    def __init__(self, transport: Elastic, optimizer: DeMo, buffers: Sequence[Tensor], facts: Sequence[str]) -> None:
        self._transport, self._optimizer = transport, optimizer
        self._progress = torch.zeros(2, dtype=torch.int64)
        self._buffers, self._facts = buffers, facts
        self._known = (0, 0)
        self._before: Sequence[str] = ()

    def begin(self, step: int, position: int) -> None:
        """Meet the others for the first time."""
        self.count(step, position)
        self._optimizer.meet([self._progress, *self._buffers], self._facts)

    def meet(self) -> None:
        """Meet the others after an exchange other than the optimizer's has failed."""
        self._optimizer.meet()

    def count(self, step: int, position: int) -> None:
        """Take note of where the run is."""
        self._progress.copy_(torch.tensor([step, position]))

    @property
    def step(self) -> int:
        """Steps taken by the run."""
        return int(self._progress[0])

    @property
    def position(self) -> int:
        """Its place in the data."""
        return int(self._progress[1])

    def news(self) -> tuple[bool, bool, list[str]]:
        """Since the last time: whether they have met, whether this replica was given another's state, and who was lost."""
        known, self._known = self._known, (self._transport.meeting, self._optimizer.membership.num_copies)
        before, self._before = self._before, self._transport.members
        lost = [name for name in before if name not in self._before]
        return known[0] != self._known[0], known[1] != self._known[1], lost

    @property
    def has_moved(self) -> bool:
        """Whether the present company has taken a step."""
        return self._optimizer.num_steps > self._optimizer.membership.met_after
