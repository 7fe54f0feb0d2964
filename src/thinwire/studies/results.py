"""Where the rows of studies lie, and what is written beside them: results/STUDY/DATE_HARDWARE, with the
size after it unless it is small on a CPU or full on a GPU, so that rows of two sizes are never mixed."""

import re
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from thinwire.studies.study import FULL, SIZES, SMALL, Finding, Study
from thinwire.studies.trials import Book, Row, Rows

if TYPE_CHECKING:
    from thinwire.studies.figure import Drawing

SUMMARY = "summary.md"


def hardware_of(device: torch.device) -> str:
    """cpu, or the GPU's name as a part of a folder's."""
    if device.type != "cuda":
        return device.type
    return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(device).lower().removeprefix("nvidia ")).strip("-")


def folder_for(root: Path, study: str, device: torch.device, size: str = SMALL, anew: bool = False) -> Path:
    """The newest folder of a study on this hardware and of this size, to go on in, or one of today's date."""
    hardware = hardware_of(device)
    kind = hardware if size == _usual_size(hardware) else f"{hardware}_{size}"
    known = [] if anew else sorted((root / study).glob(f"*_{kind}"))
    return known[-1] if known else root / study / f"{datetime.now(UTC):%Y-%m-%d}_{kind}"


def _usual_size(hardware: str) -> str:
    """That which folders are not named after."""
    return SMALL if hardware == "cpu" else FULL


def size_in(folder: Path) -> str:
    """Of the rows of a study in a folder."""
    last = folder.name.rsplit("_", 1)[-1]
    return last if last in SIZES else _usual_size(last)


def rank(folder: Path) -> tuple[int, bool, str]:
    """Higher for what a report would rather read: a larger size, rows of a GPU, newer ones."""
    return SIZES.index(size_in(folder)), "_cpu" not in folder.name, folder.name


def best_folder(root: Path, study: str, size: str | None = None) -> Path | None:
    """What a report reads, of one size or of any."""
    known = [path for path in (root / study).glob("*_*") if (path / "rows.jsonl").exists()]
    known = [path for path in known if size in (None, size_in(path))]
    return max(known, key=rank, default=None)


def stored(results: Path, name: str) -> list[Row]:
    """The rows that a report reads of something that was measured; none if nothing was."""
    folder = best_folder(results, name)
    return [] if folder is None else Rows(folder).rows


def book_of(study: Study, size: str, folder: Path) -> Book:
    """What is there of a study in a folder, and what is due."""
    assert size in study.sizes
    return Book(study.name, Rows(folder), partial(study.plan, size))


def folders_of(results: Path, study: Study) -> list[Path]:
    """Those that have something to say: all with rows, or the study's own where it has no trials."""
    own = results / study.name
    return [path for path in sorted(own.glob("*_*")) if (path / "rows.jsonl").exists()] if study.has_trials else [own]


def write_summary(study: Study, folder: Path, results: Path) -> "tuple[Finding, dict[str, Drawing]]":
    """Write summary.md and the figures of a folder; returns what they are made of."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = Rows(folder).rows
    finding, drawings = study.find(rows, results), study.draw(rows, results)
    parts = [f"# {study.title}", study.question, *([finding.answer] if finding.answer else []), finding.text]
    if finding.claims:
        parts.append("\n".join(claim.line for claim in finding.claims))
    for name, (page, caption) in drawings.items():
        page.save(folder / name)
        parts.append(f"![{caption}]({name})\n\n{caption}")
    failed = [row for row in rows if row["loss"] is None]
    if failed:
        parts.append(
            f"{len(failed)} of {len(rows)} trainings ended in a loss that is not a number; they count as the worst."
        )
    (folder / SUMMARY).write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return finding, drawings
