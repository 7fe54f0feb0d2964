"""``thinwire train --elastic``: a replica is killed, the others go on, it comes back; or all stop with a checkpoint."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli import PROGRAM, TINY, replicas
from thinwire.exchange.transport import SoloTransport
from thinwire.training.checkpoints import Checkpoints

pytest.importorskip("torchft", reason="torchft has no build for this platform")

RUN = ["train", "quickstart", *TINY, "--batch", "9", "--steps", "100000", "--eval-every", "20", "--checkpoint-every", "20"]
RUN += ["--elastic", "--replicas", "3", "--timeout-seconds", "20", "--meet-every-seconds", "1", "--check-drift-every", "5"]
PATIENCE_SECONDS = 120


def worker(folder: Path, slot: int) -> int | None:
    """The process of a replica; its launcher is another one."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if f"--out={folder}" in words and f"--slot={slot}" in words and any("cli import main" in word for word in words):
            return int(path.parent.name)
    return None


class Running:
    """A run, and what it has said so far."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder, self._output = folder, folder.with_suffix(".txt")
        with self._output.open("w") as file:
            command = [*PROGRAM, *RUN, "--out", str(folder), *options]
            self.process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)

    @property
    def text(self) -> str:
        return self._output.read_text()

    def wait_until(self, is_so: Callable[[str], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not is_so(self.text):
            assert time.monotonic() < deadline, f"{what} did not happen:\n{self.text}"
            assert self.process.poll() is None, f"ended before {what}:\n{self.text}"
            time.sleep(0.1)

    def kill(self, slot: int) -> None:
        pid = worker(self.folder, slot)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)


def test_a_killed_replica_is_replaced_while_the_others_go_on(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("a key of the run")
    (tmp_path / "key").chmod(0o600)
    run = Running(tmp_path / "run", "--key-file", str(tmp_path / "key"))
    try:
        run.wait_until(lambda text: "step 20: validation loss" in text, "the first evaluation")
        assert "3 replicas on cpu over gloo, signed" in run.text
        run.kill(1)
        run.wait_until(lambda text: "2 replicas after step" in text, "going on with two")
        assert "without ['slot-00001']" in run.text
        run.wait_until(lambda text: "3 replicas after step" in text, "letting it in again")
        run.kill(0)  # the one that reports
        run.wait_until(lambda text: "without ['slot-00000']" in text, "another one reporting")
        run.wait_until(lambda text: text.count("going on after step") > 0, "the first one reporting again")
        time.sleep(1)
        run.process.send_signal(signal.SIGINT)
        assert run.process.wait(PATIENCE_SECONDS) == 130, run.text
        assert "with a checkpoint" in run.text
    finally:
        run.end()
    parts = sorted(path.name for path in (run.folder / "checkpoints" / "last").iterdir())
    assert parts == ["files-0.json", "files-1.json", "files-2.json", "model", "replica-0", "replica-1", "replica-2"]
    checkpoints = [Checkpoints(run.folder, SoloTransport(), slot) for slot in range(3)]
    for slot, own in enumerate(checkpoints):
        found = own.newest_here()
        assert found is not None, "it must be whole and undamaged for each of them"
        assert found[0].name == os.readlink(run.folder / "checkpoints" / "last")
        assert own.load_state(found[0], slot)["optimizer"] is not None


def test_on_loss_stop_leaves_a_checkpoint(tmp_path: Path) -> None:
    run = Running(tmp_path / "run", "--on-loss", "stop", "--checkpoint-every", "0", "--eval-every", "100000")
    try:
        run.wait_until(lambda text: "step 1/" in text, "the first step")
        time.sleep(1)
        run.kill(2)
        assert run.process.wait(PATIENCE_SECONDS) == 1
    finally:
        run.end()
    assert "a replica was lost, and the others stopped with a checkpoint" in run.text
    parts = sorted(path.name for path in (run.folder / "checkpoints" / "last").glob("replica-*"))
    assert parts == ["replica-0", "replica-1"]
    # A replica that comes back when all steps are taken has nobody to wait for.
    step = int(os.readlink(run.folder / "checkpoints" / "last").removeprefix("step-"))
    nobody = ["--lighthouse", "127.0.0.1:9", "--slot", "2", "--steps", str(step)]
    done = replicas("train", "--resume", str(run.folder), *nobody, cwd=tmp_path, number=1, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "is at its last step" in done.stdout
