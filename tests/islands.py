"""Islands of replicas that are threads, and what they must equal: plain DeMo on gradients that were averaged beforehand."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.training import flat
from thinwire import DeMo
from thinwire.exchange.loopback import LoopbackTransport, run_replicas

OPTIONS: dict[str, Any] = {"lr": 1e-2, "chunk": 16, "topk": 8, "dense_below": 60, "check_drift_every": 0}
# A scalar, a vector that is cut, rows that no chunk divides, a convolution, one that lies in memory column by column, a
# stack of matrices, one that is empty, a single row.
SHAPES = ((), (130,), (37, 21), (6, 3, 3), (48, 33), (5, 16, 24), (0, 4), (1, 7), (90, 16))


class Shapes(nn.Module):
    """Parameters of awkward shapes, and no forward: tests set their gradients."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
        tensors[4] = tensors[4].T.contiguous().T
        self.tensors = nn.ParameterList(nn.Parameter(tensor) for tensor in tensors)


def gradients_of(model: nn.Module, step: int, rank: int) -> list[Tensor]:
    """Small whole numbers, whose means over a few ranks are exact, that depend on step and rank alone."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randint(-8, 9, p.shape, generator=generator).to(p.dtype) for p in model.parameters()]


def set_gradients(model: nn.Module, step: int, rank: int) -> None:
    """Those of one rank."""
    for parameter, gradient in zip(model.parameters(), gradients_of(model, step, rank), strict=True):
        parameter.grad = gradient if parameter.requires_grad else None


def mean_gradients(model: nn.Module, step: int, ranks: range) -> list[Tensor]:
    """Those of an island, added up in rank order."""
    total = gradients_of(model, step, ranks[0])
    for rank in ranks[1:]:
        total = [mine + more for mine, more in zip(total, gradients_of(model, step, rank), strict=True)]
    return [tensor / len(ranks) for tensor in total]


def train_plain(num_islands: int, size: int, num_steps: int = 3, **options: Any) -> tuple[Tensor, DeMo]:
    """What a replica per island comes to, given the means of the islands."""

    def work(transport: LoopbackTransport) -> tuple[Tensor, DeMo]:
        model = models[transport.replica]
        optimizer = DeMo(model.named_parameters(), transport=transport, **{**OPTIONS, **options})
        ranks = range(transport.replica * size, (transport.replica + 1) * size)
        for step in range(num_steps):
            for parameter, mean in zip(model.parameters(), mean_gradients(model, step, ranks), strict=True):
                parameter.grad = mean
            optimizer.step()
        return flat(model), optimizer

    models = [Shapes() for _ in range(num_islands)]
    return run_replicas(work, num_islands)[0]


def run_islands(
    work: Callable[[LoopbackTransport, Shapes, DeMo], Any],
    num_islands: int,
    size: int,
    timeout_seconds: float = 20.0,
    **options: Any,
) -> Any:
    """``work(transport, model, optimizer)`` on every rank, each of which starts with parameters of its own."""

    def one(transport: LoopbackTransport) -> Any:
        model = models[transport.replica]
        chosen = {"islands": size, **OPTIONS, **options}
        return work(transport, model, DeMo(model.named_parameters(), transport=transport, **chosen))

    models = [Shapes(seed) for seed in range(num_islands * size)]
    return run_replicas(one, num_islands * size, timeout_seconds)
