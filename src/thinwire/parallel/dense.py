"""Plain data parallelism, to compare with: DistributedDataParallel, with a meter on its all-reduces, whole or compressed."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from thinwire.exchange.traffic import Traffic
from thinwire.parallel.power_sgd import PowerSGD
from thinwire.parallel.shaped import ShapedLink
from thinwire.planner.cost import ring_all_reduce

Reduced = torch.futures.Future[Tensor]
# What carries a bucket to the others: how many bytes it all-reduces in how many all-reduces, and the bucket's mean to come.
Hook = Callable[[GradBucket], tuple[int, int, Reduced]]


class AveragedModel(nn.Module):
    """A model whose gradients DDP averages, in float32 unless ``hook`` says otherwise.

    ``traffic`` counts as a ring all-reduce does: of B bytes each of R replicas sends and receives 2 (R - 1) / R * B.
    ``link``: they are held back as over this modelled link. ``bucket_mb``: gradients in one all-reduce, torch's own unless
    given.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        hook: Hook | None = None,
        link: ShapedLink | None = None,
        bucket_mb: float | None = None,
    ) -> None:
        super().__init__()
        self.traffic = Traffic()
        self._num_replicas = dist.get_world_size()
        self._last_ready = 0.0
        self._hook, self._link = hook or average, link
        options: dict[str, Any] = {"device_ids": [device.index] if device.type == "cuda" else None}
        options["bucket_cap_mb"] = hook.bucket_cap_mb(model) if isinstance(hook, PowerSGD) else bucket_mb
        self.ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, **options)
        self.ddp.register_comm_hook(None, self._reduce)

    def forward(self, inputs: Tensor, **options: object) -> object:
        """The model's own."""
        return self.ddp(inputs, **options)

    def _reduce(self, state: object, bucket: GradBucket) -> Reduced:
        self._last_ready = time.perf_counter()
        num_bytes, num_exchanges, future = self._hook(bucket)
        exchange = ring_all_reduce(num_bytes, self._num_replicas)
        exchange = dataclasses.replace(exchange, num_rounds=num_exchanges * exchange.num_rounds)
        for count in (self.traffic.last_step, self.traffic.total):
            count.sent_bytes += exchange.sent_bytes
            count.received_bytes += exchange.received_bytes
            count.num_exchanges += num_exchanges
        return future if self._link is None else self._link.hold_back(future, exchange, bucket.buffer().device)

    def count_wait(self) -> None:
        """Call right after backward: what passed since the last gradient was ready was spent waiting for the others."""
        waited = time.perf_counter() - self._last_ready
        self.traffic.last_step.wait_seconds += waited
        self.traffic.total.wait_seconds += waited


def average(bucket: GradBucket) -> tuple[int, int, Reduced]:
    """In the gradients' own precision."""
    buffer = bucket.buffer()
    work = dist.all_reduce(buffer.div_(dist.get_world_size()), async_op=True)
    return buffer.numel() * buffer.element_size(), 1, work.get_future().then(lambda done: done.value()[0])


def average_in_bfloat16(bucket: GradBucket) -> tuple[int, int, Reduced]:
    """In bfloat16. torch's own hook for it refuses to run without NCCL; any backend that adds bfloat16 will do."""
    buffer = bucket.buffer()
    rounded = buffer.to(torch.bfloat16).div_(dist.get_world_size())
    work = dist.all_reduce(rounded, async_op=True)
    return rounded.numel() * rounded.element_size(), 1, work.get_future().then(lambda done: buffer.copy_(done.value()[0]))


def average_in_float16(bucket: GradBucket) -> tuple[int, int, Reduced]:
    """In float16, by torch's own hook."""
    everyone: Any = dist.group.WORLD
    return bucket.buffer().numel() * 2, 1, fp16_compress_hook(everyone, bucket)


HOOKS: dict[str, Hook] = {"adamw-bf16": average_in_bfloat16, "adamw-fp16": average_in_float16}
"""How gradients travel, by the name of the optimizer; all others average in float32."""
