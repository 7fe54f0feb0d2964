"""The planner's model of the network beside what was measured, with the bytes and exchanges that the meter counted.

All that is not the network is taken from the measured step itself, whose compute varies with what else the machine does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from thinwire.exchange.choice import OWNER
from thinwire.exchange.plan import OWNER_TIMES
from thinwire.lab.rows import Cell
from thinwire.planner.cost import DEVICES, Exchange, Workload, all_to_all, num_rounds, predict, ring_all_gather
from thinwire.planner.link_spec import UNSHAPED, parse_link

_ALL_REDUCE = (
    "adamw",
    "adamw-after",
    "adamw-bf16",
    "adamw-bf16-after",
    "adamw-fp16",
    "powersgd",
    "galore",
    "randomk",
    "local-sgd",
    "diloco",
    "diloco-streaming",
)
_DDP = ("adamw", "adamw-bf16", "adamw-fp16", "powersgd", "galore")
# Begins all its exchanges of a step together.
_TOGETHER = ("published-code",)


@dataclass(frozen=True)
class Predicted:
    """A cell, and what the planner would have said."""

    cell: Cell
    seconds: float

    @property
    def error(self) -> float:
        """Relative; positive if the planner was too slow."""
        return self.seconds / self.cell.seconds - 1


def predict_all(cells: Sequence[Cell]) -> list[Predicted]:
    """All cells on shaped links."""
    found = []
    for cell in cells:
        if not cell.error and cell.parts and cell.link != UNSHAPED:
            row = predict(workload_of(cell), parse_link(cell.link).link)
            found.append(Predicted(cell, row.local_seconds + row.exposed_seconds / cell.period))
    return found


def workload_of(cell: Cell) -> Workload:
    """What the method asks of the link in a step in which replicas speak."""
    costs = DEVICES["cpu"]
    kind = "all-reduce" if cell.method in _ALL_REDUCE else "all-gather"
    num_exchanges = max(1, round(cell.num_exchanges * cell.period))
    demo_overlap = costs.ddp_overlap if costs.demo_overlap is None else costs.demo_overlap
    is_demo = cell.settings.get("overlap", False)
    is_early = is_demo or cell.method in _DDP
    # DDP's buckets, and DeMo's, are under way at the same time: their latencies overlap, and only one shows.
    is_one = is_early or cell.method in _TOGETHER
    rounds = num_rounds(kind, cell.num_hosts) * (1 if is_one else num_exchanges)
    exchange = Exchange(round(cell.meter_sent * cell.period), round(cell.meter_received * cell.period), rounds)
    answers = None
    if cell.settings.get("exchange") == OWNER:
        slice_bytes, answer_bytes = slice_and_answer_bytes(cell)
        exchange, answers = all_to_all(slice_bytes, cell.num_hosts), ring_all_gather(answer_bytes, cell.num_hosts)
        num_exchanges //= 2
    return Workload(
        method=cell.method,
        topk=None,
        values=None,
        exchange=exchange,
        compute_seconds=max(0.0, cell.seconds - cell.parts["exposed"]),
        optimizer_seconds=0.0,
        hidden_seconds=(demo_overlap if is_demo else costs.ddp_overlap) * cell.parts["backward"] if is_early else 0.0,
        trips_per_round=costs.trips_per_round,
        num_buckets=num_exchanges if is_demo else None,
        answers=answers,
    )


def slice_and_answer_bytes(cell: Cell) -> tuple[int, int]:
    """What went to each owner and what came from each: an answer is sent once and a slice to each of the others, so that
    the two can be told apart by what was sent and received; not with two hosts, where coefficients must do."""
    from_each = cell.meter_received / (cell.num_hosts - 1)
    if cell.num_hosts > 2:
        answer = (cell.meter_received - cell.meter_sent) / (cell.num_hosts - 2)
    else:
        topk, owner_topk = cell.settings["topk"], cell.settings["owner_topk"] or OWNER_TIMES * cell.settings["topk"]
        answer = from_each * owner_topk / (topk + owner_topk)
    return round(from_each - answer), round(answer)


def error_table(found: Sequence[Predicted], by: Literal["method", "link"] = "method") -> str:
    """A Markdown table of errors per method or link: the median of their sizes, and the worst with where it is."""
    lines = [f"| {by} | cells | median error | worst | where |", "| --- | ---: | ---: | ---: | --- |"]
    for name in dict.fromkeys(getattr(one.cell, by) for one in found):
        own = [one for one in found if getattr(one.cell, by) == name]
        worst = max(own, key=lambda one: abs(one.error))
        middle = median(abs(one.error) for one in own)
        where = f"{worst.cell.num_hosts} hosts, {worst.cell.link if by == 'method' else worst.cell.method}"
        lines.append(f"| {name} | {len(own)} | {100 * middle:.0f} % | {100 * worst.error:+.0f} % | {where} |")
    everyone = median(abs(one.error) for one in found)
    return "\n".join([*lines, f"| all | {len(found)} | {100 * everyone:.0f} % | | |"])
