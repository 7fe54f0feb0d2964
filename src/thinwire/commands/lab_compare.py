"""``thinwire lab compare``: every method on every link, measured in this machine's network lab."""

import json
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from thinwire.bench.environment import environment
from thinwire.commands.asked import make_folder
from thinwire.lab import rows
from thinwire.lab.compare import Comparison, run
from thinwire.lab.losses import best_curves, read_curves
from thinwire.lab.methods import choose
from thinwire.lab.table import summary
from thinwire.planner.link_spec import parse_link
from thinwire.training import recipes

_GRID = tuple(f"{rate}{trip}" for rate in ("10mbit", "100mbit", "1gbit") for trip in ("", ",20ms", ",80ms"))


@dataclass(frozen=True)
class CompareCommand:
    """Measure methods on links: seconds per step, where they go, bytes on the wire, time to a loss.

    Rows are written as they are measured: the same command with the same --out goes on where an interrupted one stopped.
    """

    methods: tuple[str, ...] = ("all",)
    """Names of methods, or all."""
    hosts: tuple[int, ...] = (2, 4)
    """Numbers of hosts, one replica each."""
    links: tuple[str, ...] = ("unshaped", *_GRID)
    """Links of each host, such as 100mbit,20ms (rate, round trip)."""
    recipe: str = "gpt-10m"
    """The model and data; a replica has half of the recipe's batch."""
    steps: int = 3
    """Steps to measure per method and link."""
    rounds: int = 1
    """How often to measure everything; medians of rounds are taken, since a machine's other work comes and goes."""
    most_seconds: float = 20.0
    """Measure no further steps of a method on a link after this time."""
    losses: Path | None = None
    """Loss curves (JSON lines: method, lr, seed, step, loss), for the time to a loss."""
    target: float | None = None
    """The validation loss to reach."""
    out: Path = Path("lab")
    """Folder for rows, tables and figures."""
    report_only: bool = False
    """Measure nothing: make tables and figures from the rows that are there."""


def command(arguments: list[str]) -> int:
    """Run it."""
    asked = tyro.cli(CompareCommand, prog="thinwire lab compare", args=arguments)
    console = Console()
    _check(asked)
    comparison = Comparison(
        asked.recipe,
        choose(list(asked.methods)),
        asked.hosts,
        tuple(parse_link(link, "links") for link in asked.links),
        asked.steps,
        asked.most_seconds,
        asked.rounds,
    )
    if asked.report_only and not (asked.out / "rows.jsonl").is_file():
        raise ValueError(f"--out {asked.out} has no rows.jsonl to report on: leave --report-only out to measure some")
    make_folder("--out", asked.out)
    if not asked.report_only:
        _note_environment(asked.out / "environment.json")
        _measure(comparison, asked.out / "rows.jsonl", console)
    wanted = set(comparison.keys())
    order = {key: place for place, key in enumerate(comparison.keys())}
    cells = sorted((c for c in rows.read(asked.out / "rows.jsonl") if c.key in wanted), key=lambda c: order[c.key])
    if not cells:
        raise ValueError(f"--out {asked.out} has no rows of these methods, links and hosts")
    report(rows.merge(cells), asked, console)
    return 1 if any(cell.error for cell in cells) else 0


def _check(asked: CompareCommand) -> None:
    for num_hosts in asked.hosts:
        if not 2 <= num_hosts <= 16:
            raise ValueError(f"hosts={num_hosts} must be from 2 to 16")
    for name in ("steps", "rounds"):
        if getattr(asked, name) < 1:
            raise ValueError(f"{name}={getattr(asked, name)} must be at least 1")
    if asked.target is not None and asked.losses is None:
        raise ValueError("target needs the loss curves: add --losses FILE")
    recipes.build(asked.recipe)


def _note_environment(path: Path) -> None:
    """One entry for every time that something was measured: code and machine may have changed in between."""
    known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    path.write_text(json.dumps([*known, environment()], indent=1) + "\n", encoding="utf-8")


def _measure(comparison: Comparison, path: Path, console: Console) -> None:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=console) as bar:
        task = bar.add_task("", total=len(comparison.keys()))

        def progress(what: str, num_done: int) -> None:
            bar.update(task, description=what, completed=num_done)
            if not console.is_terminal and what:
                console.print(f"{num_done} of {len(comparison.keys())}: {what}", highlight=False)

        run(comparison, path, progress)


def report(cells: list[rows.Cell], asked: CompareCommand, console: Console) -> None:
    """Tables on the console and in summary.md, and the figures."""
    from thinwire.lab.figure import draw_breakdown, draw_losses, draw_steps

    curves = best_curves(read_curves(asked.losses), asked.target) if asked.losses else {}
    text = summary(cells, curves, asked.target)
    (asked.out / "summary.md").write_text(text, encoding="utf-8")
    console.print(Markdown(text))
    draw_steps(cells, asked.out / "steps.png")
    slow = [cell for cell in cells if cell.num_hosts == asked.hosts[0] and cell.link == "10mbit"]
    if slow:
        draw_breakdown(slow, asked.out / "breakdown.png", f"{asked.hosts[0]} hosts, 10 Mbit/s")
    if curves:
        chosen = [cell for cell in cells if cell.num_hosts == asked.hosts[0] and cell.link in ("10mbit", "100mbit")]
        draw_losses(chosen, curves, asked.out / "loss.png", asked.target)
    console.print(f"rows, summary.md and figures are in {asked.out}", highlight=False, soft_wrap=True)
