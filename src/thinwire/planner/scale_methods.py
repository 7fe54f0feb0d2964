"""What a step of each way to exchange asks of devices and links, for many replicas and large models.

A method is a list of stages, each a collective that reaches all replicas, those of an island, or one of each island. What
that takes is in `scale`.

Letters: N parameters, R replicas, L replicas in an island, I = R / L islands, G bytes of all gradients in bf16, P bytes of a
payload, P2 bytes of the answers of all owners. Pure: nothing is printed, drawn or timed.
"""

import math
from dataclasses import dataclass
from functools import cache

from thinwire.core.errors import check_choice, check_float, check_int
from thinwire.exchange.plan import OWNER_TIMES, Coding, ExchangePlan, make_plan, with_owners
from thinwire.planner.cost import BACKWARD_SHARE, PUBLISHED_COLLECTIVES_PER_TENSOR, TRIPS_PER_ROUND
from thinwire.planner.links import Link
from thinwire.planner.report import PUBLISHED_BYTES_PER_COEFFICIENT, PUBLISHED_TOPK, tensors_from_count
from thinwire.planner.rounds import SCHEDULES, Schedule
from thinwire.wire.values import VALUE_CODECS

_CHUNK, _DENSE_BELOW = 64, 4096
_BF16_BYTES = 2


@dataclass(frozen=True)
class DeviceRates:
    """What a device computes. Nanoseconds are per parameter, or per kept coefficient, of one optimizer step.

    ``decode_ns`` is per coefficient of every payload that is decoded: it is what grows with the number of replicas.
    """

    name: str
    bf16_flops: float
    utilisation: float
    memory_bytes: float
    adamw_ns: float
    published_ns: float
    base_ns: float
    encode_ns: float
    decode_ns: float

    def thinwire_seconds(self, num_parameters: float, topk: int, num_payloads: float) -> float:
        """Encode, and decode so many payloads of ``topk`` coefficients per chunk, with the update."""
        coefficients = topk / _CHUNK**2
        ns = self.base_ns + coefficients * (self.encode_ns + self.decode_ns * num_payloads)
        return num_parameters * ns * 1e-9


# Where each number is from: docs/scale.md.
H200 = DeviceRates(
    name="H200",
    bf16_flops=7.9e14,
    utilisation=0.5,
    memory_bytes=141e9,
    adamw_ns=0.0081,
    published_ns=0.088,
    base_ns=0.0065,
    encode_ns=0.107,
    decode_ns=0.0125,
)


THIN, SLOW = Link(1e9, 0.02), Link(1e8, 0.04)
# Inside an island nothing is lost to TCP, neither to headers nor to its slow start.
FAST = Link(400e9, 10e-6, payload_share=1.0, window_bytes=None)


@dataclass(frozen=True)
class Setting:
    """What all rows of a page share. Every figure of the model that one may doubt is one field."""

    link: Link = THIN
    """What joins a replica, or an island, to the others."""
    island_link: Link = FAST
    """What joins a replica to the others of its island."""
    island_size: int = 8
    tokens: int = 65_536
    """Of a replica in a step."""
    topk: int = 32
    values: str = "sign"
    schedule: Schedule = "ring"
    device: DeviceRates = H200
    bytes_per_parameter: float = 16.0
    """What training holds besides activations: decides over how many devices a replica is spread."""
    ddp_overlap: float = 1.0
    """The share of backward under which gradients can be averaged."""
    trips_per_round: int = TRIPS_PER_ROUND
    num_slow: int = 0
    """Replicas, or islands, with ``slow_link``."""
    slow_link: Link = SLOW
    straggler: float = 1.0
    """How many times as long the first replica computes as the others."""

    def __post_init__(self) -> None:
        """Refuse what makes no sense."""
        for name in ("island_size", "tokens", "topk"):
            check_int(name, getattr(self, name), 1)
        check_int("num_slow", self.num_slow, 0)
        check_choice("values", self.values, VALUE_CODECS)
        check_choice("schedule", self.schedule, SCHEDULES)
        check_float("ddp_overlap", self.ddp_overlap, 0.0, 1.0)
        check_float("straggler", self.straggler, 1.0)


@dataclass(frozen=True)
class Stage:
    """A collective. ``num_bytes`` is a host's message for an all-gather, and all that it has for the others."""

    collective: str
    reach: str
    num_bytes: float
    num_collectives: int = 1
    is_hidden: bool = False
    """Whether it begins during backward."""

    def num_hosts(self, case: "Case") -> int:
        """How many take part in one of them."""
        size = case.setting.island_size
        return {"replicas": case.num_replicas, "island": size, "islands": max(1, case.num_replicas // size)}[self.reach]

    def num_streams(self, case: "Case") -> int:
        """Connections that share a link: all replicas of an island have one of their own to their like in the next."""
        return case.setting.island_size if self.reach == "islands" else 1


@dataclass(frozen=True)
class Method:
    """A way to exchange. ``held_bytes``: what a replica holds of others' messages."""

    name: str
    stages: tuple[Stage, ...]
    optimizer_seconds: float
    held_bytes: float


@cache
def payload_bytes(num_parameters: int, topk: int, values: str) -> int:
    """P, exact for the shapes that the planner guesses from a number of parameters."""
    return _plan(num_parameters, topk, values).payload_bytes


@cache
def answers_bytes(num_parameters: int, topk: int, values: str) -> int:
    """P2: the answers of all owners together, that of all chunks."""
    answers = with_owners(_plan(num_parameters, topk, values), None).answers
    assert answers is not None
    return answers.payload_bytes


def _plan(num_parameters: int, topk: int, values: str) -> ExchangePlan:
    coding = Coding(_CHUNK, topk, values, "adaptive", _DENSE_BELOW)
    return make_plan(tensors_from_count(num_parameters), [coding])


@cache
def published_payload(num_parameters: int) -> tuple[int, int, float]:
    """Bytes of the published code's messages of a step, into how many collectives they are split, and the largest tensor's
    share of them: no more than one tensor's are held at a time."""
    tensors = tensors_from_count(num_parameters)
    plan = make_plan(tensors, [Coding(_CHUNK, PUBLISHED_TOPK, "float32", "published", _DENSE_BELOW)])
    sizes = [math.prod(tensor.shape) for tensor in tensors]
    total = plan.num_coefficients * PUBLISHED_BYTES_PER_COEFFICIENT
    return total, PUBLISHED_COLLECTIVES_PER_TENSOR * len(tensors), max(sizes) / sum(sizes)


@dataclass(frozen=True)
class Case:
    """N and R in a setting."""

    setting: Setting
    num_parameters: int
    num_replicas: int

    def __post_init__(self) -> None:
        """Refuse numbers that are none."""
        check_int("num_parameters", self.num_parameters, 1)
        check_int("num_replicas", self.num_replicas, 1)

    @property
    def num_devices(self) -> int:
        """Over how many devices a replica is spread: the fewest that hold it."""
        return math.ceil(self.num_parameters * self.setting.bytes_per_parameter / self.setting.device.memory_bytes)

    @property
    def compute_seconds(self) -> float:
        """Forward and backward: 6 operations per parameter and token, attention not counted."""
        device = self.setting.device
        rate = device.bf16_flops * device.utilisation * self.num_devices
        return 6 * self.num_parameters * self.setting.tokens / rate

    @property
    def hidden_seconds(self) -> float:
        """The part of backward under which a hidden stage can begin."""
        return self.setting.ddp_overlap * BACKWARD_SHARE * self.compute_seconds

    def pause_seconds(self, stage: Stage) -> float:
        """How long the links of a stage are idle before it."""
        return self.compute_seconds - (self.hidden_seconds if stage.is_hidden else 0.0)

    @property
    def num_islands(self) -> int:
        """I."""
        return max(1, self.num_replicas // self.setting.island_size)

    def payload(self) -> int:
        """P."""
        return payload_bytes(self.num_parameters, self.setting.topk, self.setting.values)

    def methods(self) -> tuple[Method, ...]:
        """All of them; islands only where they come out even."""
        found = [self.ddp(), self.published(), self.all_gather(), self.owner()]
        if self.num_replicas % self.setting.island_size == 0:
            found.insert(3, self.hierarchical())
        return tuple(found)

    def ddp(self) -> Method:
        """AdamW on gradients in bf16, averaged whole; what backward can hide is hidden."""
        stage = Stage("all-reduce", "replicas", self._gradient_bytes, is_hidden=True)
        return Method("DDP bf16", (stage,), self._local(self.setting.device.adamw_ns), 0.0)

    def published(self) -> Method:
        """DeMo as published: two blocking all-gathers per tensor. Its decoding is taken not to grow with R."""
        total, num_collectives, largest = published_payload(self.num_parameters)
        stage = Stage("all-gather", "replicas", total, num_collectives)
        seconds = self._local(self.setting.device.published_ns)
        return Method("published DeMo", (stage,), seconds, self.num_replicas * largest * total)

    def all_gather(self) -> Method:
        """Thinwire as it is: one all-gather of payloads after backward, and R payloads to decode."""
        stage = Stage("all-gather", "replicas", self.payload())
        seconds = self._step(self.num_parameters, self.num_replicas)
        return Method("Thinwire all-gather", (stage,), seconds, self.num_replicas * self.payload())

    def hierarchical(self) -> Method:
        """Gradients averaged whole inside an island, each of its replicas left with 1 / L of them; that part goes through
        DeMo across islands, and the new weights are gathered inside. An island has one thin link for all its replicas."""
        size = self.setting.island_size
        stages = (
            Stage("reduce-scatter", "island", self._gradient_bytes, is_hidden=True),
            Stage("all-gather", "islands", self.payload()),
            Stage("all-gather", "island", self._gradient_bytes / size),
        )
        seconds = self._step(self.num_parameters / size, self.num_islands)
        return Method("Thinwire hierarchical", stages, seconds, self.num_islands * self.payload() / size)

    def owner(self) -> Method:
        """Each replica owns 1 / R of the chunks, gets everyone's coefficients of these, and shares the strongest of what
        they combine to: one payload comes in, and the answers of all owners."""
        answers = answers_bytes(self.num_parameters, self.setting.topk, self.setting.values)
        stages = (
            Stage("all-to-all", "replicas", self.payload()),
            Stage("all-gather", "replicas", answers / self.num_replicas),
        )
        held = float(self.payload() + answers)
        return Method("Thinwire owner exchange", stages, self._step(self.num_parameters, 1 + OWNER_TIMES), held)

    @property
    def _gradient_bytes(self) -> int:
        return _BF16_BYTES * self.num_parameters

    def _local(self, ns_per_parameter: float) -> float:
        return self.num_parameters * ns_per_parameter * 1e-9 / self.num_devices

    def _step(self, num_parameters: float, num_payloads: float) -> float:
        seconds = self.setting.device.thinwire_seconds(num_parameters, self.setting.topk, num_payloads)
        return seconds / self.num_devices

    def links(self, num_hosts: int) -> list[Link]:
        """Thin links, the slow ones first."""
        slow = min(self.setting.num_slow, num_hosts)
        return [self.setting.slow_link] * slow + [self.setting.link] * (num_hosts - slow)
