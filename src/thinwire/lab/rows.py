"""What a comparison writes down: one row per number of hosts, link, method and round."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

PARTS = ("data", "forward", "backward", "encode", "exposed", "apply", "other")
# Ethernet, IPv4, and TCP with its time stamps.
HEADER_BYTES = 14 + 20 + 32


@dataclass(frozen=True)
class Cell:
    """One method on one link, in one ``round``. Seconds and bytes are those of a step: a median for ``seconds``, means for
    all else, over measured steps and hosts; where replicas speak in one of ``period`` steps, both kinds are weighted.
    ``sent`` and ``received`` are of the hosts' interfaces, those of the meter beside them. ``measured_bits`` is the rate of
    a sender's own bytes, found before the steps. ``error`` says why there are no figures."""

    num_hosts: int
    link: str
    method: str
    round: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    num_parameters: int = 0
    num_steps: int = 0
    period: int = 1
    seconds: float = 0.0
    least_seconds: float = 0.0
    most_seconds: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    hidden: float = 0.0
    meter_sent: float = 0.0
    meter_received: float = 0.0
    sent: float = 0.0
    sent_packets: float = 0.0
    received: float = 0.0
    received_packets: float = 0.0
    num_exchanges: float = 0.0
    measured_bits: float | None = None
    measured_round_trip: float | None = None
    error: str = ""

    @property
    def key(self) -> "Key":
        """What tells it from all others."""
        return self.num_hosts, self.link, self.method, self.round

    @property
    def compute(self) -> float:
        """Forward and backward, the same work in every cell of as many hosts."""
        return self.parts["forward"] + self.parts["backward"]

    def seconds_at(self, compute: float) -> float:
        """What a step would take if forward and backward took so long: everything but the wait for the network goes as much
        faster or slower as they do."""
        exposed = min(self.parts["exposed"], self.seconds)
        return exposed + (self.seconds - exposed) * compute / self.compute

    @property
    def not_compute(self) -> float:
        """All of the step that is not data, forward and backward."""
        return sum(self.parts[name] for name in ("encode", "exposed", "apply", "other"))

    @property
    def received_payload(self) -> float:
        """What the interface received, without the headers of its packets."""
        return self.received - HEADER_BYTES * self.received_packets


Key = tuple[int, str, str, int]
_SUMMED = ("hidden", "meter_sent", "meter_received", "sent", "sent_packets", "received", "received_packets", "num_exchanges")


def summarise(steps_of_hosts: Sequence[Sequence[dict[str, Any]]], period: int) -> dict[str, Any]:
    """The figures of a cell from the rows of all hosts' steps (`StepRow`, as dictionaries)."""
    seconds = [mean(rows) for rows in zip(*([row["seconds"] for row in host] for host in steps_of_hosts), strict=True)]
    rows = [row for host in steps_of_hosts for row in host]
    speaks = [row["num_exchanges"] > 0 for row in steps_of_hosts[0]]
    if period > 1 and any(speaks) and not all(speaks):
        loud = [value for value, is_loud in zip(seconds, speaks, strict=True) if is_loud]
        quiet = [value for value, is_loud in zip(seconds, speaks, strict=True) if not is_loud]
        typical = (median(loud) + (period - 1) * median(quiet)) / period
    else:
        typical = median(seconds)
    return {
        "num_steps": len(seconds),
        "seconds": typical,
        "least_seconds": min(seconds),
        "most_seconds": max(seconds),
        "parts": {name: _weighted(rows, name, period) for name in PARTS},
        **{name: _weighted(rows, name, period) for name in _SUMMED},
    }


def _weighted(rows: Sequence[dict[str, Any]], name: str, period: int) -> float:
    loud = [float(row[name]) for row in rows if row["num_exchanges"] > 0]
    quiet = [float(row[name]) for row in rows if row["num_exchanges"] == 0]
    if period == 1 or not loud or not quiet:
        return mean(loud + quiet)
    return (mean(loud) + (period - 1) * mean(quiet)) / period


def merge(cells: Sequence[Cell]) -> list[Cell]:
    """The rounds of a method on a link as one cell: the median of every figure, the extremes of all, and the steps of all.
    Rounds that failed are left out, unless all have."""
    groups: dict[tuple[int, str, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.num_hosts, cell.link, cell.method), []).append(cell)
    return [_merged([cell for cell in group if not cell.error] or group[-1:]) for group in groups.values()]


def _merged(rounds: Sequence[Cell]) -> Cell:
    if len(rounds) == 1:
        return rounds[0]
    return replace(
        rounds[-1],
        num_steps=sum(cell.num_steps for cell in rounds),
        seconds=median(cell.seconds for cell in rounds),
        least_seconds=min(cell.least_seconds for cell in rounds),
        most_seconds=max(cell.most_seconds for cell in rounds),
        parts={name: median(cell.parts[name] for cell in rounds) for name in PARTS},
        **{name: median(getattr(cell, name) for cell in rounds) for name in _SUMMED},
    )


def append(path: Path, cell: Cell) -> None:
    """Write a row down at once, so that an interrupted comparison loses none."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(cell)) + "\n")


def read(path: Path) -> list[Cell]:
    """All whole rows; the last of each kind counts."""
    if not path.is_file():
        return []
    names, cells = {one.name for one in fields(Cell)}, {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
            cell = Cell(**{name: value for name, value in row.items() if name in names})
        except (ValueError, TypeError):
            continue  # a line that was cut off
        cells[cell.key] = cell
    return list(cells.values())
