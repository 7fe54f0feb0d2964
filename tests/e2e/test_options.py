"""Options that change how a step is computed, in this process; and the same on a GPU."""

import json
from pathlib import Path

import pytest

from tests.cli import TINY, thinwire
from thinwire.cli import run

TRAIN = ["train", "quickstart", *TINY, "--steps", "6", "--eval-every", "3"]


def train(folder: Path, *options: str) -> list[float]:
    """Training losses of a short run."""
    assert run([*TRAIN, "--out", str(folder), *options]) == 0
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if row["kind"] == "step"]


def test_micro_batches_and_recomputed_activations_give_the_same_losses(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole")
    assert train(tmp_path / "parts", "--micro-batch", "2", "--activation-checkpointing") == pytest.approx(whole, rel=1e-3)


def test_bfloat16_is_close_to_float32(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole")
    assert train(tmp_path / "fast", "--precision", "bfloat16") == pytest.approx(whole, rel=2e-2)


@pytest.mark.parametrize("update", ["sign", "sgd", "adamw", "lion"])
def test_every_update_rule_is_a_flag(update: str, tmp_path: Path) -> None:
    losses = train(tmp_path / "run", "--update", update, "--lr", "1e-3")
    assert all(loss < 7 for loss in losses)
    assert f'update = "{update}"' in (tmp_path / "run" / "config.toml").read_text()


@pytest.mark.parametrize(("lr", "is_worse"), [("1e-3", False), ("1", True)])
def test_a_run_that_was_better_earlier_says_where_that_model_is(
    lr: str, is_worse: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path / "run", "--update", "sign", "--lr", lr, "--eval-every", "1")
    assert ("checkpoints/best has that model" in capsys.readouterr().out) == is_worse
    assert (tmp_path / "run" / "checkpoints" / "best").is_dir()


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["demo", "adamw"])
def test_two_replicas_on_a_gpu_train_and_resume(optimizer: str, tmp_path: Path) -> None:
    options = ["--replicas", "2", "--device", "cuda", "--precision", "bfloat16", "--optimizer", optimizer]
    done = thinwire(*TRAIN, *options, "--steps", "20", "--out", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "on cuda over gloo" in done.stdout
    done = thinwire("train", "--resume", "run", "--steps", "24", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 24
    assert summary["last_validation_loss"] < summary["first_validation_loss"] - 0.3


@pytest.mark.gpu
def test_a_compiled_model_on_a_gpu_is_close_to_a_plain_one(tmp_path: Path) -> None:
    """Here, and not in `make test`: compiling for a CPU takes minutes on a small machine."""
    whole = train(tmp_path / "whole", "--device", "cuda")
    assert train(tmp_path / "fast", "--device", "cuda", "--compile") == pytest.approx(whole, rel=2e-2)
