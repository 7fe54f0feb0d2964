"""Collectives as rounds in which hosts wait for each other: a max-plus recursion, a number per host and round.

Hosts may differ in rate, distance and readiness, which the closed forms of `cost` cannot say. Where all are alike the two
give the same seconds. Letters: G groups that do the same without each other, H hosts of a group. Every function takes the
times (G, H) at which hosts are ready and returns those at which they are done. A message takes bytes / rate of the slower
end, then ``trips`` one-way trips, and a round ends when it is there: nothing is pipelined. The first message between two
hosts also pays for TCP's slow start; later ones find a window that has grown to hold as much.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from thinwire.planner.cost import TRIPS_PER_ROUND
from thinwire.planner.links import Link

Times = NDArray[np.float64]
Schedule = Literal["ring", "doubling"]
SCHEDULES: tuple[Schedule, ...] = ("ring", "doubling")


@dataclass(frozen=True)
class Hosts:
    """The links of the H hosts of a group: bytes per second, the seconds that each adds to a trip in one direction, and what
    a connection of each sends at first (endless: no slow start)."""

    bytes_per_second_H: Times
    trip_seconds_H: Times
    window_bytes_H: Times
    trips: int = TRIPS_PER_ROUND

    @classmethod
    def of(cls, links: Sequence[Link], trips: int = TRIPS_PER_ROUND, num_streams: int = 1) -> "Hosts":
        """One host per link; both ends of a trip add half of their link's one-way time. ``num_streams`` connections share
        the work of each, and have a window each."""
        rates = np.array([link.bytes_per_second for link in links])
        windows = np.array([num_streams * (link.window_bytes or np.inf) for link in links])
        return cls(rates, np.array([link.one_way_seconds / 2 for link in links]), windows, trips)

    @property
    def when_warm(self) -> "Hosts":
        """The same, when all connections have been used."""
        return replace(self, window_bytes_H=np.full(len(self), np.inf))

    def __len__(self) -> int:
        """H."""
        return len(self.bytes_per_second_H)

    def transfer_seconds(self, num_bytes: float, shift: int) -> Times:
        """What ``num_bytes`` take from the host ``shift`` places before each, at the rate of the slower end."""
        return num_bytes / np.minimum(self.bytes_per_second_H, np.roll(self.bytes_per_second_H, shift))

    def latency_seconds(self, shift: int) -> Times:
        """The trips of one round, from the host ``shift`` places before each."""
        return self.trips * (self.trip_seconds_H + np.roll(self.trip_seconds_H, shift))

    def slow_start_seconds(self, num_bytes: float, shift: int) -> Times:
        """What the first ``num_bytes`` from the host ``shift`` places before each take longer than later ones."""
        rate_H = np.minimum(self.bytes_per_second_H, np.roll(self.bytes_per_second_H, shift))
        round_trip_H = 2 * (self.trip_seconds_H + np.roll(self.trip_seconds_H, shift))
        return _slow_start(num_bytes, rate_H, round_trip_H, np.roll(self.window_bytes_H, shift))


def _slow_start(num_bytes: float, rate_H: Times, round_trip_H: Times, window_H: Times) -> Times:
    """`cost.slow_start_seconds` for many links at once."""
    seconds_H, left_H = np.zeros_like(rate_H), np.full_like(rate_H, num_bytes)
    while (waits_H := (left_H > window_H) & (window_H < rate_H * round_trip_H)).any():
        seconds_H[waits_H] += (round_trip_H - window_H / rate_H)[waits_H]
        left_H, window_H = left_H - window_H, 2 * window_H
    return seconds_H


def _rounds(ready_GH: Times, hosts: Hosts, steps: Sequence[tuple[int, float]]) -> Times:
    """One round after the other: each host waits for the one ``shift`` places before it, and takes so many bytes from it."""
    times_GH, place_H, known = ready_GH, np.arange(len(hosts)), set()
    for (shift, num_bytes), alike in itertools.groupby(steps):
        first_H = 0.0 if shift in known else hosts.slow_start_seconds(num_bytes, shift)
        known.add(shift)
        cost_H = hosts.transfer_seconds(num_bytes, shift) + hosts.latency_seconds(shift)
        source_H = (place_H - shift) % len(hosts)
        for _ in alike:
            times_GH = np.maximum(times_GH, times_GH[:, source_H]) + cost_H + first_H
            first_H = 0.0
    return times_GH


def gather_steps(num_hosts: int, message_bytes: float, schedule: Schedule) -> list[tuple[int, float]]:
    """Whom to receive from in each round of an all-gather, and how much.

    A ring has H - 1 rounds of one message. Doubling (Bruck's algorithm) has log2 H rounds, rounded up, of twice as much each
    time: the same bytes in all.
    """
    if schedule == "ring":
        return [(1, message_bytes)] * (num_hosts - 1)
    steps, held = [], 1
    while held < num_hosts:
        more = min(held, num_hosts - held)
        steps.append((held, more * message_bytes))
        held += more
    return steps


def all_gather(ready_GH: Times, hosts: Hosts, message_bytes: float, schedule: Schedule = "ring") -> Times:
    """Everyone's ``message_bytes`` to all."""
    return _rounds(ready_GH, hosts, gather_steps(len(hosts), message_bytes, schedule))


def reduce_scatter(ready_GH: Times, hosts: Hosts, num_bytes: float, schedule: Schedule = "ring") -> Times:
    """The sum of everyone's ``num_bytes``, a part of it to each: an all-gather of such parts, backwards."""
    return _rounds(ready_GH, hosts, gather_steps(len(hosts), num_bytes / len(hosts), schedule)[::-1])


def all_reduce(ready_GH: Times, hosts: Hosts, num_bytes: float, schedule: Schedule = "ring") -> Times:
    """The sum of everyone's ``num_bytes`` to all: a reduce-scatter, then an all-gather of the parts."""
    steps = gather_steps(len(hosts), num_bytes / len(hosts), schedule)
    return _rounds(ready_GH, hosts, steps[::-1] + steps)


def all_to_all(ready_GH: Times, hosts: Hosts, num_bytes: float) -> Times:
    """To each another part of ``num_bytes``, straight and one after the other; only the trip of the last one shows. All
    connections begin together, so that a host's windows add up; how long they stay small is told by its own link."""
    busy_GH = done_GH = ready_GH
    for shift in range(1, len(hosts)):
        busy_GH = np.maximum(busy_GH, np.roll(ready_GH, shift, axis=-1))
        busy_GH = busy_GH + hosts.transfer_seconds(num_bytes / len(hosts), shift)
        done_GH = np.maximum(done_GH, busy_GH + hosts.latency_seconds(shift))
    others = len(hosts) - 1
    windows_H = max(1, others) * hosts.window_bytes_H
    return done_GH + _slow_start(
        others / len(hosts) * num_bytes, hosts.bytes_per_second_H, 4 * hosts.trip_seconds_H, windows_H
    )
