"""Beyond one machine: how long a step of each way to exchange takes, for many replicas. A model, not a measurement.

What a stage takes is known in two ways: `closed_seconds`, the planner's formulas, for links that are all alike, and
`simulate`, the recursion of `rounds`, for any links; tests hold them equal. Rows come from the recursion. Pure: prints and
draws nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from thinwire.planner import rounds
from thinwire.planner.cost import slow_start_seconds
from thinwire.planner.rounds import SCHEDULES, Hosts, Schedule, Times
from thinwire.planner.scale_methods import Case, Method, Setting, Stage

_MOST_REPLICAS = 2**24


@dataclass(frozen=True)
class ScaleRow:
    """One step. ``received_bytes`` is what a replica receives over thin links, ``link_bytes`` what one thin link carries in
    each direction, ``island_bytes`` what a replica receives inside its island."""

    method: str
    schedule: str
    topk: int
    values: str
    num_parameters: int
    num_replicas: int
    num_devices: int
    received_bytes: float
    link_bytes: float
    island_bytes: float
    held_bytes: float
    compute_seconds: float
    optimizer_seconds: float
    network_seconds: float
    exposed_seconds: float
    step_seconds: float
    efficiency: float

    def as_dict(self) -> dict[str, Any]:
        """For a line of JSON."""
        return asdict(self)


def carried_bytes(stage: Stage, num_hosts: int) -> float:
    """What each host receives in a stage, and sends: the same for a ring and for doubling."""
    others = num_hosts - 1
    factor = {"all-gather": others, "all-to-all": others / num_hosts, "reduce-scatter": others / num_hosts}
    return stage.num_bytes * {**factor, "all-reduce": 2 * others / num_hosts}[stage.collective]


def num_rounds(stage: Stage, num_hosts: int, schedule: Schedule) -> int:
    """How many rounds of a stage must follow each other."""
    if stage.collective == "all-to-all":
        return min(1, num_hosts - 1) * stage.num_collectives
    once = num_hosts - 1 if schedule == "ring" else (num_hosts - 1).bit_length()
    return once * (2 if stage.collective == "all-reduce" else 1) * stage.num_collectives


def closed_seconds(stage: Stage, case: Case) -> float:
    """The planner's formula, for links that are all alike: bytes at their rate, the rounds' latency, and a slow start of
    every connection."""
    setting, num_hosts = case.setting, stage.num_hosts(case)
    link = (setting.island_link if stage.reach == "island" else setting.link).after(case.pause_seconds(stage))
    latency = setting.trips_per_round * num_rounds(stage, num_hosts, setting.schedule) * link.one_way_seconds
    streams = stage.num_streams(case) * (max(1, num_hosts - 1) if stage.collective == "all-to-all" else 1)
    begins = replace(link, window_bytes=streams * (link.window_bytes or 0))
    first = sum(slow_start_seconds(num_bytes, begins) for num_bytes in _first_messages(stage, num_hosts, setting.schedule))
    return carried_bytes(stage, num_hosts) / link.bytes_per_second + latency + first


def _first_messages(stage: Stage, num_hosts: int, schedule: Schedule) -> list[float]:
    """The first message of each connection that a host waits for: one in a ring, one per round with doubling; those of an
    all-to-all are under way together, and count as one."""
    if num_hosts == 1:
        return []
    if stage.collective == "all-to-all":
        return [carried_bytes(stage, num_hosts)]
    message = stage.num_bytes / (stage.num_collectives if stage.collective == "all-gather" else num_hosts)
    return list(dict(rounds.gather_steps(num_hosts, message, schedule)).values())


def closed_step_seconds(method: Method, case: Case) -> float:
    """A step by the formulas; no slow links and no straggler."""
    exposed = 0.0
    for stage in method.stages:
        seconds = closed_seconds(stage, case)
        exposed += max(0.0, seconds - case.hidden_seconds) if stage.is_hidden else seconds
    return case.compute_seconds + exposed + method.optimizer_seconds


def simulate(stage: Stage, case: Case, ready_R: Times) -> Times:
    """When each replica is done with a stage, from when it was ready."""
    size, num_hosts = case.setting.island_size, stage.num_hosts(case)
    links = [case.setting.island_link] * size if stage.reach == "island" else case.links(num_hosts)
    found = [link.after(case.pause_seconds(stage)) for link in links]
    hosts = Hosts.of(found, case.setting.trips_per_round, stage.num_streams(case))
    ready_GH = ready_R[None] if stage.reach == "replicas" else ready_R.reshape(-1, size)
    if stage.reach == "islands":
        # Its replicas share the island's link evenly, and go on when all of them are done.
        ready_GH = ready_GH.max(axis=1)[None]
    done_GH = _collective(stage, hosts, ready_GH, case.setting.schedule)
    return done_GH.repeat(size, axis=1).ravel() if stage.reach == "islands" else done_GH.ravel()


def _collective(stage: Stage, hosts: Hosts, ready_GH: Times, schedule: Schedule) -> Times:
    num_bytes = stage.num_bytes / stage.num_collectives
    if stage.collective == "all-to-all":
        return rounds.all_to_all(ready_GH, hosts, num_bytes)
    run = {"all-gather": rounds.all_gather, "all-reduce": rounds.all_reduce, "reduce-scatter": rounds.reduce_scatter}
    done_GH = run[stage.collective](ready_GH, hosts, num_bytes, schedule)
    if stage.num_collectives > 1:
        # The second and all later ones begin together, and take the same time.
        once = run[stage.collective](np.zeros_like(ready_GH), hosts.when_warm, num_bytes, schedule).max()
        done_GH = np.full_like(done_GH, done_GH.max() + (stage.num_collectives - 1) * once)
    return done_GH


def predict(method: Method, case: Case) -> ScaleRow:
    """One step of a method, by the recursion."""
    compute_R = np.full(case.num_replicas, case.compute_seconds)
    compute_R[0] *= case.setting.straggler
    times_R, network = compute_R, 0.0
    for stage in method.stages:
        ready_R = times_R - case.hidden_seconds if stage.is_hidden else times_R
        done_R = simulate(stage, case, ready_R)
        network += float(done_R.max() - ready_R.max())
        times_R = np.maximum(times_R, done_R)
    exposed = float(times_R.max()) - case.compute_seconds
    step = case.compute_seconds + exposed + method.optimizer_seconds
    thin = sum(carried_bytes(stage, stage.num_hosts(case)) for stage in method.stages if stage.reach != "island")
    inside = sum(carried_bytes(stage, stage.num_hosts(case)) for stage in method.stages if stage.reach == "island")
    shares_link = any(stage.reach == "islands" for stage in method.stages)
    return ScaleRow(
        method=method.name,
        schedule=case.setting.schedule,
        topk=case.setting.topk,
        values=case.setting.values,
        num_parameters=case.num_parameters,
        num_replicas=case.num_replicas,
        num_devices=case.num_devices,
        received_bytes=thin / case.setting.island_size if shares_link else thin,
        link_bytes=thin,
        island_bytes=inside,
        held_bytes=method.held_bytes,
        compute_seconds=case.compute_seconds,
        optimizer_seconds=method.optimizer_seconds,
        network_seconds=network,
        exposed_seconds=exposed,
        step_seconds=step,
        efficiency=case.compute_seconds / step,
    )


def make_rows(
    setting: Setting, parameters: Sequence[int], replicas: Sequence[int], schedules: Sequence[Schedule] = SCHEDULES
) -> list[ScaleRow]:
    """All methods for all sizes, schedules one after the other."""
    cases = [
        Case(replace(setting, schedule=schedule), num_parameters, num_replicas)
        for schedule in schedules
        for num_parameters in parameters
        for num_replicas in replicas
    ]
    return [predict(method, case) for case in cases for method in case.methods()]


Choice = Callable[[Case], Method]


def crossing_in_time(setting: Setting, num_parameters: int, choice: Choice = Case.all_gather) -> int | None:
    """The fewest replicas with which a step of ``choice`` takes as long as DDP's, by the formulas; None if it never does."""

    def is_slower(num_replicas: int) -> bool:
        case = Case(setting, num_parameters, num_replicas)
        return closed_step_seconds(choice(case), case) >= closed_step_seconds(case.ddp(), case)

    return _first(is_slower, setting.island_size if choice is Case.hierarchical else 1)


def crossing_in_bytes(setting: Setting, num_parameters: int, choice: Choice = Case.all_gather) -> int | None:
    """The fewest replicas with which a thin link carries as many bytes as with DDP: about 2 G / P for an all-gather."""

    def link_bytes(method: Method, case: Case) -> float:
        return sum(carried_bytes(stage, stage.num_hosts(case)) for stage in method.stages if stage.reach != "island")

    def is_more(num_replicas: int) -> bool:
        case = Case(setting, num_parameters, num_replicas)
        return link_bytes(choice(case), case) >= link_bytes(case.ddp(), case)

    return _first(is_more, setting.island_size if choice is Case.hierarchical else 1)


def _first(holds: Callable[[int], bool], unit: int) -> int | None:
    """The least multiple of ``unit`` from 2 on for which it holds, if it holds for all that are larger."""
    low = high = max(1, 2 // unit)
    while not holds(high * unit):
        low, high = high, 2 * high
        if high * unit > _MOST_REPLICAS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle * unit) else (middle, high)
    return high * unit
