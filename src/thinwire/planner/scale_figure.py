"""Rows of `scale` as a figure: efficiency against the number of replicas. Needs matplotlib; reads in grey."""

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from thinwire.planner.scale import ScaleRow
from thinwire.planner.scale_page import ROUNDS, format_count

_LEAST = 3e-5
# Colours of the Okabe-Ito palette, dark and light in turn; what is not a plain all-gather is dotted.
_STYLES: dict[str, tuple[str, tuple[float, ...], str]] = {
    "DDP bf16": ("#000000", (), "o"),
    "published DeMo": ("#d55e00", (6.0, 2.0), "s"),
    "Thinwire all-gather": ("#0072b2", (), "D"),
    "Thinwire hierarchical": ("#009e73", (1.0, 1.5), "v"),
    "Thinwire owner exchange": ("#cc79a7", (1.0, 1.5), "^"),
}
# The height of a name, as a part of the axis.
_NAME_HEIGHT = 0.058


def draw(rows: Sequence[ScaleRow], schedule: str, path: Path | str) -> None:
    """Write a PNG: a panel per model size, a line per method."""
    rows = [row for row in rows if row.schedule == schedule]
    sizes = list(dict.fromkeys(row.num_parameters for row in rows))
    num_columns = min(2, len(sizes))
    num_lines = math.ceil(len(sizes) / num_columns)
    figure = Figure(figsize=(6.2 * num_columns, 3.6 * num_lines + 0.4), dpi=130, layout="constrained")
    figure.suptitle(
        f"a model, not a measurement; {ROUNDS[schedule]}; dotted: not implemented", fontsize=10, x=0.01, ha="left"
    )
    for place, size in enumerate(sizes):
        axes = figure.add_subplot(num_lines, num_columns, place + 1)
        _panel(axes, [row for row in rows if row.num_parameters == size])
    FigureCanvasAgg(figure).print_png(str(path))


def _panel(axes: Axes, rows: Sequence[ScaleRow]) -> None:
    replicas = sorted({row.num_replicas for row in rows})
    ends = []
    for method in dict.fromkeys(row.method for row in rows):
        mine = [row for row in rows if row.method == method]
        colour, dashes, marker = _STYLES[method]
        heights = [max(_LEAST, row.efficiency) for row in mine]
        (line,) = axes.plot([row.num_replicas for row in mine], heights, color=colour, marker=marker, markersize=4)
        if dashes:
            line.set_dashes(dashes)
        ends.append((heights[-1], method, colour))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(_LEAST, 1.3)
    # Room on the right for the names.
    axes.set_xlim(replicas[0] / 1.2, replicas[-1] * (replicas[-1] / replicas[0]) ** 0.55 + 1)
    axes.set_xticks(replicas, [f"{count:,}" for count in replicas], fontsize=7)
    axes.set_yticks([1.0, 0.1, 0.01, 0.001], ["100 %", "10 %", "1 %", "0.1 %"], fontsize=7)
    axes.minorticks_off()
    axes.set_xlabel("replicas", fontsize=8)
    axes.set_ylabel("efficiency: compute / step", fontsize=8)
    seconds = rows[0].compute_seconds
    axes.set_title(f"{format_count(rows[0].num_parameters)} parameters, {seconds:.3g} s of compute", loc="left", fontsize=9)
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    _name_lines(axes, ends)


def _name_lines(axes: Axes, ends: list[tuple[float, str, str]]) -> None:
    """Write each line's name behind its end, from below upwards, moved up where two would lie on each other."""
    span, last = math.log(1.3 / _LEAST), -1.0
    for height, name, colour in sorted(ends):
        place = max(math.log(height / _LEAST) / span, last + _NAME_HEIGHT, 0.02)
        axes.text(0.665, place, name, transform=axes.transAxes, color=colour, fontsize=7.5, va="center")
        last = place
