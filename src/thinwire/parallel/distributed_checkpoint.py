"""Checkpoints of replicas that are spread over ranks, by torch's distributed checkpoint: every rank writes what it holds.

    FOLDER/
        model/      the model's shards, written once, by the ranks of replica 0; safetensors
        rank-3/     the optimizer's state of one rank, with its residual momentum; safetensors
        files-3.json   length and SHA-256 of every file that rank 3 wrote

Nothing is pickled. The folder must be one that all ranks see. It is written aside and renamed, so it is whole or not there.
"""

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from thinwire import checkpoint
from thinwire.core.errors import CheckpointError, check_choice
from thinwire.exchange.collective import default_transport
from thinwire.exchange.sharding import is_sharded, local_of
from thinwire.optimizer import DeMo
from thinwire.parallel.listing import check_files, list_files, reason, tell_problems
from thinwire.parallel.state_files import alone_on_purpose, read_state, write_state
from thinwire.redistribution import REDISTRIBUTIONS, assemble

_TIMEOUT_SECONDS = 600.0
_MODEL = "model"
POLICIES = ("exact", *REDISTRIBUTIONS)


def save(folder: str | Path, model: nn.Module, optimizer: DeMo, extra: dict[str, Any] | None = None) -> None:
    """Write a checkpoint; collective over all ranks. ``extra`` is any nested dict of tensors, numbers and texts: rank 0's is
    kept, and `load` returns it."""
    async_save(folder, model, optimizer, extra).wait()


def async_save(folder: str | Path, model: nn.Module, optimizer: DeMo, extra: dict[str, Any] | None = None) -> "Saving":
    """Copy all state to the host's memory, and write it while training goes on; collective, and so is `Saving.wait`, which
    must be called before the next checkpoint."""
    return Saving(Path(folder), model, optimizer, extra or {})


class Saving:
    """A checkpoint that is being written."""

    def __init__(self, folder: Path, model: nn.Module, optimizer: DeMo, extra: dict[str, Any]) -> None:
        self._world = default_transport(None, _TIMEOUT_SECONDS)
        self._rank = self._world.replica
        self._folder, self._partial = folder, folder.with_name(f"{folder.name}.partial")
        problem = self._prepare()
        self._raise(tell_problems(self._world, problem))
        shards = dict(_written_here(_tensors(model), optimizer.replica, self._rank))
        state = {"optimizer": optimizer.state_dict(), "extra": extra if self._rank == 0 else {}}
        self._pool = ThreadPoolExecutor(1)
        self._done: Future[None] = self._pool.submit(self._write, _on_host(shards), _on_host(state))

    def _prepare(self) -> str:
        """Make room, on the first rank; what keeps it from that."""
        if self._folder.exists():
            return f"{self._folder} is there already; take another name, or remove it"
        if self._rank == 0:
            try:
                shutil.rmtree(self._partial, ignore_errors=True)
                self._partial.mkdir(parents=True)
            except OSError as error:
                return f"{self._partial} could not be made: {reason(error)}"
        return ""

    def _write(self, shards: dict[str, Any], state: dict[str, Any]) -> None:
        own, folder = self._partial / f"rank-{self._rank}", self._partial / _MODEL
        own.mkdir()
        write_state(state, own)
        if shards:
            # The number of the file is what makes its name this rank's own.
            number = self._rank + 1
            writer = HuggingFaceStorageWriter(str(folder), dict.fromkeys(shards, number), save_distributed=True)
            with alone_on_purpose():
                save_tensors(shards, storage_writer=writer, no_dist=True)
        list_files(self._partial, self._rank, [own, *folder.glob(_model_file(self._rank))])

    def wait(self) -> None:
        """Wait until the checkpoint is whole on all ranks and has its name; or raise on all of them."""
        problem = ""
        try:
            self._done.result()
        except Exception as error:  # whatever it is, the others must hear of it
            problem = f"rank {self._rank} could not write {self._partial}: {reason(error)}"
        self._pool.shutdown()
        self._raise(tell_problems(self._world, problem))
        problem = ""
        if self._rank == 0:
            missing = [r for r in range(self._world.num_replicas) if not (self._partial / f"files-{r}.json").is_file()]
            if missing:
                problem = f"rank 0 does not see what ranks {missing} wrote to {self._partial}; do all ranks see that folder?"
            else:
                os.replace(self._partial, self._folder)
        self._raise(tell_problems(self._world, problem))

    def _raise(self, problems: list[str]) -> None:
        for problem in problems:
            if problem:
                if self._rank == 0:
                    shutil.rmtree(self._partial, ignore_errors=True)
                raise CheckpointError(f"no checkpoint: {problem}")


def load(folder: str | Path, model: nn.Module, optimizer: DeMo, *, residual: str = "exact") -> dict[str, Any]:
    """Go on from a checkpoint; collective. Returns its ``extra``.

    The model may be sharded otherwise than it was. ``residual="exact"`` wants the same mesh and goes on bit for bit. On
    another, or with more or fewer replicas, ``keep``, ``zero``, ``sum`` or ``mean`` says what becomes of the momenta: see
    `thinwire.redistribution.assemble`. Nothing is changed on any rank unless all can load.
    """
    check_choice("residual", residual, POLICIES)
    folder, world = Path(folder), default_transport(None, _TIMEOUT_SECONDS)
    problem = ""
    try:
        ranks = _saved_ranks(folder)
        extra = _read(folder, 0)["extra"]
        if residual == "exact":
            _check_num_ranks(len(ranks), world.num_replicas)
            state = _read(folder, world.replica)["optimizer"]
            checkpoint.check(optimizer, state, residual)
        else:
            state = assemble(optimizer, (_read(folder, rank)["optimizer"] for rank in ranks), residual)
        tensors = _tensors(model)
        _check_model(folder, ranks, tensors)
    except (CheckpointError, OSError, ValueError, KeyError, RuntimeError) as error:
        problem = f"rank {world.replica}: {reason(error)}"
    for told in tell_problems(world, problem):
        if told:
            raise CheckpointError(f"{folder} was loaded on no rank: {told}")
    with alone_on_purpose():
        load_tensors(tensors, storage_reader=_reader(folder), no_dist=True)
    set_model_state_dict(model, tensors)
    optimizer.load_state_dict(state)
    return dict(extra)


def _tensors(model: nn.Module) -> dict[str, Any]:
    """Parameters and buffers, under the names that they have without any wrapper."""
    tensors = get_model_state_dict(model)
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(f"the model's state has {name}, which is no tensor but {type(value).__name__}")
    return tensors


def _written_here(tensors: dict[str, Any], replica: int, rank: int) -> Iterator[tuple[str, Tensor]]:
    """What of the model this rank writes: the shards of replica 0, each by the first that has it."""
    for name, tensor in tensors.items():
        if not is_sharded(tensor):
            if rank == 0:
                yield name, tensor
            continue
        copies = [axis for axis, placement in enumerate(tensor.placements) if not placement.is_shard()]
        coordinate = tensor.device_mesh.get_coordinate()
        if replica == 0 and local_of(tensor).numel() and not any(coordinate[axis] for axis in copies):
            yield name, tensor


def _on_host(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _on_host(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_on_host(item) for item in value]
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    return value


def _saved_ranks(folder: Path) -> list[int]:
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not there")
    ranks = sorted(int(path.name.removeprefix("rank-")) for path in folder.glob("rank-*"))
    if not ranks or ranks != list(range(len(ranks))):
        raise CheckpointError(f"it has the states of ranks {ranks}, so it is no whole checkpoint of thinwire")
    return ranks


def _check_num_ranks(num_saved: int, num_ranks: int) -> None:
    if num_saved != num_ranks:
        raise CheckpointError(
            f"the checkpoint is of {num_saved} ranks, this run has {num_ranks}; residual='keep', 'zero', 'sum' or 'mean' "
            "says what is to become of the residual momenta"
        )


def _read(folder: Path, rank: int) -> dict[str, Any]:
    check_files(folder, rank, f"rank-{rank}")
    return read_state(folder / f"rank-{rank}")


def _model_file(rank: int) -> str:
    return f"*-model-{rank + 1:05d}-of-*"


def _reader(folder: Path) -> HuggingFaceStorageReader:
    return HuggingFaceStorageReader(str(folder / _MODEL))


def _check_model(folder: Path, ranks: list[int], tensors: dict[str, Any]) -> None:
    """Refuse files that are damaged, or another model's."""
    for rank in ranks:
        for file in (folder / _MODEL).glob(_model_file(rank)):
            check_files(folder, rank, f"{_MODEL}/{file.name}")
    saved = _reader(folder).read_metadata().state_dict_metadata
    for name, tensor in tensors.items():
        found = tuple(saved[name].size) if name in saved else None  # type: ignore[union-attr]
        if found != tuple(tensor.shape):
            raise CheckpointError(
                f"the checkpoint has {found or 'nothing'} as {name}, this model needs {tuple(tensor.shape)}"
            )
