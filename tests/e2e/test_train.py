"""``thinwire train`` as users run it: real processes, a real terminal, kill -9, Ctrl-C."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.cli import PROGRAM, TINY, Terminal, children_of, free_port, is_running, kill_all, replicas, thinwire

STEPS = 24
ONE = ["train", "quickstart", *TINY, "--steps", str(STEPS), "--eval-every", "8", "--checkpoint-every", "6"]
RUN = [*ONE, "--replicas", "2"]


def losses(folder: Path) -> list[tuple[str, int, float]]:
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [(row["kind"], row["step"], row["loss"]) for row in rows if row["kind"] in ("step", "evaluation")]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints" / "last" / "model" / "model.safetensors")


def assert_same_run(here: Path, there: Path) -> None:
    """The same losses at every step, and the same parameters, bit for bit."""
    assert losses(here) == losses(there)
    first, second = weights(here), weights(there)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


Reference = tuple[Path, subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """One run that nothing interrupts, whichever workers share the tests among them."""
    base = tmp_path_factory.getbasetemp()
    place = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "reference"
    place.mkdir(exist_ok=True)
    kept = place / "done.json"
    with FileLock(f"{kept}.lock"):
        if not kept.exists():
            done = thinwire(*RUN, "--out", "run", cwd=place)
            kept.write_text(json.dumps([done.returncode, done.stdout, done.stderr]))
    done = subprocess.CompletedProcess(RUN, *json.loads(kept.read_text()))
    assert done.returncode == 0, done.stdout + done.stderr
    return place / "run", done


def test_a_run_tells_and_leaves_all_it_should(reference: Reference) -> None:
    folder, done = reference
    assert done.stderr == ""
    curve = losses(folder)
    assert [step for kind, step, _ in curve if kind == "step"] == list(range(1, STEPS + 1))
    evaluations = [(step, loss) for kind, step, loss in curve if kind == "evaluation"]
    assert [step for step, _ in evaluations] == [0, 8, 16, 24]
    assert evaluations[-1][1] < evaluations[0][1] - 0.3
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["last_validation_loss"] == evaluations[-1][1]
    sent, dense = summary["sent_bytes_per_step"], summary["dense_float32_bytes_per_step"]
    assert dense == 4 * summary["num_parameters"]
    assert dense > 50 * sent > 0
    for words in (
        "this run (demo)",
        "float32 all-reduce",
        f"{2 * dense / (2 * sent):.1f}",
        "where the time went",
        "network",
    ):
        assert words in done.stdout
    for words in (
        r"tokens/s [\d,]+",
        r"sent/step [\d.]+ kB",
        r"network wait \d+%",
        r"left \d+:\d\d",
        "a sample of its text",
    ):
        assert re.search(words, done.stdout)
    page = (folder / "index.html").read_text()
    assert "<title>run: finished</title>" in page
    assert "Loss against steps" in page
    assert "float32 all-reduce" in page
    assert len((folder / "sample.txt").read_text()) >= 16
    model = AutoModelForCausalLM.from_pretrained(folder / "checkpoints" / "best" / "model")
    saved = weights(folder)
    assert all(torch.equal(parameter, saved[name]) for name, parameter in model.named_parameters() if name in saved)


def test_the_same_seed_gives_the_same_run_also_by_torchrun(reference: Reference, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "thinwire"]
    done = thinwire(*ONE, "--out", "run", cwd=tmp_path, under=torchrun)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same_run(reference[0], tmp_path / "run")


def test_kill_9_and_resume_is_as_if_nothing_had_happened(reference: Reference, tmp_path: Path) -> None:
    last_step = random.randint(7, STEPS - 8)
    process = subprocess.Popen(
        [*PROGRAM, *RUN, "--out", "run", "--print-every", "1"], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        found = re.match(r"step (\d+)/", line)
        if found and int(found[1]) >= last_step:
            break
    kill_all(process.pid)
    process.wait()
    assert not (tmp_path / "run" / "summary.json").exists(), "it was too fast to be killed"
    done = thinwire("train", "--resume", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same_run(reference[0], tmp_path / "run")


def test_ctrl_c_in_a_terminal_saves_and_ends_all(reference: Reference, tmp_path: Path) -> None:
    terminal = Terminal([*RUN, "--out", "run"], tmp_path)
    terminal.read_until("step 8: validation loss")
    started = children_of(terminal.process.pid)
    assert len(started) >= 2
    terminal.press_ctrl_c()
    assert terminal.wait() == 130, terminal.text
    # The display redraws itself in place.
    assert "network wait" in terminal.text
    assert "\x1b[" in terminal.text
    assert "Traceback" not in terminal.text
    assert "death signal" not in terminal.text
    assert "stopping after this step, with a checkpoint" in terminal.text
    found = re.search(r"stopped after step (\d+), with a checkpoint", terminal.text)
    assert found is not None, terminal.text
    assert "go on with: thinwire train --resume run" in terminal.text
    assert not [pid for pid in started if is_running(pid)]
    run = json.loads((tmp_path / "run" / "checkpoints" / "last" / "replica-1" / "run.json").read_text())
    assert run["step"] == int(found[1]) < STEPS
    done = replicas("train", "--resume", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same_run(reference[0], tmp_path / "run")


def test_replicas_stop_when_their_launcher_is_killed(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*PROGRAM, *RUN, "--steps", "100000", "--out", "run"], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 8:"):
            break
    started = children_of(process.pid)
    second = replicas("train", "--resume", "run", "--replicas", "1", "--residual", "zero", cwd=tmp_path, number=1)
    assert second.returncode == 1
    assert "another run is writing to this folder" in second.stderr
    process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 60
    while any(is_running(pid) for pid in started):
        assert time.monotonic() < deadline, "replicas go on without their launcher"
        time.sleep(0.2)
    assert (tmp_path / "run" / "checkpoints" / "last" / "replica-1" / "run.json").exists()


def test_a_replica_that_dies_is_named_on_one_line(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*PROGRAM, *RUN, "--steps", "100000", "--out", "run"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 8:"):
            break
    victims = [pid for pid in children_of(process.pid) if "thinwire" in Path(f"/proc/{pid}/cmdline").read_text()]
    with open(f"/proc/{victims[-1]}/environ") as file:
        rank = re.search(r"\0RANK=(\d)", file.read())
    assert rank is not None
    subprocess.run(["kill", "-9", str(victims[-1])], check=True)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    (line,) = errors.splitlines()
    assert line == f"thinwire: replica {rank[1]} was killed by SIGKILL"


def test_an_optimizer_over_ddp_resumes_too(tmp_path: Path) -> None:
    # A schedule that does not depend on the number of steps, so that the first part is a part of the whole.
    run = [*RUN, "--optimizer", "adamw", "--schedule", "constant", "--eval-every", "100", "--checkpoint-every", "0"]
    for name, steps in (("whole", "9"), ("halves", "5")):
        done = replicas(*run, "--steps", steps, "--out", name, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    done = replicas("train", "--resume", "halves", "--steps", "9", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = weights(tmp_path / "whole"), weights(tmp_path / "halves")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_images_with_running_statistics(tmp_path: Path) -> None:
    options = ["--steps", "12", "--eval-every", "6", "--width", "8", "--batch", "32", "--no-tensorboard"]
    done = replicas("train", "cnn", "--replicas", "2", *options, "--out", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "right" in done.stdout
    curve = [loss for kind, _, loss in losses(tmp_path / "run") if kind == "evaluation"]
    assert curve[-1] < curve[0]


def test_training_goes_on_when_nobody_reads(tmp_path: Path) -> None:
    command = " ".join([*PROGRAM, *ONE, "--steps", "6", "--out", "run"]) + " | head -n 1"
    # As on most machines: what could not be written waits in a buffer, and must not end the program at its end.
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    settings: dict[str, Any] = {"shell": True, "capture_output": True, "text": True, "timeout": 200, "check": False}
    done = subprocess.run(command, cwd=tmp_path, env=buffered, **settings)
    assert done.stderr == ""
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 6


def test_two_machines_that_share_a_disk(reference: Reference, tmp_path: Path) -> None:
    """Two launchers with one replica each: the same run as two replicas of one machine, one folder, and a resumption."""

    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    torchrun += ["--master-addr", "localhost", "--master-port", str(free_port())]
    processes = []
    for rank in ("0", "1"):
        command = [*torchrun, "--node-rank", rank, "-m", "thinwire", *ONE, "--out", "run"]
        processes.append(
            subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    for process in processes:
        out, _ = process.communicate(timeout=200)
        assert process.returncode == 0, out
    assert_same_run(reference[0], tmp_path / "run")
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints" / "last").iterdir())
    assert names == ["files-0.json", "files-1.json", "model", "replica-0", "replica-1"]
    done = replicas("train", "--resume", "run", "--steps", str(STEPS + 2), cwd=tmp_path, machines=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses(tmp_path / "run")[-1][1] == STEPS + 2
