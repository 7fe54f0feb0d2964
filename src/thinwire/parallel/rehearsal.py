"""A rehearsal: a few steps of a small model on a mesh of processes, and the same on whole replicas in one process, to see
that both end at the same place. The model and its data are made up here; gloo carries the messages, so that any machine can
do it.
"""

import logging
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from thinwire.core.errors import ThinwireError
from thinwire.exchange.loopback import LoopbackTransport, run_replicas
from thinwire.optimizer import DeMo
from thinwire.parallel.mesh import REPLICATE, SHARD
from thinwire.parallel.sharded import distribute

TENSOR = "tp"
_VOCABULARY, _WIDTH, _LAYERS = 64, 64, 2
_SEQUENCES, _LENGTH = 8, 16
# Chunks small enough that every shard ends between two of them: the chunks are then those of the whole tensor.
_OPTIONS: dict[str, Any] = {"lr": 1e-2, "chunk": 16, "topk": 8, "dense_below": 200}
_TIMEOUT_SECONDS = 120.0

Report = tuple[dict[str, Tensor], int]
"""The whole parameters, and the bytes of a rank's payload."""


@dataclass(frozen=True)
class Rehearsal:
    """``replicas`` replicas, each on ``shards`` x ``tensor_parallel`` ranks. ``options`` are DeMo's. With
    ``given_gradients`` those are random numbers, whole or sharded the same to the bit; else they are the model's."""

    replicas: int
    shards: int = 1
    tensor_parallel: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    given_gradients: bool = False
    compute_dtype: str = "float32"
    """What FSDP2 gathers parameters in, and computes in."""
    parameter_dtype: str = "float32"
    steps: int = 8

    @property
    def ranks_per_replica(self) -> int:
        """The ranks that share one replica."""
        return self.shards * self.tensor_parallel

    @property
    def num_ranks(self) -> int:
        """All of them."""
        return self.replicas * self.ranks_per_replica


@dataclass(frozen=True)
class Ending:
    """What a rehearsal came to: the whole parameters, what all ranks of one replica sent to the next one per step, and
    whether all ranks ended with the same bits."""

    parameters: dict[str, Tensor]
    sent_bytes: int
    agrees: bool

    @property
    def loss(self) -> float:
        """Of these parameters, in nats per token, on examples that no replica has seen."""
        model = Model()
        model.load_state_dict({name: value.float() for name, value in self.parameters.items()})
        with torch.no_grad():
            return float(_loss(model, 0, replica=-1))


def difference(one: Ending, other: Ending) -> float:
    """The largest of any parameter."""
    pairs = ((one.parameters[name].float(), value.float()) for name, value in other.parameters.items())
    return max(float((mine - theirs).abs().max()) for mine, theirs in pairs)


class Block(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """Add what the layer finds."""
        found: Tensor = self.down(nn.functional.gelu(self.up(self.norm(hidden))))
        return hidden + found


class Model(nn.Module):
    """Names the next token. All replicas begin with the same values."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(_VOCABULARY, _WIDTH)
        self.layers = nn.ModuleList([Block() for _ in range(_LAYERS)])
        self.out = nn.Linear(_WIDTH, _VOCABULARY)
        generator = torch.Generator().manual_seed(0)
        for name, parameter in self.named_parameters():
            if "norm" not in name:
                nn.init.normal_(parameter, std=0.1, generator=generator)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: Tensor = self.out(hidden)
        return logits.clone()  # FSDP2 warns of a view


def _loss(model: nn.Module, step: int, replica: int, shard: int = 0, num_shards: int = 1) -> Tensor:
    """The mean over a shard's share of its replica's examples, in which each token follows from the one before."""
    generator = torch.Generator().manual_seed(1000 * (replica + 1) + step)
    columns = [torch.randint(0, _VOCABULARY, (_SEQUENCES,), generator=generator)]
    for _ in range(_LENGTH):
        columns.append((5 * columns[-1] + 3) % _VOCABULARY)
    tokens = torch.stack(columns, dim=1).chunk(num_shards)[shard]
    return nn.functional.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


def _give_gradients(model: nn.Module, step: int, replica: int) -> None:
    generator = torch.Generator().manual_seed(1000 * (replica + 1) + step)
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        if isinstance(parameter, DTensor):
            gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
        parameter.grad = gradient


def on_whole_replicas(plan: Rehearsal) -> Ending:
    """The same without processes; each replica takes the mean over the shares of its batch one after the other."""

    def work(transport: LoopbackTransport) -> Report:
        model = Model().to(getattr(torch, plan.parameter_dtype))
        optimizer = DeMo(model.named_parameters(), transport=transport, **{**_OPTIONS, **plan.options})
        for step in range(plan.steps):
            optimizer.zero_grad()
            if plan.given_gradients:
                _give_gradients(model, step, transport.replica)
            else:
                for shard in range(plan.shards):
                    with optimizer.accumulate() if shard < plan.shards - 1 else nullcontext():
                        (_loss(model, step, transport.replica, shard, plan.shards) / plan.shards).backward()
            optimizer.step()
        return _report(model, optimizer)

    found = run_replicas(work, plan.replicas)
    parameters, sent_bytes = found[0]
    return Ending(parameters, sent_bytes, all(_equal(parameters, one[0]) for one in found))


def _report(model: nn.Module, optimizer: DeMo) -> Report:
    whole = {
        name: (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().clone()
        for name, parameter in model.named_parameters()
    }
    return whole, optimizer.plan.payload_bytes


def _equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def on_a_mesh(plans: list[Rehearsal]) -> list[Ending]:
    """Rehearse in processes of this machine, one after the other in the same ones, since starting them takes longest. All
    plans must be for the same mesh."""
    plan = plans[0]
    shape = (plan.replicas, plan.shards, plan.tensor_parallel)
    if any((one.replicas, one.shards, one.tensor_parallel) != shape for one in plans):
        raise ValueError(f"plans for other meshes than {shape} need processes of their own: call it again for each")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # its imports take longer than a rehearsal
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_rank_main, args=(plans, rank, folder)) for rank in range(plan.num_ranks)]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        for process in ranks:
            process.join(max(0.1, deadline - time.monotonic()))
        late = [rank for rank, process in enumerate(ranks) if process.is_alive()]
        for process in ranks:
            process.kill()
        for failure in sorted(Path(folder).glob("*.traceback")):
            raise ThinwireError(f"rank {failure.stem} failed:\n{failure.read_text()}")
        if late:
            raise ThinwireError(f"ranks {late} did not end within {_TIMEOUT_SECONDS:.0f} s")
        reports = [torch.load(Path(folder, f"{rank}.pt"), weights_only=True) for rank in range(plan.num_ranks)]
    return [_ending(plan, [report[place] for report in reports]) for place in range(len(plans))]


def _ending(plan: Rehearsal, reports: list[Report]) -> Ending:
    parameters, _ = reports[0]
    sent_bytes = sum(report[1] for report in reports[: plan.ranks_per_replica])
    return Ending(parameters, sent_bytes, all(_equal(parameters, report[0]) for report in reports))


def _rank_main(plans: list[Rehearsal], rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # gathering whole parameters in two steps is slow, and said to be
    plan = plans[0]
    try:
        timeout = timedelta(seconds=_TIMEOUT_SECONDS / 2)
        rendezvous = f"file://{folder}/rendezvous"
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=plan.num_ranks, timeout=timeout)
        sizes = {REPLICATE: plan.replicas, SHARD: plan.shards, TENSOR: plan.tensor_parallel}
        named = {name: size for name, size in sizes.items() if size > 1 or name == REPLICATE}
        mesh = init_device_mesh("cpu", tuple(named.values()), mesh_dim_names=tuple(named))
        torch.save([_train(one, mesh) for one in plans], Path(folder, f"{rank}.pt"))
        time.sleep(0.2)  # a gloo process may abort if it ends while its threads still run (pytorch issue 190489)
        dist.destroy_process_group()
    except BaseException:
        Path(folder, f"{rank}.traceback").write_text(traceback.format_exc())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _train(plan: Rehearsal, mesh: DeviceMesh) -> Report:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    place = dict(zip(mesh.mesh_dim_names or (), mesh.get_coordinate() or (), strict=True))
    model: nn.Module = Model().to(getattr(torch, plan.parameter_dtype))
    if TENSOR in place:
        for layer in model.layers:  # type: ignore[union-attr]
            parallelize_module(layer, mesh[TENSOR], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, plan.compute_dtype), reduce_dtype=torch.float32)
    fsdp = {"mp_policy": policy} if SHARD in place and plan.compute_dtype != plan.parameter_dtype else None
    model, optimizer = distribute(model, mesh, fsdp=fsdp, **{**_OPTIONS, **plan.options})
    for step in range(plan.steps):
        optimizer.zero_grad()
        if plan.given_gradients:
            _give_gradients(model, step, place[REPLICATE])
        else:
            _loss(model, step, place[REPLICATE], place.get(SHARD, 0), plan.shards).backward()
        optimizer.step()
    return _report(model, optimizer)
