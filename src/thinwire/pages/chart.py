"""Figures as inline SVG: there without a script, told apart in grey, and legible at the width of a phone.

A figure is 480 units wide, whatever the screen. Its colours are classes that the page's style sheet knows, in light and in
dark; names stand in a legend below, which cannot cover anything. What the script needs to name points lies beside the SVG.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Literal

from thinwire.pages.axes import Axis, Scale, scale_for, words_for
from thinwire.pages.marks import mark
from thinwire.pages.names import place_levels, place_names, width_of
from thinwire.pages.styles import COLOURS, DASHES, mark_of

WIDTH = 480.0
_TOP, _BASE, _RIGHT = 30.0, 250.0, 18.0
_MOST_POINTS = 400
_MOST_MARKS = 40

Point = tuple[float, float]
Range = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """Points with a name. ``ranges`` is from where to where each may be. ``style`` is the number of its colour, dashes and
    mark. ``names``, if given, has a word for each point. ``faint`` lies behind the others, without marks."""

    name: str
    points: Sequence[Point]
    ranges: Sequence[Range] | None = None
    kind: Literal["line", "dots"] = "line"
    style: int = 0
    names: Sequence[str] = ()
    faint: bool = False


@dataclass(frozen=True)
class Level:
    """A horizontal line to compare with."""

    at: float
    name: str


@dataclass(frozen=True)
class Chart:
    """Series over two axes."""

    title: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    levels: Sequence[Level] = ()

    def html(self) -> str:
        """A figure with its legend."""
        drawn = [_cleaned(one, self.x, self.y) for one in self.series]
        if not any(one.points for one in drawn):
            return figure(self.title, '<p class="empty">nothing to show yet</p>', "", "")
        x, y = _scales(self, drawn)
        height = _BASE + (58 if _is_crowded(x) else 44)
        body = [_grid(x, y, height), *(_level_lines(self.levels, x, y))]
        body += [_drawn(one, x, y) for one in sorted(drawn, key=lambda one: not one.faint)]
        named, key = _names(drawn, x, y)
        body += [*_level_names(self.levels, drawn, x, y), named]
        legend = _legend([one for one in drawn if one.points and one.name]) + key
        return figure(self.title, svg("".join(body), height, self.title), legend, _data(drawn, x, y))


def figure(title: str, picture: str, legend: str, data: str) -> str:
    """A picture with its title above and its legend below."""
    return f'<figure class="chart"><figcaption>{escape(title)}</figcaption>{picture}{legend}{data}</figure>'


def svg(body: str, height: float, title: str) -> str:
    """A picture of the usual width."""
    size = f"0 0 {WIDTH:g} {height:g}"
    return f'<svg viewBox="{size}" role="img" aria-label="{escape(title, quote=True)}">{body}</svg>'


def colour_class(style: int) -> str:
    """The class that gives a series its colour."""
    return f"c{style % len(COLOURS)}"


def thin(series: Series, most: int = _MOST_POINTS) -> Series:
    """At most about so many points of a line: the lowest and the highest of equally many neighbours each, so that no
    outlier is lost."""
    if len(series.points) <= most or series.kind != "line":
        return series
    size = math.ceil(2 * len(series.points) / most)
    kept = {0, len(series.points) - 1}
    for first in range(0, len(series.points), size):
        some = range(first, min(first + size, len(series.points)))
        kept |= {min(some, key=lambda at: series.points[at][1]), max(some, key=lambda at: series.points[at][1])}
    order = sorted(kept)
    ranges = None if series.ranges is None else [series.ranges[at] for at in order]
    return Series(series.name, [series.points[at] for at in order], ranges, "line", series.style, (), series.faint)


def _cleaned(series: Series, x: Axis, y: Axis) -> Series:
    """Without points that have no place on the axes, and thinned."""
    kept = [at for at, point in enumerate(series.points) if x.shows(point[0]) and y.shows(point[1])]
    points = [series.points[at] for at in kept]
    names = [series.names[at] for at in kept] if series.names else ()
    ranges = None
    if series.ranges is not None:
        pairs = [(series.points[at][1], series.ranges[at]) for at in kept]
        ranges = [(low if y.shows(low) else own, high if y.shows(high) else own) for own, (low, high) in pairs]
    return thin(Series(series.name, points, ranges, series.kind, series.style, names, series.faint))


def _scales(chart: Chart, drawn: Sequence[Series]) -> tuple[Scale, Scale]:
    xs = [point[0] for one in drawn for point in one.points]
    ys = [point[1] for one in drawn for point in one.points] + [level.at for level in chart.levels]
    ys += [end for one in drawn for pair in one.ranges or () for end in pair]
    y = scale_for(chart.y, ys, _BASE, _TOP)
    left = 14 + max((width_of(words) for _, words in y.ticks(5)), default=0.0)
    return scale_for(chart.x, xs, left, WIDTH - _RIGHT, 0.03), y


def _is_crowded(x: Scale) -> bool:
    """Whether words below would touch, so that they stand on two levels."""
    spans = [(x.place(value), width_of(words) / 2) for value, words in x.ticks(6)]
    return any(at + half + 6 > after - other for (at, half), (after, other) in pairwise(spans))


def _grid(x: Scale, y: Scale, height: float) -> str:
    """Lines and words of the axes."""
    parts = []
    for value, words in y.ticks(5):
        at = y.place(value)
        parts.append(f'<path class="grid" d="M{x.first:.1f} {at:.1f}H{x.last:.1f}"/>')
        parts.append(f'<text x="{x.first - 6:.1f}" y="{at + 5:.1f}" text-anchor="end">{escape(words)}</text>')
    crowded = _is_crowded(x)
    for number, (value, words) in enumerate(x.ticks(6)):
        at = x.place(value)
        lower = 14 if crowded and number % 2 else 0
        parts.append(f'<path class="tick" d="M{at:.1f} {y.first:.1f}v{5 + lower}"/>')
        side = "end" if at + width_of(words) / 2 > WIDTH else "middle"
        end = min(at, WIDTH - 1) if side == "end" else at
        parts.append(f'<text x="{end:.1f}" y="{y.first + 18 + lower:.1f}" text-anchor="{side}">{escape(words)}</text>')
    parts.append(f'<path class="axis" d="M{x.first:.1f} {y.first:.1f}H{x.last:.1f}"/>')
    parts.append(f'<text class="label" x="0" y="14">{escape(y.axis.label)}</text>')
    middle = (x.first + x.last) / 2
    parts.append(
        f'<text class="label" x="{middle:.1f}" y="{height - 5:g}" text-anchor="middle">{escape(x.axis.label)}</text>'
    )
    return "".join(parts)


def _level_lines(levels: Sequence[Level], x: Scale, y: Scale) -> Iterable[str]:
    for level in levels:
        if y.axis.shows(level.at):
            yield f'<path class="level" d="M{x.first:.1f} {y.place(level.at):.1f}H{x.last:.1f}"/>'


def _level_names(levels: Sequence[Level], drawn: Sequence[Series], x: Scale, y: Scale) -> Iterable[str]:
    shown = [(y.place(level.at), level.name) for level in levels if y.axis.shows(level.at)]
    crossed = [point for one in drawn for point in _along([(x.place(a), y.place(b)) for a, b in one.points])]
    frame = (x.first, _TOP - 14, x.last, y.first)
    for (left, base), (_, name) in zip(place_levels(shown, frame, crossed), shown, strict=True):
        yield f'<text class="name" x="{left:.1f}" y="{base:.1f}">{escape(name)}</text>'


def _along(corners: Sequence[Point], apart: float = 8.0) -> list[Point]:
    """Points all along a line, so far from each other."""
    found = list(corners[:1])
    for (x, y), (next_x, next_y) in pairwise(corners):
        number = max(1, round(math.hypot(next_x - x, next_y - y) / apart))
        found += [(x + (next_x - x) * part / number, y + (next_y - y) * part / number) for part in range(1, number + 1)]
    return found


def _drawn(series: Series, x: Scale, y: Scale) -> str:
    """Range, line and marks of a series."""
    places = [(x.place(one), y.place(other)) for one, other in series.points]
    parts = []
    if series.ranges is not None and places:
        parts.append(_ranges(series, [(y.place(low), y.place(high)) for low, high in series.ranges], places))
    if series.kind == "line" and len(places) > 1:
        dashes = " ".join(f"{2 * part:g}" for part in DASHES[series.style % len(DASHES)])
        dashed = f' stroke-dasharray="{dashes}"' if dashes and not series.faint else ""
        parts.append(f'<path class="line" d="M{"L".join(f"{one:.1f} {other:.1f}" for one, other in places)}"{dashed}/>')
    if not series.faint:
        parts.append(f'<path class="mark" d="{_marks(series, places)}"/>')
    faint = " faint" if series.faint else ""
    return f'<g class="series {colour_class(series.style)}{faint}" data-name="{escape(series.name)}">{"".join(parts)}</g>'


def _ranges(series: Series, ends: Sequence[Range], places: Sequence[Point]) -> str:
    if series.kind == "dots" or len(places) == 1:
        return "".join(
            f'<path class="line" d="M{at:.1f} {low:.1f}V{high:.1f}"/>'
            for (at, _), (low, high) in zip(places, ends, strict=True)
        )
    there = [f"{at:.1f} {low:.1f}" for (at, _), (low, _) in zip(places, ends, strict=True)]
    back = [f"{at:.1f} {high:.1f}" for (at, _), (_, high) in zip(places, ends, strict=True)]
    return f'<path class="band" d="M{"L".join([*there, *reversed(back)])}Z"/>'


def _marks(series: Series, places: Sequence[Point]) -> str:
    """All of them, or some where there are many, at other places for other styles."""
    step = math.ceil(len(places) / 8) if series.kind == "line" and len(places) > _MOST_MARKS else 1
    chosen = places[(series.style * step // 4) % step :: step] if step > 1 else places
    return "".join(mark(mark_of(series.style), one, other) for one, other in chosen)


def _names(drawn: Sequence[Series], x: Scale, y: Scale) -> tuple[str, str]:
    """Words beside the points that have their own, and a key to the numbers of those that found no room."""
    points, owners = [], []
    for one in drawn:
        for (across, up), name in zip(one.points, one.names, strict=False):
            points.append((x.place(across), y.place(up), name))
            owners.append(one)
    parts, key = [], []
    for placed, (_, _, name), owner in zip(
        place_names(points, (x.first, _TOP - 14, WIDTH, y.first)), points, owners, strict=True
    ):
        if placed.number:
            key.append(f"{placed.number} {name}")
        if placed.words:
            place = f'x="{placed.x:.1f}" y="{placed.base:.1f}" text-anchor="{placed.anchor}"'
            text = f'<text class="name {colour_class(owner.style)}" {place}>{escape(placed.words)}</text>'
            parts.append(f'<g class="series" data-name="{escape(owner.name)}">{text}</g>')
    return "".join(parts), f'<p class="key">{escape("; ".join(key))}</p>' if key else ""


def _legend(drawn: Sequence[Series]) -> str:
    """A button per series, which hides and shows it."""
    if len(drawn) == 1:
        return ""  # the title says it
    return legend_of((one.name, swatch(one)) for one in drawn)


def legend_of(entries: Iterable[tuple[str, str]]) -> str:
    """Names with a sample of how each is drawn."""
    lines = [
        f'<li><button type="button" aria-pressed="true" data-name="{escape(name)}">{sample}{escape(name)}</button></li>'
        for name, sample in dict(entries).items()
    ]
    return f'<ul class="legend">{"".join(lines)}</ul>' if lines else ""


def swatch(series: Series) -> str:
    """A piece of the line, with its mark."""
    parts = []
    if series.kind == "line":
        dashes = " ".join(f"{2 * part:g}" for part in DASHES[series.style % len(DASHES)])
        dashed = f' stroke-dasharray="{dashes}"' if dashes and not series.faint else ""
        parts.append(f'<path class="line" d="M1 8H35"{dashed}/>')
    if not series.faint:
        parts.append(f'<path class="mark" d="{mark(mark_of(series.style), 18, 8)}"/>')
    kind = f"swatch {colour_class(series.style)}{' faint' if series.faint else ''}"
    return f'<svg class="{kind}" viewBox="0 0 36 16" aria-hidden="true">{"".join(parts)}</svg>'


def _data(drawn: Sequence[Series], x: Scale, y: Scale) -> str:
    """What the script says about a point that is pointed at: its place, and words for it."""
    series = []
    for one in drawn:
        points = []
        for at, (across, up) in enumerate(one.points):
            words = words_for(up) if abs(up) >= 1000 else f"{up:.4g}"
            if one.ranges is not None and one.ranges[at][0] != one.ranges[at][1]:
                words += f" ({one.ranges[at][0]:.4g} to {one.ranges[at][1]:.4g})"
            place = (round(x.place(across), 1), round(y.place(up), 1))
            points.append([*place, _words_across(x.axis, across), words, *(one.names[at : at + 1])])
        series.append({"name": one.name, "colour": colour_class(one.style), "points": points})
    labels = {"x": x.axis.label, "series": series}
    return data_script(labels)


def _words_across(axis: Axis, value: float) -> str:
    named = dict(axis.ticks or ())
    return named.get(value, f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}")


def data_script(data: object) -> str:
    """Data for the script, which no text in it can break out of."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return f'<script type="application/json">{text}</script>'
