"""What the methods to compare with would hold and send, from their own code over tensors that have shapes and no memory."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from thinwire.exchange.traffic import Traffic
from thinwire.parallel.power_sgd import factored_size
from thinwire.parallel.wire import count_all_gather, count_all_reduce, count_all_to_all
from thinwire.peers.contract import Flat
from thinwire.planner.cost import Exchange, ring_all_reduce
from thinwire.training.compressed import build_peer
from thinwire.training.config import OptimConfig

_ALL_REDUCES_OF_POWERSGD = 3


class PaperWire:
    """A wire that leads nowhere: what others would send has the right shape."""

    replica = 0

    def __init__(self, num_replicas: int) -> None:
        self.num_replicas = num_replicas
        self.traffic = Traffic()
        self.num_rounds = 0
        self.largest_bytes = 0

    def all_reduce_(self, tensor: Tensor) -> None:
        """Count it."""
        self.num_rounds += 2 * (self.num_replicas - 1)
        count_all_reduce(self.traffic, tensor, self.num_replicas)
        self._hold(tensor)

    def all_gather(self, message: Tensor) -> Tensor:
        """Count it."""
        self.num_rounds += self.num_replicas - 1
        count_all_gather(self.traffic, message, self.num_replicas)
        return self._hold(message.new_empty((self.num_replicas, *message.shape)))

    def all_gathers(self, messages: Sequence[Tensor]) -> list[Tensor]:
        """Count them."""
        return [self.all_gather(message) for message in messages]

    def all_to_all(self, rows: Tensor) -> Tensor:
        """Count it."""
        self.num_rounds += self.num_replicas - 1
        count_all_to_all(self.traffic, rows)
        return self._hold(torch.empty_like(rows))

    def _hold(self, messages: Tensor) -> Tensor:
        self.largest_bytes = max(self.largest_bytes, _bytes_of([messages]))
        return messages


@torch.no_grad()
def rehearse(config: OptimConfig, model: nn.Module, num_replicas: int) -> tuple[Exchange, dict[str, int]]:
    """An average step's exchange when all warm-up is over, and the memory of what is kept; ``model`` is on device meta."""
    flat, wire = Flat(model.parameters()), PaperWire(num_replicas)
    # Without the local steps in between, a round is one step for each fragment.
    hasty = replace(config, dense_steps=0, local_steps=config.fragments)
    peer = build_peer(hasty, model, flat, 0, num_replicas)
    period = config.local_steps if peer.has_own_parameters else 1
    for _ in range(config.fragments):
        peer.apply(peer.exchange(peer.compress(flat.zeros()), wire))
    total = wire.traffic.total
    exchange = Exchange(total.sent_bytes // period, total.received_bytes // period, wire.num_rounds / period, period=period)
    states = [tensor for optimizer in peer.optimizers for state in optimizer.state.values() for tensor in state.values()]
    return exchange, {
        "optimizer state": _bytes_of(tensor for tensor in states if isinstance(tensor, Tensor)),
        "kept by the method": _bytes_of(peer.state.values()),
        "messages": wire.largest_bytes,
    }


def power_sgd_exchange(config: OptimConfig, model: nn.Module, num_replicas: int) -> Exchange:
    """Of a step after the dense ones."""
    num_elements = sum(factored_size(p, config.rank) for p in model.parameters() if p.requires_grad)
    exchange = ring_all_reduce(4 * num_elements, num_replicas)
    return replace(exchange, num_rounds=_ALL_REDUCES_OF_POWERSGD * exchange.num_rounds)


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
