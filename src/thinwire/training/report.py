"""What a run says when it ends: losses, bytes beside a dense all-reduce, where the time went, a sample."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from thinwire.core.errors import first_line
from thinwire.parallel.mesh import shape_of
from thinwire.training.history import Row
from thinwire.training.logs import read_rows, write_text
from thinwire.training.models import num_parameters
from thinwire.training.outcome import Outcome
from thinwire.training.progress import format_clock
from thinwire.training.run_page import FINISHED, NAME, rebuild
from thinwire.training.summary import BYTE_HEADS, byte_rows, byte_title, dense_step_bytes, harmless
from thinwire.training.text import TextData

_PROMPT_TOKENS = 16
# The last loss may be this much above the best without being called worse.
_WORSE = 1.02


def finish(outcome: Outcome, console: Console) -> None:
    """Print the summary, and write summary.json, sample.txt and the last state of the run's page. For replica 0."""
    folder = outcome.job.folder
    if not outcome.is_finished:
        console.print(f"stopped after step {outcome.state.step}, with a checkpoint", highlight=False)
        console.print(f"go on with: thinwire train --resume {folder}", highlight=False, soft_wrap=True)
        return
    rows = read_rows(folder / "log.jsonl")
    summary = summarise(outcome, rows)
    write_text(folder / "summary.json", json.dumps(summary, indent=1) + "\n")
    sample = _sample(outcome, console)
    if sample:
        write_text(folder / "sample.txt", sample)
    try:
        rebuild(folder, outcome.job.config, FINISHED)
    except Exception as error:  # no page is worth a run
        console.print(f"{NAME} is not up to date: {first_line(error)}", highlight=False, markup=False)
    _print(summary, sample, console, folder)


def summarise(outcome: Outcome, rows: list[Row]) -> dict[str, Any]:
    """All figures of a run, as plain data."""
    state = outcome.state
    evaluations = [row for row in rows if row["kind"] == "evaluation"]
    launch = outcome.job.config.launch
    num_replicas, num_shards = shape_of(launch.mesh, launch.islands, state.num_replicas)
    steps = max(1, state.step)
    # The number of replicas may not have been the same at all steps.
    dense = dense_step_bytes(launch, state.num_replicas, num_parameters(outcome.model))
    dense = dense if state.dense_bytes is None else state.dense_bytes / steps
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
        "dense_float32_bytes_per_step": dense,
        "dense_bfloat16_bytes_per_step": dense / 2,
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
        console.print("a sample of its text:", highlight=False)
        console.print(harmless(sample), highlight=False, markup=False, style="dim")
    console.print(f"\nrun folder: {folder} ({NAME}, log.jsonl, summary.json, checkpoints/last/model)", soft_wrap=True)


def _byte_table(summary: dict[str, Any]) -> Table:
    table = Table(title=byte_title(summary), title_justify="left")
    for name in BYTE_HEADS:
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    for row in byte_rows(summary):
        table.add_row(*row)
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
