import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire.exchange.plan import Coding, ExchangePlan, TensorSpec, first_difference, make_plan
from thinwire.exchange.traffic import Count, Traffic
from thinwire.slabs import LocalTensor, cut_slabs, limits_for
from thinwire.wire.payload import HEADER_BYTES

CODING = Coding(chunk=64, topk=32, values="sign", layout="adaptive", dense_below=4096)


def plan_of(shapes: list[tuple[int, ...]], num_buckets: int = 1, coding: Coding = CODING) -> ExchangePlan:
    return make_plan([TensorSpec(str(i), shape, "float32", 0) for i, shape in enumerate(shapes)], [coding], num_buckets)


def olmo(dim: int) -> list[tuple[int, ...]]:
    layer = [(3 * dim, dim), (dim, dim), (8 * dim, dim), (dim, 4 * dim)]
    return [(50304, dim), *(layer * 16)]


@pytest.mark.parametrize(("dim", "num_coefficients"), [(1024, 2_499_584), (2048, 9_193_472)])
def test_the_papers_models_cost_ten_bits_per_coefficient(dim: int, num_coefficients: int) -> None:
    plan = plan_of(olmo(dim))
    assert plan.num_coefficients == num_coefficients
    assert plan.payload_bytes * 8 / plan.num_coefficients <= 10.1
    if dim == 2048:
        assert plan.payload_bytes == 11_491_904


@given(
    shapes=st.lists(st.lists(st.integers(0, 70), max_size=3).map(tuple), min_size=1, max_size=12),
    num_buckets=st.integers(1, 5),
)
def test_every_chunk_has_one_place_and_no_byte_is_claimed_twice(shapes: list[tuple[int, ...]], num_buckets: int) -> None:
    plan = plan_of(shapes, num_buckets, dataclasses.replace(CODING, chunk=8, topk=4, dense_below=30))
    placed = []
    for index, bucket in enumerate(plan.buckets):
        assert bucket.index == index
        end = HEADER_BYTES
        for stack in bucket.stacks:
            assert stack.offset_bytes == end
            end += stack.num_bytes
            first = 0
            for entry in stack.entries:
                assert entry.first_chunk == first
                first += entry.layout.num_chunks
                placed.append(entry.tensor)
        assert end <= bucket.payload_bytes < end + 8
    wanted = [index for index, shape in enumerate(shapes) if torch.Size(shape).numel()]
    assert sorted(placed) == wanted


@given(shapes=st.lists(st.lists(st.integers(1, 90), max_size=3).map(tuple), min_size=1, max_size=8))
def test_slabs_cover_a_stack_in_order(shapes: list[tuple[int, ...]]) -> None:
    plan = plan_of(shapes, coding=dataclasses.replace(CODING, chunk=8, topk=4))
    tensors = [
        LocalTensor(torch.zeros(shape), torch.zeros(plan.layout_of(index).num_chunks, plan.layout_of(index).num_elements))
        for index, shape in enumerate(shapes)
    ]
    for stack in plan.buckets[0].stacks:
        records = [
            record
            for slab in cut_slabs(stack, tensors, limits_for(tensors))
            for record in range(stack.num_chunks)[slab.records]
        ]
        assert records == list(range(stack.num_chunks))


def test_buckets_follow_backward_and_are_about_equal() -> None:
    plan = plan_of([(64, 64)] * 12, num_buckets=3)
    assert [sorted(bucket.tensors) for bucket in plan.buckets] == [[8, 9, 10, 11], [4, 5, 6, 7], [0, 1, 2, 3]]


def test_the_digest_covers_everything_that_is_agreed() -> None:
    base = plan_of([(64, 64), (64, 10)])
    others = [
        plan_of([(64, 65), (64, 10)]),
        plan_of([(64, 10), (64, 64)]),
        plan_of([(64, 64), (64, 10)], num_buckets=8),
        *(
            plan_of([(64, 64), (64, 10)], coding=dataclasses.replace(CODING, **change))
            for change in ({"chunk": 32}, {"topk": 8}, {"values": "int8"}, {"layout": "published"}, {"dense_below": 0})
        ),
        make_plan([TensorSpec("0", (64, 64), "bfloat16", 0), TensorSpec("1", (64, 10), "float32", 0)], [CODING]),
    ]
    digests = {plan.digest for plan in [base, *others]}
    assert len(digests) == 1 + len(others)
    assert plan_of([(64, 64), (64, 10)]).digest == base.digest


def test_a_fact_that_only_one_has_is_not_compared_with_the_next_one() -> None:
    short, long = ["a: 1", "c: 3", "c: 4"], ["a: 1", "b: 2 # two", "c: 3", "c: 4"]
    assert first_difference(short, short) is None
    assert first_difference(short, long) == ("nothing", "b: 2 # two")
    assert first_difference(long, short) == ("b: 2 # two", "nothing")
    assert first_difference(short, short[:2]) == ("c: 4", "nothing")
    assert first_difference(["a: 1"], ["b: 1"]) == ("a: 1", "b: 1")


def test_dense_tensors_use_a_codec_with_a_zero() -> None:
    for values, expected in (("sign", "int8"), ("sign_scale", "int8"), ("float32", "float32"), ("int4", "int4")):
        (stack,) = plan_of([(10,)], coding=dataclasses.replace(CODING, values=values)).buckets[0].stacks
        assert stack.codec.value_name == expected
        assert stack.share == 32 / 4096


def test_the_meter_counts_what_crosses_the_wire() -> None:
    traffic = Traffic()
    for _ in range(2):
        traffic.start_step()
        traffic.add(100, num_replicas=4)
        traffic.add(10, num_replicas=4)
    traffic.add(999, num_replicas=1)
    assert traffic.last_step == Count(sent_bytes=110, received_bytes=330, num_exchanges=2)
    assert traffic.total == Count(sent_bytes=220, received_bytes=660, num_exchanges=4)


def test_small_tensors_do_not_hold_the_first_bucket_up() -> None:
    # Two groups as trainers make them: matrices, and the norms of all layers.
    tensors = [TensorSpec(f"layer{i}", (64, 64), "float32", 0) for i in range(8)]
    tensors += [TensorSpec(f"norm{i}", (64,), "float32", 1) for i in range(8)]
    plan = make_plan(tensors, [CODING, CODING], num_buckets=4)
    names = [[tensors[index].name for index in bucket.tensors] for bucket in plan.buckets]
    assert [name for bucket in names for name in bucket] == [
        t.name for t in (*reversed(tensors[:8]), *reversed(tensors[8:]))
    ]
    assert len(names) == 4
    assert not any(name.startswith("norm") for bucket in names[:3] for name in bucket)
