"""The recursion over rounds: the closed forms where hosts are alike, and what unequal ones do."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.planner.cost import network_seconds, ring_all_gather, ring_all_reduce
from thinwire.planner.links import Link
from thinwire.planner.rounds import SCHEDULES, Hosts, all_gather, all_reduce, all_to_all, gather_steps, reduce_scatter

sizes = st.integers(2, 40)
links = st.builds(Link, st.floats(1e6, 1e12), st.floats(0.0, 0.3))
schedules = st.sampled_from(SCHEDULES)


def together(num_hosts: int) -> np.ndarray:
    return np.zeros((1, num_hosts))


def waits(num_bytes: float, link: Link, num_streams: int = 1) -> float:
    """How long a sender stands still in all, because its window is used up: nothing if it fills the link by then."""
    window, stood = 14_480 * num_streams, 0.0
    while num_bytes > window and (idle := link.round_trip_seconds - window / link.bytes_per_second) > 0:
        num_bytes, window, stood = num_bytes - window, 2 * window, stood + idle
    return stood


@given(num_hosts=sizes, link=links, part=st.integers(100, 10**9))
def test_equal_links_give_the_planners_formulas(num_hosts: int, link: Link, part: int) -> None:
    hosts, ready, num_bytes = Hosts.of([link] * num_hosts), together(num_hosts), part * num_hosts
    gathered = network_seconds(ring_all_gather(num_bytes, num_hosts), link, 2)
    assert all_gather(ready, hosts, num_bytes) == pytest.approx(gathered)
    reduced, first = network_seconds(ring_all_reduce(num_bytes, num_hosts), link, 2), waits(part, link)
    assert all_reduce(ready, hosts, num_bytes) == pytest.approx(reduced)
    assert reduce_scatter(ready, hosts, num_bytes) == pytest.approx((reduced - first) / 2 + first)


@given(num_hosts=sizes, link=links, part=st.integers(100, 10**9))
def test_each_pair_of_hosts_starts_slowly_once(num_hosts: int, link: Link, part: int) -> None:
    hosts, ready = Hosts.of([link] * num_hosts), together(num_hosts)
    rate, num_rounds = link.bytes_per_second, math.ceil(math.log2(num_hosts))
    lasts, trips = (num_hosts - 1) * part / rate, num_rounds * link.round_trip_seconds
    # With doubling every round has another neighbour: 1, 2, 4, ... parts, and in the last one what is still missing.
    parts = [min(2**index, num_hosts - 2**index) for index in range(num_rounds)]
    first = sum(waits(count * part, link) for count in parts)
    assert all_gather(ready, hosts, part, "doubling") == pytest.approx(lasts + trips + first)
    # A sum meets the same neighbours on its way back, with as much to say.
    assert all_reduce(ready, hosts, part * num_hosts, "doubling") == pytest.approx(2 * (lasts + trips) + first)
    # In an all-to-all all connections begin together.
    spread = waits((num_hosts - 1) * part, link, num_hosts - 1)
    straight = all_to_all(ready, hosts, part * num_hosts)
    assert straight == pytest.approx(lasts + link.round_trip_seconds + spread, abs=1e-9)
    assert all_gather(ready, hosts.when_warm, part) == pytest.approx(
        (num_hosts - 1) * (part / rate + link.round_trip_seconds)
    )
    shared = Hosts.of([link] * num_hosts, num_streams=4)
    gathered = (num_hosts - 1) * (part / rate + link.round_trip_seconds) + waits(part, link, 4)
    assert all_gather(ready, shared, part) == pytest.approx(gathered)


@given(num_hosts=st.integers(1, 70), schedule=schedules)
def test_the_rounds_bring_every_message_to_every_host(num_hosts: int, schedule: str) -> None:
    held = [[host] for host in range(num_hosts)]
    for shift, num_messages in gather_steps(num_hosts, 1, schedule):  # type: ignore[arg-type]
        # What a ring passes on is what came last; with doubling it is the newest so many of what a host began with.
        news = [part[-1:] if schedule == "ring" else part[: int(num_messages)] for part in held]
        held = [part + news[(host - shift) % num_hosts] for host, part in enumerate(held)]
    assert all(sorted(part) == list(range(num_hosts)) for part in held), "each once"


@given(found=st.lists(links, min_size=2, max_size=16), num_bytes=st.integers(1, 10**9))
def test_the_slowest_edge_of_a_ring_decides(found: list[Link], num_bytes: int) -> None:
    hosts = Hosts.of(found).when_warm
    edges = zip(found, found[1:] + found[:1], strict=True)
    worst = max(
        num_bytes / min(a.bytes_per_second, b.bytes_per_second) + (a.round_trip_seconds + b.round_trip_seconds) / 2
        for a, b in edges
    )
    assert all_gather(together(len(found)), hosts, num_bytes).max() == pytest.approx((len(found) - 1) * worst)


@given(num_hosts=sizes, link=links, late=st.floats(0.0, 100.0), schedule=schedules)
def test_one_that_comes_late_makes_all_late(num_hosts: int, link: Link, late: float, schedule: str) -> None:
    hosts, ready = Hosts.of([link] * num_hosts), together(num_hosts)
    ready[0, 0] = late
    for collective in (all_gather, all_reduce, reduce_scatter):
        on_time = collective(together(num_hosts), hosts, 10**6, schedule).max()  # type: ignore[arg-type]
        done = collective(ready, hosts, 10**6, schedule)  # type: ignore[arg-type]
        assert done.max() == pytest.approx(late + on_time)
        assert (done >= late).all(), "all need what it has"
    done = all_to_all(ready, hosts, 10**6)
    assert (done >= late).all()
    assert done.max() <= late + all_to_all(together(num_hosts), hosts, 10**6).max() + 1e-9


@given(found=st.lists(links, min_size=2, max_size=12), place=st.integers(0, 11), schedule=schedules)
def test_a_faster_host_never_hurts(found: list[Link], place: int, schedule: str) -> None:
    better = list(found)
    old = found[place % len(found)]
    better[place % len(found)] = Link(2 * old.bits_per_second, old.round_trip_seconds / 2)
    ready = together(len(found))
    for collective in (all_gather, all_reduce):
        before, after = (collective(ready, Hosts.of(some), 10**7, schedule) for some in (found, better))  # type: ignore[arg-type]
        assert (after <= before * (1 + 1e-12)).all()
    assert (all_to_all(ready, Hosts.of(better), 10**7) <= all_to_all(ready, Hosts.of(found), 10**7) * (1 + 1e-12)).all()


def test_groups_do_not_wait_for_each_other() -> None:
    hosts = Hosts.of([Link(8e6, 0.0, payload_share=1.0)] * 3)
    ready = np.array([[0.0, 0.0, 0.0], [5.0, 0.0, 0.0]])
    done = all_gather(ready, hosts, 10**6)
    assert done[0] == pytest.approx([2.0] * 3)
    assert done[1].max() == pytest.approx(7.0)
