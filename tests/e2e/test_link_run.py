"""``thinwire train --link``: it says that the link is a model, and waits at least as long as that."""

import json
from dataclasses import replace
from pathlib import Path

from tests.cli import TINY, replicas
from thinwire.planner.cost import network_seconds, ring_all_gather
from thinwire.planner.link_spec import parse_link

STEPS = 6


def test_a_run_over_a_modelled_link(tmp_path: Path) -> None:
    options = ["--replicas", "2", "--link", "10mbit,40ms", "--steps", str(STEPS), "--out", "run"]
    done = replicas("train", "quickstart", *TINY, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "over gloo, held back as over 10 Mbit/s, 40 ms: a model, not a measurement" in done.stdout
    assert "network (10mbit,40ms: a model)" in done.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    exchange = ring_all_gather(round(summary["sent_bytes_per_step"]), 2)
    warm = replace(parse_link("10mbit,40ms").link, window_bytes=None)
    assert summary["seconds"]["network"] >= STEPS * network_seconds(exchange, warm, 2)


def test_the_link_chooses_owners_and_the_run_goes_on(tmp_path: Path) -> None:
    options = [
        "--link",
        "1mbit",
        "--exchange",
        "auto",
        "--values",
        "float32",
        "--topk",
        "512",
        "--owner-topk",
        "256",
        "--batch",
        "6",
        "--out",
        "run",
        "--steps",
        "4",
    ]
    done = replicas("train", "quickstart", *TINY, *options, cwd=tmp_path, number=3)
    assert done.returncode == 0, done.stdout + done.stderr
    done = replicas("train", "--resume", "run", "--steps", "6", cwd=tmp_path, number=3)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 6
    sent, received = summary["sent_bytes_per_step"], summary["received_bytes_per_step"]
    assert sent < received < 2 * sent, "an all-gather of three would receive twice what it sends"
