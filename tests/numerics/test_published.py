"""The published preset follows an independent implementation of the published algorithm.

In float64 the paths are one, element by element, for all steps. In float32 rounding decides now and then which of two
nearly equal coefficients is sent first, after which that one chunk goes its own way; all others must agree.
"""

import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire import DeMo
from thinwire.exchange.loopback import run_replicas
from thinwire.exchange.transport import all_gather

peer = pytest.importorskip("pytorch_optimizer")

SHAPES = [(64, 64), (96, 130), (65, 37), (50,), (128, 1), (7, 200)]
NUM_STEPS = 200


def gradient(step: int, replica: int, index: int) -> Tensor:
    generator = torch.Generator().manual_seed(10_000 * replica + 100 * step + index)
    return torch.randn(SHAPES[index], generator=generator, dtype=torch.float32)


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)) for shape in SHAPES]


def drive(optimizer: Any, params: list[nn.Parameter], replica: int) -> list[Tensor]:
    for step in range(NUM_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + step / 50)
        for index, parameter in enumerate(params):
            parameter.grad = gradient(step, replica, index).to(parameter.dtype)
        optimizer.step()
    return [parameter.detach().clone() for parameter in params]


def assert_same_path(ours: list[Tensor], theirs: list[Tensor]) -> None:
    exact = ours[0].dtype == torch.float64
    for mine, other in zip(ours, theirs, strict=True):
        differs = ~torch.isclose(mine, other, atol=1e-7 if exact else 1e-5)
        allowed = 0.0 if exact else 0.1
        assert differs.double().mean() <= allowed, f"{int(differs.sum())} of {differs.numel()} elements differ"


def in_full(optimizer: DeMo) -> DeMo:
    """Keep the momentum of float64 parameters in float64."""
    for group in optimizer.param_groups:
        if group["params"][0].dtype == torch.float64:
            group["momentum_dtype"] = "float64"
            for parameter in group["params"]:
                optimizer.state[parameter]["momentum"] = optimizer.state[parameter]["momentum"].double()
    return optimizer


def theirs_in(dtype: torch.dtype, params: list[nn.Parameter], **options: Any) -> Any:
    """Their optimizer; it makes its cosine basis in the default dtype, which must not be coarser than the parameters."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return peer.DeMo(params, lr=1e-2, **options)
    finally:
        torch.set_default_dtype(before)


@pytest.fixture
def _single_process_group() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=Path(folder, "rendezvous").as_uri(), rank=0, world_size=1)
        yield
        dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.usefixtures("_single_process_group")
def test_one_replica(dtype: torch.dtype) -> None:
    theirs = parameters(dtype)
    theirs = drive(theirs_in(dtype, theirs, weight_decay=0.1), theirs, 0)
    ours = parameters(dtype)
    ours = drive(in_full(DeMo.published(ours, lr=1e-2, weight_decay=0.1)), ours, 0)
    assert_same_path(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.usefixtures("_single_process_group")
def test_two_replicas(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Their collectives are replaced by a meeting of two threads; nothing else of theirs is changed."""
    lock = threading.Lock()

    def work(transport: Any) -> tuple[list[Tensor], list[Tensor]]:
        def gather(output: list[Tensor], mine: Tensor, group: object = None, async_op: bool = False) -> Any:
            everyone = all_gather(transport, mine.contiguous().view(-1).view(torch.uint8), "peer")
            for place, row in zip(output, everyone, strict=True):
                place.copy_(row.view(mine.dtype).view(mine.shape))
            return type("Done", (), {"wait": staticmethod(lambda: None)})

        module = __import__("pytorch_optimizer.optimizer.demo", fromlist=["demo"])
        optimizer_params = parameters(dtype)
        with lock:
            optimizer = theirs_in(dtype, optimizer_params)
        optimizer.demo_all_gather = lambda idx, val: _gather_both(gather, idx, val)
        monkeypatch.setattr(module, "get_world_size", lambda *_: 2)
        theirs = drive(optimizer, optimizer_params, transport.replica)
        params = parameters(dtype)
        optimizer = in_full(DeMo.published(params, lr=1e-2, transport=transport))
        return drive(optimizer, params, transport.replica), theirs

    for ours, theirs in run_replicas(work, 2):
        assert_same_path(ours, theirs)


def _gather_both(gather: Any, idx: Tensor, val: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    indices, values = [torch.zeros_like(idx) for _ in range(2)], [torch.zeros_like(val) for _ in range(2)]
    gather(indices, idx)
    gather(values, val)
    return indices, values
