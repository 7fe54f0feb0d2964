"""Payloads as damage or malice would make them: none may crash, hang, reach beyond its tensors, or pass when it was altered.

    python benchmarks/fuzz_payloads.py --payloads 1000000 --out results/fuzz

Altered bytes whose checksum was not made anew must always be refused, and so must sound payloads of another step, replica,
bucket or plan. With a checksum made anew, as a malicious sender would, a payload may pass if every record in it is one that
a replica could have sent; what passes is decoded and applied, and must move the parameters by no more than a step may.

With --fused the kernels look at every payload too, on a GPU, and must come to the same as torch; they apply what passes.
"""

import argparse
import json
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.bench.environment import environment
from thinwire.core.combine import Decoding
from thinwire.core.errors import PayloadError
from thinwire.core.layout import empty_momentum
from thinwire.core.update_rules import UPDATE_RULES, Hyper
from thinwire.exchange.plan import Bucket, Coding, ExchangePlan, TensorSpec, make_plan
from thinwire.local_step import LocalStep
from thinwire.sealing import empty_findings, inspect_, open_, read_findings, seal_
from thinwire.slabs import LocalTensor
from thinwire.stack_step import GroupStep
from thinwire.wire.payload import CHECKSUM_WORD, HEADER_BYTES, Header
from thinwire.wire.values import VALUE_CODECS

BATCH, LR = 64, 0.1
SHAPES = [(32, 48), (7,), (40, 50)]
# Every value codec, and every index codec: all, fixed width, Elias-Fano, bitmap.
CODINGS = [(values, 16, 9) for values in sorted(VALUE_CODECS)] + [("sign", 16, 1), ("sign", 8, 15), ("sign", 8, 40)]
ALTERED = (
    "random bytes",
    "one bit",
    "several bits",
    "a run of bytes",
    "tail cut off",
    "shifted by a byte",
    "sections swapped",
)
FOREIGN = ("an earlier step", "another replica", "another bucket", "another plan")
RESEALED = ("one bit, resealed", "random body, resealed", "all ones, resealed")


class Target:
    """A replica that receives payloads of one coding."""

    def __init__(self, values: str, chunk: int, topk: int, fused: bool) -> None:
        self.device, self.backend = torch.device("cuda" if fused else "cpu"), "triton" if fused else "torch"
        specs = [TensorSpec(f"p{i}", shape, "torch.float32", 0) for i, shape in enumerate(SHAPES)]
        self.plan: ExchangePlan = make_plan(specs, [Coding(chunk, topk, values, "adaptive", 8)], 1)
        self.bucket: Bucket = self.plan.buckets[0]
        self.expected = Header(self.plan.digest, 7, 0, 0)
        self.group = GroupStep(0.9, 1.0, UPDATE_RULES["sign"], Hyper(LR, 1, (0.9, 0.99), 1e-8), 0.0, chunk)
        self.sound_B = self._payload(self.expected)
        self.foreign = {
            "an earlier step": self._payload(replace(self.expected, digest=b"x" * 16, step=6)),
            "another replica": self._payload(replace(self.expected, replica=3)),
            "another bucket": self._payload(replace(self.expected, bucket=1)),
            "another plan": self._payload(replace(self.expected, digest=b"y" * 16)),
        }
        assert self.verdicts(self.sound_B[None]) == ["accepted"]

    def _tensors(self) -> list[LocalTensor]:
        momenta = [empty_momentum(self.plan.layout_of(i), torch.float32, self.device) for i in range(len(SHAPES))]
        parameters = [nn.Parameter(torch.zeros(shape, device=self.device)) for shape in SHAPES]
        return [LocalTensor(parameter, momentum) for parameter, momentum in zip(parameters, momenta, strict=True)]

    def _payload(self, header: Header) -> Tensor:
        tensors = self._tensors()
        for tensor in tensors:
            tensor.source.grad = torch.randn_like(tensor.parameter)
        local = LocalStep(self.plan, tensors, "torch")
        encoding = local.empty(self.bucket)
        open_(encoding.payload_B, header)
        with torch.no_grad():
            local.encode_(self.bucket, [self.group], encoding)
        seal_(encoding.payload_B, fused=False)
        return encoding.payload_B.cpu()

    def verdicts(self, payloads_RB: Tensor) -> list[str]:
        """What this replica makes of each."""
        findings_RW = empty_findings(self.bucket, len(payloads_RB), torch.device("cpu"))
        inspect_([self.bucket] * len(payloads_RB), payloads_RB, findings_RW)
        if self.backend == "triton":
            same_RW = self._findings_of_kernels(payloads_RB.to(self.device))
            if not torch.equal(same_RW, findings_RW):
                raise AssertionError(f"the kernels found {same_RW}, torch found {findings_RW}")
        found = []
        for row_W in findings_RW:
            (header,) = read_findings([self.bucket], row_W[None], self.expected)
            is_ours = (
                not isinstance(header, PayloadError)
                and header.digest == self.expected.digest
                and not header.gave_up
                and not header.trouble.problem
            )
            found.append("accepted" if is_ours else "refused")
        return found

    def _findings_of_kernels(self, payloads_RB: Tensor) -> Tensor:
        from thinwire.kernels import checks

        findings_RW = empty_findings(self.bucket, len(payloads_RB), self.device)
        stacks = [(stack.codec, stack.offset_bytes, stack.num_chunks) for stack in self.bucket.stacks]
        checks.inspect_(payloads_RB, stacks, findings_RW)
        checks.judge_(payloads_RB, 0, findings_RW, torch.zeros(1, dtype=torch.int32, device=self.device))
        return findings_RW.cpu()

    def is_harmless(self, payload_B: Tensor) -> bool:
        """Whether a payload that passed moves the parameters by no more than a step may."""
        tensors = self._tensors()
        local = LocalStep(self.plan, tensors, self.backend)
        with torch.no_grad():
            local.apply_(self.bucket, [self.group], payload_B[None].to(self.device), Decoding())
        return all(bool((tensor.parameter.abs() <= LR * 1.0001).all()) for tensor in tensors)


def mutate(kind: str, sound_B: Tensor) -> Tensor:
    """A batch of payloads made from one."""
    rows = sound_B.repeat(BATCH, 1)
    size = rows.shape[1]
    for row in rows:
        if kind.startswith("random bytes"):
            row.copy_(torch.randint(0, 256, (size,), dtype=torch.uint8))
        elif kind.startswith(("one bit", "several bits")):
            for _ in range(1 if kind.startswith("one") else int(torch.randint(2, 9, ()))):
                first = HEADER_BYTES if kind.endswith("resealed") else 0
                row[int(torch.randint(first, size, ()))] ^= 1 << int(torch.randint(8, ()))
        elif kind == "a run of bytes":
            start = int(torch.randint(size - 1, ()))
            stop = int(torch.randint(start + 1, size, ()))
            row[start:stop] = torch.randint(0, 256, (stop - start,), dtype=torch.uint8)
        elif kind == "tail cut off":
            row[int(torch.randint(size, ())) :] = 0
        elif kind == "shifted by a byte":
            row.copy_(row.roll(int(torch.randint(1, size, ()))))
        elif kind == "sections swapped":
            middle = HEADER_BYTES + int(torch.randint(1, size - HEADER_BYTES, ()))
            row[HEADER_BYTES:] = torch.cat([row[middle:], row[HEADER_BYTES:middle]])
        elif kind == "random body, resealed":
            row[HEADER_BYTES:] = torch.randint(0, 256, (size - HEADER_BYTES,), dtype=torch.uint8)
        else:
            start = int(torch.randint(HEADER_BYTES, size, ()))
            row[start : start + int(torch.randint(1, 9, ()))] = 255
        if kind.endswith("resealed"):
            row.view(torch.int64)[CHECKSUM_WORD] = 0
            seal_(row, fused=False)
    return rows


def fuzz(num_payloads: int, fused: bool) -> list[dict[str, Any]]:
    """A row per coding and kind of mutation; raises at the first payload that should not have passed."""
    targets = {coding: Target(*coding, fused) for coding in CODINGS}
    kinds = (*ALTERED, *FOREIGN, *RESEALED)
    batches = -(-num_payloads // (BATCH * len(CODINGS) * len(kinds)))
    rows = []
    for coding, target in targets.items():
        for kind in kinds:
            counts, seconds, num_same = Counter(), 0.0, 0
            for _ in range(batches):
                payloads_RB = target.foreign[kind].repeat(BATCH, 1) if kind in FOREIGN else mutate(kind, target.sound_B)
                began = time.perf_counter()
                verdicts = target.verdicts(payloads_RB)
                seconds += time.perf_counter() - began
                for payload_B, verdict in zip(payloads_RB, verdicts, strict=True):
                    is_same = torch.equal(payload_B, target.sound_B)
                    num_same += is_same
                    has_passed = verdict == "accepted" and not is_same
                    if has_passed and (kind not in RESEALED or not target.is_harmless(payload_B)):
                        text = bytes(payload_B.tolist()).hex()
                        raise AssertionError(f"{coding}, {kind}: passed, and should not have: {text}")
                counts.update(verdicts)
            rows.append(
                {"values": coding[0], "chunk": coding[1], "topk": coding[2], "kind": kind, "payloads": batches * BATCH,
                 "refused": counts["refused"], "unchanged": num_same, "accepted": counts["accepted"] - num_same,
                 "microseconds": round(1e6 * seconds / (batches * BATCH), 1)}
            )  # fmt: skip
        print(f"{coding}: done", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--payloads", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fused", action="store_true")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.manual_seed(asked.seed)
    torch.set_num_threads(1)
    rows = fuzz(asked.payloads, asked.fused)
    totals = {name: sum(row[name] for row in rows) for name in ("payloads", "refused", "unchanged", "accepted")}
    print(json.dumps(totals))
    if asked.out:
        asked.out.mkdir(parents=True, exist_ok=True)
        (asked.out / "environment.json").write_text(json.dumps(environment(), indent=1) + "\n")
        (asked.out / f"rows-{asked.seed}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
