"""A comparison of two methods on two hosts, in real namespaces over real shaped links, interrupted and taken up again."""

import json
from pathlib import Path

import pytest

from tests.cli import replicas, thinwire
from thinwire.lab import rows
from thinwire.lab.rows import Cell
from thinwire.lab.support import missing

REASON = missing()


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_two_hosts_are_compared_and_the_rest_is_measured_later(tmp_path: Path) -> None:
    kept = Cell(2, "20mbit,10ms", "topk", seconds=1.5, parts=dict.fromkeys(rows.PARTS, 0.1), measured_bits=19e6)
    (tmp_path / "out").mkdir()
    rows.append(tmp_path / "out" / "rows.jsonl", kept)
    command = ["lab", "compare", "--hosts", "2", "--recipe", "vit", "--steps", "2", "--out", "out"]
    done = thinwire(*command, "--methods", "topk", "adamw", "demo", "--links", "20mbit,10ms", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    topk, adamw, demo = rows.read(tmp_path / "out" / "rows.jsonl")
    assert topk == kept  # not measured again
    assert (adamw.method, demo.method) == ("adamw", "demo")
    for cell in (adamw, demo):
        # All but gloo's own few bytes per exchange.
        extra = cell.received_payload - cell.meter_received
        assert 0 <= extra <= 0.02 * cell.meter_received + 1000 * cell.num_exchanges
        assert cell.seconds == pytest.approx(sum(cell.parts.values()), rel=0.5)
        assert cell.measured_bits == pytest.approx(20e6 * 1448 / 1514, rel=0.05)
        assert cell.measured_round_trip is not None
        assert cell.measured_round_trip >= 0.01
    # A link of 20 Mbit/s needs so long for the bytes of an average of float32 gradients, at least.
    assert adamw.parts["exposed"] + adamw.parts["backward"] > 0.9 * 8 * adamw.meter_received / 20e6
    assert adamw.meter_received > 50 * demo.meter_received
    for name in ("summary.md", "steps.png", "environment.json"):
        assert (tmp_path / "out" / name).stat().st_size > 0
    (environment,) = json.loads((tmp_path / "out" / "environment.json").read_text())
    assert environment["torch"]
    assert "| demo |" in (tmp_path / "out" / "summary.md").read_text()


def test_senseless_comparisons_are_refused_before_anything_is_built(tmp_path: Path) -> None:
    for arguments, complaint in {
        ("--methods", "demmo"): "methods='demmo' is unknown",
        ("--hosts", "1"): "hosts=1 must be from 2 to 16",
        ("--rounds", "0"): "rounds=0 must be at least 1",
        ("--links", "10parsec"): "links='10parsec'",
        ("--target", "1.5"): "target needs the loss curves",
        ("--recipe", "nothing"): "there is no recipe 'nothing'",
        ("--report-only",): "--out lab has no rows.jsonl to report on",
    }.items():
        done = replicas("lab", "compare", *arguments, cwd=tmp_path, number=1)
        assert done.returncode == 1
        assert complaint in done.stderr
        assert not (tmp_path / "lab").exists()
