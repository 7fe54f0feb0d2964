"""Figures of studies. Dashes, markers and labels at the lines' ends tell them apart in grey as well.

What is drawn here can be shown by a page, too: `thinwire.studies.charts` reads it from the axes. There, lines and dots have
the number of their style as their id, levels have `LEVEL`, axes with names have `NAMES`, and ranges the name of what they
belong to.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from thinwire.lab.figure import tidy
from thinwire.pages.styles import COLOURS, DASHES, mark_of
from thinwire.studies.labels import Named, label_ends, label_levels, label_points, wrap_below

LEVEL, NAMES = "level", "names"


class Page:
    """A figure of some panels, side by side but for those beyond ``columns``; width and height are a panel's, in inches."""

    def __init__(
        self,
        num_panels: int = 1,
        height: float = 4.2,
        width: float = 6.0,
        columns: int | None = None,
        figure: Figure | None = None,
    ) -> None:
        columns = min(num_panels, columns or num_panels)
        rows = -(-num_panels // columns)
        self._figure = figure or Figure(figsize=(width * columns, height * rows), dpi=140, layout="constrained")
        if figure is None:
            for place in range(num_panels):
                tidy(self._figure.add_subplot(rows, columns, place + 1))
        self.panels: list[Axes] = list(self._figure.axes)

    def legend(self, kinds: Mapping[int, str]) -> None:
        """What each style of marks stands for, above all panels."""
        styles = {"linestyle": "None", "markersize": 6}
        marks = [Line2D([], [], marker=mark_of(one), color=COLOURS[one % len(COLOURS)], **styles) for one in kinds]  # type: ignore[arg-type]
        self._figure.legend(marks, kinds.values(), loc="outside upper left", ncols=len(kinds), fontsize=8, frameon=False)

    def save(self, path: Path) -> None:
        """As a PNG."""
        canvas = FigureCanvasAgg(self._figure)
        for label in (_label_below, _label_ends, _label_levels):
            self._figure.draw_without_rendering()  # names are put where there is room, once the layout has settled
            for axes in self.panels:
                label(axes)
        canvas.print_png(str(path))


class Drawing(NamedTuple):
    """A figure, and what it shows."""

    page: Page
    caption: str


def points_of(drawn: Line2D) -> list[tuple[float, float]]:
    """What was drawn."""
    return [(float(x), float(y)) for x, y in np.asarray(drawn.get_xydata())]


def _ends(axes: Axes) -> list[Named]:
    """Where the names of lines belong."""
    found = []
    for drawn in axes.lines:
        name, style = str(drawn.get_label()), drawn.get_gid()
        if style is not None and style.isdigit() and drawn.get_linestyle() != "None" and not name.startswith("_"):
            end = points_of(drawn)[-1]
            found.append(Named(*end, name, int(style)))
    return found


def _levels(axes: Axes) -> list[tuple[float, str]]:
    return [(points_of(drawn)[0][1], str(drawn.get_label())) for drawn in axes.lines if drawn.get_gid() == LEVEL]


def _label_below(axes: Axes) -> None:
    if axes.xaxis.get_gid() == NAMES:
        wrap_below(axes)


def _label_ends(axes: Axes) -> None:
    if ends := _ends(axes):
        label_ends(axes, ends, [y for y, _ in _levels(axes)])


def _label_levels(axes: Axes) -> None:
    if levels := _levels(axes):
        label_levels(axes, levels)


def title(axes: Axes, text: str, x: str, y: str) -> None:
    """What a panel shows, and its axes."""
    axes.set_title(text, loc="left", fontsize=10)
    axes.set_xlabel(x)
    axes.set_ylabel(y)


def line(
    axes: Axes,
    points: Iterable[tuple[float, float]],
    label: str,
    index: int,
    spread: Sequence[tuple[float, float]] | None = None,
    thickness: float = 1.5,
) -> None:
    """One line with its own colour, dashes and marker, and its name at its end; ``spread`` is the range at each point."""
    xs, ys = zip(*sorted(points), strict=True)
    colour, dashes = COLOURS[index % len(COLOURS)], DASHES[index % len(DASHES)]
    (drawn,) = axes.plot(
        xs, ys, color=colour, marker=mark_of(index), markersize=4, linewidth=thickness, label=label, gid=str(index)
    )
    if dashes:
        drawn.set_dashes(dashes)
    if spread is not None:
        lows, highs = zip(*spread, strict=True)
        axes.fill_between(xs, lows, highs, color=colour, alpha=0.12, linewidth=0, gid=label)


def dot(axes: Axes, x: float, y: float, label: str, index: int) -> None:
    """One point with its name beside it."""
    colour = COLOURS[index % len(COLOURS)]
    axes.plot([x], [y], mark_of(index), color=colour, markersize=6, label=label or None, gid=str(index))
    axes.annotate(label, (x, y), xytext=(6, 0), textcoords="offset points", fontsize=8, color=colour, va="center")


def named_dots(
    axes: Axes, points: Sequence[Named], kinds: Mapping[int, str], spread: Sequence[tuple[float, float]] | None = None
) -> None:
    """Points with a name each, of several kinds: what each style stands for. Call it when the axes have their limits and
    titles."""
    for style, kind in kinds.items():
        mine = [place for place, point in enumerate(points) if point.style == style]
        if not mine:
            continue
        xs, ys, colour = [points[place].x for place in mine], [points[place].y for place in mine], COLOURS[style]
        if spread is not None:
            lows, highs = zip(*(spread[place] for place in mine), strict=True)
            axes.vlines(xs, lows, highs, color=colour, linewidth=1, gid=kind)
        axes.plot(xs, ys, mark_of(style), color=colour, markersize=6, label=kind, gid=str(style))
    axes.get_figure(root=True).draw_without_rendering()  # type: ignore[union-attr]
    label_points(axes, points, spread)


def lower_left(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those that no other is below and left of."""
    ordered = sorted(points)
    return [point for place, point in enumerate(ordered) if all(point[1] < y for _, y in ordered[:place])]


def edge(axes: Axes, points: Sequence[tuple[float, float]], label: str) -> None:
    """A broad line behind all else, without a name beside it."""
    axes.plot(*zip(*points, strict=True), color="#cccccc", linewidth=4, zorder=0, label=f"_{label}", gid="7")


def rule(axes: Axes, y: float, label: str) -> None:
    """A level to compare with; its name is written along it."""
    axes.axhline(y, color="#777777", linewidth=0.9, linestyle=(0, (2, 2)), label=label, gid=LEVEL)


def logarithmic(axes: Axes, ticks: Sequence[float], unit: str = "") -> None:
    """Powers along x, with the given ticks and no others."""
    axes.set_xscale("log")
    axes.set_xticks(list(ticks))
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}{unit}"))


def logarithmic_up(axes: Axes) -> None:
    """Powers along y, with ticks at 1, 2, 5, 10 and so on."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def room_for_labels(axes: Axes, share: float = 0.25) -> None:
    """Space at the right for the names of lines."""
    low, high = axes.get_xlim()
    if axes.get_xscale() == "log":
        axes.set_xlim(low, high * (high / low) ** share)
    else:
        axes.set_xlim(low, high + (high - low) * share)


def names_below(axes: Axes, names: Sequence[str]) -> None:
    """What stands at 0, 1, 2 and so on; long names take as many lines as they need."""
    axes.set_xticks(range(len(names)), [name.replace(", ", ",\n") for name in names], fontsize=8)
    axes.set_xlim(-0.5, len(names) - 0.5)
    axes.xaxis.set_gid(NAMES)
    axes.grid(False, axis="x")


def dots_above_names(axes: Axes, losses: Mapping[str, Sequence[float]], all_names: Sequence[str] = ()) -> None:
    """Every seed's loss, above the name of what had it. The style is that of the name's place in ``all_names``, those of
    all panels, so that a name looks the same in each."""
    styles = list(all_names or losses)
    for place, (name, mine) in enumerate(losses.items()):
        for loss in mine:
            dot(axes, place, loss, "", styles.index(name))
    names_below(axes, list(losses))
