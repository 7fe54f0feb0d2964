"""From a link to the ``tc`` commands that make it. Pure: texts in, texts out.

A rate is a token bucket (``tbf``): ``burst`` bytes may leave at once after a pause, ``limit`` bytes wait in its queue before
it drops.
"""

import bisect
import math
from dataclasses import dataclass

from thinwire.planner.link_spec import LinkSpec

# Rate in bits per second, burst and limit in bytes; between them both grow in proportion to powers of the rate.
_KNOWN = ((10e6, 16 << 10, 1 << 20), (100e6, 128 << 10, 4 << 20), (1e9, 256 << 10, 16 << 20))
# Two full frames, and a queue that holds a connection's first windows.
_LEAST_BURST, _LEAST_LIMIT = 4 << 10, 64 << 10
# What a queue holds in round trips of its link: one keeps the link busy after a sender has halved its window.
_ROUND_TRIPS = 1.5
_FRAME_BYTES = 1514


@dataclass(frozen=True)
class Bucket:
    """The settings of one direction's token bucket."""

    rate_bits: int
    burst_bytes: int
    limit_bytes: int


def bucket(rate_bits: float, round_trip_seconds: float = 0.0) -> Bucket:
    """What fits a rate, and the data that are on their way at that rate."""
    burst, limit = _between(rate_bits, 1), _between(rate_bits, 2)
    in_flight = rate_bits / 8 * round_trip_seconds * _ROUND_TRIPS
    return Bucket(round(rate_bits), max(_LEAST_BURST, round(burst)), max(_LEAST_LIMIT, round(limit), round(in_flight)))


def _between(rate_bits: float, column: int) -> float:
    """Straight lines in the logarithms of ``_KNOWN``; outside of it in proportion to the rate."""
    rates = [row[0] for row in _KNOWN]
    after = bisect.bisect(rates, rate_bits)
    if after in (0, len(_KNOWN)):
        nearest = _KNOWN[min(after, len(_KNOWN) - 1)]
        return nearest[column] * rate_bits / nearest[0]
    low, high = _KNOWN[after - 1], _KNOWN[after]
    share = math.log(rate_bits / low[0]) / math.log(high[0] / low[0])
    return float(low[column] * (high[column] / low[column]) ** share)


def rate_commands(device: str, rate_bits: float | None, round_trip_seconds: float) -> list[str]:
    """Lines for ``tc -batch``: give a device this rate. The same lines change the rate of one in use."""
    if rate_bits is None:
        # Deleting fails where there is nothing to delete, so there is something first.
        return [f"qdisc replace dev {device} root pfifo", f"qdisc del dev {device} root"]
    chosen = bucket(rate_bits, round_trip_seconds)
    return [
        f"qdisc replace dev {device} root handle 1: tbf rate {chosen.rate_bits}bit burst {chosen.burst_bytes}b "
        f"limit {chosen.limit_bytes}b"
    ]


def netem_commands(device: str, rate_bits: float | None, link: LinkSpec) -> list[str]:
    """The same with ``netem`` under the bucket: the link's share of the delay, its chance delay and its loss, one way.

    netem's chance delay goes both ways from its mean and may change the order of packets."""
    limit_bytes = bucket(rate_bits or 10e9, link.round_trip_seconds).limit_bytes
    in_flight = (rate_bits or 10e9) / 8 * (link.round_trip_seconds + link.jitter_seconds)
    settings = [f"limit {math.ceil((limit_bytes + in_flight) / _FRAME_BYTES)}"]
    mean = link.round_trip_seconds / 4 + link.jitter_seconds / 2
    if mean:
        settings.append(
            f"delay {mean * 1e6:.0f}us" + (f" {link.jitter_seconds / 2 * 1e6:.0f}us" * bool(link.jitter_seconds))
        )
    if link.loss:
        settings.append(f"loss {100 * link.loss:g}%")
    netem = f"netem {' '.join(settings)}"
    if rate_bits is None:
        return [f"qdisc replace dev {device} root handle 2: {netem}"]
    return [
        *rate_commands(device, rate_bits, link.round_trip_seconds),
        f"qdisc replace dev {device} parent 1:1 handle 10: {netem}",
    ]
