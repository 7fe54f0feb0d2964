"""The time model: what one step of each method asks of the device and of the link, and how long that takes.

Letters: R replicas, G bytes of all gradients, P bytes of one replica's payload, C compute seconds (forward and backward),
w bytes per second of the link, t one-way seconds (half of the round trip), a one-way trips per round.

    transfer = received / w + slow start,  latency = a * rounds * t,  network = transfer + latency
    hidden   = overlap * 2/3 * C for DDP, and for DeMo if it overlaps, else 0
    exposed  = max(0, network - hidden) for DDP, unless its number of buckets is given
             = what is left of n buckets, see `in_buckets`, for DeMo; in an owner exchange also all of the answers
    step     = C + optimizer + exposed
    efficiency = C / step

| exchange | received by each rank | rounds |
| --- | --- | --- |
| ring all-reduce | 2 (R - 1) / R * G | 2 (R - 1) |
| ring all-gather | (R - 1) * P | R - 1 |
| all-to-all | (R - 1) / R * P | 1 |

In all of them a rank also transmits what it receives, in the other direction of its link. Pure functions; no codecs, and no
shapes but for what the muon rule costs.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from thinwire.core.layout import matrix_shape
from thinwire.core.update_rules import UPDATE_RULES, orthogonalising_flops
from thinwire.exchange.choice import ALL_GATHER
from thinwire.planner.links import Link

# Backward computes two matrix products for each one of forward.
BACKWARD_SHARE = 2 / 3
PUBLISHED_COLLECTIVES_PER_TENSOR = 2
# In gloo a receiver first says that it is ready, so that a round costs a whole round trip.
TRIPS_PER_ROUND = 2
# gloo has two threads for them.
COLLECTIVES_AT_ONCE = 2


@dataclass(frozen=True)
class DeviceCosts:
    """What a step costs on a kind of device, apart from forward and backward: nanoseconds per parameter of one optimizer
    step, and how its usual collectives behave.

    ``ddp_overlap`` is the share of backward under which DDP can hide its all-reduce, ``demo_overlap`` that under which
    DeMo's buckets can leave with ``overlap=True`` (None: as for DDP). ``ddp_buckets`` is how many DDP has (None: endlessly
    many, its best case). ``trips_per_round`` is 2 where a receiver first tells the sender that it is ready, as gloo does, so
    that each round costs a whole round trip; 1 is the least there can be. ``decode_ns_per_parameter`` is what
    every payload but the first adds to DeMo's step, ``owner_ns_per_parameter`` what an owner exchange adds for each
    parameter that a replica owns. ``collectives_at_once`` is how many of a group run together. ``muon_flops_per_second`` is
    the rate at which the muon rule makes matrices orthogonal, which its step does besides.
    """

    adamw_ns_per_parameter: float
    demo_ns_per_parameter: float
    published_ns_per_parameter: float
    ddp_overlap: float
    trips_per_round: int = TRIPS_PER_ROUND
    demo_overlap: float | None = None
    ddp_buckets: int | None = None
    decode_ns_per_parameter: float = 0.0
    owner_ns_per_parameter: float = 0.0
    collectives_at_once: int = COLLECTIVES_AT_ONCE
    muon_flops_per_second: float = 1e11

    def __post_init__(self) -> None:
        """Refuse costs that make no sense."""
        for name in (f"{method}_ns_per_parameter" for method in ("adamw", "demo", "published", "decode", "owner")):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)!r} must be a number of at least 0")
        for name in ("ddp_overlap", "demo_overlap"):
            share = getattr(self, name)
            if share is not None and not 0 <= share <= 1:
                raise ValueError(f"{name}={share!r} must be from 0 (nothing is hidden) to 1 (all of backward)")
        if self.ddp_buckets is not None and self.ddp_buckets < 1:
            raise ValueError(f"ddp_buckets={self.ddp_buckets!r} must be at least 1; leave it out for DDP's best case")
        if self.trips_per_round not in (1, 2):
            raise ValueError(f"trips_per_round={self.trips_per_round!r} must be 1 or 2")
        if self.collectives_at_once < 1:
            raise ValueError(f"collectives_at_once={self.collectives_at_once!r} must be at least 1")
        if not self.muon_flops_per_second > 0:
            raise ValueError(f"muon_flops_per_second={self.muon_flops_per_second!r} must be a number above 0")

    def rule_seconds(self, update: str, shapes: Iterable[Sequence[int]], chunk: int) -> float:
        """What an update rule adds to the sign rule's step, for parameters of these shapes: orthogonalising, with muon."""
        if not UPDATE_RULES[update].whole_matrices:
            return 0.0
        matrices = (matrix_shape(tuple(shape), chunk) for shape in shapes)
        return sum(count * orthogonalising_flops(*matrix) for count, *matrix in matrices) / self.muon_flops_per_second


# Where each number is from: docs/planner.md.
DEVICES = {
    "cpu": DeviceCosts(
        adamw_ns_per_parameter=1.5,
        demo_ns_per_parameter=10.0,
        published_ns_per_parameter=30.0,
        ddp_overlap=0.3,
        demo_overlap=1.0,
        decode_ns_per_parameter=1.6,
        owner_ns_per_parameter=8.0,
        muon_flops_per_second=1.2e11,
    ),
    "gpu": DeviceCosts(
        adamw_ns_per_parameter=0.0081,
        demo_ns_per_parameter=0.0077,
        published_ns_per_parameter=0.19,
        ddp_overlap=1.0,
        owner_ns_per_parameter=0.19,
        muon_flops_per_second=2.9e14,
    ),
}


@dataclass(frozen=True)
class Exchange:
    """What one rank sends and receives, and in how many rounds that must follow each other.

    ``sent_bytes`` counts a message once, whoever receives it, as `DeMo.traffic` does. ``received_bytes`` is what the link
    carries in each direction: in a ring a rank passes on as much as it receives. ``num_pauses`` is how often the link was
    idle before, if only for a moment. Where replicas speak in one of ``period`` steps, all is an average over these. A round
    is over ``num_streams`` connections at once, each of which has a window of its own.
    """

    sent_bytes: int
    received_bytes: int
    num_rounds: float
    num_pauses: int = 1
    period: int = 1
    num_streams: int = 1

    @property
    def message_bytes(self) -> float:
        """What one rank tells its neighbour in a round, on average."""
        return self.received_bytes / self.num_rounds if self.num_rounds else 0.0

    def __add__(self, other: "Exchange") -> "Exchange":
        """One after the other."""
        return Exchange(
            self.sent_bytes + other.sent_bytes,
            self.received_bytes + other.received_bytes,
            self.num_rounds + other.num_rounds,
            self.num_pauses + other.num_pauses,
        )


@dataclass(frozen=True)
class Workload:
    """One step of a method on a device, whatever the link. ``hidden_seconds``: the network time backward can hide.
    ``num_buckets``: the exchange is in so many parts, the last of which begins after backward; None: in endlessly many.
    ``answers`` are owners' to what they got in the exchange. ``exchange_name``: which one, where there are two."""

    method: str
    topk: int | None
    values: str | None
    exchange: Exchange
    compute_seconds: float
    optimizer_seconds: float
    hidden_seconds: float = 0.0
    trips_per_round: int = TRIPS_PER_ROUND
    num_buckets: int | None = None
    answers: Exchange | None = None
    collectives_at_once: int = COLLECTIVES_AT_ONCE
    exchange_name: str | None = None

    @property
    def sent_bytes(self) -> int:
        """Of the exchange and of answers."""
        return self.exchange.sent_bytes + (0 if self.answers is None else self.answers.sent_bytes)

    @property
    def received_bytes(self) -> int:
        """Of the exchange and of answers."""
        return self.exchange.received_bytes + (0 if self.answers is None else self.answers.received_bytes)

    @property
    def pause_seconds(self) -> float:
        """How long the link is idle between two steps' exchanges."""
        between = self.compute_seconds + self.optimizer_seconds
        return self.exchange.period * between - self.hidden_seconds

    @property
    def label(self) -> str:
        """The method and its settings in a few words."""
        return self.method if self.topk is None else f"{self.method}, k={self.topk}, {self.values}"


@dataclass(frozen=True)
class Prediction:
    """One step of a method on a link. ``exposed_seconds`` is the network time that nothing hides. Where a method has two
    exchanges, ``exchange_name`` is the one that the figures are for, ``other_step_seconds`` the step with the other."""

    method: str
    topk: int | None
    values: str | None
    label: str
    sent_bytes: int
    received_bytes: int
    compute_seconds: float
    optimizer_seconds: float
    network_seconds: float
    exposed_seconds: float
    exchange_name: str | None = None
    other_step_seconds: float | None = None

    @property
    def local_seconds(self) -> float:
        """The step if the network took no time."""
        return self.compute_seconds + self.optimizer_seconds

    @property
    def step_seconds(self) -> float:
        """The whole step."""
        return self.local_seconds + self.exposed_seconds

    @property
    def efficiency(self) -> float:
        """The share of the step spent in forward and backward."""
        return self.compute_seconds / self.step_seconds

    @property
    def slowdown(self) -> float:
        """How many times longer the step is than forward and backward alone."""
        return self.step_seconds / self.compute_seconds

    @property
    def network_share(self) -> float:
        """The exposed network time as a part of the local time."""
        return self.exposed_seconds / self.local_seconds


def num_rounds(collective: str, num_replicas: int) -> int:
    """The rounds of a collective that must follow each other: rings for two of them, all at once for an all-to-all."""
    others = num_replicas - 1
    return {"all-reduce": 2 * others, "all-gather": others, "all-to-all": min(1, others)}[collective]


def ring_all_reduce(num_bytes: int, num_replicas: int) -> Exchange:
    """Sum ``num_bytes`` over all ranks: each sends 2 (R - 1) / R of them, in 2 (R - 1) rounds."""
    carried = -(-2 * (num_replicas - 1) * num_bytes // num_replicas)
    return Exchange(carried, carried, num_rounds("all-reduce", num_replicas))


def ring_all_gather(num_bytes: int, num_replicas: int, num_collectives: int = 1) -> Exchange:
    """Bring ``num_bytes`` of each rank to all: R - 1 messages arrive, in R - 1 rounds per collective."""
    rounds = num_rounds("all-gather", num_replicas)
    return Exchange(num_bytes if rounds else 0, rounds * num_bytes, rounds * num_collectives)


def all_to_all(num_bytes: int, num_replicas: int) -> Exchange:
    """Bring ``num_bytes`` of each rank to each other one, in one round: nothing is passed on."""
    num_others = num_replicas - 1
    return Exchange(num_others * num_bytes, num_others * num_bytes, min(1, num_others), num_streams=max(1, num_others))


def tree_broadcast(num_bytes: int, num_replicas: int) -> Exchange:
    """Bring one rank's ``num_bytes`` to all: in every round those who have them pass them on, so that the first rank's link
    carries them as often as there are rounds."""
    rounds = (num_replicas - 1).bit_length()
    return Exchange(num_bytes if rounds else 0, rounds * num_bytes, rounds)


def transfer_seconds(exchange: Exchange, link: Link) -> float:
    """``received / w``: how long the link is busy with the bytes; less the bursts that a shaper lets pass, and more where
    the link has a slow start.

    A step's first message pays for that. Those that follow find a window that has grown to hold as much as it did."""
    passed = min(exchange.received_bytes, link.burst_bytes * exchange.num_pauses)
    seconds = (exchange.received_bytes - passed) / link.bytes_per_second
    return seconds + slow_start_seconds(exchange.message_bytes, link, exchange.num_streams) / exchange.period


def slow_start_seconds(num_bytes: float, link: Link, num_streams: int = 1) -> float:
    """What a window that begins small and doubles costs: it is filled once in each round trip, until it fills the link.
    Those of several streams add up."""
    seconds, left, window = 0.0, num_bytes, num_streams * (link.window_bytes or math.inf)
    while left > window and window < link.bytes_per_second * link.round_trip_seconds:
        seconds += link.round_trip_seconds - window / link.bytes_per_second
        left, window = left - window, 2 * window
    return seconds


def latency_seconds(exchange: Exchange, link: Link, trips_per_round: int) -> float:
    """``a * rounds * t``: what rounds that wait for each other take, however few the bytes."""
    return trips_per_round * exchange.num_rounds * link.one_way_seconds


def network_seconds(exchange: Exchange, link: Link, trips_per_round: int) -> float:
    """Transfer and latency: bytes at the link's rate, once TCP has found it, and rounds that wait for each other."""
    return transfer_seconds(exchange, link) + latency_seconds(exchange, link, trips_per_round)


def workload_seconds(workload: Workload, link: Link, hidden_seconds: float) -> float:
    """The network time of a step that is left where so much of it can hide, on the link as the pause before has left it.
    Answers begin when all else is there, and hide behind nothing."""
    exchange, trips = workload.exchange, workload.trips_per_round
    buckets = (link, trips, workload.num_buckets or 1, workload.collectives_at_once)
    if workload.num_buckets is None:
        left = max(0.0, network_seconds(exchange, link, trips) - hidden_seconds)
    else:
        left = in_buckets(exchange, *buckets, hidden_seconds)
    return left if workload.answers is None else left + in_buckets(workload.answers, *buckets, 0.0)


def in_buckets(
    exchange: Exchange, link: Link, trips_per_round: int, num_buckets: int, at_once: int, hidden_seconds: float
) -> float:
    """What is left of an exchange in n buckets, the i-th of which is ready after i / n of what can hide them.

    Bytes leave in order, the first bucket's with a slow start; latencies overlap, but only so many buckets are under way at
    once.
    """
    start = slow_start_seconds(exchange.message_bytes / num_buckets, link, exchange.num_streams) / exchange.period
    transfer = transfer_seconds(exchange, replace(link, window_bytes=None)) / num_buckets
    latency = latency_seconds(exchange, link, trips_per_round)
    free_at, ends = 0.0, deque[float](maxlen=at_once)
    for bucket in range(1, num_buckets + 1):
        has_turn = ends[0] if len(ends) == at_once else 0.0
        begins = max(free_at, has_turn, bucket / num_buckets * hidden_seconds)
        free_at = begins + transfer + (start if bucket == 1 else 0.0)
        ends.append(free_at + latency)
    return ends[-1] - hidden_seconds


def ddp(
    num_parameters: int, bytes_per_element: int, name: str, num_replicas: int, compute_seconds: float, costs: DeviceCosts
) -> Workload:
    """AdamW on gradients that DDP averages. The latency is that of one all-reduce: the best case for DDP's buckets."""
    return Workload(
        method=f"DDP AdamW, {name}",
        topk=None,
        values=None,
        exchange=ring_all_reduce(num_parameters * bytes_per_element, num_replicas),
        compute_seconds=compute_seconds,
        optimizer_seconds=num_parameters * costs.adamw_ns_per_parameter * 1e-9,
        hidden_seconds=costs.ddp_overlap * BACKWARD_SHARE * compute_seconds,
        trips_per_round=costs.trips_per_round,
        num_buckets=costs.ddp_buckets,
    )


def published_demo(
    num_parameters: int,
    payload_bytes: int,
    num_tensors: int,
    topk: int,
    num_replicas: int,
    compute_seconds: float,
    costs: DeviceCosts,
) -> Workload:
    """DeMo as its authors published it: two blocking all-gathers per tensor, which pay the latency each."""
    return Workload(
        method="published DeMo",
        topk=topk,
        values="float32",
        exchange=replace(
            ring_all_gather(payload_bytes, num_replicas, PUBLISHED_COLLECTIVES_PER_TENSOR * num_tensors),
            num_pauses=max(1, num_tensors),
        ),
        compute_seconds=compute_seconds,
        optimizer_seconds=num_parameters * costs.published_ns_per_parameter * 1e-9,
        trips_per_round=costs.trips_per_round,
    )


def thinwire_demo(
    num_parameters: int,
    payload_bytes: int,
    topk: int,
    values: str,
    num_replicas: int,
    compute_seconds: float,
    costs: DeviceCosts,
    num_buckets: int = 1,
) -> Workload:
    """Thinwire's DeMo: one all-gather of all payloads after backward, or, with more than one bucket, ``overlap=True``. What
    encoding costs is not hidden: it takes the device's time wherever it runs."""
    overlap = costs.ddp_overlap if costs.demo_overlap is None else costs.demo_overlap
    ns_per_parameter = costs.demo_ns_per_parameter + (num_replicas - 1) * costs.decode_ns_per_parameter
    return Workload(
        method="Thinwire DeMo",
        topk=topk,
        values=values,
        exchange=ring_all_gather(payload_bytes, num_replicas),
        compute_seconds=compute_seconds,
        optimizer_seconds=num_parameters * ns_per_parameter * 1e-9,
        hidden_seconds=overlap * BACKWARD_SHARE * compute_seconds if num_buckets > 1 else 0.0,
        trips_per_round=costs.trips_per_round,
        num_buckets=num_buckets,
        collectives_at_once=costs.collectives_at_once,
        exchange_name=ALL_GATHER,
    )


def predict(workload: Workload, link: Link) -> Prediction:
    """The time of one step on this link, many steps after the first."""
    found = link.after(workload.pause_seconds)
    return Prediction(
        method=workload.method,
        topk=workload.topk,
        values=workload.values,
        label=workload.label,
        sent_bytes=workload.sent_bytes,
        received_bytes=workload.received_bytes,
        compute_seconds=workload.compute_seconds,
        optimizer_seconds=workload.optimizer_seconds,
        network_seconds=workload_seconds(workload, found, 0.0),
        exposed_seconds=workload_seconds(workload, found, workload.hidden_seconds),
        exchange_name=workload.exchange_name,
    )
