"""recipe: which settings of DeMo beat tuned AdamW at equal tokens, with at least 100 times fewer bytes sent?

Both are searched alike: as many settings of each with one seed for 500 steps, the best of them for 2,000. AdamW then has
what was best at each length; DeMo has the same settings everywhere, those that were best at 2,000 and that we recommend.
Both are tuned as any other contender. What was tried before that is in the rows, and so in the log of the summary.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from thinwire.studies.figure import Drawing, Page, dots_above_names, title
from thinwire.studies.search import changed, words_for
from thinwire.studies.settings import DEMO_RULES, DENSE_RATES, PILOT, Start, text_trial
from thinwire.studies.study import FULL, SMALL, Claim, Finding, Study, table, verdict
from thinwire.studies.trials import Row, Trial
from thinwire.studies.tuning import FACTORS, SEEDS, Contender, Outcome, due, is_below, outcome, outcomes

_LEAST_RATIO = 100


def _length(steps: int, batch: int) -> dict[str, Any]:
    """Of a training; ``batch`` sequences of all replicas together. Of the standard library alone, some 10 MB, 2,000 steps
    would see so much again that every method's validation loss grows in the end."""
    return {
        "steps": steps,
        "batch": batch,
        "warmup_steps": steps // 10,
        "eval_every": steps // 5,
        "dataset": "packages",
    }


_SHORT, _LONGER, _LONGEST, _GPT2 = "500 steps", "2,000 steps", "5,000 steps", "GPT-2, 500 steps"
# Lengths as in the pilot, and another family of models: learned positions, biases, layer norms, no gates.
_SET_UPS: dict[str, dict[str, Any]] = {
    _SHORT: _length(500, 128),
    _LONGER: _length(2000, 64),
    _LONGEST: _length(5000, 64),
    _GPT2: {**_length(500, 128), "architecture": "gpt2", "mlp_width": 2048},
}
_ADAMW, _MUON, _DEMO, _SIGN = "AdamW", "Muon, averaged in full", "DeMo, muon rule", "DeMo, sign rule"
# As they were before they were searched, and the learning rate there.
_BASES: dict[str, Start] = {
    _ADAMW: Start(DENSE_RATES[FULL]["adamw"], {}),
    _DEMO: Start(4e-2, {"update": "muon", "topk": 64, "momentum_decay": 0.98, "combine": "mean_over_replicas"}),
    _MUON: Start(DENSE_RATES[FULL]["muon"], {}),
    _SIGN: Start(1e-3, {"update": "sign", "topk": 64, "momentum_decay": 0.99}),
}
_OPTIMIZERS = {_ADAMW: "adamw", _MUON: "muon"}
# ``warmup`` is a share of the steps.
_LINEAR, _SLOW = {"schedule": "linear"}, {"warmup": 0.25}
_BRIEF, _BALANCED, _FALLING = {"beta1": 0.8}, {"balance": 0.95}, {"topk": 96, "later_topk": 32}
_BALANCED_TOO = "DeMo, muon rule, balanced, linear fall"
_SEARCHED_ADAMW, _RECOMMENDED, _RECOMMENDED_SETTINGS = "AdamW, searched", "DeMo, recommended", {**_BALANCED, **_LINEAR}
_SEARCHED: dict[str, tuple[dict[str, Any], ...]] = {
    _ADAMW: (
        _BRIEF,
        {"beta1": 0.7},
        {"beta2": 0.999},
        {"weight_decay": 0.1},
        _SLOW,
        _LINEAR,
        {**_BRIEF, **_SLOW},
        {**_BRIEF, **_LINEAR},
        {**_BRIEF, **_SLOW, **_LINEAR},
    ),
    _DEMO: (
        _BALANCED,
        {"balance": 0.99},
        {**_BALANCED, "momentum_decay": 0.95},
        {**_BALANCED, **_SLOW},
        _RECOMMENDED_SETTINGS,
        {**_BALANCED, **_FALLING},
        {**_BALANCED, **_FALLING, **_LINEAR},
        {**_FALLING, **_LINEAR},
        _LINEAR,
    ),
}
_MOST_LONGER = 4
"""How many of them are tried for 2,000 steps, too."""
_FOUND_AT = {_SHORT: _SHORT, _LONGER: _LONGER, _LONGEST: _LONGER, _GPT2: _SHORT}
"""Where AdamW's settings were found with which a set-up is trained."""


def _trial(set_up: str, method: str, what: Mapping[str, Any]) -> Trial:
    """Of 26 million parameters."""
    settings = {**PILOT, **_BASES[method].settings, **_SET_UPS[set_up]}
    what = dict(what)
    if "warmup" in what:
        what["warmup_steps"] = int(settings["steps"] * what.pop("warmup"))
    return changed(Trial("gpt-small", 4, _OPTIMIZERS.get(method, "demo"), settings), what)


def _contender(set_up: str, method: str, what: Mapping[str, Any], name: str, rate: float = 0.0) -> Contender:
    return Contender(name, _trial(set_up, method, what), rate or _BASES[method].rate)


def _tries(set_up: str, method: str, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """What is to be tried there; nothing yet where it depends on what was not tried before."""
    if set_up == _SHORT:
        return [{}, *_SEARCHED[method]]
    best = _ranked(_SHORT, method, rows)
    return [{}, *[what for what in best if what][:_MOST_LONGER]] if best else []


def _ranked(set_up: str, method: str, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """All that was to be tried, the best with one seed and the usual rate first; nothing unless all was."""
    found = []
    for what in _tries(set_up, method, rows):
        trial = _first(set_up, method, what)
        loss = next((row["loss"] or float("inf") for row in rows if row["trial"] == trial.facts), None)
        if loss is None:
            return []
        found.append((loss, what))
    return [what for _, what in sorted(found, key=lambda pair: pair[0])]


def _first(set_up: str, method: str, what: Mapping[str, Any]) -> Trial:
    return _contender(set_up, method, what, "").at(_BASES[method].rate, SEEDS[0])


def _compared(set_up: str, rows: Sequence[Row]) -> list[tuple[str, str, Mapping[str, Any]]]:
    """Name, method and settings of all that is tuned and compared there; of AdamW's search nothing while it goes on."""
    ranked = _ranked(_FOUND_AT[set_up], _ADAMW, rows)
    also = {_SHORT: (_MUON, _SIGN), _LONGEST: ()}.get(set_up, (_MUON,))
    searched = [(_SEARCHED_ADAMW, _ADAMW, ranked[0])] if ranked else []
    return [
        (_RECOMMENDED, _DEMO, _RECOMMENDED_SETTINGS),
        *searched,
        *((method, method, {}) for method in (_ADAMW, _DEMO, *also)),
    ]


def _contenders(set_up: str, rows: Sequence[Row]) -> list[Contender]:
    if set_up == SMALL:
        starts = {_ADAMW: "adamw", _MUON: "muon"}
        found = [Contender(name, text_trial(SMALL, one), DENSE_RATES[SMALL][one]) for name, one in starts.items()]
        settings = {**_BASES[_DEMO].settings, **DEMO_RULES[SMALL]["muon"].settings}
        demo = Contender(_DEMO, text_trial(SMALL, settings=settings), 8e-2)
        # Not what is recommended, which is for more steps: a tiny model wants a shorter memory.
        return [*found, demo, Contender(_BALANCED_TOO, changed(demo.trial, _RECOMMENDED_SETTINGS), 8e-2)]
    found = []
    for name, method, what in _compared(set_up, rows):
        is_longest = set_up == _LONGEST
        rate = _rate_before(_contender(_LONGER, method, what, name), rows) if is_longest else _BASES[method].rate
        if rate is not None:
            found.append(_contender(set_up, method, what, name, rate))
    return found


def _rate_before(shorter: Contender, rows: Sequence[Row]) -> float | None:
    """That which was best in shorter runs, for the longest, which are run with one; None while these go on."""
    found = outcome(shorter, rows)
    is_whole = found is not None and len(found.losses) + found.num_failed >= len(SEEDS)
    return found.rate if found is not None and is_whole else None


def _plan(size: str, rows: Sequence[Row]) -> list[Trial]:
    if size == SMALL:
        return due(_contenders(SMALL, rows), rows, size)
    searches = [(at, method) for at in (_SHORT, _LONGER) for method in _SEARCHED]
    tried = [_first(at, method, what) for at, method in searches for what in _tries(at, method, rows)]
    wanted = []
    for set_up, settings in _SET_UPS.items():
        factors = FACTORS[:1] if set_up == _LONGEST else FACTORS
        for one in _contenders(set_up, rows):
            is_usual = one.name not in (_RECOMMENDED, _SEARCHED_ADAMW)
            wanted.append((is_usual, -settings["steps"], due([one], rows, size, factors=factors)))
    wanted.sort(key=lambda one: one[:2])  # first what the claim is about, and what takes long: time may be short
    return [*tried, *(trial for _, _, trials in wanted for trial in trials)]


def _found(rows: Sequence[Row]) -> dict[str, dict[str, Outcome]]:
    """By the set-up."""
    found = {set_up: outcomes(_contenders(set_up, rows), rows) for set_up in (SMALL, *_SET_UPS)}
    return {set_up: by_name for set_up, by_name in found.items() if by_name}


def ratio(row: Row) -> float:
    """How many times fewer bytes than gradients of 16 bits."""
    return float(2 * row["parameters"] / row["sent_bytes"])


def _find(rows: Sequence[Row], results: Path) -> Finding:
    lines, claims, sentences = [], [], []
    found = _found(rows)
    for set_up, by_name in found.items():
        for name, one in by_name.items():
            fewer = f"{ratio(one.rows[0]):.0f} x" if name.startswith("DeMo") else "1 x"
            lines.append((set_up, name, one.words, fewer, f"{one.rate:g}", one.tries_words, str(len(one.losses))))
        claims += _claims(set_up, by_name)
        demo, adamw = _best_known(by_name, _RECOMMENDED, _DEMO), _best_known(by_name, _SEARCHED_ADAMW, _ADAMW)
        if demo is not None and adamw is not None:
            sentences.append(
                f"Last loss, {set_up}: {_in_words(demo[1])} with {demo[0]} and {ratio(demo[1].rows[0]):.0f} times fewer "
                f"bytes, {_in_words(adamw[1])} with {adamw[0]}."
            )
            if _MUON in by_name:
                above = demo[1].mean - by_name[_MUON].mean
                sentences.append(
                    f"Muon, averaged in full, ends at {_in_words(by_name[_MUON])}: {demo[0]} is {above:+.3f} beside it."
                )
    heads = ("set-up", "method", "loss", "fewer bytes", "learning rate", "rates tried", "seeds")
    below = [claim for claim in claims if "ends below" in claim.text and _SIGN not in claim.text]
    lead = verdict(
        below,
        "With the muon rule, DeMo ends below AdamW in all that is compared here",
        "With the muon rule, DeMo ends below AdamW in some of what is compared here",
        "With the muon rule, DeMo ends below AdamW in nothing that is compared here",
    )
    rates = f" ({_LONGEST} have one learning rate each, that which was best after {_LONGER})"
    lead += rates if any(set_up == _LONGEST for set_up in found) else ""
    for set_up, by_name in found.items():
        if _SIGN in by_name and _ADAMW in by_name:
            lead += f". With the sign rule it is {by_name[_SIGN].mean - by_name[_ADAMW].mean:+.3f} beside AdamW, {set_up}"
    lead = lead if below else "Nothing is compared yet"
    answer = f"{lead}. {' '.join([*sentences, *_twice_seen(rows)])}" if claims else ""
    count = (
        "*Fewer bytes* is what is sent, against one copy of the gradients in 16 bits, of which a ring all-reduce among four "
        "sends and receives 1.5. A replica of DeMo receives what the three others send. Muon has its usual settings."
    )
    parts = [table(heads, lines, 2), count, *_search_table(rows), "## All that was tried", _log(rows)]
    return Finding("\n\n".join(parts), claims, answer)


def _twice_seen(rows: Sequence[Row]) -> list[str]:
    """The longer runs on a text that is too short for them, which were trained before there was balance."""
    words = []
    for method, optimizer, update in ((_ADAMW, "adamw", None), (_DEMO, "demo", "muon")):
        mine = [
            row
            for row in rows
            if row["trial"]["optimizer"] == optimizer and row["trial"]["settings"].get("update") == update
            if "dataset" not in row["trial"]["settings"] and row["trial"]["settings"]["steps"] == _SET_UPS[_LONGER]["steps"]
        ]
        if losses := [row["loss"] for row in mine if row["loss"] is not None]:
            least = min(loss for row in mine for _, loss in row["curve"])
            words.append(f"{method} ends at {min(losses):.3f} at best, and the least on the way of any run is {least:.3f}")
    if len(words) < 2:
        return []
    text = "On the standard library's source alone, which so many steps see some three times, and before there was balance"
    return [f"{text}, after {_LONGER} {'; '.join(words)}."]


def _in_words(one: Outcome) -> str:
    return f"{one.words} (one seed)" if len(one.losses) == 1 else one.words


def _best_known(by_name: Mapping[str, Outcome], *names: str) -> tuple[str, Outcome] | None:
    """The first of these that there is."""
    return next(((name, by_name[name]) for name in names if name in by_name), None)


def _claims(set_up: str, by_name: Mapping[str, Outcome]) -> list[Claim]:
    """What is recommended beside AdamW searched and as usual, and both as they were; each with the number of seeds where
    these are not yet three."""
    claims = []
    for name, other in ((_RECOMMENDED, _SEARCHED_ADAMW), (_RECOMMENDED, _ADAMW), (_DEMO, _ADAMW), (_SIGN, _ADAMW)):
        if name in by_name and other in by_name:
            demo, adamw = by_name[name], by_name[other]
            seeds = [len(one.losses) for one in (demo, adamw)]
            so_far = "" if min(seeds) == len(SEEDS) else f"; {seeds[0]} and {seeds[1]} seeds so far"
            text = f"{set_up}: every seed of {name} ends below every seed of {other}"
            claims.append(Claim(f"{text} ({demo.mean - adamw.mean:+.3f}{so_far})", is_below(demo, adamw)))
    for name in (_RECOMMENDED, _DEMO):
        if name in by_name:
            fewer = ratio(by_name[name].rows[0])
            claims.append(
                Claim(
                    f"{set_up}: {name} sends at least {_LEAST_RATIO} times fewer bytes ({fewer:.0f} times)",
                    fewer >= _LEAST_RATIO,
                )
            )
    return claims


def _search_table(rows: Sequence[Row]) -> list[str]:
    """What the search tried of each method, the best first; nothing before it has begun."""
    lines = []
    for method in _SEARCHED:
        for what in _ranked(_SHORT, method, rows):
            trials = (_first(set_up, method, what) for set_up in (_SHORT, _LONGER))
            losses = [next((row["loss"] for row in rows if row["trial"] == trial.facts), None) for trial in trials]
            lines.append((method, words_for(what), *("" if loss is None else f"{loss:.3f}" for loss in losses)))
    if not lines:
        return []
    rates = ", ".join(f"{_BASES[method].rate:g} with {method}" for method in _SEARCHED)
    note = f"One seed, and the learning rate that was best before: {rates}. *warmup* is a share of the steps."
    heads = ("method", "what differs", f"loss after {_SHORT}", f"after {_LONGER}")
    return ["## The search", table(heads, lines, 2), note]


def _log(rows: Sequence[Row]) -> str:
    """Every training there is, and what it gave."""
    lines = []
    for row in rows:
        trial, settings = row["trial"], dict(row["trial"]["settings"])
        lengths = [str(settings.pop(name, "")) for name in ("steps", "batch")]
        for name in ("eval_every", "eval_examples", "compile"):
            settings.pop(name, None)
        words = ", ".join(
            f"{name} {value if isinstance(value, str) else json.dumps(value)}" for name, value in settings.items()
        )
        loss = "failed" if row["loss"] is None else f"{row['loss']:.3f}"
        what = f"{trial['recipe']}, {trial['replicas']} replicas, {trial['optimizer']}"
        words += f", topk {trial['later_topk']} after half of the steps" if trial["later_topk"] else ""
        words += f", {trial['returned']:g} of what was sent put back" if trial["returned"] else ""
        lines.append((f"{what}: {words}", *lengths, loss))
    lines.sort(key=lambda line: line[1:])
    return table(("training", "steps", "batch", "loss"), lines)


def _draw(rows: Sequence[Row], results: Path) -> dict[str, Drawing]:
    found = _found(rows)
    if not found:
        return {}
    page = Page(len(found), height=3.6, columns=2)
    names = list(dict.fromkeys(name for by_name in found.values() for name in by_name))
    for axes, (set_up, by_name) in zip(page.panels, found.items(), strict=True):
        dots_above_names(axes, {name: one.losses for name, one in by_name.items()}, names)
        title(axes, set_up, "", "validation loss (nats per byte)")
    caption = "Last validation loss of every seed, each method at the best learning rate of those tried."
    return {"recipe.png": Drawing(page, caption)}


STUDY = Study(
    "recipe",
    "The recipe",
    "Which settings of DeMo beat tuned AdamW at equal tokens, with at least 100 times fewer bytes sent?",
    find=_find,
    plan=_plan,
    draw=_draw,
    sizes=(SMALL, FULL),
)
