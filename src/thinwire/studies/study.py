"""What a study is: a question, the trials that answer it, and what their rows say.

A study's module has the trials in sizes: `small` runs on a CPU in a minute or two, `medium` tunes learning rates there and
takes a while, `full` wants a GPU. Its claims are computed from rows, so that whoever runs it again sees whether they hold
there, too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.studies.trials import Row, Trial

if TYPE_CHECKING:
    from thinwire.studies.figure import Drawing

SMALL, MEDIUM, FULL = "small", "medium", "full"
SIZES = (SMALL, MEDIUM, FULL)
"""Smallest first."""


@dataclass(frozen=True)
class Claim:
    """A sentence that the rows bear out, or do not."""

    text: str
    holds: bool

    @property
    def line(self) -> str:
        """As a line of Markdown."""
        return f"- {'holds' if self.holds else '**does not hold**'}: {self.text}"


@dataclass(frozen=True)
class Finding:
    """What the rows of a study say: Markdown, a table mostly, and claims. ``answer`` is what they come to, in a paragraph
    that is made of the same rows; it is empty where there are none."""

    text: str
    claims: Sequence[Claim] = ()
    answer: str = ""


def verdict(claims: Sequence[Claim], every: str, some: str, none: str) -> str:
    """The word that fits, by how many of the claims hold."""
    held = sum(claim.holds for claim in claims)
    return none if not held else every if held == len(claims) else some


def _nothing_due(size: str, rows: Sequence[Row]) -> list[Trial]:
    return []


def _no_figures(rows: Sequence[Row], results: Path) -> "dict[str, Drawing]":
    return {}


@dataclass(frozen=True)
class Study:
    """``plan`` names the trials of a size that are due, knowing the rows so far; it is asked again until nothing new is
    due, so that a learning rate can be tuned first. ``find`` reads the rows of one folder; ``draw`` makes figures of them,
    by the names of their files. Both also get the folder of all results: a study without trials of its own reads the rows
    of others there (`thinwire.studies.results.stored`). ``alone``: it measures times, which trainings at the same time
    would spoil. ``sources`` names other results whose rows it reads, ``sizes`` those that it has trials of."""

    name: str
    title: str
    question: str
    find: Callable[[Sequence[Row], Path], Finding]
    plan: Callable[[str, Sequence[Row]], list[Trial]] = _nothing_due
    draw: "Callable[[Sequence[Row], Path], dict[str, Drawing]]" = _no_figures
    alone: bool = False
    sources: Sequence[str] = ()
    sizes: Sequence[str] = SIZES

    @property
    def has_trials(self) -> bool:
        """Whether it has any of its own."""
        return self.plan is not _nothing_due


def table(head: Sequence[str], lines: Sequence[Sequence[str]], num_left: int = 1) -> str:
    """A table in Markdown; the first columns to the left, the others to the right."""
    rules = [*["---"] * num_left, *["---:"] * (len(head) - num_left)]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rules, *lines))
