"""The logs of a run: rows, TensorBoard, Weights & Biases, and what becomes of them in a resumed run."""

import errno
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from thinwire.training.errors import TrainingError
from thinwire.training.logs import RunLog, read_rows, write_text


def test_rows_and_tensorboard_say_the_same(tmp_path: Path) -> None:
    log = RunLog(tmp_path, 0, tensorboard=True, wandb="", settings={})
    for step in (1, 2, 3):
        log.write("step", step, loss=1 / step, note="text")
    log.close()
    rows = read_rows(tmp_path / "log.jsonl")
    assert rows[1] == {"kind": "step", "step": 2, "loss": 0.5, "note": "text"}
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [(event.step, event.value) for event in board.Scalars("step/loss")] == [
        (1, 1.0),
        (2, 0.5),
        (3, pytest.approx(1 / 3)),
    ]


def test_a_resumed_run_forgets_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    log = RunLog(tmp_path, 0, tensorboard=True, wandb="", settings={})
    for step in (1, 2, 3, 4):
        log.write("step", step, loss=9.0)
    log.close()
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')  # cut off by a kill
    log = RunLog(tmp_path, 2, tensorboard=True, wandb="", settings={})
    log.write("step", 3, loss=1.0)
    log.close()
    assert [(row["step"], row["loss"]) for row in read_rows(tmp_path / "log.jsonl")] == [(1, 9.0), (2, 9.0), (3, 1.0)]
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [(event.step, event.value) for event in board.Scalars("step/loss")] == [(1, 9.0), (2, 9.0), (3, 1.0)]


def test_weights_and_biases_is_told_if_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    fake = types.ModuleType("wandb")
    run = types.SimpleNamespace(log=lambda values, step: told.append((step, values)), finish=lambda: told.append("finished"))
    fake.init = lambda **options: told.append(options) or run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    log = RunLog(tmp_path, 0, tensorboard=False, wandb="mine", settings={"lr": 3})
    log.write("step", 1, loss=2.0, accuracy=None)
    log.close()
    assert told[0]["project"] == "mine"
    assert told[0]["config"] == {"lr": 3}
    assert told[0]["resume"] == "allow"
    assert told[1:] == [(1, {"step/loss": 2.0}), "finished"]
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(TrainingError, match="needs the package wandb"):
        RunLog(tmp_path, 0, tensorboard=False, wandb="mine", settings={})


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*summary.json'") as found:
        write_text(tmp_path / "summary.json", "{}")
    assert found.value.errno == errno.ENOSPC
