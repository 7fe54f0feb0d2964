"""How bytes get from each replica to all others: the contract, and its do-nothing member.

A transport moves equally long uint8 tensors and knows nothing of what is in them. Every wait has a deadline, and a wait
that fails raises `ExchangeError` naming the replicas that did not come.
"""

from typing import Protocol

from torch import Tensor


class Pending(Protocol):
    """An exchange under way."""

    def wait(self) -> Tensor:
        """Everyone's bytes (R, B), in replica order."""
        ...


class Transport(Protocol):
    """One replica's end of the wire."""

    @property
    def replica(self) -> int:
        """Which replica this is, from 0."""
        ...

    @property
    def num_replicas(self) -> int:
        """R."""
        ...

    def start_all_gather(self, message_B: Tensor, what: str) -> Pending:
        """Begin to send ``message_B`` to all and to receive theirs; ``what`` names the exchange in errors."""
        ...

    def broadcast_(self, tensor: Tensor, what: str) -> None:
        """Overwrite ``tensor`` with replica 0's."""
        ...


class Ready:
    """An exchange that needed no wire."""

    def __init__(self, messages_RB: Tensor) -> None:
        self._messages_RB = messages_RB

    def wait(self) -> Tensor:
        """The bytes."""
        return self._messages_RB


class SoloTransport:
    """One replica, alone: what it sends is what it receives."""

    replica = 0
    num_replicas = 1

    def start_all_gather(self, message_B: Tensor, what: str) -> Pending:
        """Hand the message back."""
        return Ready(message_B.unsqueeze(0))

    def broadcast_(self, tensor: Tensor, what: str) -> None:
        """Nothing to do."""
