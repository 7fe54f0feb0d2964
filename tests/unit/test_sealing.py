"""The fused checks find what the plain ones find, and nothing else."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from thinwire.core.errors import PayloadError
from thinwire.core.selection import select_topk
from thinwire.exchange.plan import Bucket, Coding, ExchangePlan, TensorSpec, make_plan, stack_records
from thinwire.sealing import empty_findings, inspect_, open_, read_findings, seal_
from thinwire.wire.codec import ChunkCodec
from thinwire.wire.payload import Header, Problem, Trouble, Verdict, checksum
from thinwire.wire.values import VALUE_CODECS

pytest.importorskip("triton", reason="triton has no build for this platform")
from thinwire.kernels import checks


def bucket_of(values: str, chunk: int, topk: int) -> tuple[ExchangePlan, Bucket]:
    tensors = [TensorSpec("p", (16, 48), "float32", 0), TensorSpec("b", (7,), "float32", 0)]
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
    payload_B = torch.empty(bucket.payload_bytes, dtype=torch.uint8, device=device)
    open_(payload_B, header)
    for stack in bucket.stacks:
        stack_records(payload_B, stack).copy_(random_records(stack.codec, stack.num_chunks))
    seal_(payload_B, fused=True)
    return payload_B


def reseal(payload_B: Tensor) -> None:
    """As a peer would that means harm."""
    payload_B[56:64] = 0
    seal_(payload_B, fused=True)


def verdict(bucket: Bucket, payloads_RB: Tensor, plan: ExchangePlan, fused: bool) -> str:
    findings_RW = empty_findings(bucket, len(payloads_RB), payloads_RB.device)
    if fused:
        checks.inspect_(payloads_RB, [(s.codec, s.offset_bytes, s.num_chunks) for s in bucket.stacks], findings_RW)
    else:
        inspect_([bucket] * len(payloads_RB), payloads_RB, findings_RW)
    found = torch.zeros(1, dtype=torch.int32, device=payloads_RB.device)
    if fused:
        checks.judge_(payloads_RB, 0, findings_RW, found)
    headers = read_findings([bucket] * len(findings_RW), findings_RW.cpu(), Header(plan.digest, 3, 0, 0))
    errors = [header for header in headers if isinstance(header, PayloadError)]
    sound = [header for header in headers if isinstance(header, Header)]
    says_no = any(h.digest != plan.digest or h.gave_up or h.trouble.problem for h in sound)
    expected = Verdict.REFUSED if says_no else Verdict.DAMAGED if errors else Verdict.FINE
    assert not fused or int(found) == expected, "device and host must come to the same verdict"
    return str(errors[0]) if errors else str(headers) if says_no else "sound"


# Every value codec, and every index codec: fixed width, Elias-Fano, bitmap, all.
CODINGS = [(values, 16, 9) for values in sorted(VALUE_CODECS)]
CODINGS += [("sign", 16, 1), ("sign", 8, 15), ("sign", 8, 40), ("int8", 8, 64)]


@pytest.mark.parametrize(("values", "chunk", "topk"), CODINGS)
def test_sound_payloads_pass_and_damage_is_found_alike(values: str, chunk: int, topk: int, device: torch.device) -> None:
    plan, bucket = bucket_of(values, chunk, topk)
    headers = [Header(plan.digest, 3, replica, 0) for replica in range(2)]
    payloads_RB = torch.stack([sealed(bucket, header, device) for header in headers])
    assert verdict(bucket, payloads_RB, plan, fused=True) == verdict(bucket, payloads_RB, plan, fused=False) == "sound"
    generator = torch.Generator().manual_seed(topk)
    found = []
    for _ in range(2):
        damaged = payloads_RB.clone()
        flips = torch.randint(64, bucket.payload_bytes, (2,), generator=generator)
        damaged[1, flips] ^= (1 << torch.randint(0, 8, (2,), generator=generator)).to(torch.uint8).to(device)
        reseal(damaged[1])
        expected = verdict(bucket, damaged, plan, fused=False)
        assert verdict(bucket, damaged, plan, fused=True) == expected
        found.append(expected)
        noise = payloads_RB.clone()
        for stack in bucket.stacks:
            records = stack_records(noise[1], stack)
            one = int(torch.randint(0, stack.num_chunks, (1,), generator=generator))
            records[one] = torch.randint(0, 256, records[one].shape, generator=generator).to(torch.uint8).to(device)
        reseal(noise[1])
        found.append(verdict(bucket, noise, plan, fused=True))
        assert found[-1] == verdict(bucket, noise, plan, fused=False)
    assert topk == 64 or any(text != "sound" for text in found)


@pytest.mark.parametrize("fused", [False, True])
def test_damage_and_what_a_sender_says_stop_a_step(fused: bool, device: torch.device) -> None:
    plan, bucket = bucket_of("sign", 16, 9)
    first, header = sealed(bucket, Header(plan.digest, 3, 0, 0), device), Header(plan.digest, 3, 1, 0)

    def of(payload_B: Tensor) -> str:
        return verdict(bucket, torch.stack([first, payload_B]), plan, fused)

    assert int(checksum(first.view(torch.int64))) == int(first.view(torch.int64)[7])
    damaged = sealed(bucket, header, device)
    damaged[100] ^= 1
    assert "checksum" in of(damaged)
    assert "has step 2, expected 3" in of(sealed(bucket, replace(header, step=2), device))
    assert "has replica 2, expected 1" in of(sealed(bucket, replace(header, replica=2), device))
    assert "has bucket 1, expected 0" in of(sealed(bucket, replace(header, bucket=1), device))
    assert "gave_up=True" in of(sealed(bucket, replace(header, gave_up=True), device))
    assert "NONFINITE" in of(sealed(bucket, replace(header, trouble=Trouble(Problem.NONFINITE, 1)), device))
    assert "digest=b'other" in of(sealed(bucket, replace(header, digest=b"other".ljust(16)), device))
    assert of(sealed(bucket, replace(header, fingerprint=5), device)) == "sound"
    assert of(sealed(bucket, replace(header, calls_meeting=True), device)) == "sound"
    both = sealed(bucket, replace(header, gave_up=True, calls_meeting=True), device)
    assert "gave_up=True" in of(both)
    both[60] ^= 1
    assert "checksum" in of(both)
    unknown = sealed(bucket, header, device)
    unknown[6] = 4
    reseal(unknown)
    assert "has flags 4" in of(unknown)
    unknown = sealed(bucket, header, device)
    unknown[52] = 4
    reseal(unknown)
    assert "has problem" in of(unknown)


def test_an_index_that_comes_twice_is_found(device: torch.device) -> None:
    plan, bucket = bucket_of("sign", 16, 9)
    header = Header(plan.digest, 3, 0, 0)
    payload_B = sealed(bucket, header, device)
    stack = max(bucket.stacks, key=lambda stack: stack.num_chunks)
    codec = stack.codec
    twice = torch.tensor([[3, 3, 5, 9, 20, 21, 40, 80, 99]])
    records = stack_records(payload_B, stack)
    records[2:3] = codec.encode(twice, torch.ones(1, 9)).records_CB.to(device)
    reseal(payload_B)
    assert "malformed record for chunk 2 of 3" in verdict(bucket, payload_B[None], plan, fused=True)
