"""What several commands are asked for: a device, a folder to write to. Checked before anything takes time."""

from pathlib import Path

import torch

from thinwire.parallel.listing import reason
from thinwire.training.errors import TrainingError


def device_of(text: str) -> torch.device:
    """The device that ``--device`` names; auto is a GPU if there is one."""
    name = ("cuda" if torch.cuda.is_available() else "cpu") if text == "auto" else text
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdecimal()):
        raise TrainingError(f"--device {text} must be cpu, cuda or auto")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        raise TrainingError(f"--device {text}: there is no such device here; cpu or auto")
    return torch.device(name)


def make_folder(flag: str, folder: Path) -> None:
    """Make a folder that a flag names."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = "it is a file" if isinstance(error, FileExistsError) else reason(error)
        raise TrainingError(f"{flag} {folder}: {problem}") from error
