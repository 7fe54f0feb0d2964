"""Checkpoints of a run: written aside and renamed, so that one is there whole or not at all.

    checkpoints/step-000400/
        model/               config.json and model.safetensors, for transformers' from_pretrained
        replica-0/run.json   step, position in the data, losses
        replica-0/state/     optimizer, buffers and random state of one replica
        files-0.json         length and SHA-256 of every file that replica 0 wrote
    checkpoints/last, checkpoints/best    links to two of them

Every replica writes its own part, on its own disk if the machines share none.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from thinwire.core.errors import CheckpointError
from thinwire.exchange.transport import Transport
from thinwire.parallel.state_files import read_state, write_state

_REPORT_BYTES = 512
_FORMAT = 1


@dataclass(frozen=True)
class RunState:
    """Where a run is, as far as all replicas agree on it."""

    step: int
    position: int
    num_replicas: int
    optimizer: str
    loss: float | None
    best_loss: float | None
    elapsed_seconds: float
    sent_bytes: int
    received_bytes: int
    format: int = _FORMAT


class Checkpoints:
    """The checkpoints of one run folder, as one replica sees them."""

    def __init__(self, run_folder: Path, transport: Transport, local_replica: int) -> None:
        self._folder = run_folder / "checkpoints"
        self._transport = transport
        self._is_first_here = local_replica == 0

    def save(
        self, run: RunState, state: Callable[[], dict[str, Any]], write_model: Callable[[Path], None], is_best: bool
    ) -> Path:
        """Write one, then let ``last``, and ``best`` if it is, point to it. All replicas raise if one could not write."""
        partial, final = self._folder / f"step-{run.step:06d}.partial", self._folder / f"step-{run.step:06d}"
        problem = ""
        try:
            self._write(partial, run, state, write_model)
        except Exception as error:  # whatever it is, the others must hear of it
            problem = f"replica {self._transport.replica} could not write {partial.parent}: {_reason(error)}"
        problems = [report for report in self._reports(problem) if report]
        if problems:
            shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(f"no checkpoint at step {run.step}: {problems[0]}")
        if self._is_first_here:
            self._publish(partial, final, is_best)
        # Nobody goes on, or ends, before the checkpoint has its name.
        self._reports("")
        return final

    def _write(
        self, partial: Path, run: RunState, state: Callable[[], dict[str, Any]], write_model: Callable[[Path], None]
    ) -> None:
        replica = self._transport.replica
        own = partial / f"replica-{replica}"
        folders = (own, partial / "model") if replica == 0 else (own,)
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)  # left by a process that was killed here
        own.mkdir(parents=True)
        (own / "run.json").write_text(json.dumps(asdict(run), indent=1) + "\n")
        write_state(state(), own / "state")
        if replica == 0:
            write_model(partial / "model")
        written = [path for folder in folders for path in sorted(folder.rglob("*")) if path.is_file()]
        facts = {path.relative_to(partial).as_posix(): _fingerprint(path) for path in written}
        (partial / f"files-{replica}.json").write_text(json.dumps(facts, indent=1) + "\n")

    def _reports(self, mine: str) -> list[str]:
        """Everyone's problems, empty where there is none."""
        padded = torch.zeros(_REPORT_BYTES, dtype=torch.uint8)
        text = mine.encode()[:_REPORT_BYTES]
        padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else padded[:0]
        rows = self._transport.start_all_gather(padded, "end of a checkpoint").wait()
        return [row.cpu().numpy().tobytes().rstrip(b"\0").decode(errors="replace") for row in rows]

    def _publish(self, partial: Path, final: Path, is_best: bool) -> None:
        try:
            shutil.rmtree(final, ignore_errors=True)
            os.replace(partial, final)
        except FileNotFoundError:
            # Machines that share a disk: another one was faster.
            if not final.exists():
                raise
        for name in ("last", "best") if is_best else ("last",):
            link = self._folder / f"{name}.new-{os.getpid()}"
            link.symlink_to(final.name)
            os.replace(link, self._folder / name)
        kept = {os.readlink(self._folder / name) for name in ("last", "best") if (self._folder / name).is_symlink()}
        for old in self._folder.glob("step-*"):
            if old.name not in kept:
                shutil.rmtree(old, ignore_errors=True)

    def clean(self) -> None:
        """Remove what a killed run left half-written; before any replica saves."""
        if self._is_first_here:
            for left in (*self._folder.glob("*.partial"), *self._folder.glob("*.new-*")):
                shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()

    def load_run(self) -> tuple[Path, RunState]:
        """The last checkpoint, and where the run was."""
        return find_last(self._folder.parent, self._transport.replica)

    def load_state(self, checkpoint: Path, replica: int) -> dict[str, Any]:
        """The state of one replica."""
        name = f"replica-{replica}"
        if not (checkpoint / name / "state").is_dir():
            raise CheckpointError(
                f"{checkpoint} has no state of {name}: it was written by fewer replicas, or on another machine; copy that "
                "folder here, or pass --residual zero to start with empty momenta"
            )
        check_files(checkpoint, name, name)
        try:
            return read_state(checkpoint / name / "state")
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise CheckpointError(f"{checkpoint / name} is damaged: {_reason(error)}") from error


def find_last(run_folder: Path, replica: int = 0) -> tuple[Path, RunState]:
    """The last checkpoint of a run folder, as this replica has it."""
    link = run_folder / "checkpoints" / "last"
    if not link.exists():
        raise CheckpointError(f"--resume {run_folder}: there is no checkpoint in this folder (checkpoints/last is missing)")
    checkpoint = link.resolve()
    parts = sorted(checkpoint.glob("replica-*/run.json"))
    own = checkpoint / f"replica-{replica}" / "run.json"
    if not parts:
        raise CheckpointError(f"{checkpoint} holds no replica's run.json, so this is no whole checkpoint of thinwire")
    found = own if own in parts else parts[0]
    check_files(checkpoint, found.parent.name, found.parent.name + "/run.json")
    facts = json.loads(found.read_text())
    if facts.get("format") != _FORMAT:
        raise CheckpointError(f"{checkpoint} has format {facts.get('format')!r}, this version reads {_FORMAT}")
    return checkpoint, RunState(**facts)


def check_files(checkpoint: Path, writer: str, prefix: str) -> None:
    """Refuse a checkpoint in which a file or folder of ``writer`` (``replica-3``) is not what was written."""
    listing = checkpoint / f"files-{writer.removeprefix('replica-')}.json"
    try:
        facts = json.loads(listing.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{listing} cannot be read, so this is no checkpoint of thinwire: {_reason(error)}") from error
    for name, wanted in facts.items():
        if name != prefix and not name.startswith(prefix + "/"):
            continue
        path = checkpoint / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing: the checkpoint is not whole")
        if _fingerprint(path) != wanted:
            raise CheckpointError(f"{path} is damaged: its length or SHA-256 is not what was written")


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": digest}


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
