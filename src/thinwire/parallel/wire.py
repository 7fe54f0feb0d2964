"""The network as peers see it: blocking collectives with a deadline and a meter, over a process group or any transport.

Both count alike. A ring all-reduce of B bytes sends and receives 2 (R - 1) / R * B; an all-gather sends B and receives
(R - 1) * B; an all-to-all of R rows, one of which stays here, sends and receives (R - 1) / R of them.
"""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.core.errors import ExchangeError, first_line
from thinwire.exchange.collective import CollectiveTransport
from thinwire.exchange.traffic import Traffic
from thinwire.exchange.transport import SoloTransport, Transport, all_gather
from thinwire.parallel.shaped import ShapedLink, carried, link_of
from thinwire.planner.cost import Exchange, num_rounds


class GroupWire:
    """`thinwire.peers.contract.Wire` over the default process group, or over nothing where there is none. ``link``: what
    it takes is held back as over this modelled link."""

    def __init__(self, timeout_seconds: float | None = None, link: ShapedLink | None = None) -> None:
        """``timeout_seconds``: the longest wait; None is the group's own."""
        has_group = dist.is_initialized()
        self.replica = dist.get_rank() if has_group else 0
        self.num_replicas = dist.get_world_size() if has_group else 1
        self.traffic = Traffic()
        self._deadline = () if timeout_seconds is None else (timedelta(seconds=timeout_seconds),)
        self._link = link
        # gloo has not all of its collectives for tensors on a GPU.
        self._is_on_host = has_group and dist.get_backend() == "gloo"

    def all_reduce_(self, tensor: Tensor) -> None:
        """Sum in place."""
        if self.num_replicas > 1:
            summed = self._reachable(tensor)
            count = count_all_reduce(self.traffic, tensor, self.num_replicas)
            self._do("all-reduce", [lambda: dist.all_reduce(summed, async_op=True)], count)
            if summed is not tensor:
                tensor.copy_(summed)

    def all_gather(self, message: Tensor) -> Tensor:
        """Everyone's."""
        return self.all_gathers([message])[0]

    def all_gathers(self, messages: Sequence[Tensor]) -> list[Tensor]:
        """Everyone's, of several at once."""
        if self.num_replicas == 1:
            return [message[None].clone() for message in messages]
        # torch 2.13 renames all_gather_into_tensor to all_gather_single and warns of the old name, which 2.11 still needs.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        mine = [self._reachable(message.contiguous()) for message in messages]
        rows = [message.new_empty((self.num_replicas, *message.shape)) for message in mine]
        pairs = list(zip(rows, mine, strict=True))
        counts = [count_all_gather(self.traffic, message, self.num_replicas) for message in messages]
        begun = [partial(gather, all_rows.view(-1), own.view(-1), async_op=True) for all_rows, own in pairs]
        self._do("all-gather", begun, (sum(sent for sent, _ in counts), sum(received for _, received in counts)))
        return [all_rows.to(message.device) for all_rows, message in zip(rows, messages, strict=True)]

    def all_to_all(self, rows: Tensor) -> Tensor:
        """Row by row."""
        if self.num_replicas == 1:
            return rows.clone()
        mine = self._reachable(rows.contiguous())
        result = torch.empty_like(mine)
        count = count_all_to_all(self.traffic, rows)
        self._do("all-to-all", [lambda: dist.all_to_all_single(result, mine, async_op=True)], count)
        return result.to(rows.device)

    def _reachable(self, tensor: Tensor) -> Tensor:
        return tensor.cpu() if self._is_on_host else tensor

    def _do(self, what: str, begin: Sequence[Callable[[], "dist.Work | None"]], count: tuple[int, int]) -> None:
        began = time.monotonic()
        exchange = Exchange(*count, num_rounds(what, self.num_replicas))
        try:
            with self.traffic.waiting(), carried(self._link, exchange, what):
                for work in [start() for start in begin]:
                    if work is not None:
                        work.wait(*self._deadline)
        except RuntimeError as error:
            seconds = time.monotonic() - began
            raise ExchangeError(
                f"{what}: another replica did not come or died, {seconds:.1f} s ({first_line(error)})"
            ) from error
        self.traffic.add_spans([(began, time.monotonic())])


class TransportWire:
    """The same over any transport, such as threads of one process: everything is gathered, and what is not meant for this
    replica is dropped and not counted. Sums are made in the order of the replicas."""

    def __init__(self, transport: Transport) -> None:
        self.replica, self.num_replicas = transport.replica, transport.num_replicas
        self.traffic = Traffic()
        self._transport = transport

    def all_reduce_(self, tensor: Tensor) -> None:
        """Sum in place."""
        count_all_reduce(self.traffic, tensor, self.num_replicas)
        first, *others = self._gather(tensor, "all-reduce")
        tensor.copy_(first)
        for other in others:
            tensor += other

    def all_gather(self, message: Tensor) -> Tensor:
        """Everyone's."""
        count_all_gather(self.traffic, message, self.num_replicas)
        return self._gather(message, "all-gather")

    def all_gathers(self, messages: Sequence[Tensor]) -> list[Tensor]:
        """Everyone's, one after the other."""
        return [self.all_gather(message) for message in messages]

    def all_to_all(self, rows: Tensor) -> Tensor:
        """Row by row."""
        count_all_to_all(self.traffic, rows)
        return self._gather(rows, "all-to-all")[:, self.replica].clone()

    def _gather(self, tensor: Tensor, what: str) -> Tensor:
        with self.traffic.waiting():
            rows_RB = all_gather(self._transport, tensor.contiguous().view(-1).view(torch.uint8), what)
        return rows_RB.view(tensor.dtype).view(self.num_replicas, *tensor.shape)


def wire_over(transport: Transport) -> GroupWire | TransportWire:
    """The wire to where a transport leads; a process group has collectives of its own."""
    link = link_of(transport)
    has_group = isinstance(transport, (CollectiveTransport, SoloTransport)) or (link is not None and dist.is_initialized())
    return GroupWire(link=link) if has_group else TransportWire(transport)


def count_all_reduce(traffic: Traffic, tensor: Tensor, num_replicas: int) -> tuple[int, int]:
    """As a ring does it; what was counted as sent and received."""
    carried = 2 * (num_replicas - 1) * _bytes_of(tensor) // num_replicas
    return _count(traffic, carried, carried)


def count_all_gather(traffic: Traffic, message: Tensor, num_replicas: int) -> tuple[int, int]:
    """Sent once, received R - 1 times."""
    return _count(traffic, _bytes_of(message), _bytes_of(message) * (num_replicas - 1))


def count_all_to_all(traffic: Traffic, rows: Tensor) -> tuple[int, int]:
    """All rows but this replica's own."""
    carried = _bytes_of(rows) * (len(rows) - 1) // len(rows)
    return _count(traffic, carried, carried)


def _count(traffic: Traffic, sent: int, received: int) -> tuple[int, int]:
    """Alone, nothing crosses a wire."""
    for count in (traffic.last_step, traffic.total) if received else ():
        count.sent_bytes += sent
        count.received_bytes += received
        count.num_exchanges += 1
    return sent, received


def _bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
