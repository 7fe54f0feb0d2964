"""Every optimizer trains with the same loop; schedules and groups are what they say."""

import math
import sys
from collections import OrderedDict
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from thinwire.core.errors import NonFiniteGradientError
from thinwire.exchange.loopback import run_replicas
from thinwire.exchange.transport import SoloTransport, Transport
from thinwire.planner.link_spec import parse_link
from thinwire.training import exchanges
from thinwire.training.config import OptimConfig, ScheduleConfig
from thinwire.training.errors import TrainingError
from thinwire.training.exchanges import settle_exchange
from thinwire.training.methods import Averaged, Decoupled, Method, build_method, lr_share
from thinwire.training.readers import READERS
from thinwire.training.recipes import OPTIMIZERS


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 20))


def train(method: Method, num_steps: int, seed: int = 0) -> list[float]:
    losses = []
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_steps):
        tokens = torch.randint(0, 20, (64,), generator=generator)
        method.start_step(1.0)
        loss = nn.functional.cross_entropy(method.model(tokens), (tokens + 1) % 20)
        loss.backward()
        method.after_backward(1.0)
        method.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_learns_and_resumes(optimizer: str) -> None:
    lr = {"sgd": 1.0, "dgc": 1.0, "ef-signsgd": 1.0, "demo": 3e-3, "published": 3e-3}.get(optimizer, 1e-2)
    small = {"chunk": 16, "topk": 8, "density": 0.25, "local_steps": 4, "dense_steps": 20, "rank": 8}
    config = OptimConfig(optimizer=optimizer, lr=lr, weight_decay=0.01, **small)  # type: ignore[arg-type]
    model = net()
    method = build_method(config, model, model, SoloTransport())
    losses = train(method, 60)
    assert losses[-1] < 0.7 * losses[0]
    assert all(parameter.grad is None for parameter in model.parameters())
    copy = net(1)
    copy.load_state_dict(model.state_dict())
    other = build_method(config, copy, copy, SoloTransport())
    other.load_state_dict([deepcopy(method.state_dict())], "exact")
    assert train(method, 5, seed=9) == train(other, 5, seed=9)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_an_optimizer_reads_is_known(optimizer: str) -> None:
    """A setting that it reads would be refused if the table did not say so, and one it does not read be taken in silence."""
    read = set()

    class Watched(OptimConfig):
        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    config, model = Watched(optimizer=optimizer), net()  # type: ignore[arg-type]
    if optimizer == "demo":
        config = Watched(rest_update="adamw")
    read.clear()
    build_method(config, model, model, SoloTransport())
    read &= READERS.keys()
    known = {name for name, readers in READERS.items() if optimizer in readers}
    # Of the published `check` refuses these; PowerSGD's hook is there with several replicas alone.
    known -= {"update", "values", "combine"} if optimizer == "published" else set()
    known -= {"rank", "dense_steps"} if optimizer == "powersgd" else set()
    assert read == known


def test_robust_combination_is_passed_on() -> None:
    for changes in ({"clip_to_median": True}, {"combine": "majority_vote"}, {}):
        model = net()
        method = build_method(OptimConfig(**changes), model, model, SoloTransport())  # type: ignore[arg-type]
        assert isinstance(method, Decoupled)
        decoding = method.optimizer._decoding
        assert decoding.clips is changes.get("clip_to_median", False)
        assert decoding.combine == changes.get("combine", "mean_over_replicas")


def test_gradients_that_are_no_numbers_are_left_out_if_asked() -> None:
    for on_nonfinite in ("raise", "skip"):
        model = net()
        method = build_method(OptimConfig(on_nonfinite=on_nonfinite), model, model, SoloTransport())  # type: ignore[arg-type]
        assert isinstance(method, Decoupled)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, math.nan)
        with nullcontext() if on_nonfinite == "skip" else pytest.raises(NonFiniteGradientError):
            method.step()
        assert method.optimizer.num_skipped_steps == (on_nonfinite == "skip")
        assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_the_exchange_is_passed_on() -> None:
    def work(transport: Transport) -> list[tuple[str, int | None]]:
        found = []
        for changes in ({}, {"exchange": "owner"}, {"exchange": "owner", "owner_topk": 5}, {"exchange": "auto"}):
            model = net()
            method = build_method(OptimConfig(chunk=16, topk=8, **changes), model, model, transport)  # type: ignore[arg-type]
            assert isinstance(method, Decoupled)
            answers = method.optimizer.plan.answers
            found.append((method.optimizer.exchange, None if answers is None else answers.codings[0].topk))
        return found

    few = [("all_gather", None), ("owner", 64), ("owner", 5), ("all_gather", None)]
    assert run_replicas(work, 2) == [few] * 2
    assert run_replicas(work, 20)[0] == [*few[:3], ("owner", 64)], "DeMo's own rule: from 20 replicas on"


def test_a_known_link_decides_what_auto_is() -> None:
    def chosen(link: str, num_replicas: int = 16, width: int = 1024, **changes: Any) -> str:
        config = OptimConfig(**{"exchange": "auto", "clip": 0.0, **changes})
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
        return settle_exchange(config, model, num_replicas, parse_link(link).link)

    assert chosen("1mbit") == "owner"
    assert chosen("1mbit", num_replicas=12) == "owner", "where DeMo's own rule would take an all-gather"
    assert chosen("1mbit", num_replicas=4, owner_topk=64) == "owner", "shorter answers"
    assert chosen("10gbit,200ms", num_replicas=24, width=256) == "all_gather", "where DeMo's own rule would take owners"
    assert chosen("1mbit", num_replicas=2) == "all_gather"
    assert chosen("1mbit", exchange="all_gather") == "all_gather"
    for left_to_demo in ({"overlap": True}, {"delay": 1}, {"num_replicas": 1}):
        assert chosen("1mbit", **left_to_demo) == "auto"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [{}, {"topk_of": "0.weight=3,out=100"}, {"rest_update": "adamw"}, {"rest_update": "sign", "topk_of": "bias=2"}],
)
def test_what_auto_weighs_is_what_will_be_sent(changes: dict[str, Any]) -> None:
    config = OptimConfig(update="muon", topk=7, chunk=16, **changes)
    with torch.device("meta"):
        model = nn.Sequential(OrderedDict({"0": nn.Linear(90, 70), "1": nn.Linear(70, 70), "out": nn.Linear(70, 90)}))
        model[0].bias.requires_grad_(False)
        built = Decoupled(config, model, model, SoloTransport()).optimizer.plan
    assert exchanges._plan(config, model).payload_bytes == built.payload_bytes


def test_overlap_changes_nothing_but_the_time() -> None:
    def losses(overlap: bool) -> list[list[float]]:
        config = OptimConfig(chunk=16, topk=8, overlap=overlap, clip=0.0)

        def work(transport: Transport) -> list[float]:
            model = models[transport.replica]
            method = build_method(config, model, model, transport)
            found = []
            generator = torch.Generator().manual_seed(transport.replica)
            for _ in range(5):
                method.start_step(1.0)
                for place in range(2):
                    tokens = torch.randint(0, 20, (64,), generator=generator)
                    with method.accumulating() if place == 0 else nullcontext():
                        loss = nn.functional.cross_entropy(method.model(tokens), (tokens + 1) % 20)
                        loss.backward()
                method.after_backward(0.0)
                method.step()
                found.append(loss.item())
            return found

        models = [net() for _ in range(2)]  # here, since replicas that are threads share the random generator
        return run_replicas(work, 2)

    assert losses(True) == losses(False)


def _groups(method: Method) -> list[dict[str, Any]]:
    if isinstance(method, Decoupled):
        return method.optimizer.param_groups
    return (method._optimizers if isinstance(method, Averaged) else method.peer.optimizers)[0].param_groups  # type: ignore[attr-defined]


def test_only_matrices_decay() -> None:
    model = net()
    for name in OPTIMIZERS:
        if name == "muon":
            continue  # it has two optimizers, with a test of their own
        config = OptimConfig(optimizer=name, weight_decay=0.1)  # type: ignore[arg-type]
        groups = _groups(build_method(config, model, model, SoloTransport()))
        decays = {id(parameter): group["weight_decay"] for group in groups for parameter in group["params"]}
        assert decays == {id(p): 0.1 if p.dim() >= 2 else 0.0 for p in model.parameters()}


def test_muon_takes_the_hidden_matrices_only() -> None:
    model = net()
    method = build_method(OptimConfig(optimizer="muon"), model, model, SoloTransport())
    assert isinstance(method, Averaged)
    muon, adamw = method._optimizers
    assert [p is model[1].weight for group in muon.param_groups for p in group["params"]] == [True]
    assert sum(len(group["params"]) for group in adamw.param_groups) == 6


class Experts(nn.Module):
    """A stack of matrices, as mixtures of experts have them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.inside, self.last = nn.Embedding(20, 16), nn.Linear(16, 16), nn.Linear(16, 20)
        self.experts = nn.Parameter(torch.randn(3, 16, 16) / 4)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.einsum("bi,eij->bj", self.inside(self.tokens(tokens)), self.experts)
        return self.last(hidden)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "config",
    [OptimConfig(optimizer=one) for one in ("muon", "galore")]
    + [  # type: ignore[arg-type]
        OptimConfig(update="muon", rest_update="adamw", chunk=16)
    ],
    ids=["muon", "galore", "demo"],
)
def test_experts_in_a_stack_are_trained(config: OptimConfig) -> None:
    if config.optimizer == "galore":
        pytest.importorskip("galore_torch")
    model = Experts()
    method, before = build_method(config, model, model, SoloTransport()), model.experts.detach().clone()
    train(method, 2)
    assert not torch.equal(before, model.experts)


def test_muon_without_matrices_is_refused() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(16, 2))
    with pytest.raises(TrainingError, match="no hidden matrices"):
        build_method(OptimConfig(optimizer="muon"), model, model, SoloTransport())


def test_galore_moves_hidden_matrices_within_a_few_dimensions() -> None:
    model = net()
    before = model[1].weight.detach().clone()
    method = build_method(OptimConfig(optimizer="galore", lr=1e-2, rank=3), model, model, SoloTransport())
    losses = train(method, 60)
    assert losses[-1] < losses[0]
    assert torch.linalg.matrix_rank(model[1].weight.detach() - before, rtol=1e-4) == 3
    assert torch.linalg.matrix_rank(model[0].weight.detach() - net()[0].weight, rtol=1e-4) > 3


@pytest.mark.parametrize(
    ("optimizer", "module", "package"),
    [("galore", "galore_torch", "galore-torch"), ("published-code", "thinwire.peers.published_code", "pytorch-optimizer")],
)
def test_a_missing_package_is_named(optimizer: str, module: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    model = net()
    with pytest.raises(TrainingError, match=f"optimizer={optimizer} needs the package.*pip install {package}"):
        build_method(OptimConfig(optimizer=optimizer), model, model, SoloTransport())  # type: ignore[arg-type]


def test_the_published_code_refuses_convolutions() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(16, 2))
    with pytest.raises(TrainingError, match=r"vectors and matrices only, and 0\.weight has the shape \(4, 1, 3, 3\)"):
        build_method(OptimConfig(optimizer="published-code"), model, model, SoloTransport())


@pytest.mark.parametrize("optimizer", ["demo", "adamw", "topk"])
def test_a_resumed_run_has_the_settings_it_was_started_with(optimizer: str) -> None:
    model = net()
    before = build_method(OptimConfig(optimizer=optimizer, weight_decay=0.1), model, model, SoloTransport())  # type: ignore[arg-type]
    train(before, 3)
    changed = OptimConfig(optimizer=optimizer, weight_decay=0.5, momentum_decay=0.5, beta2=0.5)  # type: ignore[arg-type]
    after = build_method(changed, model, model, SoloTransport())
    after.load_state_dict([deepcopy(before.state_dict())], "exact")
    groups = _groups(after)
    assert groups[0]["weight_decay"] == 0.5
    assert groups[0]["betas"][1] == 0.5
    if isinstance(after, Decoupled):
        assert groups[0]["momentum_decay"] == 0.5
        assert after.optimizer.num_steps == 3


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_the_schedule_rises_falls_and_ends_where_it_should(schedule: str) -> None:
    config = ScheduleConfig(steps=100, warmup_steps=10, schedule=schedule, final_lr_share=0.1)  # type: ignore[arg-type]
    shares = [lr_share(config, step) for step in range(100)]
    assert shares[0] == 0.1
    assert shares[9] == shares[10] == 1.0
    assert shares[:10] == sorted(shares[:10])
    assert shares[10:] == sorted(shares[10:], reverse=True)
    assert shares[-1] == pytest.approx(1.0 if schedule == "constant" else 0.1)
    if schedule == "cosine":
        assert lr_share(config, 99) < lr_share(config, 55) == pytest.approx(0.1 + 0.9 * 0.5, abs=0.01)


def test_without_warmup_and_with_a_short_run() -> None:
    assert lr_share(ScheduleConfig(steps=1, warmup_steps=0), 0) == 1.0
    assert lr_share(ScheduleConfig(steps=2, warmup_steps=10), 1) == 0.2


def test_replicas_with_demo_stay_equal() -> None:
    def work(transport: Transport) -> list[torch.Tensor]:
        model = net(0)
        method = build_method(OptimConfig(lr=3e-3, chunk=16, topk=8), model, model, transport)
        train(method, 10, seed=transport.replica)
        assert method.traffic.last_step.sent_bytes > 0
        assert method.traffic.total.wait_seconds >= method.traffic.last_step.wait_seconds > 0
        return [parameter.detach().clone() for parameter in model.parameters()]

    first, second = run_replicas(work, 2)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
