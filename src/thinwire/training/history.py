"""What a run's log comes to, in a bounded number of points however long the run is.

Rows are added one by one, as they are written or as they are read again, and what comes of them is the same.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
Totals = Mapping[str, float]
_MOST_POINTS = 200
_MOST_NOTES = 200


@dataclass
class Bin:
    """Some neighbouring values as one: up to which step, how many, their mean, and from where to where they go."""

    step: int
    count: int
    mean: float
    low: float
    high: float


class Thinned:
    """A value per step. When there are too many, each two neighbours become one."""

    def __init__(self, most: int = _MOST_POINTS) -> None:
        self.bins: list[Bin] = []
        self._most, self._size = most, 1

    def add(self, step: int, value: float) -> None:
        """Add the value of a later step."""
        last = self.bins[-1] if self.bins else None
        if last is None or last.count >= self._size:
            self.bins.append(Bin(step, 1, value, value, value))
        else:
            last.mean += (value - last.mean) / (last.count + 1)
            last.step, last.count = step, last.count + 1
            last.low, last.high = min(last.low, value), max(last.high, value)
        if len(self.bins) > 2 * self._most:
            self._size *= 2
            pairs = zip(self.bins[::2], self.bins[1::2], strict=False)
            self.bins = [_joined(*pair) for pair in pairs] + self.bins[len(self.bins) & ~1 :]


def _joined(one: Bin, other: Bin) -> Bin:
    count = one.count + other.count
    mean = (one.mean * one.count + other.mean * other.count) / count
    return Bin(other.step, count, mean, min(one.low, other.low), max(one.high, other.high))


class Sampled:
    """Rows, of which every other is dropped when there are too many; first and last stay."""

    def __init__(self, most: int = _MOST_POINTS) -> None:
        self.rows: list[Row] = []
        self._most, self._step, self._count = most, 1, 0

    def add(self, row: Row) -> None:
        """Add a later row. It is there as the last one, and stays if it is one in so many."""
        if self._count and (self._count - 1) % self._step:
            self.rows.pop()
        self.rows.append(row)
        stays = self._count % self._step == 0
        self._count += 1
        if stays and len(self.rows) > 2 * self._most:
            self.rows = self.rows[::2]
            self._step *= 2


class History:
    """All that is known of a run. ``end`` is its last row, if it has ended, ``lowest`` the lowest validation loss."""

    def __init__(self) -> None:
        self.loss, self.rate, self.replicas = Thinned(), Thinned(), Thinned()
        self.evaluations, self.speeds = Sampled(), Sampled()
        self.notes: list[tuple[int, str]] = []
        self.end: Row | None = None
        self.step, self.lowest = 0, float("inf")

    def add(self, row: Row) -> None:
        """Take note of a row of the log."""
        kind, step = row["kind"], row["step"]
        if self.end is not None:  # it was resumed
            self.notes.append((self.end["step"], f"{self.end['state']}{': ' if self.end['text'] else ''}{self.end['text']}"))
            self.end = None
        self.step = max(self.step, step)
        if kind == "step":
            self.loss.add(step, row["loss"])
            self.replicas.add(step, row.get("replicas", 1))
            if "lr" in row:
                self.rate.add(step, row["lr"])
        elif kind == "evaluation":
            self.evaluations.add(row)
            self.lowest = min(self.lowest, row["loss"])
        elif kind == "speed":
            self.speeds.add(row)
        elif kind == "note":
            self.notes.append((step, row["text"]))
            # The first ones say what is trained, the last ones what has become of it.
            del self.notes[_MOST_NOTES // 4 : max(_MOST_NOTES // 4, len(self.notes) - 3 * _MOST_NOTES // 4)]
        elif kind == "end":
            self.end = row

    @property
    def totals(self) -> Totals:
        """Seconds by phase, bytes, and counts since the beginning of the run, as far as they are known."""
        return self.speeds.rows[-1].get("totals", {}) if self.speeds.rows else {}

    def seconds_at(self, steps: Iterable[int]) -> list[float | None]:
        """How long the run had taken at some steps: between the two times that are known around each."""
        known = [(0, 0.0)] + [(row["step"], row["totals"]["elapsed"]) for row in self.speeds.rows if "totals" in row]
        found: list[float | None] = []
        for step in steps:
            after = bisect_left(known, (step, 0.0))
            if after == len(known):
                found.append(None)
                continue
            (first, begin), (last, end) = known[max(0, after - 1)], known[after]
            share = (step - first) / (last - first) if last > first else 1.0
            found.append(begin + share * (end - begin))
        return found
