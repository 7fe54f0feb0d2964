"""Names beside points, at the ends of lines, at levels and below an axis, put where they do not cover each other.

All of this is for a page whose layout has settled (`Figure.draw_without_rendering`), titles and all.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations, pairwise, product
from math import cos, hypot, pi, sin
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from matplotlib.text import Text
from matplotlib.textpath import TextPath

from thinwire.pages.styles import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Lengths are in points of the page. Labels have letters of this size, and a line of them is so high.
_SIZE, _HIGH = 8, 9.0
# Letters on pixels are so much wider than their outlines.
_HINTED = 1.04
# Wider than any page.
_WIDE = 1e6
# What is tried for the name of a point: right of it, left, above, below and between, at several distances.
_TURNS = (0.0, 1.0, 0.5, -0.5, *(turn / 8 for turn in (1, -1, 2, -2, 3, -3, 5, -5, 6, -6, 7, -7)))
_DISTANCES = (6.0, 9.0, 13.0, 18.0, 24.0)
_PLACES = [(round(far * cos(turn * pi), 1), round((far + 2) * sin(turn * pi), 1)) for far in _DISTANCES for turn in _TURNS]
# From here on a thin line leads from a point to its name.
_FAR = 14.0
# What a distance of one is worth in square points that are covered: of those places that cover nothing the nearest is taken.
_NEARNESS = np.array([0.05 * hypot(*place) for place in _PLACES])
# How much worse it is to cover a name than a mark.
_NAME_ON_NAME = 4.0
_ROUNDS = 8
# What is tried for the name of a level: how much of the free width is left of it.
_SHARES = (0.0, 1.0, 0.5, 0.25, 0.75)
# A name may stand so far above the panel: below its title there is room.
_OVER = 3.0
# Between names that stand side by side.
_GAP = 4.0
_TIGHTER = (0.9, 0.8, 0.7, 0.6, 0.5)


class Named(NamedTuple):
    """A point of a figure, its name, and the number of its style."""

    x: float
    y: float
    label: str
    style: int


class _Box(NamedTuple):
    left: float
    low: float
    right: float
    high: float


def label_points(axes: "Axes", points: Sequence[Named], spread: Sequence[tuple[float, float]] | None = None) -> None:
    """A name beside each point, where it covers as little as can be of other names, points, and ranges of y."""
    frame, centres = _frame(axes), _on_page(axes, [(point.x, point.y) for point in points])
    taken = _drawn(axes)
    for place, (low, high) in enumerate(spread or ()):
        (x, bottom), (_, top) = _on_page(axes, [(points[place].x, low), (points[place].x, high)])
        taken.append(_Box(x - 2, bottom, x + 2, top))
    tried = [[_box(x, y, place, point.label) for place in _PLACES] for point, (x, y) in zip(points, centres, strict=True)]
    costs = [_covered(boxes, taken) + _outside(boxes, frame) + _NEARNESS for boxes in tried]
    best: list[int | None] = [None] * len(points)
    for _ in range(_ROUNDS):
        for mine, boxes in enumerate(tried):
            others = [tried[other][one] for other, one in enumerate(best) if one is not None and other != mine]
            best[mine] = int(np.argmin(costs[mine] + _NAME_ON_NAME * _covered(boxes, others)))
    for point, one in zip(points, best, strict=True):
        _write(axes, point, _PLACES[one or 0])


def label_ends(axes: "Axes", ends: Sequence[Named], levels: Sequence[float] = ()) -> None:
    """Names to the right of the ends of lines, moved up and down until none covers another, or crosses a level or the edge
    of the panel; each stays on that side of a level where its line ends."""
    frame, centres = _frame(axes), _on_page(axes, [(end.x, end.y) for end in ends])
    far = frame.high - frame.low
    edges = [_Box(-_WIDE, frame.low - far, _WIDE, frame.low), _Box(-_WIDE, frame.high, _WIDE, frame.high + far)]
    walls = _joined([*edges, *(_around(0, y, _WIDE, 0.5) for y in _heights(axes, levels))])
    names = [
        _Box(x, y - high / 2, x + wide, y + high / 2) for (x, y), (wide, high) in zip(centres, _sizes(ends), strict=True)
    ]
    moved = _apart(walls, names)
    for end, up in zip(ends, moved, strict=True):
        _write(axes, end, (18, up) if abs(up) > 2 else (6, up))


def _joined(walls: Sequence[_Box]) -> list[_Box]:
    """Those with no room for a name between them as one."""
    found: list[_Box] = []
    for wall in sorted(walls, key=lambda wall: wall.low):
        if found and wall.low - found[-1].high < _HIGH:
            found[-1] = found[-1]._replace(high=max(wall.high, found[-1].high))
        else:
            found.append(wall)
    return found


def _apart(walls: Sequence[_Box], names: Sequence[_Box]) -> list[float]:
    """How far up each name is moved, so that none overlaps another or a wall; walls stay."""
    boxes = [*walls, *names]
    moved = [0.0] * len(boxes)
    order = sorted(range(len(boxes)), key=lambda place: boxes[place].low + boxes[place].high)
    pairs = [
        (below, above)
        for below, above in combinations(order, 2)
        if max(below, above) >= len(walls)
        and boxes[below].left < boxes[above].right
        and boxes[above].left < boxes[below].right
    ]
    for _ in range(400):
        for below, above in pairs:
            lacking = boxes[below].high + moved[below] - boxes[above].low - moved[above]
            if lacking > 1e-3:
                share = 0.0 if below < len(walls) else 1.0 if above < len(walls) else 0.5
                moved[below] -= share * lacking
                moved[above] += (1 - share) * lacking
    return moved[len(walls) :]


def label_levels(axes: "Axes", levels: Sequence[tuple[float, str]]) -> None:
    """A name above or below each level, where it covers as little as can be of what is drawn and written so far."""
    frame, heights = _frame(axes), _heights(axes, [y for y, _ in levels])
    written = [*_written(axes), *(_Box(frame.left, y - 1, frame.right, y + 1) for y in heights)]
    drawn, inside = _drawn(axes), frame._replace(high=frame.high + _OVER)
    for (level, name), y in zip(levels, heights, strict=True):
        wide = _wide(name)
        places = list(product((1.5 + _HIGH / 2, -1.5 - _HIGH / 2), _SHARES))
        lefts = [frame.left + 3 + share * (frame.right - frame.left - wide - 6) for _, share in places]
        boxes = [_around(left + wide / 2, y + up, wide / 2, _HIGH / 2) for (up, _), left in zip(places, lefts, strict=True)]
        costs = _covered(boxes, drawn) + 10 * _covered(boxes, written) + _outside(boxes, inside)
        best = int(np.argmin(costs + 0.01 * np.arange(len(boxes))))
        written.append(boxes[best])
        at, up = (lefts[best] - frame.left) / (frame.right - frame.left), places[best][0]
        where = {"xycoords": ("axes fraction", "data"), "xytext": (0, up), "textcoords": "offset points", "va": "center"}
        axes.annotate(name, (at, level), fontsize=_SIZE, color="#555555", **where)  # type: ignore[arg-type]


def wrap_below(axes: "Axes") -> None:
    """Names below an axis take more lines where they would run into their neighbours."""
    places, texts = list(axes.get_xticks()), axes.get_xticklabels()
    xs = [x for x, _ in _on_page(axes, [(place, 0.0) for place in places])]
    size = float(texts[0].get_fontsize())
    room = min((after - before for before, after in pairwise(xs)), default=1e6) - _GAP
    words = [text.get_text().replace("\n", " \n ").split(" ") for text in texts]
    axes.set_xticks(places, [_wrapped(some, room * _SIZE / size) for some in words], fontsize=size)


def _wrapped(words: Sequence[str], room: float) -> str:
    """In as few lines as there is room for, about as long as each other."""
    lines = _filled(words, room)
    for share in _TIGHTER:
        if len(tighter := _filled(words, share * room)) == len(lines):
            lines = tighter
    return "\n".join(lines)


def _filled(words: Sequence[str], room: float) -> list[str]:
    lines = [""]
    for word in words:
        longer = f"{lines[-1]} {word}".strip()
        if word == "\n":
            lines.append("")
        elif _wide(longer) <= room or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


@lru_cache(maxsize=4096)
def _wide(words: str) -> float:
    lines = [line for line in words.split("\n") if line.strip()]
    return _HINTED * max((float(TextPath((0, 0), line, size=_SIZE).get_extents().width) for line in lines), default=0.0)


def _sizes(ends: Sequence[Named]) -> list[tuple[float, float]]:
    """With the distance from the end."""
    return [(_wide(end.label) + 18, _HIGH * (end.label.count("\n") + 1)) for end in ends]


def _scale(axes: "Axes") -> float:
    return float(axes.get_figure(root=True).dpi) / 72  # type: ignore[union-attr]


def _on_page(axes: "Axes", points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Where points are."""
    scale = _scale(axes)
    return [(float(x) / scale, float(y) / scale) for x, y in axes.transData.transform(points)]


def _frame(axes: "Axes") -> _Box:
    scale, frame = _scale(axes), axes.get_window_extent()
    return _Box(frame.x0 / scale, frame.y0 / scale, frame.x1 / scale, frame.y1 / scale)


def _heights(axes: "Axes", levels: Sequence[float]) -> list[float]:
    return [y for _, y in _on_page(axes, [(axes.get_xlim()[0], level) for level in levels])] if levels else []


def _around(x: float, y: float, wide: float, high: float) -> _Box:
    return _Box(x - wide, y - high, x + wide, y + high)


def _box(x: float, y: float, place: tuple[float, float], label: str) -> _Box:
    wide, (right, up) = _wide(label), place
    left = x + right - (wide if right < 0 else wide / 2 if right == 0 else 0)
    return _Box(left, y + up - _HIGH / 2, left + wide, y + up + _HIGH / 2)


def _written(axes: "Axes") -> list[_Box]:
    """What is written in a panel, without the thin lines that lead there."""
    scale = _scale(axes)
    extents = [Text.get_window_extent(text) for text in axes.texts]
    return [_Box(*(float(edge) / scale for edge in one.extents)) for one in extents]


def _drawn(axes: "Axes") -> list[_Box]:
    """Small boxes along all lines but levels, and larger ones around marks."""
    found = []
    for line in axes.lines:
        if line.get_transform() != axes.transData:
            continue
        points = _on_page(axes, [(float(x), float(y)) for x, y in np.asarray(line.get_xydata())])
        found += [_around(x, y, 4, 4) for x, y in points if line.get_marker() not in ("None", "")]
        for (x, y), (other, up) in pairwise(points if line.get_linestyle() != "None" else ()):
            steps = np.linspace(0, 1, 2 + int(hypot(other - x, up - y) / 3))
            found += [_around(x + step * (other - x), y + step * (up - y), 1.5, 1.5) for step in steps]
    return found


def _covered(boxes: Sequence[_Box], taken: Sequence[_Box]) -> np.ndarray:
    """How much of all that is taken each box covers."""
    if not taken:
        return np.zeros(len(boxes))
    mine, others = np.array(boxes)[:, None], np.array(taken)[None]
    wide = np.minimum(mine[..., 2], others[..., 2]) - np.maximum(mine[..., 0], others[..., 0])
    high = np.minimum(mine[..., 3], others[..., 3]) - np.maximum(mine[..., 1], others[..., 1])
    return (wide.clip(0) * high.clip(0)).sum(axis=1)  # type: ignore[no-any-return]


def _outside(boxes: Sequence[_Box], frame: _Box) -> np.ndarray:
    areas = np.array([(box.right - box.left) * (box.high - box.low) for box in boxes])
    return 10 * (areas - _covered(boxes, [frame]))  # type: ignore[no-any-return]


def _write(axes: "Axes", point: Named, place: tuple[float, float]) -> None:
    colour = COLOURS[point.style % len(COLOURS)]
    side = "left" if place[0] > 0 else "right" if place[0] < 0 else "center"
    # Where a name is away from its point, a thin line from its near edge leads there.
    edge = {"left": (0.0, 0.5), "right": (1.0, 0.5), "center": (0.5, 0.0 if place[1] > 0 else 1.0)}[side]
    leader = {"arrowstyle": "-", "color": colour, "linewidth": 0.6, "relpos": edge, "shrinkA": 0.5, "shrinkB": 3.0}
    axes.annotate(
        point.label,
        (point.x, point.y),
        xytext=place,
        textcoords="offset points",
        fontsize=_SIZE,
        color=colour,
        ha=side,
        va="center",
        arrowprops=leader if hypot(*place) > _FAR else None,
        annotation_clip=False,
    )
