"""All-gather beside owners as the lab measured them: what is a pair, and what the planner would have chosen."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from thinwire.lab.exchanges import PAIRS, Pair, exchange_table, pair_up
from thinwire.lab.methods import METHODS
from thinwire.lab.rows import PARTS, Cell, merge, read

ROOT = Path(__file__).parents[3]


def cell(link: str, method: str, seconds: float, **changes: object) -> Cell:
    settings = asdict(METHODS[method].lab_config("gpt-10m", 8, 1).optim)
    parts = {**dict.fromkeys(PARTS, 0.0), "forward": 0.5, "backward": 1.0, "exposed": seconds - 1.5}
    extremes = {"least_seconds": seconds - 0.1, "most_seconds": seconds + 0.1}
    found = Cell(8, link, method, settings=settings, num_parameters=4096 * 2560, seconds=seconds, parts=parts, **extremes)
    return replace(found, **changes)  # type: ignore[arg-type]


def pairs(plain: str = "demo", link: str = "1mbit") -> list[Pair]:
    num_buckets = 8 if plain == "demo" else 1
    payload = {"meter_sent": 102_400.0, "meter_received": 7 * 102_400.0, "num_exchanges": num_buckets}
    # Slices and answers: an eighth of a payload, and of nearly two.
    owned = {"meter_sent": 7 * 12_800.0 + 23_000, "meter_received": 7 * 35_800.0, "num_exchanges": 2 * num_buckets}
    both = [(plain, 6.0, {"received": 1e6, **payload}), (PAIRS[plain], 3.0, {"received": 4e5, **owned})]
    shaped = [cell(link, method, seconds, **changes) for method, seconds, changes in both]
    return pair_up([*shaped, cell("100mbit", plain, 2.0, error="host 1 died")])


def test_pairs_differ_in_the_exchange_alone() -> None:
    (pair,) = pairs()
    assert (pair.gather.method, pair.owner.method) == ("demo", "demo-owner")
    assert (pair.measured_gain, pair.choice) == (pytest.approx(3.0), "owner")
    assert pair.predicted_gain == pair.gather_predicted.step_seconds - pair.owner_predicted.step_seconds > 0
    # 7 payloads of 2,560 chunks, 40 bytes each, at 1 Mbit/s, less what hides: all of backward, two thirds of the 1.5 s.
    assert pair.gather_predicted.exposed_seconds == pytest.approx(7 * 0.1024 * 8 / 0.956 - 7 / 8, rel=0.01)


def test_the_choice_follows_the_link_and_the_overlap() -> None:
    assert pairs(link="100mbit,80ms")[0].choice == "all_gather"
    assert pairs("demo-after", "10mbit,20ms")[0].choice == "owner"
    assert pairs("demo", "10mbit,20ms")[0].choice == "all_gather"


def test_the_table_has_both_sides() -> None:
    head, rule, line = exchange_table(pairs()).splitlines()
    assert head.count("|") == rule.count("|") == line.count("|")
    assert line.startswith(
        "| yes | 8 | 1mbit | 6.00 (5.90 to 6.10); 3.00 (2.90 to 3.10) | 6.00; 3.00 | 4.50; 1.50 | +3.00 | +"
    )
    assert line.endswith("| owner | 1 MB; 400 kB |")


def test_cells_without_a_counterpart_are_left_out() -> None:
    assert pair_up([cell("1mbit", "demo", 1.0), cell("unshaped", "demo-owner", 1.0)]) == []


def test_the_docs_table_is_that_of_the_stored_rows() -> None:
    document = (ROOT / "docs" / "planner.md").read_text()
    table = exchange_table(pair_up(merge(read(ROOT / "results/lab_owner/2026-11-16_cpu/rows.jsonl"))))
    for line in table.splitlines():
        assert line in document


def test_where_the_planner_takes_owners_a_step_is_shorter() -> None:
    stored = pair_up(merge(read(ROOT / "results/lab_owner/2026-11-16_cpu/rows.jsonl")))
    taken = [pair for pair in stored if pair.choice == "owner"]
    assert len(stored) == 16
    assert len(taken) == 4
    assert all(pair.measured_gain > 0 and pair.gather.seconds > pair.owner.seconds for pair in taken)
