"""How many bytes an optimizer sends and receives: the traffic meter."""

from dataclasses import dataclass, field


@dataclass
class Count:
    """Bytes and exchanges. ``sent_bytes`` is what this replica hands to the exchange, counted once however many receive
    it; ``received_bytes`` is what comes from the others. A replica's own copy never counts."""

    sent_bytes: int = 0
    received_bytes: int = 0
    num_exchanges: int = 0

    def add(self, message_bytes: int, num_replicas: int) -> None:
        """Count one all-gather of ``message_bytes`` from each of ``num_replicas``. Alone, nothing crosses a wire."""
        if num_replicas > 1:
            self.sent_bytes += message_bytes
            self.received_bytes += message_bytes * (num_replicas - 1)
            self.num_exchanges += 1


@dataclass
class Traffic:
    """``last_step`` and ``total`` count what steps exchange, headers and roll calls included; ``setup`` counts the
    agreement and the first copy of replica 0's parameters."""

    last_step: Count = field(default_factory=Count)
    total: Count = field(default_factory=Count)
    setup: Count = field(default_factory=Count)

    def start_step(self) -> None:
        """Begin to count a new step."""
        self.last_step = Count()

    def add(self, message_bytes: int, num_replicas: int) -> None:
        """Count one exchange of the running step."""
        self.last_step.add(message_bytes, num_replicas)
        self.total.add(message_bytes, num_replicas)
