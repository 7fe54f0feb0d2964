"""``thinwire train --islands``: ranks that are one replica together, saved, resumed, and taken apart."""

import json
from pathlib import Path

from tests.cli import TINY, replicas

RUN = [
    "train",
    "quickstart",
    *TINY,
    "--schedule",
    "constant",
    "--eval-examples",
    "13",
    "--eval-every",
    "3",
    "--checkpoint-every",
    "0",
]


def losses(folder: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if row["kind"] == "step"}


def test_islands_train_and_go_on(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("a key of the run")
    (tmp_path / "key").chmod(0o600)
    for folder, steps in (("whole", "6"), ("halves", "3")):
        done = replicas(
            *RUN, "--islands", "2", "--steps", steps, "--key-file", "key", "--out", folder, cwd=tmp_path, number=4
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "2 islands of 2 ranks each on cpu over gloo, signed" in done.stdout
    done = replicas("train", "--resume", "halves", "--steps", "6", cwd=tmp_path, number=4)
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses(tmp_path / "halves") == losses(tmp_path / "whole")
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert (summary["num_replicas"], summary["ranks_per_replica"]) == (2, 2)
    apart = ["--islands", "0", "--residual", "sum", "--steps", "8"]
    done = replicas("train", "--resume", "halves", *apart, cwd=tmp_path, number=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(losses(tmp_path / "halves")) == [1, 2, 3, 4, 5, 6, 7, 8]
