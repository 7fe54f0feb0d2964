"""q9: does it work without the sign? All update rules with the same number of coefficients, each with its own learning rate
and decay of the momentum, and then with balance, beside dense AdamW and Muon."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from thinwire.studies.figure import Drawing, Page, dots_above_names, line, room_for_labels, title
from thinwire.studies.search import changed
from thinwire.studies.settings import DENSE_RATES, text_trial
from thinwire.studies.study import FULL, MEDIUM, SIZES, SMALL, Claim, Finding, Study, table
from thinwire.studies.trials import Row, Trial
from thinwire.studies.tuning import SEEDS, Contender, Outcome, due, is_below, outcomes, seeds_for

_TOPK = 64
_DECAYS = (0.95, 0.99)
_BALANCE = 0.95
_TINY_RATES = {"sign": 4e-3, "sgd": 3e-1, "adamw": 4e-3, "lion": 4e-3, "muon": 8e-2}
_RATES: dict[str, dict[str, float]] = {
    SMALL: _TINY_RATES,
    MEDIUM: _TINY_RATES,
    FULL: {"sign": 1e-3, "sgd": 1e-1, "adamw": 1e-3, "lion": 5e-4, "muon": 4e-2},
}
_DENSE = {"adamw": "AdamW", "muon": "dense Muon"}


def _contenders_of(rule: str, size: str) -> list[Contender]:
    """A rule with each decay."""
    return [
        Contender(
            f"{rule} rule, decay {decay:g}",
            text_trial(size, settings={"update": rule, "topk": _TOPK, "momentum_decay": decay}),
            _RATES[size][rule],
        )
        for decay in _DECAYS
    ]


def _dense(size: str) -> list[Contender]:
    return [Contender(word, text_trial(size, name), DENSE_RATES[size][name]) for name, word in _DENSE.items()]


def _plan(size: str, rows: Sequence[Row]) -> list[Trial]:
    """Of every rule first the learning rates for both decays, then other seeds for the better one."""
    found = due(_dense(size), rows, size, seeds_for(size))
    for rule in _RATES[size]:
        search = due(_contenders_of(rule, size), rows, size, SEEDS[:1])
        best = None if search or size == SMALL else _better(rule, size, rows)
        found += search if best is None else due([best, _balanced(best)], rows, size)
    return found


def _balanced(one: Contender) -> Contender:
    """The same with balance, which is tuned as it is."""
    return replace(one, name=f"{one.name}, balance {_BALANCE:g}", trial=changed(one.trial, {"balance": _BALANCE}))


def _better(rule: str, size: str, rows: Sequence[Row]) -> Contender | None:
    """The decay with the lower loss, of those that were tried, with the first seed, which both have."""
    known = [row for row in rows if row["trial"]["settings"].get("seed", 0) == SEEDS[0]]
    found = outcomes(_contenders_of(rule, size), known)
    pairs = [(found[one.name].mean, one) for one in _contenders_of(rule, size) if one.name in found]
    return min(pairs, key=lambda pair: pair[0])[1] if pairs else None


def _outcomes(rows: Sequence[Row]) -> dict[str, tuple[str, Outcome]]:
    """By rule or optimizer: the name of the better contender, and what came of it; of the larger size, if it was run."""
    found: dict[str, tuple[str, Outcome]] = {}
    for size in (size for size in reversed(SIZES) if not found):
        for rule in _RATES[size]:
            best = _better(rule, size, rows)
            if best is not None:
                found[f"{rule} rule"] = best.name, outcomes([best], rows)[best.name]
                found |= {f"{rule} rule, balanced": (name, one) for name, one in outcomes([_balanced(best)], rows).items()}
        found |= {name: (name, one) for name, one in outcomes(_dense(size), rows).items()}
    return found


def _find(rows: Sequence[Row], results: Path) -> Finding:
    found = _outcomes(rows)
    lines = [
        (name, one.words, f"{one.rate:g}", one.tries_words, str(len(one.losses)), f"{one.rows[0]['sent_bytes']:,}")
        for name, one in found.values()
    ]
    head = ("update", "loss", "learning rate", "rates tried", "seeds", "sent bytes per step")
    by_name = {name: one for name, (_, one) in found.items()}
    return Finding(table(head, lines), _claims(by_name), _answer(by_name))


def _answer(found: dict[str, Outcome]) -> str:
    if "sign rule" not in found:
        return ""
    order = sorted(found.items(), key=lambda pair: pair[1].mean)
    rules = [name for name, _ in order if name.endswith(" rule")]
    below, above = ([name for name in rules if test(found[name], found["sign rule"])] for test in (is_below, _is_above))
    words = [f"{what} with the {' and the '.join(names)}" for what, names in (("lower", below), ("higher", above)) if names]
    kind = "It depends on the rule" if above or len(below) < len(rules) - 1 else "Yes"
    seeds = f"every seed ends {', and '.join(words)}, than with the sign rule" if words else "all end as with the sign rule"
    lead = f"{kind if words else 'Yes'}: {seeds}"
    return f"{lead}. From the lowest loss to the highest: {', '.join(f'{name} {one.words}' for name, one in order)}."


def _is_above(one: Outcome, other: Outcome) -> bool:
    return is_below(other, one)


def _claims(found: dict[str, Outcome]) -> list[Claim]:
    claims = []
    if {"sgd rule", "sign rule"} <= found.keys():
        plain, sign = found["sgd rule"], found["sign rule"]
        text = f"without the sign it works as well: loss {plain.mean:.3f} with plain sgd, {sign.mean:.3f} with the sign"
        text += " (sgd's best learning rate is at the edge of those tried)" if plain.is_at_edge else ""
        claims.append(Claim(text, not is_below(sign, plain)))
    rules = {name: one for name, one in found.items() if name.endswith(" rule")}
    for name, one in rules.items():
        balanced = found.get(f"{name}, balanced")
        if balanced is not None:
            text = f"balance lowers the loss of the {name} ({one.mean:.3f} and {balanced.mean:.3f} with it)"
            claims.append(Claim(text, is_below(balanced, one)))
    if "muon rule" in rules and len(rules) > 1:
        rest = {name: one for name, one in rules.items() if name != "muon rule"}
        second = min(rest, key=lambda name: rest[name].mean)
        text = (
            f"of all rules muon's loss is the lowest ({rules['muon rule'].mean:.3f}, and {rest[second].mean:.3f} with the "
            f"next, the {second})"
        )
        claims.append(Claim(text, is_below(rules["muon rule"], rest[second])))
    if "AdamW" in found and rules:
        best = min(rules, key=lambda name: rules[name].mean)
        dense = found["AdamW"]
        losses = f"{best}, {rules[best].mean:.3f} against {dense.mean:.3f}"
        text = f"the best rule has a lower loss than dense AdamW ({losses})"
        claims.append(Claim(text, is_below(rules[best], dense)))
    return claims


def _draw(rows: Sequence[Row], results: Path) -> dict[str, Drawing]:
    page = Page(2, width=7.4)
    last, curves = page.panels
    found = _outcomes(rows)
    for index, (name, (_, one)) in enumerate(found.items()):
        line(curves, [(step, loss) for step, loss in one.rows[0]["curve"]], name, index)
    dots_above_names(last, {name: one.losses for name, (_, one) in found.items()})
    room_for_labels(curves)
    title(last, "At the end", "", "validation loss (nats per byte)")
    title(curves, "On the way, first seed", "step", "validation loss (nats per byte)")
    caption = "Validation loss at the best learning rate and decay of each rule: every seed, and the first's curve."
    return {"rules.png": Drawing(page, caption)}


STUDY = Study(
    "q9",
    "Update rules",
    "Does it work without the sign? The same coefficients, and other rules for what they do to the parameters.",
    find=_find,
    plan=_plan,
    draw=_draw,
)
