"""``thinwire bench step`` from end to end, on a CPU and a tiny model."""

import json
import re
from pathlib import Path

import pytest
import torch

from tests.cli import replicas
from thinwire.bench.report import markdown
from thinwire.bench.step import StepRow
from thinwire.cli import run

TINY = ["bench", "step", "--shapes", "tiny", "--rounds", "2", "--topk", "8", "--device", "cpu"]


def test_a_step_is_measured_beside_others(tmp_path: Path) -> None:
    out = tmp_path / "rows"
    asked = ["--replicas", "1", "2", "--updates", "sign", "adamw", "--balances", "0", "0.95"]
    found = replicas(*TINY, *asked, "--out", str(out), cwd=tmp_path, number=1)
    assert found.returncode == 0, found.stderr
    rows = [StepRow(**json.loads(line)) for line in (out / "rows.jsonl").read_text().splitlines()]
    names = [(row.contender, row.topk, row.replicas) for row in rows]
    assert names == [
        ("SGD fused", None, None),
        ("Muon", None, None),
        ("published DeMo", 32, 1),
        ("thinwire torch", 8, 1),
        ("thinwire torch", 8, 2),
        ("thinwire torch, step()", 8, 1),
        ("thinwire torch, step()", 8, 2),
        ("thinwire torch, step(), balance 0.95", 8, 1),
        ("thinwire torch, step(), balance 0.95", 8, 2),
        ("thinwire torch, step(), adamw rule", 8, 1),
        ("thinwire torch, step(), adamw rule", 8, 2),
        ("thinwire torch, step(), adamw rule, balance 0.95", 8, 1),
        ("thinwire torch, step(), adamw rule, balance 0.95", 8, 2),
        ("AdamW fused", None, None),
    ]
    for row in rows:
        assert 0 < row.low_ms <= row.median_ms <= row.high_ms
        assert row.num_parameters == 256 * 64 + 2 * (3 + 1 + 8 + 4) * 64 * 64
        assert abs(row.median_ms / row.floor_ms - row.ratio_to_floor) < 1e-9
    assert set(rows[3].parts_ms) == {"encode", "decode"}
    assert rows[4].floor_bytes_per_parameter > rows[3].floor_bytes_per_parameter > 20
    plain, balanced, adamw = (rows[index].floor_bytes_per_parameter for index in (5, 7, 9))
    assert balanced - plain == pytest.approx(4)  # the gradient is read twice
    assert adamw - plain == pytest.approx(8, abs=0.01)  # its state, read and written; its values also have scales
    assert rows[9].state_bytes_per_parameter == 8
    summary = (out / "summary.md").read_text()
    assert markdown(rows) in summary
    assert f"thinwire {' '.join([*TINY, *asked])}`" in summary
    assert str(tmp_path) not in summary
    assert (out / "step.png").stat().st_size > 10_000
    assert json.loads((out / "environment.json").read_text())["torch"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--topk", "0"], r"--topk must be .*got 0"),
        (["--replicas", "-1"], r"--replicas must be .*got -1"),
        (["--balances", "0.9", "1"], r"--balances must be from 0 to below 1, got 1"),
        (["--device", "cuda"], r"there is no such device here"),
        (["--device", "tpu"], r"--device tpu must be cpu, cuda or auto"),
        (["--out", "/dev/null/x"], r"--out /dev/null/x: Not a directory"),
    ],
)
def test_bad_options_are_one_line(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "cuda" in options and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    assert run([*TINY, *options]) == 1
    assert re.fullmatch(rf"thinwire: .*{message}.*\n", capsys.readouterr().err)
