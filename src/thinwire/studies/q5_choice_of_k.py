"""q5: how is k chosen? Loss against bytes per step, over k and the edge of chunks."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import log2
from pathlib import Path

from thinwire.planner.report import MOST_USEFUL_TOPK
from thinwire.studies.figure import Drawing, Page, line, logarithmic, room_for_labels, title
from thinwire.studies.settings import DEMO_RULES, text_trial
from thinwire.studies.study import SIZES, Claim, Finding, Study, table
from thinwire.studies.trials import Row, Trial
from thinwire.studies.tuning import Contender, Outcome, due, outcomes, seeds_for

Setting = tuple[int, int]
"""The edge of chunks, and k."""

RULE = "muon"
_USUAL_CHUNK = 64
_CHUNKS = (16, 32, _USUAL_CHUNK, 128)
# One of so many coefficients is sent; of the smallest chunks that would be less than one.
_ONE_OF = (1024, 256, 64, 16)
SETTINGS: tuple[Setting, ...] = tuple(
    (chunk, chunk**2 // one_of) for chunk in _CHUNKS for one_of in _ONE_OF if chunk**2 >= one_of
)
# How much more loss than the best of all, as a share of it, may be worth fewer bytes; claims go by the second.
_TOLERANCES = (0.01, 0.02, 0.05)
_TOLERANCE = _TOLERANCES[1]


def _name(setting: Setting) -> str:
    chunk, topk = setting
    return f"k = {topk} of {chunk} x {chunk}"


def contenders(size: str) -> list[Contender]:
    """Every setting, with one rule."""
    start = DEMO_RULES[size][RULE]
    return [
        Contender(
            _name((chunk, topk)),
            text_trial(size, settings={**start.settings, "topk": topk, "chunk": chunk}),
            start.rate,
        )
        for chunk, topk in SETTINGS
    ]


def _plan(size: str, rows: Sequence[Row]) -> list[Trial]:
    return due(contenders(size), rows, size, seeds_for(size))


def _outcomes(rows: Sequence[Row]) -> dict[Setting, Outcome]:
    found = outcomes([one for size in SIZES for one in contenders(size)], rows)
    return {setting: found[_name(setting)] for setting in SETTINGS if _name(setting) in found}


def of_usual_chunk(found: Mapping[str, Outcome]) -> dict[int, Outcome]:
    """What came of chunks of the usual edge, by k."""
    settings = [(chunk, topk) for chunk, topk in SETTINGS if chunk == _USUAL_CHUNK and _name((chunk, topk)) in found]
    return {topk: found[_name((chunk, topk))] for chunk, topk in settings}


def num_bytes(one: Outcome) -> int:
    """What a replica sends per step."""
    return int(one.rows[0]["sent_bytes"])


def cheapest_within(found: dict[Setting, Outcome], tolerance: float) -> Setting:
    """The setting of the fewest bytes whose loss is at most this share above the lowest."""
    most = (1 + tolerance) * min(one.mean for one in found.values())
    fitting = [setting for setting, one in found.items() if one.mean <= most]
    return min(fitting, key=lambda setting: (num_bytes(found[setting]), found[setting].mean))


def frontier(found: dict[Setting, Outcome]) -> list[Setting]:
    """Settings to which none is better in bytes without being worse in loss, the cheapest first."""
    best, chosen = float("inf"), []
    for setting in sorted(found, key=lambda setting: (num_bytes(found[setting]), found[setting].mean)):
        if found[setting].mean < best:
            best = found[setting].mean
            chosen.append(setting)
    return chosen


def gain_of_doubling(found: dict[Setting, Outcome]) -> float | None:
    """By how much the loss falls where chunks of the usual edge send twice the bytes, on average; None if it is unknown."""
    usual = sorted((one for (chunk, _), one in found.items() if chunk == _USUAL_CHUNK), key=num_bytes)
    if len(usual) < 2 or num_bytes(usual[0]) == num_bytes(usual[-1]):
        return None
    return (usual[0].mean - usual[-1].mean) / log2(num_bytes(usual[-1]) / num_bytes(usual[0]))


def _find(rows: Sequence[Row], results: Path) -> Finding:
    found = _outcomes(rows)
    useful = frontier(found)
    lines = [
        (
            _name(setting) + (" *" if setting in useful else ""),
            f"{num_bytes(one):,}",
            f"{8 * num_bytes(one) / one.rows[0]['parameters']:.3f}",
            one.words,
            f"{one.rate:g}",
            one.tries_words,
        )
        for setting, one in found.items()
    ]
    head = ("coefficients sent", "bytes sent per step", "bits per parameter", "loss", "learning rate", "rates tried")
    parts = [table(head, lines), f"The {RULE} rule. *: none is better in bytes without being worse in loss."]
    if found:
        parts.append(_rule_of_thumb(found))
    return Finding("\n\n".join(parts), _claims(found), _answer(found) if found else "")


def _answer(found: dict[Setting, Outcome]) -> str:
    lowest = min(one.mean for one in found.values())
    parts = []
    for tolerance in _TOLERANCES:
        setting = cheapest_within(found, tolerance)
        parts.append(f"{100 * tolerance:.0f} %: {_name(setting)}, {num_bytes(found[setting]):,} bytes")
    gain, advised = gain_of_doubling(found), found.get((_USUAL_CHUNK, MOST_USEFUL_TOPK))
    words = "By the loss that may be given up for bytes: the cheapest setting within so many percent of "
    words += f"the lowest loss is, per step, {'; '.join(parts)}."
    if gain is not None:
        words += (
            f" With chunks of {_USUAL_CHUNK} x {_USUAL_CHUNK}, twice the bytes change the loss by {-gain:+.3f} on average."
        )
    if advised is not None:
        share = _percent(advised.mean / lowest - 1)
        words += f" The most that the planner advises, k = {MOST_USEFUL_TOPK}, is {share} above the lowest loss."
    return words


def _rule_of_thumb(found: dict[Setting, Outcome]) -> str:
    lines = []
    for tolerance in _TOLERANCES:
        setting = cheapest_within(found, tolerance)
        one = found[setting]
        bits = 8 * num_bytes(one) / one.rows[0]["parameters"]
        words = f"{_name(setting)}, {num_bytes(one):,} bytes, {bits:.3f} bits per parameter, loss {one.mean:.3f}"
        lines.append(f"- to stay within {100 * tolerance:.0f} % of the lowest loss: {words}")
    gain = gain_of_doubling(found)
    if gain is not None:
        lines.append(
            f"- with chunks of {_USUAL_CHUNK} x {_USUAL_CHUNK}, twice the bytes lower the loss by {gain:.3f} on average"
        )
    return "\n".join(["Rule of thumb, the cheapest setting:", "", *lines])


def _claims(found: dict[Setting, Outcome]) -> list[Claim]:
    claims = []
    worst = [
        (found[_USUAL_CHUNK, _USUAL_CHUNK**2 // one_of].mean / min(alike) - 1, one_of)
        for one_of in _ONE_OF
        if (_USUAL_CHUNK, _USUAL_CHUNK**2 // one_of) in found
        and (alike := [one.mean for (chunk, topk), one in found.items() if chunk**2 == one_of * topk])
    ]
    if worst:
        share, one_of = max(worst)
        text = f"chunks of {_USUAL_CHUNK} lose at most {100 * _TOLERANCE:.0f} % to those of the best edge that send the same"
        most = f"most where one of {one_of} is sent: {_percent(share)}"
        claims.append(Claim(f"{text} share of coefficients ({most})", share <= _TOLERANCE))
    advised = found.get((_USUAL_CHUNK, MOST_USEFUL_TOPK))
    if advised is not None:
        share = advised.mean / min(one.mean for one in found.values()) - 1
        text = f"{_name((_USUAL_CHUNK, MOST_USEFUL_TOPK))}, the most that the planner advises, is within"
        claims.append(Claim(f"{text} {100 * _TOLERANCE:.0f} % of the lowest loss ({_percent(share)})", share <= _TOLERANCE))
    usual = sorted((topk, one.mean) for (chunk, topk), one in found.items() if chunk == _USUAL_CHUNK)
    if len(usual) > 1:
        words = ", ".join(f"{loss:.3f}" for _, loss in usual)
        text = (
            f"with chunks of {_USUAL_CHUNK} the loss falls with every larger k, {', '.join(str(topk) for topk, _ in usual)}"
        )
        claims.append(Claim(f"{text}: {words}", all(more > less for (_, more), (_, less) in pairwise(usual))))
    return claims


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _ticks(kilobytes: Sequence[float]) -> list[float]:
    """1, 2, 5, 10 and so on, no further than what is shown."""
    steps = [digit * 10.0**power for power in range(-2, 5) for digit in (1, 2, 5)]
    return [step for step in steps if kilobytes and min(kilobytes) <= step <= max(kilobytes)]


def _draw(rows: Sequence[Row], results: Path) -> dict[str, Drawing]:
    found = _outcomes(rows)
    page = Page(width=7.5)
    (axes,) = page.panels
    for index, edge in enumerate(_CHUNKS):
        mine = sorted((num_bytes(one), topk, one) for (chunk, topk), one in found.items() if chunk == edge)
        if not mine:
            continue
        spread = [(min(one.losses), max(one.losses)) for _, _, one in mine]
        line(axes, [(sent / 1000, one.mean) for sent, _, one in mine], f"{edge} x {edge}", index, spread)
    logarithmic(axes, _ticks([num_bytes(one) / 1000 for one in found.values()]))
    room_for_labels(axes, 0.12)
    title(axes, "Loss against bytes, by the edge of chunks", "kB sent per step", "validation loss (nats per byte)")
    caption = (
        f"Last validation loss against what a replica sends, {RULE} rule, a line per edge of chunks, "
        "each setting at its best learning rate; the band is the range over seeds. From right to left, one coefficient of "
        f"{', '.join(str(one_of) for one_of in reversed(_ONE_OF))} is sent."
    )
    return {"choice_of_k.png": Drawing(page, caption)}


STUDY = Study("q5", "The choice of k", "How is k chosen?", find=_find, plan=_plan, draw=_draw)
