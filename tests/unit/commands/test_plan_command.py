"""``thinwire plan``: where its shapes come from, what it prints, and what it refuses."""

import math
from pathlib import Path

import pytest

from thinwire.cli import run
from thinwire.commands.plan import tensors_of
from thinwire.training.errors import TrainingError
from thinwire.training.models import Sizes, build_model
from thinwire.training.recipes import build


def count(model: str) -> int:
    return sum(math.prod(spec.shape) for spec in tensors_of(model))


def test_models_by_recipe_folder_and_number(tmp_path: Path) -> None:
    assert count("paper-1b") == 1_176_764_416
    model = build_model(build("quickstart"), Sizes(vocab_size=256))
    model.save_pretrained(tmp_path)
    assert count(str(tmp_path)) == count(str(tmp_path / "config.json")) == count("quickstart") == 885_888
    assert count("320M") == pytest.approx(320e6, rel=0.01)
    assert count("1.2B") == pytest.approx(1.2e9, rel=0.01)
    with pytest.raises(TrainingError, match="is neither a recipe"):
        tensors_of("no-such-model")
    with pytest.raises(TrainingError, match="is not a number of parameters"):
        tensors_of("1.2.3M")
    with pytest.raises(TrainingError, match="must be from 1 to 1e"):
        tensors_of("99999999999999G")


def test_the_command_prints_a_table_an_advice_and_a_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figure = tmp_path / "plan.png"
    arguments = [
        "plan",
        "gpt-small",
        "--replicas",
        "4",
        "--bandwidth",
        "10Mbit",
        "--round-trip",
        "20ms",
        "--compute",
        "0.5s",
    ]
    assert run([*arguments, "--figure", str(figure)]) == 0
    out = capsys.readouterr().out
    for words in ("DDP AdamW, fp32", "published DeMo", "Thinwire DeMo, k=64, sign", "Take DeMo with topk=", "efficiency"):
        assert words in " ".join(out.split())
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_a_recipe_is_priced_with_its_own_update_rule(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, has_muon in (
        (["gpt-small"], True),
        (["gpt-small", "--update", "sign"], False),
        (["26M"], False),
        (["26M", "--update", "muon"], True),
    ):
        assert run(["plan", *arguments, "--compute", "0.5s", "--topks", "32", "--values", "sign"]) == 0
        assert ("the muon rule" in " ".join(capsys.readouterr().out.split())) == has_muon, arguments


def test_a_link_in_one_word_and_overlap(capsys: pytest.CaptureFixture[str]) -> None:
    question = ["plan", "26M", "--compute", "0.5s", "--replicas", "4"]
    assert run([*question, "--bandwidth", "10Mbit", "--round-trip", "40ms"]) == 0
    plain = capsys.readouterr().out
    assert run([*question, "--link", "10mbit,40ms"]) == 0
    assert capsys.readouterr().out == plain
    assert run([*question, "--link", "10mbit,40ms", "--overlap"]) == 0
    assert "Thinwire with overlap" in " ".join(capsys.readouterr().out.split())


def test_the_faster_exchange_is_shown_and_advised(capsys: pytest.CaptureFixture[str]) -> None:
    question = ["plan", "1B", "--compute", "1s", "--link", "100mbit,20ms", "--topks", "32", "--values", "sign"]
    assert run([*question, "--replicas", "2"]) == 0
    assert "exchange='all_gather'" in capsys.readouterr().out
    assert run([*question, "--replicas", "16"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Thinwire DeMo, k=32, sign │ owner │" in shown
    assert "exchange='owner'" in shown
    assert "With exchange='all_gather' it would take" in shown
    assert run([*question, "--replicas", "16", "--exchange", "all_gather"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "│ all-gather │" in shown
    assert "it would take" not in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["320M", "--compute", "1s", "--owner-topk", "0"], "owner_topk must be an integer >= 1"),
        (["320M", "--compute", "1s", "--link", "1gbit", "--bandwidth=1Gbit"], "leave --bandwidth out"),
        (["320M", "--compute", "1s", "--link", "1gbit,jitter=1ms"], "the planner knows no jitter and no loss"),
        (["320M", "--compute", "fast"], "--compute"),
        (["320M", "--compute", "1s", "--bandwidth", "-3"], "--bandwidth"),
        (["320M", "--compute", "1s", "--round-trip", "1 week"], "--round-trip"),
        (["320M", "--compute", "1s", "--replicas", "0"], "--replicas must be an integer >= 1, got 0"),
        (["320M", "--compute", "1s", "--figure", "/dev/null/x.png"], "--figure /dev/null: it is a file"),
        (["scale", "--replicas", "0"], "--replicas must be an integer >= 1, got 0"),
        (["scale", "--replicas", "8", "1000000"], "--replicas must be at most 16,384, got 1000000"),
        (["scale", "--island", "0"], "--island must be an integer >= 1, got 0"),
        (["scale", "--slow", "-1"], "--slow must be an integer >= 0, got -1"),
        (["scale", "--out", "/dev/null/x"], "--out /dev/null/x: Not a directory"),
        (["320M", "--compute", "1s", "--values", "int9"], "values='int9'"),
        (["nowhere", "--compute", "1s"], "model='nowhere'"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *arguments]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("thinwire: ")
    assert words in line


def test_the_program_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("thinwire 0.")
    assert run(["--help"]) == 0
    assert "train [RECIPE]" in capsys.readouterr().out
    assert run([]) == 2
    assert run(["trian"]) == 2
    assert "there is no command 'trian'; there are train, plan" in capsys.readouterr().err


@pytest.mark.parametrize(("compute", "is_worse"), [("200ms", True), ("2s", False)])
def test_overlap_that_makes_steps_longer_is_advised_against(
    compute: str, is_worse: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    link = ["--replicas", "4", "--link", "100mbit,20ms", "--compute", compute]
    assert run(["plan", "26M", *link, "--overlap"]) == 0
    assert ("Leave overlap out here: its 8 exchanges" in capsys.readouterr().out) == is_worse
    assert run(["plan", "26M", *link]) == 0
    assert "Leave overlap out" not in capsys.readouterr().out
