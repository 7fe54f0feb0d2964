"""q17: more than one bit per value? Value codecs from 1 bit to float32, at equal bytes and at equal k."""

from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from thinwire.studies.figure import Drawing, Page, line, room_for_labels, title
from thinwire.studies.payloads import plan_of, topk_for_bytes
from thinwire.studies.settings import DEMO_RULES, text_trial
from thinwire.studies.study import FULL, SIZES, Claim, Finding, Study, table, verdict
from thinwire.studies.trials import Row, Trial
from thinwire.studies.tuning import Contender, Outcome, due, is_below, outcomes, seeds_for
from thinwire.wire.values import VALUE_CODECS

Case = tuple[str, str, str]
"""The update rule, what is equal, and the value codec."""

_CODECS = ("sign", "sign_scale", "int4", "int8", "bfloat16", "float32")
_CHEAPEST = _CODECS[0]
_BYTES, _TOPK = "bytes", "k"
# At equal k the two ends are enough: what lies between rounds less than the one and more than the other.
_AT_EQUAL_TOPK = ("sign_scale", "float32")
_CASES: tuple[Case, ...] = tuple(
    (update, equal, values)
    for update in DEMO_RULES[FULL]
    for equal, codecs in ((_BYTES, _CODECS), (_TOPK, _AT_EQUAL_TOPK))
    for values in codecs
)
_TOLERANCE = 0.01
_NO_WORSE = "at equal bytes, signs of many are no worse than"


def _trial(size: str, update: str, values: str, topk: int) -> Trial:
    settings: dict[str, Any] = {**DEMO_RULES[size][update].settings, "values": values, "topk": topk}
    return text_trial(size, settings=settings)


@cache
def topk_of(size: str, case: Case) -> int:
    """k of a case: the usual one of the rule, or that whose payload is nearest to what the usual one takes in signs."""
    update, equal, values = case
    usual: int = DEMO_RULES[size][update].settings["topk"]
    if equal == _TOPK or values == _CHEAPEST:
        return usual
    budget = plan_of(_trial(size, update, _CHEAPEST, usual)).payload_bytes
    return topk_for_bytes(budget, partial(_trial, size, update, values), usual)


def _name(case: Case) -> str:
    update, equal, values = case
    return f"{update} rule, equal {equal}, {values}"


def _num_bits(case: Case) -> int:
    return VALUE_CODECS[case[2]].num_bits


def _contenders(size: str) -> list[Contender]:
    return [
        Contender(_name(case), _trial(size, case[0], case[2], topk_of(size, case)), DEMO_RULES[size][case[0]].rate)
        for case in _CASES
    ]


def _plan(size: str, rows: Sequence[Row]) -> list[Trial]:
    return due(_contenders(size), rows, size, seeds_for(size))


def _outcomes(rows: Sequence[Row]) -> dict[Case, Outcome]:
    found = outcomes([one for size in SIZES for one in _contenders(size)], rows)
    return {case: found[_name(case)] for case in _CASES if _name(case) in found}


def _find(rows: Sequence[Row], results: Path) -> Finding:
    found = _outcomes(rows)
    lines = [
        (
            *(f"{update} rule", equal, values, str(_num_bits((update, equal, values)))),
            *(str(one.rows[0]["trial"]["settings"]["topk"]), f"{one.rows[0]['sent_bytes']:,}"),
            *(one.words, f"{one.rate:g}", one.tries_words),
        )
        for (update, equal, values), one in found.items()
    ]
    head = ("", "equal", "values", "bits per value", "k", "bytes sent per step", "loss", "learning rate", "rates tried")
    words = (
        "Equal bytes: k is such that the payload comes nearest to that of the rule's first line, with headers, indices and "
        f"dense tensors. `{_CHEAPEST}` belongs to both; the other codecs of more than one bit were not tried at equal k."
    )
    claims = _claims(found)
    equal = [claim for claim in claims if _NO_WORSE in claim.text]
    lead = verdict(equal, "No: one bit of more coefficients is no worse", "With some rules", "Yes, at equal bytes")
    return Finding(f"{table(head, lines)}\n\n{words}", claims, f"{lead}. {_answer(found)}" if equal else "")


def _answer(found: dict[Case, Outcome]) -> str:
    sentences = []
    for update in DEMO_RULES[FULL]:
        mine = {case: one for case, one in found.items() if case[0] == update}
        equal = sorted((one.mean, values) for (_, alike, values), one in mine.items() if alike == _BYTES)
        words = f"With the {update} rule, at equal bytes: {', '.join(f'{values} {loss:.3f}' for loss, values in equal)}"
        whole = mine.get((update, _TOPK, "float32"))
        words += f"; float32 at equal k {whole.mean:.3f}, with {whole.rows[0]['sent_bytes']:,} bytes" if whole else ""
        sentences += [f"{words}."] if equal else []
    return " ".join(sentences)


def _claims(found: dict[Case, Outcome]) -> list[Claim]:
    claims = []
    for update in DEMO_RULES[FULL]:
        cheapest = found.get((update, _BYTES, _CHEAPEST))
        rivals = {case: one for case, one in found.items() if case[:2] == (update, _BYTES) and _num_bits(case) > 1}
        if cheapest is None or not rivals:
            continue
        best = min(rivals, key=lambda case: rivals[case].mean)
        losses = f"{cheapest.mean:.3f}, {best[2]} {rivals[best].mean:.3f}"
        is_worse = any(is_below(rival, cheapest) for rival in rivals.values())
        claims.append(Claim(f"with the {update} rule, {_NO_WORSE} more bits of fewer: {losses}", not is_worse))
        text = f"with the {update} rule, at equal bytes, signs of many end below all of them"
        claims.append(Claim(text, all(is_below(cheapest, rival) for rival in rivals.values())))
        whole = found.get((update, _TOPK, "float32"))
        if whole is not None:
            share = cheapest.mean / whole.mean - 1
            text = f"with the {update} rule one bit loses at most {100 * _TOLERANCE:.0f} % to float32 at equal k"
            ratio = whole.rows[0]["sent_bytes"] / cheapest.rows[0]["sent_bytes"]
            claims.append(Claim(f"{text} ({100 * share:+.1f} %, with {ratio:.1f} times fewer bytes)", share <= _TOLERANCE))
    return claims


def _draw(rows: Sequence[Row], results: Path) -> dict[str, Drawing]:
    found = _outcomes(rows)
    page = Page(len(DEMO_RULES[FULL]))
    for axes, update in zip(page.panels, DEMO_RULES[FULL], strict=True):
        for index, equal in enumerate((_BYTES, _TOPK)):
            shown = [
                (_CODECS.index(values), one)
                for (rule, alike, values), one in found.items()
                if rule == update and (alike == equal or values == _CHEAPEST)
            ]
            if shown:
                spread = [(min(one.losses), max(one.losses)) for _, one in shown]
                line(axes, [(place, one.mean) for place, one in shown], f"equal {equal}", index, spread)
        axes.set_xticks(range(len(_CODECS)), _CODECS)
        room_for_labels(axes, 0.2)
        title(axes, f"{update.capitalize()} rule", "how a value is written", "validation loss (nats per byte)")
    caption = (
        "Last validation loss against the value codec, from 1 bit to 32, with k chosen for equal bytes and "
        "with equal k; the band is the range over seeds."
    )
    return {"values.png": Drawing(page, caption)}


STUDY = Study(
    "q17",
    "More than one bit",
    "Are values of more than one bit worth their bytes?",
    find=_find,
    plan=_plan,
    draw=_draw,
)
