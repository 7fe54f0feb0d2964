"""The relay's decisions, on a clock and frames made here."""

import random
import struct

import pytest

from thinwire.lab import relay
from thinwire.lab.relay import Schedule, num_packets, without

MACS = [bytes((2, 0x77, 0, 0, 0, number)) for number in range(4)]
PREFIX = struct.Struct("=BBHHHH")


def frame(target: bytes, text: bytes = b"") -> bytes:
    return PREFIX.pack(0, 0, 0, 0, 0, 0) + target + MACS[0] + b"\x08\x00" + text


def internet_sum(data: bytes) -> int:
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total > 0xFFFF:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def tcp_frame(payload: bytes, size: int, sequence: int = 4_294_967_000, flags: int = 0x99, option_words: int = 3) -> bytes:
    """One frame that stands for many packets, as the kernel hands it out: sums of the pseudo headers alone."""
    header_bytes = 20 + 4 * option_words
    length = 20 + header_bytes + len(payload)
    ip = bytearray(struct.pack("!BBHHHBBH4s4s", 0x45, 0, length, 65_535, 0, 64, 6, 0, b"\x0a\x4d\0\1", b"\x0a\x4d\0\2"))
    struct.pack_into("!H", ip, 10, ~internet_sum(bytes(ip)) & 0xFFFF)
    pseudo = bytes(ip[12:20]) + struct.pack("!BBH", 0, 6, header_bytes + len(payload))
    offset = (header_bytes // 4) << 4
    tcp = struct.pack("!HHIIBBHHH", 5000, 6000, sequence, 7, offset, flags, 512, internet_sum(pseudo), 0) + bytes(
        4 * option_words
    )
    return (
        PREFIX.pack(1, 1, 14 + 20 + header_bytes, size, 34, 16) + MACS[1] + MACS[0] + b"\x08\x00" + bytes(ip) + tcp + payload
    )


def packets(whole: bytes) -> list[tuple[int, int, int, bytes]]:
    """(identification, sequence, flags, payload) of the packets of a frame; its sums are checked on the way."""
    flags, kind, _, size, start, offset = PREFIX.unpack_from(whole)
    assert (flags, start, offset) == (1, 34, 16)
    ip = whole[24:44]
    assert internet_sum(ip) == 0xFFFF
    (length, identification), tcp = struct.unpack_from("!HH", ip, 2), whole[44:]
    assert length == 20 + len(tcp)
    header_bytes = 4 * (tcp[12] >> 4)
    assert struct.unpack_from("!H", tcp, 16)[0] == internet_sum(ip[12:20] + struct.pack("!BBH", 0, 6, len(tcp)))
    (sequence,), payload = struct.unpack_from("!I", tcp, 4), tcp[header_bytes:]
    if kind == 0:
        assert size == 0
        return [(identification, sequence, tcp[13], payload)]
    assert len(payload) > size
    found = []
    for number, place in enumerate(range(0, len(payload), size)):
        is_first, is_last = number == 0, place + size >= len(payload)
        now = tcp[13] & ~(0 if is_last else 0x09) & ~(0 if is_first else 0x80)
        found.append(((identification + number) % 2**16, (sequence + place) % 2**32, now, payload[place : place + size]))
    return found


def test_frames_wait_for_the_delay_of_both_links() -> None:
    schedule = Schedule([[MACS[0]], [MACS[1]], [MACS[2]]], [(0.010, 0, 0), (0.005, 0, 0), (0.0, 0, 0)])
    schedule.add(1.0, 0, frame(MACS[1]))
    schedule.add(1.0, 2, frame(MACS[1]))
    assert schedule.wait_seconds(1.001) == pytest.approx(0.004)
    assert [target for target, _ in schedule.take(1.0051)] == [1]
    assert list(schedule.take(1.0149)) == []
    assert [target for target, _ in schedule.take(1.0151)] == [1]
    assert schedule.wait_seconds(2.0) is None
    assert schedule.held_bytes == 0


def test_chance_delays_within_its_bounds_and_never_changes_the_order_of_a_way() -> None:
    schedule = Schedule([[MACS[0]], [MACS[1]], [MACS[2]]], [(0.01, 0.004, 0), (0.01, 0.002, 0), (0.01, 0, 0)], seed=3)
    sent = [(0.0001 * number, source) for number in range(500) for source in (0, 2)]
    for number, (now, source) in enumerate(sent):
        schedule.add(now, source, frame(MACS[1], str(number).encode()))
    arrived: dict[int, list[int]] = {0: [], 2: []}
    delays = []
    for tick in range(2000):
        now = 0.00005 * tick
        for target, got in schedule.take(now):
            number = int(got[24:])
            arrived[sent[number][1]].append(number)
            delays.append(now - sent[number][0])
            assert target == 1
    assert len(delays) == 1000
    assert arrived[0] == sorted(arrived[0])
    assert arrived[2] == sorted(arrived[2])
    assert min(delays) >= 0.02 - 1e-9
    assert max(delays) <= 0.026 + 0.0001
    assert max(delays) - min(delays) > 0.002


def test_a_shorter_delay_does_not_overtake_what_is_on_its_way() -> None:
    schedule = Schedule([[MACS[0]], [MACS[1]]], [(0.1, 0, 0), (0.1, 0, 0)])
    schedule.add(0.0, 0, frame(MACS[1], b"first"))
    schedule.set_links([(0, 0, 0), (0, 0, 0)])
    schedule.add(0.01, 0, frame(MACS[1], b"second"))
    schedule.add(0.01, 1, frame(MACS[0], b"back"))
    assert [got[24:] for _, got in schedule.take(0.02)] == [b"back"]
    assert [got[24:] for _, got in schedule.take(0.3)] == [b"first", b"second"]


def test_broadcasts_go_to_all_others_and_strangers_nowhere() -> None:
    schedule = Schedule([[MACS[0], MACS[3]], [MACS[1]], [MACS[2]]], [(0, 0, 0)] * 3)
    schedule.add(0.0, 1, frame(b"\xff" * 6))
    assert sorted(target for target, _ in schedule.take(0.0)) == [0, 2]
    schedule.add(0.0, 1, frame(b"\x02stran"))
    schedule.add(0.0, 0, frame(MACS[3]))  # both on the same island
    assert list(schedule.take(0.0)) == []
    schedule.add(0.0, 1, frame(MACS[3]))
    assert [target for target, _ in schedule.take(0.0)] == [0]


def test_loss_is_that_of_both_links_and_counts_packets() -> None:
    schedule = Schedule([[MACS[0]], [MACS[1]]], [(0, 0, 0.05), (0, 0, 0.1)], seed=1)
    for _ in range(400):
        schedule.add(0.0, 0, tcp_frame(bytes(10 * 1448), 1448))
    arrived = sum(num_packets(got) for _, got in schedule.take(0.0))
    assert arrived + schedule.lost == 4000
    # 14.5 % of 4,000, within four standard deviations.
    assert abs(schedule.lost - 580) < 4 * (4000 * 0.145 * 0.855) ** 0.5
    again = Schedule([[MACS[0]], [MACS[1]]], [(0, 0, 0.05), (0, 0, 0.1)], seed=1)
    for _ in range(400):
        again.add(0.0, 0, tcp_frame(bytes(10 * 1448), 1448))
    assert again.lost == schedule.lost


@pytest.mark.parametrize("num_bytes", [1449, 2 * 1448, 5 * 1448 - 3, 44 * 1448 + 100])
@pytest.mark.parametrize("option_words", [0, 3])
def test_lost_packets_are_cut_out_of_their_frame(num_bytes: int, option_words: int) -> None:
    chance = random.Random(num_bytes)
    whole = tcp_frame(chance.randbytes(num_bytes), 1448, option_words=option_words)
    every = packets(whole)
    assert num_packets(whole) == len(every) == -(-num_bytes // 1448)
    for _ in range(20):
        is_lost = [chance.random() < 0.3 for _ in every]
        left = [packet for part in without(whole, is_lost) for packet in packets(part)]
        assert left == [packet for packet, gone in zip(every, is_lost, strict=True) if not gone]
    assert without(whole, [True] * len(every)) == []
    assert without(whole, [False] * len(every)) == [whole]


def test_more_than_can_be_held_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "_MOST_HELD_BYTES", 300)
    schedule = Schedule([[MACS[0]], [MACS[1]]], [(1.0, 0, 0), (0, 0, 0)])
    for _ in range(5):
        schedule.add(0.0, 0, frame(MACS[1], bytes(100)))
    assert schedule.overflowed == 2
    assert len(list(schedule.take(1.0))) == 3
    schedule.add(1.0, 0, frame(MACS[1], bytes(100)))
    assert schedule.overflowed == 2
