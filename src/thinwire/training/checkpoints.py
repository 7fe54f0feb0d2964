"""Checkpoints of a run: written aside and renamed, so that one is there whole or not at all.

    checkpoints/step-000400/
        model/               config.json and model.safetensors, for transformers' from_pretrained
        replica-0/run.json   step, position in the data, losses
        replica-0/state/     optimizer, buffers and random state of one replica
        files-0.json         length and SHA-256 of every file that replica 0 wrote
    checkpoints/last, checkpoints/best    links to two of them

Every replica writes its own part, on its own disk if the machines share none. Of the replicas that see one disk the first is
its *keeper*: it alone renames, links and removes there.
"""

import json
import logging
import os
import secrets
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.core.errors import CheckpointError
from thinwire.exchange.transport import Transport, all_gather
from thinwire.parallel.listing import check_files, list_files, listed_files, numbers_of, reason, tell_problems, together
from thinwire.parallel.state_files import read_state, write_state
from thinwire.training.config import UNSHARED_OPTIMIZERS
from thinwire.training.wording import count

_log = logging.getLogger("thinwire")
_TOKEN_BYTES = 16
# How many of its newest checkpoints a replica tells the others; there are seldom more than three.
_TOLD_STEPS = 16
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
    data: str = ""
    """What it is trained on, see `job.describe`. Empty: not written down, in older checkpoints."""
    dense_bytes: float | None = None
    """What all-reduces of float32 gradients would have sent, with as many replicas as there were at each step. None: not
    counted, in older checkpoints."""


class Checkpoints:
    """The checkpoints of one run folder, as one replica sees them. Making one is collective."""

    def __init__(self, run_folder: Path, transport: Transport, slot: int | None = None) -> None:
        self._folder = run_folder / "checkpoints"
        self._transport, self._slot = transport, slot
        if slot is None:
            self.is_keeper = self._find_keeper() == transport.replica
        else:
            self._folder.mkdir(parents=True, exist_ok=True)
            self.is_keeper = slot == 0

    @property
    def number(self) -> int:
        """What this replica's part is called: by its slot, if replicas come and go."""
        return self._transport.replica if self._slot is None else self._slot

    def _find_keeper(self) -> int:
        """The first of the replicas that see this folder: each leaves a mark in it and looks for the others'."""
        token = torch.frombuffer(bytearray(secrets.token_bytes(_TOKEN_BYTES)), dtype=torch.uint8).clone()
        self._transport.broadcast_(token, "token of this run")
        prefix = f".replica-{token.numpy().tobytes().hex()}-"
        mark = self._folder / f"{prefix}{self._transport.replica}"
        problem = ""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            mark.touch()
        except OSError as error:
            problem = f"replica {self.number} could not write {self._folder}: {reason(error)}"
        problems = [told for told in tell_problems(self._transport, problem) if told]
        if problems:
            with suppress(OSError):  # where it could not be written, it can not be removed either
                mark.unlink()
            raise CheckpointError(problems[0])
        seen = [int(path.name.removeprefix(prefix)) for path in self._folder.glob(prefix + "*")]
        tell_problems(self._transport, "")
        mark.unlink(missing_ok=True)
        return min(seen, default=self._transport.replica)

    def clean(self) -> None:
        """Remove what a killed run left half-written. For the one run that may write here, before it saves; collective."""
        for left in (*self._folder.glob("*.partial"), *self._folder.glob("*.new")) if self.is_keeper else ():
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)
        tell_problems(self._transport, "")

    def save(
        self, run: RunState, state: Callable[[], dict[str, Any]], write_model: Callable[[Path], None], is_best: bool
    ) -> Path:
        """Write one, then let ``last``, and ``best`` if it is, point to it. All replicas raise if one could not write."""
        partial, final = self._folder / f"{checkpoint_name(run.step)}.partial", self._folder / checkpoint_name(run.step)
        if self._slot is not None:
            self.is_keeper = self._find_keeper() == self._transport.replica
            self.clean()
        with self._together(run.step, partial):
            self._write(partial, run, state, write_model)
        with self._together(run.step, partial):
            if self.is_keeper:
                shutil.rmtree(final, ignore_errors=True)
                os.replace(partial, final)
                for name in ("last", "best") if is_best else ("last",):
                    self._link(name, final.name)
        # Only now does everyone have the new one, so that the old ones can go.
        if self.is_keeper:
            self._prune()
        return final

    def _together(self, step: int, partial: Path) -> AbstractContextManager[None]:
        what = f"replica {self.number} could not write {partial.parent}"
        return together(self._transport, what, partial, f"no checkpoint at step {step}")

    def _write(
        self, partial: Path, run: RunState, state: Callable[[], dict[str, Any]], write_model: Callable[[Path], None]
    ) -> None:
        own = partial / f"replica-{self.number}"
        own.mkdir(parents=True)
        (own / "run.json").write_text(json.dumps(asdict(run), indent=1) + "\n")
        write_state(state(), own / "state")
        written = [own]
        if self._transport.replica == 0:
            write_model(partial / "model")
            written.append(partial / "model")
        list_files(partial, self.number, written)

    def _link(self, name: str, target: str) -> None:
        link = self._folder / f"{name}.new"
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        os.replace(link, self._folder / name)

    def _prune(self) -> None:
        kept = {os.readlink(self._folder / name) for name in ("last", "best") if (self._folder / name).is_symlink()}
        steps = available_steps(self._folder.parent)
        # The one before the last is there for when the last turns out to be damaged.
        for step in steps[2:]:
            if checkpoint_name(step) not in kept:
                shutil.rmtree(self._folder / checkpoint_name(step), ignore_errors=True)

    def load_run(self, reads_all: bool = False) -> tuple[Path, RunState]:
        """The newest checkpoint that every replica has and finds undamaged, and where the run was. ``reads_all``: each needs
        the states of all replicas, as far as they are here, and not its own alone.

        Replicas with disks of their own may have been killed when one had already given a new checkpoint its name.
        """
        told = torch.full((_TOLD_STEPS,), -1, dtype=torch.int64)
        mine = available_steps(self._folder.parent)[:_TOLD_STEPS]
        told[: len(mine)] = torch.tensor(mine, dtype=torch.int64)
        rows = all_gather(self._transport, told.view(torch.uint8), "steps of the checkpoints")
        everyone: list[Tensor] = list(rows.contiguous().view(torch.int64))
        common = set.intersection(*({step for step in row.tolist() if step >= 0} for row in everyone))
        if not common:
            lists = ", ".join(f"replica {number}: {sorted(set(row.tolist()) - {-1})}" for number, row in enumerate(everyone))
            raise CheckpointError(f"--resume {self._folder.parent}: no checkpoint is there for all replicas ({lists})")
        problems: list[str] = []
        for step in sorted(common, reverse=True):
            checkpoint = self._folder / checkpoint_name(step)
            problems = [told for told in tell_problems(self._transport, self._damage_to(checkpoint, reads_all)) if told]
            if not problems:
                return checkpoint, self._checked(read_run(checkpoint, self._transport.replica))
            if self._transport.replica == 0 and step != min(common):
                _log.warning("%s; the checkpoint before it is tried", problems[0])
        raise CheckpointError(problems[0])

    def _checked(self, run: RunState) -> RunState:
        saved, now = run.num_replicas, self._transport.num_replicas
        if run.optimizer in UNSHARED_OPTIMIZERS and saved != now:
            raise CheckpointError(
                f"the checkpoint is of {count(saved, 'replica')}, this run has {now}: with optimizer={run.optimizer} each "
                f"replica has a state of its own, so start {saved}"
            )
        return run

    def newest_here(self) -> tuple[Path, RunState] | None:
        """The newest undamaged checkpoint that this replica sees, without asking the others."""
        for step in available_steps(self._folder.parent):
            checkpoint = self._folder / checkpoint_name(step)
            damage = self._damage_to(checkpoint)
            if not damage:
                with suppress(OSError, CheckpointError):  # the others may be about to remove it
                    return checkpoint, read_run(checkpoint, self.number)
            _log.warning("%s; the checkpoint before it is tried", damage)
        return None

    def _damage_to(self, checkpoint: Path, reads_all: bool = False) -> str:
        """What is wrong with the files that this replica reads: its own, or all where it has none or needs all; empty if
        nothing is."""
        here = {*self.replicas_here(checkpoint), *_writers(checkpoint)}
        try:
            read_run(checkpoint, self.number)
            for number in sorted(here) if reads_all or self.number not in here else (self.number,):
                check_files(checkpoint, number, f"replica-{number}")
            if self._transport.replica == 0:
                check_model(checkpoint)
        except (CheckpointError, OSError) as error:
            return str(error)
        return ""

    def load_state(self, checkpoint: Path, replica: int) -> dict[str, Any]:
        """The state of one replica."""
        name = f"replica-{replica}"
        if not (checkpoint / name / "state").is_dir():
            raise CheckpointError(
                f"{checkpoint} has no state of {name}: it was written by fewer replicas, or on another machine; copy that "
                "folder and its files list here, or pass --residual zero to start with empty momenta"
            )
        check_files(checkpoint, replica, name)
        try:
            return read_state(checkpoint / name / "state")
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise CheckpointError(f"{checkpoint / name} is damaged: {reason(error)}") from error

    def replicas_here(self, checkpoint: Path) -> list[int]:
        """Whose states this disk has."""
        return numbers_of((path.parent.name for path in checkpoint.glob("replica-*/state")), "replica-")


def check_model(checkpoint: Path) -> None:
    """Refuse a checkpoint whose model is damaged; whoever was the first replica wrote it."""
    writer = next((one for one in _writers(checkpoint) if listed_files(checkpoint, one, "model")), 0)
    check_files(checkpoint, writer, "model")


def _writers(checkpoint: Path) -> list[int]:
    """Who has listed files here."""
    return numbers_of((path.stem for path in checkpoint.glob("files-*.json")), "files-")


def checkpoint_name(step: int) -> str:
    """The folder of a step."""
    return f"step-{step:06d}"


def available_steps(run_folder: Path) -> list[int]:
    """Steps of the whole checkpoints in a run folder, the newest first."""
    names = [path.name for path in (run_folder / "checkpoints").glob("step-*") if path.suffix != ".partial"]
    return sorted((int(name.removeprefix("step-")) for name in names if name[5:].isdecimal()), reverse=True)


def read_run(checkpoint: Path, replica: int) -> RunState:
    """Where the run was, from this replica's own part or any other that is here."""
    parts = numbers_of((path.parent.name for path in checkpoint.glob("replica-*/run.json")), "replica-")
    if not parts:
        raise CheckpointError(f"{checkpoint} holds no replica's run.json, so this is no whole checkpoint of thinwire")
    found = replica if replica in parts else parts[0]
    name = f"replica-{found}/run.json"
    check_files(checkpoint, found, name)
    facts = json.loads((checkpoint / name).read_text())
    if facts.get("format") != _FORMAT:
        raise CheckpointError(f"{checkpoint} has format {facts.get('format')!r}, this version reads {_FORMAT}")
    unknown = facts.keys() - {fact.name for fact in fields(RunState)}
    if unknown:
        raise CheckpointError(
            f"{checkpoint / name} has {min(unknown)!r}, of which this version knows nothing: use the one that wrote it"
        )
    return RunState(**facts)
