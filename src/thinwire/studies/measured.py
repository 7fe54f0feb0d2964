"""What the network lab and the step benchmark have measured, for studies that have no trainings of their own."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from thinwire.lab import rows
from thinwire.lab.losses import Curve, best_curves, read_curves
from thinwire.lab.rows import Cell
from thinwire.studies.results import best_folder
from thinwire.studies.settings import rules_in_words
from thinwire.studies.tuning import tries_in_words

DEMO, DEMO_MUON, ADAMW = "demo", "demo-muon", "adamw"
# Those of this project; all others are peers.
OURS = (DEMO, "demo-after", DEMO_MUON, "demo-muon-after")
# The styles of the two kinds, in figures that name every point.
KINDS = {0: "other methods", 1: "DeMo"}
# The lab's links without delay, slowest first, and their rates in Mbit/s.
RATES = {"10mbit": 10, "100mbit": 100, "1gbit": 1000}
NOTHING = "| rows | |\n| --- | --- |\n| none stored | run `thinwire lab compare`, then the report again |"


@dataclass(frozen=True)
class Tuned:
    """A method's losses at its best learning rate, and how that was found."""

    curve: Curve
    rates: tuple[float, ...]

    @property
    def loss(self) -> float:
        """The last one, a mean over seeds."""
        return self.curve.points[-1][1]

    @property
    def tries(self) -> str:
        """How many learning rates, and whether the best is the least or the largest of them: others may be better."""
        return tries_in_words(len(self.rates), self.curve.lr in (min(self.rates), max(self.rates)))

    @property
    def words(self) -> str:
        """Mean and range."""
        return f"{self.loss:.3f} ({min(self.curve.ends):.3f} to {max(self.curve.ends):.3f})"


def ours_in_words(found: Mapping[tuple[str, str], Cell]) -> str:
    """What DeMo had in the lab, which may be older than today's defaults."""
    return rules_in_words(cell.settings for cell in found.values() if cell.method in OURS)


def link_words(link: str) -> str:
    """Such as "at 100 Mbit/s", for links without delay."""
    return f"at {RATES[link]} Mbit/s" if link in RATES else "without a limit on the link"


def rounds(results: Path, source: str = "lab", size: str | None = None) -> list[Cell]:
    """All that the lab measured."""
    folder = best_folder(results, source, size)
    return [] if folder is None else [cell for cell in rows.read(folder / "rows.jsonl") if not cell.error]


def cells(results: Path, num_hosts: int = 2, source: str = "lab", size: str | None = None) -> dict[tuple[str, str], Cell]:
    """What the lab measured, by method and link; its rounds as one."""
    found = rows.merge([cell for cell in rounds(results, source, size) if cell.num_hosts == num_hosts])
    return {(cell.method, cell.link): cell for cell in found}


def curves(results: Path, target: float | None = None) -> dict[str, Tuned]:
    """The best curve of every method that was trained: the first at the target if there is one, else the lowest."""
    folder = best_folder(results, "lab_losses")
    known = {} if folder is None else read_curves(folder / "rows.jsonl")
    best = best_curves(known, target)
    return {method: Tuned(curve, tuple(one.lr for one in known[method])) for method, curve in best.items()}
