"""What the checks of a step without faults cost, as a share of the whole training step.

    python benchmarks/check_costs.py --recipe quickstart --replicas 4 --out results/check_costs/DATE_HARDWARE

Measured in turns in one run, medians: forward and backward, `DeMo.step()` with everyone's payloads but without a wire,
the checks of these payloads (checksums, records, headers, and sealing the own one), and one drift check.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from thinwire.bench.contenders import with_echoes
from thinwire.bench.environment import environment
from thinwire.drift import hash_of
from thinwire.sealing import inspect_, read_findings, seal_
from thinwire.training import recipes
from thinwire.training.examples import Batch
from thinwire.training.models import Sizes, build_model, loss_of

VOCABULARY = 50304


def milliseconds(work: Callable[[], None], device: torch.device, repeats: int) -> float:
    """Of one call, among several in a row."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(repeats):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) * 1000 / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="quickstart")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--micro-batch", type=int, default=0, help="examples per forward pass; 0: a replica's share")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--check-drift-every", type=int, default=100)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    device = torch.device(asked.device)
    config = recipes.build(asked.recipe, "demo")
    torch.manual_seed(0)
    sizes = Sizes(vocab_size=256 if config.data.tokenizer == "bytes" else VOCABULARY)
    model = build_model(config, sizes).to(device)
    share = asked.micro_batch or max(1, config.schedule.batch // asked.replicas)
    tokens = torch.randint(0, sizes.vocab_size, (share, config.data.sequence + 1), device=device)
    batch = Batch(tokens[:, :-1], tokens[:, 1:])
    parameters = list(model.parameters())

    def forward_and_backward() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=config.model.precision == "bfloat16"):
            loss, _ = loss_of(model, batch)
        loss.backward()

    forward_and_backward()
    optimizer, prepare = with_echoes(parameters, "auto", config.optim.topk, asked.replicas)
    (encoding,) = optimizer._local.rooms[0]
    (bucket,) = optimizer.plan.buckets
    is_fused = optimizer._local.is_fused
    header = optimizer._header()[0]

    def check_payloads() -> None:
        if is_fused:
            from thinwire.kernels import checks

            (verdict,) = optimizer._local.verdicts.values()
            stacks = [(stack.codec, stack.offset_bytes, stack.num_chunks) for stack in bucket.stacks]
            checks.inspect_(encoding.payloads_RB, stacks, encoding.findings_RW)
            checks.judge_(encoding.payloads_RB, encoding.replica, encoding.findings_RW, verdict)
            seal_(encoding.payloads_RB[1], fused=True)
        else:
            forms = [bucket] * len(encoding.payloads_RB)
            inspect_(forms, encoding.payloads_RB, encoding.findings_RW)
            read_findings(forms, encoding.findings_RW.cpu(), header)
            seal_(encoding.payloads_RB[1], fused=False)

    def check_drift() -> None:
        hashes = [hash_of(tensor) for _, tensor in optimizer._local.replicated()]
        torch.stack(hashes).cpu()

    def step() -> None:
        prepare()
        times["step"].append(milliseconds(optimizer.step, device, 1))

    times: dict[str, list[float]] = {"forward and backward": [], "step": [], "payload checks": [], "drift check": []}
    for number in range(asked.rounds + 2):
        if number == 2:  # the first rounds compile and warm up
            times = {name: [] for name in times}
        times["forward and backward"].append(milliseconds(forward_and_backward, device, 3))
        step()
        times["payload checks"].append(milliseconds(check_payloads, device, 10))
        times["drift check"].append(milliseconds(check_drift, device, 3))
    median = {name: statistics.median(values) for name, values in times.items()}
    whole = median["forward and backward"] + median["step"]
    row = {
        "recipe": asked.recipe,
        "num_parameters": sum(parameter.numel() for parameter in parameters),
        "device": device.type,
        "backends": sorted(optimizer._local.backends),
        "replicas": asked.replicas,
        "tokens": tokens.numel(),
        "median_ms": median,
        "low_ms": {name: min(values) for name, values in times.items()},
        "high_ms": {name: max(values) for name, values in times.items()},
        "payload_checks_percent": 100 * median["payload checks"] / whole,
        "drift_check_percent": 100 * median["drift check"] / asked.check_drift_every / whole,
        "rounds": asked.rounds,
    }
    print(json.dumps(row))
    if asked.out:
        asked.out.mkdir(parents=True, exist_ok=True)
        with (asked.out / "rows.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        (asked.out / "environment.json").write_text(json.dumps(environment(), indent=1) + "\n")


if __name__ == "__main__":
    main()
