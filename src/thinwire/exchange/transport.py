"""How bytes get from each replica to all others: the contract, and its do-nothing member.

A transport moves equally long uint8 tensors and knows nothing of what is in them. Every wait has a deadline, and a wait
that fails raises `ExchangeError` naming the replicas that did not come.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, cast

from torch import Tensor

from thinwire.core.errors import ExchangeError
from thinwire.exchange.traffic import Count, Traffic


class Pending(Protocol):
    """An exchange under way."""

    def begin(self) -> None:
        """Let nothing hold it back any longer; it may have waited for the bytes to come from a GPU."""
        ...

    def wait(self) -> None:
        """Return when everyone's bytes are there, or, on a GPU, when all that is launched from now on will find them."""
        ...

    def span(self) -> tuple[float, float] | None:
        """When it began and ended by `time.monotonic`; None if that is not known. To be asked after `wait`."""
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

    def start_all_gather_(self, messages_RB: Tensor, what: str) -> Pending:
        """Begin to send this replica's row of ``messages_RB`` to all, and to fill in theirs; ``what`` names the exchange
        in errors. The rows must be left alone until the wait is over; this replica's is never changed."""
        ...

    def start_all_to_all_(self, sent_RB: Tensor, received_RB: Tensor, what: str) -> Pending:
        """Begin to send each row of ``sent_RB`` to the replica of its number, and to fill in ``received_RB`` with what each
        has for this one, its own included. Both must be left alone until the wait is over."""
        ...

    def broadcast_(self, tensor: Tensor, what: str, source: int = 0) -> None:
        """Overwrite ``tensor`` with that of one replica."""
        ...


class Elastic(Transport, Protocol):
    """A transport whose replicas may come and go, but only when all of them meet."""

    @property
    def meeting(self) -> int:
        """Which meeting the present company comes from; later ones have larger numbers, and 0 means none yet."""
        ...

    @property
    def members(self) -> Sequence[str]:
        """The names of all replicas, in replica order."""
        ...

    @property
    def is_meeting_due(self) -> bool:
        """Whether it is time to let others in."""
        ...

    def meet(self, is_broken: bool, is_running: bool) -> bool:
        """Find out who is there and connect to them; whether it is a new company, or newly connected. ``is_broken``: the old
        connections cannot be used. ``is_running``: this replica has trained, and need not wait for all to come."""
        ...

    def copy_(self, tensor: Tensor, what: str, source: int, targets: Sequence[int]) -> None:
        """Overwrite ``tensor`` on ``targets`` with that of ``source``; the others need not take part. After a meeting no two
        copies have the same name."""
        ...

    def leave(self) -> None:
        """Hang up, and be no longer counted."""
        ...


def elastic(transport: Transport) -> Elastic | None:
    """The transport, if its replicas may come and go."""
    return cast(Elastic, transport) if hasattr(transport, "meet") else None


def bytes_on_wire(transport: Transport, message_bytes: int) -> int:
    """What one message takes there: a transport may add to it, and says how much as ``overhead_bytes``."""
    return message_bytes + int(getattr(transport, "overhead_bytes", 0))


def all_gather(transport: Transport, message_B: Tensor, what: str) -> Tensor:
    """Everyone's messages (R, B), in replica order. Raises if the transport refused one, as it may say in ``refused`` of the
    exchange: of a payload zeros are left, which its reader refuses, but zeros may mean something in other messages."""
    messages_RB = message_B.new_empty(transport.num_replicas, message_B.numel())
    messages_RB[transport.replica] = message_B
    exchange = transport.start_all_gather_(messages_RB, what)
    exchange.wait()
    refused = getattr(exchange, "refused", ())
    if refused:
        raise ExchangeError(f"{what}: what came from replicas {list(refused)} was not signed by them for this exchange")
    return messages_RB


def metered(transport: Transport, meter: Traffic | Count) -> Callable[[Tensor, str], Tensor]:
    """`all_gather` whose bytes and waits are counted."""

    def gather(message_B: Tensor, what: str) -> Tensor:
        meter.add(bytes_on_wire(transport, message_B.numel()), transport.num_replicas)
        with meter.waiting():
            return all_gather(transport, message_B, what)

    return gather


class Done:
    """An exchange that needs no wait."""

    def begin(self) -> None:
        """Nothing holds it back."""

    def wait(self) -> None:
        """Nothing to wait for."""

    def span(self) -> None:
        """Nothing took time."""


class SoloTransport:
    """One replica, alone: what it sends is what it receives."""

    replica = 0
    num_replicas = 1

    def start_all_gather_(self, messages_RB: Tensor, what: str) -> Pending:
        """Nothing to do."""
        return Done()

    def start_all_to_all_(self, sent_RB: Tensor, received_RB: Tensor, what: str) -> Pending:
        """What it has for itself."""
        received_RB.copy_(sent_RB)
        return Done()

    def broadcast_(self, tensor: Tensor, what: str, source: int = 0) -> None:
        """Nothing to do."""
