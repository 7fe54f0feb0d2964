"""The methods to compare with as real processes: their wire, and those that run through DDP's hooks."""

import re
import time
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.ranks import run_ranks
from thinwire import ExchangeError
from thinwire.exchange.collective import default_transport
from thinwire.parallel.wire import GroupWire, wire_over
from thinwire.training.config import OptimConfig
from thinwire.training.methods import Averaged, Method, build_method

NUM_RANKS, NUM_STEPS, DENSE_STEPS, RANK = 2, 24, 3, 2
SMALL = {"dense_steps": DENSE_STEPS, "rank": RANK, "weight_decay": 0.01}


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 20))


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def build(name: str, seed: int, **settings: Any) -> tuple[nn.Module, Method]:
    model = net(seed)
    transport = default_transport(None, 60.0)
    config = OptimConfig(optimizer=name, lr=1e-2, **{**SMALL, **settings})  # type: ignore[arg-type]
    return model, build_method(config, model, model, transport)


def train(method: Method, steps: range, rank: int) -> list[tuple[float, int, int]]:
    """Loss, bytes and exchanges of each step."""
    rows = []
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        tokens = torch.randint(0, 20, (2, 32), generator=generator)
        method.start_step(1.0)
        for place, part in enumerate(tokens):
            if place == 0:
                with method.accumulating():
                    nn.functional.cross_entropy(method.model(part), (part + 1) % 20).backward()
            else:
                loss = nn.functional.cross_entropy(method.model(part), (part + 1) % 20)
                loss.backward()
        method.after_backward(1.0)
        method.step()
        count = method.traffic.last_step
        assert count.sent_bytes == count.received_bytes
        assert count.wait_seconds > 0
        rows.append((loss.item(), count.sent_bytes, count.num_exchanges))
    return rows


def _averages(name: str, rank: int) -> dict[str, Any]:
    """One method: train, save in between, and go on from there once more."""
    model, method = build(name, rank)
    assert isinstance(method, Averaged)
    half = NUM_STEPS // 2
    rows = train(method, range(half), rank)
    saved, weights = deepcopy(method.state_dict()), deepcopy(model.state_dict())
    rows += train(method, range(half, NUM_STEPS), rank)
    other, resumed = build(name, 7)
    other.load_state_dict(weights)
    resumed.load_state_dict([saved], "exact")
    train(resumed, range(half, NUM_STEPS), rank)
    return {"rows": rows, "end": flat(model), "resumed": flat(other), "state_is_shared": method.state_is_shared}


def _mean_gradient(name: str, rank: int) -> tuple[Tensor, Tensor]:
    """A gradient as the method averages it, and this rank's own."""
    model, method = build(name, 3)
    tokens = torch.randint(0, 20, (64,), generator=torch.Generator().manual_seed(rank))
    nn.functional.cross_entropy(model(tokens), (tokens + 1) % 20).backward()
    own = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    model.zero_grad()
    method.start_step(1.0)
    nn.functional.cross_entropy(method.model(tokens), (tokens + 1) % 20).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()]), own


def _collectives(rank: int) -> dict[str, Any]:
    wire = wire_over(default_transport(None, 60.0))
    assert isinstance(wire, GroupWire)
    summed = torch.arange(3.0) + 10 * rank
    wire.all_reduce_(summed)
    counts = [(wire.traffic.last_step.sent_bytes, wire.traffic.last_step.received_bytes)]
    found = {"reduced": summed}
    for name, call, message in (
        ("gathered", wire.all_gather, torch.arange(6, dtype=torch.int32).view(2, 3).t() + 10 * rank),
        ("dealt", wire.all_to_all, torch.arange(8, dtype=torch.uint8).view(2, 4) + 10 * rank),
    ):
        wire.traffic.start_step()
        found[name] = call(message)
        counts.append((wire.traffic.last_step.sent_bytes, wire.traffic.last_step.received_bytes))
    assert wire.traffic.total.num_exchanges == 3
    assert wire.traffic.total.wait_seconds > 0
    return {**found, "counts": counts}


def _deadlines(rank: int) -> list[str]:
    """Rank 1 is there, and stays away from all three collectives."""
    said: list[str] = []
    if rank == 1:
        time.sleep(2.0)
        return said
    for name in ("all_reduce_", "all_gather", "all_to_all"):
        with pytest.raises(ExchangeError) as raised:
            getattr(GroupWire(timeout_seconds=0.3), name)(torch.zeros(2, 2))
        said.append(str(raised.value))
    return said


def _work(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {name: _averages(name, rank) for name in METHODS}
    found |= {f"gradient of {name}": _mean_gradient(name, rank) for name in METHODS}
    found["buckets"] = {size: train(build("adamw", 3, bucket_mb=size)[1], range(3), rank) for size in BUCKETS}
    found["collectives"] = _collectives(rank)
    found["deadlines"] = _deadlines(rank)
    return found


METHODS = ("adamw", "adamw-bf16", "adamw-fp16", "powersgd")
BUCKETS = (1e-3, 1e5)


def test_peers_among_processes() -> None:
    first, second = run_ranks(_work, NUM_RANKS, timeout_seconds=150)
    for name in METHODS:
        assert torch.equal(first[name]["end"], second[name]["end"]), f"{name}: ranks differ"
        assert torch.equal(first[name]["end"], first[name]["resumed"]), f"{name}: the resumed run ends elsewhere"
        assert first[name]["state_is_shared"] is (name != "powersgd")
        losses = [row[0] for row in first[name]["rows"]]
        assert sum(losses[-4:]) < 0.8 * sum(losses[:4]), name
        (averaged, own), (_, other) = first[f"gradient of {name}"], second[f"gradient of {name}"]
        precision = {"adamw-bf16": 1e-2, "adamw-fp16": 2e-3}.get(name, 1e-5)
        torch.testing.assert_close(averaged, (own + other) / 2, rtol=precision, atol=1e-4)
        assert torch.equal(averaged, (own + other) / 2) is (name not in ("adamw-bf16", "adamw-fp16"))
    _check_bytes(first)
    few, one = ([row[2] for row in first["buckets"][size]] for size in BUCKETS)
    assert min(few[1:]) > 1  # DDP cuts its buckets after the first step
    assert one == [1, 1, 1]
    for rank, found in enumerate((first["collectives"], second["collectives"])):
        assert found["reduced"].tolist() == [10, 12, 14]
        assert found["gathered"].tolist() == [[[0, 3], [1, 4], [2, 5]], [[10, 13], [11, 14], [12, 15]]]
        assert found["dealt"].tolist() == [[4 * rank + place + 10 * source for place in range(4)] for source in range(2)]
        assert found["counts"] == [(12, 12), (24, 24), (4, 4)]
    assert [text.split(":")[0] for text in first["deadlines"]] == ["all-reduce", "all-gather", "all-to-all"]
    assert re.search(r"another replica did not come or died, 0\.\d s \(.*time", first["deadlines"][0], re.IGNORECASE)


def _check_bytes(found: dict[str, Any]) -> None:
    """With two ranks a ring sends each byte once."""
    whole = 4 * flat(net(0)).numel()
    factored = 0
    for parameter in net(0).parameters():
        rows, columns = (*parameter.shape, 1)[:2]
        factors = (rows + columns) * min(rows, columns, RANK)
        factored += 4 * min(parameter.numel(), factors if 2 * factors < parameter.numel() else parameter.numel())
    assert 0 < factored < whole / 2
    for name, expected in (("adamw", whole), ("adamw-bf16", whole // 2), ("adamw-fp16", whole // 2)):
        assert {row[1] for row in found[name]["rows"]} == {expected}, name
    steps = [(sent, exchanges) for _, sent, exchanges in found["powersgd"]["rows"]]
    assert steps == [(whole, 1)] * DENSE_STEPS + [(factored, 3)] * (NUM_STEPS - DENSE_STEPS)
