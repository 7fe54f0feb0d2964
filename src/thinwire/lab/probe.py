"""One measurement between two hosts: the round trip of a byte, then the rate of a stream. A script of its own, run by path
in the first host with the standard library alone; it holds both ends of the connection.

    probe.py PID ADDRESS SETTINGS

PID holds the namespace of the second host, ADDRESS is that host's, and SETTINGS are those of
`thinwire.lab.verify.plan_probe` as JSON. Prints {"round_trips": [seconds, ...], "rate": bytes per second}.
"""

import ctypes
import json
import os
import select
import socket
import struct
import sys
import time
from collections.abc import Sequence
from typing import Any

_CLONE_NEWNET = 0x40000000
_TCP_CONGESTION = 13
# tcp_info.tcpi_bytes_received: what the kernel has received in order, whenever this process comes to read it.
_BYTES_RECEIVED = struct.Struct("=128xQ")
_PIECE = memoryview(bytes(1 << 18))
_SAMPLE_SECONDS, _MOST_WAIT_SECONDS = 0.01, 20.0
# When a stream is said to run evenly: so near to what is wanted, and not faster than before for a window.
_NEAR, _FASTER = 0.97, 1.003
# Without a rate to wait for.
_NUM_WINDOWS = 3


class Rate:
    """The best rate of a growing count over any ``window_seconds``. A token bucket never lets more through than its rate,
    but for its burst, so a machine that was busy elsewhere makes a window slower; only where it kept back what the bucket
    had let through is one faster."""

    def __init__(self, window_seconds: float, wanted: float | None) -> None:
        self._window_seconds, self._wanted = window_seconds, wanted
        self._samples: list[tuple[float, int]] = []
        self._first, self._best_at = 0, 0.0
        self.best = 0.0

    def add(self, now: float, count: int) -> None:
        """The count at a moment."""
        self._samples.append((now, count))
        samples, first = self._samples, self._first
        while first + 1 < len(samples) and now - samples[first + 1][0] >= self._window_seconds:
            first += 1
        self._first = first
        elapsed = now - samples[first][0]
        if elapsed < self._window_seconds:
            return
        rate = (count - samples[first][1]) / elapsed
        if rate > self.best * _FASTER:
            self._best_at = now
        self.best = max(self.best, rate)

    @property
    def is_even(self) -> bool:
        """Whether more of it would say no more."""
        if not self._samples:
            return False
        now = self._samples[-1][0]
        if self._wanted is None:
            return now - self._samples[0][0] >= _NUM_WINDOWS * self._window_seconds
        return self.best >= _NEAR * self._wanted and now - self._best_at >= self._window_seconds


def connect(pid: int, address: str) -> tuple[socket.socket, socket.socket]:
    """The near and the far end of a connection to the host whose namespace this process holds."""
    near = socket.socket()
    namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    if ctypes.CDLL(None).setns(namespace, _CLONE_NEWNET) != 0:
        raise OSError(f"cannot enter the namespace of {pid}")
    os.close(namespace)
    with socket.create_server((address, 0)) as server:
        near.settimeout(_MOST_WAIT_SECONDS)
        server.settimeout(_MOST_WAIT_SECONDS)
        near.connect(server.getsockname())
        far, _ = server.accept()
    # Plain slow start: others leave it early when the round trip varies. Only now, since a route's
    # choice comes first while connecting.
    near.setsockopt(socket.IPPROTO_TCP, _TCP_CONGESTION, b"reno")
    near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    far.settimeout(_MOST_WAIT_SECONDS)
    far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return near, far


def ping(near: socket.socket, far: socket.socket, num_pings: int) -> list[float]:
    """Seconds of round trips of one byte."""
    found = []
    for _ in range(num_pings):
        start = time.monotonic()
        near.send(b"x")
        far.recv(1)
        far.send(b"x")
        near.recv(1)
        found.append(time.monotonic() - start)
    return found


def stream(near: socket.socket, far: socket.socket, rate: Rate, asked: dict[str, Any]) -> float:
    """The rate of a stream in bytes per second. ``window_bytes`` are between the two ends at most, so that no queue
    overflows; the first ``skip_bytes`` pass on the credit of idle token buckets and do not count."""
    for end in (near, far):
        end.setblocking(False)
    buffer, sent, start, sampled_at = bytearray(1 << 20), 0, time.monotonic(), 0.0
    base = _received(far)
    while not rate.is_even and time.monotonic() - start < asked["seconds"]:
        room = asked["window_bytes"] - (sent - (_received(far) - base))
        readable, writable, _ = select.select([far], [near] if room > 0 else [], [], _SAMPLE_SECONDS)
        if writable:
            sent += near.send(_PIECE[:room])
        if readable:
            far.recv_into(buffer, 0, socket.MSG_TRUNC)
        now = time.monotonic()
        if now - sampled_at >= _SAMPLE_SECONDS:
            sampled_at, count = now, _received(far) - base
            if count >= asked["skip_bytes"]:
                rate.add(now, count)
    deadline = time.monotonic() + _MOST_WAIT_SECONDS
    while _received(far) - base < sent and time.monotonic() < deadline:  # leave the link as empty as it was
        if select.select([far], [], [], _SAMPLE_SECONDS)[0]:
            far.recv_into(buffer, 0, socket.MSG_TRUNC)
    return rate.best


def _received(end: socket.socket) -> int:
    count: int = _BYTES_RECEIVED.unpack(end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED.size))[0]
    return count


def main(arguments: Sequence[str]) -> None:
    """See above."""
    asked = json.loads(arguments[2])
    near, far = connect(int(arguments[0]), arguments[1])
    with near, far:
        answer: dict[str, object] = {"round_trips": ping(near, far, asked["num_pings"])}
        if asked["seconds"]:
            answer["rate"] = stream(near, far, Rate(asked["window_seconds"], asked["wanted"]), asked)
    print(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1:])
