"""R replicas as threads of one process: the same optimizer and the same bits as over a network, without one.

For tests, studies and notebooks::

    def train(transport):
        model = build()
        opt = DeMo(model.parameters(), lr=1e-3, transport=transport)
        ...
        return model

    models = run_replicas(train, num_replicas=4)
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from thinwire.core.errors import ExchangeError
from thinwire.exchange.transport import Pending

Result = TypeVar("Result")


class _Message:
    """Bytes on their way between threads; on a GPU also between their streams."""

    def __init__(self, content: Tensor) -> None:
        self._content = content.clone()
        self.num_bytes = content.numel()
        self._is_written = torch.cuda.current_stream(content.device).record_event() if content.is_cuda else None

    def copy_to_(self, place: Tensor, row: int | None) -> None:
        """All of it, or one of its rows."""
        if self._is_written is not None:
            stream = torch.cuda.current_stream(self._content.device)
            stream.wait_event(self._is_written)
            self._content.record_stream(stream)
        place.copy_(self._content if row is None else self._content[row])


class _Meeting:
    """One exchange: who has brought a message, and how many have taken them all."""

    def __init__(self) -> None:
        self.messages: dict[int, _Message] = {}
        self.num_taken = 0
        self.last_came = 0.0


class LoopbackHub:
    """Where the replicas of one process meet. Exchanges are matched by their number, as in a process group."""

    def __init__(self, num_replicas: int, timeout_seconds: float = 60.0) -> None:
        self.num_replicas = num_replicas
        self._timeout_seconds = timeout_seconds
        self._meetings: dict[int, _Meeting] = {}
        self._changed = threading.Condition()
        self._gone: set[int] = set()
        self._parts: dict[tuple[tuple[int, ...], int], LoopbackHub] = {}

    def transport(self, replica: int) -> "LoopbackTransport":
        """The end of the wire that belongs to ``replica``."""
        return LoopbackTransport(self, replica)

    def part(self, replicas: tuple[int, ...], number: int) -> "LoopbackHub":
        """Where these replicas meet by themselves; the ``number`` tells hubs of the same replicas apart."""
        with self._changed:
            part = self._parts.setdefault((replicas, number), LoopbackHub(len(replicas), self._timeout_seconds))
            for replica in self._gone & set(replicas):
                part.leave(replicas.index(replica))
            return part

    def leave(self, replica: int) -> None:
        """Tell the others that this replica will send nothing more, so that they need not wait for their deadline."""
        with self._changed:
            self._gone.add(replica)
            self._changed.notify_all()
            for (replicas, _), part in self._parts.items():
                if replica in replicas:
                    part.leave(replicas.index(replica))

    def post(self, number: int, replica: int, message: _Message) -> None:
        """Bring a message to exchange ``number``."""
        with self._changed:
            meeting = self._meetings.setdefault(number, _Meeting())
            meeting.messages[replica], meeting.last_came = message, time.monotonic()
            self._changed.notify_all()

    def collect(self, number: int, what: str) -> tuple[list[_Message], float]:
        """Wait until all have come, and return their messages in replica order, and when the last one came."""
        with self._changed:
            meeting = self._meetings[number]
            self._changed.wait_for(lambda: self._is_settled(meeting), self._timeout_seconds)
            missing = [replica for replica in range(self.num_replicas) if replica not in meeting.messages]
            if missing:
                why = "left" if self._gone & set(missing) else f"did not come within {self._timeout_seconds:g} s"
                raise ExchangeError(f"{what}: replicas {missing} {why}")
            messages = [meeting.messages[replica] for replica in range(self.num_replicas)]
            meeting.num_taken += 1
            if meeting.num_taken == self.num_replicas:
                del self._meetings[number]
        lengths = [message.num_bytes for message in messages]
        if len(set(lengths)) > 1:
            raise ExchangeError(f"{what}: replicas sent {lengths} bytes, not equally many")
        return messages, meeting.last_came

    def _is_settled(self, meeting: _Meeting) -> bool:
        return all(replica in meeting.messages or replica in self._gone for replica in range(self.num_replicas))


class _Posted:
    """An exchange under way; ``skipped`` has nothing to take from itself, ``row`` of each message is for this replica."""

    def __init__(
        self, hub: LoopbackHub, number: int, what: str, messages_RB: Tensor, skipped: int | None, row: int | None
    ) -> None:
        self._hub, self._number, self._what = hub, number, what
        self._messages_RB, self._skipped, self._row = messages_RB, skipped, row
        self._began = self._ended = time.monotonic()

    def begin(self) -> None:
        pass

    def span(self) -> tuple[float, float]:
        return self._began, max(self._began, self._ended)

    def wait(self) -> None:
        messages, self._ended = self._hub.collect(self._number, self._what)
        for replica, message in enumerate(messages):
            if replica != self._skipped:
                message.copy_to_(self._messages_RB[replica], self._row)


class LoopbackTransport:
    """One replica's end of a `LoopbackHub`."""

    def __init__(self, hub: LoopbackHub, replica: int) -> None:
        self._hub = hub
        self.replica = replica
        self.num_replicas = hub.num_replicas
        self._num_exchanges = self._num_parts = 0

    def among(self, replicas: Sequence[int]) -> "LoopbackTransport":
        """The wire between some of the replicas, of which this is one; all of these must ask for it, in the same order."""
        self._num_parts += 1
        hub = self._hub.part(tuple(replicas), self._num_parts)
        return hub.transport(tuple(replicas).index(self.replica))

    def start_all_gather_(self, messages_RB: Tensor, what: str) -> Pending:
        """Leave a copy for the others."""
        number = self._post(messages_RB[self.replica])
        return _Posted(self._hub, number, what, messages_RB, skipped=self.replica, row=None)

    def start_all_to_all_(self, sent_RB: Tensor, received_RB: Tensor, what: str) -> Pending:
        """Leave a copy, of which each takes its row."""
        number = self._post(sent_RB)
        return _Posted(self._hub, number, what, received_RB, skipped=None, row=self.replica)

    def _post(self, content: Tensor) -> int:
        number = self._num_exchanges
        self._num_exchanges += 1
        self._hub.post(number, self.replica, _Message(content))
        return number

    def broadcast_(self, tensor: Tensor, what: str, source: int = 0) -> None:
        """Take one replica's values; all bring theirs, so that lengths that differ are found."""
        mine = tensor.detach().contiguous().view(-1).view(torch.uint8)
        messages, _ = self._hub.collect(self._post(mine), what)
        if source != self.replica:
            chosen = torch.empty_like(mine)
            messages[source].copy_to_(chosen, None)
            tensor.copy_(chosen.view(tensor.dtype).view(tensor.shape))


def run_replicas(
    work: Callable[[LoopbackTransport], Result], num_replicas: int, timeout_seconds: float = 60.0
) -> list[Result]:
    """Run ``work(transport)`` once per replica, each in its own thread, and return the results in replica order.

    The first exception, in replica order, is raised after all threads have ended. An `ExchangeError` is only raised where no
    replica failed for a reason of its own.
    """
    hub = LoopbackHub(num_replicas, timeout_seconds)

    def one(replica: int) -> Result:
        try:
            return work(hub.transport(replica))
        finally:
            hub.leave(replica)

    with ThreadPoolExecutor(max_workers=num_replicas) as pool:
        futures = [pool.submit(one, replica) for replica in range(num_replicas)]
    errors = [error for error in (future.exception() for future in futures) if error is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, ExchangeError)):
        raise error
    return [future.result() for future in futures]
