"""How a network is measured, and what counts as off."""

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from thinwire.lab import verify
from thinwire.lab.errors import LabError
from thinwire.lab.layout import Layout, Path
from thinwire.lab.network import Network
from thinwire.lab.probe import Rate
from thinwire.lab.verify import Row, neighbours, plan_probe
from thinwire.planner.link_spec import parse_link

GOOD = Row(2, 3, 95e6, 95.6e6, 0.0203, 0.02, 0.0)


def test_the_best_window_counts() -> None:
    rate = Rate(0.5, wanted=1000.0)
    for tick in range(100):
        # A machine that was busy elsewhere for 0.3 s.
        now = 0.02 * tick
        rate.add(now, round(1000 * (now if now < 0.4 else max(0.4, now - 0.3))))
        assert not (now < 1.3 and rate.is_even)
    assert rate.best == pytest.approx(1000, rel=0.02)
    assert rate.is_even


def test_a_stream_below_what_is_wanted_is_given_all_its_time() -> None:
    rate = Rate(0.5, wanted=1000.0)
    for tick in range(200):
        rate.add(0.02 * tick, 16 * tick)
    assert rate.best == pytest.approx(800)
    assert not rate.is_even


def test_a_stream_that_still_grows_is_not_even() -> None:
    rate = Rate(0.3, wanted=1000.0)
    for tick in range(100):
        rate.add(0.02 * tick, tick * tick)
    assert rate.best > 1000
    assert not rate.is_even


def test_without_a_limit_three_windows_are_enough() -> None:
    rate = Rate(0.5, wanted=None)
    ticks = next(tick for tick in range(200) if rate.add(0.02 * tick, tick) or rate.is_even)
    assert 0.02 * ticks == pytest.approx(1.5)


@pytest.mark.parametrize(("num_bad", "is_believed"), [(0, True), (2, True), (3, False)])
def test_what_is_not_as_asked_for_is_measured_again(
    num_bad: int, is_believed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = iter([replace(GOOD, rate_bits=104e6)] * num_bad + [GOOD])
    monkeypatch.setattr(verify, "_measure", lambda *_: next(found))
    network = SimpleNamespace(layout=Layout((parse_link("100mbit"),) * 4))
    (row,) = verify.measure(cast(Network, network), pairs=[(2, 3)])
    assert (row.problem is None) == is_believed


def test_a_bad_row_is_kept_if_the_last_try_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    bad, found = replace(GOOD, rate_bits=104e6), iter([1, 2])

    def measured(*_: object) -> Row:
        if next(found, None) is None:
            raise LabError("it took too long")
        return bad

    monkeypatch.setattr(verify, "_measure", measured)
    network = cast(Network, SimpleNamespace(layout=Layout((parse_link("100mbit"),) * 4)))
    assert list(verify.measure(network, pairs=[(2, 3)])) == [bad]


@pytest.mark.parametrize("num_failed", [2, 3])
def test_a_measurement_that_fails_is_made_again(num_failed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Row | LabError] = [*[LabError("it took too long")] * num_failed, GOOD]

    def measured(*_: object) -> Row:
        one = found.pop(0)
        if isinstance(one, LabError):
            raise one
        return one

    monkeypatch.setattr(verify, "_measure", measured)
    network = cast(Network, SimpleNamespace(layout=Layout((parse_link("100mbit"),) * 4)))
    if num_failed < 3:
        assert list(verify.measure(network, pairs=[(2, 3)])) == [GOOD]
    else:
        with pytest.raises(LabError, match="it took too long"):
            list(verify.measure(network, pairs=[(2, 3)]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"rate_bits": 91e6}, None),
        ({"rate_bits": 90e6}, "90 Mbit/s of data get from host 2 to host 3, but 95.6 Mbit/s was asked for"),
        ({"rate_bits": 101e6}, "101 Mbit/s of data get from host 2 to host 3"),
        ({"rate_bits": 90e6, "note": "packets are lost"}, None),
        ({"rate_bits": None}, None),
        ({"nominal_bits": None}, None),
        ({"round_trip_seconds": 0.0239}, None),
        ({"round_trip_seconds": 0.0241}, "the round trip from host 2 to host 3 takes 24.1 ms, but 20 ms was asked for"),
        ({"round_trip_seconds": 0.0159}, "takes 15.9 ms"),
        ({"round_trip_seconds": 0.0241, "jitter_seconds": 0.004}, None),
    ],
)
def test_a_row_names_what_is_off(changes: dict[str, float | None], message: str | None) -> None:
    problem = replace(GOOD, **changes).problem  # type: ignore[arg-type]
    assert problem is None if message is None else message in (problem or "")


def test_every_host_is_sender_and_receiver() -> None:
    assert neighbours(1) == []
    assert neighbours(2) == [(0, 1), (1, 0)]
    assert neighbours(3) == [(0, 1), (1, 0), (1, 2), (2, 1), (2, 0), (0, 2)]


def test_a_stream_fills_the_way_and_no_queue() -> None:
    asked = plan_probe(Path(100e6, 0.08, 0.0, 0.0), with_rate=True)
    assert asked["wanted"] == pytest.approx(100e6 / 8 * 1448 / 1514)
    # One way holds 0.5 MB, and the queue of such a link 4 MiB.
    assert 5e5 < asked["window_bytes"] < 5e5 + (4 << 20)
    assert asked["skip_bytes"] > asked["window_bytes"]
    assert asked["window_seconds"] > 0.3
    assert plan_probe(Path(100e6, 0.08, 0.0, 0.0), with_rate=False)["seconds"] == 0
    assert plan_probe(Path(100e6, 0.08, 0.0, 0.01), with_rate=True)["wanted"] is None
    assert plan_probe(Path(None, 0.0, 0.0, 0.0), with_rate=True)["wanted"] is None
