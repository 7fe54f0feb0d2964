"""The report of all studies: an answer to every question, figures as they were drawn, and docs that are up to date."""

import json
import os
import re
from pathlib import Path

import pytest

from tests.pages import Reader
from thinwire import cli
from thinwire.pages.chart import Chart
from thinwire.pages.strips import Strips
from thinwire.studies import questions
from thinwire.studies.charts import charts_of
from thinwire.studies.figure import Drawing, Page, dot, edge, line, logarithmic, named_dots, names_below, rule, title
from thinwire.studies.labels import Named
from thinwire.studies.questions import STUDIES
from thinwire.studies.report import (
    CAUTIONS,
    Answer,
    Origin,
    chosen_folder,
    origins,
    size_of,
    told,
    write_markdown,
    write_page,
)
from thinwire.studies.results import folders_of
from thinwire.studies.search import ADAMW, as_searched
from thinwire.studies.settings import rules_in_words, text_trial
from thinwire.studies.setup_words import setup_in_words
from thinwire.studies.study import MEDIUM, Claim, Finding, Study, table, verdict
from thinwire.studies.trials import Rows

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
# Those whose rows take longer to read than this file may.
SLOW = ("q1", "q7")


def test_lines_ranges_and_levels_are_read_from_what_was_drawn() -> None:
    page = Page(2)
    first, second = page.panels
    line(first, [(4, 1.0), (1, 3.0)], "a\nb", 3, [(2.5, 3.5), (0.5, 1.5)])
    line(first, [(1, 9.0)], "c", 12)
    rule(first, 2.0, "level")
    logarithmic(first, [1, 4], " K")
    first.set_yscale("log")
    title(first, "Title", "across", "up")
    second.set_ylim(-7, 7)
    line(second, [(0, 0.0)], "d", 0)
    chart, other = charts_of(page)
    assert isinstance(chart, Chart)
    assert isinstance(other, Chart)
    assert (chart.title, chart.x.label, chart.y.label, chart.x.is_log, chart.y.is_log) == (
        "Title",
        "across",
        "up",
        True,
        True,
    )
    assert chart.x.ticks == [(1.0, "1 K"), (4.0, "4 K")]
    assert [(one.name, one.style, list(one.points), one.ranges) for one in chart.series] == [
        ("a b", 3, [(1.0, 3.0), (4.0, 1.0)], [(2.5, 3.5), (0.5, 1.5)]),
        ("c", 12, [(1.0, 9.0)], None),
    ]
    assert [(level.at, level.name) for level in chart.levels] == [(2.0, "level")]
    assert other.y.includes == (-7, 7)


def test_dots_by_name_become_rows_and_named_dots_keep_their_names(tmp_path: Path) -> None:
    page = Page(3)
    by_label, below, named = page.panels
    for index, name in enumerate(("kept", "dropped")):
        for seed, loss in enumerate((1.0, 2.0 + index)):
            dot(by_label, index, loss, name if seed == 0 else "", index)
            dot(below, index, loss, "", index)
    by_label.set_xticks([])
    names_below(below, ["x, y", "z"])
    named.set_xscale("log")
    edge(named, [(1.0, 5.0), (2.0, 6.0)], "not beaten")
    points = [Named(1.0, 5.0, "m", 0), Named(2.0, 6.0, "n", 0), Named(3.0, 7.0, "o", 1)]
    named_dots(named, points, {0: "others", 1: "ours"}, [(4.0, 5.5), (6.0, 6.0), (6.5, 7.5)])
    page.save(tmp_path / "figure.png")
    rows, others, chart = charts_of(page)
    assert isinstance(rows, Strips)
    assert isinstance(others, Strips)
    assert [(one.name, list(one.values), one.words) for one in rows.strips] == [
        ("kept", [1.0, 2.0], "1.500"),
        ("dropped", [1.0, 3.0], "2.000"),
    ]
    assert [one.name for one in others.strips] == ["x, y", "z"]
    assert isinstance(chart, Chart)
    behind, first, last = chart.series
    assert (behind.name, behind.faint, first.name, list(first.names)) == ("not beaten", True, "others", ["m", "n"])
    assert first.ranges == [(4.0, 5.5), (6.0, 6.0)]
    assert (last.name, list(last.points), last.kind) == ("ours", [(3.0, 7.0)], "dots")


def test_bars_are_read_with_their_parts() -> None:
    from matplotlib.figure import Figure

    figure = Figure()
    axes = figure.add_subplot()
    axes.barh([0, 1], [1.0, 2.0], label="compute")
    axes.barh([0, 1], [3.0, 4.0], left=[1.0, 2.0], label="encode")
    axes.set_yticks([0, 1], ["demo", "adamw"])
    axes.set_xlabel("seconds")
    (strips,) = charts_of(Page(figure=figure))
    assert isinstance(strips, Strips)
    assert list(strips.parts) == ["compute", "encode"]
    assert [(one.name, list(one.values)) for one in strips.strips] == [("demo", [1.0, 3.0]), ("adamw", [2.0, 4.0])]


def an_answer(tmp_path: Path, answer: str = "Yes: **3** <b>.", size: str = "small") -> Answer:
    page = Page()
    line(page.panels[0], [(0, 1.0), (1, 2.0)], "a <b>", 0)
    line(page.panels[0], [(0, 2.0), (1, 1.0)], "other", 1)
    finding = Finding(
        f"Read it so.\n\n## More\n\n{table(('a', 'b'), [('x', '1')])}",
        [Claim("it is", True), Claim("it was", False)],
        answer,
    )
    study = Study("q0", "The title", "Is it?", find=lambda *_: finding)
    folder = tmp_path / "results" / "q0"
    folder.mkdir(parents=True)
    page.save(folder / "a.png")
    nothing = Page()
    nothing.save(folder / "b.png")
    drawings = {"a.png": Drawing(page, "A caption."), "b.png": Drawing(nothing, "No chart.")}
    return Answer(study, folder, finding, drawings, [Origin("thinwire study run q0", folder, "3 rows")], size)


def test_a_section_has_all_that_a_reader_needs(tmp_path: Path) -> None:
    one = an_answer(tmp_path)
    write_page([one], tmp_path / "results" / "report.html")
    page = (tmp_path / "results" / "report.html").read_text()
    read = Reader(page)
    assert [entry for entry in read.fetched if "src=data:image/png;base64," not in entry] == []
    assert "Is it?" in read.within("p")
    assert "Yes: " in read.within("p")
    assert CAUTIONS["small"] in read.within("p")
    assert read.within("li")[-2:] == ["it is.", "it was."]
    assert len(read.all("figure", kind="chart")) == 1
    assert len(read.all("img")) == 1
    assert "thinwire study run q0" in read.within("code")
    write_markdown([one], tmp_path / "docs" / "results.md")
    text = (tmp_path / "docs" / "results.md").read_text()
    for words in (
        "| [q0](#q0-the-title) | Is it? | 1 of 2 claims hold | small size |",
        "Yes: **3** <b>.",
        "- **does not hold**: it was",
        "### More",
        "| x | 1 |",
        "![A caption.](../results/q0/a.png)",
        "`thinwire study run q0`: [3 rows](../results/q0)",
        CAUTIONS["small"],
    ):
        assert words in text
    medium = _sections(an_answer(tmp_path / "medium", size="medium"), tmp_path)
    assert CAUTIONS["medium"] in medium
    assert "| medium size, 3 rows |" in medium
    full = _sections(an_answer(tmp_path / "full", size="full"), tmp_path)
    assert "| 3 rows |" in full
    assert not any(caution in full for caution in CAUTIONS.values())


def _sections(one: Answer, tmp_path: Path) -> str:
    write_markdown([one], tmp_path / "full.md")
    return (tmp_path / "full.md").read_text()


def test_a_study_without_rows_says_what_makes_them(tmp_path: Path) -> None:
    one = an_answer(tmp_path, answer="")
    assert one.words == "Nothing is known yet: `thinwire study run q0` makes the rows."


def test_the_size_of_what_there_is_and_the_command_that_makes_it(tmp_path: Path) -> None:
    study = STUDIES["q3"]
    for name, size in {"2000-01-01_cpu": "small", "2000-01-01_cpu_medium": "medium", "2000-01-01_h200": "full"}.items():
        folder = tmp_path / "q3" / name
        assert size_of(study, folder) is None
        assert origins(study, folder, tmp_path, None)[0].command == "thinwire study run q3 --size small"
        folder.mkdir(parents=True)
        (folder / "rows.jsonl").write_text(json.dumps({"trial": study.plan(size, [])[0].facts, "loss": 1.0}) + "\n")
        assert size_of(study, folder) == size
        device = " --device cuda" if size == "full" else ""
        assert origins(study, folder, tmp_path, size)[0].command == f"thinwire study run q3 --size {size}{device}"
    assert size_of(STUDIES["q19"], tmp_path / "q19") is None
    (medium,) = (
        one
        for one in origins(STUDIES["q7"], tmp_path / "q7", tmp_path, None)
        if one.command.startswith("thinwire study run q4")
    )
    assert medium.command == "thinwire study run q4 --size small"


def test_the_best_rows_that_have_an_answer_are_taken(tmp_path: Path) -> None:
    study = STUDIES["q3"]
    cpu, gpu = (tmp_path / "q3" / name for name in ("2000-01-02_cpu", "2000-01-01_h200"))
    for folder in (cpu, gpu):
        folder.mkdir(parents=True)
        (folder / "rows.jsonl").write_text("")
    assert chosen_folder(study, tmp_path, {cpu: Finding("", answer="a"), gpu: Finding("", answer="b")}) == gpu
    assert chosen_folder(study, tmp_path, {cpu: Finding("", answer="a"), gpu: Finding("")}) == cpu
    assert chosen_folder(study, tmp_path, {cpu: Finding(""), gpu: Finding("")}) == gpu


def test_a_verdict_follows_the_claims() -> None:
    yes, no = Claim("a", True), Claim("b", False)
    assert [verdict(claims, "all", "some", "none") for claims in ([yes, yes], [yes, no], [no])] == ["all", "some", "none"]


def test_some_studies_alone_write_no_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--results", str(tmp_path / "results"), "--markdown", str(tmp_path / "r.md")]
    assert cli.run(["study", "report", "q19", *arguments]) == 1
    assert "results: there is no such folder" in capsys.readouterr().err
    (tmp_path / "results").mkdir()
    assert cli.run(["study", "report", "q19", *arguments]) == 0
    assert (tmp_path / "results" / "q19" / "summary.md").exists()
    assert not (tmp_path / "r.md").exists()


def test_a_report_of_other_rows_leaves_the_page_of_the_usual_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(questions, "STUDIES", {"q19": STUDIES["q19"]})
    for folder, page in (("mine", "mine/results.md"), ("results", "docs/results.md")):
        (tmp_path / folder).mkdir()
        assert cli.run(["study", "report", "--results", folder]) == 0
        assert (tmp_path / page).is_file()
        assert (tmp_path / folder / "report.html").is_file()
        assert (tmp_path / "docs").exists() == (folder == "results")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run"], "name one study or more, such as q3, or all"),
        (["run", "q3", "--device", "tpu"], "--device tpu must be cpu, cuda or auto"),
        (["run", "q3", "--device", "cuda:99"], "--device cuda:99: there is no such device here"),
        (["run", "q3", "--at-once", "0"], "--at-once must be an integer >= 1"),
        (["report", "q3", "--results", "nowhere"], "--results nowhere: there is no such folder"),
    ],
)
def test_what_is_wrong_with_a_command_is_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["study", *arguments]) == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "study", [study for study in STUDIES.values() if study.name not in SLOW], ids=lambda study: study.name
)
def test_the_docs_say_what_the_rows_say(study: Study) -> None:
    text = (ROOT / "docs" / "results.md").read_text()
    findings = {folder: study.find(Rows(folder).rows, RESULTS) for folder in folders_of(RESULTS, study)}
    folder = chosen_folder(study, RESULTS, findings)
    finding = findings.get(folder, Finding(""))
    assert finding.answer, f"{study.name} has no answer"
    assert told(finding, finding.answer) in text, (
        f"docs/results.md is older than the rows of {study.name}: thinwire study report"
    )


def test_the_docs_have_every_study_and_its_figures() -> None:
    path = ROOT / "docs" / "results.md"
    text = path.read_text()
    assert re.findall(r"^## (\w+): ", text, re.MULTILINE) == list(STUDIES)
    targets = re.findall(r"\]\((\.\./[^)]*)\)", text)
    assert len(targets) > len(STUDIES)
    for target in targets:
        assert Path(os.path.normpath(path.parent / target)).exists(), target


def test_a_report_of_no_rows_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert cli.run(["study", "report", "q3", "--results", str(tmp_path / "empty")]) == 0
    assert "q3: there are no rows; thinwire study run q3 --size small makes them" in capsys.readouterr().out


def test_the_settings_of_rules_are_told() -> None:
    sign = {"update": "sign", "momentum_decay": 0.99}
    muon = {"update": "muon", "momentum_decay": 0.98, "balance": 0.95}
    assert rules_in_words([sign, sign, {**muon, "combine": "mean_over_replicas"}]) == (
        "DeMo has here, with the sign rule a momentum decay of 0.99; "
        "with the muon rule a momentum decay of 0.98 and a balance of 0.95."
    )
    other = {**sign, "momentum_decay": 0.999, "combine": "mean_over_senders"}
    assert rules_in_words([other]).endswith("with the sign rule a momentum decay of 0.999, combined by `mean_over_senders`.")
    assert rules_in_words([sign, other]).endswith(
        "with the sign rule a momentum decay of 0.99 or 0.999, combined by `mean_over_replicas` or `mean_over_senders`."
    )
    assert rules_in_words([muon, {**muon, "balance": 0.0}]).endswith("a momentum decay of 0.98 and a balance of 0 or 0.95.")
    assert rules_in_words([sign, {**sign, "update": "lion"}]) == (
        "DeMo has here, with the sign or lion rule a momentum decay of 0.99."
    )
    assert rules_in_words([{"lr": 1.0}]) == ""


def test_what_was_trained_is_told() -> None:
    usual = text_trial(MEDIUM, "adamw", settings={"lr": 1.0})
    rows = [
        {"trial": usual.facts, "parameters": 209_376},
        {"trial": {**usual.facts, "replicas": 8}, "parameters": 3_300_000},
    ]
    config = usual.config
    first, adamw = setup_in_words(rows)
    assert first == f"Trained here: 0.21 M to 3.3 M parameters, {config.schedule.steps} steps, 4 to 8 replicas, `stdlib`."
    assert adamw.startswith(f"AdamW has its usual betas, {config.optim.beta1:g} and {config.optim.beta2:g},")
    searched = as_searched(usual, ADAMW)
    assert len(setup_in_words([*rows, {"trial": searched.facts, "parameters": 1}])) == 1
    assert setup_in_words([{"method": "a benchmark's"}]) == []
    (demo,) = setup_in_words([{"trial": text_trial(MEDIUM).facts, "parameters": 1_000_000}])
    assert demo == "Trained here: 1 M parameters, 200 steps, 4 replicas, `stdlib`."
