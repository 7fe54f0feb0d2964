"""Figures of studies. Dashes, markers and labels at the lines' ends tell them apart in grey as well."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from thinwire.lab.figure import COLOURS, DASHES, MARKS, tidy


class Page:
    """A figure of some panels side by side."""

    def __init__(self, num_panels: int = 1, height: float = 4.2, width: float = 6.0) -> None:
        self._figure = Figure(figsize=(width * num_panels, height), dpi=140, layout="constrained")
        self.panels: list[Axes] = [self._figure.add_subplot(1, num_panels, place + 1) for place in range(num_panels)]
        for axes in self.panels:
            tidy(axes)

    def save(self, path: Path) -> None:
        """As a PNG."""
        FigureCanvasAgg(self._figure).print_png(str(path))


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
) -> None:
    """One line with its own colour, dashes and marker, and its name at its end; ``spread`` is the range at each point."""
    xs, ys = zip(*sorted(points), strict=True)
    colour, dashes = COLOURS[index % len(COLOURS)], DASHES[index % len(DASHES)]
    (drawn,) = axes.plot(xs, ys, color=colour, marker=MARKS[index % len(MARKS)], markersize=4, linewidth=1.5)
    if dashes:
        drawn.set_dashes(dashes)
    if spread is not None:
        lows, highs = zip(*spread, strict=True)
        axes.fill_between(xs, lows, highs, color=colour, alpha=0.12, linewidth=0)
    axes.annotate(label, (xs[-1], ys[-1]), xytext=(5, 0), textcoords="offset points", fontsize=8, color=colour, va="center")


def dot(axes: Axes, x: float, y: float, label: str, index: int) -> None:
    """One point with its name beside it."""
    colour = COLOURS[index % len(COLOURS)]
    axes.plot([x], [y], MARKS[index % len(MARKS)], color=colour, markersize=6)
    axes.annotate(label, (x, y), xytext=(6, 0), textcoords="offset points", fontsize=8, color=colour, va="center")


def rule(axes: Axes, y: float, label: str) -> None:
    """A level to compare with."""
    axes.axhline(y, color="#777777", linewidth=0.9, linestyle=(0, (2, 2)))
    axes.annotate(label, (0.01, y), xycoords=("axes fraction", "data"), fontsize=8, color="#555555", va="bottom")


def logarithmic(axes: Axes, ticks: Sequence[float], unit: str = "") -> None:
    """Powers along x, with the given ticks and no others."""
    axes.set_xscale("log")
    axes.set_xticks(list(ticks))
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}{unit}"))


def room_for_labels(axes: Axes, share: float = 0.25) -> None:
    """Space at the right for the names of lines."""
    low, high = axes.get_xlim()
    if axes.get_xscale() == "log":
        axes.set_xlim(low, high * (high / low) ** share)
    else:
        axes.set_xlim(low, high + (high - low) * share)
