"""Rows of ``thinwire bench step`` as a figure: how long a step takes, against its floor. It reads in grey."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from thinwire.bench.step import StepRow

_COLOURS = {"thinwire triton": "#0072b2", "thinwire torch": "#56b4e9"}
_COLOURS |= {f"{name}, step()": colour for name, colour in _COLOURS.items()}
_OTHERS = "#999999"


def label_of(row: StepRow) -> str:
    """A bar's name."""
    if row.topk is None:
        return row.contender
    return f"{row.contender}, k={row.topk}, R={row.replicas}"


def draw(rows: Sequence[StepRow], path: Path) -> None:
    """Write a PNG: a panel per set of shapes, a bar per row, the floor of each as a black line."""
    sets = list(dict.fromkeys(row.shapes for row in rows))
    longest = max(sum(row.shapes == name for row in rows) for name in sets)
    figure = Figure(figsize=(9.0, 1.2 + 0.26 * longest * len(sets)), dpi=150, layout="constrained")
    for place, name in enumerate(sets):
        axes = figure.add_subplot(len(sets), 1, place + 1)
        mine = sorted((row for row in rows if row.shapes == name), key=lambda row: -row.median_ms)
        colours = [_COLOURS.get(row.contender, _OTHERS) for row in mine]
        axes.barh(range(len(mine)), [row.median_ms for row in mine], color=colours, edgecolor="black", linewidth=0.4)
        for height, row in enumerate(mine):
            axes.plot([row.floor_ms] * 2, [height - 0.4, height + 0.4], color="black", linewidth=1.6)
            axes.text(row.median_ms * 1.03, height, f"{row.median_ms:.2f}", va="center", fontsize=7)
        axes.set_yticks(range(len(mine)), [label_of(row) for row in mine], fontsize=7)
        axes.set_xscale("log")
        axes.set_xlim(min(row.floor_ms for row in mine) / 2, max(row.median_ms for row in mine) * 1.5)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("milliseconds per step (black line: floor)")
        axes.set_title(f"{name}: {mine[0].num_parameters / 1e6:.1f} M parameters", loc="left", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    FigureCanvasAgg(figure).print_png(str(path))
