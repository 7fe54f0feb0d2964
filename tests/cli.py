"""Run the ``thinwire`` program as a user does: as a process, in a terminal of its own, with signals.

`replicas` is for tests that are not about how it is started.
"""

import argparse
import contextlib
import fcntl
import os
import pty
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Sequence
from pathlib import Path

from tests.ranks import forkserver
from thinwire import cli

PROGRAM = [sys.executable, "-m", "thinwire"]
# A model and a run that take seconds; options given later win.
TINY = ["--layers", "1", "--width", "64", "--heads", "2", "--mlp-width", "128", "--sequence", "32", "--batch", "8"]
TINY += ["--warmup-steps", "2", "--eval-examples", "16", "--sample-tokens", "16", "--no-tensorboard"]
# One file of the standard library, since to read all of it takes longer than such a run; one thread, as in `conftest`.
TINY += ["--dataset", argparse.__file__, "--threads", "1"]


def thinwire(
    *arguments: str, cwd: Path, timeout: float = 200.0, under: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run to the end. ``under``: another launcher than the program's own."""
    command = [*under, *arguments] if under else [*PROGRAM, *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False)


def torchrun_sets(rank: int, number: int, port: int, machines: int = 1) -> dict[str, str]:
    """The variables of one of ``number`` replicas, which are all on one machine or alone on as many machines."""
    here = number // machines
    places = {"RANK": rank, "WORLD_SIZE": number, "LOCAL_RANK": rank % here, "LOCAL_WORLD_SIZE": here, "MASTER_PORT": port}
    return {"MASTER_ADDR": "localhost", **{name: str(value) for name, value in places.items()}}


def free_port() -> int:
    """A port that nobody has, and that the system gives to nobody who asks for any: it is bound only seconds later."""
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with socket.socket() as unused, contextlib.suppress(OSError):
            unused.bind(("localhost", port))
            return port
    raise OSError("a hundred ports from 20000 to 32000 were tried, and none can be bound")


def replicas(
    *arguments: str, cwd: Path, number: int = 2, machines: int = 1, timeout: float = 200.0
) -> subprocess.CompletedProcess[str]:
    """As `thinwire`, but in processes like torchrun's, forked from one that has imported all they need.

    Returns the largest exit code, what the first one printed, and what all of them complained of.
    """
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        files = [(Path(folder, f"{rank}.out"), Path(folder, f"{rank}.err")) for rank in range(number)]
        processes = []
        for rank in range(number):
            variables = torchrun_sets(rank, number, port, machines) if number > 1 else {}
            processes.append(forkserver().Process(target=_replica, args=(arguments, cwd, variables, *files[rank])))
            processes[-1].start()
        deadline = time.monotonic() + timeout
        try:
            for process in processes:
                process.join(max(0.0, deadline - time.monotonic()))
            codes = [process.exitcode for process in processes]
        finally:
            for process in processes:
                process.kill()
        out, err = files[0][0].read_text(), "".join(file.read_text() for _, file in files)
        assert None not in codes, f"not ended within {timeout} s:\n{out}{err}"
        return subprocess.CompletedProcess(arguments, max(map(abs, codes)), out, err)


def _replica(arguments: Sequence[str], cwd: Path, variables: dict[str, str], out: Path, err: Path) -> None:
    for path, number in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.chdir(cwd)
    os.environ.update(variables)
    sys.argv[1:] = arguments
    cli.main()


class Terminal:
    """A process in a pseudo-terminal of its own session, whose Ctrl-C key works."""

    def __init__(self, arguments: Sequence[str], cwd: Path) -> None:
        self._main, child = pty.openpty()
        self.text = ""
        self.process = subprocess.Popen(
            [*PROGRAM, *arguments],
            cwd=cwd,
            stdin=child,
            stdout=child,
            stderr=child,
            preexec_fn=lambda: (os.setsid(), fcntl.ioctl(child, termios.TIOCSCTTY, 0)),
            env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "130", "LINES": "40"},
        )
        os.close(child)

    def read_until(self, words: str, timeout: float = 120.0) -> None:
        """Collect what is shown until it holds these words."""
        deadline = time.monotonic() + timeout
        while words not in self.text:
            assert time.monotonic() < deadline, f"never saw {words!r} in:\n{self.text}"
            if not self._read_some() and self.process.poll() is not None:
                raise AssertionError(f"ended without {words!r}:\n{self.text}")

    def press_ctrl_c(self) -> None:
        """As the key does: the terminal sends SIGINT to its foreground processes."""
        os.write(self._main, b"\x03")

    def wait(self, timeout: float = 120.0) -> int:
        """The exit code."""
        deadline = time.monotonic() + timeout
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"still running:\n{self.text}"
            self._read_some()
        while self._read_some():
            pass
        return self.process.returncode

    def _read_some(self) -> bool:
        ready, _, _ = select.select([self._main], [], [], 0.2)
        try:
            piece = os.read(self._main, 65536) if ready else b""
        except OSError:  # the other end is closed
            return False
        self.text += piece.decode(errors="replace")
        return bool(piece)


def is_running(pid: int) -> bool:
    """Whether a process has not ended, also where nobody takes notice of those that have."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def children_of(pid: int) -> list[int]:
    """Processes that this one has started, and theirs."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            child = int(path.parent.name)
            found += [child, *children_of(child)]
    return found


def kill_all(pid: int) -> None:
    """kill -9 for a process and all it has started, as when a machine loses power."""
    for victim in [pid, *children_of(pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
