"""Loss curves of every method of the network lab, each at several learning rates, for `thinwire lab compare --losses`.

python benchmarks/lab_losses.py --out results/lab_losses/DATE_HARDWARE --runs SCRATCH --steps 600 --at-once 6

First one seed at each learning rate of a grid around the recipe's, the same number of tries for all; where the best is at an
edge of the grid, one more beyond it. Then the other seeds at the best one. Runs that are there are not repeated. A run whose
loss is no longer a number counts as one that learned nothing.
"""

import argparse
import dataclasses
import json
import math
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from thinwire.bench.environment import environment
from thinwire.lab.methods import METHODS, choose
from thinwire.training.config_file import as_toml
from thinwire.training.logs import read_rows

Trial = tuple[str, float, int]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=["all"])
    parser.add_argument("--recipe", default="gpt-10m")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--factors", nargs="+", type=float, default=[1.0, 0.3, 3.0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no run after this time")
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options, others = parser.parse_known_args()
    deadline = time.monotonic() + options.seconds
    names = [name for name in choose(options.methods) if not name.endswith("-after")]  # the same curves as without

    def run_all(trials: list[Trial]) -> None:
        with ThreadPoolExecutor(options.at_once) as pool:
            list(pool.map(lambda trial: train(trial, options, others, deadline), trials))

    base = {name: METHODS[name].train_config(options.recipe).optim.lr for name in names}
    grid = [(name, base[name] * factor, options.seeds[0]) for factor in options.factors for name in names]
    run_all(grid)
    edges = [(name, beyond, options.seeds[0]) for name in names if (beyond := edge(name, options)) is not None]
    run_all(edges)
    best = {name: min(rates(name, options), key=lambda pair: pair[0])[1] for name in names if rates(name, options)}
    run_all([(name, lr, seed) for name, lr in best.items() for seed in options.seeds[1:]])
    collect(options)


def folder_of(trial: Trial, options: argparse.Namespace) -> Path:
    name, lr, seed = trial
    return options.runs / f"{name}_{lr:.8f}_{seed}"


def train(trial: Trial, options: argparse.Namespace, others: list[str], deadline: float) -> None:
    name, lr, seed = trial
    folder = folder_of(trial, options)
    if (folder / "done").exists() or time.monotonic() > deadline:
        return
    subprocess.run(["rm", "-rf", str(folder)], check=True)
    folder.mkdir(parents=True)
    config = METHODS[name].train_config(options.recipe)
    schedule = dataclasses.replace(config.schedule, steps=options.steps)
    run = dataclasses.replace(config.run, tensorboard=False, sample_tokens=0, checkpoint_every=0)
    (folder / "config.toml").write_text(as_toml(dataclasses.replace(config, schedule=schedule, run=run)))
    command = [sys.executable, "-m", "thinwire", "train", options.recipe, "--config", str(folder / "config.toml")]
    command += ["--replicas", "2", "--lr", repr(lr), "--seed", str(seed), "--out", str(folder / "run"), *others]
    with (folder / "output.txt").open("w") as output:
        code = subprocess.run(command, stdout=output, stderr=output, env=os.environ, check=False).returncode
    last = (folder / "output.txt").read_text().strip().splitlines()[-1:]
    if code == 0 or "loss of step" in " ".join(last):
        (folder / "done").write_text(str(code))
    print(f"{name} lr {lr:g} seed {seed}: {final_loss(trial, options):.4f} {last if code else ''}", flush=True)


def final_loss(trial: Trial, options: argparse.Namespace) -> float:
    folder = folder_of(trial, options)
    if not (folder / "run" / "summary.json").exists():
        return math.inf
    loss = json.loads((folder / "run" / "summary.json").read_text())["last_validation_loss"]
    return loss if math.isfinite(loss) else math.inf


def rates(name: str, options: argparse.Namespace) -> list[tuple[float, float]]:
    """Final loss and learning rate of all runs of a method with the first seed."""
    seed, found = options.seeds[0], []
    for folder in options.runs.glob(f"{name}_*_{seed}"):
        lr = float(folder.name.split("_")[1])
        if (folder / "done").exists():
            found.append((final_loss((name, lr, seed), options), lr))
    return found


def edge(name: str, options: argparse.Namespace) -> float | None:
    """A learning rate beyond the grid, if the best one is at its edge."""
    found = rates(name, options)
    if len(found) < 2 or len(found) > len(options.factors):
        return None
    best, all_rates = min(found)[1], sorted(lr for _, lr in found)
    return best * 2.5 if best == all_rates[-1] else best / 2.5 if best == all_rates[0] else None


def collect(options: argparse.Namespace) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "environment.json").write_text(json.dumps(environment(), indent=1) + "\n")
    with (options.out / "rows.jsonl").open("w") as file:
        for folder in sorted(options.runs.glob("*_*_*")):
            name, lr, seed = folder.name.split("_")
            if not (folder / "done").exists() or final_loss((name, float(lr), int(seed)), options) == math.inf:
                continue
            for row in read_rows(folder / "run" / "log.jsonl"):
                if row["kind"] == "evaluation":
                    facts = {"method": name, "lr": float(lr), "seed": int(seed), "step": row["step"], "loss": row["loss"]}
                    file.write(json.dumps(facts) + "\n")


if __name__ == "__main__":
    main()
