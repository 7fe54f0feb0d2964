"""The published preset follows an independent implementation of the published algorithm."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire import DeMo
from thinwire.exchange.loopback import run_replicas

peer = pytest.importorskip("pytorch_optimizer")

SHAPES = [(64, 64), (96, 130), (65, 37), (50,), (128, 1), (7, 200)]
NUM_STEPS = 200


def gradient(step: int, replica: int, index: int) -> Tensor:
    generator = torch.Generator().manual_seed(10_000 * replica + 100 * step + index)
    return torch.randn(SHAPES[index], generator=generator)


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def drive(optimizer: Any, params: list[nn.Parameter], replica: int) -> list[Tensor]:
    for step in range(NUM_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + step / 50)
        for index, parameter in enumerate(params):
            parameter.grad = gradient(step, replica, index)
        optimizer.step()
    return [parameter.detach().clone() for parameter in params]


def assert_same_path(ours: list[Tensor], theirs: list[Tensor]) -> None:
    """To float tolerance, but for coefficients or signs that rounding decides, which must be few."""
    for mine, other in zip(ours, theirs, strict=True):
        differs = ~torch.isclose(mine, other, atol=1e-5)
        assert differs.float().mean() < 2e-3, f"{int(differs.sum())} of {differs.numel()} elements differ"


@pytest.fixture
def _single_process_group() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=Path(folder, "rendezvous").as_uri(), rank=0, world_size=1)
        yield
        dist.destroy_process_group()


@pytest.mark.usefixtures("_single_process_group")
def test_one_replica() -> None:
    theirs = parameters()
    theirs = drive(peer.DeMo(theirs, lr=1e-2, weight_decay=0.1), theirs, 0)
    ours = parameters()
    ours = drive(DeMo.published(ours, lr=1e-2, weight_decay=0.1), ours, 0)
    assert_same_path(ours, theirs)


@pytest.mark.usefixtures("_single_process_group")
def test_two_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their collectives are replaced by a meeting of two threads; nothing else of theirs is changed."""

    def work(transport: Any) -> tuple[list[Tensor], list[Tensor]]:
        def gather(output: list[Tensor], mine: Tensor, group: object = None, async_op: bool = False) -> Any:
            everyone = transport.start_all_gather(mine.contiguous().view(-1).view(torch.uint8), "peer").wait()
            for place, row in zip(output, everyone, strict=True):
                place.copy_(row.view(mine.dtype).view(mine.shape))
            return type("Done", (), {"wait": staticmethod(lambda: None)})

        module = __import__("pytorch_optimizer.optimizer.demo", fromlist=["demo"])
        optimizer_params = parameters()
        optimizer = peer.DeMo(optimizer_params, lr=1e-2)
        optimizer.demo_all_gather = lambda idx, val: _gather_both(gather, idx, val)
        monkeypatch.setattr(module, "get_world_size", lambda *_: 2)
        theirs = drive(optimizer, optimizer_params, transport.replica)
        params = parameters()
        return drive(DeMo.published(params, lr=1e-2, transport=transport), params, transport.replica), theirs

    for ours, theirs in run_replicas(work, 2):
        assert_same_path(ours, theirs)


def _gather_both(gather: Any, idx: Tensor, val: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    indices, values = [torch.zeros_like(idx) for _ in range(2)], [torch.zeros_like(val) for _ in range(2)]
    gather(indices, idx)
    gather(values, val)
    return indices, values
