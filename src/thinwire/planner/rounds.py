"""Collectives as rounds in which hosts wait for each other: a max-plus recursion, a number per host and round.

Hosts may differ in rate, distance and readiness, which the closed forms of `cost` cannot say. Where all are alike the two
give the same seconds. Letters: G groups that do the same without each other, H hosts of a group. Every function takes the
times (G, H) at which hosts are ready and returns those at which they are done. A message takes bytes / rate of the slower
end, then ``trips`` one-way trips, and a round ends when it is there: nothing is pipelined.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
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
    """The links of the H hosts of a group: bytes per second, and the seconds that each adds to a trip in one direction."""

    bytes_per_second_H: Times
    trip_seconds_H: Times
    trips: int = TRIPS_PER_ROUND

    @classmethod
    def of(cls, links: Sequence[Link], trips: int = TRIPS_PER_ROUND) -> "Hosts":
        """One host per link; both ends of a trip add half of their link's one-way time."""
        rates = np.array([link.bytes_per_second for link in links])
        return cls(rates, np.array([link.one_way_seconds / 2 for link in links]), trips)

    def __len__(self) -> int:
        """H."""
        return len(self.bytes_per_second_H)

    def transfer_seconds(self, num_bytes: float, shift: int) -> Times:
        """What ``num_bytes`` take from the host ``shift`` places before each, at the rate of the slower end."""
        return num_bytes / np.minimum(self.bytes_per_second_H, np.roll(self.bytes_per_second_H, shift))

    def latency_seconds(self, shift: int) -> Times:
        """The trips of one round, from the host ``shift`` places before each."""
        return self.trips * (self.trip_seconds_H + np.roll(self.trip_seconds_H, shift))


def _rounds(ready_GH: Times, hosts: Hosts, steps: Sequence[tuple[int, float]]) -> Times:
    """One round after the other: each host waits for the one ``shift`` places before it, and takes so many bytes from it."""
    times_GH, place_H = ready_GH, np.arange(len(hosts))
    for (shift, num_bytes), alike in itertools.groupby(steps):
        cost_H = hosts.transfer_seconds(num_bytes, shift) + hosts.latency_seconds(shift)
        source_H = (place_H - shift) % len(hosts)
        for _ in alike:
            times_GH = np.maximum(times_GH, times_GH[:, source_H]) + cost_H
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
    scattered_GH = reduce_scatter(ready_GH, hosts, num_bytes, schedule)
    return all_gather(scattered_GH, hosts, num_bytes / len(hosts), schedule)


def all_to_all(ready_GH: Times, hosts: Hosts, num_bytes: float) -> Times:
    """To each another part of ``num_bytes``, straight and one after the other; only the trip of the last one shows."""
    busy_GH = done_GH = ready_GH
    for shift in range(1, len(hosts)):
        busy_GH = np.maximum(busy_GH, np.roll(ready_GH, shift, axis=-1))
        busy_GH = busy_GH + hosts.transfer_seconds(num_bytes / len(hosts), shift)
        done_GH = np.maximum(done_GH, busy_GH + hosts.latency_seconds(shift))
    return done_GH
