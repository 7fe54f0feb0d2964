"""Many replicas on paper: formulas and recursion agree, crossings are where they are said to be."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.cli import run
from thinwire.planner.links import Link
from thinwire.planner.rounds import SCHEDULES
from thinwire.planner.scale import (
    ScaleRow,
    closed_step_seconds,
    crossing_in_bytes,
    crossing_in_time,
    make_rows,
    predict,
)
from thinwire.planner.scale_methods import H200, Case, Setting, payload_bytes
from thinwire.planner.scale_page import bytes_table, crossings_table, describe, steps_table

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "results" / "scale" / "2026-11-16_model"
SIZES = (10**8, 10**9, 7 * 10**9, 7 * 10**10)


def row_of(rows: list[ScaleRow], words: str) -> ScaleRow:
    (row,) = [row for row in rows if words in row.method]
    return row


@given(
    num_parameters=st.sampled_from([*SIZES, 123_456_789]),
    islands=st.integers(1, 24),
    size=st.integers(1, 8),
    schedule=st.sampled_from(SCHEDULES),
    bits=st.floats(1e6, 1e11),
    round_trip=st.floats(0.0, 0.3),
)
def test_the_recursion_is_the_formula_for_equal_links(
    num_parameters: int, islands: int, size: int, schedule: str, bits: float, round_trip: float
) -> None:
    setting = Setting(link=Link(bits, round_trip), island_size=size, schedule=schedule)  # type: ignore[arg-type]
    case = Case(setting, num_parameters, islands * size)
    methods = case.methods()
    assert len(methods) == 5
    for method in methods:
        row = predict(method, case)
        assert row.step_seconds == pytest.approx(closed_step_seconds(method, case))
        assert row.efficiency == pytest.approx(case.compute_seconds / row.step_seconds)
        assert row.exposed_seconds <= row.network_seconds + 1e-9


def test_bytes_by_hand() -> None:
    rows = [predict(method, case) for case in [Case(Setting(), 10**9, 64)] for method in case.methods()]
    payload, gradients = payload_bytes(10**9, 32, "sign"), 2 * 10**9
    answers = payload_bytes(10**9, 256, "int4")
    assert row_of(rows, "DDP").link_bytes == pytest.approx(2 * 63 / 64 * gradients)
    gathered = row_of(rows, "all-gather")
    assert gathered.received_bytes == gathered.link_bytes == 63 * payload
    assert gathered.held_bytes == 64 * payload
    islands = row_of(rows, "hierarchical")
    assert islands.link_bytes == 7 * payload == 8 * islands.received_bytes
    assert islands.island_bytes == pytest.approx(2 * 7 / 8 * gradients)
    owner = row_of(rows, "owner")
    assert owner.received_bytes == pytest.approx(63 / 64 * (payload + answers), rel=1e-3), "but for dense tensors"
    assert 8.5 < owner.received_bytes / payload < 9.1, "one payload, and answers"
    many = Case(Setting(), 10**9, 1024)
    assert predict(many.owner(), many).received_bytes == pytest.approx(owner.received_bytes, rel=0.02), "whatever R"


def test_islands_only_where_they_come_out_even() -> None:
    assert [method.name for method in Case(Setting(), 10**8, 12).methods()] == [
        "DDP bf16",
        "published DeMo",
        "Thinwire all-gather",
        "Thinwire owner exchange",
    ]


@pytest.mark.parametrize("num_parameters", SIZES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_crossings_are_where_they_are_said_to_be(num_parameters: int, schedule: str) -> None:
    setting = Setting(schedule=schedule)  # type: ignore[arg-type]
    payload = payload_bytes(num_parameters, 32, "sign")
    assert crossing_in_bytes(setting, num_parameters) == math.ceil(4 * num_parameters / payload)
    found = crossing_in_time(setting, num_parameters)

    def is_slower(num_replicas: int) -> bool:
        case = Case(setting, num_parameters, num_replicas)
        return closed_step_seconds(case.all_gather(), case) >= closed_step_seconds(case.ddp(), case)

    if found is None:
        assert not is_slower(10**6)
        assert payload / setting.link.bytes_per_second < setting.link.round_trip_seconds, "the latency of rings decides"
    else:
        assert is_slower(found)
        assert not is_slower(found - 1)
    far = crossing_in_bytes(setting, num_parameters, Case.hierarchical)
    assert far is not None
    assert far % 8 == 0
    assert far == pytest.approx(8 * 4 * num_parameters / payload, rel=0.01)
    assert crossing_in_bytes(setting, num_parameters, Case.owner) is None


def test_a_slow_link_and_a_straggler_hold_all_up() -> None:
    plain = Case(Setting(), 10**9, 32)
    slow = Case(replace(Setting(), num_slow=1, slow_link=Link(1e8, 0.02)), 10**9, 32)
    late = Case(replace(Setting(), straggler=2.0), 10**9, 32)
    for before, with_slow, with_late in zip(plain.methods(), slow.methods(), late.methods(), strict=True):
        step = predict(before, plain).step_seconds
        assert predict(with_slow, slow).step_seconds > 1.2 * step
        if "owner" in before.name:
            assert predict(with_late, late).step_seconds > step + 0.9 * plain.compute_seconds
        else:
            assert predict(with_late, late).step_seconds >= step + plain.compute_seconds - 1e-6
    ten_times = predict(slow.all_gather(), slow).network_seconds / predict(plain.all_gather(), plain).network_seconds
    assert 5 < ten_times < 10, "the bytes take ten times as long, the trips do not"


def test_a_slow_start_by_hand() -> None:
    plain = replace(Setting(), link=Link(1e9, 0.02, window_bytes=None))

    def extra(num_parameters: int, name: str) -> float:
        """What the slow start adds to the network of 64 replicas."""
        cases = (Case(setting, num_parameters, 64) for setting in (Setting(), plain))
        with_it, without = (row_of([predict(method, case) for method in case.methods()], name) for case in cases)
        return with_it.network_seconds - without.network_seconds

    # A round trip holds 2.39 MB: windows of 10, 20, ... 1280 segments, 3.69 MB in all, come before one that fills it.
    rate = 1e9 / 8 * 1448 / 1514
    assert extra(10**9, "all-gather") == pytest.approx(8 * 0.02 - 2550 * 1448 / rate)
    # Eight connections share an island's link, so that five windows are enough: 80, 160, ... 1280 segments.
    assert extra(10**9, "hierarchical") == pytest.approx(5 * 0.02 - 2480 * 1448 / rate)
    # 1 B: DDP's links are idle for a third of the compute, 0.33 s; 7 B: for 2.3 s.
    assert extra(10**9, "DDP") == 0.0
    assert extra(7 * 10**9, "DDP") == pytest.approx(8 * 0.02 - 2550 * 1448 / rate)
    assert extra(10**8, "all-gather") == 0.0, "after 0.1 s of compute the window is still there"


def test_the_devices_rates_are_those_that_were_measured() -> None:
    path = ROOT / "results" / "step" / "2026-11-15_h200" / "rows.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    checked = 0
    for row in rows:
        if row["contender"] == "thinwire triton, step()" and row["topk"] >= 8 and row["shapes"] == "1b":
            predicted = H200.thinwire_seconds(row["num_parameters"], row["topk"], row["replicas"])
            assert predicted == pytest.approx(row["median_ms"] / 1e3, rel=0.12)
            checked += 1
        elif row["contender"] in ("AdamW fused", "published DeMo") and row["shapes"] == "1b":
            ns = H200.adamw_ns if row["contender"] == "AdamW fused" else H200.published_ns
            assert ns * row["num_parameters"] / 1e6 == pytest.approx(row["median_ms"], rel=0.02)
            checked += 1
    assert checked == 11
    found = [json.loads(line) for line in (ROOT / "results/rates/2026-11-15_h200/rows.jsonl").read_text().splitlines()]
    rates = {row["what"]: row["tflops"] for row in found}
    assert H200.bf16_flops / 1e12 == pytest.approx(rates["product of 8192 x 8192 matrices"], rel=0.01)
    reached = [tflops / 790 for what, tflops in rates.items() if what.startswith("training")]
    assert min(reached) < H200.utilisation < max(reached)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"island_size": 0}, "island_size must be an integer >= 1"),
        ({"values": "signs"}, "did you mean 'sign'"),
        ({"schedule": "rings"}, "did you mean 'ring'"),
        ({"straggler": 0.5}, "straggler must be"),
        ({"ddp_overlap": 2.0}, "ddp_overlap must be"),
    ],
)
def test_senseless_settings_are_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Setting(**changes)  # type: ignore[arg-type]


def test_the_rows_in_results_are_those_of_the_code() -> None:
    stored = [json.loads(line) for line in (RESULTS / "rows.jsonl").read_text().splitlines()]
    replicas = (8, 64)
    mine = [row.as_dict() for row in make_rows(Setting(), SIZES, replicas)]
    there = [row for row in stored if row["num_replicas"] in replicas]
    assert len(stored) == 320
    assert [row.keys() for row in there] == [row.keys() for row in mine]
    for row, other in zip(mine, there, strict=True):
        assert row == pytest.approx(other)


def test_the_tables_in_the_docs_are_those_of_the_code() -> None:
    document = (ROOT / "docs" / "scale.md").read_text()
    rows = make_rows(Setting(), SIZES, (8, 64, 256, 1024))
    for count in SIZES:
        assert steps_table(rows, count, "ring", (8, 64, 256, 1024)) in document
    assert steps_table(rows, 10**9, "doubling", (8, 64, 256, 1024)) in document
    assert bytes_table(rows, 10**9, (8, 64, 256, 1024), "link") in document
    assert bytes_table(rows, 7 * 10**9, (8, 64, 256, 1024), "held") in document
    assert crossings_table(Setting(), SIZES) in document
    assert crossings_table(Setting(), SIZES) in (RESULTS / "summary.md").read_text()


def test_the_command_writes_all_it_should(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "scale", "--parameters", "100M", "1B", "--replicas", "8", "12", "--rounds", "ring"]
    unequal = ["--slow", "1", "--straggler", "1.5"]
    assert run([*arguments, *unequal, "--out", str(tmp_path / "rows")]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "A model, not a measurement" in out
    assert "hierarchical" in out
    rows = [json.loads(line) for line in (tmp_path / "rows" / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 2 * (5 + 4)
    summary = (tmp_path / "rows" / "summary.md").read_text()
    assert f"`thinwire {' '.join(arguments + unequal)}`" in summary
    setting = replace(Setting(), num_slow=1, straggler=1.5)
    assert describe(setting) in summary
    assert "1 of the replicas or islands have 100 Mbit/s" in summary
    assert (tmp_path / "rows" / "ring.png").read_bytes().startswith(b"\x89PNG")
    assert "commit" in json.loads((tmp_path / "rows" / "environment.json").read_text())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--parameters", "many"], "--parameters='many' is not a number of parameters"),
        (["--link", "1gbit,loss=1%"], "--link='1gbit,loss=1%': the planner knows no jitter and no loss"),
        (["--replicas", "0"], "--replicas must be an integer >= 1, got 0"),
        (["--utilisation", "2"], "--utilisation must be"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "scale", *arguments]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
