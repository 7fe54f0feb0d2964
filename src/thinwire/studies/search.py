"""search: AdamW and DeMo, searched alike. One setting at a time, each with learning rates of its own.

DeMo's settings of the other studies were found by a search that AdamW did not have. Here it has one, too; and Muon, the
bound of DeMo's muon rule, has what the others gained by.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from thinwire.studies.figure import Drawing, Page, line, room_for_labels, rule, title
from thinwire.studies.settings import DEMO_RULES, DENSE_RATES, text_trial
from thinwire.studies.study import MEDIUM, SIZES, SMALL, Claim, Finding, Study, table
from thinwire.studies.trials import Row, Trial
from thinwire.studies.tuning import Contender, Outcome, due, is_below, outcomes

ADAMW, DEMO, MUON = "AdamW", "DeMo, muon rule", "Muon, averaged in full"
_DENSE = {ADAMW: "adamw", MUON: "muon"}
_AS_IT_IS = "as it is"
_NO_ERRORS = {"keeps_errors": False}
# What both have, and what is each one's own; k by the kind of layer, or by half of the steps, with about as many bytes. Last
# come the best of those together.
_SCHEDULES: tuple[dict[str, Any], ...] = (
    {"warmup_steps": 5},
    {"warmup_steps": 50},
    {"final_lr_share": 0.0},
    {"schedule": "linear"},
    {"clip": 0.0},
    {"weight_decay": 0.01},
    {"weight_decay": 0.1},
)
_ADAMW_BEST: dict[str, Any] = {"beta1": 0.8, "warmup_steps": 50, "schedule": "linear"}
_VARIED: dict[str, tuple[dict[str, Any], ...]] = {
    ADAMW: (
        *({"beta1": beta} for beta in (0.8, 0.7, 0.95)),
        *({"beta2": beta} for beta in (0.9, 0.95, 0.999)),
        *_SCHEDULES,
        {"beta1": 0.8, "warmup_steps": 50},
        {"beta1": 0.7, "warmup_steps": 50},
        _ADAMW_BEST,
        *({**_ADAMW_BEST, "beta2": beta} for beta in (0.95, 0.999)),
        {**_ADAMW_BEST, "beta1": 0.7},
        {**_ADAMW_BEST, "warmup_steps": 80},
        {**_ADAMW_BEST, "final_lr_share": 0.0},
        {**_ADAMW_BEST, "weight_decay": 0.1},
    ),
    DEMO: (
        *({"momentum_decay": decay} for decay in (0.9, 0.98)),
        *({"combine": combine} for combine in ("mean_over_senders", "majority_vote")),
        *({"values": values} for values in ("sign_scale", "int4")),
        _NO_ERRORS,
        {"values": "int4", **_NO_ERRORS},
        *({"topk_of": kinds} for kinds in ("attn=32,mlp=96", "attn=96,mlp=32", "embed=128")),
        *({"topk": first, "later_topk": then} for first, then in ((32, 96), (96, 32))),
        {"returned": 0.5},
        {"rest_update": "sign", "rest_lr": 4e-3},
        {"rest_update": "adamw"},
        *_SCHEDULES,
        {"values": "int4", "schedule": "linear"},
        {"topk": 96, "later_topk": 32, "schedule": "linear"},
        {"topk": 96, "later_topk": 32, "values": "int4", "schedule": "linear"},
        *({"balance": decay} for decay in (0.9, 0.95, 0.99)),
        {"balance": 0.95, "momentum_decay": 0.9},
        {"balance": 0.95, "schedule": "linear"},
        {"balance": 0.95, "schedule": "linear", "rest_update": "adamw"},
        {"balance": 0.95, "topk": 96, "later_topk": 32, "schedule": "linear"},
        {"balance": 0.95, "topk": 96, "later_topk": 32, "values": "int4", "schedule": "linear"},
    ),
    # Its betas are those of all but the hidden matrices.
    MUON: (
        {"beta1": 0.8},
        *_SCHEDULES,
        {"warmup_steps": 50, "schedule": "linear"},
        _ADAMW_BEST,
    ),
}
_OF_TRIALS = {one.name for one in fields(Trial)}
AS_SEARCHED = "as searched"
"""What other studies call the settings that were best here. They say what these are, in `SEARCHED_WORDS`."""
SEARCHED_WORDS = (
    "*As searched*: what was best of all that `search` tried with 200 steps of the smallest model: for AdamW a first beta "
    "of 0.8, two fifths of the steps of warm-up and a linear fall; for DeMo a balance of 0.95 and a linear fall. (Another "
    "rule for all but the hidden matrices was tried there later.)"
)
_BEST: dict[str, dict[str, Any]] = {
    ADAMW: {"beta1": 0.8, "schedule": "linear"},
    DEMO: {"balance": 0.95, "schedule": "linear"},
}
_BEST_WARMUP = {ADAMW: 0.4}
"""A share of the steps, where it is not the usual one."""


def base(size: str, method: str) -> tuple[Trial, float]:
    """Where a search begins, and the learning rate there."""
    if method in _DENSE:
        return text_trial(size, _DENSE[method]), DENSE_RATES[size][_DENSE[method]]
    start = DEMO_RULES[size]["muon"]
    return text_trial(size, settings=start.settings), start.rate


def changed(trial: Trial, what: Mapping[str, Any]) -> Trial:
    """The same training but for this: settings of the run, or of the trial."""
    settings = {name: value for name, value in what.items() if name not in _OF_TRIALS}
    others = {name: value for name, value in what.items() if name in _OF_TRIALS}
    return replace(trial, settings={**trial.settings, **settings}, **others)


def as_searched(trial: Trial, method: str) -> Trial:
    """The same training with the settings that were best here."""
    what = dict(_BEST[method])
    if method in _BEST_WARMUP:
        what["warmup_steps"] = int(trial.config.schedule.steps * _BEST_WARMUP[method])
    return changed(trial, what)


def words_for(what: Mapping[str, Any]) -> str:
    """What differs, as the configuration calls it."""
    return ", ".join(f"{name} {str(value).lower()}" for name, value in what.items()) or _AS_IT_IS


def contenders(size: str) -> dict[tuple[str, str], Contender]:
    """By method and what differs; as they are, first. In the small size each has one difference."""
    found = {}
    for method, varied in _VARIED.items():
        trial, rate = base(size, method)
        for what in ({}, *(varied[:1] if size == SMALL else varied)):
            found[method, words_for(what)] = Contender(f"{method}, {words_for(what)}", changed(trial, what), rate)
    return found


def _plan(size: str, rows: Sequence[Row]) -> list[Trial]:
    return due(list(contenders(size).values()), rows, size)


def _found(rows: Sequence[Row]) -> dict[str, dict[str, Outcome]]:
    """Of the largest size that was run, by method and what differs."""
    for known in map(contenders, reversed(SIZES)):
        if outcomes_by_name := outcomes(list(known.values()), rows):
            found: dict[str, dict[str, Outcome]] = {}
            for (method, what), one in known.items():
                if one.name in outcomes_by_name:
                    found.setdefault(method, {})[what] = outcomes_by_name[one.name]
            return found
    return {}


def _compared(one: Outcome, base: Outcome) -> str:
    """Every seed of the one beside every seed of the other."""
    return "lower" if is_below(one, base) else "higher" if is_below(base, one) else "alike"


def _find(rows: Sequence[Row], results: Path) -> Finding:
    lines = []
    for method, mine in _found(rows).items():
        base = mine.get(_AS_IT_IS)
        for what, one in sorted(mine.items(), key=lambda pair: pair[1].mean):
            beside = "" if base is None or one is base else f"{one.mean - base.mean:+.3f}, {_compared(one, base)}"
            sent = f"{one.rows[0]['sent_bytes']:,}"
            lines.append((method, what, one.words, beside, sent, f"{one.rate:g}", one.tries_words))
    heads = ("method", "what differs", "loss", "beside as it is", "bytes sent per step", "learning rate", "rates tried")
    words = (
        "*As it is*: as in the other studies. *Lower* and *higher*: every seed is, than every seed of the method as it is, "
        "which luck alone does to one in ten settings that are as good; else they are *alike*."
    )
    claims = _claims(_found(rows))
    return Finding(f"{table(heads, lines, 2)}\n\n{words}", claims, _answer(_found(rows), claims))


def _best(mine: Mapping[str, Outcome]) -> tuple[str, Outcome]:
    return min(mine.items(), key=lambda pair: pair[1].mean)


def _whole(found: Mapping[str, Mapping[str, Outcome]]) -> list[tuple[str, Mapping[str, Outcome]]]:
    """Those that were also trained as they are."""
    return [(method, mine) for method, mine in found.items() if _AS_IT_IS in mine]


def _claims(found: Mapping[str, Mapping[str, Outcome]]) -> list[Claim]:
    if any(_AS_IT_IS not in found.get(method, {}) for method in (ADAMW, DEMO)):
        return []
    (what, best), (our_what, our_best) = _best(found[ADAMW]), _best(found[DEMO])
    theirs = f"AdamW at the best of {len(found[ADAMW])} settings"
    ours = f"DeMo at the best of {len(found[DEMO])} settings"
    claims = [
        Claim(f"{one} ends below {theirs} ({mine.mean:.3f} and {best.mean:.3f}){details}; {what}", is_below(mine, best))
        for one, mine, details in (
            (ours, our_best, f"; {our_what}"),
            ("DeMo as it is", found[DEMO][_AS_IT_IS], ""),
        )
    ]
    if MUON in found:
        muon_what, muon = _best(found[MUON])
        bound = f"{MUON}, at the best of {len(found[MUON])} settings"
        text = f"{ours} ends below {bound} ({our_best.mean:.3f} and {muon.mean:.3f}); {muon_what}"
        claims.append(Claim(text, is_below(our_best, muon)))
    for method, mine in _whole(found):
        lower = [what for what, one in mine.items() if is_below(one, mine[_AS_IT_IS])]
        others = f"; these do: {'; '.join(lower)}" if lower else ""
        claims.append(Claim(f"no other setting of {method} ends below it as it is{others}", not lower))
    for with_errors, without in (
        (_AS_IT_IS, words_for(_NO_ERRORS)),
        ("values int4", f"values int4, {words_for(_NO_ERRORS)}"),
    ):
        if with_errors in found[DEMO] and without in found[DEMO]:
            kept, dropped = found[DEMO][with_errors], found[DEMO][without]
            bits = "4 bits" if "int4" in without else "1 bit"
            text = f"with {bits}, keeping what the codec rounds away lowers the loss by {dropped.mean - kept.mean:.3f}"
            claims.append(Claim(text, is_below(kept, dropped)))
    return claims


def _answer(found: Mapping[str, Mapping[str, Outcome]], claims: Sequence[Claim]) -> str:
    if not claims:
        return ""
    parts = []
    for method, mine in _whole(found):
        what, best = _best(mine)
        parts.append(f"{method} {mine[_AS_IT_IS].mean:.3f} as it is, {best.mean:.3f} with {what}, the best of {len(mine)}")
    searched, as_it_is = claims[:2]
    lead = "If both are searched it does" if searched.holds else "It does not, even if both are searched"
    if searched.holds:
        lead += (
            ", and as it is in the other studies, too"
            if as_it_is.holds
            else "; as it is in the other studies, it ends above AdamW searched"
        )
    return f"{lead}. Last losses: {'; '.join(parts)}."


def _draw(rows: Sequence[Row], results: Path) -> dict[str, Drawing]:
    page = Page(width=7.0)
    (axes,) = page.panels
    for index, (method, mine) in enumerate(_found(rows).items()):
        ordered = sorted(mine.values(), key=lambda one: one.mean)
        spread = [(min(one.losses), max(one.losses)) for one in ordered]
        line(axes, [(place, one.mean) for place, one in enumerate(ordered, 1)], method, index, spread)
        if _AS_IT_IS in mine:
            rule(axes, mine[_AS_IT_IS].mean, f"{method}, {_AS_IT_IS}")
    room_for_labels(axes, 0.2)
    title(axes, "Settings of each, the best first", "settings", "validation loss (nats per byte)")
    caption = (
        "Last validation loss with one setting changed at a time, or a few together, each at its best learning rate; the "
        "band is the range over seeds."
    )
    return {"search.png": Drawing(page, caption)}


STUDY = Study(
    "search",
    "Both searched alike",
    "Does DeMo stay ahead of AdamW if AdamW's settings are searched, too, and which of DeMo's matter?",
    find=_find,
    plan=_plan,
    draw=_draw,
    sizes=(SMALL, MEDIUM),
)
