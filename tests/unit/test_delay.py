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
from thinwire.exchange.loopback import LoopbackTransport, run_replicas

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
