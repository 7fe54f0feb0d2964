"""Clipping to the median norm, in payloads: what it changes, what it leaves alone, and that no order shows."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.numerics.test_backends import Shapes, encoded, group_step, local_step, momenta_for, parameters_for, plan_for
from thinwire import DeMo, slabs
from thinwire.core.combine import Decoding
from thinwire.exchange.plan import ExchangePlan, stack_records
from thinwire.local_step import LocalStep
from thinwire.slabs import LocalTensor
from thinwire.wire.values import VALUE_CODECS

SHAPES: Shapes = [(40, 50), (30,), (48, 32), (5,)]
CPU = torch.device("cpu")
SIZED = [name for name in sorted(VALUE_CODECS) if name != "sign"]


def everyones(plan: ExchangePlan, scales: list[float]) -> Tensor:
    """Fresh payloads, one per replica, of momenta that are so many times as large as usual."""
    parameters = parameters_for(SHAPES, CPU)
    payloads = []
    for scale in scales:
        momenta = [momentum * scale for momentum in momenta_for(plan, CPU)]
        payloads.append(encoded(plan, "torch", parameters, momenta, group_step())[0])
    return torch.stack(payloads)


def applied(plan: ExchangePlan, payloads_RB: Tensor, decoding: Decoding, device: torch.device = CPU) -> Tensor:
    """The change of all parameters by plain gradient descent from 0, in one vector."""
    zeros = [torch.zeros(shape, device=device) for shape in SHAPES]
    step = local_step(plan, "torch", zeros, momenta_for(plan, device), "sgd")
    with torch.no_grad():
        step.apply_(plan.buckets[0], [group_step("sgd", weight_decay=0.0)], payloads_RB.to(device), decoding)
    return torch.cat([tensor.parameter.detach().flatten().cpu() for tensor in step.tensors])


def norms_of(plan: ExchangePlan, payloads_RB: Tensor) -> list[list[float]]:
    """Of what each replica sent, per stack."""
    found = []
    for stack in plan.buckets[0].stacks:
        values = [stack.codec.decode(records_CB)[1] for records_CB in stack_records(payloads_RB, stack)]
        found.append([float(mine.double().norm()) for mine in values])
    return found


@pytest.mark.parametrize("values", SIZED)
def test_a_replica_a_million_times_too_large_counts_as_one_of_median_norm(values: str) -> None:
    plan = plan_for(SHAPES, values=values, dense_below=8)
    payloads_RB = everyones(plan, [1.0, 1.1, 1e6, 0.9, 1.0])
    decoding = Decoding("mean_over_replicas", is_exact=False, clips=True)
    largest = sum(sorted(norms)[2] ** 2 for norms in norms_of(plan, payloads_RB)) ** 0.5
    change = applied(plan, payloads_RB, decoding)
    assert 0 < float(change.norm()) <= 0.1 * largest * 1.001  # lr 0.1: a mean of vectors none of which is longer
    unclipped = applied(plan, payloads_RB, decoding._replace(clips=False))
    assert float(unclipped.norm()) > 1e4 * largest
    # Its own part is a fifth of a median norm; what clipping takes from the others' four fifths is at most a quarter here.
    others = applied(plan, payloads_RB[[0, 1, 3, 4]], decoding._replace(clips=False))
    assert float((change - 0.8 * others).norm()) <= 0.1 * largest * (0.2 + 0.8 * 0.25)


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("values", SIZED)
def test_how_much_too_large_it_is_does_not_matter_to_the_bit(values: str, is_exact: bool) -> None:
    plan = plan_for(SHAPES, values=values, dense_below=8)
    torch.manual_seed(seed := int(torch.randint(2**31, ())))
    once = everyones(plan, [1.0, 2.0**10, 1.0])
    torch.manual_seed(seed)
    again = everyones(plan, [1.0, 2.0**60, 1.0])
    assert not torch.equal(once, again)
    for combine in ("mean_over_senders", "mean_over_replicas"):
        decoding = Decoding(combine, is_exact, clips=True)
        assert torch.equal(applied(plan, once, decoding), applied(plan, again, decoding))


@pytest.mark.parametrize("values", SIZED)
def test_no_cut_and_no_order_of_chunks_changes_a_bit(
    values: str, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    plan = plan_for(SHAPES, values=values, dense_below=8)
    payloads_RB = everyones(plan, [3.0, 1.0, 0.5, 4.0])
    decoding = Decoding(clips=True)
    expected = applied(plan, payloads_RB, decoding)
    assert not torch.equal(expected, applied(plan, payloads_RB, decoding._replace(clips=False)))
    assert torch.equal(applied(plan, payloads_RB, decoding, device), expected)
    for size in (256, 600, 1500):
        monkeypatch.setattr(slabs, "_limits", lambda *_, size=size: slabs.Limits(size, size, size))
        assert torch.equal(applied(plan, payloads_RB, decoding), expected)


@pytest.mark.parametrize("values", sorted(VALUE_CODECS))
@pytest.mark.parametrize("num_replicas", [1, 2, 3, 5])
def test_replicas_of_one_norm_are_left_alone_to_the_bit(values: str, num_replicas: int) -> None:
    """The same sizes with other signs, so that norms are equal and nothing may change."""
    plan = plan_for(SHAPES, values=values, dense_below=8)
    parameters, momenta = parameters_for(SHAPES, CPU), momenta_for(plan, CPU)
    payloads = []
    for replica in range(num_replicas):
        signed = [momentum * (-1) ** replica for momentum in momenta]
        payloads.append(encoded(plan, "torch", parameters, signed, group_step())[0])
    payloads.append(payloads[0])
    for is_exact in (True, False):
        plain = applied(plan, torch.stack(payloads), Decoding(is_exact=is_exact))
        assert torch.equal(applied(plan, torch.stack(payloads), Decoding(is_exact=is_exact, clips=True)), plain)


def test_votes_of_one_size_are_never_clipped() -> None:
    """A replica with void slots has a lower norm, and that is no reason to weaken the votes of the others."""
    plan = plan_for(SHAPES, values="sign")
    payloads_RB = everyones(plan, [1.0, 1.0, 1.0])
    parameters, momenta = parameters_for(SHAPES, CPU), momenta_for(plan, CPU)
    few = [torch.where(momentum.abs() > 2, momentum, 0.0) for momentum in momenta]
    payloads_RB[0] = payloads_RB[1] = encoded(plan, "torch", parameters, few, group_step())[0]
    expected = applied(plan, payloads_RB, Decoding())
    assert torch.equal(applied(plan, payloads_RB, Decoding(clips=True)), expected)


def test_where_most_send_nothing_nothing_counts() -> None:
    plan = plan_for(SHAPES, values="float32")
    payloads_RB = everyones(plan, [1.0, 0.0, 0.0])
    assert applied(plan, payloads_RB, Decoding()).any()
    assert not applied(plan, payloads_RB, Decoding(clips=True)).any()


def test_the_kernels_leave_clipping_to_torch(
    device: torch.device, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="triton has no build for this platform")
    options: dict[str, Any] = {"values": "int8", "clip_to_median": True}
    parameter = nn.Parameter(torch.zeros(64, 64, device=device))
    reason = r"the kernels do not clip int8 values to the median \(clip_to_median\)"
    with pytest.raises(ValueError, match=rf"backend='triton' cannot train parameter 0 of group 0: {reason}"):
        DeMo([parameter], backend="triton", **options)
    assert DeMo([parameter], backend="triton", values="sign", clip_to_median=True)._local.backends == {"triton"}
    if device.type == "cuda":
        with caplog.at_level(logging.WARNING, "thinwire"):
            assert DeMo([parameter], **options)._local.backends == {"torch"}
        assert "do not clip int8 values" in caplog.text
    plan = plan_for([(64, 64)], values="int8")
    step = LocalStep(plan, [LocalTensor(parameter, momenta_for(plan, device)[0])], "triton")
    with pytest.raises(ValueError, match="do not clip"):
        step.apply_(plan.buckets[0], [group_step()], step.empty(plan.buckets[0]).payloads_RB, Decoding(clips=True))
