"""A member that means harm, among five: what it can do to plain means, and not to robust ones."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from thinwire import AgreementError, DeMo, ThinwireError
from thinwire.exchange.loopback import LoopbackTransport, run_replicas

NUM_REPLICAS, NUM_STEPS, HOSTILE = 5, 80, 4


def regression(hostile_factor: float, lr: float, **options: Any) -> tuple[float, float]:
    """The first and the last loss of a linear regression, in which replica 4 multiplies its gradients with a factor.

    The loss is infinite if they end with an error, as values that grow without limit do.
    """
    truth, start = torch.randn(24, 20), torch.zeros(24, 20)
    inputs = torch.randn(NUM_REPLICAS, NUM_STEPS, 64, 24)
    models = [nn.Parameter(start.clone()) for _ in range(NUM_REPLICAS)]

    def work(transport: LoopbackTransport) -> Tensor:
        parameter = models[transport.replica]
        settings = {"chunk": 8, "topk": 16, "dense_below": 0, "values": "float32", "update": "sgd", "momentum_decay": 0.9}
        optimizer = DeMo([parameter], lr=lr, transport=transport, **{**settings, **options})
        for step in range(NUM_STEPS):
            batch = inputs[transport.replica, step]
            optimizer.zero_grad()
            (batch @ (parameter - truth)).square().mean().backward()
            if transport.replica == HOSTILE:
                parameter.grad.mul_(hostile_factor)  # type: ignore[union-attr]
            optimizer.param_groups[0]["lr"] = lr * (1 - step / NUM_STEPS)
            optimizer.step()
        return parameter.detach()

    first = float((start - truth).square().mean())
    try:
        ends = run_replicas(work, NUM_REPLICAS)
    except ThinwireError:
        return first, math.inf
    assert all(torch.equal(end, ends[0]) for end in ends), "replicas differ"
    return first, float((ends[0] - truth).square().mean())


ROBUST = [(2.0, {"clip_to_median": True}), (0.1, {"combine": "majority_vote"})]


@pytest.mark.parametrize("combine", ["mean_over_senders", "mean_over_replicas"])
def test_a_mean_is_at_the_mercy_of_one(combine: str) -> None:
    first, last = regression(1.0, 2.0, combine=combine)
    assert last < 0.05 * first
    first, last = regression(-1e6, 2.0, combine=combine)
    assert not last < 100 * first


@pytest.mark.parametrize(("lr", "options"), ROBUST)
@pytest.mark.parametrize("hostile_factor", [1.0, -1e6, 1e6])
def test_robust_combination_converges_all_the_same(hostile_factor: float, lr: float, options: dict[str, Any]) -> None:
    first, last = regression(hostile_factor, lr, **options)
    assert last < 0.01 * first


def test_replicas_must_agree_on_it() -> None:
    parameters = [nn.Parameter(torch.zeros(8, 8)) for _ in range(2)]

    def work(transport: LoopbackTransport) -> None:
        DeMo([parameters[transport.replica]], transport=transport, clip_to_median=transport.replica == 1)

    with pytest.raises(AgreementError, match=r"clips: False.*clips: True"):
        run_replicas(work, 2)
