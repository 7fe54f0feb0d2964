"""Figures of studies. Dashes, markers and labels at the lines' ends tell them apart in grey as well."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from matplotlib.ticker import FuncFormatter
from matplotlib.transforms import Bbox

from thinwire.lab.figure import COLOURS, DASHES, MARKS, tidy

_AT_END = "the name at a line's end"


class Page:
    """A figure of some panels side by side."""

    def __init__(self, num_panels: int = 1, height: float = 4.2, width: float = 6.0) -> None:
        self._figure = Figure(figsize=(width * num_panels, height), dpi=140, layout="constrained")
        self.panels: list[Axes] = [self._figure.add_subplot(1, num_panels, place + 1) for place in range(num_panels)]
        for axes in self.panels:
            tidy(axes)

    def save(self, path: Path) -> None:
        """As a PNG."""
        canvas = FigureCanvasAgg(self._figure)
        canvas.draw()  # before that, nobody knows where names stand
        for axes in self.panels:
            _part_names(axes)
        canvas.print_png(str(path))


def _part_names(axes: Axes) -> None:
    """Lift names at the ends of lines that would stand on others, the lower ones first."""
    names = [text for text in axes.texts if isinstance(text, Annotation) and text.get_gid() == _AT_END]
    boxes: list[Bbox] = []
    for name in sorted(names, key=lambda name: name.get_window_extent().y0):
        box = name.get_window_extent()
        lift = 0.0
        for other in boxes:  # in the order of their height, so that one pass is enough
            if other.x0 < box.x1 and box.x0 < other.x1 and other.y0 < box.y1 + lift and box.y0 + lift < other.y1:
                lift = other.y1 - box.y0
        boxes.append(box.translated(0.0, lift))
        x, y = name.get_position()
        name.set_position((x, y + lift * 72 / axes.figure.dpi))


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
    end = (xs[-1], ys[-1])
    name = axes.annotate(label, end, xytext=(5, 0), textcoords="offset points", fontsize=8, color=colour, va="center")
    name.set_gid(_AT_END)


def dot(axes: Axes, x: float, y: float, label: str, index: int) -> None:
    """One point with its name beside it."""
    colour = COLOURS[index % len(COLOURS)]
    axes.plot([x], [y], MARKS[index % len(MARKS)], color=colour, markersize=6)
    axes.annotate(label, (x, y), xytext=(6, 0), textcoords="offset points", fontsize=8, color=colour, va="center")


def rule(axes: Axes, y: float, label: str, at: float = 0.01) -> None:
    """A level to compare with; its name stands at this share of the width, so that those of near levels can stand apart."""
    axes.axhline(y, color="#777777", linewidth=0.9, linestyle=(0, (2, 2)))
    axes.annotate(label, (at, y), xycoords=("axes fraction", "data"), fontsize=8, color="#555555", va="bottom")


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


def names_below(axes: Axes, names: Sequence[str]) -> None:
    """What stands at 0, 1, 2 and so on; long names take two lines."""
    axes.set_xticks(range(len(names)), [name.replace(", ", ",\n") for name in names], fontsize=8)
    axes.set_xlim(-0.5, len(names) - 0.5)
    axes.grid(False, axis="x")
