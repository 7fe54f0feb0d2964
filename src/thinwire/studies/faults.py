"""Stragglers, lost payloads and late ones: the same settings as without them, and what becomes of the loss."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from thinwire.studies.figure import Drawing, Page, line, room_for_labels, rule, title
from thinwire.studies.settings import DEMO_RULES, text_trial
from thinwire.studies.study import SIZES, SMALL, Claim, Finding, Study, table, verdict
from thinwire.studies.trials import Row, Trial
from thinwire.studies.tuning import Contender, Outcome, due, outcome, seeds_for

_SHARES = (0.1, 0.3, 0.5)
_ABSENT, _LOST = "absent", "lost"
_WORDS = {_ABSENT: "a replica is late and left out", _LOST: "a payload is lost and taken back"}
_LATE = "updates come one step late"
_LATE_TUNED = f"{_LATE}, at a learning rate of their own"
# Nats per byte that count as little.
_SMALL_LOSS = 0.02


class Case(NamedTuple):
    """A trouble of one kind: at this share of steps for each replica, each for itself."""

    rule: str
    kind: str
    share: float
    contender: Contender


def _cases(size: str) -> list[Case]:
    found = []
    for name, start in DEMO_RULES[size].items():
        calm = text_trial(size, settings=start.settings)
        late = text_trial(size, settings={**start.settings, "delay": 1})
        trials = {("", 0.0): calm, (_LATE, 0.0): late}
        trials |= {(_LATE_TUNED, 0.0): late} if size != SMALL else {}
        trials |= {(_ABSENT, share): replace(calm, absent=share) for share in _SHARES}
        trials |= {(_LOST, share): replace(calm, lost=share) for share in _SHARES}
        for (kind, share), trial in trials.items():
            found.append(Case(name, kind, share, Contender(f"{name} {kind} {share}", trial, start.rate)))
    return found


def _plan(size: str, rows: Sequence[Row]) -> list[Trial]:
    """All at one learning rate: the point is that nothing is changed. Of what comes late, also what another rate gives."""
    usual = [case.contender.at(case.contender.rate, seed) for case in _cases(size) for seed in seeds_for(size)]
    tuned = [case.contender for case in _cases(size) if case.kind == _LATE_TUNED]
    return usual + due(tuned, rows, size, seeds_for(size))


def _outcomes(rows: Sequence[Row]) -> dict[tuple[str, str, float], Outcome]:
    """By rule, kind and share; of the larger size, if it was run."""
    for cases in map(_cases, reversed(SIZES)):
        found = {(one.rule, one.kind, one.share): _outcome(one, rows) for one in cases}
        if known := {key: one for key, one in found.items() if one is not None}:
            return known
    return {}


def _outcome(case: Case, rows: Sequence[Row]) -> Outcome | None:
    usual = [row for row in rows if row["trial"]["settings"].get("lr") == case.contender.rate]
    found = outcome(case.contender, rows if case.kind == _LATE_TUNED else usual)
    return None if found is not None and case.kind == _LATE_TUNED and found.tries == 1 else found


def _find(rows: Sequence[Row], results: Path) -> Finding:
    found, lines = _outcomes(rows), []
    for (name, kind, share), one in found.items():
        trouble = f"{_WORDS[kind]}, {share:.0%} of steps" if share else kind or "none"
        calm = found.get((name, "", 0.0))
        beside = "" if calm is None else f"{one.mean - calm.mean:+.3f}"
        lines.append((f"{name} rule", trouble, one.words, beside, f"{one.rate:g}", one.tries_words))
    heads = ("update", "trouble", "loss", "beside none", "learning rate", "rates tried")
    words = "The learning rate is that of no trouble, or chosen by the first seed, which others may not bear out."
    return Finding(f"{table(heads, lines, 2)}\n\n{words}", _claims(found), _answer(found))


def _answer(found: dict[tuple[str, str, float], Outcome]) -> str:
    parts = []
    for name in dict.fromkeys(name for name, _, _ in found):
        calm, words = found.get((name, "", 0.0)), []
        for (of, kind, share), one in found.items():
            if of == name and kind and calm is not None and share in (0.0, 0.3):
                words.append(
                    f"{one.mean - calm.mean:+.3f} where {_WORDS.get(kind, kind)}{' in 30% of steps' if share else ''}"
                )
        parts += [f"with the {name} rule {', '.join(words)}"] if words else []
    lead = verdict(_claims(found), "It hardly changes", "It depends on the trouble", "It rises")
    return f"{lead}. Beside no trouble, the last loss changes {'; '.join(parts)}." if parts else ""


def _claims(found: dict[tuple[str, str, float], Outcome]) -> list[Claim]:
    claims = []
    for name in dict.fromkeys(name for name, _, _ in found):
        calm = found.get((name, "", 0.0))
        if calm is None:
            continue
        for kind, share in ((_ABSENT, 0.3), (_LOST, 0.3), (_LATE, 0.0), (_LATE_TUNED, 0.0)):
            if (name, kind, share) in found:
                more = found[name, kind, share].mean - calm.mean
                trouble = f"{_WORDS[kind]} in {share:.0%} of steps" if share else kind
                text = (
                    f"{name} rule, {trouble}: the loss is {more:+.3f} nats per byte away, and less than {_SMALL_LOSS} above"
                )
                claims.append(Claim(text, more < _SMALL_LOSS))
    return claims


def _draw(rows: Sequence[Row], results: Path) -> dict[str, Drawing]:
    found = _outcomes(rows)
    names = list(dict.fromkeys(name for name, _, _ in found))
    page = Page(max(1, len(names)))
    for axes, name in zip(page.panels, names, strict=False):
        for index, (kind, word) in enumerate({_ABSENT: "late, left out", _LOST: "payload lost"}.items()):
            mine = {share: one for (of, what, share), one in found.items() if of == name and what in ("", kind)}
            points = [(100 * share, one.mean) for share, one in sorted(mine.items())]
            line(axes, points, word, index, [(min(one.losses), max(one.losses)) for _, one in sorted(mine.items())])
        if (name, _LATE, 0.0) in found:
            rule(axes, found[name, _LATE, 0.0].mean, _LATE)
        room_for_labels(axes)
        title(axes, f"{name.capitalize()} rule", "share of steps of each replica (%)", "validation loss (nats per byte)")
    return {
        "faults.png": Drawing(page, "Last validation loss with trouble, at the settings without: mean and range over seeds.")
    }


STUDY = Study(
    "faults",
    "Losses and stragglers",
    "What becomes of the loss when replicas are late, payloads are lost, or updates come a step late?",
    find=_find,
    plan=_plan,
    draw=_draw,
)
