"""What robust combination costs where nobody means harm, and what it saves where somebody does.

    python benchmarks/robust.py --out results/robust/DATE_HARDWARE [--steps 100] [--seeds 2]

A small model of the quickstart's kind is trained by four replicas, threads of one process, on the source of Python's
standard library. Where a case is hostile, the last of them multiplies its gradients with -1e6 before each step. Each case is
one row of ``rows.jsonl``: its settings and the validation loss at the end, null where training ended with an error. Then
everyone's payloads of a larger tensor are applied, on one core, which is one row of ``times.jsonl`` for each way to combine.
"""

import argparse
import json
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thinwire.bench.environment import environment
from thinwire.core.combine import Decoding
from thinwire.core.errors import ThinwireError
from thinwire.core.update_rules import UPDATE_RULES, Hyper
from thinwire.exchange.loopback import LoopbackTransport, run_replicas
from thinwire.exchange.plan import Coding, TensorSpec, make_plan
from thinwire.local_step import LocalStep
from thinwire.slabs import LocalTensor
from thinwire.stack_step import GroupStep
from thinwire.training import recipes
from thinwire.training.config import TrainConfig
from thinwire.training.evaluation import evaluate
from thinwire.training.examples import Order, Stream
from thinwire.training.job import Data, load_data, seed_everything, sizes_of
from thinwire.training.methods import build_method, lr_share
from thinwire.training.models import build_model, loss_of

NUM_REPLICAS = 4


@dataclass(frozen=True)
class Case:
    """``changes`` are settings of `OptimConfig`."""

    name: str
    changes: dict[str, Any]
    is_hostile: bool = False


SIGN = {"update": "sign", "lr": 2e-3, "topk": 32, "momentum_decay": 0.99}
ADAMW = {"update": "adamw", "lr": 4e-3, "topk": 32, "momentum_decay": 0.95, "values": "bfloat16"}
CASES = [
    Case("sign rule, mean over senders", SIGN),
    Case("sign rule, majority vote", {**SIGN, "combine": "majority_vote"}),
    Case("adamw rule, mean over senders", ADAMW),
    Case("adamw rule, clipped to the median", {**ADAMW, "clip_to_median": True}),
    Case("adamw rule, majority vote", {**ADAMW, "combine": "majority_vote"}),
    Case("adamw rule, mean over senders", ADAMW, is_hostile=True),
    Case("adamw rule, clipped to the median", {**ADAMW, "clip_to_median": True}, is_hostile=True),
    Case("adamw rule, majority vote", {**ADAMW, "combine": "majority_vote"}, is_hostile=True),
]


def train(case: Case, config: TrainConfig, data: Data) -> float:
    """The validation loss at the end."""
    config = replace(config, optim=replace(config.optim, **case.changes))
    seed_everything(config.run.seed)
    models = [build_model(config, sizes_of(data)) for _ in range(NUM_REPLICAS)]

    def work(transport: LoopbackTransport) -> float:
        model = models[transport.replica].train()
        method = build_method(config.optim, model, model, transport)
        order = Order(len(data.train), config.schedule.batch, transport.replica, NUM_REPLICAS, config.run.seed)
        stream = Stream(data.train, order, 0, 1)
        for step in range(config.schedule.steps):
            method.start_step(lr_share(config.schedule, step))
            loss_of(model, next(stream))[0].backward()
            method.after_backward(config.optim.clip)
            if case.is_hostile and transport.replica == NUM_REPLICAS - 1:
                for parameter in model.parameters():
                    parameter.grad.mul_(-1e6)
            method.step()
        stream.close()
        size, device = config.run.eval_examples, torch.device("cpu")
        return evaluate(model, data.validation, size, 32, transport, device, nullcontext()).loss

    return run_replicas(work, NUM_REPLICAS)[0]


def apply_seconds(decoding: Decoding, edge: int = 2048, repeats: int = 9) -> float:
    """The median time to apply four payloads of bfloat16 values to a square matrix."""
    plan = make_plan([TensorSpec("p", (edge, edge), "torch.float32", 0)], [Coding(64, 32, "bfloat16", "adaptive", 0)])
    (bucket,), group = plan.buckets, GroupStep(0.9, 1.0, UPDATE_RULES["sgd"], Hyper(0.1, 1, (0.9, 0.99), 1e-8), 0.0, 64)
    layout = plan.layout_of(0)
    seconds, payloads = [], []
    with torch.no_grad():
        for _ in range(NUM_REPLICAS):
            tensor = LocalTensor(nn.Parameter(torch.zeros(edge, edge)), torch.randn(layout.num_chunks, layout.num_elements))
            local = LocalStep(plan, [tensor], "torch", decoding)
            encoding = local.empty(bucket)
            local.encode_(bucket, [group], encoding)
            payloads.append(encoding.payload_B)
        for _ in range(repeats):
            start = time.perf_counter()
            local.apply_(bucket, [group], torch.stack(payloads), decoding)
            seconds.append(time.perf_counter() - start)
    return sorted(seconds)[repeats // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for rows.jsonl and environment.json")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)  # replicas are threads already
    base = recipes.build("quickstart")
    base = replace(
        base,
        optim=replace(base.optim, balance=0.0),  # as in the stored rows
        model=replace(base.model, layers=2, width=64, heads=2, mlp_width=192),
        data=replace(base.data, sequence=64),
        schedule=replace(base.schedule, steps=options.steps),
    )
    data = load_data(base)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "environment.json").write_text(json.dumps(environment(), indent=1) + "\n")
    for case in CASES:
        for seed in range(options.seeds if not case.is_hostile else 1):
            start = time.monotonic()
            try:
                loss = train(case, replace(base, run=replace(base.run, seed=seed)), data)
            except ThinwireError as error:
                print(error)
                loss = None
            row = {**asdict(case), "seed": seed, "steps": options.steps, "validation_loss": loss}
            seconds = time.monotonic() - start
            print(f"{loss}  {case.name}{', hostile' * case.is_hostile}, seed {seed}, {seconds:.0f} s", flush=True)
            with (options.out / "rows.jsonl").open("a") as file:
                file.write(json.dumps({**row, "seconds": round(seconds, 1)}) + "\n")
    with (options.out / "times.jsonl").open("a") as file:
        for decoding in (Decoding(), Decoding("majority_vote"), Decoding(clips=True)):
            row = {**decoding._asdict(), "apply_seconds": round(apply_seconds(decoding), 4)}
            print(row)
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
