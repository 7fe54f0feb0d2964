"""DeMo in the code that people install, `pytorch_optimizer.DeMo`, with nothing changed but the meter on its exchange."""

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from pytorch_optimizer import DeMo
from torch import Tensor
from torch.optim import Optimizer

from thinwire.peers.contract import Flat, Message, Wire


class _Company:
    """The package asks its process group for its size alone, once `demo_all_gather` is another's affair."""

    def __init__(self, num_replicas: int) -> None:
        self._num_replicas = num_replicas

    def size(self) -> int:
        return self._num_replicas


class _MeteredDeMo(DeMo):
    """Its two all-gathers go over ``wire``; ``timer`` holds the running one of the meter's clocks."""

    wire: Wire
    timer: ExitStack

    def demo_all_gather(self, sparse_idx: Tensor, sparse_val: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        self.timer.close()
        rows = [list(gathered) for gathered in self.wire.all_gathers((sparse_idx, sparse_val))]
        self.timer.enter_context(self.wire.traffic.applying())
        return rows[0], rows[1]


class PublishedCode:
    """The package compresses, exchanges and applies in one call, which is made in `exchange`: the gradient is passed on to
    it, and nothing is left to apply. It handles vectors and matrices only."""

    has_own_parameters = False

    def __init__(
        self, flat: Flat, params: Iterable[Any], *, lr: float, decay: float, topk: int, chunk: int, num_replicas: int
    ) -> None:
        company: Any = _Company(num_replicas)
        options: dict[str, Any] = {"compression_decay": decay, "compression_top_k": topk, "compression_chunk": chunk}
        self._optimizer = _MeteredDeMo(params, lr=lr, process_group=company, **options)
        self.optimizers: list[Optimizer] = [self._optimizer]
        self.state: dict[str, Tensor] = {}
        self._flat = flat

    def compress(self, gradient_N: Tensor) -> Message:
        """The gradient itself."""
        return (gradient_N,)

    def exchange(self, message: Message, wire: Wire) -> Message:
        """The package's step."""
        self._flat.set_gradient(message[0])
        with ExitStack() as timer, torch.no_grad():
            self._optimizer.wire, self._optimizer.timer = wire, timer
            timer.enter_context(wire.traffic.encoding())
            self._optimizer.step()
        return ()

    def apply(self, exchanged: Message) -> None:
        """All is done."""
