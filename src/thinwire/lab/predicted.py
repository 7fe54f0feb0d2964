"""The planner's model beside what was measured: the same link, the bytes and exchanges that the meter counted, and for all
that is not the network the unshaped step of the same method and number of hosts."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from thinwire.lab.rows import Cell
from thinwire.planner.cost import DEVICES, Exchange, Workload, num_rounds, predict
from thinwire.planner.link_spec import UNSHAPED, parse_link

# TCP's first window: ten packets.
FIRST_WINDOW_BYTES = 10 * 1448
_ALL_REDUCE = (
    "adamw",
    "adamw-bf16",
    "adamw-fp16",
    "powersgd",
    "galore",
    "randomk",
    "local-sgd",
    "diloco",
    "diloco-streaming",
)
_DDP = ("adamw", "adamw-bf16", "adamw-fp16", "powersgd", "galore")


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
    """All cells on shaped links whose method was measured unshaped, too."""
    free = {(cell.num_hosts, cell.method): cell for cell in cells if cell.link == UNSHAPED and not cell.error}
    found = []
    for cell in cells:
        base = free.get((cell.num_hosts, cell.method))
        if base is not None and not cell.error and cell.link != UNSHAPED:
            found.append(Predicted(cell, predict(workload_of(cell, base), parse_link(cell.link).link).step_seconds))
    return found


def workload_of(cell: Cell, unshaped: Cell) -> Workload:
    """What the method asks of the link in one step, or, where replicas speak in one of many, a share of that."""
    costs = DEVICES["cpu"]
    kind = "all-reduce" if cell.method in _ALL_REDUCE else "all-gather"
    is_early = cell.method in _DDP or unshaped.hidden > 0
    # DDP's buckets, and DeMo's, are under way at the same time: their latencies overlap, and only one shows.
    num_exchanges = 1.0 if is_early else cell.num_exchanges
    exchange = Exchange(
        round(cell.meter_sent), round(cell.meter_received), round(num_exchanges * num_rounds(kind, cell.num_hosts))
    )
    return Workload(
        method=cell.method,
        topk=None,
        values=None,
        exchange=exchange,
        compute_seconds=unshaped.seconds - unshaped.parts["exposed"],
        optimizer_seconds=0.0,
        hidden_seconds=costs.ddp_overlap * unshaped.parts["backward"] if is_early else 0.0,
        trips_per_round=costs.trips_per_round,
        num_buckets=round(cell.num_exchanges) if is_early and cell.method not in _DDP else None,
    )


def error_table(found: Sequence[Predicted]) -> str:
    """A Markdown table of errors per method: the median of their sizes, and the worst with its link."""
    lines = ["| method | cells | median error | worst | where |", "| --- | ---: | ---: | ---: | --- |"]
    for method in dict.fromkeys(one.cell.method for one in found):
        own = [one for one in found if one.cell.method == method]
        worst = max(own, key=lambda one: abs(one.error))
        middle = median(abs(one.error) for one in own)
        where = f"{worst.cell.num_hosts} hosts, {worst.cell.link}"
        lines.append(f"| {method} | {len(own)} | {100 * middle:.0f} % | {100 * worst.error:+.0f} % | {where} |")
    everyone = median(abs(one.error) for one in found)
    return "\n".join([*lines, f"| all | {len(found)} | {100 * everyone:.0f} % | | |"])
