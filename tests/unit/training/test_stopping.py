"""Asking a run to stop."""

import os
import signal
import subprocess
import sys
import time

import pytest

from thinwire.training import stopping
from thinwire.training.stopping import StopRequest


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_the_first_request_is_noted_and_the_handlers_come_back(kind: signal.Signals) -> None:
    before = signal.getsignal(kind)
    with StopRequest(None, answers=False) as request:
        assert not request.is_asked
        os.kill(os.getpid(), kind)
        os.kill(os.getpid(), kind)  # a launcher passes on what the terminal has sent already
        assert request.is_asked
        assert request.signal_number == kind
    assert signal.getsignal(kind) is before


def test_a_later_second_request_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "_SAME_REQUEST_SECONDS", 0.0)
    with StopRequest(None, answers=False):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_the_end_of_the_parent_is_noticed() -> None:
    program = (
        "import os, sys, time\n"
        "from thinwire.training.stopping import StopRequest\n"
        "if os.fork():\n"
        "    time.sleep(0.5)\n"
        "    os._exit(0)\n"
        "with StopRequest(os.getppid(), answers=False) as request:\n"
        "    print(request.is_asked, flush=True)\n"
        "    time.sleep(1.5)\n"
        "    print(request.is_asked, flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_the_person_is_answered_once(capfd: pytest.CaptureFixture[str]) -> None:
    with StopRequest(None, answers=True):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert capfd.readouterr().err.count("stopping after this step, with a checkpoint") == 1
