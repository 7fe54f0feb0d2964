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
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from thinwire import checkpoint
from thinwire.core.errors import CheckpointError, check_choice
from thinwire.exchange.collective import default_transport
from thinwire.exchange.sharding import is_sharded, local_of
from thinwire.optimizer import DeMo
from thinwire.parallel.listing import (
    check_all_listed,
    check_files,
    list_files,
    listed_files,
    numbers_of,
    reason,
    tell_problems,
    together,
)
from thinwire.parallel.state_files import alone_on_purpose, read_state, write_state
from thinwire.redistribution import REDISTRIBUTIONS, assemble

_MODEL = "model"
POLICIES = ("exact", *REDISTRIBUTIONS)


def save(
    folder: str | Path,
    model: nn.Module,
    optimizer: DeMo,
    extra: dict[str, Any] | None = None,
    *,
    timeout_seconds: float = 3600.0,
) -> None:
    """Write a checkpoint; collective over all ranks. ``extra`` is any nested dict of tensors, numbers and texts: rank 0's is
    kept, and `load` returns it. ``timeout_seconds`` is the longest wait for a rank that writes longer than this one."""
    async_save(folder, model, optimizer, extra, timeout_seconds=timeout_seconds).wait()


def async_save(
    folder: str | Path,
    model: nn.Module,
    optimizer: DeMo,
    extra: dict[str, Any] | None = None,
    *,
    timeout_seconds: float = 3600.0,
) -> "Saving":
    """Copy all state to the host's memory, and write it while training goes on; collective, and so is `Saving.wait`, which
    must be called before the next checkpoint."""
    return Saving(Path(folder), model, optimizer, extra or {}, timeout_seconds)


class Saving:
    """A checkpoint that is being written."""

    def __init__(
        self, folder: Path, model: nn.Module, optimizer: DeMo, extra: dict[str, Any], timeout_seconds: float
    ) -> None:
        self._world = default_transport(None, timeout_seconds)
        self._rank = self._world.replica
        self._folder, self._partial = folder, folder.with_name(f"{folder.name}.partial")
        with self._together(f"rank {self._rank} cannot save to {folder}"):
            if folder.exists():
                raise FileExistsError(f"{folder} is there already; take another name, or remove it")
            shards = _on_host(dict(_written_here(_tensors(model), optimizer, self._rank)))
            state = _on_host({"optimizer": optimizer.state_dict(), "extra": extra if self._rank == 0 else {}})
            if self._rank == 0:
                shutil.rmtree(self._partial, ignore_errors=True)
                self._partial.mkdir(parents=True)
        self._pool = ThreadPoolExecutor(1)
        self._done: Future[None] = self._pool.submit(self._write, shards, state)
        self._is_there = False

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
        """Wait until the checkpoint is whole on all ranks and has its name; or raise on all of them. Once it is there, there
        is nothing to wait for."""
        if self._is_there:
            return
        with self._together(f"rank {self._rank} could not write {self._partial}"):
            self._done.result()
            self._pool.shutdown()
        with self._together(f"rank 0 could not finish {self._folder}"):
            if self._rank == 0:
                missing = [r for r in range(self._world.num_replicas) if not (self._partial / f"files-{r}.json").is_file()]
                if missing:
                    raise CheckpointError(f"it does not see what ranks {missing} wrote; do all ranks see that folder?")
                os.replace(self._partial, self._folder)
        self._is_there = True

    def _together(self, what: str) -> AbstractContextManager[None]:
        return together(self._world, what, self._partial, "no checkpoint")


def load(
    folder: str | Path, model: nn.Module, optimizer: DeMo, *, residual: str = "exact", timeout_seconds: float = 3600.0
) -> dict[str, Any]:
    """Go on from a checkpoint; collective. Returns its ``extra``.

    The model may be sharded otherwise than it was. ``residual="exact"`` wants the same mesh and goes on bit for bit. On
    another, or with more or fewer replicas, ``keep``, ``zero``, ``sum`` or ``mean`` says what becomes of the momenta: see
    `thinwire.redistribution.assemble`. Nothing is changed on any rank unless all can load.
    """
    check_choice("residual", residual, POLICIES)
    folder, world = Path(folder), default_transport(None, timeout_seconds)
    problem = ""
    try:
        optimizer.check_between_steps()
        ranks = _saved_ranks(folder)
        extra = _read(folder, 0)["extra"]
        if residual == "exact":
            _check_num_ranks(len(ranks), world.num_replicas)
            state = _read(folder, world.replica)["optimizer"]
        else:
            state = assemble(optimizer, (_read(folder, rank)["optimizer"] for rank in ranks), residual)
        checkpoint.check(optimizer, state, "exact")
        tensors = {name: tensor for name, tensor in _tensors(model).items() if tensor.numel()}
        _check_model(folder, ranks, tensors)
    except Exception as error:  # whatever it is, the others must hear of it
        problem = f"rank {world.replica}: {reason(error)}"
    for told in filter(None, tell_problems(world, problem)):
        raise CheckpointError(f"{folder} was loaded on no rank: {told}")
    try:
        with alone_on_purpose():
            load_tensors(tensors, storage_reader=_reader(folder), no_dist=True)
        set_model_state_dict(model, tensors, options=StateDictOptions(strict=False))
        optimizer.load_state_dict(state)
    except Exception as error:
        problem = f"rank {world.replica}: {reason(error)}"
    for told in filter(None, tell_problems(world, problem)):
        raise CheckpointError(f"{folder} was loaded in part only, do not go on from here: {told}")
    return dict(extra)


def _tensors(model: nn.Module) -> dict[str, Any]:
    """Parameters and buffers, under the names that they have without any wrapper."""
    tensors = get_model_state_dict(model)
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(f"the model's state has {name}, which is no tensor but {type(value).__name__}")
    return tensors


def _written_here(tensors: dict[str, Any], optimizer: DeMo, rank: int) -> Iterator[tuple[str, Tensor]]:
    """What of the model this rank writes: the shards of replica 0, each by the first rank that has it."""
    for name, tensor in tensors.items() if optimizer.replica == 0 else ():
        sharded_over: set[tuple[int, ...]] = set()
        if is_sharded(tensor):
            axes = [axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]
            sharded_over = {tuple(dist.get_process_group_ranks(tensor.device_mesh.get_group(axis))) for axis in axes}
        is_first = all(ranks[0] == rank for ranks in optimizer.island.axes if ranks not in sharded_over)
        if is_first and local_of(tensor).numel():
            yield name, tensor


def _on_host(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _on_host(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_on_host(item) for item in value]
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True).contiguous()  # safetensors wants it so
    return value


def _saved_ranks(folder: Path) -> list[int]:
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not there")
    ranks = numbers_of((path.name for path in folder.glob("rank-*")), "rank-")
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
    """Refuse files that are damaged or missing, or another model's."""
    listed: set[str] = set()
    for rank in ranks:
        for name in listed_files(folder, rank, _MODEL):
            check_files(folder, rank, name)
            listed.add(name)
    if tensors and not listed:
        raise CheckpointError(f"no rank's list of files names one of {_MODEL}: the checkpoint is not whole")
    check_all_listed(folder, _MODEL, listed)
    saved = _reader(folder).read_metadata().state_dict_metadata
    for name, tensor in tensors.items():
        found: Any = saved.get(name)
        shape = None if found is None else tuple(found.size)
        if shape != tuple(tensor.shape):
            raise CheckpointError(
                f"the checkpoint has {shape or 'nothing'} as {name}, this model needs {tuple(tensor.shape)}"
            )
        if sum(chunk.sizes.numel() for chunk in found.chunks) != tensor.numel():
            raise CheckpointError(f"the checkpoint has only parts of {name}")
