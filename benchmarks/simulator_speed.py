"""How fast is a simulated step? Virtual replicas beside a loop over the published step, in one run.

    python benchmarks/simulator_speed.py --out results/simulator/DATE_HARDWARE [--recipe gpt-small] [--replicas 8]

The loop does for each replica what the published code does in its process: forward, backward, and `pytorch_optimizer.DeMo`,
which decodes R messages; what the others would send is its own message, R times. Rounds of all contenders alternate.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pytorch_optimizer import DeMo
from torch import Tensor, nn

from thinwire.bench.environment import environment
from thinwire.studies.gradients import autocast
from thinwire.studies.simulation import Simulation
from thinwire.training.config import TrainConfig
from thinwire.training.config_file import override
from thinwire.training.models import loss_of
from thinwire.training.recipes import build


class Echo(DeMo):  # type: ignore[misc]
    """Receives its own message from everyone."""

    num_replicas: int

    def demo_all_gather(self, sparse_idx: Tensor, sparse_val: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """R times what is sent."""
        return [sparse_idx] * self.num_replicas, [sparse_val] * self.num_replicas


class _Size:
    def __init__(self, num_replicas: int) -> None:
        self._num_replicas = num_replicas

    def size(self) -> int:
        return self._num_replicas


def published_loop(config: TrainConfig, num_replicas: int, device: torch.device) -> Callable[[], None]:
    simulation = Simulation(config, num_replicas, device)
    model, examples, order = simulation.model, simulation._train, simulation._order
    company: Any = _Size(num_replicas)
    optimizers = [Echo(model.parameters(), lr=1e-4, process_group=company) for _ in range(num_replicas)]
    for optimizer in optimizers:
        optimizer.num_replicas = num_replicas
    num_steps = 0

    def step() -> None:
        nonlocal num_steps
        batch = examples.fetch(order.indices(num_steps * config.schedule.batch))
        parts = zip(batch.inputs.chunk(num_replicas), batch.targets.chunk(num_replicas), strict=True)
        for optimizer, part in zip(optimizers, parts, strict=True):
            optimizer.zero_grad()
            with autocast(config, device):
                loss, _ = loss_of(model, type(batch)(*part))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        num_steps += 1

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recipe", default="gpt-small")
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = override(build(options.recipe), {"update": "sign", "topk": 32, "lr": 1e-4, "balance": 0.0}, "simulator_speed")
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    contenders: dict[str, Callable[[], None]] = {
        "simulator, looped": Simulation(config, options.replicas, device, batched=False).take_step,
        "simulator, batched": Simulation(config, options.replicas, device, batched=True).take_step,
        "loop over the published step": published_loop(config, options.replicas, device),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(options.rounds + 1):
        for name, step in contenders.items():
            wait()
            began = time.perf_counter()
            for _ in range(options.steps):
                step()
            wait()
            if number:  # the first round warms up
                seconds[name].append((time.perf_counter() - began) / options.steps)
    slowest = statistics.median(seconds["loop over the published step"])
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "environment.json").write_text(json.dumps(environment(), indent=1) + "\n")
    with (options.out / "rows.jsonl").open("a") as file:
        for name, found in seconds.items():
            median = statistics.median(found)
            row = {"contender": name, "recipe": options.recipe, "replicas": options.replicas, "seconds": found}
            file.write(json.dumps({**row, "median_seconds": median, "times_faster": slowest / median}) + "\n")
            print(f"{name}: {median * 1e3:.1f} ms per step, {slowest / median:.1f} x", flush=True)


if __name__ == "__main__":
    main()
