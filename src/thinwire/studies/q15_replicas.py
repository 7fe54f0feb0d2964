"""q15: quality against the number of replicas, at a fixed batch for all together, and at a fixed batch for each."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from thinwire.options import RECOMMENDED_OPTIONS
from thinwire.studies.figure import Drawing, Page, line, logarithmic, room_for_labels, title
from thinwire.studies.search import ADAMW, as_searched
from thinwire.studies.settings import DEMO_RULES, DENSE_RATES, MANY, Start, text_trial
from thinwire.studies.study import FULL, MEDIUM, SIZES, SMALL, Claim, Finding, Study, table
from thinwire.studies.trials import Row, Trial
from thinwire.studies.tuning import Contender, Outcome, due, is_below, outcomes, seeds_for

# In the full size a step of 64 replicas is of a middle-sized model, so that the whole is affordable.
_MODELS = {SMALL: SMALL, MEDIUM: MEDIUM, FULL: MANY}
_COUNTS: dict[str, tuple[int, ...]] = {SMALL: (1, 8), MEDIUM: (1, 4, 16, 64), FULL: (1, 4, 16, 64)}
_OWNED: dict[str, tuple[int, ...]] = {SMALL: (), MEDIUM: (), FULL: (16, 64)}
# Examples per step: of all together, or of each.
_ALL, _EACH = {SMALL: 16, MEDIUM: 64, FULL: 64}, {SMALL: 4, MEDIUM: 1, FULL: 16}
_TOGETHER, _ALONE = "fixed batch for all", "fixed batch for each"
_ADAMW, _SEARCHED = "AdamW", "AdamW, searched"
_BALANCED = "balanced muon rule"
_LITTLE = 0.05


class Case(NamedTuple):
    """A method among so many replicas."""

    method: str
    batch: str
    replicas: int
    contender: Contender


def _rules(size: str) -> dict[str, Start]:
    """DeMo's methods and their settings; the full size has the muon rule with balance alone."""
    rules = {f"{name} rule": start for name, start in DEMO_RULES[size].items()}
    if size != MEDIUM:
        return rules
    muon = rules["muon rule"]
    return {**rules, _BALANCED: Start(muon.rate, {**muon.settings, "balance": RECOMMENDED_OPTIONS["balance"]})}


def _batch(size: str, batch: str, count: int) -> int:
    return _ALL[size] if batch == _TOGETHER else _EACH[size] * count


def _cases(size: str) -> list[Case]:
    found = []
    for batch in (_TOGETHER, _ALONE):
        for count in _COUNTS[size]:
            examples = {"batch": _batch(size, batch, count)}
            # All replicas of a dense optimizer are one with all the examples: their number is of no account.
            dense = text_trial(_MODELS[size], "adamw", 1, examples)
            found.append((_ADAMW, batch, count, dense, DENSE_RATES[size]["adamw"]))
            if size == MEDIUM:
                found.append((_SEARCHED, batch, count, as_searched(dense, ADAMW), DENSE_RATES[size]["adamw"]))
            for rule, start in _rules(size).items():
                trial = text_trial(_MODELS[size], "demo", count, {**start.settings, **examples})
                found.append((rule, batch, count, trial, start.rate))
    for rule, start in DEMO_RULES[size].items():
        for count in _OWNED[size]:
            settings = {**start.settings, "batch": _ALL[size], "exchange": "owner"}
            trial = text_trial(_MODELS[size], "demo", count, settings)
            found.append((f"{rule} rule, owners", _TOGETHER, count, trial, start.rate))
    return [Case(name, batch, count, Contender(trial.key, trial, rate)) for name, batch, count, trial, rate in found]


def _plan(size: str, rows: Sequence[Row]) -> list[Trial]:
    return due([case.contender for case in _cases(size)], rows, size, seeds_for(size))


def _outcomes(rows: Sequence[Row]) -> dict[tuple[str, str], dict[int, Outcome]]:
    """By method and batch, then by the number of replicas; of the larger size, if it was run."""
    found: dict[tuple[str, str], dict[int, Outcome]] = {}
    for cases in (_cases(size) for size in reversed(SIZES) if not found):
        known = outcomes([case.contender for case in cases], rows)
        for case in cases:
            if case.contender.name in known:
                found.setdefault((case.method, case.batch), {})[case.replicas] = known[case.contender.name]
    return found


def _find(rows: Sequence[Row], results: Path) -> Finding:
    found = _outcomes(rows)
    counts = sorted({count for mine in found.values() for count in mine})
    lines = [
        (method, batch, *(mine[count].words if count in mine else "" for count in counts))
        for (method, batch), mine in sorted(found.items(), key=lambda pair: pair[0][::-1])
    ]
    head = ("method", "examples per step", *(f"R = {count}" for count in counts))
    note = (
        "AdamW averages in full, so that it was trained once for each batch. *Searched*: with the settings that were best "
        "in the study search, where the batch is 16."
    )
    return Finding(f"{table(head, lines)}\n\n{note}", _claims(found), _answer(found))


def _answer(found: dict[tuple[str, str], dict[int, Outcome]]) -> str:
    parts = []
    for batch in (_TOGETHER, _ALONE):
        words = []
        for (method, of), mine in found.items():
            if of == batch and len(mine) > 1:
                few, many = min(mine), max(mine)
                words.append(f"{method} {mine[few].mean:.3f} with {few} and {mine[many].mean:.3f} with {many}")
        parts += [f"{batch}: {', '.join(words)}"] if words else []
    if not parts:
        return ""
    of_all = {
        method: mine
        for (method, of), mine in found.items()
        if of == _TOGETHER and method in _rules(MEDIUM) and len(mine) > 1
    }
    gains = {method: mine[min(mine)].mean - mine[max(mine)].mean for method, mine in of_all.items()}
    kinds = {
        f"within {_LITTLE} of fewer": [method for method, gain in gains.items() if abs(gain) < _LITTLE],
        "higher": [method for method, gain in gains.items() if gain <= -_LITTLE],
        "lower": [method for method, gain in gains.items() if gain >= _LITTLE],
    }
    changes = "; ".join(f"{what} with the {' and the '.join(methods)}" for what, methods in kinds.items() if methods)
    lead = f"With the same batch for all, more replicas end {changes}. " if changes else ""
    return f"{lead}Last losses by the number of replicas. {'. '.join(part[0].upper() + part[1:] for part in parts)}."


def _claims(found: dict[tuple[str, str], dict[int, Outcome]]) -> list[Claim]:
    claims = []
    for rule in _rules(MEDIUM):
        together, alone = found.get((rule, _TOGETHER), {}), found.get((rule, _ALONE), {})
        if len(together) > 1:
            few, many = min(together), max(together)
            more = together[many].mean - together[few].mean
            text = f"with the {rule} and the same batch for all, {many} replicas end {more:+.3f} nats per byte beside {few}"
            claims.append(_costs_little(text, more))
        if len(alone) > 1:
            means = [alone[count].mean for count in sorted(alone)]
            text = f"with the {rule} and the same batch for each, more replicas never raise the loss"
            claims.append(Claim(f"{text}: {means[0]:.3f} to {means[-1]:.3f}", means == sorted(means, reverse=True)))
        owned = found.get((f"{rule}, owners", _TOGETHER), {})
        if most := max(owned.keys() & together.keys(), default=0):
            more = owned[most].mean - together[most].mean
            claims.append(_costs_little(f"with the {rule} and {most} replicas, owners cost {more:+.3f} nats per byte", more))
        for name in (_ADAMW, _SEARCHED):
            dense = found.get((name, _TOGETHER), {})
            if both := sorted(together.keys() & dense.keys()):
                gain = min(dense[count].mean - together[count].mean for count in both)
                apart = [count for count in both if is_below(together[count], dense[count])]
                text = f"with the same batch for all, every seed of the {rule} is below every seed of {name}, whatever the"
                where = ", ".join(map(str, apart)) or "none"
                text += f" number of replicas: at {where} of {', '.join(map(str, both))}"
                claims.append(Claim(f"{text}; the means by {gain:.3f} where they are nearest", apart == both))
    return claims


def _costs_little(text: str, more: float) -> Claim:
    return Claim(f"{text}, less than {_LITTLE} above", more < _LITTLE)


def _draw(rows: Sequence[Row], results: Path) -> dict[str, Drawing]:
    found = _outcomes(rows)
    page = Page(2)
    for axes, batch in zip(page.panels, (_TOGETHER, _ALONE), strict=True):
        mine = {method: outcome for (method, of), outcome in found.items() if of == batch}
        for index, (method, by_count) in enumerate(mine.items()):
            points = [(count, one.mean) for count, one in sorted(by_count.items())]
            spread = [(min(one.losses), max(one.losses)) for _, one in sorted(by_count.items())]
            line(axes, points, method, index, spread)
        logarithmic(axes, sorted({count for by_count in mine.values() for count in by_count}))
        room_for_labels(axes)
        title(axes, batch.capitalize(), "replicas", "validation loss (nats per byte)")
    return {
        "replicas.png": Drawing(page, "Last validation loss against the number of replicas, each at its best learning rate.")
    }


STUDY = Study(
    "q15",
    "The number of replicas",
    "How does quality change with the number of workers, 1 to 64, at a fixed batch for all and at a fixed batch for each?",
    find=_find,
    plan=_plan,
    draw=_draw,
)
