"""``thinwire lab``: hosts and thin links on this machine, and commands that run on them."""

import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from thinwire.commands import lab_compare
from thinwire.core.errors import check_choice
from thinwire.lab import support
from thinwire.lab.errors import LabError
from thinwire.lab.everywhere import run_everywhere
from thinwire.lab.layout import Layout
from thinwire.lab.network import Network
from thinwire.lab.verify import Row, measure, verify
from thinwire.lab.written import parse_layout
from thinwire.parallel.launch import InterruptedRunError
from thinwire.planner.links import format_bandwidth, format_seconds

# Tells the program that it has already become root of a user namespace.
_IN_USER_NAMESPACE = "THINWIRE_LAB_IN_USER_NAMESPACE"
_USAGE = """usage: thinwire lab COMMAND [options]

commands:
  check            what this machine can do, and whether links are as thin as asked for  (thinwire lab check --help)
  run -- COMMAND   run any command once per host                                         (thinwire lab run --help)
  compare          every method on every link: step times, bytes, time to a loss         (thinwire lab compare --help)
"""
_CORES = {
    "switch": "switched by the kernel; no link has delay",
    "netem": "switched by the kernel, delayed by its netem",
    "relay": "switched and delayed by a relay, since the kernel has no netem",
}


@dataclass(frozen=True)
class NetworkOptions:
    """Which network."""

    hosts: int | None = None
    """Hosts; 2 unless --links says otherwise."""
    link: str | None = None
    """The link of every host: rate, round trip, and more, such as 100mbit,20ms or 100mbit/20mbit,80ms,jitter=5ms,loss=0.1%
    (up/down), or unshaped. Unless given 100mbit,20ms, or unshaped inside islands."""
    links: str | None = None
    """A link for each host, with ; between them."""
    islands: int | None = None
    """Divide the hosts into this many islands, each with a fast switch of its own."""
    uplink: str | None = None
    """The link of every island to the others, shared by its hosts; or one for each, with ; between them."""

    def layout(self) -> Layout:
        """The network asked for."""
        return parse_layout(self.hosts, self.link, self.links, self.islands, self.uplink)


@dataclass(frozen=True)
class CheckCommand:
    """Say what this machine can do, build a network, and measure rates and round trips between all neighbours."""

    network: Annotated[NetworkOptions, tyro.conf.arg(name="")]
    debug: bool = False
    """Show where an error came from."""


@dataclass(frozen=True)
class RunCommand:
    """Run a command once per host: thinwire lab run [options] -- COMMAND ...

    It finds torchrun's variables in its environment (RANK, WORLD_SIZE, MASTER_ADDR, ...), for one process per host. Host 0
    writes to the terminal; what the others say is shown if they fail. docs/lab.md says what is real about these links.
    """

    network: Annotated[NetworkOptions, tyro.conf.arg(name="")]
    verify: bool = True
    """Measure the links first, and stop if they are not as asked for."""
    debug: bool = False
    """Show where an error came from."""


def command(arguments: list[str]) -> int:
    """Run it."""
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    if not arguments or arguments[0] in ("--help", "-h", "help"):
        print(_USAGE, end="")
        return 0 if arguments else 2
    chosen = SUBCOMMANDS[check_choice("thinwire lab", arguments[0], SUBCOMMANDS)]
    if not {"--help", "-h"} & set(options):
        support.require()
        if support.needs_user_namespace() and _IN_USER_NAMESPACE not in os.environ:
            os.environ[_IN_USER_NAMESPACE] = "1"
            support.become_root([sys.executable, "-m", "thinwire", "lab", *arguments])
    return chosen(arguments[1:])


def check(arguments: list[str]) -> int:
    """``thinwire lab check``."""
    asked = tyro.cli(CheckCommand, prog="thinwire lab check", args=arguments)
    console, layout = Console(), asked.network.layout()
    with Network(layout.hosts, layout.islands) as network:
        _describe(network, console)
        with console.status("measuring"):
            start, before = time.monotonic(), network.relay_seconds()
            rows = list(measure(network, every_pair=True))
            share = (network.relay_seconds() - before) / (time.monotonic() - start)
        is_relayed = network.core == "relay"
    print_rows(rows, console)
    if is_relayed:
        console.print(f"the relay took {share:.0%} of one core meanwhile", highlight=False)
    problems = [row.problem for row in rows if row.problem]
    if problems:
        raise LabError(f"the network is not as asked for: {problems[0]}; is the machine busy?")
    return 0


def run(arguments: list[str]) -> int:
    """``thinwire lab run``."""
    place = arguments.index("--") if "--" in arguments else len(arguments)
    program = arguments[place + 1 :]
    asked = tyro.cli(RunCommand, prog="thinwire lab run", args=arguments[:place])
    if not program:
        raise ValueError("there is no command to run: write it after --, as in thinwire lab run --hosts 2 -- COMMAND")
    if shutil.which(program[0]) is None:
        raise ValueError(f"there is no program {program[0]!r}")
    layout = asked.network.layout()
    with Network(layout.hosts, layout.islands) as network:
        if asked.verify:
            with Console(stderr=True).status("measuring the links"):
                verify(network)
        outcome = run_everywhere(network, program, os.environ, len(os.sched_getaffinity(0)))
    if outcome.signal_number:
        raise InterruptedRunError(outcome.signal_number)
    if outcome.code:
        print(f"thinwire: {outcome.sentence}", file=sys.stderr)
    return outcome.code


# Each takes what comes after its name, and returns an exit code.
SUBCOMMANDS: dict[str, Callable[[list[str]], int]] = {"check": check, "run": run, "compare": lab_compare.command}


def _describe(network: Network, console: Console) -> None:
    rights = "root of a user namespace" if _IN_USER_NAMESPACE in os.environ else "root"
    lines = [f"namespaces: yes, as {rights}", f"core: {_CORES[network.core]}", *network.notes]
    lines += [f"host {number}: {link}" for number, link in enumerate(network.layout.hosts)]
    for number, island in enumerate(network.layout.islands):
        lines.append(f"island {number}: hosts {', '.join(map(str, island.hosts))}; uplink {island.uplink}")
    for line in lines:
        console.print(line, highlight=False)


def print_rows(rows: list[Row], console: Console) -> None:
    """Measurements as a table."""
    table = Table(title="TCP between neighbours (rates without packet headers)", title_justify="left")
    for heading in ("way", "rate", "nominal", "share", "round trip", "nominal", ""):
        table.add_column(heading, justify="left" if heading in ("way", "") else "right")
    for row in rows:
        share = row.rate_bits / row.nominal_bits if row.rate_bits and row.nominal_bits else None
        table.add_row(
            f"{row.source} -> {row.target}",
            "" if row.rate_bits is None else format_bandwidth(row.rate_bits),
            "unshaped" if row.nominal_bits is None else format_bandwidth(row.nominal_bits),
            "" if share is None else f"{share:.1%}",
            format_seconds(row.round_trip_seconds),
            format_seconds(row.nominal_round_trip_seconds),
            "[red]not as asked for[/red]" if row.problem else row.note or "good",
        )
    console.print(table)
