"""A link between replicas, and how people write and read rates, times and sizes. Knows nothing of training."""

import math
import re
from dataclasses import dataclass, replace

# TCP over Ethernet: 1448 of the 1514 bytes of a full frame are the sender's own. The rate of a link counts whole frames.
TCP_PAYLOAD_SHARE = 1448 / 1514
# What TCP sends after a pause before it has heard anything: ten segments.
FIRST_WINDOW_BYTES = 10 * 1448
# Linux halves the window for each time-out, 0.2 s and a round trip, that a connection is idle. Taken as all or nothing.
LONGEST_SHORT_PAUSE_SECONDS = 0.5

_NUMBER_AND_UNIT = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*([a-zA-Z/µμ]*)\s*", re.ASCII)
_BIT_UNIT = re.compile(r"([kmgt]?)(?:bits?/s|bits?|bps|b/s|b)", re.IGNORECASE)
_BYTE_UNIT = re.compile(r"([kKmMgGtT]?)(?:B|B/s|Bps|[bB]ytes?|[bB]ytes?/s)")
_UNCLEAR_UNIT = re.compile(r"([kmgt])b(?:/s)?")
_DECIMAL_PREFIX = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_SECONDS_PER_UNIT = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9}


@dataclass(frozen=True)
class Link:
    """What joins one replica to the others: a rate per direction, and the time to the other end and back.

    ``payload_share`` is the part of the rate that carries the sender's bytes; the rest is packet headers. ``burst_bytes``
    pass at once after a pause, as a token bucket lets them. ``window_bytes`` may be under way at first after a long pause,
    and twice as many with every round trip: TCP's slow start. None or 0: there is none, as on a link that is not TCP's.
    """

    bits_per_second: float
    round_trip_seconds: float
    payload_share: float = TCP_PAYLOAD_SHARE
    burst_bytes: float = 0.0
    window_bytes: float | None = FIRST_WINDOW_BYTES

    def __post_init__(self) -> None:
        """Refuse a link on which no time can be predicted."""
        _check_range("bits_per_second", self.bits_per_second, allow_zero=False)
        _check_range("round_trip_seconds", self.round_trip_seconds, allow_zero=True)
        if not 0 < self.payload_share <= 1:
            raise ValueError(f"payload_share={self.payload_share!r} must be above 0 and at most 1; leave it out for TCP")
        _check_range("burst_bytes", self.burst_bytes, allow_zero=True)
        if self.window_bytes is not None and not self.window_bytes >= 0:
            raise ValueError(f"window_bytes={self.window_bytes!r} must be above 0, or None for no slow start")

    @property
    def one_way_seconds(self) -> float:
        """Half of the round trip."""
        return self.round_trip_seconds / 2

    @property
    def bytes_per_second(self) -> float:
        """The sender's own bytes per second, headers not counted."""
        return self.bits_per_second / 8 * self.payload_share

    def after(self, pause_seconds: float) -> "Link":
        """The link as messages find it that follow such a pause: TCP keeps its window through a short one."""
        return self if pause_seconds > LONGEST_SHORT_PAUSE_SECONDS else replace(self, window_bytes=None)


def parse_bandwidth(text: str, name: str = "bandwidth") -> float:
    """Bits per second from ``100Mbit``, ``1 Gbit``, ``10Gbps`` or ``2.5gbit/s``.

    ``name`` is what an error calls the value. Bytes (``MB/s``) are refused, and ``mb``, which some mean for them: a rate
    that is wrong by 8 is a bad plan.
    """
    number, unit = _split(text, name, "a number with kbit, Mbit, Gbit or Tbit, such as 100Mbit")
    if unclear := _UNCLEAR_UNIT.fullmatch(unit):
        bits = f"{unclear.group(1)}bit"
        raise ValueError(
            f"{name}={text!r} may mean bits or bytes; write {number:g}{bits}, or {number * 8:g}{bits} if it is bytes"
        )
    if in_bytes := _BYTE_UNIT.fullmatch(unit):
        raise ValueError(f"{name}={text!r} is in bytes; write bits per second, such as {number * 8:g}{in_bytes.group(1)}bit")
    match = _BIT_UNIT.fullmatch(unit)
    rate = _check_range(name, number * _DECIMAL_PREFIX[match.group(1).lower() if match else ""], allow_zero=False, text=text)
    if match is None:
        raise ValueError(f"{name}={text!r} has {_which(unit)}; write kbit, Mbit, Gbit or Tbit, such as 100Mbit")
    return rate


def parse_seconds(text: str, name: str = "time", *, allow_zero: bool = False) -> float:
    """Seconds from ``20ms``, ``0.5s`` or ``80us``; ``name`` is what an error calls the value.

    A round trip may be 0 (``allow_zero``), the time of a step may not.
    """
    number, unit = _split(text, name, "a number with s, ms, us or ns, such as 20ms")
    seconds = _check_range(name, number * _SECONDS_PER_UNIT.get(unit, 1.0), allow_zero=allow_zero, text=text)
    if unit not in _SECONDS_PER_UNIT and (seconds or unit):
        raise ValueError(f"{name}={text!r} has {_which(unit)}; write s, ms, us or ns, such as 20ms")
    return seconds


def format_bytes(num_bytes: float) -> str:
    """``11.5 MB``: three digits, decimal units."""
    return _scaled(num_bytes, (("B", 1.0), ("kB", 1e3), ("MB", 1e6), ("GB", 1e9), ("TB", 1e12)))


def format_bandwidth(bits_per_second: float) -> str:
    """``100 Mbit/s``."""
    return _scaled(bits_per_second, (("bit/s", 1.0), ("kbit/s", 1e3), ("Mbit/s", 1e6), ("Gbit/s", 1e9), ("Tbit/s", 1e12)))


def format_seconds(seconds: float) -> str:
    """``20 ms``."""
    return _scaled(seconds, (("ns", 1e-9), ("us", 1e-6), ("ms", 1e-3), ("s", 1.0)))


def _split(text: str, name: str, expected: str) -> tuple[float, str]:
    match = _NUMBER_AND_UNIT.fullmatch(text)
    if not match:
        raise ValueError(f"{name}={text!r} is not {expected}")
    return float(match.group(1)), match.group(2)


def _which(unit: str) -> str:
    return f"the unknown unit {unit!r}" if unit else "no unit"


def _check_range(name: str, value: float, *, allow_zero: bool, text: str | None = None) -> float:
    if not math.isfinite(value) or value < 0 or (value == 0 and not allow_zero):
        least = "0 or more" if allow_zero else "above 0"
        raise ValueError(f"{name}={value if text is None else text!r} must be a finite number {least}")
    return value


def _scaled(value: float, units: tuple[tuple[str, float], ...]) -> str:
    """The value in the largest unit in which it is at least 1 after rounding to three digits."""
    name, scale = units[0] if value else next(unit for unit in units if unit[1] == 1)
    for unit, size in units:
        if float(f"{abs(value) / size:.3g}") >= 1:
            name, scale = unit, size
    number = float(f"{value / scale:.3g}")
    return f"{number:.0f} {name}" if abs(number) >= 100 else f"{number:g} {name}"
