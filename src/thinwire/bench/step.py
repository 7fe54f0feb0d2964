"""``thinwire bench step``: one optimizer step of every contender, side by side in one run."""

import gc
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product

import torch
from torch import nn

from thinwire.bench.contenders import SHAPES, Contender, LocalWorld, make_parameters, others, whole_step
from thinwire.bench.timing import copy_bandwidth, peak_extra_bytes, take_turns
from thinwire.core.errors import first_line
from thinwire.fused import why_not_on


@dataclass(frozen=True)
class Case:
    """What is measured."""

    shapes: str
    topks: tuple[int, ...]
    replicas: tuple[int, ...]
    backends: tuple[str, ...]
    rounds: int
    device: str
    updates: tuple[str, ...] = ("sign",)
    balances: tuple[float, ...] = (0.0,)


@dataclass(frozen=True)
class StepRow:
    """One contender at one setting. Times are milliseconds, ratios are of medians in the same run."""

    shapes: str
    num_parameters: int
    contender: str
    topk: int | None
    replicas: int | None
    median_ms: float
    low_ms: float
    high_ms: float
    parts_ms: dict[str, float]
    floor_bytes_per_parameter: float
    floor_ms: float
    ratio_to_floor: float
    ratio_to_adamw: float | None
    state_bytes_per_parameter: float
    peak_extra_percent: float | None
    rounds: int

    def as_dict(self) -> dict[str, object]:
        """For a line of JSON."""
        return asdict(self)


Tell = Callable[[str], None]


def measure(case: Case, tell: Tell) -> Iterator[StepRow]:
    """Rows, as they are found. Where a contender fails, ``tell`` says why, and the others go on."""
    device = torch.device(case.device)
    bandwidth = copy_bandwidth(device)
    tell(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s, {case.shapes} shapes")
    parameters = make_parameters(SHAPES[case.shapes], device)
    adamw = _adamw(parameters)
    baseline: list[float] = []
    for build in _builders(case, parameters, device):
        try:
            contenders = build()
        except (RuntimeError, ImportError, ValueError, AttributeError) as error:
            tell(f"left out: {first_line(error)}")
            continue
        rows = list(_measure_beside(adamw, contenders, case, parameters, bandwidth))
        baseline += [row.median_ms for row in rows[:1]]
        yield from rows[1:]
        del contenders
        _free(device)
    if baseline:  # AdamW ran beside each group: its row has the medians of all of them
        times = [{"step": median} for median in baseline]
        extra = peak_extra_bytes(adamw, device)
        yield _row(adamw, times, parameters, case, bandwidth, statistics.median(baseline), extra)


def _adamw(parameters: Sequence[nn.Parameter]) -> Contender:
    return next(others(parameters))()


def _builders(
    case: Case, parameters: Sequence[nn.Parameter], device: torch.device
) -> Iterator[Callable[[], list[Contender]]]:
    for build in list(others(parameters))[1:]:
        yield lambda build=build: [build()]  # type: ignore[misc]
    for backend in case.backends:
        if backend == "triton" and (device.type == "cpu" or why_not_on(device) is not None):
            continue
        for topk in case.topks:
            yield partial(_local, parameters, backend, topk, case.replicas)
            for update, balance in product(case.updates, case.balances):
                yield partial(_whole, parameters, backend, topk, case.replicas, update, balance)


def _local(parameters: Sequence[nn.Parameter], backend: str, topk: int, replicas: tuple[int, ...]) -> list[Contender]:
    world = LocalWorld(parameters, backend, topk, max(replicas))
    return [world.contender(backend, topk, count) for count in replicas]


def _whole(
    parameters: Sequence[nn.Parameter], backend: str, topk: int, replicas: tuple[int, ...], update: str, balance: float
) -> list[Contender]:
    return [whole_step(parameters, backend, topk, count, update, balance) for count in replicas]


def _measure_beside(
    adamw: Contender, contenders: list[Contender], case: Case, parameters: Sequence[nn.Parameter], bandwidth: float
) -> Iterator[StepRow]:
    device = torch.device(case.device)
    everyone = [adamw, *contenders]
    times = take_turns(everyone, device, case.rounds, 2)
    median = statistics.median(sum(row.values()) for row in times[0])
    for contender, rows in zip(everyone, times, strict=True):
        extra = peak_extra_bytes(contender, device)
        yield _row(contender, rows, parameters, case, bandwidth, median, extra)


def _row(
    contender: Contender,
    times: list[dict[str, float]],
    parameters: Sequence[nn.Parameter],
    case: Case,
    bandwidth: float,
    adamw_ms: float,
    extra_bytes: int | None,
) -> StepRow:
    totals = sorted(sum(row.values()) for row in times)
    num_parameters = sum(parameter.numel() for parameter in parameters)
    floor_ms = contender.floor_bytes * num_parameters / bandwidth * 1000
    median = statistics.median(totals)
    return StepRow(
        shapes=case.shapes,
        num_parameters=num_parameters,
        contender=contender.name,
        topk=contender.topk,
        replicas=contender.replicas,
        median_ms=median,
        low_ms=totals[0],
        high_ms=totals[-1],
        parts_ms={part: statistics.median(row[part] for row in times) for part in contender.parts},
        floor_bytes_per_parameter=contender.floor_bytes,
        floor_ms=floor_ms,
        ratio_to_floor=median / floor_ms,
        ratio_to_adamw=median / adamw_ms,
        state_bytes_per_parameter=contender.state_bytes,
        peak_extra_percent=None if extra_bytes is None else 100 * extra_bytes / (4 * num_parameters),
        rounds=len(times),
    )


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
