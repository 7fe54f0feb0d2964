"""From a link to ``tc``'s lines."""

import itertools

import pytest

from thinwire.lab.shaping import Bucket, bucket, netem_commands, rate_commands
from thinwire.planner.link_spec import parse_link


@pytest.mark.parametrize(
    ("rate", "burst_kib", "limit_kib"), [(10e6, 16, 1024), (100e6, 128, 4096), (1e9, 256, 16384)], ids=["10M", "100M", "1G"]
)
def test_known_rates_have_the_settings_that_were_tried(rate: float, burst_kib: int, limit_kib: int) -> None:
    assert bucket(rate) == Bucket(int(rate), burst_kib << 10, limit_kib << 10)


def test_settings_grow_with_the_rate_and_hold_two_frames_at_least() -> None:
    rates = [1e4, 1e5, 1e6, 5e6, 1e7, 3e7, 1e8, 5e8, 1e9, 4e9, 1e10]
    found = [bucket(rate) for rate in rates]
    for small, large in itertools.pairwise(found):
        assert small.burst_bytes <= large.burst_bytes
        assert small.limit_bytes <= large.limit_bytes
    assert found[0].burst_bytes >= 2 * 1514
    assert found[0].limit_bytes > found[0].burst_bytes
    assert found[-1] == Bucket(10_000_000_000, 2560 << 10, 160 << 20)
    assert 16 << 10 < bucket(30e6).burst_bytes < 128 << 10


def test_the_queue_holds_what_is_on_its_way() -> None:
    assert bucket(1e9, 0.2).limit_bytes == 37_500_000
    assert bucket(100e6, 0.02).limit_bytes == 4 << 20


def test_a_rate_is_one_line_and_none_is_none() -> None:
    assert rate_commands("veth0", 100e6, 0.02) == [
        "qdisc replace dev veth0 root handle 1: tbf rate 100000000bit burst 131072b limit 4194304b"
    ]
    assert rate_commands("port3", None, 0.0) == ["qdisc replace dev port3 root pfifo", "qdisc del dev port3 root"]


def test_netem_stands_under_the_bucket_with_a_quarter_of_the_round_trip() -> None:
    tbf, netem = netem_commands("veth0", 100e6, parse_link("100mbit,20ms"))
    assert tbf == rate_commands("veth0", 100e6, 0.02)[0]
    # The queue's bytes and a round trip's, in full frames.
    assert (
        netem == f"qdisc replace dev veth0 parent 1:1 handle 10: netem limit {-(-(4194304 + 250000) // 1514)} delay 5000us"
    )


def test_netem_is_late_by_half_of_the_most_on_average_and_drops() -> None:
    (_, netem) = netem_commands("port0", 10e6, parse_link("10mbit,80ms,jitter=6ms,loss=0.5%"))
    assert netem.endswith("delay 23000us 3000us loss 0.5%")
    (alone,) = netem_commands("port0", None, parse_link("unshaped,loss=1%"))
    assert alone.startswith("qdisc replace dev port0 root handle 2: netem limit ")
    assert alone.endswith(" loss 1%")
    assert "delay" not in alone
