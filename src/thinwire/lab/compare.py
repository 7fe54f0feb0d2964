"""Every method on every link: starts the workers in their hosts, changes the links between steps, writes rows down.

Processes start once per number of hosts, round and method; the links change while they wait between two steps, so that all
links see the same connections, model and machine. A round measures every cell once: what else a machine does changes over
minutes, and so hits one round of a cell rather than all of its steps.
"""

import dataclasses
import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.lab import rows
from thinwire.lab.errors import LabError
from thinwire.lab.methods import DENSE_STEPS, LabMethod
from thinwire.lab.network import Network
from thinwire.lab.rows import Cell, Key
from thinwire.lab.verify import verify
from thinwire.lab.workers import Workers
from thinwire.planner.link_spec import LinkSpec

_STEP_DEADLINE_SECONDS = 900.0
# A first step that took this long is measured, too: cold caches and a sleeping connection are a small part of it.
_LONG_SECONDS = 5.0
_WARM_UP_STEPS = DENSE_STEPS + 1


@dataclass(frozen=True)
class Comparison:
    """What to measure. ``most_seconds``: a cell measures no further steps after that time."""

    recipe: str
    methods: dict[str, LabMethod]
    num_hosts: tuple[int, ...]
    links: tuple[LinkSpec, ...]
    num_steps: int = 3
    most_seconds: float = 20.0
    num_rounds: int = 1

    def keys(self) -> list[Key]:
        """All cells, in the order in which they are measured."""
        turns = [(hosts, turn) for hosts in self.num_hosts for turn in range(self.num_rounds)]
        return [(hosts, str(link), name, turn) for hosts, turn in turns for name in self.methods for link in self.links]


Progress = Callable[[str, int], None]
"""Told what is being done, and how many cells are done."""


def run(comparison: Comparison, path: Path, progress: Progress) -> list[Cell]:
    """Measure what ``path`` does not hold yet; returns all rows of the comparison."""
    wanted = set(comparison.keys())
    done = {cell.key for cell in rows.read(path) if not cell.error} & wanted
    progress("", len(done))
    for num_hosts in comparison.num_hosts:
        if all(key in done for key in wanted if key[0] == num_hosts):
            continue
        will_delay = any(link.is_delayed for link in comparison.links)
        with Network([LinkSpec()] * num_hosts, will_delay=will_delay) as network:
            for turn, name in itertools.product(range(comparison.num_rounds), comparison.methods):
                links = [link for link in comparison.links if (num_hosts, str(link), name, turn) not in done]
                if links:
                    _measure_method(comparison, network, Cell(num_hosts, "", name, turn), links, path, done, progress)
    return [cell for cell in rows.read(path) if cell.key in wanted]


def _measure_method(
    comparison: Comparison,
    network: Network,
    blank: Cell,
    links: Sequence[LinkSpec],
    path: Path,
    done: set[Key],
    progress: Progress,
) -> None:
    """All links of one method in one round; what goes wrong is a row, and the next method's turn."""
    num_hosts, method = blank.num_hosts, comparison.methods[blank.method]
    what = f"{num_hosts} hosts, {blank.method}"
    if comparison.num_rounds > 1:
        what = f"round {blank.round + 1}, {what}"
    num_threads = max(1, len(os.sched_getaffinity(0)) // num_hosts)
    config = method.lab_config(comparison.recipe, num_hosts, num_threads)
    blank = dataclasses.replace(blank, settings=dataclasses.asdict(config.optim), period=method.period)
    network.reshape([LinkSpec()] * num_hosts)
    progress(f"{what}: starting", len(done))
    left = list(links)
    try:
        with Workers(network, num_hosts, config) as workers:
            blank = dataclasses.replace(blank, num_parameters=workers.num_parameters)
            workers.ask({"steps": _WARM_UP_STEPS}, _STEP_DEADLINE_SECONDS)
            while left:
                progress(f"{what}, {left[0]}", len(done))
                cell = _measure_link(comparison, network, workers, method, left[0], blank)
                rows.append(path, cell)
                done.add(cell.key)
                left.pop(0)
    except LabError as error:
        for link in left:
            rows.append(path, dataclasses.replace(blank, link=str(link), error=str(error)))


def _measure_link(
    comparison: Comparison, network: Network, workers: Workers, method: LabMethod, link: LinkSpec, blank: Cell
) -> Cell:
    """Shape, verify, let it settle, measure."""
    network.reshape([link] * blank.num_hosts)
    verified = verify(network)
    measured: list[list[dict[str, Any]]] = [[] for _ in range(blank.num_hosts)]
    spent, is_settled = 0.0, False
    while not measured[0] or (len(measured[0]) < comparison.num_steps and spent < comparison.most_seconds):
        answers = workers.ask({"steps": method.measured_period}, _STEP_DEADLINE_SECONDS)
        took = sum(step["seconds"] for step in answers[0]["steps"])
        spent += took
        if is_settled or took > _LONG_SECONDS:
            for host, answer in enumerate(answers):
                measured[host] += answer["steps"]
        is_settled = True
    return dataclasses.replace(
        blank,
        link=str(link),
        **rows.summarise(measured, method.period),
        measured_bits=min((row.rate_bits for row in verified if row.rate_bits is not None), default=None),
        measured_round_trip=max(row.round_trip_seconds for row in verified),
    )
