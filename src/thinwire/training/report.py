"""What a run says when it ends: losses, bytes beside a dense all-reduce, where the time went, a sample, a figure."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from thinwire.core.errors import first_line
from thinwire.parallel.mesh import shape_of
from thinwire.planner.links import format_bytes
from thinwire.training.logs import Row, read_rows
from thinwire.training.loop import Outcome
from thinwire.training.models import num_parameters
from thinwire.training.progress import format_clock
from thinwire.training.text import TextData

_PROMPT_TOKENS = 16
_LABEL_POINTS = 11.0
# The last loss may be this much above the best without being called worse.
_WORSE = 1.02


def finish(outcome: Outcome, console: Console) -> None:
    """Print the summary and write summary.json, sample.txt and loss.png into the run folder. For replica 0."""
    folder = outcome.job.folder
    if not outcome.is_finished:
        console.print(f"stopped after step {outcome.state.step}, with a checkpoint", highlight=False)
        console.print(f"go on with: thinwire train --resume {folder}", highlight=False, soft_wrap=True)
        return
    rows = read_rows(folder / "log.jsonl")
    summary = summarise(outcome, rows)
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    sample = _sample(outcome, console)
    if sample:
        (folder / "sample.txt").write_text(sample, encoding="utf-8")
    try:
        draw_losses({outcome.state.optimizer: rows}, folder / "loss.png")
    except ImportError:
        console.print("no loss.png: the figure needs the package matplotlib", highlight=False)
    _print(summary, sample, console, folder)


def summarise(outcome: Outcome, rows: list[Row]) -> dict[str, Any]:
    """All figures of a run, as plain data."""
    state = outcome.state
    evaluations = [row for row in rows if row["kind"] == "evaluation"]
    launch = outcome.job.config.launch
    num_replicas, num_shards = shape_of(launch.mesh, launch.islands, state.num_replicas)
    dense = 2 * (num_replicas - 1) / num_replicas * num_parameters(outcome.model) / num_shards
    steps = max(1, state.step)
    return {
        "optimizer": state.optimizer,
        "num_replicas": num_replicas,
        "ranks_per_replica": num_shards,
        "num_parameters": num_parameters(outcome.model),
        "steps": state.step,
        "first_validation_loss": evaluations[0]["loss"] if evaluations else None,
        "last_validation_loss": state.loss,
        "best_validation_loss": state.best_loss,
        "accuracy": evaluations[-1]["accuracy"] if evaluations else None,
        "sent_bytes_per_step": state.sent_bytes / steps,
        "received_bytes_per_step": state.received_bytes / steps,
        "sent_bytes": state.sent_bytes,
        "received_bytes": state.received_bytes,
        "dense_float32_bytes_per_step": 4 * dense,
        "dense_bfloat16_bytes_per_step": 2 * dense,
        "elapsed_seconds": state.elapsed_seconds,
        "seconds": outcome.seconds,
        "settings": dataclasses.asdict(outcome.job.config),
    }


def _print(summary: dict[str, Any], sample: str, console: Console, folder: Path) -> None:
    console.print()
    accuracy = "" if summary["accuracy"] is None else f", {summary['accuracy']:.1%} right"
    console.print(
        f"validation loss {summary['first_validation_loss']:.4f} -> {summary['last_validation_loss']:.4f}"
        f" (best {summary['best_validation_loss']:.4f}{accuracy}) in {summary['steps']} steps,"
        f" {format_clock(summary['elapsed_seconds'])}",
        highlight=False,
    )
    if summary["last_validation_loss"] > _WORSE * summary["best_validation_loss"]:
        advice = "it was lowest earlier: checkpoints/best has that model; take fewer --steps or more data"
        console.print(advice, highlight=False, soft_wrap=True)
    console.print(_byte_table(summary))
    console.print(_time_table(summary["seconds"], summary["settings"]["launch"]["link"]))
    if sample:
        # A model that has not learned much writes control characters, which a terminal would obey.
        harmless = "".join(letter if letter.isprintable() or letter == "\n" else " " for letter in sample)
        console.print("a sample of its text:", highlight=False)
        console.print(harmless, highlight=False, markup=False, style="dim")
    console.print(f"\nrun folder: {folder} (loss.png, log.jsonl, summary.json, checkpoints/last/model)", soft_wrap=True)


def _byte_table(summary: dict[str, Any]) -> Table:
    who = "replica" if summary["ranks_per_replica"] == 1 else "rank"
    table = Table(title=f"bytes per step and {who} (all-reduce: a ring; whole run: both ways)", title_justify="left")
    for name in ("", "sent", "received", "whole run", "times as much"):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    own = summary["sent_bytes_per_step"] + summary["received_bytes_per_step"]
    rows = [(f"this run ({summary['optimizer']})", summary["sent_bytes_per_step"], summary["received_bytes_per_step"])]
    for kind in ("float32", "bfloat16"):
        dense = summary[f"dense_{kind}_bytes_per_step"]
        rows.append((f"{kind} all-reduce", dense, dense))
    for name, sent, received in rows:
        times = f"{(sent + received) / own:.1f}" if own else "-"
        both = format_bytes((sent + received) * summary["steps"])
        table.add_row(name, format_bytes(sent), format_bytes(received), both, times)
    return table


def _time_table(seconds: dict[str, float], link: str) -> Table:
    table = Table(title="where the time went", title_justify="left")
    for name in ("", "seconds", "share"):
        table.add_column(name, justify="left" if not name else "right")
    total = sum(seconds.values())
    for name, spent in seconds.items():
        label = f"{name} ({link}: a model)" if link and name == "network" else name
        table.add_row(label, f"{spent:.1f}", f"{spent / total:.0%}")
    return table


def _sample(outcome: Outcome, console: Console) -> str:
    try:
        return _generate(outcome)
    except Exception as error:  # not every model can generate; the run is done all the same
        console.print(f"no sample: {first_line(error)}", highlight=False, markup=False)
        return ""


@torch.no_grad()
def _generate(outcome: Outcome) -> str:
    """The model's own continuation of the first validation text."""
    data, config = outcome.data, outcome.job.config
    wanted = min(config.run.sample_tokens, config.data.sequence - _PROMPT_TOKENS)
    if not isinstance(data, TextData) or data.decode is None or wanted <= 0:
        return ""
    prompt = data.validation.fetch(np.zeros(1, dtype=np.int64)).inputs[:, :_PROMPT_TOKENS].to(outcome.device)
    outcome.model.eval()
    with torch.random.fork_rng(devices=[outcome.device] if outcome.device.type == "cuda" else []):
        torch.manual_seed(config.run.seed)
        tokens = outcome.model.generate(  # type: ignore[operator]
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=wanted, do_sample=True, temperature=0.8, top_k=50
        )
    return data.decode(tokens[0].tolist())


_STYLES = (("-", "o", "#0072B2"), ("--", "s", "#D55E00"), ("-.", "^", "#009E73"), (":", "D", "#000000"))


def draw_losses(runs: dict[str, list[Row]], path: Path) -> None:
    """Validation losses of some runs against steps, with the training loss faint behind; readable in grey."""
    import matplotlib.ticker

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), dpi=130)
    ends: list[tuple[float, float, str]] = []
    for (name, rows), (dashes, marker, colour) in zip(runs.items(), _STYLES * len(runs), strict=False):
        steps = [(row["step"], row["loss"]) for row in rows if row["kind"] == "step"]
        scores = [(row["step"], row["loss"]) for row in rows if row["kind"] == "evaluation"]
        if steps:
            axes.plot(*zip(*steps, strict=True), color=colour, alpha=0.25, linewidth=0.8)
        if scores:
            axes.plot(*zip(*scores, strict=True), dashes, marker=marker, color=colour, markersize=4)
            ends.append((scores[-1][1], scores[-1][0], f"{name} {scores[-1][1]:.3f}"))
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0)))
    axes.yaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
    axes.yaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats, log scale)")
    axes.set_title("validation loss (marks); training loss (faint)", fontsize=10)
    axes.margins(x=0.02)
    axes.grid(alpha=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout(rect=(0, 0, 0.88, 1))
    _label_ends(axes, ends)
    figure.savefig(path)
    plt.close(figure)


def _label_ends(axes: Any, ends: list[tuple[float, float, str]]) -> None:
    """Write each line's name beside its end, from the lowest upwards, moved up where two would lie on each other."""
    points_per_pixel = 72 / axes.figure.dpi
    last = -math.inf
    for loss, step, text in sorted(ends):
        height = axes.transData.transform((step, loss))[1] * points_per_pixel
        place = max(height, last + _LABEL_POINTS)
        axes.annotate(text, (step, loss), xytext=(6, place - height), textcoords="offset points", va="center", fontsize=9)
        last = place
