"""q6: equal weight decay? AdamW and DeMo, without and with it, each at its own best learning rate."""

import math
from collections.abc import Sequence
from pathlib import Path

from thinwire.studies.figure import Drawing, Page, line, room_for_labels, title
from thinwire.studies.settings import DEMO_RULES, DENSE_RATES, text_trial
from thinwire.studies.study import SIZES, Claim, Finding, Study, table, verdict
from thinwire.studies.trials import Row, Trial
from thinwire.studies.tuning import Contender, Outcome, due, is_below, outcomes, seeds_for
from thinwire.training.config import TrainConfig
from thinwire.training.methods import lr_share

Case = tuple[str, float]
"""A method and its weight decay."""

_DECAYS = (0.0, 0.1)
_ADAMW, _SIGN, _MUON = "AdamW", "DeMo, sign rule", "DeMo, muon rule"
_METHODS = (_ADAMW, _SIGN, _MUON)


def _name(case: Case) -> str:
    return f"{case[0]}, weight decay {case[1]:g}"


def _contenders(size: str) -> dict[Case, Contender]:
    sign, muon = DEMO_RULES[size]["sign"], DEMO_RULES[size]["muon"]
    starts = {
        _ADAMW: ("adamw", {}, DENSE_RATES[size]["adamw"]),
        _SIGN: ("demo", sign.settings, sign.rate),
        _MUON: ("demo", muon.settings, muon.rate),
    }
    found = {}
    for method, (optimizer, settings, rate) in starts.items():
        for decay in _DECAYS:
            trial = text_trial(size, optimizer, settings={**settings, "weight_decay": decay})
            found[method, decay] = Contender(_name((method, decay)), trial, rate)
    return found


def _plan(size: str, rows: Sequence[Row]) -> list[Trial]:
    return due(list(_contenders(size).values()), rows, size, seeds_for(size))


def _outcomes(rows: Sequence[Row]) -> dict[Case, Outcome]:
    by_name = outcomes([one for size in SIZES for one in _contenders(size).values()], rows)
    cases = [(method, decay) for method in _METHODS for decay in _DECAYS]
    return {case: by_name[_name(case)] for case in cases if _name(case) in by_name}


def shrinkage(config: TrainConfig) -> float:
    """What weight decay alone leaves of a weight at the end of a training: the product of 1 - lr * weight decay."""
    rates = (config.optim.lr * lr_share(config.schedule, step) for step in range(config.schedule.steps))
    return math.prod(1 - rate * config.optim.weight_decay for rate in rates)


def _config(row: Row) -> TrainConfig:
    return Trial(**row["trial"]).config


def _find(rows: Sequence[Row], results: Path) -> Finding:
    found = _outcomes(rows)
    lines = [
        (
            *(case[0], f"{case[1]:g}", one.words, f"{one.rate:g}", one.tries_words, str(len(one.losses))),
            f"{100 * shrinkage(_config(one.rows[0])):.1f} %",
        )
        for case, one in found.items()
    ]
    head = ("method", "weight decay", "loss", "learning rate", "rates tried", "seeds", "left of a weight")
    words = (
        "Weight decay is decoupled, and takes the share lr * weight decay of every matrix in a step. Learning rates differ, "
        "so the same weight decay is not the same strength: the last column is what it would leave of a weight by itself, "
        "from the first step to the last."
    )
    return Finding(f"{table(head, lines)}\n\n{words}", _claims(found), _answer(found))


def _answer(found: dict[Case, Outcome]) -> str:
    order = [claim for claim in _claims(found) if "same order" in claim.text]
    if not order:
        return ""
    parts = []
    for method in _METHODS:
        losses = [f"{found[method, decay].mean:.3f} at {decay:g}" for decay in _DECAYS if (method, decay) in found]
        parts += [f"{method} {' and '.join(losses)}"] if losses else []
    lead = verdict(order, "Yes: who is ahead does not depend on it", "For one rule it does, for the other not", "No")
    return f"{lead}. Last losses by weight decay, the same for all: {'; '.join(parts)}."


def _claims(found: dict[Case, Outcome]) -> list[Claim]:
    claims = []
    for method in (_SIGN, _MUON):
        pairs = {decay: (found.get((method, decay)), found.get((_ADAMW, decay))) for decay in _DECAYS}
        gaps = {decay: demo.mean - adamw.mean for decay, (demo, adamw) in pairs.items() if demo and adamw}
        if len(gaps) == len(_DECAYS):
            words = " and ".join(f"{gap:+.3f} at {decay:g}" for decay, gap in gaps.items())
            text = f"{method} and AdamW come in the same order at both weight decays (difference in loss: {words})"
            claims.append(Claim(text, min(gaps.values()) > 0 or max(gaps.values()) < 0))
    for method in _METHODS:
        without, decayed = (found.get((method, decay)) for decay in _DECAYS)
        if without is not None and decayed is not None and min(len(one.losses) for one in (without, decayed)) > 1:
            text = f"{method}: weight decay {_DECAYS[1]:g} changes the loss by {decayed.mean - without.mean:+.3f}"
            is_apart = is_below(decayed, without) or is_below(without, decayed)
            claims.append(Claim(f"{text}, and the seeds with it end apart from those without", is_apart))
    return claims


def _draw(rows: Sequence[Row], results: Path) -> dict[str, Drawing]:
    found = _outcomes(rows)
    page = Page()
    (axes,) = page.panels
    for index, method in enumerate(_METHODS):
        mine = [(decay, found[method, decay]) for decay in _DECAYS if (method, decay) in found]
        if mine:
            spread = [(min(one.losses), max(one.losses)) for _, one in mine]
            line(axes, [(decay, one.mean) for decay, one in mine], method, index, spread)
    axes.set_xticks(_DECAYS)
    room_for_labels(axes, 0.3)
    title(axes, "Each at its best learning rate", "weight decay", "validation loss (nats per byte)")
    return {
        "weight_decay.png": Drawing(
            page, "Last validation loss without and with weight decay; the band is the range over seeds."
        )
    }


STUDY = Study(
    "q6",
    "Weight decay",
    "Does the comparison with AdamW hold at equal weight decay?",
    find=_find,
    plan=_plan,
    draw=_draw,
)
