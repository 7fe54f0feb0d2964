"""hidden: is the muon rule for all parameters, or for the matrices between input and output alone?

The rest (`thinwire.hidden_and_rest`) has a rule of its own then, at a tenth of the learning rate.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from thinwire.options import RECOMMENDED_OPTIONS
from thinwire.studies.figure import Drawing, Page, dots_above_names, title
from thinwire.studies.q8_models import RATES, VIT
from thinwire.studies.search import ADAMW, AS_SEARCHED, DEMO, SEARCHED_WORDS, as_searched
from thinwire.studies.settings import DEMO_RULES, DENSE_RATES, text_trial
from thinwire.studies.study import MEDIUM, SIZES, SMALL, Claim, Finding, Study, table, verdict
from thinwire.studies.trials import Row, Trial
from thinwire.studies.tuning import Contender, Outcome, due, is_below, outcomes, seeds_for

_LLAMA, _GPT2, _VIT = "Llama", "GPT-2", VIT
# The second has biases and learned positions; the third patches, too, which are matrices in shape alone.
_MODELS = {SMALL: (_GPT2,), MEDIUM: (_LLAMA, _GPT2, _VIT)}
_ADAMW, _SEARCHED, _ONE = "AdamW", f"AdamW, {AS_SEARCHED}", "one rule"
_RESTS = {_ONE: "", "adamw for the rest": "adamw", "sign for the rest": "sign"}
_BEST = "adamw for the rest"
# For text all of DeMo's have balance and a linear fall; for images, where that does no good, this one alone.
_BEST_SEARCHED = f"{_BEST}, {AS_SEARCHED}"
_TRAINED = {SMALL: (_ADAMW, _ONE, _BEST), MEDIUM: (_ADAMW, _SEARCHED, *_RESTS)}

Case = tuple[str, str]
"""A model and a method."""


def _text(size: str, model: str, method: str) -> tuple[Trial, float]:
    """DeMo as is recommended for language models, but for the momentum's decay: runs are short."""
    shape = {"architecture": "gpt2"} if model == _GPT2 else {}
    if method in (_ADAMW, _SEARCHED):
        return _dense(text_trial(size, "adamw", settings=shape), method), DENSE_RATES[size]["adamw"]
    start = DEMO_RULES[size]["muon"]
    balanced = {**start.settings, "balance": RECOMMENDED_OPTIONS["balance"], "schedule": "linear"}
    return text_trial(size, settings={**shape, **balanced, **_rest(method)}), start.rate


def _images(method: str) -> tuple[Trial, float]:
    rates = RATES[VIT]
    if method in (_ADAMW, _SEARCHED):
        return _dense(Trial("vit", 4, "adamw"), method), rates["adamw"]
    rate = rates["muon rule" if method == _ONE else "muon rule, adamw for the rest"]
    if method == _BEST_SEARCHED:
        return as_searched(_images(_BEST)[0], DEMO), rate
    return Trial("vit", 4, "demo", {**DEMO_RULES[MEDIUM]["muon"].settings, **_rest(method)}), rate


def _dense(trial: Trial, method: str) -> Trial:
    return as_searched(trial, ADAMW) if method == _SEARCHED else trial


def _rest(method: str) -> dict[str, Any]:
    return {"rest_update": _RESTS[method]} if _RESTS[method] else {}


def _contenders(size: str) -> dict[Case, Contender]:
    found = {}
    for model in _MODELS[size]:
        for method in (*_TRAINED[size], *((_BEST_SEARCHED,) if model == _VIT else ())):
            trial, rate = _images(method) if model == _VIT else _text(size, model, method)
            found[model, method] = Contender(f"{model}, {method}", trial, rate)
    return found


def _plan(size: str, rows: Sequence[Row]) -> list[Trial]:
    return due(list(_contenders(size).values()), rows, size, seeds_for(size))


def _outcomes(rows: Sequence[Row]) -> dict[Case, Outcome]:
    """Of the larger size, if it was run."""
    for cases in (_contenders(size) for size in reversed(SIZES) if size in _MODELS):
        if found := outcomes(list(cases.values()), rows):
            return {case: found[one.name] for case, one in cases.items() if one.name in found}
    return {}


def _find(rows: Sequence[Row], results: Path) -> Finding:
    found = _outcomes(rows)
    lines = []
    for (model, method), one in found.items():
        shares = [row["accuracy"] for row in one.rows if row["accuracy"] is not None]
        right = f"{sum(shares) / len(shares):.1%}" if shares and model == _VIT else ""
        lines.append((model, method, one.words, right, f"{one.rate:g}", one.tries_words, str(len(one.losses))))
    heads = ("model", "method", "loss", "right answers", "learning rate", "rates tried", "seeds")
    words = (
        "The rest is all but the matrices between input and output. DeMo has the muon rule, k 64, and for text balance and "
        f"a linear fall; AdamW its usual settings, or others. {SEARCHED_WORDS}"
    )
    claims = _claims(found)
    return Finding(f"{table(heads, lines, 2)}\n\n{words}", claims, _answer(found, claims))


def _claims(found: dict[Case, Outcome]) -> list[Claim]:
    claims = []
    for model in dict.fromkeys(model for model, _ in found):
        for other, words in ((_ONE, "one rule for all"), (_ADAMW, _ADAMW), (_SEARCHED, _SEARCHED)):
            best, beside = found.get((model, _BEST)), found.get((model, other))
            if best is not None and beside is not None:
                text = f"the {model} ends below {words} with the rule {_BEST}: {best.mean:.3f} and {beside.mean:.3f}"
                claims.append(Claim(text, is_below(best, beside)))
    return claims


def _answer(found: dict[Case, Outcome], claims: Sequence[Claim]) -> str:
    if not claims:
        return ""
    lead = verdict(
        [claim for claim in claims if "one rule for all" in claim.text],
        "For hidden matrices alone: with a rule of its own for the rest every model ends lower",
        "It depends on the model: some end lower with a rule of its own for the rest, others do not",
        "It may be for all: no model ends lower with a rule of its own for the rest",
    )
    parts = []
    for model in dict.fromkeys(model for model, _ in found):
        mine = [f"{method} {one.mean:.3f}" for (of, method), one in found.items() if of == model]
        parts.append(f"{model}: {', '.join(mine)}")
    return f"{lead}. Last losses. {'. '.join(parts)}."


def _draw(rows: Sequence[Row], results: Path) -> dict[str, Drawing]:
    found = _outcomes(rows)
    models, methods = (list(dict.fromkeys(case[place] for case in found)) for place in (0, 1))
    page = Page(max(1, len(models)), height=3.6, columns=2)
    for axes, model in zip(page.panels, models, strict=False):
        dots_above_names(axes, {method: one.losses for (of, method), one in found.items() if of == model}, methods)
        title(axes, model, "", f"validation loss (nats per {'image' if model == _VIT else 'byte'})")
    return {"hidden.png": Drawing(page, "Last validation loss of every seed at the best learning rate, a panel per model.")}


STUDY = Study(
    "hidden",
    "A rule for the rest",
    "Is the muon rule for all parameters, or for the matrices between input and output alone?",
    find=_find,
    plan=_plan,
    draw=_draw,
    sizes=(SMALL, MEDIUM),
)
