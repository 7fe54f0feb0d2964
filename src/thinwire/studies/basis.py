"""basis: what does the cosine transform buy? The same training with other orthonormal bases in its place.

Where the energy is (q1) says which basis holds most of a momentum in few coefficients. This says which trains best.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from thinwire.studies.bases import FIXED, in_place_of_the_dct
from thinwire.studies.chunks import POWERS_OF_TWO
from thinwire.studies.figure import Drawing, Page, dots_above_names, title
from thinwire.studies.settings import DEMO_RULES, text_trial
from thinwire.studies.study import FULL, SIZES, SMALL, Claim, Finding, Study, table, verdict
from thinwire.studies.trials import Row, Trial
from thinwire.studies.tuning import Contender, Outcome, due, is_below, outcomes, seeds_for

_DCT = next(iter(FIXED))
# In the small size there is time for the two that differ most.
_BASES = {size: (_DCT, "identity") if size == SMALL else tuple(FIXED) for size in SIZES}
# Kernels and whole numbers know the DCT alone, so none has them.
PLAIN = {"kernels": "torch", "exact_decode": False}
"""Settings of a training that may have any basis."""


@dataclass(frozen=True)
class BasisTrial(Trial):
    """A training with another basis in place of the DCT."""

    basis: str = _DCT

    def run(self, device: torch.device) -> Row:
        """See `Trial`."""
        with in_place_of_the_dct(self.basis):
            return super().run(device)


Case = tuple[str, str]
"""An update rule and a basis."""


def _contenders(size: str) -> dict[Case, Contender]:
    shape = {} if size == FULL else POWERS_OF_TWO
    found = {}
    for rule, start in DEMO_RULES[size].items():
        trial = text_trial(size, settings={**shape, **start.settings, **PLAIN})
        for basis in _BASES[size]:
            found[rule, basis] = Contender(f"{rule} rule, {basis}", BasisTrial(**vars(trial), basis=basis), start.rate)
    return found


def _plan(size: str, rows: Sequence[Row]) -> list[Trial]:
    return due(list(_contenders(size).values()), rows, size, seeds_for(size))


def _outcomes(rows: Sequence[Row]) -> dict[Case, Outcome]:
    """Of the larger size, if it was run."""
    for cases in map(_contenders, reversed(SIZES)):
        if found := outcomes(list(cases.values()), rows):
            return {case: found[one.name] for case, one in cases.items() if one.name in found}
    return {}


def _find(rows: Sequence[Row], results: Path) -> Finding:
    found = _outcomes(rows)
    lines = [
        (f"{rule} rule", basis, one.words, f"{one.rate:g}", one.tries_words, str(len(one.losses)))
        for (rule, basis), one in found.items()
    ]
    heads = ("", "basis", "loss", "learning rate", "rates tried", "seeds")
    words = "All send as many coefficients, chosen by size in their own basis; decoding is in floating point, for all alike."
    claims = _claims(found)
    return Finding(f"{table(heads, lines, 2)}\n\n{words}", claims, _answer(found, claims))


def _claims(found: dict[Case, Outcome]) -> list[Claim]:
    claims = []
    for (rule, basis), one in found.items():
        cosine = found.get((rule, _DCT))
        if basis != _DCT and cosine is not None:
            text = f"with the {rule} rule the DCT ends below the {basis} basis: {cosine.mean:.3f} and {one.mean:.3f}"
            claims.append(Claim(text, is_below(cosine, one)))
    return claims


def _answer(found: dict[Case, Outcome], claims: Sequence[Claim]) -> str:
    if not claims:
        return ""
    lead = verdict(
        claims,
        "It trains better than any other that was tried",
        "It depends on the rule and on the other basis",
        "Nothing here",
    )
    parts = []
    for rule in dict.fromkeys(rule for rule, _ in found):
        mine = sorted((one.mean, basis) for (of, basis), one in found.items() if of == rule)
        parts.append(f"with the {rule} rule {', '.join(f'{basis} {mean:.3f}' for mean, basis in mine)}")
    return f"{lead}. Last losses, the lowest first: {'; '.join(parts)}."


def _draw(rows: Sequence[Row], results: Path) -> dict[str, Drawing]:
    found = _outcomes(rows)
    rules = list(dict.fromkeys(rule for rule, _ in found))
    page = Page(max(1, len(rules)))
    for axes, rule in zip(page.panels, rules, strict=False):
        dots_above_names(axes, {basis: one.losses for (of, basis), one in found.items() if of == rule})
        title(axes, f"{rule.capitalize()} rule", "", "validation loss (nats per byte)")
    caption = "Last validation loss of every seed at the best learning rate, with the DCT and with other bases in its place."
    return {"basis.png": Drawing(page, caption)}


STUDY = Study(
    "basis",
    "The basis",
    "What does the cosine transform buy, in loss, beside no transform, a Hadamard one and a random one?",
    find=_find,
    plan=_plan,
    draw=_draw,
)
