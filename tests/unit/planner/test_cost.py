import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from thinwire.bench.contenders import SHAPES
from thinwire.core.update_rules import orthogonalise, orthogonalising_flops
from thinwire.planner.cost import (
    DEVICES,
    DeviceCosts,
    Exchange,
    Workload,
    ddp,
    network_seconds,
    predict,
    published_demo,
    ring_all_gather,
    ring_all_reduce,
    thinwire_demo,
    transfer_seconds,
)
from thinwire.planner.links import Link
from thinwire.training import recipes
from thinwire.training.shapes import build_on_meta, specs_of

RESULTS = Path(__file__).parents[3] / "results"
# 8 Mbit/s without packet headers: one byte per microsecond. Without a slow start, so that sums stay short.
BYTE_PER_MICROSECOND = Link(8e6, 0.02, payload_share=1.0, window_bytes=None)
# The same, 100 ms there and back, so that 100 kB are under way when it is full; TCP begins with 10 kB.
SLOW = Link(8e6, 0.1, payload_share=1.0, window_bytes=10_000)
FREE = DeviceCosts(0.0, 0.0, 0.0, ddp_overlap=0.0)


def all_workloads(num_replicas: int, compute_seconds: float, costs: DeviceCosts) -> list[Workload]:
    return [
        ddp(1_000_000, 4, "fp32", num_replicas, compute_seconds, costs),
        published_demo(1_000_000, 96_000, 10, 32, num_replicas, compute_seconds, costs),
        thinwire_demo(1_000_000, 10_000, 32, "sign", num_replicas, compute_seconds, costs),
    ]


@pytest.mark.parametrize("shape", [(48, 48), (96, 32), (1, 40), (32, 96)])
def test_the_muon_rule_is_priced_by_what_it_computes(shape: tuple[int, int]) -> None:
    with FlopCounterMode(display=False) as counter:
        orthogonalise(torch.randn(1, *shape))
    assert orthogonalising_flops(*shape) == counter.get_total_flops()


def test_the_muon_rule_takes_as_long_as_it_was_measured_to() -> None:
    """Stored rows: the H200's step with either rule, and what a host of the lab takes to apply one."""
    step = {row["contender"]: row for row in stored("step_muon/2026-11-19_h200")}
    longer = step["thinwire triton, step(), muon rule"]["median_ms"] - step["thinwire triton, step()"]["median_ms"]
    assert DEVICES["gpu"].rule_seconds("muon", SHAPES["300m"], 64) == pytest.approx(longer / 1000, rel=0.05)
    apply = {
        name: statistics.mean(row["parts"]["apply"] for row in stored("lab/2026-11-16_cpu") if wants(row, name))
        for name in ("demo", "demo-muon")
    }
    shapes = [spec.shape for spec in specs_of(build_on_meta(recipes.build("gpt-10m")))]
    assert DEVICES["cpu"].rule_seconds("muon", shapes, 64) == pytest.approx(apply["demo-muon"] - apply["demo"], rel=0.05)
    assert DEVICES["cpu"].rule_seconds("sign", shapes, 64) == 0.0


def stored(folder: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / folder / "rows.jsonl").read_text().splitlines()]


def wants(row: dict[str, Any], method: str) -> bool:
    return row["method"] == method and row["num_hosts"] == 2 and not row.get("error")


def test_bytes_and_rounds_of_a_ring() -> None:
    assert ring_all_reduce(1000, 4) == Exchange(sent_bytes=1500, received_bytes=1500, num_rounds=6)
    assert ring_all_gather(1000, 4) == Exchange(sent_bytes=1000, received_bytes=3000, num_rounds=3)
    assert ring_all_gather(1000, 4, num_collectives=5) == Exchange(sent_bytes=1000, received_bytes=3000, num_rounds=15)
    assert ring_all_reduce(1001, 4).received_bytes == 1502


def test_network_time_by_hand() -> None:
    # 3000 bytes take 3 ms; 3 rounds of one 10 ms trip 30 ms, of two trips 60 ms.
    exchange = ring_all_gather(1000, 4)
    assert network_seconds(exchange, BYTE_PER_MICROSECOND, 1) == pytest.approx(0.033)
    assert network_seconds(exchange, BYTE_PER_MICROSECOND, 2) == pytest.approx(0.063)


def test_ddp_by_hand() -> None:
    # 4 MB * 2 * 3/4 = 6 MB: 6 s; 6 rounds of a round trip of 20 ms: 0.12 s; half of 2/3 of 3 s is hidden: 1 s.
    costs = DeviceCosts(2.0, 0.0, 0.0, ddp_overlap=0.5)
    row = predict(ddp(1_000_000, 4, "fp32", 4, 3.0, costs), BYTE_PER_MICROSECOND)
    assert row.network_seconds == pytest.approx(6.12)
    assert row.exposed_seconds == pytest.approx(5.12)
    assert row.optimizer_seconds == pytest.approx(0.002)
    assert row.step_seconds == pytest.approx(8.122)
    assert row.efficiency == pytest.approx(3 / 8.122)
    assert row.slowdown == pytest.approx(8.122 / 3)
    assert (row.label, row.topk, row.values) == ("DDP AdamW, fp32", None, None)


def test_demo_by_hand() -> None:
    # The payload, three times; one collective of 3 rounds of 20 ms.
    costs = DeviceCosts(0.0, 10.0, 0.0, ddp_overlap=1.0)
    row = predict(thinwire_demo(1_000_000, 10_000, 32, "sign", 4, 3.0, costs), BYTE_PER_MICROSECOND)
    assert (row.sent_bytes, row.received_bytes) == (10_000, 30_000)
    assert row.network_seconds == row.exposed_seconds == pytest.approx(0.03 + 0.06)
    assert row.step_seconds == pytest.approx(3.0 + 0.01 + 0.09)
    assert row.network_share == pytest.approx(0.09 / 3.01)
    assert row.label == "Thinwire DeMo, k=32, sign"


def overlapped(transfer: float, window: float, num_buckets: int) -> float:
    """The exposed seconds of DeMo in buckets, on a link without latency."""
    costs = DeviceCosts(0.0, 0.0, 0.0, ddp_overlap=0.0, demo_overlap=1.0)
    link = Link(8e6, 0.0, payload_share=1.0)
    workload = thinwire_demo(0, round(transfer * 1e6), 32, "sign", 2, 1.5 * window, costs, num_buckets)
    return predict(workload, link).exposed_seconds


def test_overlap_by_hand() -> None:
    # 0.5 s of exchange behind 1 s of backward: the last of eight buckets is left.
    assert overlapped(0.5, 1.0, 8) == pytest.approx(0.0625)
    # 4 s behind 1 s: the link is busy from 1/8 s on, and 7/8 s of it hides.
    assert overlapped(4.0, 1.0, 8) == pytest.approx(4 - 7 / 8)
    assert overlapped(4.0, 1.0, 1) == 4.0
    costs = DeviceCosts(0.0, 0.0, 0.0, ddp_overlap=0.5)
    row = predict(thinwire_demo(1_000_000, 400_000, 32, "sign", 2, 3.0, costs, 4), BYTE_PER_MICROSECOND)
    assert row.exposed_seconds == pytest.approx(0.1 + 0.02), "the latency of the last bucket shows; it hides as DDP does"


def test_ddp_with_a_number_of_buckets_cannot_hide_the_last() -> None:
    best, real = (DeviceCosts(0.0, 0.0, 0.0, ddp_overlap=1.0, ddp_buckets=buckets) for buckets in (None, 10))
    rows = [predict(ddp(1_000_000, 4, "fp32", 2, 30.0, costs), BYTE_PER_MICROSECOND) for costs in (best, real)]
    assert [row.exposed_seconds for row in rows] == [0.0, pytest.approx(0.4 + 0.04)]


@given(transfer=st.floats(0.001, 100.0), window=st.floats(0.0, 100.0), num_buckets=st.integers(1, 40))
def test_buckets_one_after_the_other(transfer: float, window: float, num_buckets: int) -> None:
    free_at = 0.0
    for bucket in range(1, num_buckets + 1):
        free_at = max(free_at, bucket * window / num_buckets) + transfer / num_buckets
    assert overlapped(transfer, window, num_buckets) == pytest.approx(free_at - window, rel=1e-3, abs=1e-5)


def test_bursts_pass_at_once() -> None:
    bucket = Link(8e6, 0.1, payload_share=1.0, burst_bytes=300_000, window_bytes=None)
    assert transfer_seconds(Exchange(10**6, 10**6, 1, num_pauses=2), bucket) == pytest.approx(0.4)
    assert transfer_seconds(Exchange(1, 1, 1), bucket) == 0.0
    two = Exchange(1, 2, 3, 4) + Exchange(10, 20, 30, 40)
    assert two == Exchange(11, 22, 33, 44)
    with pytest.raises(ValueError, match="burst_bytes=-1"):
        Link(8e6, 0.1, burst_bytes=-1)


@pytest.mark.parametrize(
    ("num_bytes", "seconds"),
    [
        (0, 0.0),
        (10_000, 0.01),  # the first window holds it
        (10_001, 0.1 + 0.000_001),  # a byte more waits for a round trip
        (30_000, 0.1 + 0.02),  # 10 kB, a round trip later 20 kB
        (70_000, 0.2 + 0.04),  # 10, 20 and 40 kB
        (100_000, 0.3 + 0.03),  # 10, 20, 40 and what is left
        # 10, 20, 40 and 80 kB, a round trip each; the next window is more than the link holds, so the rest does not wait.
        (1_000_000, 0.4 + 0.85),
        (100_000_000, 0.4 + 99.85),  # 1.0025 times the bytes' own time: a long message tends to the rate
    ],
)
def test_a_slow_start_by_hand(num_bytes: int, seconds: float) -> None:
    assert transfer_seconds(Exchange(1, num_bytes, 1), SLOW) == pytest.approx(seconds)
    # A round on top costs its own round trip.
    assert network_seconds(Exchange(1, num_bytes, 1), SLOW, 2) == pytest.approx(seconds + 0.1)


@given(num_bytes=st.integers(0, 10**9), bits=st.floats(1e4, 1e12), round_trip=st.floats(0.0, 1.0))
def test_a_slow_start_is_a_sender_that_waits_for_its_window(num_bytes: int, bits: float, round_trip: float) -> None:
    link, clock, sent, window = Link(bits, round_trip, payload_share=1.0), 0.0, 0, 10 * 1448
    while sent + window < num_bytes and window * 8 / bits < round_trip:
        clock, sent, window = clock + round_trip, sent + window, 2 * window
    alone = clock + (num_bytes - sent) * 8 / bits
    assert transfer_seconds(Exchange(1, num_bytes, 1), link) == pytest.approx(alone, rel=1e-6, abs=1e-9)


def test_only_the_first_of_many_messages_starts_slowly() -> None:
    # Nine rounds of 30 kB: 0.27 s of bytes, and the first waits once, 0.1 s less the 10 ms of its first 10 kB.
    assert transfer_seconds(ring_all_gather(30_000, 10), SLOW) == pytest.approx(0.27 + 0.09)
    assert transfer_seconds(ring_all_gather(10_000, 10), SLOW) == pytest.approx(0.09), "each fits the first window"
    # An all-reduce of 300 kB among ten: eighteen rounds of 30 kB.
    assert transfer_seconds(ring_all_reduce(300_000, 10), SLOW) == pytest.approx(0.54 + 0.09)
    # 5 tensors, two messages of 30 kB each, one after the other.
    row = predict(published_demo(1, 300_000, 5, 32, 2, 1.0, FREE), SLOW)
    assert row.network_seconds == pytest.approx(0.3 + 0.09 + 10 * 0.1)
    # One exchange in four steps, of 30 kB: a quarter of all that in each.
    assert transfer_seconds(Exchange(1, 7_500, 0.25, period=4), SLOW) == pytest.approx((0.03 + 0.09) / 4)


def test_a_window_is_kept_through_a_short_pause() -> None:
    def network(compute_seconds: float, costs: DeviceCosts = FREE) -> float:
        return predict(thinwire_demo(10**9, 30_000, 32, "sign", 2, compute_seconds, costs), SLOW).network_seconds

    assert network(0.49) == pytest.approx(0.03 + 0.1)
    assert network(0.51) == pytest.approx(0.03 + 0.09 + 0.1)
    assert network(0.4, DeviceCosts(0.0, 0.2, 0.0, 0.0)) == pytest.approx(0.22), "the optimizer's 0.2 s are a pause too"
    # Of 0.9 s DDP hides up to 2/3 of backward, in which the link is busy: 0.3 s are left.
    short, long = (ddp(15_000, 2, "bf16", 2, 0.9, DeviceCosts(0.0, 0.0, 0.0, overlap)) for overlap in (1.0, 0.0))
    assert predict(short, SLOW).network_seconds == pytest.approx(0.03 + 2 * 0.1)
    assert predict(long, SLOW).network_seconds == pytest.approx(0.03 + 0.09 + 2 * 0.1), "the first 15 kB wait once"
    rare = Exchange(1, 7_500, 0.25, period=4)
    assert Workload("rare", None, None, rare, 0.2, 0.0).pause_seconds == pytest.approx(0.8), "it speaks in one of four"


def test_the_first_bucket_starts_slowly_and_the_others_follow_it() -> None:
    costs = DeviceCosts(0.0, 0.0, 0.0, ddp_overlap=0.5)
    # 1 s of backward hides, buckets of 30 kB: nothing queues, and the last takes its own 30 ms and a round trip.
    row = predict(thinwire_demo(0, 240_000, 32, "sign", 2, 3.0, costs, 8), SLOW)
    assert row.exposed_seconds == pytest.approx(0.03 + 0.1)
    # Only 30 ms of backward hide: busy after an eighth of them, and the first 30 kB wait once, 0.1 s less their first 10 ms.
    hurried = DeviceCosts(0.0, 0.0, 0.0, ddp_overlap=0.015, collectives_at_once=8)
    row = predict(thinwire_demo(0, 240_000, 32, "sign", 2, 3.0, hurried, 8), SLOW)
    assert row.exposed_seconds == pytest.approx(0.24 - 7 / 8 * 0.03 + 0.09 + 0.1)
    # Two buckets at a time: the third begins when the first is there, after 30 ms, a slow start and a round trip, and so on.
    row = predict(thinwire_demo(0, 240_000, 32, "sign", 2, 3.0, replace(hurried, collectives_at_once=2), 8), SLOW)
    assert row.exposed_seconds == pytest.approx(-7 / 8 * 0.03 + 0.09 + 5 * 0.03 + 4 * 0.1)
    # 4 MB: busy from 1/8 s on; buckets of 500 kB, of which the first waits 4 round trips less the time of 150 kB.
    row = predict(thinwire_demo(0, 4_000_000, 32, "sign", 2, 3.0, costs, 8), SLOW)
    assert row.exposed_seconds == pytest.approx(4 - 7 / 8 + 0.25 + 0.1)


@pytest.mark.parametrize("window", [None, 0, math.inf])
def test_links_without_a_slow_start(window: float | None) -> None:
    exchange = ring_all_gather(10**6, 2)
    assert transfer_seconds(exchange, replace(SLOW, window_bytes=window)) == pytest.approx(1.0)
    assert transfer_seconds(exchange, replace(SLOW, round_trip_seconds=0.0)) == 1.0, "nothing to wait for without delay"
    assert Link(8e6, 0.1).window_bytes == 14_480, "ten segments, unless something else is said"
    for senseless in (-1.0, math.nan):
        with pytest.raises(ValueError, match=r"window_bytes=.* must be above 0, or None for no slow start"):
            Link(8e6, 0.1, window_bytes=senseless)


def test_the_published_code_pays_the_latency_of_every_tensor_twice() -> None:
    row = predict(published_demo(1_000_000, 96_000, 10, 32, 2, 1.0, FREE), BYTE_PER_MICROSECOND)
    assert row.network_seconds == pytest.approx(0.096 + 20 * 0.02)


@pytest.mark.parametrize("device", DEVICES)
def test_one_replica_sends_nothing(device: str) -> None:
    for workload in all_workloads(1, 1.0, DEVICES[device]):
        row = predict(workload, Link(1.0, 100.0))
        assert (row.sent_bytes, row.received_bytes, row.network_seconds, row.exposed_seconds) == (0, 0, 0, 0)
        assert row.step_seconds == row.local_seconds


@pytest.mark.parametrize("device", DEVICES)
def test_on_an_endless_link_only_compute_and_optimizer_remain(device: str) -> None:
    for workload in all_workloads(64, 1.0, DEVICES[device]):
        row = predict(workload, Link(1e30, 0.0))
        assert row.step_seconds == pytest.approx(1.0 + workload.optimizer_seconds)


def test_on_a_hopeless_link_the_bytes_decide() -> None:
    dense, published, ours = (predict(workload, Link(1e3, 0.0)) for workload in all_workloads(2, 1.0, FREE))
    assert dense.step_seconds / ours.step_seconds == pytest.approx(4_000_000 / 10_064, rel=0.02)
    assert published.step_seconds / ours.step_seconds == pytest.approx(96_000 / 10_064, rel=0.02)


@given(
    slow=st.floats(1e3, 1e12),
    faster=st.floats(1.0, 1e6),
    round_trip=st.floats(0.0, 1.0),
    num_replicas=st.integers(1, 256),
    compute=st.floats(1e-3, 1e3),
)
def test_a_faster_or_nearer_link_is_never_slower(
    slow: float, faster: float, round_trip: float, num_replicas: int, compute: float
) -> None:
    for workload in all_workloads(num_replicas, compute, DEVICES["cpu"]):
        before = predict(workload, Link(slow, round_trip))
        assert predict(workload, Link(slow * faster, round_trip)).step_seconds <= before.step_seconds
        assert predict(workload, Link(slow, round_trip / 2)).step_seconds <= before.step_seconds
        assert 0 < before.efficiency <= 1
        assert before.efficiency * before.slowdown == pytest.approx(1.0)
        assert before.exposed_seconds <= before.network_seconds


@given(num_replicas=st.integers(1, 255), overlap=st.floats(0.0, 1.0))
def test_more_replicas_cost_more_and_overlap_costs_less(num_replicas: int, overlap: float) -> None:
    link = Link(1e7, 0.01)
    fewer, more = (all_workloads(count, 1.0, FREE) for count in (num_replicas, num_replicas + 1))
    for before, after in zip(fewer, more, strict=True):
        assert predict(before, link).step_seconds < predict(after, link).step_seconds
    hidden = predict(ddp(1_000_000, 4, "fp32", 4, 1.0, DeviceCosts(0.0, 0.0, 0.0, overlap)), link)
    assert hidden.exposed_seconds == pytest.approx(hidden.network_seconds - overlap * 2 / 3)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"ddp_overlap": 1.5}, "ddp_overlap=1.5 must be from 0"),
        ({"demo_overlap": -0.5}, "demo_overlap=-0.5 must be from 0"),
        ({"adamw_ns_per_parameter": -1.0}, "adamw_ns_per_parameter=-1.0"),
        ({"demo_ns_per_parameter": float("nan")}, "demo_ns_per_parameter=nan"),
        ({"trips_per_round": 3}, "trips_per_round=3 must be 1 or 2"),
        ({"ddp_buckets": 0}, "ddp_buckets=0 must be at least 1"),
    ],
)
def test_senseless_costs_are_refused(change: dict[str, float], complaint: str) -> None:
    fields = {"adamw_ns_per_parameter": 1.0, "demo_ns_per_parameter": 1.0, "published_ns_per_parameter": 1.0}
    with pytest.raises(ValueError, match=complaint):
        DeviceCosts(**{**fields, "ddp_overlap": 0.0, **change})  # type: ignore[arg-type]
