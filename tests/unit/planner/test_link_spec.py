import pytest

from thinwire.planner.link_spec import LinkSpec, parse_link


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("100mbit", LinkSpec(100e6, 100e6)),
        ("100Mbit, 20ms", LinkSpec(100e6, 100e6, 0.02)),
        ("100mbit/20mbit,80ms,jitter=5ms,loss=0.1%", LinkSpec(100e6, 20e6, 0.08, 0.005, 0.001)),
        ("100Mbit/s,20ms", LinkSpec(100e6, 100e6, 0.02)),
        ("1gbit/s / 20mbit/s", LinkSpec(1e9, 20e6)),
        ("unshaped", LinkSpec()),
        ("unshaped/10mbit,loss=0.02", LinkSpec(None, 10e6, loss=0.02)),
        ("1gbit,0ms", LinkSpec(1e9, 1e9)),
        ("1 GBIT, 20MS, Loss=1%", LinkSpec(1e9, 1e9, 0.02, loss=0.01)),
        ("Unshaped / 2.5Gb", LinkSpec(None, 2.5e9)),
    ],
)
def test_links_are_read_and_written(text: str, expected: LinkSpec) -> None:
    assert parse_link(text) == expected
    assert parse_link(str(expected)) == expected


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "link='' names no rate"),
        ("100MB/s", "link='100MB/s' is in bytes; write bits per second, such as 800Mbit"),
        ("100MB,20ms", "link='100MB' is in bytes"),
        ("1mbit/s/2mbit/s/3mbit/s", "has 3 rates"),
        ("unshaped/1.25GB", "link='1.25GB' is in bytes"),
        ("1mbit/2mbit/3mbit", "has 3 rates"),
        ("40ms,20mbit", "begins with a time; the rate comes first"),
        ("1mbit,speed=3", "unknown part 'speed=3'"),
        ("1mbit,20s", "round_trip must be at most 10 s"),
        ("1mbit,20", "the round trip of link='20' has no unit"),
        ("1mbit,loss=80%", "loss must be from 0 to 50%"),
        ("1mbit,loss=x", "loss must be from 0 to 50%"),
        ("0mbit", "link='0mbit'"),
        ("20ms", "begins with a time"),
    ],
)
def test_senseless_links_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_link(text)


def test_the_planner_sees_the_slower_direction() -> None:
    assert parse_link("100mbit/20mbit,80ms").link.bits_per_second == 20e6
    assert parse_link("100mbit/20mbit,80ms").link.round_trip_seconds == 0.08
    assert not parse_link("10mbit").is_delayed
    assert parse_link("10mbit,loss=1%").is_delayed
