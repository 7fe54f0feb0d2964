"""The files a run writes as it goes: a JSON line per event, TensorBoard, and Weights & Biases if asked for."""

import hashlib
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from thinwire.training.errors import TrainingError
from thinwire.training.history import History, Row

_log = logging.getLogger("thinwire")


def read_rows(path: Path) -> list[Row]:
    """All rows of a log; lines that were cut off are left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue  # cut off when the run was killed, or by a full disk
    return rows


def write_text(path: Path, text: str) -> None:
    """Write a file; an error names it, which a full disk's would not."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


class RunLog:
    """Where rows go. Every row has its step and a kind: ``step``, ``evaluation``, ``speed``, ``note`` or ``end``.
    ``history`` is what they come to, with those of before the run was resumed."""

    def __init__(self, folder: Path, first_step: int, tensorboard: bool, wandb: str, settings: dict[str, Any]) -> None:
        self.path = folder / "log.jsonl"
        self._has_failed = False
        self.history = History()
        with self._allowed_to_fail():
            self._keep_until(first_step)
        self._file = self.path.open("a", encoding="utf-8")
        self._board = _tensorboard(folder / "tensorboard", first_step) if tensorboard else None
        self._wandb = _wandb(wandb, folder, settings) if wandb else None

    def _keep_until(self, step: int) -> None:
        """A resumed run writes again what came after its checkpoint."""
        kept = [row for row in read_rows(self.path) if row["step"] <= step]
        for row in kept:
            self.history.add(row)
        aside = self.path.with_suffix(".new")
        aside.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        os.replace(aside, self.path)

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Add a row."""
        row = {"kind": kind, "step": step, **values}
        self.history.add(row)
        with self._allowed_to_fail():
            self._file.write(json.dumps(row) + "\n")
        numbers = {name: value for name, value in values.items() if isinstance(value, (int, float))}
        if self._board is not None:
            for name, value in numbers.items():
                self._board.add_scalar(f"{kind}/{name}", value, step)
        if self._wandb is not None and numbers:
            self._wandb.log({f"{kind}/{name}": value for name, value in numbers.items()}, step=step)

    def flush(self) -> None:
        """Make sure that what was written is in the file."""
        with self._allowed_to_fail():
            self._file.flush()

    @contextmanager
    def _allowed_to_fail(self) -> Iterator[None]:
        """A full disk costs rows of the log, not the run."""
        try:
            yield
        except OSError as error:
            if not self._has_failed:
                _log.warning("%s misses rows: %s", self.path, error.strerror)
            self._has_failed = True

    def close(self) -> None:
        """End all logs."""
        with self._allowed_to_fail():
            self._file.close()
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()


def _tensorboard(folder: Path, first_step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise TrainingError("TensorBoard files need the package tensorboard; install it or pass --no-tensorboard") from None
    return SummaryWriter(str(folder), purge_step=first_step + 1 if first_step else None)


def _wandb(project: str, folder: Path, settings: dict[str, Any]) -> Any:
    try:
        import wandb  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise TrainingError(f"wandb={project!r} needs the package wandb: pip install wandb") from None
    identity = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    return wandb.init(project=project, dir=str(folder), config=settings, name=folder.name, id=identity, resume="allow")
