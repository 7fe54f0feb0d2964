"""One optimizer step on the CPU, Thinwire's DeMo beside pytorch-optimizer's, in one process and one run.

    make bench        (or: python benchmarks/cpu_step.py [--rounds 9] [--threads 1 2] [--out FOLDER])

Times are only good as ratios: the candidates take turns, round by round, and the ratio is that of the medians. Peak memory
is what torch's allocator held at most during a step, above parameters, gradients and state. No test asserts any of it.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pytorch_optimizer import DeMo as PeerDeMo
from torch import nn
from torch.profiler import ProfilerActivity, profile

from thinwire import DeMo
from thinwire.bench.environment import environment

Shapes = list[tuple[int, ...]]


def gpt(dim: int, vocabulary: int, num_layers: int, num_places: int) -> Shapes:
    """The parameters of a GPT without biases, its output tied to its embedding."""
    layer: Shapes = [(dim,), (3 * dim, dim), (dim, dim), (dim,), (4 * dim, dim), (dim, 4 * dim)]
    return [(vocabulary, dim), (num_places, dim), *(layer * num_layers), (dim,)]


MODELS = {
    "GPT over characters, 10.7 M": gpt(384, 65, 6, 256),
    "GPT with GPT-2's vocabulary, 10.1 M": gpt(160, 50304, 6, 1024),
}
METHODS: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "pytorch_optimizer.DeMo": lambda params: PeerDeMo(params, lr=1e-3),
    "thinwire.DeMo": lambda params: DeMo(params, lr=1e-3),
    "thinwire.DeMo.published": lambda params: DeMo.published(params, lr=1e-3),
    "torch AdamW, fused": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
}


def make(shapes: Shapes) -> list[nn.Parameter]:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return parameters


def seconds(step: Callable[[], Any], clock: Callable[[], float]) -> float:
    start = clock()
    step()
    return clock() - start


def peak_bytes(step: Callable[[], Any]) -> int:
    """The largest sum of live allocations during one step, from torch's own record of them."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        step()
    held = most = 0
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def measure(model: str, num_threads: int, num_rounds: int) -> list[dict[str, Any]]:
    torch.set_num_threads(num_threads)
    optimizers = {name: build(make(MODELS[model])) for name, build in METHODS.items()}
    wall: dict[str, list[float]] = {name: [] for name in METHODS}
    cpu: dict[str, list[float]] = {name: [] for name in METHODS}
    for round_ in range(num_rounds + 1):
        for name, optimizer in optimizers.items():
            wall_seconds = seconds(optimizer.step, time.perf_counter)
            cpu_seconds = seconds(optimizer.step, time.process_time)
            if round_:  # the first round warms up
                wall[name].append(wall_seconds)
                cpu[name].append(cpu_seconds)
    rows = []
    for name, optimizer in optimizers.items():
        rows.append(
            {
                "model": model,
                "parameters": sum(torch.Size(shape).numel() for shape in MODELS[model]),
                "threads": num_threads,
                "method": name,
                "rounds": num_rounds,
                "wall_median_seconds": statistics.median(wall[name]),
                "wall_min_seconds": min(wall[name]),
                "wall_max_seconds": max(wall[name]),
                "cpu_median_seconds": statistics.median(cpu[name]),
                "cpu_min_seconds": min(cpu[name]),
                "peak_extra_bytes": peak_bytes(optimizer.step),
            }
        )
    peer = rows[0]
    for row in rows:
        row["times_faster_wall"] = peer["wall_median_seconds"] / row["wall_median_seconds"]
        row["times_faster_cpu"] = peer["cpu_median_seconds"] / row["cpu_median_seconds"]
        row["share_of_peer_memory"] = row["peak_extra_bytes"] / peer["peak_extra_bytes"]
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| model | threads | method | wall, median (min to max) | faster: wall | CPU time | peak extra | of the peer's |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        times = [row[f"wall_{kind}_seconds"] * 1e3 for kind in ("median", "min", "max")]
        lines.append(
            f"| {row['model']} | {row['threads']} | {row['method']} | {times[0]:.0f} ms ({times[1]:.0f} to {times[2]:.0f}) "
            f"| {row['times_faster_wall']:.2f}x | {row['times_faster_cpu']:.2f}x "
            f"| {row['peak_extra_bytes'] / 1e6:.2f} MB | {row['share_of_peer_memory']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--out", type=Path, default=None, help="default: results/cpu_step/DATE_cpu")
    options = parser.parse_args()
    env = environment()
    out = options.out or Path(__file__).parent.parent / "results" / "cpu_step" / f"{env['date']}_cpu"
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        # the peer asks torch.distributed for the number of replicas
        dist.init_process_group("gloo", init_method=Path(folder, "rendezvous").as_uri(), rank=0, world_size=1)
        for model in MODELS:
            for num_threads in options.threads:
                rows += measure(model, num_threads, options.rounds)
                print(f"measured: {model}, {num_threads} threads", flush=True)
        time.sleep(0.2)
        dist.destroy_process_group()
    out.mkdir(parents=True, exist_ok=True)
    (out / "environment.json").write_text(json.dumps(env, indent=1) + "\n")
    (out / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (out / "summary.md").write_text(f"# One step on the CPU\n\nWritten by `make bench`.\n\n{table(rows)}\n")
    print(f"\n{table(rows)}\n\nrows: {out.relative_to(Path.cwd()) if out.is_relative_to(Path.cwd()) else out}")


if __name__ == "__main__":
    main()
