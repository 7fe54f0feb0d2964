"""`thinwire study compare`: claims of two folders of results, side by side."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from thinwire import cli
from thinwire.studies import questions
from thinwire.studies.agreement import agreements, pairs
from thinwire.studies.study import Claim, Finding, Study
from thinwire.studies.trials import Row, Trial


def plan(size: str, rows: Sequence[Row]) -> list[Trial]:
    return []


def find(rows: Sequence[Row], results: Path) -> Finding:
    first, second = (row["loss"] for row in rows)
    return Finding("", [Claim(f"the first ends below the second: {first:.3f} and {second:.3f}; so it is", first < second)])


def store(folder: Path, losses: Sequence[float]) -> None:
    folder.mkdir(parents=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps({"trial": {}, "loss": loss}) + "\n" for loss in losses))


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(questions, "STUDIES", {"q0": Study("q0", "A title", "A question?", find, plan)})
    store(tmp_path / "stored" / "q0" / "2000-01-01_cpu", (1.0, 2.0))
    store(tmp_path / "stored" / "q0" / "2000-01-01_cpu_medium", (2.0, 1.0))
    return tmp_path


def test_numbers_and_explanations_may_differ_and_verdicts_not() -> None:
    def claims(*texts: str) -> list[Claim]:
        return [Claim(text, True) for text in texts]

    some = claims("a is 1.5 with k 4", "a is +1 with k 16; see c", "b: by 2 (x)")
    others = claims("c", "a is 2 with k 4; see d", "a is -3,000 with k 16", "b: by 3 (y)")
    assert pairs(some, others) == [(some[0], others[1]), (some[1], others[2]), (some[2], others[3]), (None, others[0])]
    assert pairs(some, some) == [(claim, claim) for claim in some]


def test_what_is_claimed_of_one_size_is_not_compared_with_another() -> None:
    some, others = (
        [Claim(f"{size} M: a ends below {other} ({gap})", True) for size in sizes for other in ("b", "c")]
        for sizes, gap in (((1, 2, 3), 0.5), ((1, 3), 0.7))
    )
    found = dict(pairs(some, others))
    assert [found[claim] for claim in some] == [*others[:2], None, None, *others[2:]]


def test_rows_that_a_study_reads_of_others_are_those_stored_unless_made_anew(tmp_path: Path) -> None:
    seen = []

    def look(rows: Sequence[Row], results: Path) -> Finding:
        seen.append(results.name)
        return Finding("")

    study = Study("q0", "A title", "A question?", look, plan, sources=("bench",))
    for name in ("stored", "again"):
        store(tmp_path / name / "q0" / "2000-01-01_cpu", (1.0, 2.0))
    agreements([study], tmp_path / "stored", tmp_path / "again")
    for name in ("stored", "again"):
        (tmp_path / name / "bench").mkdir()
    agreements([study], tmp_path / "stored", tmp_path / "again")
    assert seen == ["stored", "stored", "stored", "again"]


def test_the_same_conclusion_of_other_rows(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store(results / "again" / "q0" / "2000-01-02_cpu", (1.5, 1.7))
    assert cli.run(["study", "compare", str(results / "again"), "--results", str(results / "stored")]) == 0
    said = capsys.readouterr().out
    assert "1 of 1 claims are the same" in said
    assert "medium" not in said


def test_another_conclusion_is_shown_with_both_verdicts(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store(results / "again" / "q0" / "2000-01-02_cpu", (1.8, 1.7))
    assert cli.run(["study", "compare", str(results / "again"), "q0", "--results", str(results / "stored")]) == 1
    said = capsys.readouterr().out
    assert f"{results / 'stored'}: holds: the first ends below the second: 1.000 and 2.000" in said
    assert f"{results / 'again'}: does not hold: the first ends below the second: 1.800 and 1.700" in said
    assert "0 of 1 claims are the same" in said


@pytest.mark.parametrize(
    ("others", "words"), [("nowhere", "there is no such folder"), ("empty", "it has no rows of the same study and size as")]
)
def test_nothing_to_compare_is_said(results: Path, others: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    (results / "empty").mkdir()
    assert cli.run(["study", "compare", str(results / others), "--results", str(results / "stored")]) == 1
    assert words in capsys.readouterr().err
