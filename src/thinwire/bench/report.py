"""Rows of ``thinwire bench step`` as a table, a page and a figure."""

import json
from collections.abc import Sequence
from pathlib import Path

from thinwire.bench.environment import environment
from thinwire.bench.step import StepRow

HEADINGS = ("step", "k", "R", "ms", "spread", "encode", "decode", "x floor", "x AdamW", "memory")


def cells(row: StepRow) -> tuple[str, ...]:
    """A row in words."""
    part = {name: f"{ms:.2f}" for name, ms in row.parts_ms.items()}
    return (
        row.contender,
        "" if row.topk is None else str(row.topk),
        "" if row.replicas is None else str(row.replicas),
        f"{row.median_ms:.2f}",
        f"{row.low_ms:.2f}-{row.high_ms:.2f}",
        part.get("encode", ""),
        part.get("decode", ""),
        f"{row.ratio_to_floor:.2f}",
        "" if row.ratio_to_adamw is None else f"{row.ratio_to_adamw:.2f}",
        "" if row.peak_extra_percent is None else f"{row.peak_extra_percent:.2f} %",
    )


def markdown(rows: Sequence[StepRow]) -> str:
    """A table per set of shapes."""
    pages = []
    for shapes in dict.fromkeys(row.shapes for row in rows):
        mine = [row for row in rows if row.shapes == shapes]
        lines = [f"### {shapes}: {mine[0].num_parameters / 1e6:.1f} M parameters", ""]
        lines += ["| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
        lines += ["| " + " | ".join(cells(row)) + " |" for row in mine]
        pages.append("\n".join(lines))
    return "\n\n".join(pages) + "\n"


def write(rows: Sequence[StepRow], folder: Path, command: str) -> None:
    """rows.jsonl, environment.json, summary.md and step.png."""
    from thinwire.bench.figure import draw

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row.as_dict()) + "\n" for row in rows))
    (folder / "environment.json").write_text(json.dumps(environment(), indent=2) + "\n")
    text = (
        "# One optimizer step\n\n"
        f"`{command}`\n\n"
        "Median milliseconds of steps taken in turns with fused AdamW, so ratios are of one run; the floor is the bytes a\n"
        "step must move over the bandwidth of a large copy. A Thinwire step is the local one: encode, and decode with the\n"
        "update, of R payloads; a row called `step()` is all of the optimizer's step but the wire. Memory is what is held\n"
        "besides parameters, gradients and state, in percent of the parameters' bytes, the R payloads included.\n\n"
    )
    (folder / "summary.md").write_text(text + markdown(rows))
    draw(rows, folder / "step.png")
