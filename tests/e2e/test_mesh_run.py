"""``thinwire train --mesh``: replicas that are sharded over ranks, saved, and resumed on another mesh."""

import json
from pathlib import Path

from tests.cli import TINY, replicas

RUN = ["train", "quickstart", *TINY, "--update", "sign", "--lr", "1e-3", "--schedule", "constant", "--eval-examples", "13"]
RUN += ["--eval-every", "3", "--checkpoint-every", "0", "--balance", "0"]


def run(*arguments: str, cwd: Path, number: int) -> str:
    done = replicas(*arguments, cwd=cwd, number=number)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(folder: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if row["kind"] == "step"}


def test_sharded_replicas_train_and_go_on_elsewhere(tmp_path: Path) -> None:
    mesh = ["--mesh", "replicate=2,shard=2"]
    (tmp_path / "key").write_text("a key of the run")
    (tmp_path / "key").chmod(0o600)
    shown = run(*RUN, *mesh, "--steps", "6", "--key-file", "key", "--out", "run", cwd=tmp_path, number=4)
    assert "2 replicas of 2 ranks each on cpu over gloo, signed" in shown
    assert 'key_file = "key"' in (tmp_path / "run" / "config.toml").read_text()
    written = [path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert not any(b"a key of the run" in content for content in written)
    assert "a sample of its text" in shown
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["num_replicas"], summary["ranks_per_replica"]) == (2, 2)
    assert summary["dense_float32_bytes_per_step"] == 2 * summary["num_parameters"]
    sharded = losses(tmp_path / "run")
    assert list(sharded) == [1, 2, 3, 4, 5, 6]
    elsewhere = ["--mesh", "", "--replicas", "1", "--steps", "8"]
    refused = replicas("train", "--resume", "run", *elsewhere, cwd=tmp_path, number=1)
    assert refused.returncode == 1
    assert "--residual sum, mean, keep or zero" in refused.stderr
    shown = run("train", "--resume", "run", *elsewhere, "--residual", "sum", cwd=tmp_path, number=1)
    assert "momenta by 'sum'" in shown
    assert losses(tmp_path / "run")[8] < sharded[1]
    # Two of the eight steps had one replica, which has nobody to reduce gradients with.
    after = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert after["dense_float32_bytes_per_step"] == 6 / 8 * summary["dense_float32_bytes_per_step"]
    assert after["sent_bytes_per_step"] == 6 / 8 * summary["sent_bytes_per_step"]
