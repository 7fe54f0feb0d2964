"""Names beside points and at the ends of lines, put where they do not cover each other."""

from collections.abc import Sequence
from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

from thinwire.pages.styles import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Points of the page: a letter of the size that labels have is about so wide, and a line so high.
_WIDE, _HIGH, _SIZE = 4.4, 9.0, 8
# Right, left, above, below and between, nearer ones first; what is tried for a label, in points of the page.
_PLACES = [(x * near, y * near) for near in (1, 2, 3.2) for x, y in ((6, 0), (-6, 0), (0, 8), (0, -8), (6, 7), (6, -7))]
_PLACES += [(x * near, y * near) for near in (1, 2, 3.2) for x, y in ((-6, 7), (-6, -7))]


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

    def overlap(self, other: "_Box") -> float:
        wide = min(self.right, other.right) - max(self.left, other.left)
        high = min(self.high, other.high) - max(self.low, other.low)
        return max(0.0, wide) * max(0.0, high)


def label_points(axes: "Axes", points: Sequence[Named]) -> None:
    """A name beside each point, where it covers as little as can be of other names and points. Call it when all is drawn."""
    scale, centres = _scale(axes), _centres(axes, points)
    frame = axes.get_window_extent()
    inside = _Box(frame.x0 / scale, frame.y0 / scale, frame.x1 / scale, frame.y1 / scale)
    taken = [_Box(x - 4, y - 4, x + 4, y + 4) for x, y in centres]
    for point, (x, y) in zip(points, centres, strict=True):
        boxes = [_box(x, y, place, point.label) for place in _PLACES]
        costs = [sum(box.overlap(one) for one in taken) + _outside(box, inside) for box in boxes]
        best = costs.index(min(costs))
        taken.append(boxes[best])
        _write(axes, point, _PLACES[best])


def label_ends(axes: "Axes", ends: Sequence[Named]) -> None:
    """Names to the right of the ends of lines, moved up and down until none covers another."""
    centres = _centres(axes, ends)
    sizes = [_size(end.label) for end in ends]
    order = sorted(range(len(ends)), key=lambda place: centres[place][1])
    free = [y for _, y in centres]
    for _ in range(200):
        for below, above in combinations(order, 2):
            (left, _), (other, _) = centres[below], centres[above]
            if left + sizes[below][0] < other or other + sizes[above][0] < left:
                continue
            lacking = (sizes[below][1] + sizes[above][1]) / 2 - (free[above] - free[below])
            if lacking > 1e-3:
                free[below] -= lacking / 2
                free[above] += lacking / 2
    for place, end in enumerate(ends):
        moved = free[place] - centres[place][1]
        _write(axes, end, (18, moved) if abs(moved) > 2 else (6, moved))


def _size(label: str) -> tuple[float, float]:
    lines = label.split("\n")
    return _WIDE * max(len(one) for one in lines) + 18, _HIGH * len(lines)


def _scale(axes: "Axes") -> float:
    return float(axes.get_figure(root=True).dpi) / 72  # type: ignore[union-attr]


def _centres(axes: "Axes", points: Sequence[Named]) -> list[tuple[float, float]]:
    """Where points are on the page, in its points, once the layout has settled."""
    axes.get_figure(root=True).draw_without_rendering()  # type: ignore[union-attr]
    scale = _scale(axes)
    found = axes.transData.transform([(point.x, point.y) for point in points])
    return [(float(x) / scale, float(y) / scale) for x, y in found]


def _box(x: float, y: float, place: tuple[float, float], label: str) -> _Box:
    wide, (right, up) = _WIDE * len(label), place
    left = x + right - (wide if right < 0 else wide / 2 if right == 0 else 0)
    return _Box(left, y + up - _HIGH / 2, left + wide, y + up + _HIGH / 2)


def _outside(box: _Box, inside: _Box) -> float:
    area = (box.right - box.left) * (box.high - box.low)
    return 10 * (area - box.overlap(inside))


def _write(axes: "Axes", point: Named, place: tuple[float, float]) -> None:
    colour = COLOURS[point.style % len(COLOURS)]
    side = "left" if place[0] > 0 else "right" if place[0] < 0 else "center"
    # Where a name is away from its point, a thin line from its near edge leads there.
    edge = {"left": (0.0, 0.5), "right": (1.0, 0.5), "center": (0.5, 0.0 if place[1] > 0 else 1.0)}[side]
    leader = {"arrowstyle": "-", "color": colour, "linewidth": 0.6, "relpos": edge, "shrinkA": 0.5, "shrinkB": 3.0}
    far = abs(place[0]) + abs(place[1]) > 17
    axes.annotate(
        point.label,
        (point.x, point.y),
        xytext=place,
        textcoords="offset points",
        fontsize=_SIZE,
        color=colour,
        ha=side,
        va="center",
        arrowprops=leader if far else None,
        annotation_clip=False,
    )
