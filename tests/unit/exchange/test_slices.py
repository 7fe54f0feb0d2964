"""Payloads are cut for their owners and put together again."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire.exchange.plan import Coding, ExchangePlan, TensorSpec, make_plan, stack_records, with_owners
from thinwire.exchange.slices import clear_, deal, join_, slices_of, split_
from thinwire.ownership import places
from thinwire.wire.values import VALUE_CODECS

SHAPES = [(40, 33), (7,), (), (16, 16), (3, 5, 20)]


def plan_of(values: str = "int8") -> ExchangePlan:
    specs = [TensorSpec(str(shape), shape, "float32", 0) for shape in SHAPES]
    return with_owners(make_plan(specs, [Coding(8, 3, values, "adaptive", 30)]), None)


@given(num_owners=st.integers(1, 70), values=st.sampled_from(sorted(VALUE_CODECS)))
def test_every_chunk_has_one_owner_and_owners_have_equally_much(num_owners: int, values: str) -> None:
    (bucket,) = plan_of(values).buckets
    dealt = deal(bucket, num_owners)
    for place, stack in enumerate(bucket.stacks):
        assert [chunk for owned in dealt for chunk in owned[place]] == list(range(stack.num_chunks))
    sizes = [stack.codec.record_bytes for stack in bucket.stacks]
    loads = [sum(run.num_bytes for run in form.stacks) for form in slices_of(bucket, dealt)]
    assert max(loads) <= bucket.body_bytes / num_owners + max(sizes)


@pytest.mark.parametrize("num_owners", [2, 7, 64, 256])
def test_a_long_record_does_not_lengthen_the_slices_of_all(num_owners: int) -> None:
    specs = [TensorSpec("matrix", (1024, 1024), "float32", 0), TensorSpec("bias", (1024,), "float32", 0)]
    (bucket,) = make_plan(specs, [Coding(64, 32, "sign", "adaptive", 4096)]).buckets
    long, short = sorted((stack.codec.record_bytes for stack in bucket.stacks), reverse=True)
    loads = [sum(run.num_bytes for run in form.stacks) for form in slices_of(bucket, deal(bucket, num_owners))]
    assert max(loads) <= max(bucket.body_bytes / num_owners + short, long)


@given(num_owners=st.integers(1, 70), values=st.sampled_from(sorted(VALUE_CODECS)), seed=st.integers(0, 2**32))
def test_slices_hold_all_records_and_are_one_payload_again(num_owners: int, values: str, seed: int) -> None:
    (bucket,) = plan_of(values).buckets
    generator = torch.Generator().manual_seed(seed)
    payload_B = torch.randint(0, 256, (bucket.payload_bytes,), dtype=torch.uint8, generator=generator)
    dealt = deal(bucket, num_owners)
    forms = slices_of(bucket, dealt)
    slices_RB = torch.zeros(num_owners, forms[0].payload_bytes, dtype=torch.uint8)
    split_(payload_B, bucket, dealt, slices_RB)
    for slice_B, form, owned in zip(slices_RB, forms, dealt, strict=True):
        for stack, run, mine in zip(bucket.stacks, form.stacks, owned, strict=True):
            assert torch.equal(stack_records(slice_B, run), stack_records(payload_B, stack)[mine.start : mine.stop])
    again_B = torch.zeros_like(payload_B)
    join_(slices_RB, bucket, dealt, again_B)
    for stack in bucket.stacks:
        assert torch.equal(stack_records(again_B, stack), stack_records(payload_B, stack))


@given(num_owners=st.integers(1, 40))
def test_the_chunks_of_tensors_add_up(num_owners: int) -> None:
    (bucket,) = plan_of().buckets
    dealt = deal(bucket, num_owners)
    for number, stack in enumerate(bucket.stacks):
        found = [places(stack, owned[number]) for owned in dealt]
        for entry, of_owners in zip(stack.entries, zip(*found, strict=True), strict=True):
            chunks = [place.first + chunk for place in of_owners for chunk in range(place.num_chunks)]
            assert chunks == list(range(entry.layout.num_chunks))
            assert {place.tensor for place in of_owners} == {entry.tensor}


def test_a_cleared_message_says_nothing_in_sound_records() -> None:
    for values in VALUE_CODECS:
        (bucket,) = plan_of(values).buckets
        payload_B = torch.full((bucket.payload_bytes,), 77, dtype=torch.uint8)
        clear_(payload_B, bucket)
        for stack in bucket.stacks:
            assert stack.codec.is_valid(stack_records(payload_B, stack)).all()
            assert not stack.codec.decode(stack_records(payload_B, stack))[1].any()


def test_answers_have_the_same_stacks_with_more_kept() -> None:
    plan = plan_of()
    assert plan.answers is not None
    (bucket,), (answers,) = plan.buckets, plan.answers.buckets
    for stack, answer in zip(bucket.stacks, answers.stacks, strict=True):
        assert stack.entries == answer.entries
        is_dense = stack.codec.num_kept == stack.codec.num_elements
        share = min(1.0, 8 * 3 / 8**2)  # of a full chunk of 8 x 8
        assert answer.codec.num_kept == (stack.codec.num_kept if is_dense else round(share * stack.codec.num_elements))


@pytest.mark.parametrize(("sent", "answered"), [("sign", "int4"), ("sign_scale", "int4"), ("int8", "int8")])
def test_answers_to_votes_have_a_size(sent: str, answered: str) -> None:
    plan = plan_of(sent)
    assert plan.answers is not None
    names = [
        (stack.codec.value_name, answer.codec.value_name)
        for stack, answer in zip(plan.buckets[0].stacks, plan.answers.buckets[0].stacks, strict=True)
    ]
    assert (sent, answered) in names
    assert all(one == (sent, answered) or one[0] == one[1] for one in names), "dense ones stay as they are"
