"""The page of a run, which a browser shows without any server: built from the run's records alone, also afterwards."""

import fcntl
import json
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from thinwire.core.errors import first_line
from thinwire.pages.axes import Axis
from thinwire.pages.chart import Chart, Series
from thinwire.pages.markdown import table
from thinwire.pages.page import document, facts, figures, folded, section, settings
from thinwire.pages.strips import Strip, Strips
from thinwire.planner.links import format_bytes
from thinwire.training.config import TrainConfig
from thinwire.training.errors import TrainingError
from thinwire.training.history import History, Row, Sampled
from thinwire.training.logs import read_rows
from thinwire.training.progress import format_clock
from thinwire.training.summary import BYTE_HEADS, byte_rows, byte_title, harmless, time_rows

_log = logging.getLogger("thinwire")
NAME = "index.html"
RUNNING, FINISHED, STOPPED, FAILED, ENDED = STATES = ("running", "finished", "stopped", "failed", "ended")
_SECONDS_BETWEEN = 5.0
# At most 1 part in 200 of the time of a run goes into its page.
_LEAST_REST = 200
# Styles: of what matters, of what stands beside it, of what lies behind.
_MAIN, _OTHER, _BEHIND = 0, 1, 2


class RunPage:
    """Writes the page of a run that goes on, now and then. A page that cannot be written is a warning."""

    def __init__(self, folder: Path, config: TrainConfig, history: History) -> None:
        self._folder, self._config, self._history = folder, config, history
        self._next, self._has_failed = 0.0, False

    def refresh(self) -> None:
        """Write it, if it is time to."""
        if time.monotonic() >= self._next:
            self.write()

    def write(self) -> None:
        """Write it now."""
        began = time.monotonic()
        try:
            write_page(self._folder, self._config, self._history)
        except Exception as error:  # no page is worth a run, whatever is wrong with it
            if not self._has_failed:
                _log.warning("%s is not up to date: %s", self._folder / NAME, first_line(error))
            self._has_failed = True
        now = time.monotonic()
        self._next = now + max(_SECONDS_BETWEEN, _LEAST_REST * (now - began))


def rebuild(folder: Path, config: TrainConfig, state: str | None = None) -> Path:
    """Build the page of a run from what lies in its folder; ``state``, if it is known, else what the log says."""
    rows = read_rows(folder / "log.jsonl")
    if not rows:
        raise TrainingError(f"{folder}: there is no run to show, log.jsonl is missing or empty")
    history = History()
    for row in rows:
        history.add(row)
    if state is None and history.end is None and not _is_held(folder):
        state = ENDED
    write_page(folder, config, history, state)
    return folder / NAME


def _is_held(folder: Path) -> bool:
    """Whether a run is writing to a folder now. A run that begins to in this very moment would be refused."""
    for path in folder.glob(".lock*"):
        with path.open("r+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    return False


def write_page(folder: Path, config: TrainConfig, history: History, state: str | None = None) -> None:
    """Write the page in one piece: who reads it meanwhile sees the one before. ``state``: what the history cannot know."""
    aside = folder / f".{NAME}.{os.getpid()}"
    try:
        aside.write_text(_page(folder, config, history, state), encoding="utf-8")
        os.replace(aside, folder / NAME)
    finally:
        aside.unlink(missing_ok=True)


def _page(folder: Path, config: TrainConfig, history: History, state: str | None) -> str:
    state = state or (RUNNING if history.end is None else history.end["state"])
    state = state if state in STATES else ENDED
    name, has_finished = folder.resolve().name, state == FINISHED
    body = [_head(folder, state, history, config), facts(_facts(history, config, state))]
    body.append(section("loss", "Loss", [figures(chart.html() for chart in _losses(history))]))
    body.append(section("network", "Network", [_network_part(history, config), *(_summary(folder) if has_finished else ())]))
    body.append(section("time", "Time", [figures(chart.html() for chart in _times(history, config)), _hidden(history)]))
    body.append(section("replicas", "Replicas", list(_replicas(history, config))))
    notes = "".join(f"<li>step {step:,}: {escape(text)}</li>" for step, text in history.notes)
    body.append(section("notes", "What happened", [f"<ul>{notes}</ul>"] if notes else []))
    body.append(section("settings", "Settings", list(_settings(history, config))))
    body += list(_sample(folder)) if has_finished else []
    return document(f"{name}: {state}", body, round(_SECONDS_BETWEEN) if state == RUNNING else 0)


def _head(folder: Path, state: str, history: History, config: TrainConfig) -> str:
    now = datetime.now(UTC)
    words = {RUNNING: "", FINISHED: "", STOPPED: f"go on with: thinwire train --resume {folder}"}
    said = words.get(state, "without a word: it was killed, or its machine was" if state == ENDED else "")
    if history.end is not None and history.end["text"]:
        said = history.end["text"]
    share = min(history.step, config.schedule.steps)
    bar = (
        f'<progress max="{config.schedule.steps}" value="{share}" aria-label="steps"></progress>'
        if state != FINISHED
        else ""
    )
    written = f'<time data-written datetime="{now.isoformat(timespec="seconds")}">written {now:%Y-%m-%d %H:%M:%S} UTC</time>'
    name = escape(folder.resolve().name)
    return (
        f'<header><h1>{name}</h1><p><span class="state {state}">{state}</span> {escape(said)}</p>{bar}'
        f'<p class="muted">{written}</p></header>'
    )


def _facts(history: History, config: TrainConfig, state: str) -> Iterator[tuple[str, str]]:
    totals, steps = history.totals, config.schedule.steps
    yield "step", f"{history.step:,} of {steps:,}"
    scores = [row["loss"] for row in history.evaluations.rows]
    if scores:
        yield "validation loss", f"{scores[-1]:.4f}"
    if scores and history.lowest < scores[-1]:
        yield "lowest", f"{history.lowest:.4f}"
    if history.evaluations.rows and history.evaluations.rows[-1].get("accuracy") is not None:
        yield "right answers", f"{history.evaluations.rows[-1]['accuracy']:.1%}"
    if history.loss.bins:
        yield "training loss", f"{history.loss.bins[-1].mean:.4f}"
    if history.speeds.rows:
        speed = history.speeds.rows[-1]
        yield f"{speed.get('unit', 'units')} per second", f"{speed['units_per_second']:,.0f}"
        yield "network wait", "unknown" if speed["wait_share"] is None else f"{speed['wait_share']:.0%}"
    if totals:
        both = totals["sent_bytes"] + totals["received_bytes"]
        yield "sent and received", format_bytes(both)
        yield "time", format_clock(totals["elapsed"])
        if state == RUNNING and history.step:
            spent = totals["elapsed"] - totals["set-up"]
            yield "left", format_clock(spent / history.step * max(0, steps - history.step))


def _losses(history: History) -> list[Chart]:
    y = Axis("nats (log scale)", is_log=True)
    bins, scores = history.loss.bins, history.evaluations.rows
    times = history.seconds_at(one.step for one in bins)
    score_times = history.seconds_at(row["step"] for row in scores)
    unit, size = _unit(max((one for one in (*times, *score_times) if one is not None), default=0.0))
    nowhere = float("nan")
    charts = []
    for title, x, across, score_across in (
        ("Loss against steps", Axis("step"), [float(one.step) for one in bins], [float(row["step"]) for row in scores]),
        (
            f"Loss against {unit}",
            Axis(unit),
            [nowhere if at is None else at / size for at in times],
            [nowhere if at is None else at / size for at in score_times],
        ),
    ):
        trained = [(at, one.mean) for at, one in zip(across, bins, strict=True)]
        spread = [(one.low, one.high) for one in bins] if any(one.count > 1 for one in bins) else None
        scored = [(at, row["loss"]) for at, row in zip(score_across, scores, strict=True)]
        lines = [Series("training", trained, spread, style=_BEHIND, faint=True), Series("validation", scored)]
        charts.append(Chart(title, x, y, lines))
    return charts


def _unit(seconds: float) -> tuple[str, float]:
    """Of an axis that goes to so many seconds."""
    return ("hours", 3600.0) if seconds > 10_800 else ("minutes", 60.0) if seconds > 180 else ("seconds", 1.0)


def _who(config: TrainConfig) -> str:
    """What the log counts: replicas, or the ranks of which each has several."""
    return "rank" if config.launch.mesh or config.launch.islands else "replica"


def _network_part(history: History, config: TrainConfig) -> str:
    if history.replicas.bins and all(one.high == 1 for one in history.replicas.bins):
        return "<p>There is one replica: nothing crosses a wire.</p>"
    return figures(chart.html() for chart in _network(history, _who(config)))


def _network(history: History, who: str) -> list[Chart]:
    """Bytes per step, in all, and per second. Between two measurements, all steps count alike."""
    known = [row for row in history.speeds.rows if "totals" in row]
    start: Row = {"step": 0, "totals": dict.fromkeys(known[0]["totals"], 0.0) if known else {}}
    pairs = list(zip([start, *known], known, strict=False))
    unit, size = _byte_unit(
        max((row["totals"][way] for row in known for way in ("sent_bytes", "received_bytes")), default=0)
    )
    per_step, in_all, rates = [], [], []
    for number, (way, key) in enumerate({"sent": "sent_bytes", "received": "received_bytes"}.items()):
        steps, speeds = [], []
        for one, other in pairs:
            grown = other["totals"][key] - one["totals"][key]
            seconds = other["totals"]["elapsed"] - one["totals"]["elapsed"]
            if other["step"] > one["step"] and seconds > 0:
                steps.append((float(other["step"]), grown / (other["step"] - one["step"]) / 1e3))
                speeds.append((float(other["step"]), 8e-6 * grown / seconds))
        style = (_MAIN, _OTHER)[number]
        per_step.append(Series(way, steps, style=style))
        rates.append(Series(way, speeds, style=style))
        in_all.append(Series(way, [(float(row["step"]), row["totals"][key] / size) for row in known], style=style))
    x = Axis("step", includes=(0.0,))
    return [
        Chart(f"Bytes per step, of one {who}", x, Axis("kB", includes=(0.0,)), per_step),
        Chart(f"Bytes in all, of one {who}", x, Axis(unit, includes=(0.0,)), in_all),
        Chart("Use of the link, with all pauses", x, Axis("Mbit/s", includes=(0.0,)), rates),
        Chart("Time spent waiting for bytes", x, Axis("% of training", includes=(0.0,)), [_waits(history.speeds)]),
    ]


def _waits(speeds: Sampled) -> Series:
    known = [(float(row["step"]), 100 * row["wait_share"]) for row in speeds.rows if row["wait_share"] is not None]
    return Series("network wait", known)


def _byte_unit(most: float) -> tuple[str, float]:
    return ("GB", 1e9) if most > 2e9 else ("MB", 1e6) if most > 2e6 else ("kB", 1e3)


def _summary(folder: Path) -> Iterator[str]:
    """The bytes beside those of an all-reduce."""
    path = folder / "summary.json"
    summary = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if summary.get("num_replicas", 1) > 1:
        yield f"<p>{escape(byte_title(summary))}</p>" + table(
            BYTE_HEADS, byte_rows(summary), (False, True, True, True, True)
        )


def _times(history: History, config: TrainConfig) -> list[Chart | Strips]:
    rows = time_rows(history.totals)
    total = sum(seconds for _, seconds in rows)
    link = f", network held back as over {config.launch.link}" if config.launch.link else ""
    unit, size = _unit(max((seconds for _, seconds in rows), default=0.0))
    strips = [Strip(name, [seconds / size], f"{seconds / total:.1%}") for name, seconds in rows]
    speeds = [(float(row["step"]), row["units_per_second"]) for row in history.speeds.rows]
    words = history.speeds.rows[-1].get("unit", "units") if history.speeds.rows else "units"
    return [
        Strips(f"Where the time went{link}", Axis(unit), strips, ("time",)),
        Chart("Speed", Axis("step"), Axis(f"{words} per second", includes=(0.0,)), [Series("speed", speeds)]),
    ]


def _hidden(history: History) -> str:
    hidden = history.totals.get("hidden", 0.0)
    words = f" Exchanges took {hidden:.1f} s more, hidden behind computation." if hidden > 0.05 else ""
    return f'<p class="muted">By the clock of replica 0.{words}</p>'


def _replicas(history: History, config: TrainConfig) -> Iterator[str]:
    bins, totals, who = history.replicas.bins, history.totals, _who(config)
    if bins:
        fewest, most = min(one.low for one in bins), max(one.high for one in bins)
        if fewest < most:
            points, spread = [(float(one.step), one.mean) for one in bins], [(one.low, one.high) for one in bins]
            chart = Chart(
                f"{who.capitalize()}s that took part",
                Axis("step"),
                Axis(f"{who}s", includes=(0.0,)),
                [Series(f"{who}s", points, spread)],
            )
            yield figures([chart.html()])
        else:
            yield f"<p>{most:.0f} {who if most == 1 else f'{who}s'} took part in every step.</p>"
    if "drift_checks" in totals:
        checks, differences = round(totals["drift_checks"]), round(totals["drift_differences"])
        found = f"they differed {differences} times" if differences else "they held the same each time"
        every = f"every {config.optim.check_drift_every} steps" if config.optim.check_drift_every else "never"
        outcome = f"{checks} checks, {found}" if checks else "no check was due yet"
        yield f"<p>Whether all replicas hold the same parameters is checked {every}: {outcome}.</p>"


def _settings(history: History, config: TrainConfig) -> Iterator[str]:
    rates = [(float(one.step), one.mean) for one in history.rate.bins]
    yield figures([Chart("Learning rate", Axis("step"), Axis("", includes=(0.0,)), [Series("learning rate", rates)]).html()])
    for name, values in asdict(config).items():
        yield folded(name, settings((key, str(value)) for key, value in values.items()))


def _sample(folder: Path) -> Iterator[str]:
    path = folder / "sample.txt"
    if path.exists():
        text = harmless(path.read_text(encoding="utf-8", errors="replace"))
        yield section("sample", "A sample of its text", [f"<pre><code>{escape(text)}</code></pre>"])
