"""Do the rows of another folder, of another day or machine, come to the same conclusions as these?"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from thinwire.studies.results import best_folder
from thinwire.studies.study import SIZES, Claim, Study
from thinwire.studies.trials import Rows

_NUMBER = re.compile(r"[+-]?\d[\d.,]*")
_DETAILS = re.compile(r"[:;]")


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
            folders = [(root, best_folder(root, study.name, size)) for root in (results, others)]
            claims = [study.find(Rows(folder).rows, root).claims for root, folder in folders if folder is not None]
            if len(claims) == len(folders):
                found.append(Agreement(study.name, size, pairs(*claims)))
    return found


def pairs(some: Sequence[Claim], others: Sequence[Claim]) -> list[tuple[Claim | None, Claim | None]]:
    """Claims that say the same of other numbers, in the order of the first; the rest is alone.

    What comes after a colon or semicolon are details. Where several claims differ in numbers alone, as those of several k
    do, the first is paired with the first."""
    waiting = {kind: list(of_kind) for kind, of_kind in groupby(sorted(others, key=_kind), _kind)}
    found: list[tuple[Claim | None, Claim | None]] = []
    for claim in some:
        alike = waiting.get(_kind(claim))
        found.append((claim, alike.pop(0) if alike else None))
    return found + [(None, claim) for left in waiting.values() for claim in left]


def _kind(claim: Claim) -> str:
    return _NUMBER.sub("#", _DETAILS.split(claim.text)[0])
