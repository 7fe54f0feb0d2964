"""One exchange behind: the same updates, one step late, and nothing lost on the way."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.training import build, flat, train_step
from thinwire import DeMo, ExchangeError, ThinwireError
from thinwire.core.layout import bands_of, plan_layout
from thinwire.core.scratch import Scratch
from thinwire.core.transform import forward
from thinwire.delay import Delay
from thinwire.exchange.loopback import LoopbackTransport, run_replicas
from thinwire.exchange.sharding import Island

GRADIENTS = [[torch.randn(32, 48) for _ in range(2)] for _ in range(5)]
START = torch.randn(32, 48)
OPTIONS: dict[str, Any] = {"chunk": 16, "topk": 8, "dense_below": 0, "weight_decay": 0.1}


def follow(transport: LoopbackTransport, **options: Any) -> tuple[list[Tensor], DeMo, nn.Parameter]:
    """The parameters after each step, under gradients that do not depend on them."""
    parameter = nn.Parameter(START.clone())
    optimizer = DeMo([parameter], lr=0.1, transport=transport, **{**OPTIONS, **options})
    seen = []
    for gradients in GRADIENTS:
        parameter.grad = gradients[transport.replica].clone()
        optimizer.step()
        seen.append(parameter.detach().clone())
    return seen, optimizer, parameter


@pytest.mark.parametrize("update", ["sign", "adamw", "muon"])
def test_the_same_updates_one_step_late(update: str) -> None:
    def work(transport: LoopbackTransport) -> None:
        prompt, _, _ = follow(transport, update=update)
        late, optimizer, parameter = follow(transport, update=update, delay=1)
        assert torch.equal(late[0], START)
        for now, before in zip(late[1:], prompt, strict=False):
            assert torch.equal(now, before)
        assert optimizer.num_steps == 4
        optimizer.drain()
        assert torch.equal(parameter, prompt[-1])
        assert optimizer.num_steps == 5
        optimizer.drain()
        assert torch.equal(parameter, prompt[-1])
        optimizer.state_dict()

    run_replicas(work, 2)


def test_look_ahead_runs_ahead_by_the_last_update_and_comes_back() -> None:
    def work(transport: LoopbackTransport) -> None:
        prompt, _, _ = follow(transport)
        ahead, optimizer, parameter = follow(transport, delay=1, look_ahead=True)
        for place in range(2, 5):
            assert torch.allclose(ahead[place], 2 * prompt[place - 1] - prompt[place - 2], atol=1e-6)
        optimizer.drain()
        assert torch.equal(parameter, prompt[-1])

    run_replicas(work, 2)


def test_a_step_that_cannot_be_taken_returns_what_was_sent() -> None:
    """One step late the gradients are gone: what was sent goes back, and they stay in the momentum. Gradients of all
    replicas = what was applied + what is kept."""
    options = {
        **OPTIONS,
        "values": "int8",
        "update": "sgd",
        "momentum_decay": 1.0,
        "weight_decay": 0.0,
        "exact_decode": False,
    }

    def work(transport: LoopbackTransport) -> tuple[Tensor, Tensor, Tensor]:
        parameter = nn.Parameter(START.clone())
        rest = {"delay": 1, "on_nonfinite": "skip", "combine": "mean_over_replicas", "transport": transport}
        optimizer = DeMo([parameter], lr=0.1, **options, **rest)  # type: ignore[arg-type]
        seen = torch.zeros(32, 48)
        for step, gradients in enumerate(GRADIENTS):
            parameter.grad = gradients[transport.replica].clone()
            if step == 2 and transport.replica == 1:
                parameter.grad[0, 0] = torch.nan
            else:
                seen += gradients[transport.replica]
            optimizer.step()
        optimizer.drain()
        assert (optimizer.num_steps, optimizer.num_skipped_steps) == (4, 1)
        layout = optimizer.plan.layout_of(0)
        momentum = optimizer.state[parameter]["momentum"]
        return parameter.detach(), momentum, forward(bands_of(seen, layout, 0, layout.num_bands), layout, Scratch()).clone()

    results = run_replicas(work, 2)
    assert torch.equal(results[0][0], results[1][0])
    layout = plan_layout((32, 48), 16)
    applied = bands_of((START - results[0][0]) / 0.1 * 2, layout, 0, layout.num_bands)
    total = forward(applied, layout, Scratch()).reshape(layout.num_chunks, -1) + sum(kept for _, kept, _ in results)
    assert torch.allclose(total, sum(seen for _, _, seen in results).reshape_as(total), atol=1e-3)  # type: ignore[union-attr]


def test_nothing_is_lost_when_a_late_exchange_fails() -> None:
    def work(transport: LoopbackTransport) -> None:
        parameter = nn.Parameter(START.clone())
        options = {**OPTIONS, "values": "float32", "update": "sgd", "momentum_decay": 1.0}
        optimizer = DeMo([parameter], lr=0.1, transport=transport, delay=1, **options)
        parameter.grad = GRADIENTS[0][transport.replica].clone()
        optimizer.step()
        if transport.replica == 1:
            return
        kept = optimizer.state[parameter]["momentum"].clone()
        parameter.grad = GRADIENTS[1][0].clone()
        optimizer.step()  # applies the first exchange, and sends a second that nobody answers
        before = parameter.detach().clone()
        with pytest.raises(ExchangeError):
            optimizer.drain()
        layout = optimizer.plan.layout_of(0)
        gradient = forward(bands_of(GRADIENTS[1][0], layout, 0, layout.num_bands), layout, Scratch())
        assert torch.allclose(optimizer.state[parameter]["momentum"], kept + gradient.reshape_as(kept), atol=1e-5)
        assert torch.equal(parameter, before)
        assert optimizer.num_steps == 1

    run_replicas(work, 2, timeout_seconds=2)


@pytest.mark.parametrize("overlap", [False, True])
def test_an_error_of_one_replica_leaves_all_at_the_same_place(overlap: bool) -> None:
    """It fails once, while it encodes; the others learn of it at their next step, and so does it."""

    def work(transport: LoopbackTransport) -> tuple[Tensor, int, list[str]]:
        model = build()
        options: dict[str, Any] = {"chunk": 16, "topk": 8, "delay": 1, "overlap": overlap, "num_buckets": 2}
        optimizer = DeMo(model.parameters(), lr=1e-2, transport=transport, **options)
        said = []

        def fail(*_: object) -> None:
            raise MemoryError("once")

        encode_ = optimizer._local.encode_
        for step in range(7):
            if step == 3 and transport.replica == 1:
                optimizer._local.encode_ = fail  # type: ignore[method-assign]
            try:
                train_step(model, optimizer, step, transport.replica)
                said.append("")
            except (MemoryError, ThinwireError) as error:
                said.append(str(error))
            optimizer._local.encode_ = encode_  # type: ignore[method-assign]
        optimizer.drain()
        return flat(model), optimizer.num_steps, said

    first, second = run_replicas(work, 2)
    gave_up = "replica 1 gave up step 4 because of an error of its own"
    assert first[2] == ["", "", "", "", gave_up, "", ""]
    assert second[2] == ["", "", "", "once", gave_up, "", ""]
    assert first[1] == second[1] == 5
    assert torch.equal(first[0], second[0])


def test_a_layer_may_be_unfrozen_while_the_parameters_run_ahead() -> None:
    model = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(3)])
    model[0].requires_grad_(False)
    optimizer = DeMo(model.parameters(), lr=1e-3, delay=1, look_ahead=True)
    before = [layer.weight.detach().clone() for layer in model]
    for step in range(5):
        model[0].requires_grad_(step > 2)
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
    optimizer.drain()
    for layer, old in zip(model, before, strict=True):
        moved = (layer.weight - old).abs().max()
        assert 0 < moved < 5.1e-3  # five steps of lr, not another layer's weights


def test_parameters_come_back_after_a_failure() -> None:
    def work(transport: LoopbackTransport) -> None:
        _, optimizer, parameter = follow(transport, delay=1, look_ahead=True)
        if transport.replica == 1:
            return
        optimizer.step()  # applies the last exchange, and sends one that nobody answers
        with pytest.raises(ExchangeError):
            optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        loaded = torch.zeros_like(parameter)
        parameter.data.copy_(loaded)
        optimizer.drain()  # nothing is under way, and nothing comes back
        assert torch.equal(parameter, loaded)

    run_replicas(work, 2, timeout_seconds=2)


def test_a_difference_is_repaired_also_while_parameters_run_ahead() -> None:
    def work(transport: LoopbackTransport) -> tuple[Tensor, int]:
        parameter = nn.Parameter(START.clone())
        options = {**OPTIONS, "check_drift_every": 2, "on_drift": "repair", "delay": 1, "look_ahead": True}
        optimizer = DeMo([parameter], lr=0.1, transport=transport, **options)
        for step in range(12):
            if step == 3 and transport.replica == 1:
                optimizer.drain()
            elif step == 3:
                optimizer.drain()
                parameter.data[0, 0] += 1
            parameter.grad = GRADIENTS[step % 5][transport.replica].clone()
            optimizer.step()
        optimizer.drain()
        return parameter.detach(), optimizer.drift.num_differences

    (one, num_differences), (other, _) = run_replicas(work, 2)
    assert torch.equal(one, other)
    assert num_differences == 1


def test_it_learns_with_and_without_overlap() -> None:
    def work(transport: LoopbackTransport) -> list[Tensor]:
        results = []
        for overlap in (False, True):
            model = build()
            options: dict[str, Any] = {"chunk": 16, "topk": 8, "delay": 1, "overlap": overlap, "num_buckets": 3}
            optimizer = DeMo(model.parameters(), lr=1e-2, transport=transport, **options)
            losses = [train_step(model, optimizer, step, transport.replica) for step in range(40)]
            assert sum(losses[-5:]) < sum(losses[:5])
            with pytest.raises(ThinwireError, match=r"call drain\(\) first"):
                optimizer.state_dict()
            optimizer.drain()
            optimizer.state_dict()
            results.append(flat(model))
        assert torch.equal(*results)
        return results

    everyone = run_replicas(work, 2)
    assert torch.equal(everyone[0][0], everyone[1][0])


def test_bad_options() -> None:
    parameter = nn.Parameter(torch.zeros(4, 4))
    for options in ({"delay": 2}, {"delay": -1}, {"look_ahead": True}):
        with pytest.raises(ValueError, match="delay"):
            DeMo([parameter], **options)  # type: ignore[arg-type]
    island = Island(())
    Delay(1, False).check(island)
    island.is_one_rank = False
    with pytest.raises(ValueError, match="delay=1 does not go with sharded replicas"):
        Delay(1, False).check(island)
