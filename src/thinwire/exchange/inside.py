"""How the ranks of one island reach each other: the contract, its do-nothing member, and the others.

Islands are joined by thin wires, which `Transport` is for; the links inside one are fast, and whole gradients go over them.
Everything moves as bytes, since no backend knows every dtype. Every wait has a deadline.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.exchange.collective import CollectiveTransport
from thinwire.exchange.transport import SoloTransport, Transport, all_gather


class Inside(Protocol):
    """One rank's end of the links inside its island."""

    @property
    def rank(self) -> int:
        """Which rank of the island this is, from 0."""
        ...

    @property
    def num_ranks(self) -> int:
        """L."""
        ...

    @property
    def ranks(self) -> Sequence[int]:
        """The numbers that the process group, or the transport, has for the ranks of the island."""
        ...

    @property
    def device(self) -> torch.device | None:
        """Where messages must lie; None: any place will do."""
        ...

    def swap(self, message_B: Tensor, sizes: Sequence[int], what: str) -> Tensor:
        """Send the first ``sizes[0]`` bytes to rank 0, the next ``sizes[1]`` to rank 1 and so on, and return what all ranks
        have sent to this one: a row each, of ``sizes[rank]`` bytes. The sizes are the same on all ranks."""
        ...

    def gather_(self, messages_LB: Tensor, what: str) -> None:
        """Send this rank's row to all, and fill in theirs."""
        ...

    def broadcast_(self, tensor: Tensor, what: str) -> None:
        """Overwrite ``tensor`` with rank 0's."""
        ...

    def most(self, words: Sequence[int], what: str) -> list[int]:
        """The largest of all ranks, word by word."""
        ...


class InsideTransport:
    """The ranks of an island as the replicas of a transport: threads of one process, or one rank alone."""

    device: torch.device | None = None

    def __init__(self, transport: Transport, ranks: Sequence[int]) -> None:
        self._transport = transport
        self.rank, self.num_ranks, self.ranks = transport.replica, transport.num_replicas, ranks

    def swap(self, message_B: Tensor, sizes: Sequence[int], what: str) -> Tensor:
        """See `Inside`. All is sent to all, and the rest dropped."""
        first = sum(sizes[: self.rank])
        return all_gather(self._transport, message_B, what)[:, first : first + sizes[self.rank]].contiguous()

    def gather_(self, messages_LB: Tensor, what: str) -> None:
        """See `Inside`."""
        self._transport.start_all_gather_(messages_LB, what).wait()

    def broadcast_(self, tensor: Tensor, what: str) -> None:
        """See `Inside`."""
        self._transport.broadcast_(tensor, what)

    def most(self, words: Sequence[int], what: str) -> list[int]:
        """See `Inside`."""
        rows = all_gather(self._transport, torch.tensor(words, device="cpu").view(torch.uint8), what)
        found: list[int] = rows.view(torch.int64).amax(dim=0).tolist()
        return found


ALONE = InsideTransport(SoloTransport(), (0,))
"""An island of one rank: there is nobody to reach."""


class InsideGroup(InsideTransport):
    """The ranks of an island as a process group of their own; ``noun`` is what errors call them."""

    def __init__(self, group: dist.ProcessGroup, timeout_seconds: float, noun: str = "ranks of the island") -> None:
        wire = CollectiveTransport(group, timeout_seconds, noun)
        super().__init__(wire, wire.ranks)
        self._wire, self._group, self.device = wire, group, wire.device

    def swap(self, message_B: Tensor, sizes: Sequence[int], what: str) -> Tensor:
        """See `Inside`."""
        received_LB = message_B.new_empty(self.num_ranks, sizes[self.rank])
        back = [sizes[self.rank]] * self.num_ranks

        def begin() -> dist.Work | None:
            work: dist.Work | None = dist.all_to_all_single(
                received_LB.view(-1), message_B, back, list(sizes), group=self._group, async_op=True
            )
            return work

        self._wire.run(begin, what, message_B.is_cuda)
        return received_LB

    def most(self, words: Sequence[int], what: str) -> list[int]:
        """See `Inside`."""
        mine = torch.tensor(words, device=self.device)
        self._wire.run(lambda: dist.all_reduce(mine, dist.ReduceOp.MAX, self._group, async_op=True), what, mine.is_cuda)
        found: list[int] = mine.tolist()
        return found
