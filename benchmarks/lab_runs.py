"""Train methods on a thin link from the first step to a validation loss: real processes, sockets and packets, one host each.

sudo python benchmarks/lab_runs.py --link 100mbit,20ms --methods demo-muon adamw --out results/lab_runs/DATE_HARDWARE

What `thinwire study report q12` computes as steps times the seconds of a step is measured here as a whole. A run has the
settings and the schedule of the method's curve in results/lab_losses, and ends when an evaluation is at the target, or after
--most-seconds. Seconds are those of steps: evaluations are not counted. Rows are appended; what is there is not repeated.
"""

import argparse
import dataclasses
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from thinwire.bench.environment import commit, environment
from thinwire.lab.methods import choose
from thinwire.training.config_file import as_toml
from thinwire.training.logs import read_rows

_STOP_SECONDS = 300  # a step on a slow link, and the lab's own patience
_NOT_STEPS = ("set-up", "evaluation", "checkpoints")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=["demo-muon", "adamw"])
    parser.add_argument("--recipe", default="gpt-10m")
    parser.add_argument("--link", default="100mbit,20ms")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--steps", type=int, default=400, help="of the schedule; the run ends before at the target")
    parser.add_argument("--target", type=float, default=1.8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most-seconds", type=float, default=1800.0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "rows.jsonl"
    known = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if not known:
        (options.out / "environment.json").write_text(json.dumps(environment(), indent=1) + "\n")
    for method in choose(options.methods):
        facts = {name: getattr(options, name) for name in ("recipe", "link", "hosts", "seed", "steps", "target")}
        facts |= {"method": method}
        if any(facts.items() <= row.items() for row in known):
            print(f"{method} over {options.link}: there already", flush=True)
            continue
        end, curve = train(method, options)
        with path.open("a") as file:
            file.write(json.dumps({**facts, "end": end, "curve": curve, "commit": commit()}) + "\n")


def train(name: str, options: argparse.Namespace) -> tuple[str, list[dict[str, float]]]:
    """How the run ended (target, time or steps), and step, loss and seconds at every evaluation."""
    base = choose([name])[name].train_config(options.recipe)
    config = dataclasses.replace(
        base,
        schedule=dataclasses.replace(base.schedule, steps=options.steps, batch=base.schedule.batch * options.hosts // 2),
        run=dataclasses.replace(base.run, tensorboard=False, sample_tokens=0, checkpoint_every=0, seed=options.seed),
        launch=dataclasses.replace(base.launch, threads=1, device="cpu", timeout_seconds=600.0),
    )
    with tempfile.TemporaryDirectory() as scratch:
        settings, folder = Path(scratch) / "config.toml", Path(scratch) / "run"
        settings.write_text(as_toml(config))
        thinwire = [sys.executable, "-m", "thinwire"]
        lab = [*thinwire, "lab", "run", "--hosts", str(options.hosts), "--link", options.link, "--"]
        trainer = [*thinwire, "train", options.recipe, "--config", str(settings), "--out", str(folder)]
        with (Path(scratch) / "output.txt").open("w") as output:
            running = subprocess.Popen([*lab, *trainer], stdout=output, stderr=output)
        began, curve = time.monotonic(), list[dict[str, float]]()
        while running.poll() is None and time.monotonic() - began < options.most_seconds:
            time.sleep(2.0)
            found = evaluations(folder / "log.jsonl")
            for one in found[len(curve) :]:
                print(
                    f"{name} over {options.link}: step {one['step']}, loss {one['loss']:.4f}, {one['seconds']:.0f} s",
                    flush=True,
                )
            curve = found
            if curve and curve[-1]["loss"] <= options.target:
                break
        is_there = bool(curve) and curve[-1]["loss"] <= options.target
        end = "target" if is_there else "time" if running.poll() is None else "steps" if running.poll() == 0 else "failed"
        if running.poll() is None:
            running.send_signal(signal.SIGINT)
            running.wait(_STOP_SECONDS)
        if end == "failed" or not curve:
            raise SystemExit(f"{name} over {options.link} has failed:\n{(Path(scratch) / 'output.txt').read_text()[-3000:]}")
        return end, curve


def evaluations(path: Path) -> list[dict[str, float]]:
    """Those of a run so far. How long its steps took is known where the log says so, and in between in proportion."""
    rows = read_rows(path) if path.exists() else []
    known = [(0, 0.0)] + [(row["step"], step_seconds(row["totals"])) for row in rows if row["kind"] == "speed"]
    found = []
    for row in rows:
        after = [pair for pair in known if pair[0] >= row["step"]]
        if row["kind"] == "evaluation" and row["step"] and after:
            before, (step, seconds) = max(pair for pair in known if pair[0] <= row["step"]), min(after)
            share = (row["step"] - before[0]) / max(1, step - before[0])
            at = before[1] + share * (seconds - before[1])
            found.append({"step": row["step"], "loss": round(row["loss"], 5), "seconds": round(at, 2)})
    return found


def step_seconds(totals: dict[str, Any]) -> float:
    return float(totals["elapsed"]) - sum(float(totals[name]) for name in _NOT_STEPS)


if __name__ == "__main__":
    main()
