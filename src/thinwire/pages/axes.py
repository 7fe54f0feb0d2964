"""Axes of figures: what they show, where their ticks are, and how numbers are written."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True)
class Axis:
    """``ticks``, if given, are the only ones, each with its words. ``includes`` are values that it must reach to."""

    label: str = ""
    is_log: bool = False
    ticks: Sequence[tuple[float, str]] | None = None
    includes: Sequence[float] = ()

    def shows(self, value: float) -> bool:
        """Whether it has a place for this value: zero is nowhere on a logarithmic axis."""
        return math.isfinite(value) and (value > 0 or not self.is_log)


@dataclass(frozen=True)
class Scale:
    """An axis with its ends, mapped to ``first`` and ``last`` in units of the figure."""

    axis: Axis
    low: float
    high: float
    first: float
    last: float

    def place(self, value: float) -> float:
        """Where a value is."""
        low, high, at = self.low, self.high, value
        if self.axis.is_log:
            low, high, at = math.log10(low), math.log10(high), math.log10(value)
        return self.first + (self.last - self.first) * (at - low) / (high - low)

    def ticks(self, most: int) -> list[tuple[float, str]]:
        """Values with their words, about ``most`` of them."""
        if self.axis.ticks is not None:
            return [(value, words) for value, words in self.axis.ticks if self.low <= value <= self.high]
        found = _log_ticks(self.low, self.high, most) if self.axis.is_log else []
        if found:
            return [(value, words_for(value)) for value in found]
        found = _linear_ticks(self.low, self.high, most)
        apart = min((b - a for a, b in pairwise(found)), default=abs(self.high) or 1.0)
        return [(value, words_for(value, apart)) for value in found]


def scale_for(axis: Axis, values: Iterable[float], first: float, last: float, margin: float = 0.05) -> Scale:
    """A scale that holds all values, with a margin; one that holds something even if there are none."""
    known = [value for value in (*values, *axis.includes, *(tick for tick, _ in axis.ticks or ())) if axis.shows(value)]
    low, high = min(known, default=1.0 if axis.is_log else 0.0), max(known, default=1.0)
    if axis.is_log:
        spread = (high / low) ** margin if high > low * 1.001 else 1.5
        return Scale(axis, low / spread, high * spread, first, last)
    spread = (high - low) * margin if high - low > 1e-9 * max(abs(low), abs(high)) else abs(high) * 0.1 or 1.0
    # What cannot be negative does not look as if it were.
    at_least = 0.0 if low >= 0 else -math.inf
    return Scale(axis, max(at_least, low - spread), high + spread, first, last)


def _linear_ticks(low: float, high: float, most: int) -> list[float]:
    rough = (high - low) / max(1, most)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * one for one in _STEPS if power * one >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def _log_ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers; none if there are too few between the ends."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for leading in ((1, 1.5, 2, 3, 4, 5, 6, 8), (1, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
        found = [one * 10.0**power for power in decades for one in leading if low <= one * 10.0**power <= high]
        if len(found) <= most:
            break
    if len(found) > most:
        found = found[:: math.ceil(len(found) / most)]
    return found if len(found) > 2 else []


def words_for(value: float, apart: float | None = None) -> str:
    """A number in few letters: ``apart`` is the distance to the next, else three digits are enough."""
    if value == 0 or (apart is not None and abs(value) < 1e-9 * apart):
        return "0"
    for power, letter in ((9, "G"), (6, "M"), (3, "k")):
        if abs(value) >= 10**power * (100 if power == 3 else 1):
            return words_for(value / 10**power, None if apart is None else apart / 10**power) + letter
    if apart is None:
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    digits = max(0, -math.floor(math.log10(apart) + 1e-9))
    if round(apart * 10**digits, 6) % 1:  # such as steps of 2.5
        digits += 1
    return f"{value:,.{digits}f}" if digits < 5 else f"{value:.3g}"
