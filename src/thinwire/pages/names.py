"""Words beside points, put where they cover neither points nor other words."""

from collections.abc import Sequence
from typing import NamedTuple

_HIGH = 15.0
_MARK = 6.0


class Placed(NamedTuple):
    """What is written, where it begins, and its base line; ``number`` is not 0 where it takes the name's place."""

    words: str
    left: float
    base: float
    number: int


Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""


def place_names(points: Sequence[tuple[float, float, str]], letter: float, frame: Box) -> list[Placed]:
    """A place for the name of each point, or for a number where the name finds none; nothing where both find none."""
    taken = [(x - _MARK, y - _MARK, x + _MARK, y + _MARK) for x, y, _ in points]
    placed, number = [], 0
    for x, y, name in points:
        box = _free(x, y, letter * len(name), taken, frame)
        words = name
        if box is None:
            number += 1
            words = str(number)
            box = _free(x, y, letter * len(words), taken, frame)
        if box is not None:
            taken.append(box)
            placed.append(Placed(words, box[0], box[3] - 3, 0 if words == name else number))
        else:
            placed.append(Placed("", x, y, number))
    return placed


def place_levels(
    levels: Sequence[tuple[float, str]], letter: float, frame: Box, drawn: Sequence[tuple[float, float]]
) -> list[tuple[float, float]]:
    """Where the names of horizontal lines begin, and their base lines: above or below, at the left, in the middle or at
    the right, where they cover the least of what is drawn and none of each other."""
    taken: list[Box] = []
    placed = []
    for height, name in levels:
        wide = letter * len(name)
        lefts = (frame[0] + 4, (frame[0] + frame[2] - wide) / 2, frame[2] - wide)
        boxes = [(left, top, left + wide, top + _HIGH) for top in (height - _HIGH - 2, height + 2) for left in lefts]
        costs = []
        for box in boxes:
            covered = sum(_touch(box, (x - 3, y - 3, x + 3, y + 3)) for x, y in drawn)
            costs.append(covered + 1000 * sum(_touch(box, other) for other in taken) + 1000 * (not _inside(box, frame)))
        best = boxes[costs.index(min(costs))]
        taken.append(best)
        placed.append((best[0], best[3] - 3))
    return placed


def _free(x: float, y: float, wide: float, taken: Sequence[Box], frame: Box) -> Box | None:
    """The first place beside a point that covers nothing: right, left, above, below, and between."""
    half = _HIGH / 2
    corners = [(x + 8, y - half), (x - 8 - wide, y - half), (x - wide / 2, y - 8 - _HIGH), (x - wide / 2, y + 8)]
    corners += [(x + 6, y - 4 - _HIGH), (x + 6, y + 4), (x - 6 - wide, y - 4 - _HIGH), (x - 6 - wide, y + 4)]
    for left, top in corners:
        box = (left, top, left + wide, top + _HIGH)
        if _inside(box, frame) and not any(_touch(box, other) for other in taken):
            return box
    return None


def _inside(box: Box, frame: Box) -> bool:
    return box[0] >= frame[0] and box[1] >= frame[1] and box[2] <= frame[2] and box[3] <= frame[3]


def _touch(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
