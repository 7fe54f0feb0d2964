"""An error in the middle of an update: nothing goes on from there, and nothing of it is saved."""

from typing import Any

import pytest
import torch
from torch import nn

from thinwire import DeMo, NonFiniteGradientError, ThinwireError, torch_stack
from thinwire.exchange.loopback import LoopbackTransport, run_replicas


def fail_at(turn: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding ends as it would without memory, the so-many-th time."""
    decode, turns = torch_stack._directions, iter(range(1, 100))

    def failing(*arguments: Any) -> Any:
        if next(turns) == turn:
            raise torch.OutOfMemoryError("no memory left")
        return decode(*arguments)

    monkeypatch.setattr(torch_stack, "_directions", failing)


def test_half_an_update_is_neither_trained_nor_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = [nn.Parameter(torch.randn(shape)) for shape in ((16, 16), (8, 8))]  # a stack each
    optimizer = DeMo(parameters, chunk=16, dense_below=0)
    before, saved = [parameter.detach().clone() for parameter in parameters], optimizer.state_dict()
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    with monkeypatch.context() as patched:
        fail_at(2, patched)
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.step()
    changed = [not torch.equal(parameter, old) for parameter, old in zip(parameters, before, strict=True)]
    assert sorted(changed) == [False, True]
    for use in (optimizer.step, optimizer.state_dict):
        with pytest.raises(ThinwireError, match="some parameters have taken it and others not; load a checkpoint"):
            use()
    optimizer.load_state_dict(saved)
    optimizer.step()
    assert optimizer.num_steps == 1
    optimizer.state_dict()


def test_a_later_step_does_not_mend_half_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = [nn.Parameter(torch.randn(shape)) for shape in ((16, 16), (8, 8))]
    optimizer = DeMo(parameters, chunk=16, dense_below=0, delay=1)
    saved = optimizer.state_dict()
    for step in range(2):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        with monkeypatch.context() as patched:
            fail_at(2, patched)
            if step == 0:
                optimizer.step()
            else:
                with pytest.raises(torch.OutOfMemoryError):
                    optimizer.step()
    optimizer.drain()
    for use in (optimizer.step, optimizer.state_dict):
        with pytest.raises(ThinwireError, match="has ended the last step halfway"):
            use()
    optimizer.load_state_dict(saved)
    optimizer.step()


def test_a_drain_that_fails_leaves_the_true_parameters() -> None:
    def work(transport: LoopbackTransport) -> None:
        torch.manual_seed(0)
        parameter = nn.Parameter(torch.randn(16, 16))
        optimizer = DeMo([parameter], lr=1.0, transport=transport, chunk=16, dense_below=0, delay=1, look_ahead=True)
        late = nn.Parameter(parameter.detach().clone())
        other = DeMo([late], lr=1.0, transport=transport, chunk=16, dense_below=0, delay=1)
        for step in range(4):
            gradient = torch.full_like(parameter, float("nan")) if step == 3 else torch.randn(16, 16)
            for one, its in ((parameter, optimizer), (late, other)):
                one.grad = gradient.clone()
                its.step()
        assert not torch.equal(parameter, late)  # it runs ahead
        for its in (optimizer, other):
            with pytest.raises(NonFiniteGradientError):
                its.drain()
        assert torch.equal(parameter, late)
        optimizer.state_dict()

    run_replicas(work, 1)
