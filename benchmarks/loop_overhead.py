"""What the trainer's loop costs beside a bare one: AdamW, one replica, the same model and data, in turns, in one process.

python benchmarks/loop_overhead.py [--rounds 7] [--steps 30]
"""

import argparse
import dataclasses
import io
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console

from thinwire.bench.environment import environment
from thinwire.parallel.place import Place
from thinwire.training import recipes
from thinwire.training.examples import Order
from thinwire.training.job import Job, load_data, seed_everything, sizes_of
from thinwire.training.loop import run_replica
from thinwire.training.models import build_model

RESULTS = Path(__file__).parent.parent / "results"


def bare_loop(config, data, steps: int) -> float:
    """The loop anyone would write; returns seconds per step."""
    seed_everything(0)
    model = build_model(config, sizes_of(data)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optim.lr, fused=True)
    order = Order(len(data.train), config.schedule.batch, 0, 1, 0)
    began = time.perf_counter()
    for step in range(steps):
        batch = data.train.fetch(order.indices(step * config.schedule.batch))
        logits = model(batch.inputs, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.clip)
        optimizer.step()
        optimizer.zero_grad()
    return (time.perf_counter() - began) / steps


def trainer_loop(config, steps: int, folder: Path) -> float:
    """The same by `thinwire train`, set-up, evaluation and checkpoints apart; logs and display included."""
    outcome = run_replica(Job(config, Place(), folder), Console(file=io.StringIO()))
    apart = ("set-up", "evaluation", "checkpoints")
    return sum(seconds for phase, seconds in outcome.seconds.items() if phase not in apart) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    config = recipes.build("quickstart", "adamw")
    schedule = dataclasses.replace(config.schedule, steps=options.steps)
    run = dataclasses.replace(config.run, eval_every=10**9, eval_examples=1, checkpoint_every=0)
    config = dataclasses.replace(config, schedule=schedule, run=run)
    data = load_data(config)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            row = {"round": number, "bare_seconds": bare_loop(config, data, options.steps)}
            row["trainer_seconds"] = trainer_loop(config, options.steps, Path(folder, str(number)))
            rows.append({**row, "ratio": row["trainer_seconds"] / row["bare_seconds"]})
            print(json.dumps(rows[-1]))
    facts = {**environment(), "steps": options.steps}
    out = RESULTS / "loop_overhead" / f"{facts['date']}_cpu"
    out.mkdir(parents=True, exist_ok=True)
    (out / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (out / "environment.json").write_text(json.dumps(facts, indent=1) + "\n")
    ratios = [row["ratio"] for row in rows]
    least = min(row["trainer_seconds"] for row in rows) / min(row["bare_seconds"] for row in rows)
    print(
        f"median ratio {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}), of the fastest {least:.3f}"
    )


if __name__ == "__main__":
    main()
