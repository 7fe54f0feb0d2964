"""From shapes, replicas and a link to a list of predictions and one piece of advice. Pure; prints and draws nothing."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from thinwire.core.errors import check_choice, check_int
from thinwire.core.update_rules import UPDATE_RULES
from thinwire.exchange.choice import ALL_GATHER, AUTO, OWNER
from thinwire.exchange.plan import Coding, ExchangePlan, TensorSpec, make_plan
from thinwire.planner.cost import DEVICES, DeviceCosts, Prediction, Workload, ddp, published_demo
from thinwire.planner.links import Link, format_seconds
from thinwire.planner.owners import better, both_exchanges, sizes_of
from thinwire.wire.values import VALUE_CODECS

DENSE_NAMES = {8: "fp64", 4: "fp32", 2: "bf16"}
PUBLISHED_TOPK = 32
# An int64 index and a float32 value.
PUBLISHED_BYTES_PER_COEFFICIENT = 12

# What the optimizer takes with overlap=True.
OVERLAPPED_BUCKETS = 8

# The rule of thumb, until studies replace it: docs/planner.md.
MOST_USEFUL_TOPK = 64
MOST_NETWORK_SHARE = 0.10
ENOUGH_EFFICIENCY = 0.95
# Where even the smallest topk takes longer than that: more coefficients lower the loss, for so much more time at most.
HARDLY_LONGER = 1.05

_EDGE = 64


@dataclass(frozen=True)
class Report:
    """What was asked, and a workload per method: AdamW under DDP, published DeMo, and Thinwire at each topk and codec, with
    each exchange that comes into question."""

    num_parameters: int
    num_replicas: int
    link: Link
    compute_seconds: float
    device: str
    workloads: tuple[Workload, ...]
    overlap: bool = False
    update: str = "sign"

    @property
    def title(self) -> str:
        """What was asked, but for the rate of the link."""
        replicas = "1 replica" if self.num_replicas == 1 else f"{self.num_replicas} replicas"
        rule = "" if self.update == "sign" else f", Thinwire with the {self.update} rule"
        return (
            f"{self.num_parameters / 1e6:,.4g} M parameters, {replicas}, {format_seconds(self.link.round_trip_seconds)} "
            f"round trip, {format_seconds(self.compute_seconds)} of compute per step ({self.device})"
            f"{', Thinwire with overlap' if self.overlap else ''}{rule}"
        )

    @cached_property
    def by_label(self) -> dict[str, tuple[Workload, ...]]:
        """The workloads of each row: one, or one for each exchange."""
        found: dict[str, tuple[Workload, ...]] = {}
        for workload in self.workloads:
            found[workload.label] = (*found.get(workload.label, ()), workload)
        return found

    @cached_property
    def predictions(self) -> tuple[Prediction, ...]:
        """One per method and setting, with the better exchange on this link."""
        return tuple(better(workloads, self.link) for workloads in self.by_label.values())

    def at(self, link: Link) -> "Report":
        """The same training on another link."""
        return replace(self, link=link)


@dataclass(frozen=True)
class Recommendation:
    """The advised row of the report, and why."""

    prediction: Prediction
    reason: str


def make_report(
    tensors: Sequence[TensorSpec],
    num_replicas: int,
    link: Link,
    compute_seconds: float,
    *,
    gradient_bytes_per_element: int = 4,
    device: str = "gpu",
    costs: DeviceCosts | None = None,
    topks: Sequence[int] = (8, 16, 32, 64, 128),
    values: Sequence[str] = ("sign", "sign_scale", "int8", "float32"),
    chunk: int = 64,
    dense_below: int = 4096,
    overlap: bool = False,
    exchange: str = AUTO,
    owner_topk: int | None = None,
    update: str = "sign",
) -> Report:
    """Predict one step of every method. Payload sizes are those of the exchange plan, exact to the byte.

    Arguments:
        tensors: the trained parameters; `tensors_from_count` guesses them from their number.
        num_replicas: R; with 1 nothing crosses the wire.
        link: what joins each replica to the others.
        compute_seconds: forward and backward of one replica on its part of the batch, without exchange and optimizer.
        gradient_bytes_per_element: 4, or 2 for a model in bfloat16. DDP has a row for it and one for bf16.
        device: ``cpu`` or ``gpu``: which row of `DEVICES` says what an optimizer step costs.
        costs: other costs, measured on your machine.
        topks: kept coefficients per chunk, a group of rows each.
        values: value codecs, a row each.
        chunk: edge of the chunks.
        dense_below: tensors with fewer elements take the dense path.
        overlap: Thinwire's rows are those of ``overlap=True``, in as many buckets as that has.
        exchange: ``all_gather`` or ``owner`` for Thinwire's rows; ``auto`` takes the better one in each.
        owner_topk: coefficients that owners answer with; eight times ``topk`` unless it is given.
        update: Thinwire's update rule. All cost about what sign does, but for muon, which orthogonalises every matrix.
    """
    check_choice("device", device, DEVICES)
    check_choice("exchange", exchange, (ALL_GATHER, OWNER, AUTO))
    check_choice("update", update, UPDATE_RULES)
    if owner_topk is not None:
        check_int("owner_topk", owner_topk, 1)
    _check_inputs(num_replicas, compute_seconds, gradient_bytes_per_element, topks, values, chunk, dense_below)
    num_parameters = sum(math.prod(spec.shape) for spec in tensors)
    if num_parameters == 0:
        raise ValueError("tensors hold no elements; pass the shapes of the trained parameters")
    specs = tuple(replace(spec, group=0) for spec in tensors)
    device_costs = DEVICES[device] if costs is None else costs
    num_buckets = OVERLAPPED_BUCKETS if overlap else 1
    names = (ALL_GATHER, OWNER) if exchange == AUTO and num_replicas > 1 else (exchange.replace(AUTO, ALL_GATHER),)
    step = _Step(
        specs,
        num_parameters,
        num_replicas,
        compute_seconds,
        device_costs,
        chunk,
        dense_below,
        num_buckets,
        names,
        owner_topk,
        device_costs.rule_seconds(update, (spec.shape for spec in specs), chunk),
    )
    widths = sorted({gradient_bytes_per_element, 2}, reverse=True)
    workloads = [step.ddp(width) for width in widths]
    workloads.append(step.published())
    workloads += [workload for topk in topks for name in values for workload in step.thinwire(topk, name)]
    return Report(num_parameters, num_replicas, link, compute_seconds, device, tuple(workloads), overlap, update)


@dataclass(frozen=True)
class _Step:
    """What the workloads of one report share."""

    tensors: tuple[TensorSpec, ...]
    num_parameters: int
    num_replicas: int
    compute_seconds: float
    costs: DeviceCosts
    chunk: int
    dense_below: int
    num_buckets: int
    exchanges: tuple[str, ...]
    owner_topk: int | None
    rule_seconds: float

    def ddp(self, bytes_per_element: int) -> Workload:
        name = DENSE_NAMES[bytes_per_element]
        return ddp(self.num_parameters, bytes_per_element, name, self.num_replicas, self.compute_seconds, self.costs)

    def published(self) -> Workload:
        plan = self._plan(PUBLISHED_TOPK, "float32", "published")
        payload = plan.num_coefficients * PUBLISHED_BYTES_PER_COEFFICIENT
        num_tensors = sum(1 for spec in self.tensors if math.prod(spec.shape))
        return published_demo(
            self.num_parameters, payload, num_tensors, PUBLISHED_TOPK, self.num_replicas, self.compute_seconds, self.costs
        )

    def thinwire(self, topk: int, values: str) -> list[Workload]:
        plan = self._plan(topk, values, "adaptive", self.num_buckets)
        sizes = sizes_of(plan, self.num_replicas, self.owner_topk)
        kept = (topk, values, self.num_replicas, self.compute_seconds, self.costs)
        both = both_exchanges(self.num_parameters, sizes, *kept)
        return [
            replace(workload, optimizer_seconds=workload.optimizer_seconds + self.rule_seconds)
            for workload in both
            if workload.exchange_name in self.exchanges
        ]

    def _plan(self, topk: int, values: str, layout: str, num_buckets: int = 1) -> ExchangePlan:
        return make_plan(self.tensors, [Coding(self.chunk, topk, values, layout, self.dense_below)], num_buckets)


def _check_inputs(
    num_replicas: int,
    compute_seconds: float,
    gradient_bytes: int,
    topks: Sequence[int],
    values: Sequence[str],
    chunk: int,
    dense_below: int,
) -> None:
    check_int("num_replicas", num_replicas, 1)
    if not (math.isfinite(compute_seconds) and compute_seconds > 0):
        raise ValueError(
            f"compute_seconds={compute_seconds!r} must be a finite number above 0: forward and backward of a step"
        )
    if gradient_bytes not in DENSE_NAMES:
        raise ValueError(f"gradient_bytes_per_element={gradient_bytes!r} must be one of {', '.join(map(str, DENSE_NAMES))}")
    if not topks or not values:
        raise ValueError("topks and values must each name at least one setting, such as topks=(32,), values=('sign',)")
    for topk in topks:
        check_int("topks", topk, 1)
    for name in values:
        check_choice("values", name, VALUE_CODECS)
    check_int("chunk", chunk, 1)
    check_int("dense_below", dense_below, 0)


def recommend(report: Report) -> Recommendation:
    """Which row to take, and why, in a sentence or two.

    Plain DDP if it keeps 95 % efficiency or is faster than DeMo anyway. Else DeMo with the largest topk up to 64, in the
    cheapest codec asked for, whose exchange adds at most 10 % to the step; if none does, the largest whose step takes at
    most 5 % longer than the smallest topk's.
    """
    dense = [row for row in report.predictions if row.topk is None]
    if report.num_replicas == 1:
        return Recommendation(
            dense[0], "With one replica nothing crosses a wire: any optimizer will do, and plain AdamW is cheap."
        )
    for row in dense:
        if row.efficiency >= ENOUGH_EFFICIENCY:
            return Recommendation(row, _ddp_is_enough(row))
    chosen = _choose_demo(report)
    best, smallest = min(dense, key=lambda row: row.step_seconds), cheapest_codec(report)[0]
    if chosen.network_share > MOST_NETWORK_SHARE and smallest.step_seconds < best.step_seconds <= chosen.step_seconds:
        chosen = smallest
    if best.step_seconds <= chosen.step_seconds:
        return Recommendation(best, _ddp_is_faster(best, chosen))
    return Recommendation(chosen, f"{_why_topk(chosen, smallest)} {_gain(chosen, best)}{_why_exchange(chosen)}")


def _choose_demo(report: Report) -> Prediction:
    rows = cheapest_codec(report)
    useful = [row for row in rows if (row.topk or 0) <= MOST_USEFUL_TOPK] or rows[:1]
    fitting = [row for row in useful if row.network_share <= MOST_NETWORK_SHARE]
    return (
        fitting[-1] if fitting else [row for row in useful if row.step_seconds <= HARDLY_LONGER * rows[0].step_seconds][-1]
    )


def cheapest_codec(report: Report) -> list[Prediction]:
    """Thinwire's rows in the codec that takes the fewest bytes, by topk. Bytes are compared at one topk: at another one
    another exchange may be faster."""
    rows = [row for row in report.predictions if row.method == "Thinwire DeMo"]
    cheapest = min(rows, key=lambda row: (row.topk, row.received_bytes)).values
    return sorted((row for row in rows if row.values == cheapest), key=lambda row: row.topk or 0)


def _ddp_is_enough(row: Prediction) -> str:
    return f"Plain DDP is enough: on this link {row.label} spends {_percent(row.efficiency)} of each step computing."


def _ddp_is_faster(ddp_row: Prediction, demo_row: Prediction) -> str:
    return (
        f"{ddp_row.label} is faster here: {format_seconds(ddp_row.step_seconds)} per step, where {demo_row.label} takes "
        f"{format_seconds(demo_row.step_seconds)}, {format_seconds(demo_row.optimizer_seconds)} of it in the optimizer."
    )


def _why_topk(row: Prediction, smallest: Prediction) -> str:
    taken = f"Take DeMo with topk={row.topk}, values={row.values!r} and exchange={row.exchange_name!r}:"
    share = row.network_share
    if share <= MOST_NETWORK_SHARE:
        most = f"{_percent(MOST_NETWORK_SHARE)} to the step (here {_percent(share)})"
        return f"{taken} the largest topk up to {MOST_USEFUL_TOPK} whose exchange adds at most {most}."
    long = f"adds {_percent(share)} to the step" if share < 1 else f"makes the step {1 + share:.3g} times as long"
    more_work = "more work per step (a larger batch, or gradient accumulation) would make up for it."
    if row is smallest:
        return f"{taken} it sends the least, and still its exchange {long}; {more_work}"
    took = f"{format_seconds(smallest.step_seconds)} with topk={smallest.topk}"
    return f"{taken} its exchange {long}, but fewer coefficients would hardly be faster ({took}) and cost loss; {more_work}"


def _gain(row: Prediction, best_ddp: Prediction) -> str:
    took = format_seconds(best_ddp.step_seconds)
    return f"A step takes {format_seconds(row.step_seconds)}, where {best_ddp.label} takes {took}."


def _why_exchange(row: Prediction) -> str:
    if row.other_step_seconds is None:
        return ""
    other = ALL_GATHER if row.exchange_name == OWNER else OWNER
    caution = " Owners cost loss, which is not counted here." if row.exchange_name == OWNER else ""
    return f" With exchange={other!r} it would take {format_seconds(row.other_step_seconds)}.{caution}"


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"


def tensors_from_count(num_parameters: int) -> tuple[TensorSpec, ...]:
    """Shapes of a transformer with about so many parameters, for those who know nothing else of their model.

    L layers of width d = 64 L, each with matrices (3d, d), (d, d), (4d, d) and (d, 4d), L as large as fits; the rest is one
    embedding of width d. All edges are multiples of 64, so the count is met to within 32 d (below 50,000 parameters: one
    matrix 64 wide, met to within 2,048, at least 4,096). Biases and norms are left out: in a real model they add a percent
    or so to the payload.
    """
    check_int("num_parameters", num_parameters, 1)
    num_layers = _num_layers(num_parameters)
    width = _EDGE * max(1, num_layers)
    rest = num_parameters - 12 * num_layers * width**2
    num_rows = _EDGE * round(rest / (_EDGE * width))
    layer = {"qkv": (3 * width, width), "out": (width, width), "up": (4 * width, width), "down": (width, 4 * width)}
    shapes = {f"layer{index}.{name}": shape for index in range(num_layers) for name, shape in layer.items()}
    if num_rows or not shapes:
        shapes = {"embedding": (max(_EDGE, num_rows), width), **shapes}
    return tuple(TensorSpec(name, shape, "torch.float32", 0) for name, shape in shapes.items())


def _num_layers(num_parameters: int) -> int:
    """The largest L with 12 L (64 L)^2 <= num_parameters."""
    per_cube = 12 * _EDGE**2
    num_layers = round(math.cbrt(num_parameters / per_cube))
    return num_layers if per_cube * num_layers**3 <= num_parameters else num_layers - 1
