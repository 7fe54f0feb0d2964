"""Words beside points, put where they cover neither points nor other words."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

_HIGH = 15.0
_MARK = 6.0
# Between the names of two levels.
_GAP = 10.0
# The size of letters on a phone, and shares of it that letters are wide, as in the widest fonts that systems have.
_SIZE = 15.0
_WIDTHS = dict.fromkeys(" .,:;'|!()[]/-ijltfrI", 0.35) | dict.fromkeys("mwMW%", 0.95)
_CAPITAL, _USUAL = 0.72, 0.61

Anchor = Literal["start", "middle", "end"]


def width_of(words: str) -> float:
    """How much room words take at most."""
    return _SIZE * sum(_WIDTHS.get(letter, _CAPITAL if letter.isupper() else _USUAL) for letter in words)


class Placed(NamedTuple):
    """What is written, where, and its base line; it begins, ends or has its middle there. ``number`` is not 0 where it takes
    the name's place."""

    words: str
    x: float
    base: float
    anchor: Anchor
    number: int


Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""


def place_names(points: Sequence[tuple[float, float, str]], frame: Box) -> list[Placed]:
    """A place for the name of each point, or for a number where the name finds none; nothing where both find none."""
    taken = [(x - _MARK, y - _MARK, x + _MARK, y + _MARK) for x, y, _ in points]
    placed, num_numbers = [], 0
    for x, y, name in points:
        for words, number in ((name, 0), (str(num_numbers + 1), num_numbers + 1)):
            found = _free(x, y, width_of(words), taken, frame)
            if found is not None:
                box, anchor = found
                taken.append(box)
                at = {"start": box[0], "middle": (box[0] + box[2]) / 2, "end": box[2]}[anchor]
                placed.append(Placed(words, at, box[3] - 3, anchor, number))
                num_numbers = max(num_numbers, number)
                break
        else:
            placed.append(Placed("", x, y, "start", 0))
    return placed


def place_levels(
    levels: Sequence[tuple[float, str]], frame: Box, drawn: Sequence[tuple[float, float]]
) -> list[tuple[float, float]]:
    """Where the names of horizontal lines begin, and their base lines: above or below, at the left, in the middle or at
    the right, where they cover the least of what is drawn and none of each other."""
    taken: list[Box] = []
    placed = []
    for height, name in levels:
        wide = width_of(name)
        lefts = (frame[0] + 4, (frame[0] + frame[2] - wide) / 2, frame[2] - wide)
        boxes = [(left, top, left + wide, top + _HIGH) for top in (height - _HIGH - 2, height + 2) for left in lefts]
        costs = []
        for box in boxes:
            covered = sum(_touch(box, (x - 3, y - 3, x + 3, y + 3)) for x, y in drawn)
            costs.append(covered + 1000 * sum(_touch(box, other) for other in taken) + 1000 * (not _inside(box, frame)))
        best = boxes[costs.index(min(costs))]
        taken.append((best[0] - _GAP, best[1], best[2] + _GAP, best[3]))
        placed.append((best[0], best[3] - 3))
    return placed


def _free(x: float, y: float, wide: float, taken: Sequence[Box], frame: Box) -> tuple[Box, Anchor] | None:
    """The first place beside a point that covers nothing: right, left, above, below, and between; and which part of the
    words is next to the point, so that letters that are narrower stay there."""
    half, above, below = _HIGH / 2, y - 4 - _HIGH, y + 4
    corners: list[tuple[float, float, Anchor]] = [(x + 8, y - half, "start"), (x - 8 - wide, y - half, "end")]
    corners += [(x - wide / 2, y - 8 - _HIGH, "middle"), (x - wide / 2, y + 8, "middle")]
    corners += [(x + 6, above, "start"), (x + 6, below, "start"), (x - 6 - wide, above, "end"), (x - 6 - wide, below, "end")]
    for left, top, anchor in corners:
        box = (left, top, left + wide, top + _HIGH)
        if _inside(box, frame) and not any(_touch(box, other) for other in taken):
            return box, anchor
    return None


def _inside(box: Box, frame: Box) -> bool:
    return box[0] >= frame[0] and box[1] >= frame[1] and box[2] <= frame[2] and box[3] <= frame[3]


def _touch(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
