"""``thinwire bench``: what a step costs here, Thinwire's beside other optimizers'."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from thinwire.commands.asked import device_of, make_folder
from thinwire.core.errors import check_float, check_int

if TYPE_CHECKING:
    from thinwire.bench.step import StepRow

# Columns of a terminal that the whole table takes.
_WIDE = 120


@dataclass(frozen=True)
class BenchCommand:
    """Measure one optimizer step: every backend, fused AdamW and SGD, Muon and pytorch_optimizer's DeMo, in turns.

    docs/kernels.md says what the figures mean.
    """

    what: tyro.conf.Positional[Literal["step"]]
    """What to measure: step."""
    shapes: tuple[Literal["300m", "1b", "10m", "tiny"], ...] = ()
    """Whose parameters: the paper's 300M or 1B model, one of 10M, or a tiny one to try the command. Unless given, 300m on
    a GPU and 10m on a CPU."""
    topk: tuple[int, ...] = (32,)
    """Coefficients per chunk."""
    replicas: tuple[int, ...] = (8,)
    """Payloads to decode."""
    backends: tuple[Literal["triton", "torch"], ...] = ("triton", "torch")
    """Which of Thinwire's backends; triton is left out where it cannot run."""
    updates: tuple[Literal["sign", "sgd", "adamw", "lion", "muon"], ...] = ("sign",)
    """Update rules of the whole step; encoding and decoding alone are measured with sign."""
    balances: tuple[float, ...] = (0.0,)
    """Balance of the whole step, such as 0 0.95."""
    rounds: int = 9
    """Steps of each, after two that do not count."""
    device: str = "auto"
    """cuda, cpu, or auto: a GPU if there is one."""
    out: Path | None = None
    """A folder for rows, environment, summary and figure."""
    debug: bool = False
    """Show where an error came from."""


def command(arguments: list[str]) -> int:
    """Run it."""
    asked = tyro.cli(BenchCommand, prog="thinwire bench", args=arguments)
    for option in ("topk", "replicas"):
        for value in getattr(asked, option):
            check_int(f"--{option}", value, 1)
    check_int("--rounds", asked.rounds, 1)
    for balance in asked.balances:
        check_float("--balances", balance, 0.0, 1.0)
        if balance == 1:
            raise ValueError("--balances must be from 0 to below 1, got 1: each is the decay of a running mean")
    device = str(device_of(asked.device))
    if asked.out is not None:
        make_folder("--out", asked.out)
    from thinwire.bench.report import write
    from thinwire.bench.step import Case, StepRow, measure

    console, rows = Console(), list[StepRow]()
    for shapes in asked.shapes or (("300m",) if device.startswith("cuda") else ("10m",)):
        console.print(f"{shapes} shapes on {device}, {asked.rounds} steps of each contender", highlight=False)
        case = Case(shapes, asked.topk, asked.replicas, asked.backends, asked.rounds, device, asked.updates, asked.balances)
        for row in measure(case, lambda text: console.print(f"[dim]{text}[/dim]", highlight=False)):
            rows.append(row)
            console.print(f"{row.contender}: {row.median_ms:.2f} ms", highlight=False)
    _print(rows, console)
    if asked.out is not None:
        write(rows, asked.out, shlex.join(["thinwire", "bench", *without_out(arguments)]))
        print(f"rows, summary and figure: {asked.out}")
    return 0


def without_out(arguments: list[str]) -> list[str]:
    """Where the rows went is no part of what was measured."""
    pairs = zip(["", *arguments], arguments, strict=False)
    return [word for before, word in pairs if not word.startswith("--out") and before != "--out"]


def _print(rows: "list[StepRow]", console: Console) -> None:
    from thinwire.bench.report import HEADINGS, cells

    is_wide = console.width >= _WIDE
    shown = [place for place, heading in enumerate(HEADINGS) if is_wide or heading not in ("spread", "encode", "decode")]
    for shapes in dict.fromkeys(row.shapes for row in rows):
        table = Table(title=f"one step, {shapes} shapes", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
        for heading in (HEADINGS[place] for place in shown):
            is_name = heading == "step"
            table.add_column(heading, justify="left" if is_name else "right", no_wrap=not is_name)
        for row in rows:
            if row.shapes == shapes:
                table.add_row(*(cells(row)[place] for place in shown))
        console.print(table)
    if not is_wide:
        console.print("spread, encode and decode: in a wider terminal, or with --out", highlight=False)
