"""The fused checks find what the plain ones find, and nothing else."""

import pytest
import torch
from torch import Tensor

from thinwire.core.errors import ExchangeError, PayloadError
from thinwire.core.selection import select_topk
from thinwire.exchange.plan import Bucket, Coding, ExchangePlan, TensorSpec, make_plan
from thinwire.sealing import check_received, seal_
from thinwire.stack_step import stack_records
from thinwire.wire.codec import ChunkCodec
from thinwire.wire.payload import Header, checksum
from thinwire.wire.values import VALUE_CODECS

pytest.importorskip("triton", reason="triton has no build for this platform")


def bucket_of(values: str, chunk: int, topk: int) -> tuple[ExchangePlan, Bucket]:
    tensors = [TensorSpec("p", (32, 48), "float32", 0), TensorSpec("b", (7,), "float32", 0)]
    plan = make_plan(tensors, [Coding(chunk, topk, values, "adaptive", 8)])
    return plan, plan.buckets[0]


def random_records(codec: ChunkCodec, num_chunks: int) -> Tensor:
    coefficients = torch.randn(num_chunks, codec.num_elements)
    coefficients[::3] *= (torch.rand(len(coefficients[::3]), codec.num_elements) < 0.02).float()  # with voids
    indices_CK, values_CK = select_topk([coefficients], codec.num_kept)
    if codec.index_codec.name == "all":
        indices_CK, values_CK = torch.arange(codec.num_elements).expand_as(coefficients), coefficients
    return codec.encode(indices_CK, values_CK).records_CB


def sealed(bucket: Bucket, header: Header, device: torch.device) -> Tensor:
    payload_B = torch.zeros(bucket.payload_bytes, dtype=torch.uint8)
    for stack in bucket.stacks:
        stack_records(payload_B, stack).copy_(random_records(stack.codec, stack.num_chunks))
    payload_B = payload_B.to(device)
    seal_(payload_B, header, fused=True)
    return payload_B


def verdict(bucket: Bucket, payloads_RB: Tensor, plan: ExchangePlan, fused: bool) -> str:
    def header_of(replica: int) -> Header:
        return Header(plan.digest, 3, replica, 0, bucket.body_bytes)

    try:
        check_received(bucket, payloads_RB, header_of, range(len(payloads_RB)), fused)
    except (PayloadError, ExchangeError) as error:
        return f"{type(error).__name__}: {error}"
    return "sound"


# Every value codec, and every index codec: fixed width, Elias-Fano, bitmap, all.
CODINGS = [(values, 16, 9) for values in sorted(VALUE_CODECS)]
CODINGS += [("sign", 16, 1), ("sign", 8, 15), ("sign", 8, 40), ("int8", 8, 64)]


@pytest.mark.parametrize(("values", "chunk", "topk"), CODINGS)
def test_sound_payloads_pass_and_damage_is_found_alike(values: str, chunk: int, topk: int, device: torch.device) -> None:
    plan, bucket = bucket_of(values, chunk, topk)
    headers = [Header(plan.digest, 3, replica, 0, bucket.body_bytes) for replica in range(2)]
    payloads_RB = torch.stack([sealed(bucket, header, device) for header in headers])
    assert verdict(bucket, payloads_RB, plan, fused=True) == verdict(bucket, payloads_RB, plan, fused=False) == "sound"
    generator = torch.Generator().manual_seed(topk)
    found = []
    for _ in range(2):
        damaged = payloads_RB.clone()
        flips = torch.randint(64, bucket.payload_bytes, (2,), generator=generator)
        damaged[1, flips] ^= (1 << torch.randint(0, 8, (2,), generator=generator)).to(torch.uint8).to(device)
        seal_(damaged[1], headers[1], fused=True)  # as a peer would that means harm
        expected = verdict(bucket, damaged, plan, fused=False)
        assert verdict(bucket, damaged, plan, fused=True) == expected
        found.append(expected)
        noise = payloads_RB.clone()
        for stack in bucket.stacks:
            records = stack_records(noise[1], stack)
            one = int(torch.randint(0, stack.num_chunks, (1,), generator=generator))
            records[one] = torch.randint(0, 256, records[one].shape, generator=generator).to(torch.uint8).to(device)
        seal_(noise[1], headers[1], fused=True)
        found.append(verdict(bucket, noise, plan, fused=True))
        assert found[-1] == verdict(bucket, noise, plan, fused=False)
    assert topk == 64 or any(text != "sound" for text in found)


def test_the_checksum_is_the_same_and_a_damaged_word_is_named(device: torch.device) -> None:
    plan, bucket = bucket_of("sign", 16, 9)
    payload_B = sealed(bucket, Header(plan.digest, 3, 0, 0, bucket.body_bytes), device)
    words = payload_B.view(torch.int64)
    assert int(checksum(words)) == int(words[7])
    payload_B[100] ^= 1
    assert "checksum" in verdict(bucket, payload_B[None], plan, fused=True)
    late = sealed(bucket, Header(plan.digest, 2, 0, 0, bucket.body_bytes), device)
    assert "has step 2, expected 3" in verdict(bucket, late[None], plan, fused=True)
    given_up = sealed(bucket, Header(plan.digest, 3, 0, 0, bucket.body_bytes, gave_up=True), device)
    assert verdict(bucket, given_up[None], plan, fused=True).startswith("ExchangeError: replica 0 gave up")
    assert "has 8 bytes" in verdict(bucket, payload_B[None, :8], plan, fused=True)


def test_an_index_that_comes_twice_is_found(device: torch.device) -> None:
    plan, bucket = bucket_of("sign", 16, 9)
    header = Header(plan.digest, 3, 0, 0, bucket.body_bytes)
    payload_B = sealed(bucket, header, device)
    stack = max(bucket.stacks, key=lambda stack: stack.num_chunks)
    codec = stack.codec
    twice = torch.tensor([[3, 3, 5, 9, 20, 21, 40, 80, 99]])
    records = stack_records(payload_B, stack)
    records[2:3] = codec.encode(twice, torch.ones(1, 9)).records_CB.to(device)
    seal_(payload_B, header, fused=True)
    assert "malformed record for chunk 2 of 6" in verdict(bucket, payload_B[None], plan, fused=True)
