"""What the README tells a newcomer to do works as it says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import thinwire
from thinwire.cli import run

ROOT = Path(thinwire.__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()


def test_the_shortest_script_trains_under_torchrun(tmp_path: Path) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(script.splitlines()) <= 30
    (tmp_path / "train.py").write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    lines = re.findall(r"step (\d+): loss ([\d.]+), sent (\d+), received (\d+) bytes", done.stdout)
    # A gloo process may abort at exit, after its work is done (pytorch issue 190489): judge by what it printed.
    assert [int(step) for step, *_ in lines] == [50, 100, 150, 200], done.stdout + done.stderr
    losses = [float(loss) for _, loss, *_ in lines]
    assert losses[-1] < 0.9 * losses[0]
    sent, received = int(lines[-1][2]), int(lines[-1][3])
    assert sent == received
    stated = float(re.search(r"a step sends ([\d.]+) kB", README).group(1))
    assert abs(sent / 1000 - stated) < 0.1


def test_the_bytes_it_shows_are_those_that_are_sent(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "quickstart", "--replicas", "2", "--dry-run"]) == 0
    sent, received = re.search(r"(\S+ kB) sent, (\S+ kB) received", capsys.readouterr().out).groups()
    assert f"│ this run (demo)     │ {sent} │  {received} │" in README


def test_the_wire_module_runs() -> None:
    done = subprocess.run([sys.executable, "-m", "thinwire.wire"], capture_output=True, text=True, timeout=120, check=True)
    assert "| 32 | elias_fano | 9.00 | 8.32 |" in done.stdout
