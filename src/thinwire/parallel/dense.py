"""Plain data parallelism, to compare with: DistributedDataParallel, with a meter on its all-reduces."""

import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from thinwire.exchange.traffic import Traffic
from thinwire.parallel.shaped import ShapedLink
from thinwire.planner.cost import ring_all_reduce


class AveragedModel(nn.Module):
    """A model whose gradients DDP averages.

    ``traffic`` counts as a ring all-reduce does: of B bytes each of R replicas sends and receives 2 (R - 1) / R * B.
    ``link``: they are held back as over this modelled link.
    """

    def __init__(self, model: nn.Module, device: torch.device, link: ShapedLink | None = None) -> None:
        super().__init__()
        self.traffic = Traffic()
        self._num_replicas = dist.get_world_size()
        self._last_ready, self._link = 0.0, link
        ids = [device.index] if device.type == "cuda" else None
        self.ddp = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
        self.ddp.register_comm_hook(None, self._average)

    def forward(self, inputs: Tensor, **options: object) -> object:
        """The model's own."""
        return self.ddp(inputs, **options)

    def _average(self, state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        num_bytes = 2 * (self._num_replicas - 1) * buffer.numel() * buffer.element_size() // self._num_replicas
        for count in (self.traffic.last_step, self.traffic.total):
            count.sent_bytes += num_bytes
            count.received_bytes += num_bytes
            count.num_exchanges += 1
        self._last_ready = time.perf_counter()
        work = dist.all_reduce(buffer.div_(self._num_replicas), async_op=True)
        future: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
        if self._link is None:
            return future
        exchange = ring_all_reduce(buffer.numel() * buffer.element_size(), self._num_replicas)
        return self._link.hold_back(future, exchange, buffer.device)

    def count_wait(self) -> None:
        """Call right after backward: what passed since the last gradient was ready was spent waiting for the others."""
        waited = time.perf_counter() - self._last_ready
        self.traffic.last_step.wait_seconds += waited
        self.traffic.total.wait_seconds += waited
