"""Why the defaults are what they are: short trainings of a byte-level GPT with four replicas, one per process.

    torchrun --nproc-per-node 4 benchmarks/defaults.py --out results/defaults/DATE_HARDWARE [--steps 400] [--seeds 2]

Each case is one row of ``rows.jsonl``: its settings, the mean validation loss at the end, and the bytes a replica sends. The
text is the source of Python's standard library. Cases that do not fit into ``--seconds`` are left out and said so.
"""

import argparse
import dataclasses
import json
import math
import random
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire import DeMo
from thinwire.bench.environment import environment
from thinwire.exchange import plan
from thinwire.wire import values as value_table

BATCH, LENGTH = 16, 256


class ByteGPT(nn.Module):
    """A small causal transformer over bytes, with biases and norms so that the dense path is used."""

    def __init__(self, dim: int = 256, num_layers: int = 6, length: int = LENGTH) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, dim), nn.Embedding(length, dim)
        layer = nn.TransformerEncoderLayer(dim, dim // 64, 4 * dim, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers, nn.LayerNorm(dim), enable_nested_tensor=False)
        self.head = nn.Linear(dim, 256, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        """Mean cross-entropy of the next byte, in nats."""
        x, target = text[:, :-1], text[:, 1:]
        hidden = self.tokens(x) + self.places.weight[: x.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        logits = self.head(self.layers(hidden, mask=mask, is_causal=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def corpus(device: torch.device) -> tuple[Tensor, Tensor]:
    """Training and validation bytes: whole files, shuffled, the last tenth for validation."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    files += sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-s]*/*.py"))
    random.Random(0).shuffle(files)
    text = b"".join(file.read_bytes() for file in files if "site-packages" not in str(file))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device).long()
    cut = len(data) * 9 // 10
    return data[:cut], data[cut:]


def windows(data: Tensor, generator: torch.Generator, count: int) -> Tensor:
    starts = torch.randint(0, len(data) - LENGTH - 1, (count,), generator=generator)
    return data[starts.to(data.device)[:, None] + torch.arange(LENGTH + 1, device=data.device)]


def train(options: dict[str, Any], seed: int, num_steps: int, device: torch.device) -> dict[str, Any]:
    """Train one case and return its measures."""
    train_data, validation = corpus(device)
    torch.manual_seed(seed)
    model = ByteGPT().to(device)
    optimizer = DeMo(model.parameters(), **options)
    generator = torch.Generator().manual_seed(1000 * seed + optimizer.replica)
    for step in range(num_steps):
        warm = min(1.0, (step + 1) / 40)
        optimizer.param_groups[0]["lr"] = options["lr"] * warm * (0.55 + 0.45 * math.cos(math.pi * step / num_steps))
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(windows(train_data, generator, BATCH))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    held_out = torch.Generator().manual_seed(1)
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        losses = [float(model(windows(validation, held_out, 32))) for _ in range(16)]
    return {"validation_loss": sum(losses) / len(losses), "sent_bytes": optimizer.plan.payload_bytes}


def with_unit(unit: Callable[[Tensor], Tensor] | None) -> Callable[[], None]:
    """Make the sign codec take this much out of the sender's momentum per vote."""

    def change() -> None:
        codec = value_table.VALUE_CODECS["sign"]
        value_table.VALUE_CODECS["sign"] = dataclasses.replace(codec, unit=unit)

    return change


def with_share(share: float) -> Callable[[], None]:
    """Make dense tensors send this share of their momentum each step."""

    def change() -> None:
        plan._dense_share = lambda _: share

    return change


SIGN = {"lr": 6e-4, "update": "sign", "topk": 32}
MUON = {"lr": 2e-2, "update": "muon", "topk": 64, "momentum_decay": 0.99}
CASES: dict[str, tuple[dict[str, Any], Callable[[], None] | None]] = {
    "sign rule, sign values": (SIGN, None),
    "sign rule, dense tensors send all": (SIGN, with_share(1.0)),
    "sign rule, no dense path": ({**SIGN, "dense_below": 0}, None),
    "sign rule, sign values, whole coefficient taken out": (SIGN, with_unit(torch.abs)),
    "sign rule, sign_scale values": ({**SIGN, "values": "sign_scale"}, None),
    "sign rule, float32 values": ({**SIGN, "values": "float32"}, None),
    "muon rule, sign values": (MUON, None),
    "muon rule, dense tensors send all": (MUON, with_share(1.0)),
    "muon rule, sign values, whole coefficient taken out": (MUON, with_unit(torch.abs)),
    "muon rule, sign_scale values": ({**MUON, "values": "sign_scale"}, None),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for rows.jsonl and environment.json")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=500.0, help="start no case after this time")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    originals = dict(value_table.VALUE_CODECS), plan._dense_share
    began = time.monotonic()
    for seed in range(options.seeds):
        for name, (settings, change) in CASES.items():
            late = torch.tensor(time.monotonic() - began > options.seconds)
            dist.broadcast(late, 0)
            if bool(late):
                say(f"left out for lack of time: {name}, seed {seed}")
                continue
            value_table.VALUE_CODECS.update(originals[0])
            plan._dense_share = originals[1]
            if change is not None:
                change()
            start = time.monotonic()
            measures = train(settings, seed, options.steps, device)
            say(f"{measures['validation_loss']:.4f}  {name}, seed {seed}, {time.monotonic() - start:.0f} s")
            if dist.get_rank() == 0:
                store(options.out, {"case": name, "seed": seed, "steps": options.steps, **settings, **measures})
    time.sleep(0.2)
    dist.destroy_process_group()


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def store(folder: Path, row: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "environment.json").write_text(json.dumps(environment(), indent=1) + "\n")
    with (folder / "rows.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
