"""A report as a figure: efficiency against the rate of the link. The only file of the planner that needs matplotlib.

Lines differ in colour, dash and marker and carry their names, so that the figure reads in grey and by the colour-blind.
"""

from dataclasses import replace
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from thinwire.planner.links import format_bandwidth
from thinwire.planner.owners import better
from thinwire.planner.report import MOST_USEFUL_TOPK, Report, cheapest_codec, recommend

_LEAST_BITS, _MOST_BITS = 1e6, 100e9
_POINTS_PER_DECADE = 24
# Room above 1 for the note of the link.
_TOP = 1.14
# The note of a link faster than this stands to its left, inside the figure.
_LEFT_OF_BITS = 3e9
# Colours of the Okabe-Ito palette, dark and light in turn, so that neighbours differ in grey as well.
_STYLES: tuple[tuple[str, tuple[float, ...], str], ...] = (
    ("#000000", (), "o"),
    ("#d55e00", (6.0, 2.0), "s"),
    ("#cc79a7", (1.0, 1.5), "^"),
    ("#0072b2", (8.0, 2.0, 1.0, 2.0), "D"),
    ("#009e73", (3.0, 1.5), "v"),
    ("#56b4e9", (5.0, 1.0, 1.0, 1.0, 1.0, 1.0), "P"),
)


def draw(report: Report, path: Path | str) -> None:
    """Write a PNG: one line per method from 1 Mbit/s to 100 Gbit/s, the report's own link as a vertical line."""
    figure = Figure(figsize=(9.0, 5.2), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    rates = _rates()
    lines = _curves(report, rates)
    for place, (heights, label) in enumerate(lines.items()):
        _draw_line(axes, rates, heights, label, place, len(lines))
    _draw_link(axes, report)
    axes.set_xscale("log")
    axes.set_xlim(_LEAST_BITS, _MOST_BITS)
    axes.set_ylim(0.0, _TOP)
    axes.set_xticks([10.0**power for power in range(6, 12)], [format_bandwidth(10.0**power) for power in range(6, 12)])
    axes.set_yticks([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    axes.set_xlabel("rate of each replica's link")
    axes.set_ylabel("efficiency: compute / step")
    axes.set_title(report.title, loc="left", fontsize=10)
    axes.grid(True, which="major", color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    FigureCanvasAgg(figure).print_png(str(path))


def _lines_to_draw(report: Report) -> list[str]:
    """DDP, published DeMo, and Thinwire in its cheapest codec at the smallest, the useful and the largest topk."""
    rows = report.predictions
    others = [row.label for row in rows if row.method != "Thinwire DeMo"]
    ours = cheapest_codec(report)
    useful = [row for row in ours if (row.topk or 0) <= MOST_USEFUL_TOPK][-1:]
    chosen = [row.label for row in (ours[0], *useful, ours[-1])]
    return list(dict.fromkeys(others + chosen))


def _rates() -> list[float]:
    num_points = round(_POINTS_PER_DECADE * 5)
    return [_LEAST_BITS * (_MOST_BITS / _LEAST_BITS) ** (index / num_points) for index in range(num_points + 1)]


def _curves(report: Report, rates: list[float]) -> dict[tuple[float, ...], str]:
    """Efficiencies and names. Lines that would hide each other, as all do with one replica, are one line with all names."""
    names: dict[tuple[float, ...], list[str]] = {}
    for label in _lines_to_draw(report):
        links = (replace(report.link, bits_per_second=rate) for rate in rates)
        heights = tuple(round(better(report.by_label[label], link).efficiency, 3) for link in links)
        names.setdefault(heights, []).append(label)
    return {heights: "\n".join(labels) for heights, labels in names.items()}


def _draw_line(axes: Axes, rates: list[float], heights: tuple[float, ...], label: str, place: int, num_lines: int) -> None:
    colour, dashes, marker = _STYLES[place % len(_STYLES)]
    (line,) = axes.plot(rates, heights, color=colour, linewidth=1.8, marker=marker, markersize=5)
    # Shifted, so that the markers of close lines do not cover each other.
    line.set_markevery((2 + 3 * place, _POINTS_PER_DECADE))
    if dashes:
        line.set_dashes(dashes)
    where = _label_point(heights, place, num_lines)
    box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}
    name = axes.text(rates[where], heights[where], label, color=colour, fontsize=8.5, ha="center", va="center", zorder=5)
    name.set_bbox(box)


def _label_point(heights: tuple[float, ...], place: int, num_lines: int) -> int:
    """Where on its line a name stands: each line at a height of its own, or, where it is flat, at a place of its own.

    Names are centred, so both ends of a line are left free.
    """
    first, last = round(0.13 * len(heights)), round(0.87 * len(heights))
    if max(heights) - min(heights) < 0.2:
        return round(first + (last - first) * (place + 0.5) / num_lines)
    level = max(heights) * (0.15 + 0.7 * (place + 0.5) / num_lines)
    return min(range(first, last), key=lambda index: abs(heights[index] - level))


def _draw_link(axes: Axes, report: Report) -> None:
    rate = report.link.bits_per_second
    if not _LEAST_BITS <= rate <= _MOST_BITS:
        return
    advised = recommend(report).prediction
    axes.axvline(rate, color="#555555", linewidth=1.2, linestyle=(0, (2, 2)))
    note = f"your link, {format_bandwidth(rate)}:\n{advised.label}"
    side = "left" if rate < _LEFT_OF_BITS else "right"
    shift = (4 if side == "left" else -4, -2)
    place = (rate, _TOP)
    axes.annotate(note, place, xytext=shift, textcoords="offset points", ha=side, va="top", fontsize=8, color="#333333")
