"""What a rank receives in a step with each exchange: gloo processes up to 8 ranks, threads of one process for more.

    python benchmarks/received_bytes.py --out results/received_bytes/DATE_HARDWARE [--processes 2 4 8] [--threads 64 256]

The bytes are those of `optimizer.traffic` in the second step, from other replicas, or from other islands with
``hierarchical``, whose islands are of 2 ranks among up to 8, and of 8 ranks among more. Writes rows, a table and a figure;
rows that are there already are not measured again.
"""

import argparse
import json
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from thinwire import DeMo
from thinwire.bench.environment import environment
from thinwire.exchange.loopback import run_replicas
from thinwire.local_step import LocalStep

EXCHANGES = ("all_gather", "owner", "hierarchical")
WIDTH, LAYERS = 1024, 2


def measure(exchange: str, num_ranks: int, rank: int, **way: Any) -> dict[str, Any]:
    """Two steps of one rank."""
    torch.set_num_threads(1)
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    if exchange == "hierarchical":
        way["islands"] = island_size(num_ranks)
    optimizer = DeMo(layers.parameters(), exchange=exchange, sync_parameters=False, **way)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(2):
        for parameter in layers.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    count = optimizer.traffic.last_step
    facts = {"exchange": exchange, "ranks": num_ranks, "replicas": optimizer.num_replicas}
    facts |= {"sent": count.sent_bytes, "received": count.received_bytes, "payload": optimizer.plan.payload_bytes}
    return {**facts, "inside_received": optimizer.traffic.inside_last_step.received_bytes}


def island_size(num_ranks: int) -> int:
    return 2 if num_ranks <= 8 else 8


def process(rank: int, exchange: str, num_ranks: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=num_ranks)
    found = measure(exchange, num_ranks, rank)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def in_processes(exchange: str, num_ranks: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(process, (exchange, num_ranks, folder), nprocs=num_ranks)
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(num_ranks)]


@contextmanager
def few_at_once() -> Iterator[None]:
    """Let few threads encode and decode at the same time: what all would need together does not fit into memory."""
    turns, own = threading.Semaphore(4), (LocalStep.encode_, LocalStep.apply_)

    def in_turns(work: Callable[..., None]) -> Callable[..., None]:
        def wait_and_work(*arguments: Any) -> None:
            with turns:
                work(*arguments)

        return wait_and_work

    LocalStep.encode_, LocalStep.apply_ = map(in_turns, own)  # type: ignore[method-assign]
    try:
        yield
    finally:
        LocalStep.encode_, LocalStep.apply_ = own  # type: ignore[method-assign]


def in_threads(exchange: str, num_ranks: int) -> list[dict[str, Any]]:
    # Islands need less memory, and wait for each other while they apply.
    with nullcontext() if exchange == "hierarchical" else few_at_once():
        return run_replicas(lambda end: measure(exchange, num_ranks, end.replica, transport=end), num_ranks, 1800.0)


def row_of(kind: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    """The most that any rank received, and what came into an island in sum."""
    size = found[0]["ranks"] // found[0]["replicas"]
    first = found[:size]
    most = max(found, key=lambda one: one["received"])
    return {**most, "transport": kind, "received_by_island": sum(one["received"] for one in first)}


def table(rows: list[dict[str, Any]]) -> str:
    ranks = sorted({row["ranks"] for row in rows})
    found = {(row["exchange"], row["ranks"]): row for row in rows}
    lines = ["| received per rank and step, kB | " + " | ".join(f"R = {number}" for number in ranks) + " |"]
    lines.append("| --- |" + " ---: |" * len(ranks))
    for exchange in EXCHANGES:
        cells = [f"{found[exchange, number]['received'] / 1e3:,.1f}" for number in ranks]
        lines.append(f"| {exchange} | " + " | ".join(cells) + " |")
    cells = [f"{found['hierarchical', number]['received_by_island'] / 1e3:,.1f}" for number in ranks]
    return "\n".join([*lines, "| hierarchical, all ranks of an island | " + " | ".join(cells) + " |"]) + "\n"


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    for exchange, marker, style in zip(EXCHANGES, "os^", ("-", "--", ":"), strict=True):
        own = sorted((row for row in rows if row["exchange"] == exchange and row["received"]), key=lambda row: row["ranks"])
        points = [row["ranks"] for row in own], [row["received"] / 1e3 for row in own]
        axes.plot(*points, marker=marker, linestyle=style, color="black", label=exchange)
    axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="received per rank and step, kB")
    ranks = sorted({row["ranks"] for row in rows})
    axes.set_xticks(ranks, ranks)
    axes.set_xticks([], minor=True)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--processes", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--threads", type=int, nargs="*", default=[64, 256])
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "rows.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    known = {(row["exchange"], row["ranks"]) for row in rows}
    for kind, numbers, run in (("gloo", arguments.processes, in_processes), ("loopback", arguments.threads, in_threads)):
        for exchange, num_ranks in product(EXCHANGES, numbers):
            if (exchange, num_ranks) not in known:
                rows.append(row_of(kind, run(exchange, num_ranks)))
                print(rows[-1], flush=True)
                with path.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
    (arguments.out / "environment.json").write_text(json.dumps(environment(), indent=1) + "\n")
    (arguments.out / "summary.md").write_text(table(rows))
    draw(rows, arguments.out / "received.png")
    print(table(rows))


if __name__ == "__main__":
    main()
