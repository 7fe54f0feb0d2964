"""Who is where in a laboratory: names, addresses, and which device carries which direction of which link. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.planner.link_spec import LinkSpec

HUB = -1
HOST_DEVICE = "veth0"
MOST_HOSTS = 250


@dataclass(frozen=True)
class Island:
    """Hosts that share a fast switch, and one link from there to all others."""

    hosts: tuple[int, ...]
    uplink: LinkSpec


@dataclass(frozen=True)
class Direction:
    """One direction of a link: what leaves ``device`` in the namespace of ``place``, a host's number or `HUB`."""

    place: int
    device: str
    rate_bits: float | None
    link: LinkSpec


@dataclass(frozen=True)
class CorePort:
    """A port of the switch in the middle, the link behind it, and the hosts that are reached through it."""

    device: str
    link: LinkSpec
    hosts: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """All hosts' links, and the islands, if there are any."""

    hosts: tuple[LinkSpec, ...]
    islands: tuple[Island, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what cannot be built."""
        if not 1 <= len(self.hosts) <= MOST_HOSTS:
            raise ValueError(f"hosts must be from 1 to {MOST_HOSTS}, got {len(self.hosts)}")
        if not self.islands:
            return
        members = sorted(host for island in self.islands for host in island.hosts)
        if members != list(range(len(self.hosts))):
            raise ValueError(f"every host must be on one island: of {len(self.hosts)} hosts the islands have {members}")
        if any(link.is_delayed for link in self.hosts):
            raise ValueError("the hosts of an island are joined without delay: give delay, jitter and loss to its uplink")

    @property
    def uplinks(self) -> tuple[LinkSpec, ...]:
        """The islands' links."""
        return tuple(island.uplink for island in self.islands)

    @property
    def is_delayed(self) -> bool:
        """Whether some link holds or drops packets."""
        return any(link.is_delayed for link in (*self.hosts, *self.uplinks))

    def with_links(self, hosts: Sequence[LinkSpec], uplinks: Sequence[LinkSpec] | None = None) -> "Layout":
        """The same hosts and islands with other links."""
        uplinks = self.uplinks if uplinks is None else tuple(uplinks)
        if len(hosts) != len(self.hosts) or len(uplinks) != len(self.islands):
            raise ValueError(
                f"there are {len(self.hosts)} hosts and {len(self.islands)} islands, but {len(hosts)} links and "
                f"{len(uplinks)} uplinks"
            )
        islands = tuple(Island(island.hosts, uplink) for island, uplink in zip(self.islands, uplinks, strict=True))
        return Layout(tuple(hosts), islands)

    def island_of(self, host: int) -> int:
        """The number of a host's island; without islands, its own."""
        return next((number for number, island in enumerate(self.islands) if host in island.hosts), host)

    def directions(self) -> list[Direction]:
        """Both directions of every link: up leaves at the host's end, down at the hub's."""
        found = []
        for number, link in enumerate(self.hosts):
            found.append(Direction(number, HOST_DEVICE, link.up_bits, link))
            found.append(Direction(HUB, host_port(number), link.down_bits, link))
        for number, link in enumerate(self.uplinks):
            found.append(Direction(HUB, island_end(number), link.up_bits, link))
            found.append(Direction(HUB, core_end(number), link.down_bits, link))
        return found

    def core_ports(self) -> list[CorePort]:
        """The ports of the switch in the middle: one per island, or one per host."""
        if self.islands:
            return [CorePort(core_end(number), island.uplink, island.hosts) for number, island in enumerate(self.islands)]
        return [CorePort(host_port(number), link, (number,)) for number, link in enumerate(self.hosts)]

    def path(self, source: int, target: int) -> "Path":
        """What lies between two hosts."""
        links, rates = [self.hosts[source], self.hosts[target]], [self.hosts[source].up_bits, self.hosts[target].down_bits]
        here, there = self.island_of(source), self.island_of(target)
        if self.islands and here != there:
            links += [self.uplinks[here], self.uplinks[there]]
            rates += [self.uplinks[here].up_bits, self.uplinks[there].down_bits]
        kept = 1.0
        for link in links:
            kept *= 1 - link.loss
        return Path(
            rate_bits=min((rate for rate in rates if rate is not None), default=None),
            round_trip_seconds=sum(link.round_trip_seconds for link in links) / 2,
            jitter_seconds=2 * sum(link.jitter_seconds for link in links),
            loss=1 - kept,
        )


@dataclass(frozen=True)
class Path:
    """What lies between two hosts: the narrowest rate one way, the round trip, the most that chance adds to a round trip,
    and the share of packets that vanish one way."""

    rate_bits: float | None
    round_trip_seconds: float
    jitter_seconds: float
    loss: float


def address(host: int) -> str:
    """A host's address."""
    return f"10.77.0.{host + 1}"


def hardware_address(host: int) -> str:
    """A host's Ethernet address."""
    return f"02:77:00:00:00:{host + 1:02x}"


def host_port(host: int) -> str:
    """The hub's end of a host's cable."""
    return f"port{host}"


def island_end(island: int) -> str:
    """The end of an uplink at the island's switch."""
    return f"up{island}"


def core_end(island: int) -> str:
    """The end of an uplink at the core's switch."""
    return f"core{island}"


def island_switch(island: int) -> str:
    """An island's bridge."""
    return f"island{island}"


CORE_SWITCH = "switch"
# Ports are open at once, and who is behind which is not forgotten for days (hundredths of a second): a frame for a host that
# was silent for long must not go to all.
_BRIDGE_SETTINGS = "stp_state 0 mcast_snooping 0 ageing_time 100000000"


def hub_commands(layout: Layout, holders: Sequence[int], with_core_switch: bool) -> list[str]:
    """Lines for ``ip -batch`` in the hub: cables to the hosts, whose namespaces these processes hold, and switches."""
    lines = []
    for host, pid in enumerate(holders):
        peer = f"peer name {HOST_DEVICE} address {hardware_address(host)} netns {pid}"
        lines.append(f"link add name {host_port(host)} type veth {peer}")
    for number in range(len(layout.islands)):
        lines.append(f"link add name {island_end(number)} type veth peer name {core_end(number)}")
    members = [(core_port.device, CORE_SWITCH) for core_port in layout.core_ports()] if with_core_switch else []
    for number, island in enumerate(layout.islands):
        members += [(device, island_switch(number)) for device in (island_end(number), *map(host_port, island.hosts))]
    switches = dict.fromkeys(switch for _, switch in members)
    lines += [f"link add name {switch} type bridge {_BRIDGE_SETTINGS}" for switch in switches]
    lines += [f"link set dev {device} master {switch}" for device, switch in members]
    ends = [end(number) for number in range(len(layout.islands)) for end in (island_end, core_end)]
    return lines + [f"link set dev {device} up" for device in (*map(host_port, range(len(holders))), *ends, *switches)]


def host_commands(host: int, num_hosts: int, congestion: str | None) -> list[str]:
    """Lines for ``ip -batch`` in a host. It knows all others' Ethernet addresses, so that no question for one gets lost.

    The congestion control is the route's: a namespace may only have a default that the whole machine allows to all users."""
    others = [other for other in range(num_hosts) if other != host]
    route = f"route replace 10.77.0.0/24 dev {HOST_DEVICE} proto kernel scope link src {address(host)} congctl {congestion}"
    return [
        "link set dev lo up",
        f"addr add {address(host)}/24 dev {HOST_DEVICE}",
        f"link set dev {HOST_DEVICE} up",
        *([route] if congestion else []),
        *(
            f"neigh add {address(other)} lladdr {hardware_address(other)} dev {HOST_DEVICE} nud permanent"
            for other in others
        ),
    ]


def segments_command(is_lossy: bool) -> str:
    """A line for ``ip -batch`` in a host: with netem's loss, which drops a large frame as one, frames are single packets."""
    return f"link set dev {HOST_DEVICE} gso_max_segs {1 if is_lossy else 65535}"
