"""DeMo with an all-gather beside DeMo with an owner exchange, as measured, and what the planner would have chosen."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from thinwire.exchange.choice import ALL_GATHER, OWNER
from thinwire.lab.predicted import slice_and_answer_bytes
from thinwire.lab.rows import Cell
from thinwire.planner.cost import DEVICES, Prediction, predict
from thinwire.planner.link_spec import parse_link
from thinwire.planner.links import format_bytes
from thinwire.planner.owners import LEAST_GAIN, Sizes, both_exchanges

PAIRS = {"demo": "demo-owner", "demo-after": "demo-owner-after"}
"""Methods that differ in the exchange alone."""


@dataclass(frozen=True)
class Pair:
    """The same host count, link and method with either exchange, measured and predicted."""

    gather: Cell
    owner: Cell
    gather_predicted: Prediction
    owner_predicted: Prediction

    @property
    def choice(self) -> str:
        """What the planner would take."""
        return OWNER if self.predicted_gain > LEAST_GAIN * self.gather_predicted.step_seconds else ALL_GATHER

    @property
    def at_equal_speed(self) -> tuple[float, float]:
        """Both steps if the machine had computed as fast in one cell as in the other."""
        compute = mean(cell.compute for cell in (self.gather, self.owner))
        return self.gather.seconds_at(compute), self.owner.seconds_at(compute)

    @property
    def measured_gain(self) -> float:
        """Seconds that owners save of such a step, or cost if it is negative."""
        gather, owner = self.at_equal_speed
        return gather - owner

    @property
    def predicted_gain(self) -> float:
        """What owners save of a step, as the planner says."""
        return self.gather_predicted.step_seconds - self.owner_predicted.step_seconds


def pair_up(cells: Sequence[Cell]) -> list[Pair]:
    """All pairs of merged cells. The planner is told the bytes of the messages, and how long forward and backward took, in
    the mean of both cells: what else a machine does changes that from one cell to the next."""
    found = {(cell.num_hosts, cell.link, cell.method): cell for cell in cells if not cell.error}
    pairs = []
    for (num_hosts, link, method), gather in found.items():
        owner = found.get((num_hosts, link, PAIRS.get(method, "")))
        if owner is not None:
            compute = mean(cell.compute for cell in (gather, owner))
            pairs.append(Pair(gather, owner, *_predicted(gather, owner, compute)))
    return pairs


def _predicted(gather: Cell, owner: Cell, compute_seconds: float) -> tuple[Prediction, ...]:
    sizes = Sizes(round(gather.meter_sent), *slice_and_answer_bytes(owner), round(gather.num_exchanges))
    kept = (gather.settings["topk"], gather.settings["values"], gather.num_hosts, compute_seconds, DEVICES["cpu"])
    link = parse_link(gather.link).link
    return tuple(predict(one, link) for one in both_exchanges(gather.num_parameters, sizes, *kept))


def exchange_table(pairs: Sequence[Pair]) -> str:
    """A Markdown table. For both exchanges: seconds per step with the extremes of all rounds, and as they would be at equal
    speed of the machine, those spent waiting, and the bytes that come in at a host's interface. What owners save of a step
    at equal speed, as measured and as predicted."""
    head = ["overlap", "hosts", "link", "step, seconds", "at equal speed", "waits", "owners save", "predicted", "planner"]
    lines = ["| " + " | ".join([*head, "received"]) + " |", "| --- | ---: | --- |" + " ---: |" * 5 + " --- | ---: |"]
    for pair in pairs:
        both = (pair.gather, pair.owner)
        spans = [f"{one.seconds:.2f} ({one.least_seconds:.2f} to {one.most_seconds:.2f})" for one in both]
        overlap = "yes" if pair.gather.settings["overlap"] else "no"
        texts = [overlap, str(pair.gather.num_hosts), pair.gather.link, "; ".join(spans)]
        texts.append("; ".join(f"{seconds:.2f}" for seconds in pair.at_equal_speed))
        texts.append("; ".join(f"{one.parts['exposed']:.2f}" for one in both))
        texts += [f"{gain:+.2f}" for gain in (pair.measured_gain, pair.predicted_gain)]
        texts += [pair.choice.replace("_", "-"), "; ".join(format_bytes(one.received) for one in both)]
        lines.append("| " + " | ".join(texts) + " |")
    return "\n".join(lines)
