"""Sharded replicas: what of a parameter lies on this rank, and how the ranks of one replica decide together.

A replica may be spread over several ranks, its *island*. Each rank exchanges its own part with the ranks that hold the
same part of the other replicas, so what one rank finds wrong the others of its island do not see: they tell each other.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from thinwire.core.errors import ExchangeError
from thinwire.core.layout import Part
from thinwire.exchange.inside import Inside, InsideGroup
from thinwire.exchange.plan import Bucket
from thinwire.wire.payload import Header, Trouble

_log = logging.getLogger("thinwire")
FAILED = 1 << 62
_REPLICA_BIT = 40
# A rank that is waited for may itself have waited for other replicas until its deadline, and then have asked for names.
_TO_TELL_SECONDS = 10.0


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor; asked without importing them."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def local_of(tensor: Tensor) -> Tensor:
    """What of a tensor lies on this rank, in place."""
    found: Tensor = tensor._local_tensor if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return found


def part_of(tensor: Tensor) -> Part | None:
    """Where this rank's part lies; None if it is all of the tensor."""
    local = local_of(tensor)
    if local.shape == tensor.shape:
        return None
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    dtensor: Any = tensor
    _, offset = compute_local_shape_and_global_offset(tensor.shape, dtensor.device_mesh, dtensor.placements)
    return Part(tuple(tensor.shape), tuple(int(start) for start in offset))


def align_gradient(parameter: Tensor) -> None:
    """Bring the gradient of a DTensor to the placements of its parameter, where autograd left others: collective."""
    gradient: Any = parameter.grad
    if gradient is not None and is_sharded(parameter) and tuple(gradient.placements) != tuple(parameter.placements):  # type: ignore[attr-defined]
        parameter.grad = gradient.redistribute(parameter.device_mesh, parameter.placements)  # type: ignore[attr-defined]


class Island:
    """The ranks that hold one replica together: those along every axis of the meshes its parameters lie on. A replica that
    is not sharded is an island of one rank. `thinwire.shared_island` has the other kind, whose ranks all hold all of it."""

    unscales = False
    """Whether `ready_` takes out what a GradScaler has scaled gradients by."""

    def __init__(self, ways: Sequence[Inside]) -> None:
        self._ways = ways
        self.is_one_rank = not ways
        self.axes = [tuple(way.ranks) for way in ways]
        """The ranks along each axis through this rank."""

    def agree(self, describe: Callable[[], Sequence[str]]) -> None:
        """Raise on all ranks of the island if they are not about to do the same. Collective where they would not notice."""

    def begin(self, describe: Callable[[], Sequence[str]], grad_scale: float | None) -> None:
        """Take note of a step that is attempted: what all must agree on, and what gradients are scaled by."""

    def ready_(self, bucket: Bucket, sources: Sequence[Tensor]) -> None:
        """Bring the gradients of a bucket to what this rank works on: collective."""
        for member in bucket.members:
            align_gradient(sources[member])

    def spread_(self, bucket: Bucket) -> None:
        """Let the other ranks have the parameters of a bucket that this one has changed: collective."""

    def told_early(self) -> AbstractContextManager[None]:
        """The same as `told_of_failure` during backward and set-up, if that does not get in the way of other collectives."""
        return nullcontext()

    def has_heard(self, error: BaseException) -> bool:
        """Whether the error is one that all ranks of the island have."""
        return False

    def first_troubled(self, mine: Header, troubled: Header | None) -> Header | None:
        """What any rank of the island has found to keep a replica from the step; raises if one of them failed."""
        worst = self._worst(0 if troubled is None else troubled.replica << _REPLICA_BIT | troubled.trouble.pack())
        if worst == FAILED:
            raise ExchangeError(f"another rank of this replica could not take step {mine.step}; it says why")
        trouble = Trouble.unpack(worst & (1 << _REPLICA_BIT) - 1)
        return replace(mine, replica=worst >> _REPLICA_BIT, trouble=trouble) if worst and trouble else None

    @contextmanager
    def told_of_failure(self) -> Iterator[None]:
        """If this rank fails inside, the others need not wait for it, and do not take the step either."""
        try:
            yield
        except BaseException:
            try:
                self._worst(FAILED)
            except ExchangeError as error:
                _log.warning("could not tell the other ranks of this replica that this one failed: %s", error)
            raise

    def any(self, found: bool) -> bool:
        """Whether any rank of the island found something."""
        return self._worst(int(found)) > 0

    def _worst(self, code: int) -> int:
        for way in self._ways:
            (code,) = way.most([code], "decision of the ranks of this replica")
        return code


def find_island(named: Iterable[tuple[str, Tensor]], replica_ranks: Sequence[int], timeout_seconds: float) -> Island:
    """The island of these parameters, whose ranks wait for each other for ``timeout_seconds`` and a little longer.

    ``replica_ranks`` are the ranks between which DeMo exchanges. A mesh that joins two of them would average what DeMo must
    see apart.
    """
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for name, parameter in named:
        if not is_sharded(parameter):
            continue
        mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
        for axis in range(mesh.ndim):
            group = mesh.get_group(axis)
            ranks = tuple(dist.get_process_group_ranks(group))
            shared = sorted(set(ranks) & set(replica_ranks))
            if len(shared) > 1:
                raise ValueError(
                    f"{name} is sharded over ranks {list(ranks)}, of which {shared} are replicas of each other for DeMo; "
                    "shard it over the axis inside a replica only, and pass the group of the other axis as process_group "
                    "(thinwire.parallel.sharded.distribute does both)"
                )
            if len(ranks) > 1:
                groups[ranks] = group
    limit_seconds = timeout_seconds + _TO_TELL_SECONDS
    return Island([InsideGroup(group, limit_seconds, "ranks of this replica") for group in groups.values()])
