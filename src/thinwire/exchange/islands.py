"""Which ranks form an island, and how they reach each other and the other islands.

An island is one replica: L ranks that hold the same parameters and average their gradients. Rank i of an island exchanges
with rank i of every other, its *counterparts*. All ranks must have the same islands in mind before any group is made, since
a rank that had others would be waited for in vain: so they compare them first, and what is wrong with them too.
"""

import hashlib
import socket
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from thinwire.exchange.agreement import hold_roll_call
from thinwire.exchange.collective import default_transport, is_distributed
from thinwire.exchange.inside import ALONE, Inside, InsideGroup, InsideTransport
from thinwire.exchange.signed import choose_transport
from thinwire.exchange.traffic import Count
from thinwire.exchange.transport import SoloTransport, Transport, elastic, metered

HOSTS = "hosts"
_FORMS = f"a number of ranks, a DeviceMesh with the axes (between islands, inside), or {HOSTS!r}"


def divide(
    islands: object,
    transport: Transport | None,
    group: dist.ProcessGroup | None,
    timeout_seconds: float,
    secret: bytes | None,
    setup: Count,
) -> tuple[Transport, Inside]:
    """The way to this rank's counterparts in the other islands, signed where there is a secret, and the way to the ranks of
    its own. Without ``islands`` every rank is one. Collective."""
    flat = choose_transport(transport, group, timeout_seconds, secret, setup)
    if islands is None:
        return flat, ALONE
    if elastic(flat) is not None:
        raise ValueError("islands do not go with a transport whose replicas come and go; leave one of them out")
    if transport is not None and not hasattr(transport, "among"):
        raise ValueError(
            f"a {type(transport).__name__} cannot be divided into islands; pass process_group, or a transport that can"
        )
    found = _agree(islands, flat, transport, group, setup)
    mine, counterparts = _place(found, flat.replica)
    if transport is not None:
        among: Any = transport.among
        inside: Inside = InsideTransport(among(mine), mine) if len(mine) > 1 else ALONE
        return choose_transport(among(counterparts), None, timeout_seconds, secret, setup), inside
    if hasattr(islands, "get_group"):
        groups = [islands.get_group(axis) for axis in (1, 0)]
    else:
        ranks = [[_ranks(group)[number] for number in island] for island in found] if flat.num_replicas > 1 else []
        groups = [_make_groups(lists, group, timeout_seconds) for lists in (ranks, list(zip(*ranks, strict=True)))]
    inside = ALONE if len(mine) == 1 else InsideGroup(groups[0], timeout_seconds)
    between = SoloTransport() if len(counterparts) == 1 else default_transport(groups[1], timeout_seconds)
    return choose_transport(between, None, timeout_seconds, secret, setup), inside


def _agree(
    islands: object, flat: Transport, transport: Transport | None, group: dist.ProcessGroup | None, setup: Count
) -> list[list[int]]:
    """The islands, by the numbers of ``flat``; raises on every rank if they cannot be, or are not the same for all."""
    found: list[list[int]] = []
    problem = ""
    all_gather = metered(flat, setup)
    if islands == HOSTS:
        # Not before all are known to want it: the others would take the hosts for something else.
        hold_roll_call([f"islands: {HOSTS}"], all_gather, "rank")
        rows = all_gather(torch.frombuffer(bytearray(_host()), dtype=torch.uint8), "hosts of the ranks")
        return by_host([row.cpu().numpy().tobytes() for row in rows])
    try:
        if hasattr(islands, "get_group"):
            found = _of_mesh(islands, [0] if transport is not None or not is_distributed() else _ranks(group), transport)
        else:
            found = consecutive(islands, flat.num_replicas)
    except (ValueError, TypeError) as error:
        problem = str(error)
    hold_roll_call([f"islands: {problem or found}"], all_gather, "rank")
    if problem:
        raise ValueError(problem)
    return found


def consecutive(size: object, num_ranks: int) -> list[list[int]]:
    """Islands of so many ranks with consecutive numbers."""
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"islands={size!r} must be {_FORMS}")
    if num_ranks % size:
        raise ValueError(f"islands={size} does not divide {num_ranks} ranks: islands must be of equal size")
    return [list(range(first, first + size)) for first in range(0, num_ranks, size)]


def by_host(hosts: Sequence[bytes]) -> list[list[int]]:
    """The ranks of each host, in the order of their first ranks."""
    found: dict[bytes, list[int]] = {}
    for rank, host in enumerate(hosts):
        found.setdefault(host, []).append(rank)
    if len({len(ranks) for ranks in found.values()}) > 1:
        raise ValueError(
            f"islands={HOSTS!r} found islands of unequal size, {list(found.values())}; start equally many ranks per host"
        )
    return list(found.values())


def _of_mesh(mesh: Any, ranks: Sequence[int], transport: Transport | None) -> list[list[int]]:
    if transport is not None:
        raise ValueError("islands=DeviceMesh(...) speaks of process groups; leave transport out, or give a number of ranks")
    if mesh.ndim != 2:
        raise ValueError(f"islands must be a mesh with the axes (between islands, inside); this one has {mesh.ndim}")
    rows: list[list[int]] = mesh.mesh.tolist()
    if sorted(rank for row in rows for rank in row) != sorted(ranks):
        raise ValueError(
            f"islands is a mesh of ranks {rows}, but the ranks that train are {list(ranks)}; each needs its place"
        )
    return [[ranks.index(rank) for rank in row] for row in rows]


def _ranks(group: dist.ProcessGroup | None) -> list[int]:
    return dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)


def _place(islands: list[list[int]], rank: int) -> tuple[list[int], list[int]]:
    """The ranks of this rank's island, and its counterparts, itself among them."""
    mine = next(ranks for ranks in islands if rank in ranks)
    return mine, [ranks[mine.index(rank)] for ranks in islands]


def _make_groups(
    lists: Sequence[Sequence[int]], group: dist.ProcessGroup | None, timeout_seconds: float
) -> dist.ProcessGroup | None:
    """Of these lists of ranks, the group of the one that this rank is in.

    All ranks of the world make all groups, as torch wants it. Where some ranks do not train with these, they cannot: then a
    group is made by its members alone, which all must have made equally many groups before.
    """
    if not lists:
        return None
    own, is_world = None, sum(len(ranks) for ranks in lists) == dist.get_world_size()
    options: dict[str, Any] = {"timeout": timedelta(seconds=timeout_seconds)}
    options["backend"] = None if group is None else dist.get_backend(group)
    for ranks in lists:
        is_member = dist.get_rank() in ranks
        if len(ranks) > 1 and (is_member or is_world):
            made = dist.new_group(list(ranks), use_local_synchronization=not is_world, **options)
            own = made if is_member else own
    return own


def _host() -> bytes:
    """32 bytes that are the same for all processes of one running host. The boot tells hosts of the same name apart."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    boot_id = boot.read_text().strip() if boot.is_file() else ""
    return hashlib.sha256(f"{socket.gethostname()} {boot_id}".encode()).digest()
