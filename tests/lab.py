"""Owners of laboratories that can be killed, and what is left of them."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path

# In the environment of an owner, and so of all that it starts.
MARK = "THINWIRE_TEST_MARK"
# A process that imports once and then forks an owner per line: a network whose hosts run things that have children.
_OWNERS = """
import os, signal, sys, time
from thinwire.lab.network import Network
from thinwire.planner.link_spec import parse_link
signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell runs in the background would ignore it
for line in sys.stdin:
    pid = os.fork()
    if pid:
        print(pid, flush=True)
        os.waitpid(pid, 0)
        print("ended", flush=True)
        continue
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        with Network([parse_link(line)] * 2) as network:
            for host in range(2):
                network.start(host, ["sh", "-c", "setsid sleep 1000 & sleep 1000"])
            time.sleep(1000)
    except BaseException:
        os._exit(1)
"""


@contextlib.contextmanager
def owners(mark: str) -> Iterator[subprocess.Popen[str]]:
    """The process that forks them."""
    process = subprocess.Popen(
        [sys.executable, "-c", _OWNERS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, MARK: mark},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def marked(mark: str) -> list[int]:
    """Processes with this mark."""
    text, found = f"{MARK}={mark}".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if text in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def namespaces(pids: list[int] | None = None) -> set[str]:
    """Network namespaces of these processes, or of all."""
    found = set()
    for pid in pids if pids is not None else [int(path.name) for path in Path("/proc").glob("[0-9]*")]:
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/{pid}/ns/net"))
    return found - {os.readlink("/proc/self/ns/net")}


def wait_until_gone(mark: str, but: Collection[int] = (), seconds: float = 20.0) -> None:
    """Until no process has this mark."""
    deadline = time.monotonic() + seconds
    while left := set(marked(mark)).difference(but):
        lines = []
        for pid in left:
            with contextlib.suppress(OSError):  # it has just ended
                lines.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" "))
        assert time.monotonic() < deadline, f"still there: {lines}"
        time.sleep(0.02)


def wait_until_left(found: set[str], seconds: float = 60.0) -> None:
    """Until no process is in one of these namespaces; their numbers may have become those of others for a while."""
    deadline = time.monotonic() + seconds
    while left := found & namespaces():
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.1)


def kill_owner(pid: int, number: signal.Signals) -> None:
    """One signal to an owner alone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
