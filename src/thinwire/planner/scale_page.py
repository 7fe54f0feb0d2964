"""Rows of `scale` as tables in Markdown, for the summary beside them and for the docs."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from thinwire.planner.links import Link, format_bandwidth, format_bytes, format_seconds
from thinwire.planner.rounds import SCHEDULES, Schedule
from thinwire.planner.scale import ScaleRow, crossing_in_bytes, crossing_in_time
from thinwire.planner.scale_methods import Case, Setting

CROSSINGS = "From how many replicas on DDP in bf16 is as fast as an all-gather of payloads"
ROUNDS = {"ring": "rings: R - 1 rounds", "doubling": "doubling: log2 R rounds"}


def format_count(number: int) -> str:
    """``100 M``, ``7 B``."""
    return f"{number / 1e9:g} B" if number >= 1e9 else f"{number / 1e6:g} M"


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    cells = [head, ["---", *["---:"] * (len(head) - 1)], *lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in cells)


def _grid(rows: Sequence[ScaleRow], replicas: Sequence[int], first: str, cell: str) -> str:
    """A line per method, a column per number of replicas."""
    lines = []
    for method in dict.fromkeys(row.method for row in rows):
        mine = {row.num_replicas: row for row in rows if row.method == method}
        lines.append([method, *(_cell(mine[count], cell) if count in mine else "" for count in replicas)])
    return _table([first, *(f"R = {count:,}" for count in replicas)], lines)


def _cell(row: ScaleRow, cell: str) -> str:
    if cell == "step":
        return f"{format_seconds(row.step_seconds)}, {100 * row.efficiency:.2g} %"
    return format_bytes(getattr(row, f"{cell}_bytes"))


def steps_table(rows: Sequence[ScaleRow], num_parameters: int, schedule: Schedule, replicas: Sequence[int]) -> str:
    """Seconds and efficiency of a step."""
    mine = [row for row in rows if (row.num_parameters, row.schedule) == (num_parameters, schedule)]
    first = f"{format_count(num_parameters)} parameters, {format_seconds(mine[0].compute_seconds)} of compute"
    return _grid(mine, replicas, first, "step")


def bytes_table(rows: Sequence[ScaleRow], num_parameters: int, replicas: Sequence[int], kind: str) -> str:
    """``link``: what one thin link carries each way in a step; ``held``: what a replica holds of others' messages."""
    mine = [row for row in rows if (row.num_parameters, row.schedule) == (num_parameters, rows[0].schedule)]
    return _grid(mine, replicas, f"{format_count(num_parameters)} parameters", kind)


def crossings_table(setting: Setting, parameters: Sequence[int]) -> str:
    """From how many replicas on a step takes as long, or a link carries as much, as with DDP."""
    head = ["parameters", "as many bytes", *(f"as long, {ROUNDS[schedule]}" for schedule in SCHEDULES)]
    head += ["hierarchical, as many bytes", "hierarchical, as long, doubling"]
    lines = []
    for count in parameters:
        times = [crossing_in_time(replace(setting, schedule=schedule), count) for schedule in SCHEDULES]
        far = crossing_in_time(replace(setting, schedule="doubling"), count, Case.hierarchical)
        found = [crossing_in_bytes(setting, count), *times, crossing_in_bytes(setting, count, Case.hierarchical), far]
        lines.append([format_count(count), *("never" if number is None else f"{number:,}" for number in found)])
    return _table(head, lines)


def describe(setting: Setting) -> str:
    """What was assumed, in a paragraph."""
    device = setting.device
    words = (
        f"Each replica, or island of {setting.island_size}, has a link of {_words(setting.link)}; inside an island "
        f"{_words(setting.island_link)}. {setting.tokens:,} tokens per replica and step on {device.name}s that compute at "
        f"{device.utilisation:.0%} of {device.bf16_flops / 1e12:.0f} TFLOP/s; a replica is spread over as many as hold "
        f"{setting.bytes_per_parameter:g} bytes per parameter. k = {setting.topk} of 64 x 64, {setting.values} values."
    )
    if setting.num_slow:
        words += f" {setting.num_slow} of the replicas or islands have {_words(setting.slow_link)} instead."
    if setting.straggler > 1:
        words += f" One replica computes {setting.straggler:g} times as long as the others."
    if setting.num_slow or setting.straggler > 1:
        words += " (From how many replicas on DDP is as fast is said for equal ones.)"
    return words


def _words(link: Link) -> str:
    return f"{format_bandwidth(link.bits_per_second)}, {format_seconds(link.round_trip_seconds)} there and back"


def summary(rows: Sequence[ScaleRow], setting: Setting, command: str) -> str:
    """The page beside the rows."""
    parameters = list(dict.fromkeys(row.num_parameters for row in rows))
    replicas = list(dict.fromkeys(row.num_replicas for row in rows))
    parts = [
        "# Many replicas, on paper",
        f"`{command}`",
        f"A model, not a measurement: docs/scale.md says how it is made. {describe(setting)}",
        f"## {CROSSINGS}",
        crossings_table(setting, parameters),
    ]
    for schedule in dict.fromkeys(row.schedule for row in rows):
        parts.append(f"## Seconds per step and efficiency, {ROUNDS[schedule]}")
        parts += [steps_table(rows, count, schedule, replicas) for count in parameters]  # type: ignore[arg-type]
    parts.append("## Bytes that one thin link carries each way")
    parts += [bytes_table(rows, count, replicas, "link") for count in parameters]
    parts.append("## Bytes of others' messages that a replica holds")
    parts += [bytes_table(rows, count, replicas, "held") for count in parameters]
    return "\n\n".join(parts) + "\n"


def write(rows: Sequence[ScaleRow], setting: Setting, folder: Path, command: str, environment: dict[str, object]) -> None:
    """rows.jsonl, environment.json and summary.md; the figures are drawn elsewhere."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row.as_dict()) + "\n" for row in rows))
    (folder / "environment.json").write_text(json.dumps(environment, indent=2) + "\n")
    (folder / "summary.md").write_text(summary(rows, setting, command))
