"""A comparison as figures. Marks, dashes and hatches differ, so that they read in grey."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from thinwire.lab.losses import Curve
from thinwire.lab.rows import Cell
from thinwire.pages.styles import COLOURS, DASHES, MARKS

_PARTS = (
    ("compute", ("data", "forward", "backward"), "#dddddd", ""),
    ("encode", ("encode",), "#009e73", "///"),
    ("exchange, exposed", ("exposed",), "#d55e00", "xx"),
    ("decode and update", ("apply", "other"), "#0072b2", "..."),
)


def draw_steps(cells: Sequence[Cell], path: Path) -> None:
    """Seconds per step: a row per method, a mark per link, a panel per number of hosts."""
    hosts = sorted({cell.num_hosts for cell in cells})
    methods = list(dict.fromkeys(cell.method for cell in cells))
    links = list(dict.fromkeys(cell.link for cell in cells))
    figure = Figure(figsize=(5.2 * len(hosts) + 2.2, 0.34 * len(methods) + 1.8), dpi=140, layout="constrained")
    for place, num_hosts in enumerate(hosts):
        axes = figure.add_subplot(1, len(hosts), place + 1)
        for index, link in enumerate(links):
            chosen = [c for c in cells if c.link == link and c.num_hosts == num_hosts and not c.error]
            heights = [methods.index(cell.method) for cell in chosen]
            colour = COLOURS[index % len(COLOURS)]
            mark = MARKS[index % len(MARKS)]
            axes.plot([c.seconds for c in chosen], heights, mark, color=colour, label=link, markersize=5.5, alpha=0.85)
        axes.set_xscale("log")
        axes.set_yticks(range(len(methods)), methods if place == 0 else [""] * len(methods))
        axes.set_ylim(len(methods) - 0.5, -0.5)
        axes.set_xlabel("seconds per step")
        axes.set_title(f"{num_hosts} hosts", loc="left", fontsize=10)
        tidy(axes)
    figure.axes[-1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, title="link")
    FigureCanvasAgg(figure).print_png(str(path))


def draw_breakdown(cells: Sequence[Cell], path: Path, title: str) -> None:
    """Where a step's time goes, as a PNG."""
    FigureCanvasAgg(breakdown(cells, title)).print_png(str(path))


def breakdown(cells: Sequence[Cell], title: str) -> Figure:
    """Where a step's time goes: a bar per method; what is hidden behind backward is written beside it."""
    chosen = [cell for cell in cells if not cell.error]
    figure = Figure(figsize=(8.5, 0.34 * len(chosen) + 1.6), dpi=140, layout="constrained")
    axes = figure.add_subplot()
    lefts = [0.0] * len(chosen)
    for label, names, colour, hatch in _PARTS:
        widths = [max(0.0, sum(cell.parts[name] for name in names)) for cell in chosen]
        style = {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.4}
        axes.barh(range(len(chosen)), widths, left=lefts, label=label, **style)  # type: ignore[arg-type]
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    axes.set_yticks(range(len(chosen)), [cell.method for cell in chosen])
    axes.set_ylim(len(chosen) - 0.5, -0.5)
    shown = sorted(lefts)[int(0.6 * len(lefts))] * 2.2
    axes.set_xlim(0, shown)
    for height, (cell, end) in enumerate(zip(chosen, lefts, strict=True)):
        hidden = f" ({1e3 * cell.hidden:.0f} ms hidden)" if cell.hidden > 0.005 else ""
        where = min(end, shown * 0.86)
        text = f"{end:.2f} s" if end < shown else f"{end:.1f} s >"
        behind = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
        axes.text(where + 0.007 * shown, height, text + hidden, va="center", fontsize=7.5, bbox=behind)
    axes.set_xlabel("seconds per step")
    axes.set_title(title, loc="left", fontsize=10)
    figure.legend(fontsize=8, loc="outside lower center", ncols=len(_PARTS), frameon=False)
    tidy(axes)
    return figure


def draw_losses(cells: Sequence[Cell], curves: dict[str, Curve], path: Path, target: float | None) -> None:
    """Validation loss against time, a panel per link; time is steps times the seconds of a step on that link."""
    links = list(dict.fromkeys(cell.link for cell in cells))
    figure = Figure(figsize=(5.4 * len(links) + 1.4, 4.4), dpi=140, layout="constrained")
    for place, link in enumerate(links):
        axes = figure.add_subplot(1, len(links), place + 1)
        shown = [cell for cell in cells if cell.link == link and not cell.error and cell.method in curves]
        for index, cell in enumerate(shown):
            curve = curves[cell.method]
            points = [(step * cell.seconds, loss) for step, loss in curve.points if step > 0]
            (line,) = axes.plot(*zip(*points, strict=True), color=COLOURS[index % len(COLOURS)], linewidth=1.5)
            line.set_marker(MARKS[index % len(MARKS)])
            line.set_markersize(3.5)
            line.set_markevery((index % 4, 4))
            line.set_label(cell.method)
            if dashes := DASHES[index % len(DASHES)]:
                line.set_dashes(dashes)
        if target is not None:
            axes.axhline(target, color="#999999", linewidth=0.8)
        axes.set_xscale("log")
        axes.set_xlabel("seconds of training")
        axes.set_ylabel("validation loss (nats per byte)")
        axes.set_title(f"{link}, {shown[0].num_hosts if shown else 0} hosts", loc="left", fontsize=10)
        tidy(axes)
    figure.axes[-1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    FigureCanvasAgg(figure).print_png(str(path))


def tidy(axes: Axes) -> None:
    """A light grid, and no frame where there is no axis."""
    axes.grid(True, which="major", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
