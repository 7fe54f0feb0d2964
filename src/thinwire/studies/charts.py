"""What was drawn for a PNG, as charts for a page: read from the axes, so that no figure is defined twice.

Lines, dots, levels and ranges are those that `thinwire.studies.figure` draws; anything else is left out.
"""

from collections.abc import Sequence
from statistics import mean

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis as DrawnAxis
from matplotlib.container import BarContainer
from matplotlib.lines import Line2D
from matplotlib.text import Annotation
from matplotlib.ticker import FixedLocator, NullLocator

from thinwire.pages.axes import Axis
from thinwire.pages.chart import Chart, Level, Point, Range, Series
from thinwire.pages.strips import Strip, Strips
from thinwire.studies.figure import LEVEL, Page, points_of


def charts_of(page: Page) -> list[Chart | Strips]:
    """A chart per panel; none for panels of another kind."""
    return [chart for axes in page.panels if (chart := _chart(axes)) is not None]


def _chart(axes: Axes) -> Chart | Strips | None:
    title = _words(axes.get_title(loc="left"))
    if any(isinstance(one, BarContainer) for one in axes.containers):
        return _bars(axes, title)
    lines, dots = _lines(axes), _dots(axes)
    levels = [Level(points_of(one)[0][1], str(one.get_label())) for one in axes.lines if one.get_gid() == LEVEL]
    x, y = _axis(axes.xaxis, axes.get_xlabel(), axes.get_xscale()), _axis(axes.yaxis, axes.get_ylabel(), axes.get_yscale())
    if dots and not lines and _is_by_name(axes):
        return _strips(title, y, dict(x.ticks or ()), dots)
    if not lines and not dots:
        return None
    if not axes.get_autoscaley_on():
        y = Axis(y.label, y.is_log, y.ticks, axes.get_ylim())
    return Chart(title, x, y, [*lines, *dots], levels)


def _words(text: str) -> str:
    return " ".join(text.split())


def _axis(drawn: DrawnAxis, label: str, scale: str) -> Axis:
    """With its ticks, if somebody has chosen them."""
    ticks = None
    if isinstance(drawn.get_major_locator(), FixedLocator):
        places = [float(place) for place in drawn.get_majorticklocs()]
        ticks = list(zip(places, map(_words, drawn.get_major_formatter().format_ticks(places)), strict=True))
    return Axis(_words(label), scale == "log", ticks)


def _style(drawn: Line2D) -> int | None:
    gid = drawn.get_gid()
    return int(gid) if gid is not None and gid.isdigit() else None


def _name(drawn: Line2D) -> str:
    label = str(drawn.get_label())
    return "" if label.startswith("_child") else _words(label.removeprefix("_"))


def _ranges(axes: Axes, name: str, points: Sequence[Point]) -> list[Range] | None:
    """The lowest and the highest of what was drawn around each point."""
    found: dict[float, list[float]] = {}
    for drawn in axes.collections:
        if drawn.get_gid() == name:
            for path in drawn.get_paths():
                for x, y in np.asarray(path.vertices):
                    found.setdefault(float(x), []).append(float(y))
    if not found:
        return None
    around = [found.get(x, [y]) for x, y in points]
    return [(min(some), max(some)) for some in around]


def _lines(axes: Axes) -> list[Series]:
    found = []
    for drawn in axes.lines:
        style = _style(drawn)
        if style is not None and drawn.get_linestyle() != "None":
            points, is_behind = points_of(drawn), drawn.get_marker() in ("None", "", None)
            ranges = _ranges(axes, str(drawn.get_label()), points)
            found.append(Series(_name(drawn), points, ranges, style=style, faint=is_behind))
    return found


def _dots(axes: Axes) -> list[Series]:
    """All of one style together, with a name for each where they have several."""
    named = {(float(one.xy[0]), float(one.xy[1])): one.get_text() for one in axes.texts if isinstance(one, Annotation)}
    points: dict[int, list[Point]] = {}
    names: dict[int, str] = {}
    for drawn in axes.lines:
        style = _style(drawn)
        if style is not None and drawn.get_linestyle() == "None":
            points.setdefault(style, []).extend(points_of(drawn))
            names[style] = names.get(style) or _name(drawn)
    found = []
    for style, mine in points.items():
        own = [_words(named.get(point, "")) for point in mine]
        has_names = len({name for name in own if name}) > 1
        ranges = _ranges(axes, names[style], mine)
        found.append(Series(names[style], mine, ranges, "dots", style, own if has_names else ()))
    return found


def _is_by_name(axes: Axes) -> bool:
    """Whether what stands side by side has names, or nothing, instead of numbers below."""
    locator = axes.xaxis.get_major_locator()
    return axes.get_xscale() == "linear" and isinstance(locator, (FixedLocator, NullLocator))


def _strips(title: str, axis: Axis, names: dict[float, str], dots: Sequence[Series]) -> Strips:
    strips = []
    for series in dots:
        values = [value for _, value in series.points]
        strips.append(Strip(names.get(series.points[0][0], series.name), values, f"{mean(values):.3f}", series.style))
    return Strips(title, axis, strips)


def _bars(axes: Axes, title: str) -> Strips:
    """Bars from left to right, their parts one after the other."""
    names = [text.get_text() for text in axes.get_yticklabels()]
    parts = [one for one in axes.containers if isinstance(one, BarContainer)]
    widths = [[float(bar.get_width()) for bar in part] for part in parts]
    strips = []
    for place, name in enumerate(names):
        values = [max(0.0, width[place]) for width in widths]
        strips.append(Strip(name, values, f"{sum(values):.2f}"))
    return Strips(title, Axis(axes.get_xlabel()), strips, [str(part.get_label()) for part in parts])
