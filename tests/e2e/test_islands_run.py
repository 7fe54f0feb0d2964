"""``thinwire train --islands``: ranks that are one replica together, saved and resumed."""

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
    first = [*RUN, "--islands", "2", "--steps", "3", "--key-file", "key", "--out", "run"]
    for arguments in (first, ["train", "--resume", "run", "--steps", "5"]):
        done = replicas(*arguments, cwd=tmp_path, number=4)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "2 islands of 2 ranks each on cpu over gloo, signed" in done.stdout
    assert list(losses(tmp_path / "run")) == [1, 2, 3, 4, 5]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["num_replicas"], summary["ranks_per_replica"]) == (2, 2)
