"""The examples run as their first lines say, with two processes that end with the same parameters."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli import free_port, torchrun_sets

ROOT = Path(__file__).parent.parent.parent
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
# A process that imports a framework once, which takes longer than an example, and then forks an example's ranks per line.
_RANKS = """
import importlib, json, os, runpy, sys, traceback
importlib.import_module(sys.argv[1])
for line in sys.stdin:
    sys.argv, places = json.loads(line)
    pids = []
    for variables in places:
        pids.append(os.fork())
        if pids[-1] == 0:
            os.environ.update(variables)
            try:
                runpy.run_path(sys.argv[0], run_name="__main__")
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
    print("ended", [os.waitpid(pid, 0)[1] for pid in pids], flush=True)
"""
Run = Callable[..., list[tuple[str, int]]]


def found_in(text: str) -> list[tuple[str, int]]:
    """What each rank printed: a checksum of its parameters, and bytes sent per step."""
    lines = re.findall(r"rank (\d): parameters (\w+), (\d+) bytes per step", text)
    assert {rank for rank, _, _ in lines} == {"0", "1"}, text
    return [(checksum, int(sent)) for _, checksum, sent in sorted(lines)]


@contextlib.contextmanager
def forked(framework: str, example: str) -> Iterator[Run]:
    """A function that runs an example of this framework, with the variables that torchrun sets."""
    command = [sys.executable, "-c", _RANKS, framework]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=ENVIRONMENT,
        start_new_session=True,
    )

    def run(*arguments: str) -> list[tuple[str, int]]:
        port = free_port()
        places = [{"TORCHELASTIC_RUN_ID": "none", **torchrun_sets(rank, 2, port)} for rank in range(2)]
        print(json.dumps([[str(ROOT / "examples" / example), *arguments], places]), file=process.stdin, flush=True)
        lines: list[str] = []
        while not lines or not lines[-1].startswith("ended"):
            lines.append(process.stdout.readline())
            assert lines[-1], "".join(lines)[-3000:]
        assert lines[-1] == "ended [0, 0]\n", "".join(lines)[-3000:]
        return found_in("".join(lines))

    try:
        yield run
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


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
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    example, *arguments = command
    command = [*launcher, str(ROOT / "examples" / example), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=False, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = found_in(done.stdout)
    assert first == second
    assert first[1] > 0


def test_hugging_faces_trainer_goes_on_exactly(tmp_path: Path) -> None:
    with forked("thinwire.integrations.transformers", "hf_trainer.py") as run:
        straight = run("--out", str(tmp_path))
        assert straight[0] == straight[1]
        shutil.rmtree(tmp_path / "checkpoint-20")
        assert run("--out", str(tmp_path), "--resume") == straight


# What a callback that keeps the best checkpoint does: save another one, and remove it later.
_SAVES_TWO = """
import lightning, runpy, sys
save = lightning.Trainer.save_checkpoint

def save_two(trainer, path):
    for name in (path, path + ".other"):
        save(trainer, name)
    trainer.strategy.remove_checkpoint(path + ".other")

lightning.Trainer.save_checkpoint = save_two
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_lightning_saves_every_rank_and_goes_on(tmp_path: Path) -> None:
    script, out = tmp_path / "saves_two.py", tmp_path / "out"
    script.write_text(_SAVES_TWO)
    with forked("thinwire.integrations.lightning", str(script)) as run:
        common = [str(ROOT / "examples" / "lightning_module.py"), "--out", str(out)]
        first = run(*common, "--steps", "10")
        assert first[0] == first[1]
        assert sorted(path.name for path in out.iterdir()) == ["last.ckpt", "last.ckpt.0.demo"]
        assert sorted(path.name for path in (out / "last.ckpt.0.demo").iterdir()) == ["rank-0", "rank-1"]
        # As ModelCheckpoint(save_last="link") makes one.
        (out / "link.ckpt").symlink_to("last.ckpt")
        again = run(*common, "--steps", "20", "--resume", str(out / "link.ckpt"))
        assert again[0] == again[1] != first[0]
