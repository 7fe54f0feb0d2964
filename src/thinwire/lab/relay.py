"""The switch in the middle for kernels without netem: it holds frames for their delay, and loses some.

A script of its own, run by path inside the hub with the standard library alone. It reads whole frames from every port, also
those of up to 64 kB that stand for many packets (GSO), and sends each on the port of its target, through that port's token
bucket. Its first line of standard input is the set-up, each further line a change of links or a question; it ends when the
input closes.
"""

import contextlib
import ctypes
import gc
import heapq
import json
import os
import random
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

_ETH_P_ALL = 3
_SOL_PACKET, _PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING = 263, 15, 23
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
_PR_SET_TIMERSLACK, _TIMERSLACK_NANOSECONDS = 29, 1000
# What a port may hold between two looks at it, and the most that is on its way in all.
_RECEIVE_BUFFER, _MOST_HELD_BYTES = 32 << 20, 512 << 20
_LARGEST_FRAME, _MOST_FRAMES_PER_LOOK = 1 << 17, 64
_PRIORITY = -10

# virtio_net_hdr, which stands before every frame: flags, kind, header length, bytes per packet, checksum's start and offset.
_PREFIX = struct.Struct("=BBHHHH")
_ETHERNET = 14
_TCP4, _ECN = 1, 0x80
_FIN, _PSH, _CWR = 0x01, 0x08, 0x80


def num_packets(frame: bytes) -> int:
    """How many packets a frame is on a wire."""
    if frame[1] & ~_ECN != _TCP4:
        return 1
    size: int = _PREFIX.unpack_from(frame)[3]
    return max(1, -(-(len(frame) - _headers_end(frame)) // size))


def _headers_end(frame: bytes) -> int:
    ip = _PREFIX.size + _ETHERNET
    tcp = ip + 4 * (frame[ip] & 15)
    return tcp + 4 * (frame[tcp + 12] >> 4)


def without(frame: bytes, is_lost: Sequence[bool]) -> list[bytes]:
    """What is left of a frame without some of its packets: a frame per run of packets that stand together."""
    if not any(is_lost):
        return [frame]
    left, first = [], 0
    while first < len(is_lost):
        last = first
        while last < len(is_lost) and not is_lost[last]:
            last += 1
        if last > first:
            left.append(_part(frame, first, last, len(is_lost)))
        first = last + 1
    return left


def _part(frame: bytes, first: int, last: int, total: int) -> bytes:
    """Packets ``first`` to ``last - 1`` of a TCP frame as a frame of their own."""
    flags, kind, header_bytes, size, start, offset = _PREFIX.unpack_from(frame)
    end = _headers_end(frame)
    ip, head = _PREFIX.size + _ETHERNET, bytearray(frame[:end])
    tcp = ip + 4 * (head[ip] & 15)
    payload = frame[end + first * size : min(len(frame), end + last * size)]
    if last - first == 1:
        kind, size_now = 0, 0
    else:
        size_now = size
    _PREFIX.pack_into(head, 0, flags, kind, header_bytes, size_now, start, offset)
    struct.pack_into("!H", head, ip + 2, end - ip + len(payload))
    struct.pack_into("!H", head, ip + 4, (struct.unpack_from("!H", head, ip + 4)[0] + first) & 0xFFFF)
    struct.pack_into("!H", head, ip + 10, 0)
    struct.pack_into("!H", head, ip + 10, ~_sum(head[ip:tcp]) & 0xFFFF)
    sequence = struct.unpack_from("!I", head, tcp + 4)[0]
    struct.pack_into("!I", head, tcp + 4, (sequence + first * size) & 0xFFFFFFFF)
    if last < total:
        head[tcp + 13] &= ~(_FIN | _PSH) & 0xFF
    if first > 0:
        head[tcp + 13] &= ~_CWR & 0xFF
    # The rest of the sum is the receiving device's task, as it was for the whole frame.
    pseudo = bytes(head[ip + 12 : ip + 20]) + struct.pack("!BBH", 0, socket.IPPROTO_TCP, end - tcp + len(payload))
    struct.pack_into("!H", head, tcp + 16, _sum(pseudo))
    return bytes(head) + payload


def _sum(data: bytes | bytearray) -> int:
    """The Internet checksum, not inverted."""
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


class Schedule:
    """When which frame leaves by which port. Knows no clock and no socket.

    ``tables[port]`` are the Ethernet addresses behind a port; a link is (delay one way, most chance delay, loss)."""

    def __init__(self, tables: Sequence[Sequence[bytes]], links: Sequence[Sequence[float]], seed: int = 0) -> None:
        self._port_of = {address: port for port, addresses in enumerate(tables) for address in addresses}
        self._num_ports = len(tables)
        self._random = random.Random(seed)
        self._heap: list[tuple[float, int, int, bytes]] = []
        self._latest: dict[tuple[int, int], float] = {}
        self._number = 0
        self.held_bytes = 0
        # Packets, as they would be on a wire.
        self.carried, self.lost, self.overflowed = 0, 0, 0
        self.set_links(links)

    def set_links(self, links: Sequence[Sequence[float]]) -> None:
        """From the next frame on."""
        self._links = [(float(delay), float(jitter), float(loss)) for delay, jitter, loss in links]

    def add(self, now: float, source: int, frame: bytes) -> None:
        """A frame has come in by this port."""
        target_address = frame[_PREFIX.size : _PREFIX.size + 6]
        if target_address[0] & 1:
            for target in range(self._num_ports):
                if target != source:
                    self._add(now, source, target, frame)
        else:
            target = self._port_of.get(target_address, source)
            if target != source:
                self._add(now, source, target, frame)

    def _add(self, now: float, source: int, target: int, frame: bytes) -> None:
        delay, jitter, loss = self._links[source]
        other_delay, other_jitter, other_loss = self._links[target]
        frames = [frame]
        if loss or other_loss:
            frames = self._survivors(frame, 1 - (1 - loss) * (1 - other_loss))
        due = now + delay + other_delay
        if jitter or other_jitter:
            due += self._random.uniform(0, jitter) + self._random.uniform(0, other_jitter)
        # A queue keeps its order: nothing overtakes what went the same way before.
        due = max(due, self._latest.get((source, target), 0.0))
        self._latest[source, target] = due
        for part in frames:
            if self.held_bytes > _MOST_HELD_BYTES:
                self.overflowed += num_packets(part)
                continue
            self._number += 1
            self.held_bytes += len(part)
            heapq.heappush(self._heap, (due, self._number, target, part))

    def _survivors(self, frame: bytes, loss: float) -> list[bytes]:
        is_lost = [self._random.random() < loss for _ in range(num_packets(frame))]
        self.lost += sum(is_lost)
        return without(frame, is_lost)

    def take(self, now: float) -> Iterator[tuple[int, bytes]]:
        """The frames whose time has come, in order, each with its port."""
        heap = self._heap
        while heap and heap[0][0] <= now:
            _, _, target, frame = heapq.heappop(heap)
            self.held_bytes -= len(frame)
            yield target, frame

    def wait_seconds(self, now: float) -> float | None:
        """Until the next frame is due; None if there is none."""
        return max(0.0, self._heap[0][0] - now) if self._heap else None


class Relay:
    """The sockets, and the loop."""

    def __init__(self, ports: Sequence[dict[str, Any]], links: Sequence[Sequence[float]], seed: int) -> None:
        tables = [[bytes.fromhex(address.replace(":", "")) for address in port["addresses"]] for port in ports]
        self._schedule = Schedule(tables, links, seed)
        self._sockets = [_open(port["device"]) for port in ports]
        # Frames that a port's socket would not take yet.
        self._waiting: list[deque[bytes]] = [deque() for _ in ports]
        self._waiting_bytes = [0] * len(ports)
        self._set_queues(ports)
        self._buffer = bytearray(_LARGEST_FRAME)
        self._view = memoryview(self._buffer)
        self._control = bytearray()

    def _set_queues(self, ports: Sequence[dict[str, Any]]) -> None:
        """The token bucket's queue must fill up before the socket's does: it is the one that has a size."""
        self._queue_bytes = [int(port["queue_bytes"]) for port in ports]
        for one, size in zip(self._sockets, self._queue_bytes, strict=True):
            _set_buffer(one, socket.SO_SNDBUF, _SO_SNDBUFFORCE, min(1 << 30, 4 * size))

    def run(self) -> None:
        """Until standard input closes."""
        schedule, sockets = self._schedule, self._sockets
        numbers = {one.fileno(): port for port, one in enumerate(sockets)}
        watched = [0, *numbers]
        while True:
            blocked = [one for one, waiting in zip(sockets, self._waiting, strict=True) if waiting]
            ready, free, _ = select.select(watched, blocked, (), schedule.wait_seconds(time.monotonic()))
            for number in ready:
                if number == 0:
                    if not self._obey():
                        return
                else:
                    self._receive(numbers[number])
            for one in free:
                self._send_waiting(sockets.index(one))
            for target, frame in schedule.take(time.monotonic()):
                self._send(target, frame)

    def _receive(self, port: int) -> None:
        one, buffer, view, schedule = self._sockets[port], self._buffer, self._view, self._schedule
        with contextlib.suppress(OSError):  # no more frames
            for _ in range(_MOST_FRAMES_PER_LOOK):
                size = one.recv_into(buffer)
                schedule.add(time.monotonic(), port, bytes(view[:size]))

    def _send(self, target: int, frame: bytes) -> None:
        """Frames leave a port in order; those for which even the waiting room is full are dropped, as by any router."""
        waiting = self._waiting[target]
        if waiting or not self._try(target, frame):
            if self._waiting_bytes[target] + len(frame) > self._queue_bytes[target]:
                self._schedule.overflowed += num_packets(frame)
            else:
                waiting.append(frame)
                self._waiting_bytes[target] += len(frame)

    def _send_waiting(self, target: int) -> None:
        waiting = self._waiting[target]
        while waiting and self._try(target, waiting[0]):
            self._waiting_bytes[target] -= len(waiting.popleft())

    def _try(self, target: int, frame: bytes) -> bool:
        """Hand a frame to a port's token bucket; False if its socket has too many there already."""
        try:
            self._sockets[target].send(frame)
        except BlockingIOError:
            return False
        except OSError:  # the bucket's queue is full
            self._schedule.overflowed += num_packets(frame)
        else:
            self._schedule.carried += num_packets(frame)
        return True

    def _obey(self) -> bool:
        """Read lines of JSON; False when there are no more."""
        piece = os.read(0, 1 << 16)
        self._control += piece
        while b"\n" in self._control:
            line, _, rest = self._control.partition(b"\n")
            self._control = bytearray(rest)
            asked = json.loads(line)
            if "links" in asked:
                self._schedule.set_links(asked["links"])
                self._set_queues(asked["ports"])
            _reply(self._counts())
        return bool(piece)

    def _counts(self) -> dict[str, int]:
        schedule = self._schedule
        return {"carried": schedule.carried, "lost": schedule.lost, "overflowed": schedule.overflowed}


def _open(device: str) -> socket.socket:
    one = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    one.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    one.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    _set_buffer(one, socket.SO_RCVBUF, _SO_RCVBUFFORCE, _RECEIVE_BUFFER)
    one.bind((device, _ETH_P_ALL))
    one.setblocking(False)
    return one


def _set_buffer(one: socket.socket, option: int, forced: int, size: int) -> None:
    """As large as asked for, or where that takes the rights of the machine's root, as large as all may have."""
    try:
        one.setsockopt(socket.SOL_SOCKET, forced, size)
    except PermissionError:
        one.setsockopt(socket.SOL_SOCKET, option, size)


def _reply(answer: dict[str, int]) -> None:
    os.write(1, json.dumps(answer).encode() + b"\n")


def main() -> None:
    """See above."""
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(0, 1)  # a byte at a time: what follows the line is for the loop
        if not piece:
            return
        line += piece
    asked = json.loads(line)
    relay = Relay(asked["ports"], asked["links"], asked["seed"])
    gc.disable()  # there are no cycles, and a look at all frames takes its time
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, _PRIORITY)
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, _TIMERSLACK_NANOSECONDS)
    _reply({"ready": os.getpid()})
    relay.run()


if __name__ == "__main__":
    main()
