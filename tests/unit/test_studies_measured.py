"""Studies that read what is stored: their arithmetic against plain computations, and claims that can fail."""

import json
import random
import re
import shlex
from dataclasses import asdict, replace
from itertools import combinations
from pathlib import Path

import pytest
import tyro
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Annotation

from thinwire import cli
from thinwire.commands import study as study_command
from thinwire.commands.train import parse
from thinwire.lab.losses import Curve
from thinwire.lab.methods import LabMethod
from thinwire.lab.rows import Cell
from thinwire.pages.styles import COLOURS, DASHES, MARKS
from thinwire.studies import (
    frontier,
    q11_compressors,
    q12_time_to_loss,
    q13_breakdown,
    q14_overlap,
    q16_decentralised,
    q18_reproduce,
    q19_figures,
)
from thinwire.studies.labels import Named, label_ends, label_points
from thinwire.studies.measured import Tuned, cells, curves
from thinwire.studies.questions import STUDIES
from thinwire.studies.study import MEDIUM
from thinwire.studies.tuning import Contender
from thinwire.training.recipes import RECIPES

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
READERS = (q11_compressors, q12_time_to_loss, q13_breakdown, q14_overlap, q16_decentralised)


def a_cell(method: str, link: str, seconds: float, exposed: float, **others: object) -> Cell:
    parts = {"data": 0.0, "forward": 0.2, "backward": 0.4, "encode": 0.0, "exposed": exposed, "apply": 0.0, "other": 0.1}
    cell = Cell(2, link, method, parts=parts, seconds=seconds, meter_sent=1e6, measured_bits=8e6)
    return replace(cell, **others)  # type: ignore[arg-type]


def store(results: Path, name: str, rows: list[dict[str, object]]) -> None:
    folder = results / name / "2000-01-01_cpu"
    folder.mkdir(parents=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("module", READERS)
def test_without_stored_rows_nothing_is_claimed(module: object, tmp_path: Path) -> None:
    study = module.STUDY  # type: ignore[attr-defined]
    finding = study.find([], tmp_path)
    assert "| --- |" in finding.text
    assert not finding.claims
    assert study.draw([], tmp_path) == {}


def test_not_beaten_is_what_a_search_over_all_pairs_finds() -> None:
    chance = random.Random(0)
    for _ in range(50):
        known = []
        for index in range(8):
            loss, sent = chance.randrange(5) / 4, float(chance.randrange(5))
            tuned = Tuned(Curve(f"m{index}", 1.0, ((10, loss),), (loss,)), (1.0,))
            known.append(
                q11_compressors.Standing(f"m{index}", tuned, a_cell(f"m{index}", "100mbit", 1.0, 0.0, meter_sent=sent))
            )
        wanted = set()
        for one in known:
            if all(other.loss >= one.loss or other.sent >= one.sent for other in known):
                wanted.add(one.method)
        assert set(q11_compressors.not_beaten(known)) == wanted


def test_seconds_to_a_loss_are_steps_times_the_step_on_the_link(tmp_path: Path) -> None:
    losses = [(0, 5.0), (100, 2.2), (200, 1.8)]
    rows = [{"method": "adamw", "lr": 0.1, "seed": 0, "step": step, "loss": loss} for step, loss in losses]
    store(tmp_path, "lab_losses", rows)
    store(tmp_path, "lab", [asdict(a_cell("adamw", "10mbit", 3.0, 1.0))])
    assert q12_time_to_loss.times(tmp_path, 2.0) == {("adamw", "10mbit"): pytest.approx(150 * 3.0)}
    assert q12_time_to_loss.times(tmp_path, 1.7) == {}


def test_a_claim_about_time_fails_where_a_peer_is_first(tmp_path: Path) -> None:
    names = ("demo", "adamw")
    rows = [{"method": name, "lr": 0.1, "seed": 0, "step": step, "loss": 3 - step} for name in names for step in (0, 2)]
    store(tmp_path, "lab_losses", rows)
    for demo_seconds, holds in ((1.0, True), (3.0, False)):
        results = tmp_path / f"{holds}"
        store(results, "lab_losses", rows)
        store(
            results,
            "lab",
            [asdict(a_cell(*cell, 0.0)) for cell in (("demo", "10mbit", demo_seconds), ("adamw", "10mbit", 2.0))],
        )
        assert q12_time_to_loss.STUDY.find([], results).claims[0].holds is holds


def test_whole_runs_stand_beside_what_is_computed_and_may_say_otherwise(tmp_path: Path) -> None:
    names = ("demo", "adamw")
    losses = [{"method": name, "lr": 0.1, "seed": 0, "step": step, "loss": 3 - step} for name in names for step in (0, 2)]
    store(tmp_path, "lab_losses", losses)
    store(
        tmp_path,
        "lab",
        [asdict(a_cell(name, "10mbit", seconds, 0.0)) for name, seconds in zip(names, (1.0, 2.0), strict=True)],
    )
    assert "No run was trained to its end" in q12_time_to_loss.STUDY.find([], tmp_path).text
    points = {"demo": [(1, 2.5, 9.0), (3, 1.5, 29.0)], "adamw": [(2, 1.9, 4.0)]}
    runs = [
        {
            "method": name,
            "link": "10mbit",
            "hosts": 2,
            "seed": 0,
            "end": "target",
            "curve": [dict(zip(("step", "loss", "seconds"), point, strict=True)) for point in curve],
        }
        for name, curve in points.items()
    ]
    store(tmp_path, "lab_runs", runs)
    finding = q12_time_to_loss.STUDY.find([], tmp_path)
    assert "| demo | 10mbit | 2 | 0 | 2 | 19 | 1 |" in finding.text
    (claim,) = [claim for claim in finding.claims if "as a whole" in claim.text and "reaches 2 " in claim.text]
    assert "demo after 19 s, the first peer, adamw, after 4 s" in claim.text
    assert not claim.holds
    assert "whole_runs.png" in q12_time_to_loss.STUDY.draw([], tmp_path)


def test_the_frontier_has_a_time_only_of_links_measured_at_its_own_size(tmp_path: Path) -> None:
    """A peer that ends lower is found late or soon by the lab's steps, and a claim follows it."""
    adamw, ours = (one for one in frontier.contenders("small") if one.name in ("adamw, averaged in full", "muon, k 64"))
    rows = [
        {"trial": one.at(one.rate, 0).facts, "loss": loss, "curve": [[120, loss]], "sent_bytes": sent, "parameters": 1}
        for one, loss, sent in ((adamw, 2.0, 900), (ours, 3.0, 9))
    ]
    assert "100mbit" not in frontier.STUDY.find(rows, tmp_path).text
    for size, seconds in (("cpu", 0.5), ("cpu_medium", 100.0)):
        folder = tmp_path / frontier.LINKS / f"2000-01-01_{size}"
        folder.mkdir(parents=True)
        cells = [a_cell(adamw.name, "100mbit", 2 * seconds, 0.0), a_cell(ours.name, "100mbit", seconds, 0.0)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(asdict(cell)) + "\n" for cell in cells))
    finding = frontier.STUDY.find(rows, tmp_path)
    assert f"| muon, k 64 | 3.000 | {ours.rate:g} | 1 | 9 B | 60 |" in finding.text
    assert f"| adamw, averaged in full | 2.000 | {adamw.rate:g} | 1 | 1.8 kB | 120 |" in finding.text
    (claim,) = [claim for claim in finding.claims if "100 Mbit/s" in claim.text]
    assert claim.holds
    late = [a_cell(adamw.name, "100mbit", 0.4, 0.0), a_cell(ours.name, "100mbit", 0.5, 0.0)]
    path = tmp_path / frontier.LINKS / "2000-01-01_cpu" / "rows.jsonl"
    path.write_text("".join(json.dumps(asdict(cell)) + "\n" for cell in late))
    (claim,) = [claim for claim in frontier.STUDY.find(rows, tmp_path).claims if "100 Mbit/s" in claim.text]
    assert not claim.holds
    assert claim.text.endswith("in less time; muon, k 64: adamw, averaged in full")


def test_a_best_rate_at_the_edge_says_so() -> None:
    curve = Curve("m", 0.3, ((1, 1.0),), (1.0,))
    assert Tuned(curve, (0.1, 0.3)).tries == "2, best at the edge"
    assert Tuned(curve, (0.1, 0.3, 1.0)).tries == "3"
    assert Tuned(curve, (0.3,)).tries == "1"


def test_the_compressor_may_cost_more_than_it_saves(tmp_path: Path) -> None:
    for encode, holds in ((0.1, True), (0.9, False)):
        demo = a_cell("demo", "10mbit", 1.0, 0.0)
        demo = replace(demo, parts={**demo.parts, "encode": encode})
        results = tmp_path / f"{holds}"
        store(results, "lab", [asdict(demo), asdict(a_cell("adamw", "10mbit", 1.5, 0.5))])
        claim = q13_breakdown.STUDY.find([], results).claims[0]
        assert claim.holds is holds
        assert "500 ms saved" in claim.text


def test_overlap_lies_between_its_bounds() -> None:
    cell = a_cell("adamw", "10mbit", 1.5, 0.9)
    assert q14_overlap.wire_seconds(cell) == pytest.approx(1e6 / 1e6)  # a megabyte at a megabyte per second
    assert q14_overlap.perfect_overlap(cell) == pytest.approx(1.0)
    for name, link in cells(RESULTS):
        if name == "adamw" and link in ("100mbit", "1gbit"):
            stored = cells(RESULTS)[name, link]
            assert q14_overlap.perfect_overlap(stored) < stored.seconds


def test_overlap_must_shorten_every_round(tmp_path: Path) -> None:
    """One round in which it did not is enough, whatever the medians say."""
    names = ("adamw", "adamw-after", "adamw-bf16", "adamw-bf16-after", "demo", "demo-after", "demo-muon", "demo-muon-after")
    seconds = dict.fromkeys(names, 1.0) | {"adamw": 3.0, "adamw-after": 3.5, "demo-after": 1.2, "demo-muon-after": 1.2}
    rows = [
        asdict(a_cell(name, "10mbit", seconds[name], 0.1 if name.startswith("demo") else 0.9, round=turn))
        for name in names
        for turn in range(3)
    ]
    for last, holds in ((1.2, True), (0.9, False)):
        (one,) = [row for row in rows if row["method"] == "demo-after" and row["round"] == 2]
        one["seconds"] = last
        results = tmp_path / f"{holds}"
        store(results, q14_overlap.SOURCE, rows)
        finding = q14_overlap.STUDY.find([], results)
        (sign, muon) = [claim for claim in finding.claims if "in every round" in claim.text]
        assert sign.holds is holds
        assert ("not on 10mbit" in sign.text) is not holds
        assert muon.holds
        assert "| 10mbit | DeMo, sign rule | 1.20 (" in finding.text
        assert "overlap.png" in q14_overlap.STUDY.draw([], results)


def test_an_all_gather_that_receives_more_is_found(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (RESULTS / "received_bytes/2026-11-16_cpu/rows.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["ranks"] <= 64]
    rows[0]["received"] += 1
    store(tmp_path, "received_bytes", rows)
    assert [claim.holds for claim in q16_decentralised.STUDY.find([], tmp_path).claims] == [False, True, True, True]


def test_the_commands_of_recipes_are_understood() -> None:
    for recipe in RECIPES:
        program, command, *arguments = shlex.split(q18_reproduce.command_of(recipe))
        assert (program, command) == ("thinwire", "train")
        asked = parse(arguments)
        assert asked.recipe == recipe
        assert asked.settings.launch.replicas == 2


def test_contrast_and_distance_have_known_values() -> None:
    assert q19_figures.contrast("#000000") == pytest.approx(21.0)
    assert q19_figures.contrast("#ffffff") == pytest.approx(1.0)
    assert q19_figures.contrast("#777777") == pytest.approx(4.48, abs=0.01)  # the well-known grey that just fails
    assert q19_figures.distance("#000000", "#ffffff", "usual sight") == pytest.approx(100.0, abs=0.01)
    assert q19_figures.distance("#ff0000", "#0000ff", "usual sight") == pytest.approx(176.3, abs=0.1)
    for vision in q19_figures.VISIONS:
        # Greys stay as they are for everybody.
        assert q19_figures.seen("#808080", vision) == pytest.approx(q19_figures.seen("#808080", "usual sight"), abs=1e-3)
    red, green = q19_figures.seen("#c00000", "protanopia"), q19_figures.seen("#c00000", "usual sight")
    assert red[0] < green[0] / 3  # without the long-wave cones red is dark


def test_lines_that_look_alike_are_found() -> None:
    assert q19_figures.alike(60) == []
    assert q19_figures.alike(61) == [(0, 60)]
    assert len(DASHES) == 6
    assert len(MARKS) == len(COLOURS) == 10


def boxes_of(figure: Figure) -> list[tuple[float, float, float, float]]:
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    names = [text for text in figure.axes[0].texts if isinstance(text, Annotation)]
    # Of the letters alone, without the line that leads to them.
    found = [super(Annotation, name).get_window_extent(canvas.get_renderer()) for name in names]
    return [(box.x0, box.y0, box.x1, box.y1) for box in found]


@pytest.mark.parametrize("seed", range(3))
def test_names_do_not_cover_each_other(seed: int) -> None:
    chance = random.Random(seed)
    for write, crowd in ((label_points, 14), (label_ends, 12)):
        figure = Figure(figsize=(6.4, 5.2), dpi=140, layout="constrained")
        axes = figure.add_subplot()
        places = [(chance.uniform(0.35, 0.65), chance.uniform(0.35, 0.65)) for _ in range(crowd)]
        points = [Named(*place, f"method-{index}", index) for index, place in enumerate(places)]
        if write is label_ends:
            points = [point._replace(x=1.0, y=0.5 + 0.01 * point.y) for point in points]
        axes.plot([point.x for point in points], [point.y for point in points], "o")
        axes.set_xlim(-0.3, 1.5)
        axes.set_ylim(-0.1, 1.1)
        figure.draw_without_rendering()
        write(axes, points)
        for (left, low, right, high), (left2, low2, right2, high2) in combinations(boxes_of(figure), 2):
            overlap = max(0.0, min(right, right2) - max(left, left2)) * max(0.0, min(high, high2) - max(low, low2))
            assert overlap < 0.15 * (right - left) * (high - low)


def test_the_page_of_studies_is_true() -> None:
    text = (ROOT / "docs" / "studies.md").read_text()
    listed = re.findall(r"^\| (\w+) \|", text, re.MULTILINE)
    assert set(STUDIES) <= set(listed)
    (block,) = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    for line in block.splitlines():
        program, command, *arguments = shlex.split(line, comments=True)
        assert (program, command) == ("thinwire", "study")
        asked = tyro.cli(study_command._Command, args=arguments)  # type: ignore[var-annotated, call-overload]
        assert set(getattr(asked, "names", ())) <= {"all", *STUDIES}


def test_a_study_without_trainings_is_reported_by_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["study", "run", "q19", "--results", str(tmp_path), "--device", "cpu"]) == 0
    assert "holds: every colour" in capsys.readouterr().out
    assert (tmp_path / "q19" / "styles.png").exists()
    assert curves(tmp_path) == {}


@pytest.mark.parametrize("one", frontier.contenders(MEDIUM), ids=lambda one: one.name)
def test_the_frontier_measures_the_steps_of_what_it_trains(one: Contender) -> None:
    """Recipes are given more as time goes by; trainings have what recipes were when they were first written down."""
    trial = one.at(one.rate, 0)
    method = LabMethod(trial.optimizer, trial.all_settings)
    assert method.train_config(trial.recipe).optim == trial.config.optim
    cell = a_cell(one.name, frontier.LINK, 1.0, 0.1)
    settings = asdict(method.lab_config(trial.recipe, 2, 1).optim)
    assert frontier.is_of(replace(cell, settings=settings), trial.facts)
    for name, other in (("balance", 0.9), ("chunk", 48), ("bucket_mb", 7.0), ("rank", 77), ("overlap", True)):
        assert not frontier.is_of(replace(cell, settings={**settings, name: other}), trial.facts), name
