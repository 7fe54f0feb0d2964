"""What a command finds in its host, and what a machine without a laboratory says."""

import pytest

from thinwire.lab import support
from thinwire.lab.errors import LabUnavailableError
from thinwire.lab.everywhere import Outcome, environment, with_threads


def test_a_host_is_a_node_of_one_process() -> None:
    found = environment(2, 4, 9, {"HOME": "/root", "RANK": "7"})
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"], found["LOCAL_WORLD_SIZE"]) == ("2", "4", "0", "1")
    assert found["MASTER_ADDR"] == "10.77.0.1"
    assert found["GLOO_SOCKET_IFNAME"] == "veth0"
    assert found["OMP_NUM_THREADS"] == "2"
    assert found["HOME"] == "/root"
    assert environment(0, 4, 2, {})["OMP_NUM_THREADS"] == "1"
    assert environment(0, 4, 2, {"OMP_NUM_THREADS": "3"})["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(
    ("command", "is_told"),
    [
        ("thinwire train quickstart", True),
        (".venv/bin/thinwire train", True),
        ("python -m thinwire train --steps 3", True),
        ("thinwire train --threads 3", False),
        ("thinwire train --threads=3", False),
        ("thinwire bench step", False),
        ("python train.py thinwire train", False),
        ("ls", False),
    ],
)
def test_training_is_told_its_part_of_the_cores(command: str, is_told: bool) -> None:
    words = command.split()
    assert with_threads(words, 2, 8) == words + ["--threads=4"] * is_told


def test_an_end_is_told_by_code_or_signal() -> None:
    assert Outcome(3, 1).sentence == "host 1 ended with exit code 3; the others were stopped"
    assert Outcome(139, 0).sentence == "host 0 was killed by SIGSEGV; the others were stopped"
    assert Outcome(255, 0).sentence == "host 0 ended with exit code 255; the others were stopped"


def test_a_machine_without_iproute2_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(support, "SYSTEM_FOLDERS", "/nowhere")
    support._explore.cache_clear()
    try:
        assert support.missing() == "`ip` is not installed: it is part of iproute2"
        with pytest.raises(LabUnavailableError, match=r"no laboratory here: `ip` is not installed.*thinwire train --link"):
            support.require()
    finally:
        support._explore.cache_clear()


@pytest.mark.parametrize("user", [0, 1000])
def test_a_machine_that_allows_no_namespaces_says_so(user: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "_try", lambda **_: "unshare: Operation not permitted")
    monkeypatch.setattr("os.geteuid", lambda: user)
    monkeypatch.setattr("shutil.which", lambda program, **_: program)
    support._explore.cache_clear()
    try:
        message = "capabilities SYS_ADMIN and NET_ADMIN" if user == 0 else "it needs root, or user namespaces"
        assert message in (support.missing() or "")
    finally:
        support._explore.cache_clear()
