"""A replica spread over several ranks by FSDP2, as the trainer sees it."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh

from thinwire.exchange.transport import Transport
from thinwire.parallel.group import backend_name
from thinwire.parallel.mesh import REPLICATE, SHARD, MeshShape, parse_mesh
from thinwire.parallel.sharded import shard_


class Sharding:
    """The mesh of a run."""

    def __init__(self, shape: MeshShape, device: torch.device, timeout_seconds: float) -> None:
        if device.type == "cuda" and backend_name() != "nccl":
            raise ValueError(
                f"mesh with shard={shape.shard} on GPUs needs NCCL, and so a GPU for each of this machine's ranks; "
                f"the ranks are joined by {backend_name()}"
            )
        self.shape = shape
        self._mesh = init_device_mesh(device.type, tuple(shape), mesh_dim_names=(REPLICATE, SHARD))
        # The mesh makes its groups with torch's own time-out, which is half an hour over gloo.
        for group in self._mesh.get_all_groups():
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_seconds), group)

    @property
    def between_replicas(self) -> dist.ProcessGroup:
        """The ranks that hold the same shards as this one."""
        return self._mesh.get_group(REPLICATE)

    def shard_(self, model: nn.Module, transport: Transport) -> None:
        """Cut a model, which becomes rank 0's, into the shards of the ranks of a replica, on their device."""
        for parameter in model.parameters():
            transport.broadcast_(parameter.data, "first copy of rank 0's parameters")
        shard_(model, self._mesh)


def sharding_of(mesh: str, device: torch.device, timeout_seconds: float) -> Sharding | None:
    """None if every rank is a replica of its own."""
    if not mesh:
        return None
    shape = parse_mesh(mesh)
    return Sharding(shape, device, timeout_seconds) if shape.shard > 1 else None


def gather_whole(model: nn.Module) -> dict[str, Any]:
    """All parameters and buffers, on the host of rank 0; empty elsewhere. Collective."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
