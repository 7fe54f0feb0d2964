"""q7: communication against k, from 1 to 64: bytes sent and received, the time of a step, and loss.

Bytes are the plan's, times of a replica alone are measured here, what a link adds is the planner's model, and losses are
read from the rows of q4 and q5.
"""

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from thinwire.planner.cost import Exchange, Workload, predict, ring_all_gather, ring_all_reduce
from thinwire.planner.links import Link
from thinwire.planner.owners import sizes_of
from thinwire.studies import q4_why_k as q4
from thinwire.studies import q5_choice_of_k as q5
from thinwire.studies.figure import Drawing, Page, line, logarithmic, logarithmic_up, room_for_labels, rule, title
from thinwire.studies.payloads import plan_of
from thinwire.studies.results import folders_of
from thinwire.studies.settings import DEMO_RULES, DENSE_RATES, text_trial
from thinwire.studies.study import FULL, MEDIUM, SMALL, Claim, Finding, Study, table
from thinwire.studies.trials import Row, Rows, Trial, train
from thinwire.studies.tuning import Contender, Outcome, is_below, outcomes, rows_of, seeds_for

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TOPKS = (1, 2, 4, 8, 16, 32, 64)
_RULES = tuple(DEMO_RULES[FULL])
_ADAMW = "adamw"
_REPLICAS = (2, 4, 64)
_OWNERS = 64
_SHARING = 4
"""Replicas that share the batch, and the link's time is for."""
_LINKS = {"100 Mbit/s": Link(1e8, 0.02), "1 Gbit/s": Link(1e9, 0.02)}
_THIN = next(iter(_LINKS))
_WARM_UPS = 10
_SHORT: dict[str, Any] = {"steps": 60, "warmup_steps": 5, "eval_every": 60, "eval_examples": 8}
_BF16_BYTES = 2
_MOST_SLOWER = 0.1


@dataclass(frozen=True)
class StepTime(Trial):
    """A short training of one replica, for the time of its steps; its loss means nothing."""

    def run(self, device: torch.device) -> Row:
        """Train, and return what was measured."""
        ends: list[float] = []

        def watch() -> None:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            ends.append(time.perf_counter())

        row = train(self, self.build(device), watch)
        steps = [after - before for before, after in pairwise(ends[_WARM_UPS - 1 :])]
        return {**row, "median_step_seconds": statistics.median(steps)}

    def made_up(self, chance: random.Random) -> Row:
        """See `Trial`."""
        return {"median_step_seconds": chance.uniform(0.01, 0.02)}


def _contender(size: str, method: str, topk: int = 0) -> Contender:
    """``method`` is an update rule, or AdamW."""
    if method == _ADAMW:
        whole, rate = text_trial(size, _ADAMW, 1), DENSE_RATES[size][_ADAMW]
    else:
        start = DEMO_RULES[size][method]
        whole, rate = text_trial(size, "demo", 1, {**start.settings, "topk": topk}), start.rate
    share = whole.config.schedule.batch // _SHARING
    trial = StepTime(**vars(replace(whole, settings={**whole.settings, **_SHORT, "batch": share})))
    return Contender(f"{method} {topk}", trial, rate)


def _plan(size: str, rows: Sequence[Row]) -> list[Trial]:
    """Rounds, of which each measures all, so that an hour that is slow is slow for all."""
    all_of_them = [_contender(size, _ADAMW), *(_contender(size, update, topk) for update in _RULES for topk in TOPKS)]
    return [one.at(one.rate, seed) for seed in seeds_for(size) for one in all_of_them]


def _size_of(rows: Sequence[Row]) -> str:
    """The small and the medium size have one model, and the latter several rounds."""
    if text_trial(FULL).recipe in {row["trial"]["recipe"] for row in rows}:
        return FULL
    return MEDIUM if len({row["trial"]["settings"].get("seed", 0) for row in rows}) > 1 else SMALL


def _seconds(rows: Sequence[Row], contender: Contender) -> float | None:
    """Of a step of a replica alone: the median of rounds."""
    found = [row["median_step_seconds"] for row in rows_of(contender, rows)]
    return statistics.median(found) if found else None


def _newest(results: Path, study: Study, contenders: Sequence[Contender]) -> dict[str, Outcome]:
    """What came of another study's contenders where they were trained last."""
    for folder in reversed(folders_of(results, study)):
        if found := outcomes(contenders, Rows(folder).rows):
            return found
    return {}


@dataclass(frozen=True)
class Bytes:
    """Per replica and step."""

    sent: int
    received: Mapping[int, int]
    """With an all-gather, by the number of replicas."""
    received_with_owners: int
    """Among `_OWNERS` replicas."""


def bytes_at(size: str, topk: int) -> Bytes:
    """From the plan, headers and dense tensors included; one's own messages are not received."""
    plan = plan_of(text_trial(size, settings={**DEMO_RULES[size][_RULES[0]].settings, "topk": topk}))
    sizes = sizes_of(plan, _OWNERS)
    received = {replicas: ring_all_gather(plan.payload_bytes, replicas).received_bytes for replicas in _REPLICAS}
    return Bytes(plan.payload_bytes, received, (_OWNERS - 1) * (sizes.slice_bytes + sizes.answer_bytes))


def on_link(local_seconds: float, exchange: Exchange, link: Link) -> float:
    """A step with an exchange that hides behind nothing."""
    return predict(Workload("", None, None, exchange, local_seconds, 0.0), link).step_seconds


@dataclass(frozen=True)
class Reading:
    """All that a table, the claims and the figure need."""

    size: str
    rows: Sequence[Row]
    losses: Mapping[str, Mapping[int, Outcome]]
    """By rule and k."""
    adamw: Mapping[str, Outcome]
    """As usual, and as searched."""

    def local(self, update: str) -> dict[int, float]:
        """Seconds of a step of a replica alone, by k."""
        found = {topk: _seconds(self.rows, _contender(self.size, update, topk)) for topk in TOPKS}
        return {topk: seconds for topk, seconds in found.items() if seconds is not None}

    def linked(self, update: str, link: Link) -> dict[int, float]:
        """The same among replicas on such links."""
        return {
            topk: on_link(seconds, ring_all_gather(bytes_at(self.size, topk).sent, _SHARING), link)
            for topk, seconds in self.local(update).items()
        }

    @property
    def adamw_local(self) -> float | None:
        """Seconds of a step of AdamW alone."""
        return _seconds(self.rows, _contender(self.size, _ADAMW))

    def adamw_linked(self, link: Link) -> float | None:
        """The same with gradients in bfloat16, none of them hidden behind backward."""
        local = self.adamw_local
        if local is None:
            return None
        return on_link(local, ring_all_reduce(_BF16_BYTES * self.rows[0]["parameters"], _SHARING), link)


def _read(rows: Sequence[Row], results: Path) -> Reading:
    size = _size_of(rows)  # losses are of the same: those of two sizes must not be on one line
    why, choice = (_newest(results, one.STUDY, one.contenders(size)) for one in (q4, q5))
    losses = {update: q4.of_rule(why, update) for update in _RULES}
    losses[q5.RULE] = {**q5.of_usual_chunk(choice), **losses[q5.RULE]}
    shown = {update: {topk: one for topk, one in found.items() if topk in TOPKS} for update, found in losses.items()}
    adamw = {name: why[name] for name in (q4.ADAMW, q4.ADAMW_SEARCHED) if name in why}
    return Reading(size, rows, {update: found for update, found in shown.items() if found}, adamw)


def _find(rows: Sequence[Row], results: Path) -> Finding:
    reading = _read(rows, results)
    head = ["k", "sent (kB)", *(f"received, {replicas} replicas (kB)" for replicas in _REPLICAS)]
    head += [f"with owners, {_OWNERS} replicas (kB)"]
    head += [f"{update} rule: {what}" for update in _RULES for what in ("step alone (ms)", f"over {_THIN} (ms)", "loss")]
    local = {update: reading.local(update) for update in _RULES}
    linked = {update: reading.linked(update, _LINKS[_THIN]) for update in _RULES}
    lines = []
    for topk in TOPKS:
        sizes = bytes_at(reading.size, topk)
        cells = [str(topk), _kilo(sizes.sent), *map(_kilo, sizes.received.values()), _kilo(sizes.received_with_owners)]
        for update in _RULES:
            loss = reading.losses.get(update, {}).get(topk)
            cells += [_milli(local[update].get(topk)), _milli(linked[update].get(topk)), loss.words if loss else "-"]
        lines.append(cells)
    claims = _claims(reading)
    return Finding(f"{table(head, lines)}\n\n{_words(reading)}", claims, _answer(reading) if rows else "")


def _answer(reading: Reading) -> str:
    least, most = TOPKS[0], TOPKS[-1]
    few, many = bytes_at(reading.size, least), bytes_at(reading.size, most)
    words = f"With k = {least} a replica sends {_kilo(few.sent)} kB in a step, with k = {most} {_kilo(many.sent)} kB, and "
    words += (
        f"receives as much from every other, or {_kilo(many.received_with_owners)} kB from {_OWNERS - 1} through owners."
    )
    for update in _RULES:
        local, linked = reading.local(update), reading.linked(update, _LINKS[_THIN])
        if least in local and most in local:
            words += f" With the {update} rule a step takes {_milli(local[least])} and {_milli(local[most])} ms alone"
            modelled = f"{_milli(linked[least])} and {_milli(linked[most])} ms as modelled"
            words += f", {modelled} with {_SHARING} replicas over {_THIN}."
        losses = reading.losses.get(update, {})
        if len(losses) > 1:
            ends = [f"{losses[topk].mean:.3f} at k = {topk}" for topk in (min(losses), max(losses))]
            words += f" Its loss is {' and '.join(ends)}."
    adamw = reading.adamw_linked(_LINKS[_THIN])
    return words + (
        f" AdamW with bfloat16 gradients takes {_milli(adamw)} ms over that link, as modelled." if adamw is not None else ""
    )


def _words(reading: Reading) -> str:
    parts = [
        "Bytes are the plan's, for one replica and step. A step alone is forward and backward of a quarter of the batch, "
        f"encoding, decoding and update, measured; over a link, {_SHARING} replicas exchange by all-gather after backward, "
        f"with {1000 * _LINKS[_THIN].round_trip_seconds:.0f} ms of round trip, as the planner models it."
    ]
    if reading.adamw_local is not None:
        times = ", ".join(f"{_milli(reading.adamw_linked(link))} ms over {name}" for name, link in _LINKS.items())
        alone = f"AdamW with gradients in bfloat16: {_milli(reading.adamw_local)} ms alone"
        parts.append(f"{alone}, {times}; its exchange hides behind nothing either.")
    if reading.adamw:
        trained = next(iter(reading.adamw.values())).rows[0]["trial"]
        parts.append(f"Losses are those of q4 and q5, after {trained['settings']['steps']} steps.")
    if not reading.losses:
        parts.append("There are no losses of q4 and q5 for this size of model yet.")
    return " ".join(parts)


def _kilo(num_bytes: float) -> str:
    return f"{num_bytes / 1000:,.1f}"


def _milli(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:,.1f}"


def _claims(reading: Reading) -> list[Claim]:
    least, most = TOPKS[0], TOPKS[-1]
    sizes = {topk: bytes_at(reading.size, topk) for topk in TOPKS}
    ratio = sizes[most].sent / sizes[least].sent
    claims = [
        Claim(f"k = {most} sends {ratio:.1f} times the bytes of k = {least}, less than in proportion", ratio < most / least),
        Claim(
            f"among {_OWNERS} replicas owners let each receive less than an all-gather at every k "
            f"({sizes[most].received[_OWNERS] / sizes[most].received_with_owners:.1f} times less at k = {most})",
            all(one.received_with_owners < one.received[_OWNERS] for one in sizes.values()),
        ),
    ]
    adamw = reading.adamw_linked(_LINKS[_THIN])
    for update in _RULES:
        local, linked = reading.local(update), reading.linked(update, _LINKS[_THIN])
        losses = reading.losses.get(update, {})
        if least in local and most in local:
            slower = local[most] / local[least] - 1
            text = (
                f"with the {update} rule a step alone takes at most {100 * _MOST_SLOWER:.0f} % longer at k = {most} than at"
            )
            claims.append(Claim(f"{text} k = {least} ({100 * slower:+.1f} %)", slower <= _MOST_SLOWER))
        if most in linked and adamw is not None:
            text = (
                f"over {_THIN}, a step with the {update} rule and k = {most} is {adamw / linked[most]:.1f} times as fast as"
            )
            claims.append(Claim(f"{text} one with an all-reduce of bfloat16 gradients", linked[most] < adamw))
        if len(losses) > 1:
            means = [losses[topk].mean for topk in sorted(losses)]
            text = f"with the {update} rule the loss falls with every larger k from {min(losses)} to {max(losses)}"
            claims.append(
                Claim(f"{text}: {', '.join(f'{mean:.3f}' for mean in means)}", all(a > b for a, b in pairwise(means)))
            )
            for name, dense in reading.adamw.items():
                first = next((topk for topk in sorted(losses) if is_below(losses[topk], dense)), None)
                which = "none is" if first is None else f"from k = {first}"
                text = f"with the {update} rule some k up to {max(losses)} ends below {name} ({dense.mean:.3f}): {which}"
                claims.append(Claim(text, first is not None))
    return claims


def _draw(rows: Sequence[Row], results: Path) -> dict[str, Drawing]:
    reading = _read(rows, results)
    draw: list[Callable[[Axes], None]] = [partial(_draw_bytes, reading)]
    draw += [partial(_draw_losses, reading)] if reading.losses else []
    draw += [partial(_draw_times, reading, update) for update in _RULES]
    page = Page(len(draw), columns=2)
    for axes, panel in zip(page.panels, draw, strict=True):
        panel(axes)
    for axes in page.panels:
        logarithmic(axes, TOPKS)
        room_for_labels(axes, 0.5)
    loss = ", and the last validation loss" if reading.losses else ""
    return {
        "bytes.png": Drawing(
            page, f"What a replica sends and receives in a step, how long a step takes{loss}, all against k."
        )
    }


def _draw_bytes(reading: Reading, axes: "Axes") -> None:
    sizes = {topk: bytes_at(reading.size, topk) for topk in TOPKS}
    line(axes, [(topk, one.sent / 1e3) for topk, one in sizes.items()], f"sent; received, {_REPLICAS[0]} replicas", 0)
    for index, replicas in enumerate(_REPLICAS[1:], start=1):
        points = [(topk, one.received[replicas] / 1e3) for topk, one in sizes.items()]
        line(axes, points, f"received, {replicas} replicas", index)
    points = [(topk, one.received_with_owners / 1e3) for topk, one in sizes.items()]
    line(axes, points, f"received with owners, {_OWNERS} replicas", len(_REPLICAS))
    if reading.rows:
        dense = ring_all_reduce(_BF16_BYTES * reading.rows[0]["parameters"], _SHARING)
        rule(axes, dense.received_bytes / 1e3, f"sent and received, all-reduce in bf16, {_SHARING} replicas")
    logarithmic_up(axes)
    title(axes, "Bytes of a replica", "coefficients sent of 4096", "kB per step")


def _draw_times(reading: Reading, update: str, axes: "Axes") -> None:
    linked = {f"over {name}": reading.linked(update, link) for name, link in _LINKS.items()}
    for index, (name, times) in enumerate({"alone": reading.local(update), **linked}.items()):
        if times:
            line(axes, [(topk, 1e3 * seconds) for topk, seconds in times.items()], name, index)
    for name, link in _LINKS.items():
        seconds = reading.adamw_linked(link)
        if seconds is not None:
            rule(axes, 1e3 * seconds, f"AdamW in bf16 over {name}")
    logarithmic_up(axes)
    title(axes, f"Time of a step, {update} rule, {_SHARING} replicas", "coefficients sent of 4096", "ms per step")


def _draw_losses(reading: Reading, axes: "Axes") -> None:
    for index, (update, found) in enumerate(reading.losses.items()):
        spread = [(min(found[topk].losses), max(found[topk].losses)) for topk in sorted(found)]
        line(axes, [(topk, one.mean) for topk, one in found.items()], f"{update} rule", index, spread)
    for name, one in reading.adamw.items():
        rule(axes, one.mean, name)
    title(axes, "Loss", "coefficients sent of 4096", "validation loss (nats per byte)")


STUDY = Study(
    "q7",
    "Bytes against k",
    "How much is sent and received, and how long does a step take, with k from 1 to 64?",
    find=_find,
    plan=_plan,
    draw=_draw,
    sources=("q4", "q5"),
    alone=True,
)
