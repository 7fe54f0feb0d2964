"""length: do the settings that a search found for short runs matter in longer ones? Both methods have three, and all rates.

What AdamW gains from a shorter memory, or DeMo from balance, may be a matter of how long a run is.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from thinwire.studies.figure import Drawing, Page, line, logarithmic, room_for_labels, rule, title
from thinwire.studies.search import ADAMW, AS_SEARCHED, DEMO, SEARCHED_WORDS, as_searched, base, changed
from thinwire.studies.study import MEDIUM, Claim, Finding, Study, table, verdict
from thinwire.studies.trials import Row, Trial
from thinwire.studies.tuning import Contender, Outcome, due, is_below, outcomes

_STEPS = (200, 500, 1250)
_AS_IT_IS = "as it is"
# What the search found to matter most.
_ONE_DIFFERENCE: dict[str, tuple[str, dict[str, Any]]] = {
    ADAMW: ("beta1 0.8", {"beta1": 0.8}),
    DEMO: ("balance 0.95", {"balance": 0.95}),
}
_SETTINGS = {method: (_AS_IT_IS, words, AS_SEARCHED) for method, (words, _) in _ONE_DIFFERENCE.items()}

Found = Mapping[int, Mapping[str, Mapping[str, Outcome]]]
"""By the number of steps, the method and its settings."""


def contenders() -> dict[tuple[int, str, str], Contender]:
    """By the number of steps, the method and its settings."""
    found = {}
    for steps in _STEPS:
        for method, (words, difference) in _ONE_DIFFERENCE.items():
            trial, rate = base(MEDIUM, method)
            trial = changed(trial, {"steps": steps, "warmup_steps": steps // 10, "eval_every": steps // 4})
            trials = (trial, changed(trial, difference), as_searched(trial, method))
            for name, one in zip((_AS_IT_IS, words, AS_SEARCHED), trials, strict=True):
                found[steps, method, name] = Contender(f"{steps} steps, {method}, {name}", one, rate)
    return found


def _plan(size: str, rows: Sequence[Row]) -> list[Trial]:
    return due(list(contenders().values()), rows, size)


def _found(rows: Sequence[Row]) -> Found:
    known = contenders()
    by_name = outcomes(list(known.values()), rows)
    found: dict[int, dict[str, dict[str, Outcome]]] = {}
    for (steps, method, words), one in known.items():
        if one.name in by_name:
            found.setdefault(steps, {}).setdefault(method, {})[words] = by_name[one.name]
    return found


def _whole(mine: Mapping[str, Outcome]) -> dict[str, Outcome]:
    """Those that have as many seeds as any: one seed alone may be a lucky one."""
    most = max(len(one.losses) for one in mine.values())
    return {words: one for words, one in mine.items() if len(one.losses) == most}


def _best(mine: Mapping[str, Outcome]) -> tuple[str, Outcome]:
    return min(_whole(mine).items(), key=lambda pair: pair[1].mean)


def _find(rows: Sequence[Row], results: Path) -> Finding:
    found = _found(rows)
    lines = []
    for steps, by_method in found.items():
        usual = by_method.get(ADAMW, {}).get(_AS_IT_IS)
        for method, mine in by_method.items():
            for words, one in mine.items():
                gap = "" if usual is None or one is usual else f"{one.mean - usual.mean:+.3f}"
                sent = f"{one.rows[0]['sent_bytes']:,}"
                tried = (f"{one.rate:g}", one.tries_words, str(len(one.losses)))
                lines.append((f"{steps:,}", method, words, one.words, gap, sent, *tried))
    heads = (
        "steps",
        "method",
        "settings",
        "loss",
        "beside AdamW as it is",
        "bytes sent per step",
        "learning rate",
        "rates tried",
        "seeds",
    )
    words = f"*As it is*: as in the other studies. {SEARCHED_WORDS}"
    claims = _claims(found)
    return Finding(f"{table(heads, lines, 3)}\n\n{words}", claims, _answer(found, claims))


def _claims(found: Found) -> list[Claim]:
    """Of every length: the best of each, and whether the settings that were found are better than the usual ones."""
    claims = []
    for steps, by_method in found.items():
        if any(len(by_method.get(method, {})) < len(settings) for method, settings in _SETTINGS.items()):
            continue
        (what, theirs), (our_what, ours) = _best(by_method[ADAMW]), _best(by_method[DEMO])
        text = f"{steps:,} steps: the best of DeMo's three ({our_what}) ends below the best of AdamW's ({what})"
        claims.append(Claim(f"{text} ({ours.mean:.3f} and {theirs.mean:.3f})", is_below(ours, theirs)))
        for method, mine in by_method.items():
            if len(mine[AS_SEARCHED].losses) < len(mine[_AS_IT_IS].losses):
                continue
            gap = mine[AS_SEARCHED].mean - mine[_AS_IT_IS].mean
            text = f"{steps:,} steps: {method} as searched ends below {method} as it is ({gap:+.3f})"
            claims.append(Claim(text, is_below(mine[AS_SEARCHED], mine[_AS_IT_IS])))
    return claims


def _answer(found: Found, claims: Sequence[Claim]) -> str:
    if not claims:
        return ""
    lead = verdict(
        [claim for claim in claims if "the best of DeMo's" in claim.text],
        "With as many settings and rates for both, DeMo is ahead of AdamW at every length",
        "With as many settings and rates for both, DeMo is ahead of AdamW at some lengths, not at all of them",
        "With as many settings and rates for both, DeMo is ahead of AdamW at no length",
    )
    parts = []
    for method, settings in _SETTINGS.items():
        for words in settings:
            known = [mine[words] for by_method in found.values() if words in (mine := by_method.get(method, {}))]
            most = max((len(one.losses) for one in known), default=0)
            losses = (f"{one.mean:.3f}{' (one seed)' if len(one.losses) < most else ''}" for one in known)
            parts.append(f"{method} {words} {', '.join(losses)}")
    return f"{lead}. Last losses after {', '.join(f'{steps:,}' for steps in found)} steps: {'; '.join(parts)}."


def _draw(rows: Sequence[Row], results: Path) -> dict[str, Drawing]:
    usual = {steps: by_method[ADAMW][_AS_IT_IS].mean for steps, by_method in _found(rows).items() if ADAMW in by_method}
    page = Page()
    (axes,) = page.panels
    names = [(method, words) for method, settings in _SETTINGS.items() for words in settings]
    for index, (method, words) in enumerate(names[1:]):
        points, spread = [], []
        for steps, by_method in _found(rows).items():
            if steps in usual and words in by_method.get(method, {}):
                one = by_method[method][words]
                points.append((steps, one.mean - usual[steps]))
                spread.append((min(one.losses) - usual[steps], max(one.losses) - usual[steps]))
        if points:
            line(axes, points, f"{method}, {words}", index, spread)
    rule(axes, 0.0, f"{ADAMW}, {_AS_IT_IS}")
    logarithmic(axes, sorted(usual), "")
    room_for_labels(axes, 0.6)
    title(axes, "Loss beside AdamW's, by the length of the run", "steps", "difference (nats per byte)")
    caption = (
        "Last validation loss less the mean of AdamW as it is, each at its best learning rate; the band is the range over "
        "seeds."
    )
    return {"length.png": Drawing(page, caption)}


STUDY = Study(
    "length",
    "Longer runs",
    "Do the settings that were best in short runs, AdamW's and DeMo's, matter as much in longer ones?",
    find=_find,
    plan=_plan,
    draw=_draw,
    sizes=(MEDIUM,),
)
