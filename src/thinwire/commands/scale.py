"""``thinwire plan scale``: many replicas, on paper."""

import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import tyro
from rich.console import Console
from rich.markdown import Markdown

from thinwire.bench.environment import environment
from thinwire.commands.asked import make_folder
from thinwire.commands.bench import without_out
from thinwire.commands.plan import parse_count, read_link
from thinwire.core.errors import check_float, check_int
from thinwire.planner.rounds import SCHEDULES, Schedule
from thinwire.planner.scale import make_rows
from thinwire.planner.scale_methods import FAST, H200, SLOW, Setting
from thinwire.planner.scale_page import CROSSINGS, ROUNDS, crossings_table, describe, steps_table, write

# Ten seconds a size; it grows with the square.
_MOST_REPLICAS = 16_384


@dataclass(frozen=True)
class ScaleCommand:
    """Predict steps of many replicas: DDP, published DeMo, and Thinwire's three exchanges.

    A model, not a measurement: docs/scale.md says how it is made.
    """

    parameters: tuple[str, ...] = ("100M", "1B", "7B", "70B")
    """Sizes of models."""
    replicas: tuple[int, ...] = (8, 16, 32, 64, 128, 256, 512, 1024)
    """Numbers of replicas."""
    link: str = "1gbit,20ms"
    """What joins each replica, or each island, to the others: rate, round trip."""
    island: int = 8
    """Replicas in an island."""
    island_link: str = "400gbit,10us"
    """What joins the replicas of an island."""
    tokens: int = 65_536
    """Tokens per replica and step."""
    utilisation: float = H200.utilisation
    """The share of the rate of a matrix product that training reaches."""
    topk: int = 32
    """Coefficients per chunk."""
    values: str = "sign"
    """Value codec."""
    rounds: Literal["ring", "doubling", "both"] = "both"
    """Collectives in rings, as gloo has them, or with doubling distances, which have fewer rounds."""
    slow: int = 0
    """So many replicas, or islands, have --slow-link."""
    slow_link: str = "100mbit,40ms"
    """The link of those."""
    straggler: float = 1.0
    """One replica computes so many times as long as the others."""
    out: Path | None = None
    """A folder for rows, environment, summary and figures."""
    debug: bool = False
    """Show where an error came from."""


def command(arguments: list[str]) -> int:
    """Run it."""
    asked = tyro.cli(ScaleCommand, prog="thinwire plan scale", args=arguments)
    setting = _setting(asked)
    for number in asked.replicas:
        if check_int("--replicas", number, 1) > _MOST_REPLICAS:
            raise ValueError(f"--replicas must be at most {_MOST_REPLICAS:,}, got {number}: rounds are added up one by one")
    if asked.out is not None:
        make_folder("--out", asked.out)
    parameters = [parse_count(text, "--parameters") for text in asked.parameters]
    schedules: tuple[Schedule, ...] = SCHEDULES if asked.rounds == "both" else (asked.rounds,)
    rows = make_rows(setting, parameters, asked.replicas, schedules)
    parts = [f"A model, not a measurement. {describe(setting)}"]
    for schedule in schedules:
        parts += [f"**{ROUNDS[schedule]}**"]
        parts += [steps_table(rows, count, schedule, asked.replicas) for count in parameters]
    parts += [f"**{CROSSINGS}**", crossings_table(setting, parameters)]
    Console().print(Markdown("\n\n".join(parts)))
    if asked.out is not None:
        from thinwire.planner.scale_figure import draw

        words = shlex.join(["thinwire", "plan", "scale", *without_out(arguments)])
        write(rows, setting, asked.out, words, environment())
        for schedule in schedules:
            draw(rows, schedule, asked.out / f"{schedule}.png")
        print(f"rows, summary and figures: {asked.out}")
    return 0


def _setting(asked: ScaleCommand) -> Setting:
    check_float("--utilisation", asked.utilisation, 0.01, 1.0)
    check_float("--straggler", asked.straggler, 1.0)
    for name, least in {"island": 1, "slow": 0, "tokens": 1, "topk": 1}.items():
        check_int(f"--{name}", getattr(asked, name), least)
    return Setting(
        link=read_link(asked.link, "--link"),
        island_link=replace(
            read_link(asked.island_link, "--island-link"),
            payload_share=FAST.payload_share,
            window_bytes=FAST.window_bytes,
        ),
        island_size=asked.island,
        tokens=asked.tokens,
        topk=asked.topk,
        values=asked.values,
        device=replace(H200, utilisation=asked.utilisation),
        num_slow=asked.slow,
        slow_link=read_link(asked.slow_link, "--slow-link") if asked.slow else SLOW,
        straggler=asked.straggler,
    )
