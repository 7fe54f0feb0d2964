"""How many bytes an optimizer sends and receives, and how long it waits for them: the traffic meter."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Count:
    """Bytes and exchanges. ``sent_bytes`` is what this replica hands to the exchange, counted once however many receive
    it; ``received_bytes`` is what comes from the others. A replica's own copy never counts. ``wait_seconds`` is how long the
    program stood still for the others' bytes; ``exchange_seconds`` is how long payloads were under way, if the transport can
    tell (NCCL cannot). ``encode_seconds`` and ``apply_seconds`` are what making payloads, and applying them, took the host;
    ``early_seconds`` is the part of the former that was spent during backward, with ``overlap``."""

    sent_bytes: int = 0
    received_bytes: int = 0
    num_exchanges: int = 0
    wait_seconds: float = field(default=0.0, compare=False)
    exchange_seconds: float = field(default=0.0, compare=False)
    encode_seconds: float = field(default=0.0, compare=False)
    early_seconds: float = field(default=0.0, compare=False)
    apply_seconds: float = field(default=0.0, compare=False)

    @property
    def hidden_seconds(self) -> float:
        """How long payloads were under way while the program did something else."""
        return max(0.0, self.exchange_seconds - self.wait_seconds)

    def add(self, message_bytes: int, num_replicas: int) -> None:
        """Count one all-gather of ``message_bytes`` from each of ``num_replicas``. Alone, nothing crosses a wire."""
        if num_replicas > 1:
            self.sent_bytes += message_bytes
            self.received_bytes += message_bytes * (num_replicas - 1)
            self.num_exchanges += 1

    def add_rows(self, message_bytes: int, num_replicas: int) -> None:
        """Count one all-to-all: ``message_bytes`` to each of the others, and as many from each."""
        if num_replicas > 1:
            self.sent_bytes += message_bytes * (num_replicas - 1)
            self.received_bytes += message_bytes * (num_replicas - 1)
            self.num_exchanges += 1

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time spent inside."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.wait_seconds += time.perf_counter() - began


@dataclass
class Traffic:
    """``last_step`` and ``total`` count what steps exchange, headers included; ``setup`` counts the
    agreement and the first copy of replica 0's parameters. Where replicas are islands of several ranks, these count what
    crosses between islands; ``inside_last_step`` and ``inside`` what moves inside one, but for that first copy."""

    last_step: Count = field(default_factory=Count)
    total: Count = field(default_factory=Count)
    setup: Count = field(default_factory=Count)
    inside_last_step: Count = field(default_factory=Count)
    inside: Count = field(default_factory=Count)

    def start_step(self) -> None:
        """Begin to count a new step."""
        self.last_step, self.inside_last_step = Count(), Count()

    @contextmanager
    def waiting_inside(self) -> Iterator[None]:
        """Count the time spent inside as waiting for the other ranks of the island."""
        with self.inside.waiting(), self.inside_last_step.waiting():
            yield

    def add_inside(self, sent_bytes: int, received_bytes: int) -> None:
        """Count one exchange inside an island."""
        for count in (self.inside_last_step, self.inside):
            count.sent_bytes += sent_bytes
            count.received_bytes += received_bytes
            count.num_exchanges += 1

    def add(self, message_bytes: int, num_replicas: int) -> None:
        """Count one exchange of the running step."""
        self.last_step.add(message_bytes, num_replicas)
        self.total.add(message_bytes, num_replicas)

    def add_rows(self, message_bytes: int, num_replicas: int) -> None:
        """Count one all-to-all of the running step."""
        self.last_step.add_rows(message_bytes, num_replicas)
        self.total.add_rows(message_bytes, num_replicas)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time spent inside as waiting for the running step's exchanges."""
        with self.total.waiting(), self.last_step.waiting():
            yield

    @contextmanager
    def encoding(self, is_early: bool = False) -> Iterator[None]:
        """Count the time spent inside as making messages, during backward if it is early."""
        began = time.perf_counter()
        yield
        seconds = time.perf_counter() - began
        for count in (self.last_step, self.total):
            count.encode_seconds += seconds
            count.early_seconds += seconds if is_early else 0.0

    @contextmanager
    def applying(self) -> Iterator[None]:
        """Count the time spent inside as decoding messages and changing parameters."""
        began = time.perf_counter()
        yield
        for count in (self.last_step, self.total):
            count.apply_seconds += time.perf_counter() - began

    def add_spans(self, spans: Iterable[tuple[float, float] | None]) -> None:
        """Count how long at least one exchange of the running step was under way."""
        end, seconds = 0.0, 0.0
        for first, last in sorted(span for span in spans if span is not None):
            seconds += max(0.0, last - max(first, end))
            end = max(end, last)
        self.last_step.exchange_seconds += seconds
        self.total.exchange_seconds += seconds
