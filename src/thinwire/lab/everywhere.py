"""One command in every host, as a cluster's launcher would start it, and what became of it."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import IO, Any

from thinwire.lab.layout import HOST_DEVICE, address
from thinwire.lab.network import Network

# All ports of a namespace are free.
_MASTER_PORT = 29_500
_PAUSE_SECONDS = 0.05
# After an error, and after Ctrl-C: a run that was asked to stop writes a checkpoint first.
_GRACE_SECONDS, _STOP_SECONDS = 5.0, 120.0
_MOST_LINES = 40
# As shells tell it: a process that a signal has ended.
_SIGNAL_CODES = 128


@dataclass(frozen=True)
class Outcome:
    """``code`` is the exit code of the first host that failed, which is ``host``, or 0. ``signal_number``: what ended it
    all from outside, or 0."""

    code: int
    host: int | None = None
    signal_number: int = 0

    @property
    def sentence(self) -> str:
        """What became of the host that failed."""
        if self.code > _SIGNAL_CODES and self.code - _SIGNAL_CODES in set(signal.Signals):
            return (
                f"host {self.host} was killed by {signal.Signals(self.code - _SIGNAL_CODES).name}; the others were stopped"
            )
        return f"host {self.host} ended with exit code {self.code}; the others were stopped"


def environment(host: int, num_hosts: int, num_cores: int, base: Mapping[str, str]) -> dict[str, str]:
    """What the command finds in its environment: torchrun's variables for one process per host, its part of the cores."""
    threads = str(max(1, num_cores // num_hosts))
    return {
        **base,
        "RANK": str(host),
        "WORLD_SIZE": str(num_hosts),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": address(0),
        "MASTER_PORT": str(_MASTER_PORT),
        "GLOO_SOCKET_IFNAME": HOST_DEVICE,
        "NCCL_SOCKET_IFNAME": HOST_DEVICE,
        "OMP_NUM_THREADS": base.get("OMP_NUM_THREADS", threads),
    }


def with_threads(command: Sequence[str], num_hosts: int, num_cores: int) -> list[str]:
    """``thinwire train`` divides the cores of its machine among that machine's replicas; here each host has one and believes
    the machine its own, so the division is done for it."""
    words = list(command)
    rest = words[3:] if words[1:3] == ["-m", "thinwire"] else words[1:] if os.path.basename(words[0]) == "thinwire" else []
    if rest[:1] != ["train"] or any(word.split("=")[0] == "--threads" for word in rest):
        return words
    return [*words, f"--threads={max(1, num_cores // num_hosts)}"]


def run_everywhere(network: Network, command: Sequence[str], base: Mapping[str, str], num_cores: int) -> Outcome:
    """Run a command in every host until all have ended, or one has failed. Host 0 has the terminal; what the others say is
    shown if they fail."""
    with contextlib.ExitStack() as stack, _Signals() as signals:
        logs: list[IO[bytes] | None] = [None]
        logs += [stack.enter_context(tempfile.TemporaryFile()) for _ in range(network.num_hosts - 1)]
        command = with_threads(command, network.num_hosts, num_cores)
        processes = []
        for host, log in enumerate(logs):
            env = environment(host, network.num_hosts, num_cores, base)
            processes.append(network.start(host, command, env, stdout=log, stderr=log))
        outcome = _wait(network, processes, signals)
        if outcome.host is not None:
            log = logs[outcome.host]
            if log is not None:
                _show(outcome.host, log)
        return outcome


class _Signals:
    """Ctrl-C and SIGTERM are for the hosts: they are kept, and passed on."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __enter__(self) -> "_Signals":
        self._before = {kind: signal.signal(kind, self._keep) for kind in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *error: object) -> None:
        for kind, handler in self._before.items():
            signal.signal(kind, handler)

    def _keep(self, number: int, frame: FrameType | None) -> None:
        self.asked.append(number)


def _wait(network: Network, processes: Sequence[subprocess.Popen[Any]], signals: _Signals) -> Outcome:
    while any(process.poll() is None for process in processes):
        if signals.asked:
            _stop(processes, signals.asked[0], _STOP_SECONDS, lambda: len(signals.asked) > 1)
            return Outcome(_SIGNAL_CODES + signals.asked[0], signal_number=signals.asked[0])
        failed = next((host for host, process in enumerate(processes) if process.poll()), None)
        if failed is not None:
            _stop(processes, signal.SIGTERM, _GRACE_SECONDS, lambda: bool(signals.asked))
            return _failure(failed, processes[failed])
        network.check()
        time.sleep(_PAUSE_SECONDS)
    failed = next((host for host, process in enumerate(processes) if process.poll()), None)
    return Outcome(0) if failed is None else _failure(failed, processes[failed])


def _failure(host: int, process: subprocess.Popen[Any]) -> Outcome:
    code = process.wait()
    return Outcome(_SIGNAL_CODES - code if code < 0 else code, host)


def _stop(processes: Sequence[subprocess.Popen[Any]], number: int, seconds: float, is_over: Callable[[], bool]) -> None:
    """Pass a signal on, as a terminal does, and wait; the network ends those that do not obey."""
    for process in processes:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, number)
    deadline = time.monotonic() + seconds
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline and not is_over():
        time.sleep(_PAUSE_SECONDS)


def _show(host: int, log: IO[bytes]) -> None:
    for line in _last_lines(log):
        print(f"host {host}: {line}", file=sys.stderr)


def _last_lines(log: IO[bytes]) -> Iterator[str]:
    log.seek(0)
    lines = log.read().decode(errors="replace").splitlines()
    if len(lines) > _MOST_LINES:
        yield f"({len(lines) - _MOST_LINES} lines before these)"
    yield from lines[-_MOST_LINES:]
