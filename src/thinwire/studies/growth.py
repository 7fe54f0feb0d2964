"""growth: does what a very small model says hold for larger ones? The same comparison with models of three sizes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from thinwire.studies.basis import PLAIN, BasisTrial
from thinwire.studies.figure import Drawing, Page, line, logarithmic, room_for_labels, rule, title
from thinwire.studies.search import ADAMW, AS_SEARCHED, DEMO, SEARCHED_WORDS, as_searched
from thinwire.studies.settings import DEMO_RULES, text_trial
from thinwire.studies.study import MEDIUM, SMALL, Claim, Finding, Study, table, verdict
from thinwire.studies.trials import Row, Trial
from thinwire.studies.tuning import Contender, Outcome, due, is_below, outcomes, seeds_for

# As many bytes for all, a step of 16 sequences; no text is seen twice.
_LENGTHS: dict[str, dict[str, Any]] = {
    SMALL: {"steps": 60, "warmup_steps": 6, "eval_every": 60, "eval_examples": 64},
    MEDIUM: {"steps": 250, "warmup_steps": 25, "eval_every": 125, "eval_examples": 256},
}
_MODELS: dict[str, dict[str, Any]] = {
    "0.2 M": {"layers": 2, "width": 96, "heads": 2, "mlp_width": 192},
    "0.9 M": {"layers": 4, "width": 128, "heads": 4, "mlp_width": 384},
    "3.3 M": {"layers": 4, "width": 256, "heads": 4, "mlp_width": 704},
}
_TRAINED = {SMALL: ("0.2 M", "0.9 M"), MEDIUM: tuple(_MODELS)}
_ADAMW, _BRIEF, _MUON, _DEMO_MUON = "AdamW", "AdamW, beta1 0.8", "Muon, averaged in full", "DeMo, muon rule"
_SIGN, _WITHOUT = "DeMo, sign rule", "DeMo, sign rule, no transform"
_ADAMW_SEARCHED, _DEMO_SEARCHED = f"AdamW, {AS_SEARCHED}", f"DeMo, muon rule, {AS_SEARCHED}"
# Where the search for a learning rate begins, by the model.
_RATES: dict[str, dict[str, float]] = {
    _ADAMW: {"0.2 M": 2e-3, "0.9 M": 2e-3, "3.3 M": 1e-3},
    _BRIEF: {"0.2 M": 2e-3, "0.9 M": 2e-3, "3.3 M": 1e-3},
    _ADAMW_SEARCHED: {"0.2 M": 2e-3, "0.9 M": 2e-3, "3.3 M": 1e-3},
    _MUON: {"0.2 M": 2e-2, "0.9 M": 1e-2, "3.3 M": 1e-2},
    _DEMO_MUON: {"0.2 M": 8e-2, "0.9 M": 4e-2, "3.3 M": 4e-2},
    _DEMO_SEARCHED: {"0.2 M": 8e-2, "0.9 M": 8e-2, "3.3 M": 4e-2},
    _SIGN: {"0.2 M": 4e-3, "0.9 M": 2e-3, "3.3 M": 1e-3},
    _WITHOUT: {"0.2 M": 4e-3, "0.9 M": 2e-3, "3.3 M": 1e-3},
}
_METHODS: dict[str, tuple[str, str, str]] = {
    _ADAMW: ("adamw", "", ""),
    _BRIEF: ("adamw", "", ""),
    _ADAMW_SEARCHED: ("adamw", "", ""),
    _MUON: ("muon", "", ""),
    _DEMO_MUON: ("demo", "muon", "DCT"),
    _DEMO_SEARCHED: ("demo", "muon", "DCT"),
    _SIGN: ("demo", "sign", "DCT"),
    _WITHOUT: ("demo", "sign", "identity"),
}
"""Of each: the optimizer, and DeMo's rule and basis."""

Found = Mapping[str, Mapping[str, Outcome]]
"""By the model and the method."""


def _trial(size: str, model: str, method: str) -> Trial:
    optimizer, update, basis = _METHODS[method]
    settings = {"sequence": 128, "batch": 16, **_LENGTHS[size], **_MODELS[model]}
    if method == _ADAMW_SEARCHED:
        return as_searched(text_trial(MEDIUM, optimizer, settings=settings), ADAMW)
    if method == _DEMO_SEARCHED:
        return as_searched(text_trial(MEDIUM, settings={**settings, **DEMO_RULES[MEDIUM][update].settings}), DEMO)
    if optimizer != "demo":
        return text_trial(MEDIUM, optimizer, settings={**settings, **({"beta1": 0.8} if method == _BRIEF else {})})
    trial = text_trial(MEDIUM, settings={**settings, **DEMO_RULES[MEDIUM][update].settings, **PLAIN})
    return BasisTrial(**vars(trial), basis=basis)


def contenders(size: str) -> dict[tuple[str, str], Contender]:
    """By model and method."""
    return {
        (model, method): Contender(f"{model}, {method}", _trial(size, model, method), rates[model])
        for model in _TRAINED[size]
        for method, rates in _RATES.items()
    }


def _plan(size: str, rows: Sequence[Row]) -> list[Trial]:
    return due(list(contenders(size).values()), rows, size, seeds_for(size))


def _found(rows: Sequence[Row]) -> dict[str, dict[str, Outcome]]:
    """Of the larger size, if it was run."""
    found: dict[str, dict[str, Outcome]] = {}
    for size in (MEDIUM, SMALL):
        known = contenders(size)
        by_name = outcomes(list(known.values()), rows)
        for (model, method), one in known.items():
            if one.name in by_name:
                found.setdefault(model, {})[method] = by_name[one.name]
        if found:
            break
    return found


def _find(rows: Sequence[Row], results: Path) -> Finding:
    found = _found(rows)
    lines = []
    for model, by_method in found.items():
        adamw = by_method.get(_ADAMW)
        for method, one in by_method.items():
            gap = "" if adamw is None or one is adamw else f"{one.mean - adamw.mean:+.3f}"
            lines.append((model, method, one.words, gap, f"{one.rows[0]['sent_bytes']:,}", f"{one.rate:g}", one.tries_words))
    heads = ("parameters", "method", "loss", "beside AdamW", "bytes sent per step", "learning rate", "rates tried")
    words = "All see the same text, none of it twice. DeMo decodes in floating point here, since other bases do."
    claims = _claims(found)
    return Finding(f"{table(heads, lines, 2)}\n\n{words} {SEARCHED_WORDS}", claims, _answer(found, claims))


def _claims(found: Found) -> list[Claim]:
    pairs = (
        (_DEMO_SEARCHED, _ADAMW_SEARCHED),
        (_DEMO_MUON, _ADAMW),
        (_DEMO_MUON, _BRIEF),
        (_SIGN, _ADAMW),
        (_SIGN, _WITHOUT),
    )
    claims = []
    for one, other in pairs:
        for model, by_method in found.items():
            if one in by_method and other in by_method:
                gap = by_method[one].mean - by_method[other].mean
                text = f"{model} parameters: {one} ends below {other} ({gap:+.3f})"
                claims.append(Claim(text, is_below(by_method[one], by_method[other])))
    return claims


def _answer(found: Found, claims: Sequence[Claim]) -> str:
    if not claims:
        return ""
    ahead = [claim for claim in claims if f"{_DEMO_SEARCHED} ends below" in claim.text]
    lead = verdict(
        ahead or [claim for claim in claims if f"{_DEMO_MUON} ends below" in claim.text],
        "The muon rule is ahead of AdamW at every size",
        "The muon rule is ahead of AdamW at some sizes, or with one of its settings",
        "The muon rule is ahead of AdamW at no size",
    )
    lead += ", each with the settings that a search of the smallest found" if ahead else ""
    parts = []
    for method in _METHODS:
        losses = [f"{by_method[method].mean:.3f}" for by_method in found.values() if method in by_method]
        parts.append(f"{method} {', '.join(losses)}")
    return f"{lead}. Last losses with {', '.join(found)} parameters: {'; '.join(parts)}."


def _draw(rows: Sequence[Row], results: Path) -> dict[str, Drawing]:
    found = {model: by_method for model, by_method in _found(rows).items() if _ADAMW in by_method}
    page = Page()
    (axes,) = page.panels
    for index, method in enumerate(name for name in _METHODS if name != _ADAMW):
        points, spread = [], []
        for by_method in found.values():
            if method in by_method:
                one, adamw = by_method[method], by_method[_ADAMW].mean
                points.append((one.rows[0]["parameters"] / 1e6, one.mean - adamw))
                spread.append((min(one.losses) - adamw, max(one.losses) - adamw))
        if points:
            line(axes, points, method, index, spread)
    rule(axes, 0.0, _ADAMW)
    logarithmic(axes, [0.2, 0.5, 1, 2, 5], " M")
    room_for_labels(axes, 0.6)
    title(axes, "Loss beside AdamW's, by the size of the model", "parameters", "difference (nats per byte)")
    caption = "Last validation loss less AdamW's mean, each at its best learning rate; the band is the range over seeds."
    return {"growth.png": Drawing(page, caption)}


STUDY = Study(
    "growth",
    "Larger models",
    "Does what a very small model says hold for larger ones, and what does the cosine transform buy there?",
    find=_find,
    plan=_plan,
    draw=_draw,
    sizes=(SMALL, MEDIUM),
)
