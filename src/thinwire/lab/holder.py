"""A process that holds a network namespace, as its owner sees it."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from thinwire.lab import inside
from thinwire.lab.errors import LabError

SCRIPT = Path(inside.__file__).resolve()
# Isolated and without site-packages: a start of some ten milliseconds, and nothing of the caller's environment.
INTERPRETER = [sys.executable, "-I", "-S"]
_CLOSE_SECONDS = 10.0


def as_root_command(command: Sequence[str]) -> list[str]:
    """The command line that runs this command as root of a user namespace of its own."""
    return [*INTERPRETER, str(SCRIPT), "as-root", "--", *command]


class Holder:
    """A namespace of its own. It ends with `close`, or with the process that made it."""

    def __init__(self, name: str, in_user_namespace: bool = False) -> None:
        self.name = name
        command = [*INTERPRETER, str(SCRIPT), "hold"]
        self._process = subprocess.Popen(
            as_root_command(command) if in_user_namespace else command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """Of the process that holds it."""
        return self._process.pid

    def wait_until_ready(self) -> None:
        """Return when the namespace is there."""
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        if not self._process.stdout.readline():
            self._process.wait(_CLOSE_SECONDS)
            raise LabError(f"{self.name} has no namespace: {self._process.stderr.read().strip() or 'it ended'}")

    def run(self, *argv: str, text: str = "") -> str:
        """Run a command in there; returns what it prints."""
        answer = self._ask({"argv": argv, "input": text})
        if answer["code"] != 0:
            said = " ".join(str(answer["err"]).split()) or f"exit code {answer['code']}"
            raise LabError(f"{self.name}: {' '.join(argv)}: {said}")
        return str(answer["out"])

    def batch(self, program: str, lines: Sequence[str]) -> None:
        """Run lines for ``ip`` or ``tc``, which stop at the first that fails."""
        if lines:
            self.run(program, "-batch", "-", text="".join(f"{line}\n" for line in lines))

    def set_kernel(self, values: Mapping[str, str]) -> list[str]:
        """Write settings under /proc/sys; returns those that could not be written."""
        return [str(path) for path in self._ask({"write": dict(values)})["refused"]]

    def _ask(self, question: dict[str, object]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
            if line:
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise LabError(f"{self.name}: the process that holds its namespace is gone")

    def enter_command(self, command: Sequence[str], dies_with_thread: bool = True) -> list[str]:
        """The command line that runs this command in there, and that ends with the thread that starts it, if wanted."""
        owner = os.getpid() if dies_with_thread else 0
        return [*INTERPRETER, str(SCRIPT), "enter", str(self.pid), str(owner), "--", *command]

    def is_alive(self) -> bool:
        """Whether the namespace is still held."""
        return self._process.poll() is None

    def begin_closing(self) -> None:
        """Let it end, and all that runs in there; `close` waits."""
        _close_input(self._process)

    def close(self) -> None:
        """End it, and all that runs in there."""
        end(self._process)


def end(process: "subprocess.Popen[str]") -> None:
    """Close the pipe to a process that ends with it, wait for its end, or see to it."""
    _close_input(process)
    try:
        process.wait(_CLOSE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()


def _close_input(process: "subprocess.Popen[str]") -> None:
    with contextlib.suppress(OSError):
        if process.stdin is not None:
            process.stdin.close()
