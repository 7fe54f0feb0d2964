"""A comparison as Markdown tables."""

from collections.abc import Callable, Sequence
from statistics import median

from thinwire.lab.losses import Curve, seconds_to
from thinwire.lab.predicted import error_table, predict_all
from thinwire.lab.rows import PARTS, Cell
from thinwire.planner.links import format_bytes

_STEPS_OF_CURVES = "In as many steps as the given curves took, with however many replicas they were made."


def summary(cells: Sequence[Cell], curves: dict[str, Curve], target: float | None) -> str:
    """All tables, one after the other."""
    parts: list[str] = []
    for num_hosts in sorted({cell.num_hosts for cell in cells}):
        own = [cell for cell in cells if cell.num_hosts == num_hosts]
        parts += [f"## {num_hosts} hosts", "### Seconds per step", step_table(own), even_table(own)]
        if target is not None and curves:
            parts += [f"### Seconds to a validation loss of {target:g}", _STEPS_OF_CURVES, loss_table(own, curves, target)]
        parts += ["### Where a step's time goes", breakdown_table(own), "### Bytes per step and host", byte_table(own)]
    if predictions := predict_all(cells):
        parts += ["## The planner beside it", error_table(predictions)]
    failed = [f"- {cell.num_hosts} hosts, {cell.link}, {cell.method}: {cell.error}" for cell in cells if cell.error]
    if failed:
        parts += ["## What failed", "\n".join(failed)]
    return "\n\n".join(parts) + "\n"


def step_table(cells: Sequence[Cell]) -> str:
    """Medians, a column per link."""
    return _grid(cells, lambda cell: f"{cell.seconds:.3g}")


def even_table(cells: Sequence[Cell]) -> str:
    """The same at one speed of the machine, which other work may slow down in one cell and not in the next."""
    computes = [cell.compute for cell in cells if not cell.error]
    if not computes:
        return ""
    middle = median(computes)
    words = (
        f"Forward and backward, the same work in all cells, took from {min(computes):.2f} to {max(computes):.2f} s. With "
        f"everything but the wait for the network scaled to their median, {middle:.2f} s:"
    )
    return f"{words}\n\n{_grid(cells, lambda cell: f'{cell.seconds_at(middle):.3g}')}"


def loss_table(cells: Sequence[Cell], curves: dict[str, Curve], target: float) -> str:
    """Steps to the target times seconds per step; only methods with a curve."""

    def text(cell: Cell) -> str:
        seconds = seconds_to(curves[cell.method], cell, target)
        return "never" if seconds is None else f"{seconds:,.0f}"

    known = [cell for cell in cells if cell.method in curves]
    return _grid(known, text)


def _grid(cells: Sequence[Cell], text: Callable[[Cell], str]) -> str:
    links = list(dict.fromkeys(cell.link for cell in cells))
    found = {(cell.method, cell.link): cell for cell in cells}
    lines = ["| method | " + " | ".join(links) + " |", "| --- |" + " ---: |" * len(links)]
    for method in dict.fromkeys(cell.method for cell in cells):
        row = [found.get((method, link)) for link in links]
        texts = ["" if cell is None else "failed" if cell.error else text(cell) for cell in row]
        lines.append(f"| {method} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def breakdown_table(cells: Sequence[Cell]) -> str:
    """Milliseconds of each part, on the slowest of the links without delay."""
    link = _breakdown_link(cells)
    lines = [f"On {link}, in milliseconds, means over steps and hosts.", ""]
    lines += ["| method | " + " | ".join(PARTS) + " | hidden |", "| --- |" + " ---: |" * (len(PARTS) + 1)]
    for cell in cells:
        if cell.link == link and not cell.error:
            texts = [f"{1e3 * value:.0f}" for value in (*(cell.parts[name] for name in PARTS), cell.hidden)]
            lines.append(f"| {cell.method} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def _breakdown_link(cells: Sequence[Cell]) -> str:
    plain = [cell for cell in cells if "," not in cell.link and not cell.error and cell.measured_bits is not None]
    return min(plain or cells, key=lambda cell: cell.measured_bits or 0.0).link


def byte_table(cells: Sequence[Cell]) -> str:
    """The meter beside the interface, on the link of the breakdown; received bytes, since a ring passes on what it gets."""
    link = _breakdown_link(cells)
    lines = [
        "| method | meter: sent | meter: received | interface: received | without headers | beside the meter |",
        "| --- |" + " ---: |" * 5,
    ]
    for cell in cells:
        if cell.link == link and not cell.error:
            texts = [format_bytes(x) for x in (cell.meter_sent, cell.meter_received, cell.received, cell.received_payload)]
            share = f"{100 * (cell.received_payload / cell.meter_received - 1):+.2f} %" if cell.meter_received else "-"
            lines.append(f"| {cell.method} | " + " | ".join(texts) + f" | {share} |")
    return "\n".join(lines)
