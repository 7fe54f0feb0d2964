"""Figures with a row per name: dots along one axis, or bars made of parts. Long names have room at any width."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from thinwire.pages.axes import Axis, Scale, scale_for, words_for
from thinwire.pages.chart import WIDTH, colour_class, data_script, figure, legend_of, svg
from thinwire.pages.marks import mark
from thinwire.pages.names import width_of
from thinwire.pages.styles import mark_of

HATCHES = 5
_TOP, _BOTTOM, _RIGHT = 8.0, 46.0, 14.0
_WIDEST_BESIDE = 185.0
_ROW, _ROW_WITH_NAME, _BAR = 24.0, 40.0, 13.0


@dataclass(frozen=True)
class Strip:
    """A row: its values are dots, or the widths of the parts of a bar. ``words`` stand at its end. Dots have the ``style``
    with this number, or that of their place."""

    name: str
    values: Sequence[float]
    words: str = ""
    style: int | None = None


@dataclass(frozen=True)
class Strips:
    """``parts`` names the parts of bars; without them, values are dots."""

    title: str
    axis: Axis
    strips: Sequence[Strip]
    parts: Sequence[str] = ()

    def html(self) -> str:
        """A figure with its legend."""
        shown = [strip for strip in self.strips if any(self.axis.shows(value) for value in strip.values)]
        if not shown:
            return figure(self.title, '<p class="empty">nothing to show yet</p>', "", "")
        widest = max(width_of(strip.name) for strip in shown)
        is_beside = widest <= _WIDEST_BESIDE
        row = _ROW if is_beside else _ROW_WITH_NAME
        left = 10 + widest if is_beside else 4.0
        ends = [sum(strip.values) if self.parts else max(filter(self.axis.shows, strip.values)) for strip in shown]
        values = [0.0, *ends] if self.parts else [value for strip in shown for value in strip.values]
        words = 6 + max(width_of(strip.words) for strip in shown)
        scale = scale_for(self.axis, values, left, WIDTH - _RIGHT - words, 0.0 if self.parts else 0.05)
        height = _TOP + row * len(shown) + _BOTTOM
        body: list[str] = [_grid(scale, height)]
        spots: dict[str, list[list[object]]] = {name: [] for name in self.parts or ("",)}
        for number, strip in enumerate(shown):
            top = _TOP + row * number
            line = top + row - _ROW / 2
            body.append(_words(strip, is_beside, left, line, top))
            body.append(
                self._bar(strip, scale, line)
                if self.parts
                else _dots(strip, scale, line, strip.style if strip.style is not None else number)
            )
            for name, spot in self._spots(strip, scale, line):
                spots[name].append(spot)
        parts = legend_of((name, _sample(number)) for number, name in enumerate(self.parts)) if len(self.parts) > 1 else ""
        series = [{"name": name, "colour": "", "points": points} for name, points in spots.items()]
        return figure(self.title, svg("".join(body), height, self.title), parts, data_script({"x": "", "series": series}))

    def _bar(self, strip: Strip, scale: Scale, line: float) -> str:
        rects, begin = [], 0.0
        for number, value in enumerate(strip.values):
            first, last = scale.place(begin), scale.place(begin + value)
            begin += value
            size = f'x="{first:.1f}" y="{line - _BAR / 2:.1f}" width="{max(0.0, last - first):.1f}" height="{_BAR:g}"'
            hatch = f'<rect class="hatch" {size} fill="url(#hatch{number % HATCHES})"/>' if number else ""
            name = escape(self.parts[number], quote=True)
            rects.append(
                f'<g class="series {colour_class(number)}" data-name="{name}"><rect class="bar" {size}/>{hatch}</g>'
            )
        return "".join(rects)

    def _spots(self, strip: Strip, scale: Scale, line: float) -> Iterator[tuple[str, list[object]]]:
        """For the script: where to point at, and what is said then; by the part, if there are parts."""
        if not self.parts:
            for value in filter(self.axis.shows, strip.values):
                yield "", [round(scale.place(value), 1), line, strip.name, words_for(value)]
            return
        begin = 0.0
        for name, value in zip(self.parts, strip.values, strict=True):
            middle = scale.place(begin + value / 2)
            begin += value
            if value > 0:
                yield name, [round(middle, 1), line, strip.name, f"{words_for(value)} {self.axis.label}", name]


def _grid(scale: Scale, height: float) -> str:
    base, parts = height - _BOTTOM + 4, []
    for value, words in scale.ticks(5):
        at = scale.place(value)
        parts.append(f'<path class="grid" d="M{at:.1f} {_TOP:g}V{base:.1f}"/>')
        parts.append(f'<text x="{at:.1f}" y="{base + 17:.1f}" text-anchor="middle">{escape(words)}</text>')
    middle = (scale.first + scale.last) / 2
    label = escape(scale.axis.label)
    parts.append(f'<text class="label" x="{middle:.1f}" y="{height - 5:.1f}" text-anchor="middle">{label}</text>')
    return "".join(parts)


def _words(strip: Strip, is_beside: bool, left: float, line: float, top: float) -> str:
    name = escape(strip.name)
    if is_beside:
        first = f'<text class="name" x="{left - 8:.1f}" y="{line + 5:.1f}" text-anchor="end">{name}</text>'
    else:
        first = f'<text class="name" x="0" y="{top + 14:.1f}">{name}</text>'
    last = f'<text class="name" x="{WIDTH:g}" y="{line + 5:.1f}" text-anchor="end">{escape(strip.words)}</text>'
    return first + (last if strip.words else "")


def _dots(strip: Strip, scale: Scale, line: float, number: int) -> str:
    shape = mark_of(number)
    marks = "".join(mark(shape, scale.place(value), line) for value in strip.values if scale.axis.shows(value))
    rail = f'<path class="grid" d="M{scale.first:.1f} {line:.1f}H{scale.last:.1f}"/>'
    return f'{rail}<g class="series {colour_class(number)}"><path class="mark" d="{marks}"/></g>'


def _sample(number: int) -> str:
    size = 'x="3" y="2" width="30" height="12"'
    hatch = f'<rect class="hatch" {size} fill="url(#hatch{number % HATCHES})"/>' if number else ""
    return (
        f'<svg class="swatch {colour_class(number)}" viewBox="0 0 36 16" aria-hidden="true">'
        f'<rect class="bar" {size}/>{hatch}</svg>'
    )
