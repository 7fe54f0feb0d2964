"""A simulation is what real replicas do."""

import dataclasses
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from thinwire.exchange.loopback import LoopbackTransport, run_replicas
from thinwire.studies.simulation import OnDevice, Simulation, VirtualReplicas
from thinwire.studies.weather import Weather
from thinwire.training import recipes
from thinwire.training.config import TrainConfig
from thinwire.training.config_file import override
from thinwire.training.errors import TrainingError
from thinwire.training.examples import Order
from thinwire.training.job import Data, load_data, seed_everything, sizes_of
from thinwire.training.methods import Decoupled, build_method, lr_share
from thinwire.training.models import build_model, loss_of

CPU = torch.device("cpu")
SMALL = {"layers": 1, "width": 64, "heads": 2, "mlp_width": 96, "sequence": 16, "batch": 8, "steps": 6, "warmup_steps": 2}
STEPS = 3


def configured(**settings: Any) -> TrainConfig:
    return override(recipes.build("quickstart", settings.get("optimizer", "demo")), {**SMALL, **settings}, "test")


@cache
def data() -> Data:
    """The same for all that is configured here."""
    found = load_data(configured())
    return dataclasses.replace(found, train=OnDevice(found.train, CPU))


def simulated(config: TrainConfig, num_replicas: int, **options: Any) -> Simulation:
    return Simulation(config, num_replicas, CPU, data=data(), **options)


def real(config: TrainConfig, num_replicas: int, later_topk: int = 0) -> tuple[dict[str, Tensor], int]:
    """The parameters after some steps of real optimizers, one in each thread, and what a replica sent in the last, before
    which ``topk`` may change."""
    examples = data()
    seed_everything(config.run.seed)
    first = build_model(config, sizes_of(examples)).state_dict()

    def train(transport: LoopbackTransport) -> tuple[dict[str, Tensor], int]:
        model = build_model(config, sizes_of(examples)).train()
        model.load_state_dict(first)
        method = build_method(config.optim, model, model, transport)
        order = Order(len(examples.train), config.schedule.batch, transport.replica, num_replicas, config.run.seed)
        for step in range(STEPS):
            if later_topk and step == STEPS - 1 and isinstance(method, Decoupled):
                for group in method.optimizer.param_groups:
                    group["topk"] = later_topk
            method.start_step(lr_share(config.schedule, step))
            loss, _ = loss_of(model, examples.train.fetch(order.indices(step * config.schedule.batch)))
            loss.backward()  # type: ignore[no-untyped-call]
            method.after_backward(config.optim.clip)
            method.step()
        method.drain()
        return model.state_dict(), method.traffic.last_step.sent_bytes

    return run_replicas(train, num_replicas)[0]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"update": "sign", "topk": 8, "values": "float32", "combine": "mean_over_replicas", "weight_decay": 0.1},
        {"update": "adamw", "lr": 1e-3},
        {"update": "sgd", "lr": 1e-1},
        {"update": "lion", "lr": 1e-3, "delay": 1},
        {"rest_update": "adamw", "rest_lr": 2e-3, "weight_decay": 0.1},
        {"topk_of": "attn=8,mlp=16", "weight_decay": 0.1},
        {"balance": 0.9},
        {"exchange": "owner"},
        {"exchange": "owner", "owner_topk": 5, "update": "sign", "values": "int8", "combine": "majority_vote"},
        {"optimizer": "published"},
    ],
    ids=str,
)
def test_a_simulation_has_the_bits_of_real_replicas(settings: dict[str, Any]) -> None:
    config = configured(**settings)
    wanted, sent_bytes = real(config, 4)
    simulation = simulated(config, 4)
    for _ in range(STEPS):
        simulation.take_step()
    simulation.score()
    for name, value in simulation.model.state_dict().items():
        assert torch.equal(value, wanted[name]), name
    assert simulation.method.sent_bytes == sent_bytes


def test_topk_may_change_on_the_way() -> None:
    wanted, sent_bytes = real(configured(update="adamw", lr=1e-3), 2, later_topk=200)
    simulation = simulated(configured(update="adamw", lr=1e-3), 2)
    assert isinstance(simulation.method, VirtualReplicas)
    for step in range(STEPS):
        if step == STEPS - 1:
            before = simulation.method.sent_bytes
            simulation.method.set_topk(200)
        simulation.take_step()
    for name, value in simulation.model.state_dict().items():
        assert torch.equal(value, wanted[name]), name
    assert before < simulation.method.sent_bytes < sent_bytes  # real ones also agree on the change


def test_averaged_optimizers_see_the_mean_gradient() -> None:
    config = configured(optimizer="adamw", clip=0.0)
    wanted, _ = real(config, 1)
    simulation = simulated(config, 4)
    for _ in range(STEPS):
        simulation.take_step()
    for name, value in simulation.model.state_dict().items():
        torch.testing.assert_close(value, wanted[name])


def test_gradients_in_one_pass_are_those_of_many() -> None:
    config = configured(clip=0.01)
    simulations = [simulated(config, 4, batched=batched) for batched in (False, True)]
    for simulation in simulations:
        simulation.gradients.start_(simulation._train.fetch(np.arange(8)))
    for replica in range(4):
        found = []
        for simulation in simulations:
            simulation.gradients.take_(replica)
            found.append([parameter.grad for parameter in simulation.model.parameters()])
        for looped, batched in zip(*found, strict=True):
            torch.testing.assert_close(looped, batched, rtol=1e-3, atol=1e-6)


def test_what_is_lost_stays_with_its_sender_and_nobody_else_sees_it() -> None:
    """With one replica's payloads always lost, the others train as if it were not there."""
    weather = _Always(lost=[2])
    simulation = simulated(configured(update="sgd", values="float32"), 4)
    vars(simulation.method)["_weather"] = weather
    without = simulated(configured(update="sgd", values="float32"), 4)
    vars(without.method)["_weather"] = _Always(absent=[2])
    for _ in range(STEPS):
        simulation.take_step()
        without.take_step()
    for mine, theirs in zip(simulation.model.parameters(), without.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    kept = [tensor.momentum_CE for tensor in simulation.method.replicas[2].tensors]  # type: ignore[union-attr]
    sent = [tensor.momentum_CE for tensor in simulation.method.replicas[1].tensors]  # type: ignore[union-attr]
    assert sum(float(momentum.square().sum()) for momentum in kept) > 1.2 * sum(float(m.square().sum()) for m in sent)
    absent = [tensor.momentum_CE for tensor in without.method.replicas[2].tensors]  # type: ignore[union-attr]
    assert not any(momentum.any() for momentum in absent)


class _Always(Weather):
    def __init__(self, absent: list[int] | None = None, lost: list[int] | None = None) -> None:
        vars(self).update(_away=absent or [], _lost=lost or [])

    def draw(self, step: int, num_replicas: int) -> Any:
        present = [replica for replica in range(num_replicas) if replica not in vars(self)["_away"]]
        return present, vars(self)["_lost"]


def test_the_weather_is_as_foretold() -> None:
    weather = Weather(absent=0.3, lost=0.2, seed=5)
    drawn = [weather.draw(step, 8) for step in range(2000)]
    assert drawn == [weather.draw(step, 8) for step in range(2000)]
    present = sum(len(one.present) for one in drawn) / 16000
    assert 0.7 < present < 0.78  # the one that is spared is always there
    assert 0.1 < sum(len(one.lost) for one in drawn) / 16000 < 0.15
    assert all(set(one.lost) < set(one.present) for one in drawn)
    assert Weather().draw(3, 4) == ([0, 1, 2, 3], [])
    with pytest.raises(ValueError, match="absent"):
        Weather(absent=1.5)


@pytest.mark.parametrize(("rest_lr", "expected"), [(2e-3, 2e-3), (0.0, 4e-3)])
def test_what_is_no_hidden_matrix_may_have_a_rule_of_its_own(rest_lr: float, expected: float) -> None:
    """At a rate of its own, or a tenth of the others'."""
    simulation = simulated(configured(rest_update="adamw", rest_lr=rest_lr, weight_decay=0.1), 2)
    groups = simulation.method.optimizer.param_groups  # type: ignore[union-attr]
    found = {name: (group["update"], group["weight_decay"]) for group in groups for name in group["param_names"]}
    assert found["model.embed_tokens.weight"] == ("adamw", 0.1)
    assert found["model.norm.weight"] == ("adamw", 0.0)
    assert found["model.layers.0.self_attn.q_proj.weight"] == ("muon", 0.1)
    simulation.take_step()
    rates = {group["update"]: group["lr"] for group in groups}
    assert rates == {"muon": pytest.approx(4e-2 / 2), "adamw": pytest.approx(expected / 2)}


def test_parameters_with_a_word_in_their_name_may_have_another_topk() -> None:
    simulation = simulated(configured(topk_of="attn.q=8, attn=16, norm=24", rest_update="sign", weight_decay=0.1), 2)
    groups = simulation.method.optimizer.param_groups  # type: ignore[union-attr]
    found = {
        name: (group["topk"], group["update"], group["weight_decay"]) for group in groups for name in group["param_names"]
    }
    assert found["model.layers.0.self_attn.q_proj.weight"] == (8, "muon", 0.1)  # the first word that fits counts
    assert found["model.layers.0.self_attn.k_proj.weight"] == (16, "muon", 0.1)
    assert found["model.layers.0.input_layernorm.weight"] == (24, "sign", 0.0)
    assert found["model.layers.0.mlp.up_proj.weight"] == (configured().optim.topk, "muon", 0.1)
    assert len(found) == len(list(simulation.model.parameters()))
    with pytest.raises(ValueError, match=r"no parameter has 'atn' in its name; names are like model\.\w+"):
        simulated(configured(topk_of="atn=8"), 2)


def test_watchers_may_change_what_is_kept() -> None:
    simulation = simulated(configured(), 2)
    seen: list[int] = []

    def drop(replica: int, local: Any) -> None:
        seen.append(replica)
        local.clear_residual_()

    simulation.method.watchers.append(drop)  # type: ignore[union-attr]
    simulation.take_step()
    assert seen == [0, 1]
    assert not any(t.momentum_CE.any() for one in simulation.method.replicas for t in one.tensors)  # type: ignore[union-attr]


def test_replicas_may_have_parts_of_the_data_of_their_own() -> None:
    simulation = simulated(configured(), 4, apart=True)
    part = len(simulation._train) // 4
    seen = []
    for _ in range(5):
        seen.append(simulation._indices().reshape(4, 2))
        simulation.step += 1
    for replica in range(4):
        mine = np.concatenate([step[replica] for step in seen])
        assert np.all(mine // part == replica)
        assert len(set(mine.tolist())) == 10
    simulation.take_step()


@pytest.mark.parametrize("optimizer", ["topk", "powersgd", "adamw-bf16"])
def test_peers_are_refused_in_words(optimizer: str) -> None:
    with pytest.raises(TrainingError, match=f"{optimizer} is not simulated: use thinwire train"):
        simulated(configured(optimizer=optimizer), 2)


def test_a_batch_that_replicas_cannot_share_is_refused() -> None:
    config = dataclasses.replace(configured(), schedule=dataclasses.replace(configured().schedule, batch=7))
    with pytest.raises((TrainingError, ValueError), match="batch"):
        simulated(config, 4)


@pytest.mark.gpu
@pytest.mark.parametrize(("batched", "compile_"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("exchange", ["all_gather", "owner"])
def test_a_simulation_on_a_gpu_comes_to_what_one_on_a_cpu_does(batched: bool, compile_: bool, exchange: str) -> None:
    """Graphs and kernels included; only rounding may differ, which selects other coefficients here and there."""
    config = configured(update="sgd", values="float32", lr=1e-2, clip=0.5, exchange=exchange, topk=64, weight_decay=0.1)
    before = simulated(config, 4)
    compiled = override(config, {"compile": compile_}, "test")
    moved = [simulated(config, 4), Simulation(compiled, 4, torch.device("cuda"), batched=batched)]
    for simulation in moved:
        for _ in range(STEPS):
            simulation.take_step()
        assert simulation.step == STEPS
    assert "triton" in moved[1].method.replicas[0].backends  # type: ignore[union-attr]
    pairs = zip(before.model.parameters(), *(one.model.parameters() for one in moved), strict=True)
    updates = [((cpu - first).detach(), (cuda.cpu() - first).detach()) for first, cpu, cuda in pairs]
    difference = sum(float((mine - theirs).square().sum()) for mine, theirs in updates)
    assert difference < 1e-2 * sum(float(mine.square().sum()) for mine, _ in updates)
