"""One worker per host, told what to do and listened to, with a deadline on every answer."""

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from thinwire.lab.errors import LabError
from thinwire.lab.everywhere import environment
from thinwire.lab.network import Network
from thinwire.training.config import TrainConfig
from thinwire.training.config_file import as_toml

_START_SECONDS = 180.0
_END_SECONDS = 10.0


class Workers:
    """A run with one replica per host of ``network``. Use it as a context: at its end all are gone."""

    def __init__(self, network: Network, num_hosts: int, config: TrainConfig) -> None:
        self._network, self._num_hosts, self._config = network, num_hosts, config
        self._processes: list[subprocess.Popen[str]] = []
        self._answers: list[queue.Queue[str | None]] = []
        self._stack = ExitStack()
        self.num_parameters = 0

    def __enter__(self) -> "Workers":
        """Start them, and wait until all have joined."""
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="thinwire-lab-")))
        file = folder / "lab.toml"
        file.write_text(as_toml(self._config), encoding="utf-8")
        command = [sys.executable, "-m", "thinwire.lab.worker", str(folder / "run"), str(file)]
        try:
            for host in range(self._num_hosts):
                log = self._stack.enter_context((folder / f"host-{host}.log").open("w"))
                self._start(host, command, log)
            self.num_parameters = self._hear(_START_SECONDS)[0]["parameters"]
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _start(self, host: int, command: list[str], log: IO[str]) -> None:
        env = environment(host, self._num_hosts, len(os.sched_getaffinity(0)), os.environ)
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log, "text": True}
        process = self._network.start(host, command, env, **pipes)
        answers: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=_pass_on, args=(process.stdout, answers), daemon=True).start()
        self._processes.append(process)
        self._answers.append(answers)

    def ask(self, order: dict[str, Any], deadline_seconds: float) -> list[dict[str, Any]]:
        """Tell all the same, and return their answers."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
        return self._hear(deadline_seconds)

    def _hear(self, deadline_seconds: float) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for host, answers in enumerate(self._answers):
            try:
                line = answers.get(timeout=deadline_seconds)
            except queue.Empty:
                raise LabError(f"host {host} has not answered for {deadline_seconds:g} s") from None
            if line is None:
                raise LabError(f"the worker of host {host} died with exit code {self._processes[host].wait()}")
            answer = json.loads(line)
            if "error" in answer:
                raise LabError(f"host {host}: {answer['error']}")
            found.append(answer)
        return found

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End them; at once if something is wrong."""
        for process in self._processes:
            assert process.stdin is not None
            if kind is None:
                process.stdin.close()
            else:
                process.kill()
        for process in self._processes:
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._stack.close()


def _pass_on(lines: IO[str] | None, answers: "queue.Queue[str | None]") -> None:
    for line in lines or ():
        answers.put(line)
    answers.put(None)
