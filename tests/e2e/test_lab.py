"""``thinwire lab`` as a person uses it: rights, exit codes, output, Ctrl-C."""

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli import PROGRAM, Terminal, thinwire
from tests.lab import MARK, marked, wait_until_gone
from thinwire.cli import run
from thinwire.lab import support

MISSING = support.missing()
pytestmark = [pytest.mark.skipif(MISSING is not None, reason=MISSING or ""), pytest.mark.timeout(120)]
WHO = 'echo "$RANK of $WORLD_SIZE at $MASTER_ADDR:$MASTER_PORT"'


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A mark for all that is started, which must have ended when the test has."""
    text = os.urandom(8).hex()
    monkeypatch.setenv(MARK, text)
    yield text
    wait_until_gone(text, but=[os.getpid()])


def test_a_command_runs_once_per_host_over_links_that_were_measured(
    tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # a number given from outside wins
    script = f'{WHO}; touch "$RANK"; echo "$OMP_NUM_THREADS" >> threads; ip -o -4 addr show veth0 > "address$RANK"'
    found = thinwire("lab", "run", "--hosts", "3", "--link", "1gbit", "--", "sh", "-c", script, cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    assert found.stdout == "0 of 3 at 10.77.0.1:29500\n"
    assert found.stderr == ""
    assert {name.name for name in tmp_path.glob("?")} == {"0", "1", "2"}
    assert "10.77.0.3/24" in (tmp_path / "address2").read_text()
    assert set((tmp_path / "threads").read_text().split()) == {str(max(1, len(os.sched_getaffinity(0)) // 3))}


def test_the_first_host_to_fail_gives_its_code_and_says_why(tmp_path: Path, mark: str) -> None:
    script = '[ "$RANK" = 1 ] && echo "out of luck" && exit 7; sleep 1000 & sleep 1000'
    found = thinwire("lab", "run", "--no-verify", "--link", "unshaped", "--", "sh", "-c", script, cwd=tmp_path)
    assert found.returncode == 7
    assert found.stderr == "host 1: out of luck\nthinwire: host 1 ended with exit code 7; the others were stopped\n"


def test_ctrl_c_stops_all_hosts(tmp_path: Path, mark: str) -> None:
    script = 'trap "touch stopped$RANK; exit 0" INT; touch running$RANK; while :; do sleep 0.05; done'
    terminal = Terminal(["lab", "run", "--no-verify", "--link", "10mbit,20ms", "--", "sh", "-c", script], tmp_path)
    deadline = time.monotonic() + 60
    while len(list(tmp_path.iterdir())) < 2:
        assert time.monotonic() < deadline, terminal.text
        time.sleep(0.05)
    assert len(marked(mark)) > 4
    terminal.press_ctrl_c()
    assert terminal.wait() == 130
    assert sorted(path.name for path in tmp_path.glob("stopped*")) == ["stopped0", "stopped1"]
    assert "Traceback" not in terminal.text


def test_a_kill_of_the_program_leaves_nothing(tmp_path: Path, mark: str) -> None:
    command = [*PROGRAM, "lab", "run", "--no-verify", "--link", "10mbit,20ms", "--", "sh", "-c", "echo running; sleep 1000"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    process.send_signal(signal.SIGKILL)
    process.wait(20)
    wait_until_gone(mark, but=[os.getpid()])
    process.stdout.close()


def readable_everywhere() -> dict[str, str]:
    """An environment in which another Python than that of the tests finds their packages."""
    source = str(Path(support.__file__).parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([source, sysconfig.get_paths()["purelib"]])}


def check_as(prefix: list[str], python: str) -> None:
    command = [*prefix, python, "-m", "thinwire", "lab", "check", "--link", "50mbit,20ms"]
    found = subprocess.run(
        command, cwd="/", capture_output=True, text=True, timeout=100, check=False, env=readable_everywhere()
    )
    assert found.returncode == 0, found.stderr
    assert "namespaces: yes, as root of a user namespace" in found.stdout
    assert re.search(r"0 -> 1 .* 47\.8 Mbit/s .* 20 ms .* good", found.stdout)


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root, and setpriv to stop being it")
def test_without_root_a_user_namespace_does(mark: str) -> None:
    somebody = ["setpriv", "--reuid=12345", "--regid=12345", "--clear-groups"]
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for python in (sys.executable, f"/usr/bin/{version}"):
        # The first exec still has root's rights on the way to the file.
        probe = [*somebody, "sh", "-c", f"exec {python} -c 'import thinwire.cli'"]
        if subprocess.run(probe, cwd="/", capture_output=True, check=False, env=readable_everywhere()).returncode == 0:
            check_as(somebody, python)
            return
    # No program or no source that others than root may read: then root without its rights.
    check_as(["setpriv", "--bounding-set=-sys_admin,-net_admin", "--inh-caps=-sys_admin,-net_admin"], sys.executable)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["chek"], "thinwire lab='chek' is not one of .*check.* did you mean 'check'"),
        (["run", "--hosts", "2"], "there is no command to run: write it after --"),
        (["run", "--", "no-such-program"], "there is no program 'no-such-program'"),
        (["run", "--link", "10mbyte", "--", "ls"], "--link='10mbyte' is in bytes"),
        (["check", "--islands", "2"], "--islands and --uplink belong together"),
    ],
)
def test_what_is_wrong_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    if support.needs_user_namespace():
        pytest.skip("this process would have to become another")
    assert run(["lab", *arguments]) == 1
    assert re.fullmatch(rf"thinwire: .*{message}.*\n", capsys.readouterr().err)


def test_help_needs_no_rights(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "require", lambda: pytest.fail("asked for rights"))
    assert run(["lab", "--help"]) == 0
    assert run(["lab"]) == 2
    assert run(["lab", "run", "--help"]) == 0
    assert "--uplink" in capsys.readouterr().out
