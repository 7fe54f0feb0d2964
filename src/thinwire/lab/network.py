"""Hosts on one machine: a network namespace each, joined by links as thin as asked for. Linux alone, with root's rights.

Everything here lasts as long as the process that made it; see `thinwire.lab.inside`.
"""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from thinwire.lab.errors import LabError
from thinwire.lab.holder import Holder
from thinwire.lab.layout import (
    HOST_DEVICE,
    HUB,
    Direction,
    Island,
    Layout,
    core_end,
    host_commands,
    host_port,
    hub_commands,
    island_end,
    segments_command,
)
from thinwire.lab.relay_process import RelayProcess
from thinwire.lab.shaping import netem_commands, rate_commands
from thinwire.planner.link_spec import LinkSpec

_LARGEST_BUFFER = 64 << 20
# In every namespace: no IPv6 chatter, and buffers that hold what is on its way on a fast link with delay.
_KERNEL_SETTINGS = {
    "/proc/sys/net/ipv6/conf/all/disable_ipv6": "1",
    "/proc/sys/net/ipv6/conf/default/disable_ipv6": "1",
    "/proc/sys/net/ipv4/tcp_wmem": f"4096 65536 {_LARGEST_BUFFER}",
    "/proc/sys/net/ipv4/tcp_rmem": f"4096 131072 {_LARGEST_BUFFER}",
}
# The congestion control of most machines, where the kernel has it.
_CONGESTION, _AVAILABLE = "cubic", Path("/proc/sys/net/ipv4/tcp_available_congestion_control")


@dataclass(frozen=True)
class Counters:
    """What has crossed a host's link. The device's own counters take a large frame's header once; ``wire_*_bytes`` are
    those of the token buckets, with the headers of every packet, or None for a direction without a limit."""

    sent_bytes: int
    sent_packets: int
    received_bytes: int
    received_packets: int
    wire_sent_bytes: int | None
    wire_received_bytes: int | None


class Network:
    """Hosts 0, 1, ... with their links, and optionally islands of hosts that share an uplink.

    ``will_delay``: some `reshape` to come has links with delay, jitter or loss. Use it as a context manager::

        with Network([parse_link("100mbit")] * 2) as network:
            process = network.start(0, ["ping", "-c", "1", "10.77.0.2"])
    """

    def __init__(
        self, hosts: Sequence[LinkSpec], islands: Sequence[Island] | None = None, *, will_delay: bool = False, seed: int = 0
    ) -> None:
        self.layout = Layout(tuple(hosts), tuple(islands or ()))
        self.core: Literal["switch", "netem", "relay"] = "switch"
        # What the machine refused and the laboratory can do without.
        self.notes: list[str] = []
        self._will_delay, self._seed = will_delay or self.layout.is_delayed, seed
        self._hub: Holder | None = None
        self._hosts: list[Holder] = []
        self._relay: RelayProcess | None = None
        self._started: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> "Network":
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def num_hosts(self) -> int:
        """How many there are."""
        return len(self.layout.hosts)

    def start(
        self, host: int, command: Sequence[str], env: Mapping[str, str] | None = None, **popen: Any
    ) -> subprocess.Popen[Any]:
        """Start a command in a host; ``env`` and ``popen`` are Popen's.

        It leads a session of its own, so that Ctrl-C reaches it through its owner alone; it reads nothing, and it ends with
        the thread that started it."""
        popen = {"stdin": subprocess.DEVNULL, "start_new_session": True, **popen}
        entering = self._holder(host).enter_command(command)
        process = subprocess.Popen(entering, env=None if env is None else dict(env), **popen)
        self._started.append(process)
        return process

    def holder_pid(self, host: int) -> int:
        """The process that holds a host's namespace."""
        return self._holder(host).pid

    def counters(self, host: int) -> Counters:
        """What has crossed a host's link so far."""
        holder = self._holder(host)
        table = Path(f"/proc/{holder.pid}/net/dev").read_text()
        fields = next(
            line.split(":")[1].split() for line in table.splitlines() if line.strip().startswith(f"{HOST_DEVICE}:")
        )
        received, sent = [int(field) for field in fields[:2]], [int(field) for field in fields[8:10]]
        up, down = _bytes_through(holder, HOST_DEVICE), _bytes_through(self._holder(HUB), host_port(host))
        return Counters(sent[0], sent[1], received[0], received[1], wire_sent_bytes=up, wire_received_bytes=down)

    def uplink_bytes(self, island: int) -> tuple[int | None, int | None]:
        """What has left an island and what has come to it, with the headers of every packet; None without a limit."""
        hub = self._holder(HUB)
        return _bytes_through(hub, island_end(island)), _bytes_through(hub, core_end(island))

    def reshape(self, hosts: Sequence[LinkSpec], uplinks: Sequence[LinkSpec] | None = None) -> None:
        """Change all links while they are in use; connections stay."""
        layout = self.layout.with_links(hosts, uplinks)
        if layout.is_delayed and self.core == "switch":
            raise LabError("this network was built without delay: build it with will_delay=True to add some later")
        self.layout = layout
        self._shape()

    def check(self) -> None:
        """Raise if a part of the network is gone, with which commands would only wait."""
        for holder in (self._holder(HUB), *self._hosts):
            if not holder.is_alive():
                raise LabError(f"{holder.name}: the process that holds its namespace is gone")
        if self._relay is not None and not self._relay.is_alive():
            self._relay.counts()  # which says what it died of

    def relay_counts(self) -> dict[str, int]:
        """Packets that the relay has ``carried``, ``lost`` as asked, and dropped since a queue ``overflowed``."""
        return self._relay.counts() if self._relay is not None else {}

    def relay_seconds(self) -> float:
        """What the relay has cost so far, in seconds of one core."""
        return 0.0 if self._relay is None else self._relay.processor_seconds()

    def close(self) -> None:
        """End all that runs in the hosts, and the hosts."""
        for process in self._started:
            if process.poll() is None:
                _kill(process)
        if self._relay is not None:
            self._relay.close()
        holders = [holder for holder in (*self._hosts, self._hub) if holder is not None]
        for holder in holders:
            holder.begin_closing()
        for holder in holders:
            holder.close()
        for process in self._started:
            process.wait()
        self._hosts, self._hub, self._relay, self._started = [], None, None, []

    def _holder(self, place: int) -> Holder:
        if self._hub is None:
            raise LabError("the network is not there: use it in a with statement")
        if place == HUB:
            return self._hub
        if not 0 <= place < self.num_hosts:
            raise LabError(f"there is no host {place}: they are 0 to {self.num_hosts - 1}")
        return self._hosts[place]

    def _build(self) -> None:
        self._hub = Holder("the hub")
        for number in range(self.num_hosts):
            self._hosts.append(Holder(f"host {number}"))
        for holder in (self._hub, *self._hosts):
            holder.wait_until_ready()
            refused = holder.set_kernel(_KERNEL_SETTINGS)
        self.notes = [f"{path} could not be set" for path in refused if "ipv6" not in path]
        has_congestion = _AVAILABLE.exists() and _CONGESTION in _AVAILABLE.read_text().split()
        if not has_congestion:
            self.notes.append(f"the kernel has no {_CONGESTION}: its default congestion control is used")
        if self._will_delay:
            self.core = "netem" if has_netem(self._hub) else "relay"
        pids = [holder.pid for holder in self._hosts]
        self._hub.batch("ip", hub_commands(self.layout, pids, with_core_switch=self.core != "relay"))
        for number, holder in enumerate(self._hosts):
            holder.batch("ip", host_commands(number, self.num_hosts, _CONGESTION if has_congestion else None))
        self._shape()
        if self.core == "relay":
            self._relay = RelayProcess(self._hub, self.layout, self._seed)

    def _shape(self) -> None:
        lines: dict[int, list[str]] = {}
        for direction in self.layout.directions():
            lines.setdefault(direction.place, []).extend(self._commands(direction))
        for place, commands in lines.items():
            self._holder(place).batch("tc", commands)
        if self.core == "netem":
            line = segments_command(any(link.loss for link in (*self.layout.hosts, *self.layout.uplinks)))
            for holder in self._hosts:
                holder.batch("ip", [line])
        if self._relay is not None:
            self._relay.reshape(self.layout)

    def _commands(self, direction: Direction) -> list[str]:
        if self.core == "netem":
            return netem_commands(direction.device, direction.rate_bits, direction.link)
        return rate_commands(direction.device, direction.rate_bits, direction.link.round_trip_seconds)


def has_netem(holder: Holder) -> bool:
    """Whether the kernel can delay packets itself."""
    try:
        holder.batch("tc", ["qdisc add dev lo root netem delay 1ms", "qdisc del dev lo root"])
    except LabError:
        return False
    return True


def _kill(process: subprocess.Popen[Any]) -> None:
    """And those it has started, if it leads them; the holder of its namespace finds any others."""
    with contextlib.suppress(OSError):
        if os.getpgid(process.pid) == process.pid:
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()


def _bytes_through(holder: Holder, device: str) -> int | None:
    """What a device's token bucket has let pass, headers and all."""
    found = json.loads(holder.run("tc", "-s", "-j", "qdisc", "show", "dev", device) or "[]")
    return next((int(one["bytes"]) for one in found if one.get("kind") == "tbf"), None)
