import math

import pytest

from thinwire.planner.links import Link, format_bandwidth, format_bytes, format_seconds, parse_bandwidth, parse_seconds


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("100Mbit", 100e6),
        ("1 Gbit", 1e9),
        ("10Gbps", 10e9),
        ("2.5gbit/s", 2.5e9),
        (" 64 kbit/s ", 64e3),
        ("0.4Tb/s", 0.4e12),
        ("300 bits", 300.0),
        ("1e6bit", 1e6),
        ("10mbps", 10e6),
        (".5Mbit", 0.5e6),
    ],
)
def test_rates_as_people_write_them(text: str, expected: float) -> None:
    assert parse_bandwidth(text) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("20ms", 0.02),
        ("0.5s", 0.5),
        ("80us", 80e-6),
        ("80 µs", 80e-6),
        ("80μs", 80e-6),
        ("3s", 3.0),
        ("1e-3 s", 1e-3),
        ("7 ns", 7e-9),
    ],
)
def test_times_as_people_write_them(text: str, expected: float) -> None:
    assert parse_seconds(text) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("-1Mbit", "above 0"),
        ("0", "above 0"),
        ("0Gbit", "above 0"),
        ("1e999", "finite"),
        ("nan", "is not a number with"),
        ("inf", "is not a number with"),
        ("", "is not a number with"),
        ("Mbit", "is not a number with"),
        ("1 2Mbit", "is not a number with"),
        ("1,5Mbit", "is not a number with"),
        ("10 parsec", "unknown unit 'parsec'"),
        ("10 ms", "unknown unit 'ms'"),
        ("100", "has no unit; write kbit, Mbit"),
        ("20mb", "may mean bits or bytes; write 20mbit, or 160mbit if it is bytes"),
        ("2.5gb/s", "write 2.5gbit, or 20gbit if"),
    ],
)
def test_bad_rates_are_refused_in_a_sentence(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as caught:
        parse_bandwidth(text, name="--bandwidth")
    assert str(caught.value).startswith(f"--bandwidth={text!r}")


@pytest.mark.parametrize("text", ["100MB/s", "100 MB", "100MBps", "100Mbytes", "100MBytes/s"])
def test_bytes_are_not_taken_for_bits(text: str) -> None:
    with pytest.raises(ValueError, match="is in bytes; write bits per second, such as 800Mbit"):
        parse_bandwidth(text)
    with pytest.raises(ValueError, match="such as 800bit"):
        parse_bandwidth(text.replace("M", ""))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("-5ms", "above 0"),
        ("0", "above 0"),
        ("nan", "is not a number"),
        ("5 Mbit", "unknown unit"),
        ("5min", "unknown unit 'min'"),
        ("300", "has no unit; write s, ms"),
    ],
)
def test_bad_times_are_refused_in_a_sentence(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_seconds(text)


def test_a_round_trip_may_be_zero_but_not_less() -> None:
    assert parse_seconds("0ms", allow_zero=True) == parse_seconds("0", allow_zero=True) == 0
    with pytest.raises(ValueError, match="rtt='-1ms' must be a finite number 0 or more"):
        parse_seconds("-1ms", name="rtt", allow_zero=True)


def test_a_link_says_what_is_left_for_the_sender() -> None:
    link = Link(bits_per_second=8e6, round_trip_seconds=0.02)
    assert link.bytes_per_second == pytest.approx(1e6 * 1448 / 1514)
    assert link.one_way_seconds == 0.01


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ((0.0, 0.0), "bits_per_second=0.0 must be a finite number above 0"),
        ((math.nan, 0.0), "bits_per_second=nan"),
        ((math.inf, 0.0), "bits_per_second=inf"),
        ((1e6, -0.1), "round_trip_seconds=-0.1 must be a finite number 0 or more"),
        ((1e6, 0.0, 0.0), "payload_share=0.0"),
        ((1e6, 0.0, 1.5), "payload_share=1.5"),
    ],
)
def test_impossible_links_are_refused(fields: tuple[float, ...], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Link(*fields)


def test_numbers_for_people() -> None:
    assert format_bytes(11_491_904) == "11.5 MB"
    assert format_bytes(64) == "64 B"
    assert format_bytes(0) == "0 B"
    assert format_bytes(999_999) == "1 MB"
    assert format_bytes(123_456) == "123 kB"
    assert format_bandwidth(100e6) == "100 Mbit/s"
    assert format_bandwidth(2.5e9) == "2.5 Gbit/s"
    assert format_seconds(0.02) == "20 ms"
    assert format_seconds(0) == "0 s"
    assert format_seconds(80e-6) == "80 us"
    assert format_seconds(4711.0) == "4710 s"
    assert format_seconds(0.9999) == "1 s"


@pytest.mark.parametrize("rate", [1e3, 56e3, 1e6, 2.5e9, 1e11])
def test_what_is_printed_can_be_read_back(rate: float) -> None:
    assert parse_bandwidth(format_bandwidth(rate)) == pytest.approx(rate, rel=5e-3)
    assert parse_seconds(format_seconds(1 / rate)) == pytest.approx(1 / rate, rel=5e-3)
