"""Figures of studies as they are drawn: no name covers another, and each stands where its place is."""

from itertools import combinations
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from thinwire.pages.strips import Strips
from thinwire.pages.styles import COLOURS, MARKS, mark_of
from thinwire.studies.charts import charts_of
from thinwire.studies.figure import (
    LEVEL,
    Page,
    dots_above_names,
    line,
    logarithmic_up,
    lower_left,
    named_dots,
    names_below,
    rule,
    title,
)
from thinwire.studies.labels import Named
from thinwire.studies.questions import STUDIES
from thinwire.studies.results import best_folder
from thinwire.studies.study import Study
from thinwire.studies.trials import Rows

RESULTS = Path(__file__).parents[2] / "results"
# In pixels. Boxes of letters have a little air around them.
AIR = 1.5


def written(axes: Axes) -> list[Text]:
    """All that is to be read in and around a panel."""
    ticks = []
    for axis in (axes.xaxis, axes.yaxis):
        low, high = sorted(axis.get_view_interval())
        ticks += [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    heads = [axes._left_title, axes.xaxis.label, axes.yaxis.label]  # type: ignore[attr-defined]
    return [text for text in (*ticks, *heads, *axes.texts) if text.get_text().strip()]


def box_of(text: Text) -> Bbox:
    """Of the letters alone, without the line that leads from a name to its point."""
    return Text.get_window_extent(text)


def faults(page: Page) -> list[str]:
    """What a reader would stumble over; the page has been saved."""
    found = []
    boxes = [(text, box_of(text)) for axes in page.panels for text in written(axes)]
    for (text, one), (other, two) in combinations(boxes, 2):
        wide, high = min(one.x1, two.x1) - max(one.x0, two.x0), min(one.y1, two.y1) - max(one.y0, two.y0)
        if wide > AIR and high > AIR:
            found.append(f"{text.get_text()!r} covers {other.get_text()!r}")
    for axes in page.panels:
        frame = axes.get_window_extent()
        levels = [axes.transData.transform((1, one.get_ydata()[0]))[1] for one in axes.lines if one.get_gid() == LEVEL]  # type: ignore[index]
        for text, box in ((text, box_of(text)) for text in axes.texts):
            if any(box.y0 + AIR < level < box.y1 - AIR for level in levels):
                found.append(f"a level strikes {text.get_text()!r} through")
            if box.y0 < frame.y0 - AIR:
                found.append(f"{text.get_text()!r} stands below the panel")
    return found


@pytest.mark.parametrize("study", STUDIES.values(), ids=lambda study: study.name)
def test_no_name_in_a_figure_covers_another(study: Study, tmp_path: Path) -> None:
    folder = best_folder(RESULTS, study.name) or RESULTS / study.name
    for name, (page, _) in study.draw(Rows(folder).rows, RESULTS).items():
        page.save(tmp_path / name)
        assert faults(page) == [], name


def test_long_names_below_take_as_many_lines_as_they_need(tmp_path: Path) -> None:
    page = Page(2, width=3.2)
    wide, narrow = page.panels
    names_below(wide, ["a b c d", "e"])
    names = ["DeMo, muon rule", "adamw for all the rest", "sign for the rest", "averaged in full"]
    names_below(narrow, names)
    title(narrow, "", "", "loss")
    page.save(tmp_path / "figure.png")
    assert faults(page) == []
    assert [text.get_text() for text in wide.get_xticklabels()] == ["a b c d", "e"]
    below = [text.get_text() for text in narrow.get_xticklabels()]
    assert below[0].startswith("DeMo,\n")
    assert all("\n" in text for text in below)
    assert [" ".join(text.split()) for text in below] == names


def test_a_name_has_one_mark_in_all_panels_and_on_the_page() -> None:
    page = Page(2)
    names = ["a", "b", "c"]
    for axes, mine in zip(page.panels, (names, ["a", "c"]), strict=True):
        dots_above_names(axes, {name: [1.0, 2.0] for name in mine}, names)
    marks = [{one.get_xdata()[0]: one.get_marker() for one in axes.lines} for axes in page.panels]  # type: ignore[index]
    assert marks == [{0: MARKS[0], 1: MARKS[1], 2: MARKS[2]}, {0: MARKS[0], 1: MARKS[2]}]
    first, second = charts_of(page)
    assert isinstance(first, Strips)
    assert isinstance(second, Strips)
    assert [(one.name, one.style) for one in first.strips] == [("a", 0), ("b", 1), ("c", 2)]
    assert [(one.name, one.style) for one in second.strips] == [("a", 0), ("c", 2)]
    alone = Strips("", second.axis, second.strips[1:]).html()
    assert 'class="series c2"' in alone


def test_twenty_names_have_twenty_looks() -> None:
    looks = {(COLOURS[style % len(COLOURS)], mark_of(style)) for style in range(20)}
    assert len(looks) == 20
    assert tuple(mark_of(style) for style in range(len(MARKS))) == MARKS


def test_names_at_ends_stay_in_the_panel_and_off_levels(tmp_path: Path) -> None:
    page = Page(2)
    low, struck = page.panels
    for index in range(6):
        line(low, [(0, 1.0), (1, 0.001 * index)], f"line {index}", index)
        line(struck, [(0, 1.0), (1, 0.5 + 0.001 * index)], f"line {index}", index)
    low.set_ylim(0.0, 1.0)
    struck.set_ylim(0.0, 1.0)
    # A name has no room between the first two.
    for level in (0.49, 0.5, 0.505):
        rule(struck, level, f"level {level:g}")
    page.save(tmp_path / "figure.png")
    assert faults(page) == []


def test_the_name_of_a_level_keeps_clear_of_lines(tmp_path: Path) -> None:
    page = Page()
    (axes,) = page.panels
    line(axes, [(x, 0.53) for x in range(6)], "line", 0)
    axes.set_xlim(0, 10)
    axes.set_ylim(0, 1)
    rule(axes, 0.5, "level")
    page.save(tmp_path / "figure.png")
    (name,) = (text for text in axes.texts if text.get_text() == "level")
    end = axes.transData.transform((5, 0.53))
    box = box_of(name)
    assert box.x0 > end[0] or box.y1 < end[1]


def test_names_of_points_keep_clear_of_ranges_and_of_the_edge(tmp_path: Path) -> None:
    page = Page()
    (axes,) = page.panels
    axes.set_xlim(0, 10)
    axes.set_ylim(0, 10)
    points = [Named(5.0, 5.0, "first", 0), Named(5.4, 9.0, "second", 0), Named(9.9, 5.0, "at the right edge", 0)]
    named_dots(axes, points, {0: "all"}, [(5.0, 5.0), (1.0, 9.5), (5.0, 5.0)])
    page.save(tmp_path / "figure.png")
    assert faults(page) == []
    first, _, last = (box_of(text) for text in axes.texts)
    assert first.x1 < axes.transData.transform((5.4, 0))[0]
    assert last.x1 < axes.get_window_extent().x1


def test_what_no_other_is_below_and_left_of() -> None:
    assert lower_left([(3, 1.0), (1, 3.0), (2, 4.0), (2, 2.0), (4, 1.0)]) == [(1, 3.0), (2, 2.0), (3, 1.0)]


def test_powers_along_y_have_several_ticks(tmp_path: Path) -> None:
    page = Page()
    (axes,) = page.panels
    line(axes, [(0, 11.0), (1, 180.0)], "times", 0)
    logarithmic_up(axes)
    page.save(tmp_path / "figure.png")
    low, high = axes.get_ylim()
    ticks = [tick.label1.get_text() for tick in axes.yaxis.get_major_ticks() if low <= tick.get_loc() <= high]
    assert ticks == ["10", "20", "50", "100", "200"]


def test_panels_beyond_the_columns_begin_a_row() -> None:
    page = Page(3, height=2.0, width=3.0, columns=2)
    page._figure.draw_without_rendering()
    (first, second, third) = (axes.get_position() for axes in page.panels)
    assert first.y0 == pytest.approx(second.y0)
    assert third.y1 < first.y0
    assert tuple(page._figure.get_size_inches()) == (6.0, 4.0)


def test_the_frontier_tells_rules_apart_and_has_ranges() -> None:
    study = STUDIES["frontier"]
    folder = best_folder(RESULTS, study.name)
    assert folder is not None
    (page, _) = study.draw(Rows(folder).rows, RESULTS)["frontier.png"]
    against_bytes = charts_of(page)[0]
    assert not isinstance(against_bytes, Strips)
    edge, *dots = against_bytes.series
    assert edge.faint
    assert [one.name for one in dots] == [
        "other methods",
        "DeMo, sign rule",
        "DeMo, muon rule",
        "DeMo, muon rule, balanced",
        "DeMo, other rules",
    ]
    assert all(one.ranges is not None and any(low < high for low, high in one.ranges) for one in dots)
