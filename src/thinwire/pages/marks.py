"""The shapes that mark points, as pieces of SVG paths."""

import math

_RADIUS = 4.2


def _star() -> list[tuple[float, float]]:
    corners = []
    for number in range(10):
        far, angle = (1.35 if number % 2 == 0 else 0.55), math.pi * number / 5
        corners.append((far * math.sin(angle), -far * math.cos(angle)))
    return corners


def _plus(turned: bool) -> list[tuple[float, float]]:
    arm, half = 1.2, 0.42
    corners = [(half, half), (half, arm), (-half, arm), (-half, half), (-arm, half), (-arm, -half)]
    corners += [(-half, -half), (-half, -arm), (half, -arm), (half, -half), (arm, -half), (arm, half)]
    if not turned:
        return corners
    turn = math.sqrt(0.5)
    return [(turn * (x - y), turn * (x + y)) for x, y in corners]


_CORNERS = {
    "s": [(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)],
    "^": [(0, -1.15), (1.1, 0.85), (-1.1, 0.85)],
    "v": [(0, 1.15), (1.1, -0.85), (-1.1, -0.85)],
    "<": [(-1.15, 0), (0.85, 1.1), (0.85, -1.1)],
    ">": [(1.15, 0), (-0.85, 1.1), (-0.85, -1.1)],
    "D": [(0, -1.25), (1.1, 0), (0, 1.25), (-1.1, 0)],
    "P": _plus(turned=False),
    "X": _plus(turned=True),
    "*": _star(),
}


def mark(shape: str, x: float, y: float) -> str:
    """A mark around a point; ``shape`` is one of `thinwire.pages.styles.MARKS`."""
    if shape == "o":
        size = f"{_RADIUS:g} {_RADIUS:g} 0 1 0"
        return f"M{x - _RADIUS:.1f} {y:.1f}a{size} {2 * _RADIUS:g} 0a{size} {-2 * _RADIUS:g} 0z"
    corners = [f"{x + _RADIUS * right:.1f} {y + _RADIUS * down:.1f}" for right, down in _CORNERS[shape]]
    return f"M{'L'.join(corners)}Z"
