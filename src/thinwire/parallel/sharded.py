"""Sharded replicas: FSDP2 or tensor parallel inside a replica, DeMo between replicas.

    mesh = init_device_mesh("cuda", (4, 8), mesh_dim_names=("replicate", "shard"))
    model, optimizer = distribute(model, mesh, lr=1e-3)

Gradients are reduced inside a replica by FSDP2, as always; between replicas only DeMo's payloads travel.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from thinwire.exchange.sharding import is_sharded
from thinwire.optimizer import DeMo
from thinwire.parallel.mesh import REPLICATE, SHARD


def distribute(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    blocks: Sequence[nn.Module] | None = None,
    initialise: Callable[[nn.Module], object] | None = None,
    fsdp: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[nn.Module, DeMo]:
    """Shard a model inside each replica, and build the optimizer that trains the replicas together.

    Arguments:
        model: a plain model, one to which a tensor-parallel plan was applied on another axis of ``mesh``, or one on the meta
            device.
        mesh: has an axis ``replicate``, and an axis ``shard`` if FSDP2 is to shard; any other axes are your own.
        blocks: what is gathered and freed as one; by default the members of every `nn.ModuleList`, and what is left.
        initialise: called with a model from the meta device once its parameters are real; replica 0's values are then
            copied to the others.
        fsdp: passed on to `fully_shard`: ``mp_policy``, ``reshard_after_forward`` and so on.
        options: those of `DeMo`, but ``process_group`` and ``transport``.
    """
    names = _check(model, mesh, initialise, options)
    if SHARD in names:
        shard_(model, mesh, blocks, fsdp)
    elif fsdp or blocks:
        raise ValueError(f"fsdp and blocks are for FSDP2, which needs a mesh axis {SHARD!r}; this mesh has {names}")
    if _is_on_meta(model):
        model.to_empty(device=mesh.device_type)
        assert initialise is not None
        initialise(model)
    return model, DeMo(model.named_parameters(), process_group=mesh.get_group(REPLICATE), **options)


def shard_(
    model: nn.Module, mesh: DeviceMesh, blocks: Sequence[nn.Module] | None = None, fsdp: dict[str, Any] | None = None
) -> None:
    """Let FSDP2 shard a model over the axis ``shard``, and over no other; see `distribute`."""
    from torch.distributed.fsdp import fully_shard

    for block in _blocks(model) if blocks is None else blocks:
        fully_shard(block, mesh=mesh[SHARD], **(fsdp or {}))
    fully_shard(model, mesh=mesh[SHARD], **(fsdp or {}))


def _check(
    model: nn.Module, mesh: DeviceMesh, initialise: Callable[[nn.Module], object] | None, options: dict[str, Any]
) -> tuple[str, ...]:
    names = tuple(mesh.mesh_dim_names or ())
    if REPLICATE not in names:
        raise ValueError(f"the mesh needs an axis {REPLICATE!r}, between whose ranks DeMo exchanges; it has {names}")
    if mesh.size() != dist.get_world_size():
        raise ValueError(
            f"the mesh has {mesh.size()} ranks, and the world {dist.get_world_size()}; every rank needs its place"
        )
    for name in ("process_group", "transport"):
        if name in options:
            raise ValueError(f"{name} follows from the mesh; leave it out")
    if _is_on_meta(model) and initialise is None:
        raise ValueError("a model on the meta device has no values yet: pass initialise, such as a function that sets them")
    wrong = [name for name, parameter in model.named_parameters() if is_sharded(parameter) and _is_on_axis(parameter, mesh)]
    if wrong:
        raise ValueError(
            f"{wrong[0]} is a DTensor on the axis {REPLICATE!r} already; apply other parallelisms on other axes only, as in "
            "parallelize_module(model, mesh['tp'], plan)"
        )
    return names


def _is_on_axis(parameter: Any, mesh: DeviceMesh) -> bool:
    replicas = set(dist.get_process_group_ranks(mesh.get_group(REPLICATE)))
    return any(
        len(replicas & set(dist.get_process_group_ranks(parameter.device_mesh.get_group(axis)))) > 1
        for axis in range(parameter.device_mesh.ndim)
    )


def _is_on_meta(model: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in model.parameters())


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The members of every list of modules, but lists among them; those inside another member come first."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    members = [block for modules in reversed(lists) for block in modules]
    containers = (nn.ModuleList, nn.ModuleDict)
    once = dict.fromkeys(block for block in members if not isinstance(block, containers))
    return [block for block in once if any(True for _ in block.parameters())]
