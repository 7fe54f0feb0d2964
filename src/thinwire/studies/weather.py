"""What may go wrong between virtual replicas, drawn anew at each step and the same for the same seed."""

import random
from dataclasses import dataclass
from typing import NamedTuple

from thinwire.core.errors import check_float, check_int


class Attendance(NamedTuple):
    """Who computes at a step, and whose payload does not reach the others."""

    present: list[int]
    lost: list[int]


@dataclass(frozen=True)
class Weather:
    """Shares of steps at which a replica is ``absent``, as a straggler past its deadline is: it computes nothing and keeps
    its momentum; and at which its payload is ``lost``: the others go on without it, and it takes back what it had sent.
    Someone always gets through."""

    absent: float = 0.0
    lost: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_float("absent", self.absent, 0.0, 1.0)
        check_float("lost", self.lost, 0.0, 1.0)
        check_int("seed", self.seed, 0)

    def draw(self, step: int, num_replicas: int) -> Attendance:
        """For one step."""
        if not self.absent and not self.lost:
            return Attendance(list(range(num_replicas)), [])
        chance = random.Random(f"{self.seed} {step}")
        spared = chance.randrange(num_replicas)
        present = [r for r in range(num_replicas) if chance.random() >= self.absent or r == spared]
        return Attendance(present, [r for r in present if chance.random() < self.lost and r != spared])
