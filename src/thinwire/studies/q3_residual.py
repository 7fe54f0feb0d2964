"""q3: is the residual needed? What was not sent is kept, halved at every step, or dropped."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from thinwire.studies.figure import Drawing, Page, dot, room_for_labels, title
from thinwire.studies.settings import DEMO_RULES, text_trial
from thinwire.studies.study import FULL, SIZES, Claim, Finding, Study, verdict
from thinwire.studies.trials import Row, Trial
from thinwire.studies.tuning import Contender, Outcome, due, is_below, outcome_table, outcomes, seeds_for

_KEPT = {1.0: "kept", 0.5: "halved", 0.0: "dropped"}


def _contenders(size: str) -> list[Contender]:
    return [
        Contender(f"{rule} rule, {word}", replace(text_trial(size, settings=start.settings), kept=kept), start.rate)
        for rule, start in DEMO_RULES[size].items()
        for kept, word in _KEPT.items()
    ]


def _plan(size: str, rows: Sequence[Row]) -> list[Trial]:
    return due(_contenders(size), rows, size, seeds_for(size))


def _outcomes(rows: Sequence[Row]) -> dict[str, Outcome]:
    return outcomes([one for size in SIZES for one in _contenders(size)], rows)


def _find(rows: Sequence[Row], results: Path) -> Finding:
    found, claims = _outcomes(rows), []
    for rule in DEMO_RULES[FULL]:
        if f"{rule} rule, kept" in found and f"{rule} rule, dropped" in found:
            kept, dropped = found[f"{rule} rule, kept"], found[f"{rule} rule, dropped"]
            text = (
                f"with the {rule} rule, keeping the residual lowers the loss by {dropped.mean - kept.mean:.3f} nats per byte"
            )
            claims.append(Claim(text, is_below(kept, dropped)))
    return Finding(outcome_table("what becomes of the rest", found), claims, _answer(found, claims))


def _answer(found: dict[str, Outcome], claims: Sequence[Claim]) -> str:
    if not claims:
        return ""
    lead = verdict(claims, "Yes, it is needed", "With one of the rules", "No: what it gains is not beyond what seeds do")
    parts = []
    for rule in DEMO_RULES[FULL]:
        losses = [f"{found[name].mean:.3f} {word}" for word in _KEPT.values() if (name := f"{rule} rule, {word}") in found]
        if losses:
            parts.append(f"with the {rule} rule {', '.join(losses)}")
    return f"{lead}. Last losses by what becomes of the coefficients that were not sent: {'; '.join(parts)}."


def _draw(rows: Sequence[Row], results: Path) -> dict[str, Drawing]:
    page = Page()
    (axes,) = page.panels
    for index, (name, one) in enumerate(_outcomes(rows).items()):
        for seed, loss in enumerate(one.losses):
            dot(axes, index, loss, name if seed == 0 else "", index)
    axes.set_xticks([])
    room_for_labels(axes)
    title(axes, "What was not sent is kept, halved or dropped", "", "validation loss (nats per byte)")
    return {"residual.png": Drawing(page, "Last validation loss of every seed at the best learning rate.")}


STUDY = Study(
    "q3",
    "The residual",
    "Is the residual needed (conjecture 3), or may what was not sent be dropped?",
    find=_find,
    plan=_plan,
    draw=_draw,
)
