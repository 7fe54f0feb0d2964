"""Real namespaces, real links, real TCP."""

import hashlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lab import kill_owner, marked, namespaces, owners, wait_until_gone, wait_until_left
from thinwire.lab import inside, support
from thinwire.lab.errors import LabError
from thinwire.lab.holder import INTERPRETER, SCRIPT
from thinwire.lab.layout import Island, address
from thinwire.lab.network import Network
from thinwire.lab.verify import verify
from thinwire.planner.link_spec import LinkSpec, parse_link

MISSING = support.missing() or ("these tests need root itself" if support.needs_user_namespace() else None)
pytestmark = [pytest.mark.skipif(MISSING is not None, reason=MISSING or ""), pytest.mark.timeout(120)]

RECEIVE = """
import hashlib, socket
with socket.create_server(("", 5000)) as server:
    print("listening", flush=True)
    one, _ = server.accept()
    digest, count = hashlib.sha256(), 0
    while piece := one.recv(1 << 20):
        digest.update(piece)
        count += len(piece)
print(count, digest.hexdigest())
"""
SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000)) as one:
    one.sendall(bytes(int(sys.argv[2])))
"""
ECHO = """
import socket
with socket.create_server(("", 5000)) as server:
    print("listening", flush=True)
    one, _ = server.accept()
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while piece := one.recv(100):
        one.sendall(piece)
"""
# Says when the round trip has become longer than 30 ms, and when it is shorter again, over one connection.
WATCH = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 5000)) as one:
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for is_slow in (False, True, False):
        seconds = None
        while seconds is None or (seconds > 0.03) != is_slow:
            start = time.monotonic()
            one.sendall(b"x" * 50)
            left = 50
            while left:
                left -= len(one.recv(left))
            seconds = time.monotonic() - start
        print("slow" if is_slow else "fast", flush=True)
"""


def links(text: str) -> list[LinkSpec]:
    return [parse_link(part) for part in text.split(";")]


def start(network: Network, host: int, program: str, *arguments: str) -> subprocess.Popen[str]:
    return network.start(host, [sys.executable, "-S", "-c", program, *arguments], stdout=subprocess.PIPE, text=True)


def line_of(process: subprocess.Popen[Any]) -> str:
    assert process.stdout is not None
    return str(process.stdout.readline()).strip()


def need_relay(network: Network) -> None:
    if network.core != "relay":
        pytest.skip("this kernel has netem, so there is no relay")


def transfer(network: Network, num_bytes: int, source: int = 0, target: int = 1) -> None:
    """Bytes from one host to another, which must arrive as they are."""
    receiver = start(network, target, RECEIVE)
    assert line_of(receiver) == "listening"
    assert start(network, source, SEND, address(target), str(num_bytes)).wait(60) == 0
    assert line_of(receiver) == f"{num_bytes} {hashlib.sha256(bytes(num_bytes)).hexdigest()}"


def test_rates_each_way_without_delay() -> None:
    with Network(links("100mbit/10mbit;unshaped")) as network:
        assert network.core == "switch"
        there, back = verify(network)
    assert there.nominal_bits == pytest.approx(100e6 * 1448 / 1514)
    assert back.nominal_bits == pytest.approx(10e6 * 1448 / 1514)
    assert 0.95 < (there.rate_bits or 0) / there.nominal_bits < 1.05
    assert 0.95 < (back.rate_bits or 0) / back.nominal_bits < 1.05


def test_every_host_has_its_own_rate_and_delay() -> None:
    with Network(links("100mbit,20ms;60mbit/40mbit,60ms;unshaped,20ms,jitter=1ms")) as network:
        assert network.core != "switch"
        there, back, jittery = verify(network, pairs=[(0, 1), (1, 0), (0, 2)])
        assert network.relay_counts().get("overflowed", 0) == 0
    assert (there.nominal_bits, back.nominal_bits) == pytest.approx((40e6 * 1448 / 1514, 60e6 * 1448 / 1514))
    assert 0.0399 < there.round_trip_seconds < 0.046
    assert 0.0199 < jittery.round_trip_seconds < 0.028


def test_what_is_not_as_asked_for_is_said() -> None:
    with Network(links("100mbit;100mbit")) as network:
        asked = network.layout
        network.reshape(links("50mbit;50mbit"))
        network.layout = asked
        with pytest.raises(
            LabError, match=r"4\d\.?\d* Mbit/s of data get from host 0 to host 1, but 95\.6 Mbit/s was asked"
        ):
            verify(network)


def test_islands_are_fast_inside_and_share_a_slow_uplink() -> None:
    uplink = parse_link("40mbit,20ms")
    with Network(links("unshaped;unshaped;unshaped;unshaped"), [Island((0, 1), uplink), Island((2, 3), uplink)]) as network:
        inside, between = verify(network, pairs=[(0, 1), (1, 2)])
        assert (inside.rate_bits or 0) > 10 * (between.rate_bits or 0) > 0
        assert inside.round_trip_seconds < 0.01 < 0.019 < between.round_trip_seconds
        before, _ = network.uplink_bytes(0)
        transfer(network, 500_000, 0, 1)
        assert network.uplink_bytes(0)[0] < before + 10_000  # the end of what was measured
        for source, target in ((0, 2), (1, 3)):
            transfer(network, 500_000, source, target)
        after, (_, arrived) = network.uplink_bytes(0)[0], network.uplink_bytes(1)
    assert after - before == pytest.approx(1_000_000 * 1514 / 1448, rel=0.01)
    assert arrived == pytest.approx(after, rel=0.001)


@pytest.mark.parametrize("plan", ["100mbit", "50mbit,loss=0.1%"])
def test_a_connection_outlives_a_change_of_links(plan: str) -> None:
    with Network(links(f"{plan};{plan}"), will_delay=True) as network:
        echo = start(network, 1, ECHO)
        assert line_of(echo) == "listening"
        watch = start(network, 0, WATCH, address(1))
        assert line_of(watch) == "fast"
        network.reshape(links("10mbit,80ms;1gbit,20ms,jitter=2ms"))
        assert line_of(watch) == "slow"
        network.reshape(links("unshaped;unshaped"))
        assert line_of(watch) == "fast"
        assert watch.wait(10) == 0


def test_a_network_without_delay_gets_none_later() -> None:
    with Network(links("100mbit;100mbit")) as network, pytest.raises(LabError, match="build it with will_delay=True"):
        network.reshape(links("100mbit,20ms;100mbit,20ms"))
    with pytest.raises(LabError, match="use it in a with statement"):
        network.counters(0)


def test_loss_is_what_was_asked_for_and_data_are_whole() -> None:
    with Network(links("unshaped,loss=1%;unshaped,loss=2%"), seed=5) as network:
        need_relay(network)
        transfer(network, 8_000_000)
        counts = network.relay_counts()
    total, expected = counts["carried"] + counts["lost"], 1 - 0.99 * 0.98
    assert total > 5000
    assert abs(counts["lost"] - expected * total) < 5 * (expected * total) ** 0.5


def test_counters_see_what_was_sent() -> None:
    num_bytes = 5_000_000
    with Network(links("100mbit;200mbit")) as network:
        transfer(network, num_bytes)
        sender, receiver = network.counters(0), network.counters(1)
    assert num_bytes < sender.sent_bytes < 1.05 * num_bytes
    # The two are read one after the other, and the last acknowledgements may come in between.
    assert abs(sender.sent_bytes - receiver.received_bytes) < 500
    assert abs(sender.sent_packets - receiver.received_packets) < 5 < sender.sent_packets
    assert sender.wire_sent_bytes == pytest.approx(num_bytes * 1514 / 1448, rel=0.005)
    assert receiver.wire_received_bytes == pytest.approx(num_bytes * 1514 / 1448, rel=0.005)
    assert receiver.wire_sent_bytes == pytest.approx(receiver.sent_bytes, rel=0.05)


def test_a_full_queue_drops_and_goes_on() -> None:
    # 64 kB fit in the queue of such a link, and a fast sender starts with more than that.
    with Network(links("unshaped,1ms;500kbit,1ms")) as network:
        need_relay(network)
        blast = "import socket, sys\none = socket.socket(type=socket.SOCK_DGRAM)\n"
        blast += "for _ in range(200): one.sendto(bytes(1400), (sys.argv[1], 5000))"
        assert start(network, 0, blast, address(1)).wait(20) == 0
        transfer(network, 20_000)
        counts = network.relay_counts()
    assert counts["overflowed"] > 50
    assert counts["lost"] == 0


@pytest.fixture
def mark() -> Iterator[str]:
    """A mark whose processes have all ended when the test has."""
    text = os.urandom(8).hex()
    before = sorted(os.listdir("/sys/class/net"))
    yield text
    wait_until_gone(text)
    assert sorted(os.listdir("/sys/class/net")) == before


def test_nothing_is_left_of_twenty_that_were_killed_at_random_moments(mark: str) -> None:
    chance, seen, num_early = random.Random(7), set[str](), 0
    with owners(mark) as server:
        assert server.stdin is not None
        for number in range(20):
            server.stdin.write("10mbit\n" if number % 2 else "10mbit,20ms\n")
            server.stdin.flush()
            owner = int(line_of(server))
            with pytest.raises(subprocess.TimeoutExpired):
                server.wait(chance.uniform(0.0, 0.45))
            now = namespaces(marked(mark))
            seen, num_early = seen | now, num_early + (not now)
            kill_owner(owner, (signal.SIGKILL, signal.SIGINT, signal.SIGTERM)[number % 3])
            assert line_of(server) == "ended"
            wait_until_gone(mark, but={server.pid})
    assert num_early < 10, "most were killed before they had a namespace"
    wait_until_left(seen)


def test_a_namespace_whose_holder_is_about_to_end_is_left_again() -> None:
    """As by a command that was starting when its owner was stopped, and that nobody would end."""
    script = "import inside, sys; inside._call('unshare', inside._CLONE_NEWNET); "
    script += "inside._call('prctl', inside._PR_SET_NAME, sys.argv[1].encode()); print(flush=True); sys.stdin.read()"
    for name, said in ((inside._HOLDING, "inside\n"), (inside._ENDING, "")):
        holding = [sys.executable, "-c", script, name]
        with subprocess.Popen(
            holding, cwd=SCRIPT.parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as holder:
            line_of(holder)
            command = [*INTERPRETER, str(SCRIPT), "enter", str(holder.pid), "0", "--", "echo", "inside"]
            found = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (found.returncode, found.stdout, found.stderr) == (0 if said else 137, said, "")


def check_until_noticed(network: Network) -> None:
    for _ in range(1000):
        network.check()
        network.counters(0)


def test_a_holder_that_is_killed_is_noticed() -> None:
    with Network(links("10mbit;10mbit")) as network:
        network.check()
        os.kill(network.holder_pid(1), signal.SIGKILL)
        with pytest.raises(LabError, match="host 1: the process that holds its namespace is gone"):
            check_until_noticed(network)


def test_a_relay_that_dies_is_noticed() -> None:
    with Network(links("10mbit,2ms;10mbit,2ms")) as network:
        need_relay(network)
        assert network._relay is not None
        os.kill(network._relay.pid, signal.SIGKILL)
        with pytest.raises(LabError, match="the relay in the hub is gone"):
            check_until_noticed(network)


def test_no_namespace_has_a_name() -> None:
    names = Path("/run/netns")
    before = {path.name for path in names.glob("*")}
    with Network(links("10mbit;10mbit")) as network:
        assert network.counters(0).wire_sent_bytes == 0
        assert {path.name for path in names.glob("*")} <= before


def test_measuring_one_host_measures_nothing() -> None:
    with Network(links("10mbit")) as network:
        assert verify(network) == []
