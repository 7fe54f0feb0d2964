"""Files that several ranks write into one checkpoint: what each wrote is listed, so that damage is noticed.

What goes wrong on one rank is told to all.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from thinwire.core.errors import CheckpointError, first_line
from thinwire.exchange.transport import Transport, all_gather

_REPORT_BYTES = 512


def tell_problems(transport: Transport, mine: str) -> list[str]:
    """Everyone's problems, empty where there is none. Nobody passes before all have come here."""
    padded = torch.zeros(_REPORT_BYTES, dtype=torch.uint8, device="cpu")
    text = mine.encode()[:_REPORT_BYTES]
    if text:
        padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    rows = all_gather(transport, padded, "checkpoint")
    return [row.cpu().numpy().tobytes().rstrip(b"\0").decode(errors="replace") for row in rows]


@contextmanager
def together(transport: Transport, what: str, partial: Path, outcome: str) -> Iterator[None]:
    """A part of the work that all ranks finish, or none: whatever goes wrong on one is told to all, which then remove what
    is there ``partial``ly and raise, with ``what`` this rank was at and the ``outcome`` in the words."""
    problem = ""
    try:
        yield
    except Exception as error:  # whatever it is, the others must hear of it
        problem = f"{what}: {reason(error)}"
    problems = [told for told in tell_problems(transport, problem) if told]
    if problems:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"{outcome}: {problems[0]}")


def list_files(checkpoint: Path, writer: int, paths: Iterable[Path]) -> None:
    """Write length and SHA-256 of these files, and of every file in these folders, to ``files-<writer>.json``."""
    written = [file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("*"))) if file.is_file()]
    facts = {path.relative_to(checkpoint).as_posix(): _fingerprint(path) for path in written}
    (checkpoint / f"files-{writer}.json").write_text(json.dumps(facts, indent=1) + "\n")


def listed_files(checkpoint: Path, writer: int, prefix: str) -> dict[str, Any]:
    """What rank ``writer`` wrote, of a file or folder."""
    listing = checkpoint / f"files-{writer}.json"
    try:
        return {name: wanted for name, wanted in json.loads(listing.read_text()).items() if _is_below(name, prefix)}
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{listing} cannot be read, so this is no checkpoint of thinwire: {reason(error)}") from error


def check_files(checkpoint: Path, writer: int, prefix: str) -> None:
    """Refuse a checkpoint in which a file or folder that rank ``writer`` wrote is not what it was."""
    facts = listed_files(checkpoint, writer, prefix)
    if not facts:
        raise CheckpointError(f"{checkpoint / f'files-{writer}.json'} does not list {prefix}: the checkpoint is not whole")
    check_all_listed(checkpoint, prefix, facts)
    for name, wanted in facts.items():
        path = checkpoint / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing: the checkpoint is not whole")
        if _fingerprint(path) != wanted:
            raise CheckpointError(f"{path} is damaged: its length or SHA-256 is not what was written")


def check_all_listed(checkpoint: Path, folder: str, listed: Collection[str]) -> None:
    """Refuse tensors that were not written with the checkpoint: readers take every safetensors file in a folder."""
    for path in sorted((checkpoint / folder).rglob("*.safetensors")):
        if path.relative_to(checkpoint).as_posix() not in listed:
            raise CheckpointError(f"{path} was not written with this checkpoint; move it elsewhere")


def numbers_of(names: Iterable[str], prefix: str) -> list[int]:
    """The numbers that follow the prefix, in order; names with anything else there, such as copies, are nobody's."""
    ends = [name.removeprefix(prefix) for name in names]
    return sorted(int(end) for end in ends if end.isdecimal())


def _is_below(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + "/")


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": digest}


def reason(error: BaseException) -> str:
    """What went wrong with a file, in a few words."""
    return error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
