"""A thin wire without one: real exchanges, whose end is held back until a modelled link would have carried them.

It needs no root and no second machine, and it is a model, not a measurement. The link is a queue for bytes: an exchange
occupies it for as long as its bytes take, after all that were handed over before it, and after a long pause for a slow start
as well. Latencies overlap. Bytes, rounds and times are the planner's (`thinwire.planner.cost`), so that the two cannot
disagree. Nothing is held back that a replica does not wait for, and what the real exchange takes is hidden inside, unless it
takes longer than the model says.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from thinwire.core.errors import ThinwireError
from thinwire.exchange.collective import CollectiveTransport
from thinwire.exchange.transport import Pending, Transport
from thinwire.planner.cost import (
    TRIPS_PER_ROUND,
    Exchange,
    all_to_all,
    latency_seconds,
    ring_all_gather,
    transfer_seconds,
    tree_broadcast,
)
from thinwire.planner.link_spec import LinkSpec


class ShapedLink:
    """One replica's modelled link. ``roll_call`` is where the replicas tell each other that they have come, since an
    exchange cannot begin before all have; without it the clock starts when this replica comes."""

    def __init__(
        self,
        spec: LinkSpec,
        roll_call: Transport | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if spec.jitter_seconds or spec.loss:
            raise ValueError(f"link={str(spec)!r}: a modelled link knows no jitter and no loss; leave them out")
        self.spec, self._link = spec, spec.link
        self._roll_call, self.clock, self.sleep = roll_call, clock, sleep
        self._free_at = self._done_at = -float("inf")
        self._turn = threading.Lock()

    def start(self, exchange: Exchange, what: str) -> "Passage":
        """Put an exchange on the link, behind all that are there. Collective, if there is a roll call."""
        began = self.clock()
        with self._turn:
            found = self._link.after(began - self._done_at)
            self._free_at = max(began, self._free_at) + transfer_seconds(exchange, found)
            ends = self._free_at + latency_seconds(exchange, found, TRIPS_PER_ROUND)
            self._done_at = max(self._done_at, ends)
        return Passage(self, began, ends, self._call(what))

    def _call(self, what: str) -> Pending | None:
        if self._roll_call is None:
            return None
        return self._roll_call.start_all_gather_(
            torch.zeros(self._roll_call.num_replicas, 1, dtype=torch.uint8, device="cpu"), what
        )

    def hold_back(self, future: Future[Tensor], exchange: Exchange, device: torch.device) -> Future[Tensor]:
        """A future with the same result, which is there when the link is done too. Nothing waits here: each has a thread
        that sleeps."""
        passage = self.start(exchange, "arrival of a gradient bucket")
        gate: Future[None] = Future(devices=[device] if device.type == "cuda" else None)
        failures: list[ThinwireError] = []

        def release() -> None:
            try:
                passage.hold()
            except ThinwireError as error:
                failures.append(error)
            gate.set_result(None)

        def result(_: Future[None]) -> Tensor:
            if failures:
                raise failures[0]
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # the bytes may still be on their way to it, on a stream of the group's own
            return future.value()

        future.add_done_callback(lambda _: threading.Thread(target=release, daemon=True).start())
        return gate.then(result)


@dataclass(frozen=True)
class Passage:
    """An exchange on a modelled link: when this replica came, and when it would end if all had come by then."""

    link: ShapedLink
    began: float
    ends: float
    arrival: Pending | None

    def hold(self, handed_over: float = -float("inf")) -> float:
        """Return when the link is done, and when that was. It is as much later as the last replica came later, or as
        this one's bytes did, where they were only ``handed_over`` later on."""
        came = max(self.began, handed_over)
        if self.arrival is not None:
            self.arrival.wait()
            span = self.arrival.span()
            came = came if span is None else max(came, span[1])
        ends = self.ends + came - self.began
        self.link.sleep(max(0.0, ends - self.link.clock()))
        return ends


@contextmanager
def carried(link: ShapedLink | None, exchange: Exchange, what: str) -> Iterator[None]:
    """What is exchanged inside takes as long as on the link, if there is one."""
    if link is None:
        yield
        return
    passage = link.start(exchange, what)
    yield
    passage.hold()


class ShapedTransport:
    """``inner`` over a modelled link; alone, it does nothing."""

    def __init__(self, inner: Transport, link: ShapedLink) -> None:
        self._inner, self.link = inner, link
        self.replica, self.num_replicas = inner.replica, inner.num_replicas
        self.ranks = list(getattr(inner, "ranks", ()))
        self.overhead_bytes = int(getattr(inner, "overhead_bytes", 0))

    def start_all_gather_(self, messages_RB: Tensor, what: str) -> Pending:
        """Begin one all-gather, on the link and in fact."""
        if self.num_replicas == 1:
            return self._inner.start_all_gather_(messages_RB, what)
        exchange = ring_all_gather(messages_RB.shape[1] + self.overhead_bytes, self.num_replicas)
        passage = self.link.start(exchange, what)
        return _Shaped(passage, self._inner.start_all_gather_(messages_RB, what))

    def start_all_to_all_(self, sent_RB: Tensor, received_RB: Tensor, what: str) -> Pending:
        """Begin one all-to-all, on the link and in fact."""
        if self.num_replicas == 1:
            return self._inner.start_all_to_all_(sent_RB, received_RB, what)
        exchange = all_to_all(sent_RB.shape[1] + self.overhead_bytes, self.num_replicas)
        passage = self.link.start(exchange, what)
        return _Shaped(passage, self._inner.start_all_to_all_(sent_RB, received_RB, what))

    def broadcast_(self, tensor: Tensor, what: str, source: int = 0) -> None:
        """Overwrite ``tensor`` with one replica's."""
        num_bytes = tensor.numel() * tensor.element_size() + self.overhead_bytes
        with carried(self.link if self.num_replicas > 1 else None, tree_broadcast(num_bytes, self.num_replicas), what):
            self._inner.broadcast_(tensor, what, source)


class _Shaped:
    """An exchange under way."""

    def __init__(self, passage: Passage, inner: Pending) -> None:
        self._passage, self._inner = passage, inner
        self._ended = passage.ends

    def begin(self) -> None:
        self._inner.begin()

    def wait(self) -> None:
        self._inner.wait()
        began, ended = self._inner.span() or (self._passage.began, self._passage.ends)
        self._ended = max(ended, self._passage.hold(began))

    def span(self) -> tuple[float, float]:
        return self._passage.began, self._ended

    @property
    def refused(self) -> list[int]:
        """The replicas whose messages ``inner`` refused, where it does such a thing."""
        return list(getattr(self._inner, "refused", ()))


def shape(transport: Transport, spec: LinkSpec, timeout_seconds: float) -> ShapedTransport:
    """The way over the default process group, as it would be over such a link. Collective: it makes a small group beside
    the default one, so that roll calls cannot get in the way of other collectives."""
    beside = dist.new_group(backend="gloo")
    assert beside is not None
    return ShapedTransport(transport, ShapedLink(spec, CollectiveTransport(beside, timeout_seconds)))


def link_of(transport: Transport) -> ShapedLink | None:
    """The modelled link of a transport that has one."""
    link = getattr(transport, "link", None)
    return link if isinstance(link, ShapedLink) else None
