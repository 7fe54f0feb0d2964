"""Nothing is lost: decayed momentum + gradient = sent + kept, for every codec, on every path."""

import pytest
import torch
from torch import nn

from thinwire import DeMo
from thinwire.core.layout import bands_of
from thinwire.core.scratch import Scratch
from thinwire.core.transform import forward
from thinwire.exchange.plan import stack_records
from thinwire.planning import group_step
from thinwire.wire.values import VALUE_CODECS

# The interpreter is slow: one dense case there is enough.
CASES = [(values, dense, "torch") for values in sorted(VALUE_CODECS) for dense in (False, True)]
CASES += [(values, False, "triton") for values in sorted(VALUE_CODECS)] + [("int8", True, "triton")]


@pytest.mark.parametrize(("values", "share_of_dense", "backend"), CASES)
def test_decayed_momentum_plus_gradient_is_sent_plus_kept(
    values: str, share_of_dense: bool, backend: str, device: torch.device
) -> None:
    parameter = nn.Parameter(torch.randn(32, 20, device=device))
    dense_below = 10**6 if share_of_dense else 0
    options = {"chunk": 16, "topk": 12, "values": values, "dense_below": dense_below}
    optimizer = DeMo([parameter], lr=1e-2, backend=backend, **options)
    (bucket,) = optimizer.plan.buckets
    (stack,) = bucket.stacks
    layout = stack.entries[0].layout
    for _ in range(5 if backend == "torch" else 2):
        parameter.grad = torch.randn(32, 20, device=device)
        before = optimizer.state[parameter]["momentum"].clone()
        groups = [group_step(group, None, 0) for group in optimizer.param_groups]
        encoding = optimizer._local.empty(bucket)
        optimizer._local.encode_(bucket, groups, encoding)
        indices, sent = stack.codec.decode(stack_records(encoding.payload_B, stack))
        unit = optimizer._local.steps[stack].units
        gradient = forward(bands_of(parameter.grad, layout, 0, layout.num_bands), layout, Scratch())
        expected = 0.999 * before + gradient.reshape_as(before)
        total = optimizer.state[parameter]["momentum"].clone()
        slots = indices.clamp(max=stack.codec.num_elements - 1)
        total.scatter_add_(1, slots, sent * unit)
        tolerance = 0.05 if (backend, device.type) == ("triton", "cuda") else 1e-5  # TF32 products
        assert torch.allclose(total, expected, atol=tolerance)
        if values == "float32" and not share_of_dense:
            assert not optimizer.state[parameter]["momentum"].gather(1, slots).any(), "float values must leave exact zeros"


@pytest.mark.parametrize("values", sorted(VALUE_CODECS))
@pytest.mark.parametrize("momentum_decay", [0.9, 0.0])
def test_an_undone_step_leaves_the_momentum_as_it_was(values: str, momentum_decay: float) -> None:
    parameters = [nn.Parameter(torch.randn(shape)) for shape in ((33, 20), (5,), (7, 3, 3, 3))]
    options = {"chunk": 16, "topk": 8, "dense_below": 10, "momentum_decay": momentum_decay, "values": values}
    optimizer = DeMo(parameters, lr=1e-2, **options)
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    (bucket,) = optimizer.plan.buckets
    before = [optimizer.state[parameter]["momentum"].clone() for parameter in parameters]
    groups = [group_step(group, None, 0) for group in optimizer.param_groups]
    encoding = optimizer._local.empty(bucket)
    optimizer._local.encode_(bucket, groups, encoding)
    optimizer._local.undo_(bucket, groups, encoding)
    for parameter, momentum in zip(parameters, before, strict=True):
        now = optimizer.state[parameter]["momentum"]
        assert torch.allclose(now, momentum if momentum_decay else torch.zeros_like(now), atol=1e-5)
