"""Do all backends and devices find the same bits? Record the payloads of a run, and replay them elsewhere.

    python benchmarks/same_bits.py record FOLDER --rule sign    # 8 replicas, on this machine's CPU
    python benchmarks/same_bits.py replay FOLDER                # every backend and device of this machine

A replay starts from the recorded parameters, applies the recorded payloads step by step, and compares a SHA-256 of all
parameters after every step with the one the recording run had.
"""

import argparse
import hashlib
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from thinwire import DeMo
from thinwire.core.combine import Decoding
from thinwire.core.layout import empty_momentum
from thinwire.core.update_rules import UPDATE_RULES
from thinwire.exchange.plan import Coding, ExchangePlan, TensorSpec, make_plan
from thinwire.local_step import LocalStep
from thinwire.planning import group_step
from thinwire.slabs import LocalTensor
from thinwire.stack_step import GroupStep

WIDTH, CONTEXT, BATCH = 64, 32, 4
LR = 1e-3


class SmallGPT(nn.Module):
    """A causal transformer over bytes, with matrices that need padding, biases and norms."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(256, WIDTH), nn.Parameter(torch.randn(CONTEXT, WIDTH) * 0.02)
        make = lambda: nn.TransformerEncoderLayer(WIDTH, 4, 150, dropout=0.0, batch_first=True, norm_first=True)  # noqa: E731
        self.layers = nn.ModuleList([make() for _ in range(2)])
        self.out = nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next byte."""
        hidden = self.embed(tokens) + self.place[: tokens.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return self.out(hidden)


def digest(tensors: list[Tensor]) -> str:
    """A hash of all bits."""
    whole = torch.cat([tensor.detach().cpu().contiguous().view(-1).view(torch.uint8) for tensor in tensors])
    return hashlib.sha256(whole.numpy().tobytes()).hexdigest()


def record(folder: Path, rule: str, values: str, num_replicas: int, num_steps: int) -> None:
    """Train, and write down what a replay needs."""
    folder.mkdir(parents=True)
    text = torch.from_numpy(np.frombuffer(Path(argparse.__file__).read_bytes(), dtype=np.uint8).copy()).long()
    torch.manual_seed(0)
    first = SmallGPT().state_dict()
    model = SmallGPT()
    model.load_state_dict(first)
    parameters = list(model.parameters())
    run = {"rule": rule, "values": values, "names": [name for name, _ in model.named_parameters()]}
    plan = _plan(run, parameters)
    # All replicas have the same parameters, so one model serves them all; each has a momentum of its own.
    senders = [LocalStep(plan, _tensors(plan, parameters, rule), "torch") for _ in range(num_replicas)]
    encodings = [sender.empty(plan.buckets[0]) for sender in senders]
    payloads, digests = [], []
    for step in range(num_steps):
        group = _group(rule, step)
        for sender, encoding in zip(senders, encodings, strict=True):
            starts = torch.randint(0, len(text) - CONTEXT - 1, (BATCH,))
            batch = torch.stack([text[start : start + CONTEXT + 1] for start in starts])
            model.zero_grad()
            loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            encoding.payload_B.zero_()
            with torch.no_grad():
                sender.encode_(plan.buckets[0], [group], encoding)
        payloads.append(torch.stack([encoding.payload_B for encoding in encodings]))
        with torch.no_grad():
            senders[0].apply_(plan.buckets[0], [group], payloads[-1], Decoding(is_exact=True))
        digests.append(digest(parameters))
        if step % 100 == 99:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    save_file({name: first[name] for name in run["names"]}, folder / "first.safetensors")
    save_file({"payloads": torch.stack(payloads)}, folder / "payloads.safetensors")
    (folder / "run.json").write_text(json.dumps({**run, "digests": digests}))


def _tensors(plan: ExchangePlan, parameters: list[nn.Parameter], rule: str) -> list[LocalTensor]:
    tensors = []
    for index, parameter in enumerate(parameters):
        momentum = empty_momentum(plan.layout_of(index), torch.float32, parameter.device)
        state = {name: torch.zeros_like(parameter, requires_grad=False) for name in UPDATE_RULES[rule].state_names}
        tensors.append(LocalTensor(parameter, momentum, state))
    return tensors


def _group(rule: str, num_steps: int) -> GroupStep:
    defaults = DeMo([nn.Parameter(torch.zeros(1))], LR, update=rule).param_groups[0]
    return group_step({**defaults, "num_steps": num_steps}, None, 0)


def replay(folder: Path, backend: str, device: torch.device) -> dict[str, Any]:
    """Apply the payloads, and count the steps after which all bits were the recorded ones."""
    run = json.loads((folder / "run.json").read_text())
    first = load_file(folder / "first.safetensors")
    payloads_SRB = load_file(folder / "payloads.safetensors")["payloads"].to(device)
    parameters = [nn.Parameter(first[name].to(device)) for name in run["names"]]
    plan = _plan(run, parameters)
    tensors = _tensors(plan, parameters, run["rule"])
    local = LocalStep(plan, tensors, backend)
    equal, began = 0, time.perf_counter()
    for step, payloads_RB in enumerate(payloads_SRB):
        with torch.no_grad():
            local.apply_(plan.buckets[0], [_group(run["rule"], step)], payloads_RB, Decoding(is_exact=True))
        equal += digest([tensor.parameter for tensor in tensors]) == run["digests"][step]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    seconds = time.perf_counter() - began
    return {
        "rule": run["rule"], "values": run["values"], "backend": backend, "device": name, "replicas": payloads_SRB.shape[1],
        "steps": len(payloads_SRB), "equal_steps": equal, "seconds": round(seconds, 1),
    }  # fmt: skip


def _plan(run: dict[str, Any], parameters: list[nn.Parameter]) -> ExchangePlan:
    values = run["values"]
    specs = [TensorSpec(name, tuple(p.shape), str(p.dtype), 0) for name, p in zip(run["names"], parameters, strict=True)]
    return make_plan(specs, [Coding(64, 32, values, "adaptive", 4096)], 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["record", "replay"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rule", default="sign", choices=["sign", "sgd", "adamw", "lion"])
    parser.add_argument("--values", default="sign")
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--steps", type=int, default=1000)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.what == "record":
        record(asked.folder, asked.rule, asked.values, asked.replicas, asked.steps)
        return
    places = [("torch", torch.device("cpu"))]
    if torch.cuda.is_available():
        places += [("torch", torch.device("cuda")), ("triton", torch.device("cuda"))]
    for backend, device in places:
        print(json.dumps(replay(asked.folder, backend, device)), flush=True)


if __name__ == "__main__":
    main()
