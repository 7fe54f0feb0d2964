"""Run the ``thinwire`` program as a user does: as a process, in a terminal of its own, with signals."""

import contextlib
import fcntl
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from pathlib import Path

PROGRAM = [sys.executable, "-m", "thinwire"]
# A model and a run that take seconds; options given later win.
TINY = ["--layers", "1", "--width", "64", "--heads", "2", "--mlp-width", "128", "--sequence", "32", "--batch", "8"]
TINY += ["--warmup-steps", "2", "--eval-examples", "16", "--sample-tokens", "16", "--no-tensorboard"]


def thinwire(
    *arguments: str, cwd: Path, timeout: float = 200.0, under: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run to the end. ``under``: another launcher than the program's own."""
    command = [*under, *arguments] if under else [*PROGRAM, *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False)


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
