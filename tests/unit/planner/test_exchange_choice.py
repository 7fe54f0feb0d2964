"""All-gather or owner exchange: sizes are those of the real messages, times by hand, and the choice is the shorter step."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from thinwire.exchange.choice import ALL_GATHER, OWNER
from thinwire.exchange.loopback import run_replicas
from thinwire.exchange.plan import Coding, TensorSpec, make_plan
from thinwire.exchange.transport import Transport
from thinwire.optimizer import DeMo
from thinwire.planner.cost import DEVICES, DeviceCosts, Exchange, all_to_all, predict, transfer_seconds
from thinwire.planner.link_spec import parse_link
from thinwire.planner.links import Link
from thinwire.planner.owners import LEAST_GAIN, Sizes, better, both_exchanges, choose_exchange, sizes_of
from thinwire.planner.report import make_report, tensors_from_count
from thinwire.planner.scale import closed_seconds
from thinwire.planner.scale_methods import Case, Setting

# One byte per microsecond, 20 ms there and back, no slow start.
LINK = Link(8e6, 0.02, payload_share=1.0, window_bytes=None)
FREE = DeviceCosts(0.0, 0.0, 0.0, ddp_overlap=0.5)


@pytest.mark.parametrize("options", [{}, {"overlap": True, "num_buckets": 3}, {"owner_topk": 12}], ids=str)
def test_sizes_are_those_of_the_real_messages(options: dict[str, Any]) -> None:
    def work(transport: Transport) -> tuple[int, int, Sizes]:
        model = nn.Sequential(nn.Linear(48, 80), nn.Linear(80, 33))
        optimizer = DeMo(
            model.parameters(), chunk=16, topk=8, dense_below=100, transport=transport, exchange="owner", **options
        )
        (model(torch.randn(2, 48)) * (1 + transport.replica)).square().sum().backward()
        optimizer.step()
        count = optimizer.traffic.last_step
        return count.sent_bytes, count.received_bytes, sizes_of(optimizer.plan, transport.num_replicas)

    for sent, received, sizes in run_replicas(work, 3):
        _, owner = both_exchanges(0, sizes, 8, "sign", 3, 1.0, FREE)
        assert (sent, received) == (owner.sent_bytes, owner.received_bytes)
        assert received == 2 * (sizes.slice_bytes + sizes.answer_bytes)


def test_a_plan_without_owners_is_given_some() -> None:
    plan = make_plan([TensorSpec("w", (640, 640), "torch.float32", 0)], [Coding(64, 32, "sign", "adaptive", 4096)])
    few, usual, many = (sizes_of(plan, 4, owner_topk) for owner_topk in (16, None, 512))
    assert few.payload_bytes == usual.payload_bytes == plan.payload_bytes
    assert few.slice_bytes == usual.slice_bytes == many.slice_bytes
    assert few.answer_bytes < usual.answer_bytes < many.answer_bytes
    assert usual == sizes_of(plan, 4, 256)


def test_an_owner_exchange_by_hand() -> None:
    # Three slices of 10 kB come in one round, three answers of 20 kB in three: 30 and 60 ms, and four round trips. All four
    # of each are 120 kB, three payloads to decode.
    costs = replace(FREE, demo_ns_per_parameter=10.0, decode_ns_per_parameter=1.0, owner_ns_per_parameter=8.0)
    gather, owner = both_exchanges(1_000_000, Sizes(40_000, 10_000, 20_000), 32, "sign", 4, 3.0, costs)
    row = predict(owner, LINK)
    assert (row.sent_bytes, row.received_bytes) == (30_000 + 20_000, 30_000 + 60_000)
    assert row.network_seconds == row.exposed_seconds == pytest.approx(0.03 + 0.02 + 0.06 + 3 * 0.02)
    assert row.optimizer_seconds == pytest.approx(0.014), "8 ns for each of the quarter that it owns, and three payloads"
    assert predict(gather, LINK).optimizer_seconds == pytest.approx(0.013), "four payloads"
    assert predict(gather, LINK).exposed_seconds == pytest.approx(0.12 + 3 * 0.02)
    assert (gather.exchange_name, owner.exchange_name) == (ALL_GATHER, OWNER)
    assert gather.label == owner.label
    endless = replace(owner, num_buckets=None)
    assert predict(endless, LINK).exposed_seconds == row.exposed_seconds, "answers count whatever the buckets"


def test_slices_hide_behind_backward_and_answers_do_not() -> None:
    # 1 s of backward hides all slices but the last of eight buckets. Of the answers' buckets, 7.5 ms and three round trips
    # each, two are under way at a time: four times the round trips, and what of the bytes does not fall into these.
    _, owner = both_exchanges(0, Sizes(40_000, 10_000, 20_000, 8), 32, "sign", 4, 3.0, FREE)
    row = predict(owner, LINK)
    answers = 4 * 3 * 0.02 + 5 * 0.0075
    assert row.exposed_seconds == pytest.approx(0.03 / 8 + 0.02 + answers)
    assert row.network_seconds == pytest.approx(4 * 0.02 + 5 * 0.03 / 8 + answers), "if nothing were hidden"
    together = replace(FREE, collectives_at_once=8)
    _, owner = both_exchanges(0, Sizes(40_000, 10_000, 20_000, 8), 32, "sign", 4, 3.0, together)
    assert predict(owner, LINK).exposed_seconds == pytest.approx(0.03 / 8 + 0.02 + 0.06 + 3 * 0.02)
    with pytest.raises(ValueError, match="collectives_at_once=0 must be at least 1"):
        replace(FREE, collectives_at_once=0)


def test_all_windows_of_an_all_to_all_begin_together() -> None:
    slow = Link(8e6, 0.1, payload_share=1.0, window_bytes=10_000)
    # Three connections of 10 kB each fill 30 kB, and wait once for the rest of 60 kB.
    assert transfer_seconds(all_to_all(20_000, 4), slow) == pytest.approx(0.06 + 0.1 - 0.03)
    assert transfer_seconds(Exchange(1, 60_000, 1), slow) == pytest.approx(0.06 + 0.1 - 0.01 + 0.1 - 0.02)


@pytest.mark.parametrize("num_replicas", [2, 8, 64])
def test_without_overlap_it_is_the_formula_of_many_replicas(num_replicas: int) -> None:
    case = Case(Setting(), 10**9, num_replicas)
    report = make_report(
        tensors_from_count(10**9),
        num_replicas,
        Setting().link,
        case.compute_seconds,
        topks=(32,),
        values=("sign",),
        exchange="owner",
    )
    there = sum(closed_seconds(stage, case) for stage in case.owner().stages)
    assert report.predictions[-1].network_seconds == pytest.approx(there, rel=0.01), "but for headers"


@given(
    num_replicas=st.integers(1, 300),
    payload=st.integers(1_000, 10**8),
    bits=st.floats(1e5, 1e11),
    round_trip=st.floats(0.0, 0.3),
    num_buckets=st.sampled_from([1, 2, 8]),
    compute=st.floats(0.01, 100.0),
)
def test_owners_are_chosen_where_they_save_a_twentieth(
    num_replicas: int, payload: int, bits: float, round_trip: float, num_buckets: int, compute: float
) -> None:
    sizes = Sizes(payload, math.ceil(payload / num_replicas), math.ceil(1.8 * payload / num_replicas), num_buckets)
    link, costs = Link(bits, round_trip), DEVICES["gpu"]
    both = both_exchanges(10**6, sizes, 1, "sign", num_replicas, compute, costs)
    gather, owner = (predict(one, link).step_seconds for one in both)
    chosen = choose_exchange(sizes, num_replicas, link, num_parameters=10**6, compute_seconds=compute, costs=costs)
    assert chosen == (OWNER if owner < (1 - LEAST_GAIN) * gather else ALL_GATHER)
    if num_replicas <= 2:
        assert chosen == ALL_GATHER, "nothing to gain"


def test_the_link_decides() -> None:
    sizes, common = Sizes(100_000, 12_500, 22_500, 8), {"num_parameters": 10**7, "costs": DEVICES["gpu"]}

    def chosen(link: Link, compute_seconds: float, sizes: Sizes = sizes) -> str:
        return choose_exchange(sizes, 8, link, compute_seconds=compute_seconds, **common)  # type: ignore[arg-type]

    assert chosen(Link(1e6, 0.0), 1.0) == OWNER, "the bytes take longer than backward"
    assert chosen(Link(1e8, 0.08), 1.0) == ALL_GATHER, "latency hides, but not that of answers"
    assert chosen(Link(1e7, 0.0), 10.0) == ALL_GATHER, "all of it hides"
    assert chosen(Link(1e7, 0.0), 3.0) == ALL_GATHER, "here, too"
    assert chosen(Link(1e7, 0.0), 3.0, replace(sizes, num_buckets=1)) == OWNER, "nothing hides without overlap"


def test_with_a_long_round_trip_owners_want_few_buckets() -> None:
    def step(num_buckets: int) -> float:
        sizes = Sizes(100_000, 12_500, 22_500, num_buckets)
        _, owner = both_exchanges(10**7, sizes, 32, "sign", 8, 1.0, DEVICES["gpu"])
        return predict(owner, Link(1e8, 0.08)).step_seconds

    assert step(2) < step(1) < step(8)


def test_a_row_says_what_the_other_exchange_would_take() -> None:
    both = both_exchanges(10**6, Sizes(10**6, 125_000, 225_000), 32, "sign", 8, 1.0, FREE)
    gather, owner = (predict(one, LINK) for one in both)
    row = better(both, LINK)
    assert row == replace(owner, other_step_seconds=gather.step_seconds)
    assert better(both[:1], LINK) == gather
    free = Link(1e30, 0.0)
    assert better(both, free).exchange_name == ALL_GATHER, "the first, where both are equal"


def test_the_table_in_the_docs_is_the_codes() -> None:
    document = (Path(__file__).parents[3] / "docs" / "planner.md").read_text()
    models = ((tensors_from_count(10**8), 0.5), (tensors_from_count(10**9), 1.0))
    lines = re.findall(r"^\| `([^`]+)` \| (\d+) \| (\d+|-) \| (\d+) \| (\d+) \|$", document, re.MULTILINE)
    assert len(lines) == 8
    for link, *told in lines:
        cases = [(*model, overlap) for model in models for overlap in (False, True)]
        for (tensors, compute_seconds, overlap), number in zip(cases, told, strict=True):
            names = [
                make_report(
                    tensors,
                    num_replicas,
                    parse_link(link).link,
                    compute_seconds,
                    topks=(32,),
                    values=("sign",),
                    overlap=overlap,
                )
                .predictions[-1]
                .exchange_name
                for num_replicas in ((int(number) - 1, int(number)) if number != "-" else (100, 400))
            ]
            assert names == [ALL_GATHER, OWNER if number != "-" else ALL_GATHER], (link, overlap)
