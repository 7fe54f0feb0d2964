"""Does the laboratory do what it says? Real TCP transfers between neighbours, beside what was asked for."""

import json
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.lab import probe
from thinwire.lab.errors import LabError
from thinwire.lab.holder import INTERPRETER
from thinwire.lab.layout import Layout, address
from thinwire.lab.layout import Path as NetworkPath
from thinwire.lab.network import Network
from thinwire.lab.shaping import bucket
from thinwire.planner.links import TCP_PAYLOAD_SHARE, format_bandwidth, format_seconds

_SCRIPT = Path(probe.__file__).resolve()
# How far a measurement may be from what was asked for.
_RATE_SHARE = 0.05
_ROUND_TRIP_SHARE, _ROUND_TRIP_SECONDS = 0.1, 2e-3
_NUM_PINGS, _NUM_TRIES = 8, 3
# The shortest window, and how many bursts of a token bucket it must hold for one to be a small part of it.
_WINDOW_SECONDS, _NUM_BURSTS = 0.3, 40
_NUM_SLOW_START_TRIPS, _NUM_WINDOWS = 15, 8
_QUEUE_SECONDS, _QUEUE_BYTES, _UNLIMITED_WINDOW_BYTES = 0.05, (16 << 10, 64 << 10), 64 << 20
_START_SECONDS = 60.0


@dataclass(frozen=True)
class Row:
    """One way between two hosts. Rates in bits per second of the sender's own bytes; ``nominal_bits`` is the narrowest
    rate on the way, less the packets' headers, or None. A rate that is not measured is None; one that is not checked has a
    ``note`` that says why."""

    source: int
    target: int
    rate_bits: float | None
    nominal_bits: float | None
    round_trip_seconds: float
    nominal_round_trip_seconds: float
    jitter_seconds: float
    note: str = ""

    @property
    def problem(self) -> str | None:
        """What is not as asked for, as a sentence."""
        where = f"from host {self.source} to host {self.target}"
        most = (self.nominal_round_trip_seconds + self.jitter_seconds) * (1 + _ROUND_TRIP_SHARE) + _ROUND_TRIP_SECONDS
        least = self.nominal_round_trip_seconds * (1 - _ROUND_TRIP_SHARE) - _ROUND_TRIP_SECONDS
        if not least <= self.round_trip_seconds <= most:
            asked = format_seconds(self.nominal_round_trip_seconds)
            return f"the round trip {where} takes {format_seconds(self.round_trip_seconds)}, but {asked} was asked for"
        if self.rate_bits is None or self.nominal_bits is None or self.note:
            return None
        if abs(self.rate_bits / self.nominal_bits - 1) > _RATE_SHARE:
            asked = format_bandwidth(self.nominal_bits)
            return f"{format_bandwidth(self.rate_bits)} of data get {where}, but {asked} was asked for (headers not counted)"
        return None


def verify(network: Network, *, every_pair: bool = False, pairs: Sequence[tuple[int, int]] | None = None) -> list[Row]:
    """Measure, and raise `LabError` at the first thing that is not as asked for.

    Every pair of neighbours is reached; rates are measured both ways between one pair of each kind, or between every one.
    ``pairs``: (source, target) to measure instead."""
    rows = []
    for row in measure(network, every_pair=every_pair, pairs=pairs):
        if row.problem:
            raise LabError(f"the network is not as asked for: {row.problem}; is the machine busy?")
        rows.append(row)
    return rows


def measure(network: Network, *, every_pair: bool = False, pairs: Sequence[tuple[int, int]] | None = None) -> Iterator[Row]:
    """What is there, good or bad. A busy machine makes pauses, and what waited then comes all at once: so what is not as
    asked for is measured again before it is believed."""
    kinds = set()
    for number, (source, target) in enumerate(neighbours(network.num_hosts) if pairs is None else pairs):
        kind = (number % 2, *_kind(network.layout, source, target))
        with_rate = every_pair or pairs is not None or kind not in kinds
        yield _measure_again(network, source, target, with_rate)
        kinds.add(kind)


def _measure_again(network: Network, source: int, target: int, with_rate: bool) -> Row:
    """The first row that is as asked for, of a few tries, or else the last; an error only if all of them failed."""
    row, failure = None, LabError("nothing was measured")
    for _ in range(_NUM_TRIES):
        try:
            row = _measure(network, source, target, with_rate)
        except LabError as error:
            failure = error
        if row is not None and row.problem is None:
            break
    if row is None:
        raise failure
    return row


def neighbours(num_hosts: int) -> list[tuple[int, int]]:
    """Each host and the next, both ways."""
    pairs = [(host, (host + 1) % num_hosts) for host in range(num_hosts) if num_hosts > 1]
    return list(dict.fromkeys(way for pair in pairs for way in (pair, pair[::-1])))


def _kind(layout: Layout, source: int, target: int) -> tuple[object, ...]:
    here, there = layout.island_of(source), layout.island_of(target)
    between = (layout.uplinks[here], layout.uplinks[there]) if layout.islands and here != there else ()
    return layout.hosts[source], layout.hosts[target], between


def _measure(network: Network, source: int, target: int, with_rate: bool) -> Row:
    way = network.layout.path(source, target)
    asked = plan_probe(way, with_rate)
    command = [*INTERPRETER, str(_SCRIPT), str(network.holder_pid(target)), address(target), json.dumps(asked)]
    process = network.start(source, command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = process.communicate(timeout=_START_SECONDS + asked["seconds"])
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = "", "it took too long"
    if process.returncode != 0:
        said: Sequence[str] = err.strip().splitlines() or ["nothing"]
        raise LabError(f"host {source} cannot reach host {target}: {said[-1]}")
    found = json.loads(out)
    return Row(
        source=source,
        target=target,
        rate_bits=8 * found["rate"] if "rate" in found else None,
        nominal_bits=None if way.rate_bits is None else way.rate_bits * TCP_PAYLOAD_SHARE,
        round_trip_seconds=min(found["round_trips"]),
        nominal_round_trip_seconds=way.round_trip_seconds,
        jitter_seconds=way.jitter_seconds,
        note="not checked: packets are lost, which slows TCP down" if way.loss and with_rate else "",
    )


def plan_probe(way: NetworkPath, with_rate: bool) -> dict[str, Any]:
    """How to measure a way: long enough for a window that bursts do not matter in, with enough data under way to fill it,
    and not so many that a queue overflows."""
    round_trip, wanted = way.round_trip_seconds + way.jitter_seconds, None
    window, window_bytes, skip_bytes = _WINDOW_SECONDS, _UNLIMITED_WINDOW_BYTES, 0
    if way.rate_bits is not None:
        bytes_per_second, burst = way.rate_bits / 8, bucket(way.rate_bits).burst_bytes
        window = max(_WINDOW_SECONDS, _NUM_BURSTS * burst / bytes_per_second, 2 * round_trip)
        queue = min(_QUEUE_BYTES[1], max(_QUEUE_BYTES[0], bytes_per_second * _QUEUE_SECONDS))
        window_bytes = round(1.25 * bytes_per_second * round_trip / 2 + 2 * burst + queue)
        skip_bytes = round(2 * (burst + 2 * bytes_per_second * round_trip + queue))
        wanted = None if way.loss else bytes_per_second * TCP_PAYLOAD_SHARE
    return {
        "num_pings": _NUM_PINGS,
        "seconds": _NUM_WINDOWS * window + _NUM_SLOW_START_TRIPS * round_trip if with_rate else 0.0,
        "window_seconds": window,
        "window_bytes": window_bytes,
        # By then slow start has filled the way, and with it used up the buckets' credit.
        "skip_bytes": skip_bytes,
        "wanted": wanted,
    }
