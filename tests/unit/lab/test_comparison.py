"""What a comparison writes down, and what it makes of it; the measuring itself is tested in real namespaces."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from thinwire.lab import rows
from thinwire.lab.compare import Comparison
from thinwire.lab.losses import Curve, best_curves, read_curves, seconds_to
from thinwire.lab.methods import METHODS, choose
from thinwire.lab.predicted import error_table, predict_all, workload_of
from thinwire.lab.rows import Cell, summarise
from thinwire.lab.table import summary
from thinwire.lab.worker import read_interface
from thinwire.planner.cost import all_to_all, ring_all_gather
from thinwire.planner.link_spec import parse_link
from thinwire.training.config import check
from thinwire.training.config_file import as_toml


def step(seconds: float, speaks: bool = True, **changes: float) -> dict[str, float]:
    parts = {"data": 0.0, "forward": 0.3, "backward": 0.5, "encode": 0.05, "exposed": 0.1, "apply": 0.04, "other": 0.01}
    counts = {"meter_sent": 100, "meter_received": 300, "sent": 400, "sent_packets": 2, "received": 500}
    rest = {"received_packets": 3, "hidden": 0.2, "num_exchanges": int(speaks)}
    return {"seconds": seconds, **parts, **counts, **rest, **changes}


def cell(**changes: object) -> Cell:
    found = summarise([[step(1.0), step(1.2), step(5.0)], [step(1.0), step(1.0), step(5.0)]], 1)
    return replace(Cell(2, "10mbit", "demo", measured_bits=9.6e6, **found), **changes)  # type: ignore[arg-type]


def test_a_cell_has_the_median_step_and_mean_parts() -> None:
    found = cell()
    assert (found.num_steps, found.seconds, found.least_seconds, found.most_seconds) == (3, pytest.approx(1.1), 1.0, 5.0)
    assert found.not_compute == pytest.approx(0.2)
    assert found.received_payload == 500 - 3 * 66


def test_rare_exchanges_are_weighted_by_their_period() -> None:
    quiet = {"meter_received": 0.0}
    found = summarise([[step(1.0, False, **quiet), step(1.0, False, **quiet), step(9.0)]], 8)
    assert found["seconds"] == pytest.approx((9.0 + 7 * 1.0) / 8)
    assert found["meter_received"] == pytest.approx(300 / 8)


def test_rows_survive_an_interruption_and_the_last_of_a_kind_counts(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert rows.read(path) == []
    rows.append(path, cell(error="host 1 died"))
    rows.append(path, cell())
    rows.append(path, cell(link="100mbit"))
    with path.open("a") as file:
        file.write('{"num_hosts": 2, "lin')
    found = rows.read(path)
    assert [one.key for one in found] == [(2, "10mbit", "demo", 0), (2, "100mbit", "demo", 0)]
    assert found[0] == cell()


def test_a_slower_machine_is_told_from_a_slower_network() -> None:
    parts = {"data": 0.0, "forward": 1.0, "backward": 2.0, "encode": 0.5, "exposed": 4.0, "apply": 0.4, "other": 0.1}
    slow = cell(seconds=8.0, parts=parts)
    fast = cell(seconds=6.0, parts={**parts, "forward": 0.5, "backward": 1.0, "encode": 0.25, "apply": 0.2, "other": 0.05})
    assert slow.seconds_at(1.5) == pytest.approx(fast.seconds)
    assert slow.seconds_at(slow.compute) == slow.seconds
    waiting = cell(seconds=3.0, parts={**parts, "exposed": 3.5})
    assert waiting.seconds_at(1.0) == 3.0, "a median step may be shorter than the mean wait"


def test_rounds_are_merged_by_their_medians() -> None:
    rounds = [cell(round=place, seconds=seconds, hidden=seconds / 10) for place, seconds in enumerate([1.0, 9.0, 2.0])]
    failed = cell(round=3, error="host 1 died")
    other = cell(link="100mbit")
    one, alone, lost = rows.merge([*rounds, failed, other, replace(failed, link="1gbit")])
    assert (one.seconds, one.hidden, one.num_steps) == (2.0, 0.2, 9)
    assert (one.least_seconds, one.most_seconds) == (1.0, 5.0)
    assert one.parts == pytest.approx(cell().parts)
    assert alone == other
    assert lost.error


def test_a_round_measures_every_cell_once() -> None:
    links = (parse_link("10mbit"), parse_link("1gbit"))
    comparison = Comparison("gpt-10m", choose(["demo", "adamw"]), (2, 4), links, num_rounds=2)
    keys = comparison.keys()
    assert keys[:5] == [
        *((2, link, method, 0) for method in ("demo", "adamw") for link in ("10mbit", "1gbit")),
        (2, "10mbit", "demo", 1),
    ]
    assert len(set(keys)) == len(keys) == 16


def test_the_time_to_a_loss_is_steps_times_seconds(tmp_path: Path) -> None:
    curve = Curve("demo", 1e-3, ((0, 5.0), (10, 3.0), (20, 2.0)), (2.0,))
    assert curve.steps_to(2.5) == pytest.approx(15.0)
    assert curve.steps_to(5.5) == 0.0
    assert curve.steps_to(1.0) is None
    assert seconds_to(curve, cell(), 2.5) == pytest.approx(15 * cell().seconds)
    assert seconds_to(curve, cell(), 1.0) is None


def test_curves_are_means_over_seeds_at_the_best_rate(tmp_path: Path) -> None:
    path = tmp_path / "losses.jsonl"
    told = [("a", 1.0, 0, 10, 3.0), ("a", 1.0, 1, 10, 5.0), ("a", 2.0, 0, 10, 4.5), ("b", 1.0, 0, 10, 1.0)]
    names = ("method", "lr", "seed", "step", "loss")
    path.write_text("\n".join(json.dumps(dict(zip(names, row, strict=True))) for row in told))
    best = best_curves(read_curves(path))
    assert best["a"] == Curve("a", 1.0, ((10, 4.0),), (3.0, 5.0))
    assert best["b"].points == ((10, 1.0),)
    path.write_text('{"method": "a"}')
    with pytest.raises(ValueError, match="a row without lr"):
        read_curves(path)


def test_the_tables_name_every_method_link_and_failure() -> None:
    cells = [cell(), cell(link="unshaped", measured_bits=None), cell(method="adamw", error="host 1 died")]
    curves = {"demo": Curve("demo", 1e-3, ((0, 5.0), (10, 3.0)), (3.0,))}
    text = summary(cells, curves, 4.0)
    assert "| method | 10mbit | unshaped |" in text
    assert "| demo | 1.1 | 1.1 |" in text
    assert "- 2 hosts, 10mbit, adamw: host 1 died" in text
    assert "### Seconds to a validation loss of 4\n\nIn as many steps" in text
    assert "| method | 10mbit | unshaped |\n| --- | ---: | ---: |\n| demo | 6 | 6 |" in text
    assert "| demo | 100 B | 300 B | 500 B | 302 B | +0.67 % |" in text


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_a_run_that_the_trainer_accepts(name: str) -> None:
    method = METHODS[name]
    check(method.train_config("gpt-10m"), 2)
    config = method.lab_config("gpt-10m", 4, 1)
    check(config, 4)
    assert config.schedule.batch == 32
    assert method.measured_period <= 3
    if method.period > 1:
        assert config.optim.local_steps == method.measured_period * config.optim.fragments
    assert as_toml(config)


def test_an_unknown_method_is_refused_with_the_nearest() -> None:
    assert choose(["all"]) == METHODS
    with pytest.raises(ValueError, match=r"methods='powersdg' is unknown; .* did you mean 'powersgd'\?"):
        choose(["powersdg"])


def test_interface_counters_are_read(tmp_path: Path) -> None:
    table = tmp_path / "dev"
    table.write_text(
        "Inter-|\n face |bytes\n  lo: 1 2 0 0 0 0 0 0 3 4 0 0 0 0 0 0\n veth0:10 20 0 0 0 0 0 0 30 40 0 0 0 0 0 0\n"
    )
    assert read_interface("veth0", table) == (10, 20, 30, 40)
    assert read_interface("eth9", table) == (0, 0, 0, 0)


def test_the_planner_is_put_beside_every_shaped_cell() -> None:
    # 1.2 MB at 10 Mbit/s less headers take a second; a ring of two hosts has one round of a round trip. Before TCP fills the
    # link, 96 kB in 80 ms, windows of 10, 20 and 40 segments have been waited for, instead of being sent at its rate.
    start = 3 * 0.08 - 70 * 1448 / (10e6 / 8 * 1448 / 1514)
    facts = {
        "meter_received": 1.2e6 * 1448 / 1514,
        "num_exchanges": 1.0,
        "seconds": 2.0,
        "parts": dict.fromkeys(rows.PARTS, 0.0),
    }
    found = cell(link="10mbit,80ms", method="topk", **facts)
    (one,) = predict_all([found, cell(link="unshaped"), cell(error="host 1 died")])
    assert one.seconds == pytest.approx(2.0 + 0.96 + 0.08 + start)
    rare = predict_all([replace(found, period=4, meter_received=found.meter_received / 4, num_exchanges=0.25)])[0]
    assert rare.seconds == pytest.approx(2.0 + (0.96 + 0.08 + start) / 4)
    two, together = predict_all(
        [replace(found, method=name, num_exchanges=2.0) for name in ("onebit-adam", "published-code")]
    )
    assert two.seconds == pytest.approx(2.0 + 0.96 + 2 * 0.08 + start), "one after the other, half of the bytes each"
    assert together.seconds == pytest.approx(one.seconds), "both under way at once"
    assert "| topk | 1 | 60 % | +60 % | 2 hosts, 10mbit,80ms |" in error_table([one])


def test_an_owner_exchange_is_told_apart_into_slices_and_answers() -> None:
    # Four hosts: three slices of 1000 bytes each way, and an answer of 2000 bytes to all, from each.
    settings = {"exchange": "owner", "overlap": True, "topk": 32, "owner_topk": 64}
    facts = {"num_hosts": 4, "settings": settings, "meter_sent": 5000.0, "meter_received": 9000.0, "num_exchanges": 16.0}
    workload = workload_of(cell(link="10mbit,20ms", method="demo-owner", **facts))
    assert workload.exchange == all_to_all(1000, 4)
    assert workload.answers == ring_all_gather(2000, 4)
    assert workload.num_buckets == 8
    two = workload_of(cell(**{**facts, "num_hosts": 2, "meter_sent": 3000.0, "meter_received": 3000.0}))
    assert two.exchange == all_to_all(1000, 2)
    assert two.answers == ring_all_gather(2000, 2)


@pytest.mark.parametrize(("name", "with_owners"), [("demo", "demo-owner"), ("demo-after", "demo-owner-after")])
def test_demo_owner_is_demo_with_another_exchange(name: str, with_owners: str) -> None:
    plain, owner = (METHODS[each].lab_config("gpt-10m", 8, 1) for each in (name, with_owners))
    assert owner.optim.exchange == "owner"
    assert replace(owner, optim=replace(owner.optim, exchange="all_gather")) == plain
