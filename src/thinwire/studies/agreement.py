"""Do the rows of another folder, of another day or machine, come to the same conclusions as these?"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from thinwire.studies.results import best_folder
from thinwire.studies.study import SIZES, Claim, Study
from thinwire.studies.trials import Rows

_NUMBER = re.compile(r"[+-]?\d[\d.,]*")
_BRACKETS = re.compile(r"\([^()]*\)")


@dataclass(frozen=True)
class Agreement:
    """The claims of a study's rows in two folders, in pairs; None where one folder has nothing like it."""

    study: str
    size: str
    pairs: Sequence[tuple[Claim | None, Claim | None]]

    @property
    def differing(self) -> list[tuple[Claim | None, Claim | None]]:
        """Those that do not say the same."""
        return [(one, other) for one, other in self.pairs if one is None or other is None or one.holds != other.holds]


def agreements(studies: Sequence[Study], results: Path, others: Path) -> list[Agreement]:
    """Of every study and size that both folders of results have rows of."""
    found = []
    for study in (one for one in studies if one.has_trials):
        for size in SIZES:
            folders = [best_folder(root, study.name, size) for root in (results, others)]
            claims = [
                study.find(Rows(folder).rows, _with_sources(study, root, results)).claims
                for root, folder in zip((results, others), folders, strict=True)
                if folder is not None
            ]
            if len(claims) == len(folders):
                found.append(Agreement(study.name, size, pairs(*claims)))
    return found


def _with_sources(study: Study, root: Path, stored: Path) -> Path:
    """Where a study finds the other rows that it reads: beside its own, or those that are stored if they were not made
    anew, as benchmarks are not by running studies."""
    return root if all((root / source).is_dir() for source in study.sources) else stored


def pairs(some: Sequence[Claim], others: Sequence[Claim]) -> list[tuple[Claim | None, Claim | None]]:
    """Claims that say the same of other losses, in the order of the first; the rest is alone.

    First those that differ in nothing but numbers in brackets, then those that differ in any numbers, in their order. What
    comes after a semicolon are details."""
    partners: dict[int, Claim] = {}
    left = list(others)
    for kind in (_exact, _rough):
        for place, claim in enumerate(some):
            alike = next((other for other in left if kind(other) == kind(claim)), None)
            if place not in partners and alike is not None:
                partners[place] = alike
                left.remove(alike)
    return [*((claim, partners.get(place)) for place, claim in enumerate(some)), *((None, claim) for claim in left)]


def _exact(claim: Claim) -> str:
    return _BRACKETS.sub("()", claim.text.split(";")[0])


def _rough(claim: Claim) -> str:
    return _NUMBER.sub("#", _exact(claim))
