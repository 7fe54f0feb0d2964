"""The network as peers see it: blocking collectives of the default process group, with a deadline and a meter."""

import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.core.errors import ExchangeError
from thinwire.exchange.traffic import Traffic
from thinwire.parallel.shaped import ShapedLink, carried
from thinwire.planner.cost import Exchange, num_rounds


class GroupWire:
    """`thinwire.peers.contract.Wire` over the default process group, or over nothing where there is none. ``link``: what
    it takes is held back as over this modelled link."""

    def __init__(self, timeout_seconds: float, link: ShapedLink | None = None) -> None:
        has_group = dist.is_initialized()
        self.replica = dist.get_rank() if has_group else 0
        self.num_replicas = dist.get_world_size() if has_group else 1
        self.traffic = Traffic()
        self._timeout_seconds, self._link = timeout_seconds, link

    def all_reduce_(self, tensor: Tensor) -> None:
        """Sum in place; counted as a ring: 2 (R - 1) / R of the bytes each way."""
        if self.num_replicas > 1:
            carried = 2 * (self.num_replicas - 1) * _bytes_of(tensor) // self.num_replicas
            self._do("all-reduce", lambda: dist.all_reduce(tensor, async_op=True), carried, carried)

    def all_gather(self, message: Tensor) -> Tensor:
        """Everyone's; sent once, received R - 1 times."""
        if self.num_replicas == 1:
            return message[None].clone()
        rows = message.new_empty((self.num_replicas, *message.shape))
        # torch 2.13 renames all_gather_into_tensor to all_gather_single and warns of the old name, which 2.11 still needs.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        sent = _bytes_of(message)
        begin = lambda: gather(rows.view(-1), message.contiguous().view(-1), async_op=True)  # noqa: E731
        self._do("all-gather", begin, sent, sent * (self.num_replicas - 1))
        return rows

    def all_to_all(self, rows: Tensor) -> Tensor:
        """Row by row; a replica's row for itself does not count."""
        if self.num_replicas == 1:
            return rows.clone()
        result = torch.empty_like(rows)
        carried = _bytes_of(rows) * (self.num_replicas - 1) // self.num_replicas
        begin = lambda: dist.all_to_all_single(result, rows.contiguous(), async_op=True)  # noqa: E731
        self._do("all-to-all", begin, carried, carried)
        return result

    def _do(self, what: str, begin: Callable[[], "dist.Work | None"], sent: int, received: int) -> None:
        for count in (self.traffic.last_step, self.traffic.total):
            count.sent_bytes += sent
            count.received_bytes += received
            count.num_exchanges += 1
        began = time.monotonic()
        try:
            exchange = Exchange(sent, received, num_rounds(what, self.num_replicas))
            with self.traffic.waiting(), carried(self._link, exchange, what):
                work = begin()
                if work is not None:
                    work.wait(timedelta(seconds=self._timeout_seconds))
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            raise ExchangeError(
                f"{what}: another replica did not come or died, {time.monotonic() - began:.1f} s ({reason})"
            ) from error
        self.traffic.add_spans([(began, time.monotonic())])


def _bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
