"""The modelled link: its arithmetic on a clock that stands still, and training over it in this process."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.training import flat, train
from thinwire.exchange.loopback import LoopbackHub, run_replicas
from thinwire.exchange.transport import Transport, all_gather
from thinwire.parallel.shaped import Passage, ShapedLink, ShapedTransport, carried, link_of
from thinwire.planner.cost import (
    DeviceCosts,
    Exchange,
    network_seconds,
    predict,
    ring_all_gather,
    ring_all_reduce,
    thinwire_demo,
)
from thinwire.planner.link_spec import LinkSpec, parse_link
from thinwire.planner.links import TCP_PAYLOAD_SHARE

# One byte of ours takes a microsecond, a round 20 ms.
SPEC = LinkSpec(8e6 / TCP_PAYLOAD_SHARE, 8e6 / TCP_PAYLOAD_SHARE, 0.02)
# After a pause the first 14,480 bytes take a round trip; the next window is more than the 20,000 that the link holds.
START = 0.02 - 0.01448


class FakeClock:
    """Time passes only where somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def link_and_clock(spec: LinkSpec = SPEC) -> tuple[ShapedLink, FakeClock]:
    clock = FakeClock()
    return ShapedLink(spec, clock=clock, sleep=clock.sleep), clock


def test_an_exchange_takes_what_the_planner_says() -> None:
    link, clock = link_and_clock()
    exchange = ring_all_gather(1000, 4)
    link.start(exchange, "x").hold()
    assert clock.now == pytest.approx(100.063)
    assert clock.now - 100 == pytest.approx(network_seconds(exchange, SPEC.link, 2))
    with carried(link, ring_all_reduce(1_000_000, 4), "y"):
        clock.now += 1.0  # what the real one takes is hidden inside
    assert clock.now == pytest.approx(100.063 + 1.5 + 0.12), "no pause before it, and so no slow start"
    with carried(link, ring_all_reduce(1_000_000, 4), "z"):
        clock.now += 5.0  # unless it takes longer
    assert clock.now == pytest.approx(100.063 + 1.62 + 5.0)
    with carried(None, ring_all_reduce(1_000_000, 4), "no link"):
        pass
    assert clock.now == pytest.approx(100.063 + 1.62 + 5.0)


def test_exchanges_under_way_share_the_bytes_but_not_the_latency() -> None:
    link, clock = link_and_clock()
    first, second = link.start(Exchange(1, 500_000, 1), "1"), link.start(Exchange(1, 500_000, 1), "2")
    assert (first.ends, second.ends) == (pytest.approx(100.52 + START), pytest.approx(101.02 + START))
    clock.now = 200.0
    assert link.start(Exchange(1, 500_000, 1), "3").ends == pytest.approx(200.52 + START), "an idle link saves nothing up"
    second.hold()
    assert clock.now == 200.0, "what is over is not waited for"


def test_overlapped_buckets_leave_as_much_to_wait_for_as_the_planner_says() -> None:
    costs = DeviceCosts(0.0, 0.0, 0.0, ddp_overlap=0.5)
    for payload in (100_000, 400_000, 4_000_000):
        link, clock = link_and_clock()
        passages = []
        for _ in range(8):
            clock.now += 1.0 / 8
            passages.append(link.start(ring_all_gather(payload // 8, 2), "bucket"))
        for passage in passages:
            passage.hold()
        workload = thinwire_demo(0, payload, 32, "sign", 2, 3.0, costs, num_buckets=8)
        assert clock.now - 101 == pytest.approx(predict(workload, SPEC.link).exposed_seconds)


def test_tcp_forgets_its_window_in_a_long_pause_only() -> None:
    link, clock = link_and_clock()
    long, short = Exchange(1, 50_000, 1), Exchange(1, 14_480, 1)
    for pause, exchange, expected in [
        (0.0, long, 0.05 + START),
        (0.4, long, 0.05),
        (0.6, long, 0.05 + START),
        (0.6, short, 0.01448),
    ]:
        clock.now += pause
        began = clock.now
        link.start(exchange, "x").hold()
        assert clock.now - began == pytest.approx(expected + 0.02)


def test_a_replica_that_comes_late_ends_late_on_all() -> None:
    class Came:
        """A roll call that was over a little later than this replica began."""

        num_replicas = 2

        def start_all_gather_(self, messages: Tensor, what: str) -> "Came":
            return self

        def wait(self) -> None: ...

        def span(self) -> tuple[float, float]:
            return 100.0, 100.7

    clock = FakeClock()
    link = ShapedLink(SPEC, Came(), clock=clock, sleep=clock.sleep)  # type: ignore[arg-type]
    assert link.start(Exchange(1, 500_000, 1), "x").hold() == clock.now == pytest.approx(101.22 + START)
    clock.now = 101.0
    assert link.start(Exchange(1, 0, 0), "y").hold(101.5) == pytest.approx(101.5), "bytes that came late from a GPU"


@given(
    exchanges=st.lists(st.tuples(st.integers(0, 10**7), st.integers(0, 20), st.floats(0.0, 10.0)), min_size=1, max_size=12)
)
def test_the_link_is_a_queue_that_loses_no_byte(exchanges: list[tuple[int, int, float]]) -> None:
    link, clock = link_and_clock()
    passages: list[tuple[Passage, int, int]] = []
    for num_bytes, rounds, pause in exchanges:
        clock.now += pause
        passages.append((link.start(Exchange(num_bytes, num_bytes, rounds), "x"), num_bytes, rounds))
    delivered = [passage.ends - 0.02 * rounds for passage, _, rounds in passages]
    for (passage, num_bytes, _), over in zip(passages, delivered, strict=True):
        assert over >= passage.began + 1e-6 * num_bytes - 1e-9, "never faster than alone"
    assert delivered == sorted(delivered), "bytes leave in the order in which they came"
    first = passages[0][0].began
    busy = 1e-6 * sum(num_bytes for num_bytes, _, _ in exchanges)
    most = busy + START * len(exchanges)
    assert first + busy - 1e-6 <= delivered[-1] <= passages[-1][0].began + most + 1e-6


def test_the_slower_direction_counts_and_no_limit_is_none() -> None:
    link, _ = link_and_clock(parse_link("100mbit/10mbit"))
    assert link.start(ring_all_gather(10**6, 2), "x").ends - 100 == pytest.approx(0.8 / TCP_PAYLOAD_SHARE)
    link, _ = link_and_clock(parse_link("unshaped,30ms"))
    # Without a limit only windows count: 10, 20, ... 320 segments are 0.91 MB, and the rest is in the seventh round trip.
    assert link.start(ring_all_gather(10**6, 2), "x").ends - 100 == pytest.approx(7 * 0.03, rel=1e-2)


@pytest.mark.parametrize("text", ["1mbit,loss=1%", "1mbit,1ms,jitter=1ms"])
def test_what_it_cannot_do_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a modelled link knows no jitter and no loss; leave them out"):
        ShapedLink(parse_link(text))


def over_link(transport: Transport, spec: LinkSpec) -> ShapedTransport:
    return ShapedTransport(transport, ShapedLink(spec, transport))


@pytest.mark.parametrize("options", [{}, {"overlap": True, "num_buckets": 3}, {"delay": 1}], ids=str)
def test_training_over_a_link_gives_the_same_bits_and_shows_the_wait(options: dict[str, object]) -> None:
    spec, num_steps = LinkSpec(4e6, 4e6, 0.008), 2

    def work(transport: Transport) -> tuple[Tensor, Tensor, float, float, float]:
        plain, free, _ = train(transport.replica, num_steps, transport=transport, **options)
        free.drain()
        model, optimizer, _ = train(transport.replica, num_steps, transport=over_link(transport, spec), **options)
        optimizer.drain()
        count, modelled = optimizer.traffic.total, ring_all_gather(optimizer.plan.payload_bytes, 2)
        least = num_steps * network_seconds(modelled, replace(spec.link, window_bytes=None), 2)
        return flat(plain), flat(model), least, count.wait_seconds, count.exchange_seconds

    results = run_replicas(work, 2)
    for plain, held, least, waited, under_way in results:
        assert torch.equal(plain, held), "held back, but not changed"
        assert under_way >= least
        assert waited >= least or options, "with nothing to hide behind, all of it is waited for"


def test_a_transport_tells_its_link() -> None:
    inner = LoopbackHub(1).transport(0)
    assert link_of(inner) is None
    transport = over_link(inner, SPEC)
    assert link_of(transport) is transport.link
    assert all_gather(transport, torch.ones(3, dtype=torch.uint8), "alone").tolist() == [[1, 1, 1]]
