"""The dry run's figures are those of the real thing."""

import io
import re
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from thinwire.exchange.transport import SoloTransport
from thinwire.parallel.mesh import MeshShape
from thinwire.planner.cost import DEVICES
from thinwire.training.dry_run import describe, matmul_rate, memory_bytes, workload_of
from thinwire.training.methods import Decoupled, build_method
from thinwire.training.models import Sizes, build_model, num_parameters
from thinwire.training.recipes import OPTIMIZERS, build
from thinwire.training.shapes import build_on_meta, specs_of


@pytest.mark.parametrize(("update", "balance"), [("sign", 0.0), ("adamw", 0.0), ("muon", 0.95)])
def test_memory_is_that_of_the_real_optimizer(update: str, balance: float) -> None:
    config = build("quickstart")
    config = replace(config, optim=replace(config.optim, update=update, balance=balance))
    model = build_model(config, Sizes(vocab_size=256))
    optimizer = Decoupled(config.optim, model, model, SoloTransport()).optimizer
    held = sum(tensor.nbytes for state in optimizer.state.values() for tensor in state.values())
    needs = memory_bytes(config.optim, build_on_meta(config), MeshShape(4))
    assert needs["parameters"] == sum(parameter.nbytes for parameter in model.parameters())
    assert ("balance" in needs) == (balance > 0)
    assert needs["momentum"] + needs.get("state of the update rule", 0) + needs.get("balance", 0) == held
    assert needs["payloads"] == 4 * optimizer.plan.payload_bytes
    sharded = memory_bytes(config.optim, build_on_meta(config), MeshShape(4, 2))
    assert sharded == {name: needed // 2 for name, needed in needs.items()}
    in_islands = memory_bytes(config.optim, build_on_meta(config), MeshShape(4, 2), has_islands=True)
    whole = ("parameters", "gradients")
    assert in_islands == {name: needed if name in whole else needed // 2 for name, needed in needs.items()}


@pytest.mark.parametrize(("optimizer", "copies"), [("adamw", 2), ("sgd", 1)])
def test_memory_of_the_others(optimizer: str, copies: int) -> None:
    config = build("quickstart", optimizer)
    needs = memory_bytes(config.optim, build_on_meta(config), MeshShape(2))
    assert needs["optimizer state"] == copies * needs["parameters"]


@pytest.mark.parametrize(
    "optimizer", ["galore", "muon", "topk", "dgc", "signsgd", "onebit-adam", "diloco", "published-code"]
)
def test_memory_of_the_peers_is_that_of_the_real_ones(optimizer: str) -> None:
    config = build("quickstart", optimizer)
    config = replace(config, optim=replace(config.optim, local_steps=2), model=replace(config.model, layers=1, width=32))
    model = build_model(config, Sizes(vocab_size=256))
    method = build_method(config.optim, model, model, SoloTransport())
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        method.step()
    state = method.state_dict()
    own = state.get("peer", {})
    optimizers = state["optimizers"].values() if "optimizers" in state else state.values()
    held = [tensor for one in optimizers for entries in one["state"].values() for tensor in entries.values()]
    needs = memory_bytes(config.optim, build_on_meta(config), MeshShape(1))
    assert needs.get("kept by the method", 0) == sum(tensor.nbytes for tensor in own.values())
    in_optimizer = sum(tensor.nbytes for tensor in held if isinstance(tensor, torch.Tensor) and tensor.dim())
    assert needs.get("optimizer state", 0) == pytest.approx(in_optimizer, abs=4 * len(held))


@pytest.mark.parametrize(
    ("name", "optimizer"), [*(("quickstart", optimizer) for optimizer in OPTIMIZERS), ("vit", "demo"), ("vit", "adamw")]
)
def test_it_says_what_a_run_would_need(name: str, optimizer: str) -> None:
    out = io.StringIO()
    describe(build(name, optimizer), 2, Console(file=out, width=120))
    text = out.getvalue()
    assert re.search(r"[\d,]+ parameters in \d+ tensors", text)
    assert "bytes per step and rank" in text
    assert text.count("bit/s") == 4
    assert re.search(r"together\s*│\s*[\d.]+ [kM]B", text)


def test_the_muon_rule_takes_its_time_where_it_is_used() -> None:
    config = build("quickstart")
    model, seconds = build_on_meta(config), {}
    for name, settings in {
        "sign": {"update": "sign"},
        "muon": {"update": "muon"},
        "hidden": {"update": "muon", "rest_update": "sign", "rest_lr": 1e-3},
    }.items():
        optim = replace(config.optim, **settings)  # type: ignore[arg-type]
        seconds[name] = workload_of(optim, model, MeshShape(2), 0.1, torch.device("cpu")).optimizer_seconds
    assert seconds["sign"] < seconds["hidden"] < seconds["muon"]
    whole = DEVICES["cpu"].rule_seconds("muon", [spec.shape for spec in specs_of(model)], 64)
    assert seconds["muon"] == pytest.approx(seconds["sign"] + whole, rel=0.01)
    dense = {
        name: workload_of(build("quickstart", name).optim, model, MeshShape(2), 0.1, torch.device("cpu")).optimizer_seconds
        for name in ("adamw", "muon")
    }
    assert dense["muon"] - dense["adamw"] == pytest.approx(seconds["hidden"] - seconds["sign"], rel=0.01)


def test_owners_hold_and_receive_what_they_would() -> None:
    config = build("quickstart")
    config = replace(config, optim=replace(config.optim, exchange="owner"))
    plain = memory_bytes(build("quickstart").optim, build_on_meta(config), MeshShape(32))
    needs = memory_bytes(config.optim, build_on_meta(config), MeshShape(32))
    assert needs["residual of what is owned"] == needs["momentum"] // 32
    assert needs["payloads"] < plain["payloads"]
    assert {name for name in needs if needs[name] != plain.get(name)} == {"payloads", "residual of what is owned"}
    texts = {}
    for exchange in ("all_gather", "owner", "auto"):
        out = io.StringIO()
        asked = replace(config, optim=replace(config.optim, exchange=exchange))
        describe(asked, 32, Console(file=out, width=120))
        (texts[exchange],) = re.findall(r"([\d.]+ kB) received, exchange (\w+)", out.getvalue())
    assert texts["auto"] == texts["owner"]
    assert texts["owner"][1] == "owner"
    assert float(texts["owner"][0].split()[0]) < 0.5 * float(texts["all_gather"][0].split()[0])


def test_a_link_of_ones_own_has_a_row() -> None:
    out, config = io.StringIO(), build("quickstart")
    describe(replace(config, launch=replace(config.launch, link="3mbit,80ms")), 2, Console(file=out, width=120))
    assert re.search(r"--link 3mbit,80ms │ +[\d.]+ m?s", out.getvalue())


def test_shards_have_their_own_vocabulary() -> None:
    config = build("quickstart")
    config = replace(config, data=replace(config.data, dataset="somewhere.bin"))
    assert num_parameters(build_on_meta(config)) == 885_888 + (50304 - 256) * 128


def test_the_rate_of_a_matrix_product_is_a_rate() -> None:
    assert 1e8 < matmul_rate(torch.device("cpu"), "float32") < 1e15
