"""Frameworks save the optimizer of one rank only; DeMo's residual momentum is each rank's own and gets its own files."""

import shutil
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from thinwire.core.errors import CheckpointError
from thinwire.exchange.collective import is_distributed
from thinwire.optimizer import DeMo
from thinwire.parallel.state_files import read_state, write_state


def _folder(checkpoint: Path) -> Path:
    rank = dist.get_rank() if is_distributed() else 0
    return checkpoint.with_name(f"{checkpoint.name}.demo") / f"rank-{rank}"


def save_beside(optimizer: DeMo, checkpoint: Path) -> None:
    """Write this rank's optimizer state to ``<checkpoint>.demo/rank-<rank>``."""
    folder = _folder(checkpoint)
    folder.mkdir(parents=True, exist_ok=True)
    write_state(optimizer.state_dict(), folder)


def load_beside(optimizer: DeMo, checkpoint: Path) -> None:
    """Go on from what `save_beside` wrote for this rank."""
    folder = _folder(checkpoint)
    if not folder.is_dir():
        raise CheckpointError(f"{checkpoint} has no state of this rank's DeMo: there is no {folder}")
    optimizer.load_state_dict(read_state(folder))


def remove_beside(checkpoint: Path) -> None:
    """Remove what `save_beside` wrote for this rank, and the folder when it is empty."""
    folder = _folder(checkpoint)
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # not there, or other ranks' files still are: the last one removes it
        folder.parent.rmdir()
