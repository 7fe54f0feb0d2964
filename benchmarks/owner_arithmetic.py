"""What owners compute: processor time of an optimizer step with an owner exchange, beside one with an all-gather.

    python benchmarks/owner_arithmetic.py [--replicas 2 4 8] [--rounds 7] [--out results/owner_arithmetic/DATE_cpu]

The replicas are threads of one process, each with one thread for its own arithmetic, and take turns step by step. Counted is
the process's own time on its processors, divided by the replicas: waiting for each other costs none. Messages are copied in
memory, and no network takes part. With one replica there is nothing to exchange. No test asserts any of it.
"""

import argparse
import json
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thinwire import DeMo
from thinwire.bench.environment import environment
from thinwire.exchange.loopback import run_replicas
from thinwire.exchange.transport import Transport
from thinwire.training import recipes
from thinwire.training.shapes import build_on_meta, specs_of

RECIPE = "gpt-10m"
SHAPES = [spec.shape for spec in specs_of(build_on_meta(recipes.build(RECIPE)))]


def make(replica: int) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(replica)
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return parameters


def measure(num_replicas: int, num_rounds: int) -> list[dict[str, Any]]:
    """Both exchanges, round by round; the first round warms up."""
    exchanges = ("all_gather", "owner") if num_replicas > 1 else ("all_gather",)
    spent: dict[str, list[float]] = {name: [] for name in exchanges}
    start_line = threading.Barrier(num_replicas)

    def work(transport: Transport) -> None:
        optimizers = {
            name: DeMo(make(transport.replica), transport=transport, exchange=name, backend="torch", check_drift_every=0)
            for name in exchanges
        }
        for round_ in range(num_rounds + 1):
            for name, optimizer in optimizers.items():
                start_line.wait()
                began = time.process_time()
                optimizer.step()
                start_line.wait()
                if round_ and transport.replica == 0:
                    spent[name].append((time.process_time() - began) / num_replicas)

    run_replicas(work, num_replicas)
    return [
        {
            "recipe": RECIPE,
            "parameters": sum(torch.Size(shape).numel() for shape in SHAPES),
            "replicas": num_replicas,
            "exchange": name if num_replicas > 1 else "none",
            "rounds": num_rounds,
            "median_seconds": statistics.median(found),
            "least_seconds": min(found),
            "most_seconds": max(found),
        }
        for name, found in spent.items()
    ]


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| replicas | exchange | milliseconds of a processor per replica and step | ns per parameter |"]
    lines.append("| ---: | --- | ---: | ---: |")
    for row in rows:
        times = [1e3 * row[f"{kind}_seconds"] for kind in ("median", "least", "most")]
        cell = f"{times[0]:.0f} ({times[1]:.0f} to {times[2]:.0f})"
        each = 1e9 * row["median_seconds"] / row["parameters"]
        lines.append(f"| {row['replicas']} | {row['exchange']} | {cell} | {each:.1f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=None, help="default: results/owner_arithmetic/DATE_cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    env = environment()
    out = options.out or Path(__file__).parent.parent / "results" / "owner_arithmetic" / f"{env['date']}_cpu"
    rows: list[dict[str, Any]] = []
    for num_replicas in options.replicas:
        rows += measure(num_replicas, options.rounds)
        print(f"measured: {num_replicas} replicas", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    (out / "environment.json").write_text(json.dumps(env, indent=1) + "\n")
    (out / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = f"# What owners compute\n\nWritten by `benchmarks/owner_arithmetic.py`: {RECIPE}, k = 32, one-bit values."
    (out / "summary.md").write_text(f"{words}\nMedians, with the least and the most of all rounds.\n\n{table(rows)}\n")
    print(f"\n{table(rows)}\n\nrows: {out}")


if __name__ == "__main__":
    main()
