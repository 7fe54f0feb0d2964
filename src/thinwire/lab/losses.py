"""Loss curves of the methods, and what they become when a step takes as long as it does on a link.

A synchronous method's losses do not depend on its links: a curve over steps, from training anywhere, and the seconds of a
step on a link give the curve over time there.
"""

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from thinwire.lab.rows import Cell


@dataclass(frozen=True)
class Curve:
    """Validation losses of a method at one learning rate: ``points`` are (step, mean loss over seeds), ``ends`` the last
    losses of all seeds."""

    method: str
    lr: float
    points: tuple[tuple[int, float], ...]
    ends: tuple[float, ...]

    def steps_to(self, target: float) -> float | None:
        """After how many steps the loss has fallen to ``target``, on a line between two evaluations; None: never."""
        before: tuple[int, float] | None = None
        for step, loss in self.points:
            if loss <= target:
                if before is None or before[1] == loss:
                    return float(step)
                return before[0] + (step - before[0]) * (before[1] - target) / (before[1] - loss)
            before = (step, loss)
        return None


def read_curves(path: Path) -> dict[str, list[Curve]]:
    """All curves of every method. The file has a JSON object per line: method, lr, seed, step, loss."""
    found: dict[tuple[str, float], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        missing = [name for name in ("method", "lr", "step", "loss") if name not in row]
        if missing:
            raise ValueError(f"{path} has a row without {missing[0]}; each needs method, lr, seed, step and loss")
        found[row["method"], row["lr"]][row["step"]].append(row["loss"])
    curves: dict[str, list[Curve]] = defaultdict(list)
    for (method, lr), by_step in found.items():
        points = tuple((step, mean(losses)) for step, losses in sorted(by_step.items()))
        curves[method].append(Curve(method, lr, points, tuple(by_step[max(by_step)])))
    return dict(curves)


def best_curves(curves: dict[str, list[Curve]], target: float | None = None) -> dict[str, Curve]:
    """Of each method the curve of its best learning rate: the first at the target, else the lowest at the end."""

    def rank(curve: Curve) -> tuple[float, float]:
        steps = curve.steps_to(target) if target is not None else None
        return (float("inf") if steps is None else steps, curve.points[-1][1])

    return {method: min(group, key=rank) for method, group in curves.items()}


def seconds_to(curve: Curve, cell: Cell, target: float) -> float | None:
    """Seconds of training until the target, evaluations not counted; None: never."""
    steps = curve.steps_to(target)
    return None if steps is None or cell.error else steps * cell.seconds
