"""Hosts, islands and what lies between them."""

import pytest

from thinwire.lab.layout import HUB, Island, Layout, host_commands, hub_commands, segments_command
from thinwire.lab.written import parse_layout
from thinwire.planner.link_spec import parse_link


def layout(links: str, *islands: tuple[tuple[int, ...], str]) -> Layout:
    hosts = tuple(parse_link(link) for link in links.split(";"))
    return Layout(hosts, tuple(Island(members, parse_link(uplink)) for members, uplink in islands))


def test_up_leaves_at_the_host_and_down_at_the_hub() -> None:
    found = [(one.place, one.device, one.rate_bits) for one in layout("100mbit/20mbit;unshaped").directions()]
    assert found == [(0, "veth0", 100e6), (HUB, "port0", 20e6), (1, "veth0", None), (HUB, "port1", None)]


def test_an_island_has_an_uplink_of_two_ends() -> None:
    built = layout("1gbit;1gbit;1gbit", ((0, 2), "20mbit/10mbit"), ((1,), "5mbit"))
    ends = [(one.device, one.rate_bits) for one in built.directions()][6:]
    assert ends == [("up0", 20e6), ("core0", 10e6), ("up1", 5e6), ("core1", 5e6)]
    assert [(port.device, port.hosts) for port in built.core_ports()] == [("core0", (0, 2)), ("core1", (1,))]
    assert [built.island_of(host) for host in range(3)] == [0, 1, 0]


def test_a_path_is_as_narrow_as_its_narrowest_link_and_adds_delays() -> None:
    built = layout("100mbit/20mbit,80ms,loss=1%;50mbit,20ms,jitter=3ms")
    way, back = built.path(0, 1), built.path(1, 0)
    assert (way.rate_bits, back.rate_bits) == (50e6, 20e6)
    assert way.round_trip_seconds == back.round_trip_seconds == pytest.approx(0.05)
    assert way.jitter_seconds == pytest.approx(0.006)
    assert way.loss == pytest.approx(0.01)


def test_a_path_inside_an_island_does_not_see_the_uplink() -> None:
    built = layout("unshaped;1gbit;1gbit", ((0, 1), "20mbit,40ms"), ((2,), "30mbit/25mbit,20ms"))
    assert (built.path(0, 1).rate_bits, built.path(0, 1).round_trip_seconds) == (1e9, 0)
    assert (built.path(0, 2).rate_bits, built.path(0, 2).round_trip_seconds) == (20e6, pytest.approx(0.03))


def test_the_hub_has_a_switch_or_leaves_the_frames_to_the_relay() -> None:
    built = layout("unshaped;unshaped")
    with_switch, without = hub_commands(built, [70, 71], True), hub_commands(built, [70, 71], False)
    cable = "link add name port1 type veth peer name veth0 address 02:77:00:00:00:02 netns 71"
    assert cable in with_switch
    assert cable in without
    assert "link set dev port0 master switch" in with_switch
    assert not any("switch" in line for line in without)
    assert without[-2:] == ["link set dev port0 up", "link set dev port1 up"]


def test_the_switches_of_islands_are_there_in_any_case() -> None:
    lines = hub_commands(layout("unshaped;unshaped", ((0,), "10mbit"), ((1,), "10mbit")), [70, 71], False)
    assert "link add name up1 type veth peer name core1" in lines
    assert "link set dev up1 master island1" in lines
    assert "link set dev port1 master island1" in lines
    assert not any(line.startswith("link set dev core1 master") for line in lines)


def test_a_host_knows_the_others_and_its_congestion_control() -> None:
    lines = host_commands(1, 3, "cubic")
    assert "addr add 10.77.0.2/24 dev veth0" in lines
    assert [line for line in lines if line.startswith("neigh")] == [
        "neigh add 10.77.0.1 lladdr 02:77:00:00:00:01 dev veth0 nud permanent",
        "neigh add 10.77.0.3 lladdr 02:77:00:00:00:03 dev veth0 nud permanent",
    ]
    assert any(line.endswith("src 10.77.0.2 congctl cubic") for line in lines)
    assert not any("congctl" in line for line in host_commands(1, 3, None))
    assert segments_command(True).endswith("gso_max_segs 1")


def test_what_cannot_be_built_is_refused() -> None:
    with pytest.raises(ValueError, match=r"hosts must be from 1 to 250, got 0"):
        Layout(())
    with pytest.raises(ValueError, match=r"of 2 hosts the islands have \[0, 0\]"):
        layout("unshaped;unshaped", ((0,), "10mbit"), ((0,), "10mbit"))
    with pytest.raises(ValueError, match="give delay, jitter and loss to its uplink"):
        layout("unshaped,20ms;unshaped", ((0,), "10mbit"), ((1,), "10mbit"))
    with pytest.raises(ValueError, match="there are 2 hosts and 0 islands, but 1 links and 0 uplinks"):
        layout("unshaped;unshaped").with_links([parse_link("10mbit")])


def test_networks_as_people_write_them() -> None:
    assert parse_layout(None, None, None, None, None) == layout("100mbit,20ms;100mbit,20ms")
    assert parse_layout(3, "10mbit", None, None, None) == layout("10mbit;10mbit;10mbit")
    assert parse_layout(None, None, "10mbit; 100mbit/20mbit,40ms", None, None) == layout("10mbit;100mbit/20mbit,40ms")
    assert parse_layout(3, None, None, 2, "20mbit") == layout(
        "unshaped;" * 2 + "unshaped", ((0, 1), "20mbit"), ((2,), "20mbit")
    )
    assert parse_layout(2, "1gbit", None, 2, "20mbit;30mbit,9ms").uplinks == (parse_link("20mbit"), parse_link("30mbit,9ms"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((2, None, None, 2, None), "--islands and --uplink belong together"),
        ((2, None, None, None, "10mbit"), "--islands and --uplink belong together"),
        ((None, "10mbit", "10mbit;10mbit", None, None), "not both"),
        ((3, None, "10mbit;10mbit", None, None), "--links has 2 links, but there are 3 hosts"),
        ((None, None, "10mbit;;10mbit", None, None), "--links='' names no rate"),
        ((2, "10mbyte", None, None, None), "--link='10mbyte' is in bytes"),
        ((2, None, None, 3, "10mbit"), "--islands must be from 2 to the number of hosts, 2, got 3"),
        ((4, None, None, 3, "10mbit;20mbit"), "--uplink has 2 links for 3 islands"),
        ((0, None, None, None, None), "hosts must be from 1 to 250, got 0"),
    ],
)
def test_networks_that_make_no_sense_are_one_sentence(options: tuple[int, str, str, int, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_layout(*options)
