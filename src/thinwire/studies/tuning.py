"""The same chance for every contender: a grid of learning rates around a first guess, then the best one with other seeds.

Where the best is at the edge of what was tried, one more beyond it is, up to a number of tries that is the same for all. In
the small size there is time for the first guess alone.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from thinwire.studies.study import SMALL, table
from thinwire.studies.trials import Row, Trial

SEEDS = (0, 1, 2)
FACTORS = (1.0, 0.5, 2.0)
_STEP = 2.0
_MOST_TRIES = 8


def seeds_for(size: str) -> Sequence[int]:
    """All of them; one alone in the small size."""
    return SEEDS[:1] if size == SMALL else SEEDS


@dataclass(frozen=True)
class Contender:
    """A training without learning rate and seed; ``rate`` is where to look for the former."""

    name: str
    trial: Trial
    rate: float

    def at(self, rate: float, seed: int) -> Trial:
        """One training of it."""
        return replace(self.trial, settings={**self.trial.settings, "lr": rate, "seed": seed})


def tries_in_words(tries: int, is_at_edge: bool) -> str:
    """How many learning rates were tried, and whether the best is the least or the largest of several."""
    return f"{tries}, best at the edge" if is_at_edge and tries > 1 else f"{tries}"


@dataclass(frozen=True)
class Outcome:
    """The best learning rate, and the last losses at it, one per seed."""

    rate: float
    losses: list[float]
    rows: list[Row]
    tries: int
    num_failed: int = 0
    """Seeds whose training ended in no number."""
    is_at_edge: bool = False
    """Whether the best rate is the least or the largest of several: others may be better."""

    @property
    def mean(self) -> float:
        """Over seeds."""
        return statistics.mean(self.losses)

    @property
    def tries_words(self) -> str:
        """How many learning rates were tried, and whether the best is at the edge."""
        return tries_in_words(self.tries, self.is_at_edge)

    @property
    def words(self) -> str:
        """Mean and range."""
        failed = f"; {self.num_failed} failed" if self.num_failed else ""
        if len(self.losses) == 1:
            return f"{self.mean:.3f}{failed}"
        return f"{self.mean:.3f} ({min(self.losses):.3f} to {max(self.losses):.3f}{failed})"


def is_below(one: Outcome, other: Outcome) -> bool:
    """Whether every seed of the one ends below every seed of the other; one that has failed does not."""
    return not one.num_failed and max(one.losses) < min(other.losses)


def due(
    contenders: Sequence[Contender],
    rows: Sequence[Row],
    size: str,
    seeds: Sequence[int] = SEEDS,
    factors: Sequence[float] = FACTORS,
) -> list[Trial]:
    """What is to be run next, knowing these rows: the first of a grid, one beyond its edge, or the other seeds. With one
    rate alone, all seeds at once."""
    grid = factors[:1] if size == SMALL else factors
    return [trial for contender in contenders for trial in _due(contender, rows, seeds, grid)]


def _due(contender: Contender, rows: Sequence[Row], seeds: Sequence[int], factors: Sequence[float]) -> list[Trial]:
    known = _tried(contender, rows, seeds[0])
    missing = [rate for factor in factors if (rate := _rounded(contender.rate * factor)) not in known]
    if missing:
        first = seeds if len(factors) == 1 else seeds[:1]  # with one rate there is nothing to wait for
        return [contender.at(rate, seed) for rate in missing for seed in first]
    best = min(known, key=lambda rate: known[rate])
    if 1 < len(known) < _MOST_TRIES and best in (min(known), max(known)):
        return [contender.at(_rounded(best * _STEP if best == max(known) else best / _STEP), seeds[0])]
    return [contender.at(best, seed) for seed in seeds[1:]]


def outcomes(contenders: Sequence[Contender], rows: Sequence[Row]) -> dict[str, Outcome]:
    """What came of all contenders that were tried, by name."""
    pairs = ((one.name, outcome(one, rows)) for one in contenders)
    return {name: found for name, found in pairs if found is not None}


def outcome(contender: Contender, rows: Sequence[Row]) -> Outcome | None:
    """What came of a contender; None if nothing has, or every training of it failed."""
    seeds = {row["trial"]["settings"].get("seed", 0) for row in rows_of(contender, rows)}
    if not seeds:
        return None
    known = _tried(contender, rows, min(seeds))
    best = min(known, key=lambda rate: known[rate])
    tried = [row for row in rows_of(contender, rows) if row["trial"]["settings"]["lr"] == best]
    mine = [row for row in tried if row["loss"] is not None]
    mine.sort(key=lambda row: row["trial"]["settings"].get("seed", 0))
    losses = [row["loss"] for row in mine]
    is_at_edge = len(known) > 1 and best in (min(known), max(known))
    return Outcome(best, losses, mine, len(known), len(tried) - len(mine), is_at_edge) if mine else None


def rows_of(contender: Contender, rows: Sequence[Row]) -> list[Row]:
    """Its trainings, with all learning rates and seeds."""
    wanted = _without_tuning(contender.trial.facts)
    return [row for row in rows if _without_tuning(row["trial"]) == wanted]


def _without_tuning(facts: dict[str, Any]) -> dict[str, Any]:
    settings = {name: value for name, value in facts["settings"].items() if name not in ("lr", "seed")}
    return {**facts, "settings": settings}


def _tried(contender: Contender, rows: Sequence[Row], seed: int) -> dict[float, float]:
    """The loss at each learning rate with one seed; infinite where training failed."""
    mine = [row["trial"]["settings"] | {"loss": row["loss"]} for row in rows_of(contender, rows)]
    infinity = float("inf")
    return {one["lr"]: infinity if one["loss"] is None else one["loss"] for one in mine if one.get("seed", 0) == seed}


def _rounded(rate: float) -> float:
    return float(f"{rate:.6g}")


def outcome_table(what: str, found: Mapping[str, Outcome]) -> str:
    """A line per contender: its loss, and how it was tuned."""
    return table(
        (what, "loss", "learning rate", "rates tried", "seeds"),
        [(name, one.words, f"{one.rate:g}", one.tries_words, str(len(one.losses))) for name, one in found.items()],
    )
