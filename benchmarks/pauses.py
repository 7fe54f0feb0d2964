"""What TCP forgets in a pause: a gloo all-gather after pauses of different lengths, beside the planner's model of it.

    thinwire lab run --hosts 2 --link 100mbit,80ms -- python benchmarks/pauses.py --link 100mbit,80ms --out results/pauses

To be started once per host. ``--link`` only says which link the model is to have. Rows are added to those in ``--out``.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist

from thinwire.bench.environment import environment
from thinwire.planner.cost import TRIPS_PER_ROUND, network_seconds, ring_all_gather
from thinwire.planner.link_spec import parse_link

MESSAGE_BYTES = (100_000, 500_000, 2_000_000)
PAUSES = (0.0, 0.1, 0.2, 0.35, 0.6, 1.0, 2.0)


def gather_seconds(num_bytes: int, pause_seconds: float, num_repeats: int) -> list[float]:
    """Of all-gathers with such a pause before each, but for the first, which follows another pause."""
    mine = torch.zeros(num_bytes, dtype=torch.uint8)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    seconds = []
    for _ in range(num_repeats + 1):
        time.sleep(pause_seconds)
        began = time.perf_counter()
        dist.all_gather(everyone, mine)
        seconds.append(time.perf_counter() - began)
    return seconds[1:]


def main() -> None:
    """Measure; host 0 prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", required=True)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    link, rows = parse_link(options.link).link, []
    for num_bytes in MESSAGE_BYTES:
        exchange = ring_all_gather(num_bytes, dist.get_world_size())
        for pause in PAUSES:
            seconds = gather_seconds(num_bytes, pause, options.repeats)
            rows.append(
                {
                    "link": options.link,
                    "num_bytes": num_bytes,
                    "pause_seconds": pause,
                    "median_seconds": statistics.median(seconds),
                    "least_seconds": min(seconds),
                    "most_seconds": max(seconds),
                    "num_repeats": options.repeats,
                    "predicted_seconds": network_seconds(exchange, link.after(pause), TRIPS_PER_ROUND),
                }
            )
            if dist.get_rank() == 0:
                print(rows[-1], flush=True)
    if dist.get_rank() == 0 and options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        with (options.out / "rows.jsonl").open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        (options.out / "environment.json").write_text(json.dumps(environment(), indent=2) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
