"""Runs that were trained on a shaped link until they had reached a loss (benchmarks/lab_runs.py)."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from thinwire.lab.losses import Curve
from thinwire.studies.results import stored

SOURCE = "lab_runs"


class Point(NamedTuple):
    """An evaluation: after so many steps, which took so long."""

    step: int
    loss: float
    seconds: float


@dataclass(frozen=True)
class WholeRun:
    """A method on a link, with two hosts."""

    method: str
    link: str
    seed: int
    points: tuple[Point, ...]

    def steps_to(self, target: float) -> float | None:
        """As `Curve.steps_to`."""
        return Curve(self.method, 0.0, tuple((point.step, point.loss) for point in self.points), ()).steps_to(target)

    def seconds_to(self, target: float) -> float | None:
        """Seconds of steps until the target; None: it was not reached."""
        steps = self.steps_to(target)
        if steps is None:
            return None
        known = [0.0, *(float(point.step) for point in self.points)], [0.0, *(point.seconds for point in self.points)]
        return float(np.interp(steps, *known))


def whole_runs(results: Path) -> list[WholeRun]:
    """All that are stored."""
    return [
        WholeRun(row["method"], row["link"], row["seed"], tuple(Point(**p) for p in row["curve"]))
        for row in stored(results, SOURCE)
        if row["hosts"] == 2
    ]
