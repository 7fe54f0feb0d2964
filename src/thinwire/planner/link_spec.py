"""A link as people write it: ``100mbit,20ms``, ``100mbit/20mbit,80ms,jitter=5ms,loss=0.1%`` or ``unshaped``."""

import math
import re
from dataclasses import dataclass

from thinwire.planner.links import Link, format_bandwidth, format_seconds, parse_bandwidth, parse_seconds

UNSHAPED = "unshaped"
_FORM = "such as 100mbit,20ms or 100mbit/20mbit,80ms,jitter=5ms,loss=0.1% (rate up/down, round trip), or unshaped"
# What a link without a limit is taken to carry, where a number is needed.
_UNLIMITED_BITS = 1e12
_MOST_SECONDS, _MOST_LOSS = 10.0, 0.5


@dataclass(frozen=True)
class LinkSpec:
    """One host's link. Rates in bits per second, each way; None: no limit. ``round_trip_seconds`` is that between two hosts
    with such links, so each adds a quarter of it to what passes through it in either direction. ``jitter_seconds`` is the
    most that a packet is late by chance, ``loss`` the share of packets that vanish, each way."""

    up_bits: float | None = None
    down_bits: float | None = None
    round_trip_seconds: float = 0.0
    jitter_seconds: float = 0.0
    loss: float = 0.0

    @property
    def is_delayed(self) -> bool:
        """Whether packets must be held or dropped, besides the limit on the rate."""
        return self.round_trip_seconds > 0 or self.jitter_seconds > 0 or self.loss > 0

    @property
    def link(self) -> Link:
        """The link as the planner sees it, by its slower direction."""
        rates = [rate for rate in (self.up_bits, self.down_bits) if rate is not None]
        return Link(min(rates, default=_UNLIMITED_BITS), self.round_trip_seconds)

    def __str__(self) -> str:
        """As `parse_link` reads it."""
        rates = [UNSHAPED if rate is None else _short(format_bandwidth(rate)) for rate in (self.up_bits, self.down_bits)]
        parts = [rates[0] if rates[0] == rates[1] else "/".join(rates)]
        if self.round_trip_seconds:
            parts.append(_short(format_seconds(self.round_trip_seconds)))
        if self.jitter_seconds:
            parts.append(f"jitter={_short(format_seconds(self.jitter_seconds))}")
        if self.loss:
            parts.append(f"loss={100 * self.loss:g}%")
        return ",".join(parts)


def parse_link(text: str, name: str = "link") -> LinkSpec:
    """Read one; ``name`` is what an error calls the value."""
    # Of a rate the capitals count: 100MB is not 100mb.
    rate, *rest = (part.strip() for part in text.split(","))
    if not rate:
        raise ValueError(f"{name}={text!r} names no rate; write one {_FORM}")
    if re.fullmatch(r"[\d.]+\s*(?:s|ms|us|µs|μs|ns)", rate):
        raise ValueError(f"{name}={text!r} begins with a time; the rate comes first, {_FORM}")
    parts = re.split(r"/(?!s\s*(?:/|$))", rate)  # not at that of bit/s
    rates = [None if part.strip().lower() == UNSHAPED else parse_bandwidth(part, name) for part in parts]
    if len(rates) > 2:
        raise ValueError(f"{name}={text!r} has {len(rates)} rates; write one {_FORM}")
    found = {"round_trip": 0.0, "jitter": 0.0, "loss": 0.0}
    for part in map(str.lower, rest):
        key, has_key, value = part.partition("=")
        key, value = (key, value) if has_key else ("round_trip", part)
        if key not in found:
            raise ValueError(f"{name}={text!r} has the unknown part {part!r}; write one {_FORM}")
        what = f"the {key.replace('_', ' ')} of {name}"
        found[key] = _share(value, text, name) if key == "loss" else parse_seconds(value, what, allow_zero=True)
        if key != "loss" and found[key] > _MOST_SECONDS:
            raise ValueError(f"{name}={text!r}: {key} must be at most {_MOST_SECONDS:g} s")
    return LinkSpec(rates[0], rates[-1], found["round_trip"], found["jitter"], found["loss"])


def _share(value: str, text: str, name: str) -> float:
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*(%?)", value)
    share = float(match[1]) / (100 if match[2] else 1) if match else math.nan
    if not 0 <= share <= _MOST_LOSS:
        raise ValueError(f"{name}={text!r}: loss must be from 0 to {_MOST_LOSS:.0%}, such as loss=0.1%")
    return share


def _short(text: str) -> str:
    return text.replace(" ", "").removesuffix("/s").lower()
