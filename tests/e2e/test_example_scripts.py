"""The examples run as their first lines say, with two processes that end with the same parameters."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def run(example: str, *arguments: str) -> list[tuple[str, int]]:
    """What each rank printed: a checksum of its parameters, and bytes sent per step."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, str(ROOT / "examples" / example), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
    found = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=200)
    assert found.returncode == 0, found.stderr[-3000:]
    lines = re.findall(r"rank (\d): parameters (\w+), (\d+) bytes per step", found.stdout)
    assert {rank for rank, _, _ in lines} == {"0", "1"}, found.stdout
    return [(checksum, int(sent)) for _, checksum, sent in sorted(lines)]


@pytest.mark.parametrize(
    "command",
    [
        ["ddp.py"],
        ["accelerate_loop.py"],
        ["fsdp2_tp.py", "--replicas", "2", "--steps", "5"],
    ],
    ids=lambda command: command[0],
)
def test_ranks_end_alike(command: list[str]) -> None:
    first, second = run(*command)
    assert first == second
    assert first[1] > 0


def test_hugging_faces_trainer_goes_on_exactly(tmp_path: Path) -> None:
    straight = run("hf_trainer.py", "--out", str(tmp_path))
    assert straight[0] == straight[1]
    shutil.rmtree(tmp_path / "checkpoint-20")
    assert run("hf_trainer.py", "--out", str(tmp_path), "--resume") == straight


def test_lightning_saves_every_rank_and_goes_on(tmp_path: Path) -> None:
    first = run("lightning_module.py", "--out", str(tmp_path), "--steps", "10")
    assert first[0] == first[1]
    again = run("lightning_module.py", "--out", str(tmp_path), "--steps", "20", "--resume", str(tmp_path / "last.ckpt"))
    assert again[0] == again[1] != first[0]
