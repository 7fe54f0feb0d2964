"""q8: only language models? A vision transformer and a convolutional network beside the language model.

The muon rule sees the weights of a convolution as a matrix of ``out x (in * kernel)``; dense Muon (torch's) takes matrices
alone, so that the convolutional network has none. Its batch norms see the batch of a replica with DeMo, and that of all with
AdamW; in the simulator all replicas share one set of running statistics.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.options import RECOMMENDED_OPTIONS
from thinwire.studies.figure import Drawing, Page, dots_above_names, title
from thinwire.studies.search import ADAMW, SEARCHED_WORDS, as_searched
from thinwire.studies.settings import DEMO_RULES, DENSE_RATES, Start, text_trial
from thinwire.studies.study import FULL, MEDIUM, SIZES, SMALL, Claim, Finding, Study, table, verdict
from thinwire.studies.trials import Row, Trial
from thinwire.studies.tuning import Contender, Outcome, due, outcomes, seeds_for

LANGUAGE, VIT, CNN = "language model", "vision transformer", "convolutional network"
# Images of digits, by the trainer's recipes; fewer steps in the small size.
_RECIPES = {VIT: "vit", CNN: "cnn"}
_STEPS: dict[str, dict[str, dict[str, Any]]] = {
    SMALL: {
        VIT: {"steps": 120, "warmup_steps": 12, "eval_every": 40},
        CNN: {"steps": 80, "warmup_steps": 8, "eval_every": 20},
    },
    MEDIUM: {VIT: {}, CNN: {}},
    FULL: {VIT: {}, CNN: {}},
}
_SIGN, _MUON, _BALANCED, _HIDDEN = "sign rule", "muon rule", "muon rule, balanced", "muon rule, adamw for the rest"
_DEMO = (_SIGN, _MUON, _BALANCED, _HIDDEN)
_SEARCHED = "adamw, as searched"
# A convolutional network has no hidden matrices in the sense of the last.
RATES: dict[str, dict[str, float]] = {
    VIT: {"adamw": 2e-3, _SEARCHED: 2e-3, "muon": 4e-3, _SIGN: 2e-3, _MUON: 4e-2, _BALANCED: 4e-2, _HIDDEN: 2e-2},
    CNN: {"adamw": 4e-3, _SEARCHED: 4e-3, _SIGN: 2e-3, _MUON: 4e-2, _BALANCED: 4e-2},
}
"""Where the search for a learning rate begins, with images."""
_BALANCE = RECOMMENDED_OPTIONS["balance"]
_REPLICAS = 4
# Of 359 images that decide an accuracy, this share is three of them.
_SAME_ACCURACY = 0.01


class Case(NamedTuple):
    """A contender, and the model that it trains."""

    model: str
    method: str
    contender: Contender


def _rules(size: str) -> dict[str, Start]:
    """DeMo's methods and their settings."""
    sign, muon = (DEMO_RULES[size][rule] for rule in ("sign", "muon"))
    plain = {name: value for name, value in muon.settings.items() if name != "balance"}
    return {
        _SIGN: sign,
        _MUON: Start(muon.rate, plain),
        _BALANCED: Start(muon.rate, {**plain, "balance": _BALANCE}),
        _HIDDEN: Start(muon.rate, {**plain, "rest_update": "adamw"}),
    }


def _cases(size: str) -> list[Case]:
    rules = _rules(size)
    found = [(LANGUAGE, method, text_trial(size, method), DENSE_RATES[size][method]) for method in ("adamw", "muon")]
    found.insert(1, (LANGUAGE, _SEARCHED, as_searched(text_trial(size, "adamw"), ADAMW), DENSE_RATES[size]["adamw"]))
    for method, start in rules.items():
        found.append((LANGUAGE, method, text_trial(size, settings=start.settings), start.rate))
    for model, rates in RATES.items():
        for method, rate in rates.items():
            optimizer, settings = ("demo", rules[method].settings) if method in rules else (method.split(",")[0], {})
            trial = Trial(_RECIPES[model], _REPLICAS, optimizer, {**_STEPS[size][model], **settings})
            trial = as_searched(trial, ADAMW) if method == _SEARCHED else trial
            found.append((model, method, trial, rate))
    return [Case(model, method, Contender(f"{model}, {_word(method)}", trial, rate)) for model, method, trial, rate in found]


def _word(method: str) -> str:
    return {"adamw": "AdamW", _SEARCHED: "AdamW, as searched", "muon": "dense Muon"}.get(method, f"DeMo, {method}")


def _plan(size: str, rows: Sequence[Row]) -> list[Trial]:
    return due([case.contender for case in _cases(size)], rows, size, seeds_for(size))


def _outcomes(rows: Sequence[Row]) -> dict[str, dict[str, Outcome]]:
    """By model and method; of the size of which most is known, since models of images are the same in two sizes."""
    by_size = {size: outcomes([case.contender for case in _cases(size)], rows) for size in reversed(SIZES)}
    size = max(by_size, key=lambda size: len(by_size[size]))
    found: dict[str, dict[str, Outcome]] = {LANGUAGE: {}, VIT: {}, CNN: {}}
    for case in _cases(size):
        if case.contender.name in by_size[size]:
            found[case.model][case.method] = by_size[size][case.contender.name]
    return found


def accuracy(outcome: Outcome) -> float | None:
    """Mean over seeds; None for a language model."""
    found = [row["accuracy"] for row in outcome.rows if row["accuracy"] is not None]
    return statistics.mean(found) if found else None


def _find(rows: Sequence[Row], results: Path) -> Finding:
    found, lines = _outcomes(rows), []
    for model, methods in found.items():
        for method, one in methods.items():
            share, sent = accuracy(one), one.rows[0]["sent_bytes"]
            right = "" if share is None or model == LANGUAGE else f"{share:.1%}"
            times = f"{2 * one.rows[0]['parameters'] / sent:.0f}" if method in _DEMO else ""
            lines.append((model, _word(method), one.words, right, f"{sent:,}", times, f"{one.rate:g}", one.tries_words))
    head = ("model", "method", "loss", "accuracy", "sent bytes", "times fewer than bfloat16", "learning rate", "rates tried")
    claims = [claim for model in (VIT, CNN) for claim in _claims(model, found[model])]
    text = f"{table(head, lines)}\n\n{SEARCHED_WORDS}"
    return Finding(text, claims, _answer(found, claims))


def _answer(found: dict[str, dict[str, Outcome]], claims: Sequence[Claim]) -> str:
    if not claims:
        return ""
    parts = []
    for model, methods in found.items():
        shares = {method: None if model == LANGUAGE else accuracy(one) for method, one in methods.items()}
        words = [
            f"{_word(method)} {one.mean:.3f}" if shares[method] is None else f"{_word(method)} {shares[method]:.1%}"
            for method, one in methods.items()
        ]
        if not words:
            continue
        parts.append(f"{model.capitalize()} ({'loss' if model == LANGUAGE else 'right answers'}): {', '.join(words)}")
    same = [claim for claim in claims if "as accurate" in claim.text]
    lead = verdict(same, "No, also for images", "For some models of images as well", "Here it is behind AdamW on images")
    return f"{lead}. {'. '.join(parts)}."


def _claims(model: str, methods: dict[str, Outcome]) -> list[Claim]:
    claims = []
    for rule in _DEMO:
        for dense in (name for name in ("adamw", _SEARCHED) if rule in methods and name in methods):
            mine, theirs = accuracy(methods[rule]) or 0.0, accuracy(methods[dense]) or 0.0
            text = f"the {model} is as accurate with DeMo ({rule}) as with {_word(dense)}, to 1 %: {mine:.1%} against"
            claims.append(Claim(f"{text} {theirs:.1%}", mine > theirs - _SAME_ACCURACY))
    if {_SIGN, _MUON} <= methods.keys():
        sign, muon = methods[_SIGN], methods[_MUON]
        text = (
            f"the {model}'s loss is not larger with the muon rule than with the sign rule: {muon.words} against {sign.words}"
        )
        claims.append(Claim(text, muon.mean <= sign.mean))
    if {_MUON, _BALANCED} <= methods.keys():
        plain, balanced = methods[_MUON], methods[_BALANCED]
        text = f"balance lowers the {model}'s mean loss with the muon rule: {balanced.words} against {plain.words}"
        claims.append(Claim(text, balanced.mean < plain.mean))
    return claims


def _draw(rows: Sequence[Row], results: Path) -> dict[str, Drawing]:
    found = {model: methods for model, methods in _outcomes(rows).items() if methods}
    page = Page(max(1, len(found)), height=3.6, columns=2)
    names = [_word(method) for method in dict.fromkeys(method for methods in found.values() for method in methods)]
    for axes, (model, methods) in zip(page.panels, found.items(), strict=False):
        dots_above_names(axes, {_word(method): one.losses for method, one in methods.items()}, names)
        unit = "nats per byte" if model == LANGUAGE else "nats per image"
        title(axes, model.capitalize(), "", f"validation loss ({unit})")
    return {"models.png": Drawing(page, "Last validation loss of every seed at the best learning rate, a panel per model.")}


STUDY = Study(
    "q8",
    "Other models",
    "Does it work for language models only? A vision transformer and a convolutional network, on images of digits.",
    find=_find,
    plan=_plan,
    draw=_draw,
)
