"""q19: are the figures easy on the eyes? The styles that all figures share, measured: contrast, colour-blindness, grey.

How the colour-blind see is the model of Machado, Oliveira and Fernandes, "A Physiologically-based Model for Simulation of
Color Vision Deficiency" (2009), at full severity, on linear RGB. Contrast is that of the Web Content Accessibility
Guidelines: 3 for lines and marks, 4.5 for small letters. Distances are those of CIE L*a*b* (1976); 2.3 is just noticeable.
"""

import math
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

from thinwire.pages.styles import COLOURS, DASHES, MARKS, mark_of
from thinwire.studies.figure import Drawing, Page, title
from thinwire.studies.study import Claim, Finding, Study, table, verdict
from thinwire.studies.trials import Row

Triple = tuple[float, float, float]
Matrix = tuple[Triple, Triple, Triple]

_USUAL: Matrix = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))
_WEIGHTS: Triple = (0.2126, 0.7152, 0.0722)
VISIONS: dict[str, Matrix] = {
    "usual sight": _USUAL,
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
    "grey": (_WEIGHTS, _WEIGHTS, _WEIGHTS),
}
# Grey has no hues; there, dashes and marks must do.
_IN_COLOUR = ("usual sight", "protanopia", "deuteranopia")
_TO_XYZ: Matrix = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
_LETTERS, _APART = 4.5, 10.0


def seen(colour: str, vision: str) -> Triple:
    """Linear RGB of ``#rrggbb``, as somebody with this vision sees it."""
    red, green, blue = (_linear(int(colour[place : place + 2], 16) / 255) for place in (1, 3, 5))
    return _clipped(_times(VISIONS[vision], (red, green, blue)))


def contrast(colour: str, vision: str = "usual sight") -> float:
    """With white, from 1 to 21."""
    return 1.05 / (sum(weight * part for weight, part in zip(_WEIGHTS, seen(colour, vision), strict=True)) + 0.05)


def distance(one: str, other: str, vision: str) -> float:
    """Between two colours in CIE L*a*b*."""
    return math.dist(_lab(seen(one, vision)), _lab(seen(other, vision)))


def _linear(part: float) -> float:
    return part / 12.92 if part <= 0.04045 else float(((part + 0.055) / 1.055) ** 2.4)


def _gamma(part: float) -> float:
    return 12.92 * part if part <= 0.0031308 else float(1.055 * part ** (1 / 2.4) - 0.055)


def _times(matrix: Matrix, vector: Triple) -> Triple:
    first, second, third = (sum(a * b for a, b in zip(line, vector, strict=True)) for line in matrix)
    return first, second, third


def _clipped(colour: Triple) -> Triple:
    red, green, blue = (min(1.0, max(0.0, part)) for part in colour)
    return red, green, blue


def _lab(linear: Triple) -> Triple:
    found, white = _times(_TO_XYZ, linear), _times(_TO_XYZ, (1.0, 1.0, 1.0))
    x, y, z = (_root(part / most) for part, most in zip(found, white, strict=True))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def _root(part: float) -> float:
    return float(part ** (1 / 3)) if part > (6 / 29) ** 3 else part / (3 * (6 / 29) ** 2) + 4 / 29


def alike(num_lines: int) -> list[tuple[int, int]]:
    """Pairs of the first lines of a figure that have the same dashes and the same mark."""
    styles = [(DASHES[index % len(DASHES)], mark_of(index)) for index in range(num_lines)]
    return [(a, b) for a, b in combinations(range(num_lines), 2) if styles[a] == styles[b]]


def _find(rows: Sequence[Row], results: Path) -> Finding:
    lines = []
    for index, colour in enumerate(COLOURS):
        others = [other for other in COLOURS if other != colour]
        nearest = [min(distance(colour, other, vision) for other in others) for vision in _IN_COLOUR]
        dashes = " ".join(f"{part:g}" for part in DASHES[index % len(DASHES)]) or "none"
        style = [colour, mark_of(index), dashes, f"{contrast(colour):.1f}"]
        lines.append([*style, *(f"{one:.0f}" for one in nearest)])
    least = min((contrast(colour, vision), colour) for colour in COLOURS for vision in _IN_COLOUR)
    pairs = [(distance(a, b, vision), a, b, vision) for a, b in combinations(COLOURS, 2) for vision in _IN_COLOUR]
    near = min(pairs)
    num_styles = math.lcm(len(DASHES), len(MARKS))
    claims = [
        Claim(
            f"every colour has a contrast of at least {_LETTERS:g} with white, as small letters want it, for usual sight, "
            f"protanopia and deuteranopia: {least[0]:.1f} is the least ({least[1]})",
            least[0] >= _LETTERS,
        ),
        Claim(
            f"any two of the {len(COLOURS)} colours are at least {_APART:g} apart for all three: the nearest are "
            f"{near[1]} and {near[2]}, {near[0]:.0f} apart ({near[3]})",
            near[0] >= _APART,
        ),
        Claim(
            f"any two of the first {num_styles} lines differ in dashes or mark, whatever their colour", not alike(num_styles)
        ),
    ]
    heads = ("colour", "mark", "dashes", "contrast with white", *(f"nearest other: {vision}" for vision in _IN_COLOUR))
    said = (
        "The styles of all lines and points, in their order. Distances to the nearest other colour are in CIE L\\*a\\*b\\* "
        "(1976), of which 2.3 is just noticeable, for usual sight and as the colour-blind see: the matrices of Machado, "
        "Oliveira and Fernandes (2009), at full severity. Tritanopia, which is rare, is not checked. Contrast is that of "
        "the Web Content Accessibility Guidelines, which ask for 3 for lines and 4.5 for small letters."
    )
    answer = (
        f"{verdict(claims, 'Yes', 'In part', 'No')}. The least contrast of a colour with white is {least[0]:.1f}, the least "
        f"distance of two colours {near[0]:.0f}, and {num_styles} lines can be told apart by dashes and marks alone."
    )
    return Finding(f"{said}\n\n{table(heads, lines)}", claims, answer)


def _draw(rows: Sequence[Row], results: Path) -> dict[str, Drawing]:
    page = Page(len(VISIONS), width=3.4)
    for axes, vision in zip(page.panels, VISIONS, strict=True):
        for index, colour in enumerate(COLOURS):
            red, green, blue = (_gamma(part) for part in seen(colour, vision))
            xs = [0.1 * step for step in range(21)]
            ys = [math.exp(-x) * 2 - index for x in xs]
            (drawn,) = axes.plot(xs, ys, color=(red, green, blue), marker=mark_of(index), markersize=4)
            drawn.set_markevery((index % 4, 4))
            if dashes := DASHES[index % len(DASHES)]:
                drawn.set_dashes(dashes)
            beside = {"xytext": (5, 0), "textcoords": "offset points", "fontsize": 8, "va": "center"}
            axes.annotate(f"line {index}", (xs[-1], ys[-1]), color=(red, green, blue), **beside)  # type: ignore[arg-type]
        axes.set_xlim(-0.1, 2.6)
        axes.set_xticks([])
        axes.set_yticks([])
        title(axes, vision, "", "")
    return {"styles.png": Drawing(page, "The styles of lines, as seen with usual sight, by the colour-blind, and in grey.")}


STUDY = Study(
    "q19",
    "Figures",
    "Are the figures easy on the eyes: told apart in grey, by the colour-blind, and dark enough to read?",
    find=_find,
    draw=_draw,
)
