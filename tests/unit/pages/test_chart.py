"""Figures: values land where they should, and nothing that is odd breaks them."""

import json
import math
import re

import pytest

from tests.pages import Reader
from thinwire.pages.axes import Axis, scale_for, words_for
from thinwire.pages.chart import WIDTH, Chart, Level, Series, thin
from thinwire.pages.names import place_names, width_of
from thinwire.pages.page import document
from thinwire.pages.strips import Strip, Strips
from thinwire.pages.styles import COLOURS, COLOURS_ON_DARK
from thinwire.studies.q19_figures import distance, seen

STEP, LOSS = Axis("step"), Axis("loss")


def corners(page: str) -> list[tuple[float, float]]:
    """The corners of the only line of a figure."""
    (path,) = re.findall(r'<g class="series[^>]*>.*?<path class="line" d="M([^"]*)"', page)
    return [(float(x), float(y)) for x, y in (pair.split() for pair in path.split("L"))]


def data_of(page: str) -> dict:
    (text,) = re.findall(r'<script type="application/json">(.*?)</script>', page)
    return json.loads(text)


def tick(page: str, words: str, side: str) -> tuple[float, float]:
    (x, y) = re.findall(rf'<text x="([\d.]+)" y="([\d.]+)" text-anchor="{side}">{words}</text>', page)[0]
    return float(x), float(y)


@pytest.mark.parametrize("is_log", [False, True])
def test_points_stand_at_their_ticks(is_log: bool) -> None:
    axis = Axis("loss", is_log, ticks=[(1, "one"), (10, "ten"), (100, "hundred")])
    page = Chart("t", STEP, axis, [Series("a", [(0, 1), (1000, 10), (2000, 100)])]).html()
    found = corners(page)
    for (across, up), words in zip(found, ("one", "ten", "hundred"), strict=True):
        assert tick(page, words, "end")[1] - 5 == pytest.approx(up, abs=0.11)
        assert 0 < across < WIDTH
    assert tick(page, "1,000", "middle")[0] == pytest.approx(found[1][0], abs=0.11)
    middle = (found[0][1] + found[2][1]) / 2
    assert (found[1][1] == pytest.approx(middle, abs=0.2)) == is_log
    assert [point[3] for point in data_of(page)["series"][0]["points"]] == ["1", "10", "100"]


def test_text_cannot_become_markup() -> None:
    evil = '</script><script>alert(1)</script>"><img src=x onerror=alert(1)>'
    chart = Chart(
        evil, Axis(evil), Axis(evil), [Series(evil, [(0, 1), (1, 2)]), Series(evil + "2", [(0, 1)])], [Level(1, evil)]
    )
    strips = Strips(evil, Axis(evil), [Strip(evil, [1.0, 2.0], evil)], (evil, evil + "2"))
    page = document(evil, [chart.html(), strips.html()])
    read = Reader(page)
    assert not read.fetched
    assert len(read.all("script")) == 3
    assert not read.all("img")
    assert evil in read.within("figcaption")


def test_what_has_no_place_is_left_out() -> None:
    odd = [(0.0, math.nan), (1.0, math.inf), (2.0, 3.0), (math.nan, 1.0), (3.0, 0.0), (4.0, -1.0), (5.0, 6.0)]
    assert len(corners(Chart("t", STEP, Axis("y", is_log=True), [Series("a", odd)]).html())) == 2
    assert len(corners(Chart("t", STEP, LOSS, [Series("a", odd)]).html())) == 4
    ranges = [(math.nan, 2.0)] * len(odd)
    page = Chart("t", STEP, Axis("y", is_log=True), [Series("a", odd, ranges)], [Level(0.0, "zero")]).html()
    assert "nan" not in page
    assert "zero" not in page


@pytest.mark.parametrize("points", [[], [(0.0, math.nan)]])
def test_nothing_to_show_is_said(points: list[tuple[float, float]]) -> None:
    assert "nothing to show yet" in Chart("t", STEP, LOSS, [Series("a", points)]).html()
    assert "nothing to show yet" in Strips("t", LOSS, [Strip("a", [value for _, value in points])]).html()


def test_one_point_and_equal_points_are_in_the_middle() -> None:
    for points in ([(5.0, 2.0)], [(5.0, 2.0), (6.0, 2.0)], [(5.0, 0.0)], [(5.0, -1e-30)]):
        for is_log in (False, True):
            read = Reader(Chart("t", STEP, Axis("y", is_log), [Series("a", points, kind="dots")]).html())
            for mark in read.all("path", kind="mark"):
                x, y = re.match(r"M([\d.]+) ([\d.]+)", mark["d"] or "").groups()  # type: ignore[union-attr]
                assert 0 <= float(x) <= WIDTH
                assert 0 <= float(y) <= 300


def test_thousands_of_points_are_thinned_and_no_outlier_is_lost() -> None:
    points = [(float(step), math.sin(step / 700)) for step in range(20_000)]
    points[7_777] = (7_777.0, 50.0)
    points[9_999] = (9_999.0, -50.0)
    found = thin(Series("a", points))
    assert 200 < len(found.points) < 500
    assert {points[0], points[7_777], points[9_999], points[-1]} <= set(found.points)
    assert list(found.points) == sorted(found.points)
    assert len(Chart("t", STEP, LOSS, [Series("a", points)]).html()) < 60_000


def test_series_differ_in_dashes_or_marks_and_all_are_in_the_legend() -> None:
    page = Chart("t", STEP, LOSS, [Series(f"s{n}", [(0, n), (1, n + 1)], style=n) for n in range(10)]).html()
    read = Reader(page)
    assert [one["data-name"] for one in read.all("button")] == [f"s{n}" for n in range(10)]
    shapes = re.findall(r'<svg class="swatch[^>]*>(.*?)</svg>', page)
    assert len(set(shapes)) == 10
    assert len({one["class"] for one in read.all("g", kind="series")}) == 10


def test_names_cover_neither_points_nor_each_other() -> None:
    points = [(100.0 + 7 * n, 100.0 + 3 * (n % 4), f"method {n}") for n in range(20)]
    placed = place_names(points, (0.0, 0.0, 480.0, 300.0))
    assert all(one.words in (name, str(one.number), "") for one, (_, _, name) in zip(placed, points, strict=True))
    numbers = [one.number for one in placed if one.number]
    assert numbers == list(range(1, len(numbers) + 1))
    shares = {"start": 0.0, "middle": 0.5, "end": 1.0}
    widths = [(one, width_of(one.words)) for one in placed if one.words]
    lefts = [(one, one.x - shares[one.anchor] * wide, wide) for one, wide in widths]
    boxes = [(left, one.base - 12, left + wide, one.base + 3) for one, left, wide in lefts]
    assert len(boxes) > 5
    for place, (left, top, right, bottom) in enumerate(boxes):
        for x, y, _ in points:
            assert not (left < x < right and top < y < bottom)
        for other in boxes[place + 1 :]:
            assert right <= other[0] or other[2] <= left or bottom <= other[1] or other[3] <= top


def test_a_narrow_name_stays_beside_its_point() -> None:
    (right,) = place_names([(100.0, 100.0, "name")], (0.0, 0.0, 480.0, 300.0))
    (left,) = place_names([(470.0, 100.0, "name")], (0.0, 0.0, 480.0, 300.0))
    assert (right.x, right.anchor) == (108.0, "start")
    assert (left.x, left.anchor) == (462.0, "end")
    assert width_of("ill") < width_of("abc") < width_of("MMM")


def test_names_of_points_are_hidden_with_their_series() -> None:
    dots = [Series(name, [(n + 1.0, 1.0)], kind="dots", style=n, names=[name]) for n, name in enumerate(("a", "b"))]
    groups = [one["data-name"] for one in Reader(Chart("t", STEP, LOSS, dots).html()).all("g", kind="series")]
    assert sorted(filter(None, groups)) == ["a", "a", "b", "b"]
    bars = Strips("t", Axis("s"), [Strip("one", [1.0, 2.0])], ("a", "b")).html()
    assert [one["name"] for one in data_of(bars)["series"]] == ["a", "b"]


def test_bars_are_as_wide_as_their_parts() -> None:
    page = Strips("t", Axis("s"), [Strip("one", [1.0, 2.0]), Strip("other", [3.0, 0.0])], ("a", "b")).html()
    widths = [float(one["width"] or 0) for one in Reader(page).all("rect", kind="bar")[:4]]
    assert widths[1] == pytest.approx(2 * widths[0], abs=0.2)
    assert widths[2] == pytest.approx(3 * widths[0], abs=0.2)
    assert widths[3] == 0
    dots = Strips("t", Axis("s"), [Strip("x" * 60, [1.0, math.nan, 2.0])]).html()
    assert len(data_of(dots)["series"][0]["points"]) == 2


@pytest.mark.parametrize(
    ("low", "high", "is_log"), [(0, 1, False), (1e-4, 2e-4, False), (2.7, 5.6, True), (1, 1e9, True), (2.3, 2.31, True)]
)
def test_ticks_are_few_inside_and_different(low: float, high: float, is_log: bool) -> None:
    scale = scale_for(Axis("", is_log), [low, high], 0.0, 100.0)
    ticks = scale.ticks(6)
    assert 3 <= len(ticks) <= 8
    assert len({words for _, words in ticks}) == len(ticks)
    assert all(0 <= scale.place(value) <= 100 for value, _ in ticks)
    assert all(
        float(words.replace(",", "").replace("k", "e3").replace("M", "e6").replace("G", "e9"))
        == pytest.approx(value, 1e-3, 1e-9)
        for value, words in ticks
    )


def test_numbers_are_short() -> None:
    assert [words_for(value) for value in (0, 0.1234567, 12_345, 250_000, 1e6, 2.5e9)] == [
        "0",
        "0.123",
        "12,345",
        "250k",
        "1M",
        "2.5G",
    ]


def test_colours_on_dark_are_light_enough_and_apart() -> None:
    dark = 0.05 + sum(
        weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), seen("#15171b", "usual sight"), strict=True)
    )
    for place, colour in enumerate(COLOURS_ON_DARK):
        light = sum(
            weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), seen(colour, "usual sight"), strict=True)
        )
        assert (light + 0.05) / dark > 4.5
        assert all(distance(colour, other, "usual sight") > 10 for other in COLOURS_ON_DARK[place + 1 :])
    assert len(COLOURS_ON_DARK) == len(COLOURS)
