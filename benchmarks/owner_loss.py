"""Does training bear an owner exchange? Loss of a small GPT with R virtual replicas, for several numbers of coefficients
that owners keep, beside an all-gather.

    python benchmarks/owner_loss.py --out results/owner_loss/DATE_HARDWARE [--replicas 8 64] [--steps 300] [--seeds 3]

Every replica has its own batches and momentum; layout, codecs, combination, owners and update are the optimizer's own. What
is the same on all replicas is computed once: the parameters, the combination, and the owners, of which one has all chunks,
since no chunk knows of another. Rows that are there are not measured again.
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.defaults import ByteGPT, corpus
from thinwire import DeMo
from thinwire.bench.environment import environment
from thinwire.core.combine import Decoding
from thinwire.exchange.plan import Bucket, with_owners
from thinwire.exchange.slices import clear_
from thinwire.local_step import LocalStep
from thinwire.ownership import OwnedStack
from thinwire.routes import for_answers
from thinwire.slabs import LocalTensor

LENGTH, WIDTH, LAYERS = 64, 128, 2
SEQUENCES = 64
RATES = {"sign": 1e-3, "lion": 1e-3, "muon": 2e-2}


class Simulation:
    """R replicas that share their parameters, and an owner of all chunks if ``owner_topk`` is given."""

    def __init__(self, optimizer: DeMo, num_replicas: int, owner_topk: int | None) -> None:
        self._optimizer, plan = optimizer, optimizer.plan
        (self._bucket,) = plan.buckets
        self._locals = [LocalStep(plan, self._tensors(), "torch") for _ in range(num_replicas)]
        self._decoding: Decoding = optimizer._decoding
        self.room = self._locals[0].empty(self._bucket, 0, num_replicas)
        self._answers: Bucket | None = None
        if owner_topk is not None:
            answers = with_owners(plan, owner_topk).answers
            assert answers is not None
            (self._answers,) = answers.buckets
            self._answering = LocalStep(answers, self._locals[0].tensors, "torch")
            self._answer_B = torch.zeros(self._answers.payload_bytes, dtype=torch.uint8)
            self._owned = self._owned_stacks(self._answers)

    def _tensors(self) -> list[LocalTensor]:
        found = self._optimizer._local.tensors
        return [LocalTensor(one.source, torch.zeros_like(one.momentum_CE), one.rule_state) for one in found]

    def _owned_stacks(self, answers: Bucket) -> list[OwnedStack]:
        pairs = zip(self._bucket.stacks, answers.stacks, strict=True)
        sizes = [(stack.num_chunks, stack.codec.num_elements) for stack in answers.stacks]
        return [OwnedStack(*pair, [torch.zeros(size)]) for pair, size in zip(pairs, sizes, strict=True)]

    def send_(self, replica: int) -> None:
        """Encode the gradients that are there as this replica's."""
        groups = [self._optimizer._group_step(group) for group in self._optimizer.param_groups]
        local = self._locals[replica]
        self.room.payloads_RB[replica].zero_()
        self.room.replica = replica
        local.encode_(self._bucket, groups, self.room)
        self.room.begun.clear()

    def apply_(self) -> None:
        """The step that all take."""
        groups = [self._optimizer._group_step(group) for group in self._optimizer.param_groups]
        if self._answers is None:
            self._locals[0].apply_(self._bucket, groups, self.room.payloads_RB, self._decoding)
        else:
            clear_(self._answer_B, self._answers)
            for owned in self._owned:
                owned.answer_(self.room.payloads_RB, self._decoding, self._answer_B)
                owned.commit_()
            self._answering.apply_(self._answers, groups, self._answer_B[None], for_answers(self._decoding))
        for group in self._optimizer.param_groups:
            group["num_steps"] += 1


def windows(data: Tensor, generator: torch.Generator, count: int) -> Tensor:
    starts = torch.randint(0, len(data) - LENGTH - 1, (count,), generator=generator)
    return data[starts[:, None] + torch.arange(LENGTH + 1)]


def train(case: dict[str, Any], data: tuple[Tensor, Tensor], num_steps: int) -> dict[str, Any]:
    """Train one case and return its measures."""
    torch.manual_seed(case["seed"])
    model, began = ByteGPT(WIDTH, LAYERS, LENGTH), time.perf_counter()
    options = {"update": case["update"], "combine": case["combine"], "topk": case["topk"], "values": case["values"]}
    optimizer = DeMo(model.parameters(), lr=case["lr"], momentum_decay=case["decay"], **options)
    num_replicas = case["replicas"]
    simulation = Simulation(optimizer, num_replicas, case["owner_topk"])
    generator = torch.Generator().manual_seed(1000 + case["seed"])
    for step in range(num_steps):
        warm = min(1.0, (step + 1) / 40)
        optimizer.param_groups[0]["lr"] = case["lr"] * warm * (0.55 + 0.45 * math.cos(math.pi * step / num_steps))
        batches = windows(data[0], generator, SEQUENCES).chunk(num_replicas)
        for replica, batch in enumerate(batches):
            optimizer.zero_grad()
            model(batch).backward()
            with torch.no_grad():
                simulation.send_(replica)
        with torch.no_grad():
            simulation.apply_()
    held_out = torch.Generator().manual_seed(1)
    with torch.no_grad():
        losses = [float(model(windows(data[1], held_out, 64))) for _ in range(32)]
    return {"validation_loss": sum(losses) / len(losses), "seconds": time.perf_counter() - began}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--replicas", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--owner-topk", type=int, nargs="*", default=[16, 32, 64, 128, 256])
    parser.add_argument("--update", choices=sorted(RATES), default="sign")
    parser.add_argument("--values", default="auto")
    parser.add_argument("--combine", default="mean_over_senders")
    parser.add_argument("--topk", type=int, default=32)
    parser.add_argument("--decay", type=float, default=0.99)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows = arguments.out / "rows.jsonl"
    known = [json.loads(line)["case"] for line in rows.read_text().splitlines()] if rows.exists() else []
    (arguments.out / "environment.json").write_text(json.dumps(environment(), indent=1) + "\n")
    data = corpus(torch.device("cpu"))
    for seed in range(arguments.seeds):
        for num_replicas in arguments.replicas:
            for owner_topk in (None, *arguments.owner_topk):
                case = {"replicas": num_replicas, "owner_topk": owner_topk, "seed": seed, "steps": arguments.steps}
                case |= {"update": arguments.update, "values": arguments.values, "combine": arguments.combine}
                case |= {"lr": arguments.lr or RATES[arguments.update], "topk": arguments.topk, "decay": arguments.decay}
                if case in known:
                    continue
                found = train(case, data, arguments.steps)
                with rows.open("a") as file:
                    file.write(json.dumps({"case": case, **found}) + "\n")
                print(case, found, flush=True)


if __name__ == "__main__":
    main()
