"""The planner beside the lab's cells of two hosts: its errors as docs/planner.md has them, and what the slow start gains."""

from dataclasses import replace
from pathlib import Path
from statistics import median

from thinwire.lab.predicted import Predicted, error_table, predict_all, workload_of
from thinwire.lab.rows import merge, read
from thinwire.planner.cost import predict
from thinwire.planner.link_spec import parse_link

ROOT = Path(__file__).parents[3]
CELLS = [cell for cell in merge(read(ROOT / "results/lab/2026-11-15_cpu/rows.jsonl")) if cell.num_hosts == 2]
FOUND = predict_all(CELLS)


def at_once(one: Predicted) -> Predicted:
    """The same cell on a link that takes messages at its full rate at once."""
    link = replace(parse_link(one.cell.link).link, window_bytes=None)
    row = predict(workload_of(one.cell), link)
    return Predicted(one.cell, row.local_seconds + row.exposed_seconds / one.cell.period)


def middle(found: list[Predicted]) -> str:
    return f"{100 * median(abs(one.error) for one in found):.1f} %"


def line(name: str, found: list[Predicted]) -> str:
    before = [at_once(one) for one in found]
    worst, still = (max(some, key=lambda one: abs(one.error)) for some in (before, found))
    where = still.cell.method if name != "all" else f"{still.cell.method}, {still.cell.link}"
    cells = [
        name,
        str(len(found)),
        middle(before),
        f"{100 * worst.error:+.0f} %",
        middle(found),
        f"{100 * still.error:+.0f} %",
    ]
    return "| " + " | ".join([*cells, where]) + " |"


def test_the_errors_in_the_docs_are_those_of_the_code() -> None:
    document = (ROOT / "docs" / "planner.md").read_text()
    assert len(FOUND) == 180
    for link in dict.fromkeys(one.cell.link for one in FOUND):
        assert line(link, [one for one in FOUND if one.cell.link == link]) in document
    assert line("all", FOUND) in document


def test_the_slow_start_brings_the_planner_nearer_and_leaves_links_without_delay_alone() -> None:
    far = [one for one in FOUND if "80ms" in one.cell.link and "10mbit" not in one.cell.link]
    assert median(abs(one.error) for one in far) < 0.5 * median(abs(at_once(one).error) for one in far)
    near = [one for one in FOUND if "ms" not in one.cell.link]
    assert [one.seconds for one in near] == [at_once(one).seconds for one in near]
    assert len(near) == 60


def test_errors_by_link() -> None:
    table = error_table(FOUND, by="link")
    assert table.startswith("| link | cells | median error | worst | where |\n")
    assert "| 1gbit,80ms | 20 | 5 % | -27 % | 2 hosts, local-sgd |" in table
