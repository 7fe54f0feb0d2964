"""q12: end to end, is it faster? Seconds to a fixed loss, per link and method."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

from thinwire.lab.losses import Curve, seconds_to
from thinwire.lab.table import loss_table
from thinwire.studies.figure import Drawing, Page, line, logarithmic, room_for_labels, title
from thinwire.studies.measured import ADAMW, NOTHING, OURS, RATES, cells, curves, link_words, ours_in_words
from thinwire.studies.study import Claim, Finding, Study, table, verdict
from thinwire.studies.trials import Row
from thinwire.studies.whole_runs import SOURCE, whole_runs

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TARGETS = (2.0, 1.8, 1.7)
_WHOLE_TARGETS = (2.0, 1.8)
_ADAMW_BF16 = "adamw-bf16"
_TICKS = (100, 200, 500, 1000, 2000, 5000, 10_000)
_READING = (
    "`gpt-10m`, a byte-level GPT of 10 M parameters. Two hosts with a CPU core each, joined by real sockets over links of "
    "the stated rate and round trip (`unshaped`: the machine's own, some 26 Gbit/s). Seconds are steps to the loss, at the "
    "learning rate that gets there first, times the lab's median seconds of a step on the link. A synchronous method's "
    "steps do not depend on its link, so they come from training two replicas on a GPU. `adamw-bf16`, DDP with gradients in "
    "bfloat16, was not trained there: it is given AdamW's curve, as both end alike in the study frontier. A link of "
    "10 Gbit/s, more than two hosts to a loss, and steps on GPUs are not measured."
)
_WHOLE = (
    "**Whole runs.** Two hosts trained from the first step to the loss, over the link all the time, one method after the "
    "other on the same day. `computed` is what the tables above say, of days when the machine was faster and DeMo was "
    "combined otherwise, which takes it other steps: compare the methods, not the columns."
)


def _curves(results: Path, target: float) -> dict[str, Curve]:
    """The curve of each method that gets to the target first."""
    found = {name: one.curve for name, one in curves(results, target).items()}
    if ADAMW in found:
        found.setdefault(_ADAMW_BF16, replace(found[ADAMW], method=_ADAMW_BF16))
    return found


def times(results: Path, target: float) -> dict[tuple[str, str], float]:
    """Seconds to the target by method and link, of all that get there."""
    found, measured = _curves(results, target), cells(results)
    known = {key: seconds_to(found[key[0]], cell, target) for key, cell in measured.items() if key[0] in found}
    return {key: seconds for key, seconds in known.items() if seconds is not None}


def _find(rows: Sequence[Row], results: Path) -> Finding:
    measured = cells(results)
    if not measured:
        return Finding(NOTHING)
    parts, claims = [f"{_READING} {ours_in_words(measured)}"], []
    for target in TARGETS:
        best = _curves(results, target)
        known = {name: curve for name, curve in best.items() if curve.steps_to(target) is not None}
        never = f"Not within the steps of the curves: {', '.join(name for name in best if name not in known) or 'none'}."
        steps = f"Steps to it (learning rate; seeds): {', '.join(_steps(known[name], target) for name in known)}."
        parts += [f"**Seconds to a validation loss of {target:g}**", loss_table(list(measured.values()), known, target)]
        parts += [f"{steps} {never}"]
        claims += _claims(times(results, target), target)
    lines, found, sentences = _whole(results)
    if lines:
        heads = ("method", "link", "loss", "seed", "steps", "seconds", "computed")
        parts += [_WHOLE, table(heads, lines, num_left=2)]
        claims += found
    else:
        parts.append("No run was trained to its end on a shaped link.")
    first = [claim for claim in claims if "before every peer" in claim.text or "as a whole" in claim.text]
    lead = verdict(first, "Yes, on every link", "On some links", "No")
    return Finding("\n\n".join(parts), claims, " ".join((f"{lead}.", _answer(results), *sentences)) if claims else "")


def _answer(results: Path) -> str:
    """The first of DeMo's and the first peer, on every link without delay."""
    sentences = []
    for target in TARGETS:
        found, parts = times(results, target), []
        for link in RATES:
            here = sorted((seconds, name) for (name, where), seconds in found.items() if where == link)
            mine, peers = ([one for one in here if (one[1] in OURS) == ours] for ours in (True, False))
            if mine and peers:
                (own, name), (other, peer) = mine[0], peers[0]
                parts.append(
                    f"{link_words(link)} by {name} after {own:,.0f} s, by the first peer, {peer}, after {other:,.0f} s"
                )
        sentences += [f"A loss of {target:g} is reached {'; '.join(parts)}."] if parts else []
    return " ".join(sentences)


def _whole(results: Path) -> tuple[list[tuple[str, ...]], list[Claim], list[str]]:
    """Lines of a table of whole runs, and which came first, DeMo's or the peers', as claims and in words; means over seeds
    count."""
    runs, lines, claims, sentences = whole_runs(results), list[tuple[str, ...]](), list[Claim](), list[str]()
    for target in _WHOLE_TARGETS:
        computed, reached = times(results, target), dict[str, dict[str, list[float]]]()
        for run in runs:
            steps, seconds, expected = run.steps_to(target), run.seconds_to(target), computed.get((run.method, run.link))
            words = ("not reached", "")
            if steps is not None and seconds is not None:
                reached.setdefault(run.link, {}).setdefault(run.method, []).append(seconds)
                words = (f"{steps:.0f}", f"{seconds:,.0f}")
            beside = "" if expected is None else f"{expected:,.0f}"
            lines.append((run.method, run.link, f"{target:g}", str(run.seed), *words, beside))
        for link, by_method in reached.items():
            there = [(mean(seconds), name) for name, seconds in by_method.items()]
            mine, peers = ([one for one in there if (one[1] in OURS) == ours] for ours in (True, False))
            if peers:
                (own, name), (other, peer) = min(mine, default=(math.inf, "none of DeMo's")), min(peers)
                ours, theirs = f"{name} after {own:,.0f} s", f"the first peer, {peer}, after {other:,.0f} s"
                text = f"trained as a whole over {link}, DeMo reaches {target:g} first: {ours}, {theirs}"
                claims.append(Claim(text, own < other))
                sentences.append(f"In whole runs over {link} a loss of {target:g} is reached by {ours}, by {theirs}.")
    return lines, claims, sentences


def _steps(curve: Curve, target: float) -> str:
    return f"{curve.method} {curve.steps_to(target):.0f} ({curve.lr:g}; {len(curve.ends)})"


def _claims(found: dict[tuple[str, str], float], target: float) -> list[Claim]:
    claims = []
    for link in RATES:
        mine = [(seconds, name) for (name, where), seconds in found.items() if where == link and name in OURS]
        peers = [(seconds, name) for (name, where), seconds in found.items() if where == link and name not in OURS]
        if mine and peers:
            (own, name), (other, peer) = min(mine), min(peers)
            text = f"{link_words(link)}, DeMo reaches {target:g} before every peer: {name} after {own:,.0f} s"
            claims.append(Claim(f"{text}, the first peer, {peer}, after {other:,.0f} s", own < other))
    slowest = next(iter(RATES))
    mine = [(seconds, name) for (name, where), seconds in found.items() if where == slowest and name in OURS]
    for adamw, words in ((ADAMW, "AdamW"), (_ADAMW_BF16, "AdamW with gradients in bfloat16")):
        if mine and (adamw, slowest) in found:
            own, name = min(mine)
            times_faster = found[adamw, slowest] / own
            text = f"{link_words(slowest)}, DeMo reaches {target:g} at least 10 times sooner than {words}: {name}"
            claims.append(Claim(f"{text}, {times_faster:.0f} times", times_faster >= 10))
    return claims


def _draw(rows: Sequence[Row], results: Path) -> dict[str, Drawing]:
    by_target = {target: found for target in TARGETS if (found := times(results, target))}
    # A method has one style in all figures.
    names = list(dict.fromkeys(name for found in by_target.values() for name, _ in found))
    figures = {}
    for target, found in by_target.items():
        page = Page(2, height=4.8)
        for axes, delay in zip(page.panels, ("", ",80ms"), strict=True):
            _draw_panel(axes, {key: seconds for key, seconds in found.items() if key[1].endswith(delay)}, names, delay)
            where = "round trip 80 ms" if delay else "no delay"
            axes.set_title(f"To a loss of {target:g}, 2 hosts, {where}", loc="left", fontsize=10)
        caption = f"Seconds to a validation loss of {target:g} against the rate of the link."
        figures[f"time_to_{target:g}.png"] = Drawing(page, caption)
    runs = whole_runs(results)
    links = list(dict.fromkeys(run.link for run in runs))
    names = list(dict.fromkeys([*names, *(run.method for run in runs)]))
    if runs:
        page = Page(len(links), height=4.8)
        for axes, link in zip(page.panels, links, strict=True):
            for run in (run for run in runs if run.link == link):
                points = [(point.seconds, point.loss) for point in run.points]
                line(axes, points, run.method, names.index(run.method), thickness=3.0 if run.method in OURS else 1.2)
            room_for_labels(axes, 0.4)
            title(axes, f"Whole runs, 2 hosts, {link}", "seconds of training", "validation loss (nats per byte)")
        figures["whole_runs.png"] = Drawing(page, "Validation loss against seconds, of runs that were trained on the link.")
    return figures


def _draw_panel(axes: "Axes", found: dict[tuple[str, str], float], names: Sequence[str], delay: str) -> None:
    """A line per method; DeMo's are thicker."""
    axes.set_yscale("log")
    for index, name in enumerate(names):
        points = [(float(rate), found[name, link + delay]) for link, rate in RATES.items() if (name, link + delay) in found]
        if points:
            line(axes, points, name, index, thickness=3.0 if name in OURS else 1.2)
    logarithmic(axes, list(RATES.values()))
    room_for_labels(axes, 0.4)
    axes.set_ylim(100, 15_000)
    axes.set_yticks(_TICKS, [f"{tick:,}" for tick in _TICKS])
    axes.minorticks_off()
    title(axes, "", "link (Mbit/s)", "seconds of training")


STUDY = Study(
    "q12",
    "Time to a loss",
    "End to end, is it faster? Seconds of training to a fixed loss on links of stated speed, per method.",
    find=_find,
    draw=_draw,
    sources=("lab", "lab_losses", SOURCE),
)
