"""Payloads are cut for their owners and put together again."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire.exchange.plan import Coding, ExchangePlan, TensorSpec, make_plan, stack_records, with_owners
from thinwire.exchange.slices import chunks_per_owner, clear_, join_, owned_chunks, slice_of, split_
from thinwire.ownership import places
from thinwire.wire.values import VALUE_CODECS

SHAPES = [(40, 33), (7,), (), (16, 16), (3, 5, 20)]


def plan_of(values: str = "int8") -> ExchangePlan:
    specs = [TensorSpec(str(shape), shape, "float32", 0) for shape in SHAPES]
    return with_owners(make_plan(specs, [Coding(8, 3, values, "adaptive", 30)]), None)


@given(num_chunks=st.integers(0, 300), num_owners=st.integers(1, 70))
def test_every_chunk_has_one_owner(num_chunks: int, num_owners: int) -> None:
    owned = [owned_chunks(num_chunks, owner, num_owners) for owner in range(num_owners)]
    assert [chunk for chunks in owned for chunk in chunks] == list(range(num_chunks))
    assert all(len(chunks) <= chunks_per_owner(num_chunks, num_owners) for chunks in owned)


@given(num_owners=st.integers(1, 70), values=st.sampled_from(sorted(VALUE_CODECS)), seed=st.integers(0, 2**32))
def test_slices_hold_all_records_and_what_fills_them_up_is_empty(num_owners: int, values: str, seed: int) -> None:
    (bucket,) = plan_of(values).buckets
    generator = torch.Generator().manual_seed(seed)
    payload_B = torch.randint(0, 256, (bucket.payload_bytes,), dtype=torch.uint8, generator=generator)
    form = slice_of(bucket, num_owners)
    slices_RB = torch.full((num_owners, form.payload_bytes), 255, dtype=torch.uint8)
    split_(payload_B, bucket, slices_RB)
    for stack, run in zip(bucket.stacks, form.stacks, strict=True):
        sent_CB, runs_RCB = stack_records(payload_B, stack), stack_records(slices_RB, run)
        for owner in range(num_owners):
            mine = owned_chunks(stack.num_chunks, owner, num_owners)
            assert torch.equal(runs_RCB[owner, : len(mine)], sent_CB[mine.start : mine.stop])
            filling = runs_RCB[owner, len(mine) :]
            assert stack.codec.is_valid(filling).all()
            assert not stack.codec.decode(filling)[1].any()
    again_B = torch.zeros_like(payload_B)
    join_(slices_RB, bucket, again_B)
    for stack in bucket.stacks:
        assert torch.equal(stack_records(again_B, stack), stack_records(payload_B, stack))


@given(num_owners=st.integers(1, 40))
def test_the_chunks_of_tensors_add_up(num_owners: int) -> None:
    plan = plan_of()
    for stack in plan.buckets[0].stacks:
        found = [places(stack, owner, num_owners) for owner in range(num_owners)]
        for entry, of_owners in zip(stack.entries, zip(*found, strict=True), strict=True):
            chunks = [place.first + chunk for place in of_owners for chunk in range(place.num_chunks)]
            assert chunks == list(range(entry.layout.num_chunks))
            assert {place.tensor for place in of_owners} == {entry.tensor}


def test_a_cleared_slice_says_nothing_in_sound_records() -> None:
    for values in VALUE_CODECS:
        form = slice_of(plan_of(values).buckets[0], 3)
        slice_B = torch.full((form.payload_bytes,), 77, dtype=torch.uint8)
        clear_(slice_B, form)
        for run in form.stacks:
            assert run.codec.is_valid(stack_records(slice_B, run)).all()
            assert not run.codec.decode(stack_records(slice_B, run))[1].any()


def test_answers_have_the_same_stacks_with_more_kept() -> None:
    plan = plan_of()
    assert plan.answers is not None
    (bucket,), (answers,) = plan.buckets, plan.answers.buckets
    for stack, answer in zip(bucket.stacks, answers.stacks, strict=True):
        assert stack.entries == answer.entries
        is_dense = stack.codec.num_kept == stack.codec.num_elements
        assert abs(answer.codec.num_kept - (1 if is_dense else 2) * stack.codec.num_kept) <= (0 if is_dense else 1)
