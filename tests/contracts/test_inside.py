"""Every way between the ranks of an island keeps the same promises."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from thinwire import ExchangeError
from thinwire.exchange.inside import ALONE, Inside, InsideGroup, InsideTransport
from thinwire.exchange.loopback import LoopbackTransport, run_replicas


def exercise(inside: Inside) -> list[Any]:
    """One of each, with sizes that differ and, for the last of several ranks, are 0."""
    rank, num_ranks = inside.rank, inside.num_ranks
    sizes = [0 if num_ranks > 1 and to == num_ranks - 1 else 4 * (to + 1) for to in range(num_ranks)]
    message = torch.cat([torch.full((size,), 10 * rank + to) for to, size in enumerate(sizes)]).to(torch.uint8)
    swapped = inside.swap(message.to(inside.device or "cpu"), sizes, "swap").tolist()
    rows = torch.zeros(num_ranks, 3, dtype=torch.uint8)
    rows[rank] = rank + 1
    inside.gather_(rows, "gather")
    copies = []
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        tensor = torch.full((2, 3), 7.0 + rank, dtype=dtype).T
        inside.broadcast_(tensor, "copy")
        copies.append(tensor.tolist())
    words = inside.most([rank, -rank, 1 << 62 if rank == 0 else 0], "vote")
    return [rank, num_ranks, swapped, rows.tolist(), copies, words]


def check(results: list[list[Any]]) -> None:
    num_ranks = len(results)
    for rank, (who, how_many, swapped, rows, copies, words) in enumerate(results):
        assert (who, how_many) == (rank, num_ranks)
        size = 0 if num_ranks > 1 and rank == num_ranks - 1 else 4 * (rank + 1)
        assert swapped == [[10 * sender + rank] * size for sender in range(num_ranks)]
        assert rows == [[sender + 1] * 3 for sender in range(num_ranks)]
        assert all(copy == [[7.0, 7.0]] * 3 for copy in copies)
        assert words == [num_ranks - 1, 0, 1 << 62]


def test_alone() -> None:
    check([exercise(ALONE)])


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_threads(num_ranks: int) -> None:
    check(run_replicas(lambda transport: exercise(InsideTransport(transport, range(num_ranks))), num_ranks))


def _group(rank: int) -> tuple[list[Any], str, float]:
    """The contract; and a rank that does not come is named, not waited for without end."""
    found = exercise(InsideGroup(dist.group.WORLD, 30.0))
    hasty = InsideGroup(dist.group.WORLD, 1.0)
    began, said = time.monotonic(), ""
    if rank < 2:
        try:
            hasty.swap(torch.zeros(3, dtype=torch.uint8), [1, 1, 1], "average inside the island")
        except ExchangeError as error:
            said = str(error)
    else:
        time.sleep(3.5)
    return found, said, time.monotonic() - began


def test_a_process_group() -> None:
    results = run_ranks(_group, 3)
    check([found for found, _, _ in results])
    for _, said, seconds in results[:2]:
        assert "average inside the island: waited for ranks of the island [2], which did not come or died" in said
        assert seconds < 30


@pytest.mark.gpu
def test_a_process_group_over_nccl(tmp_path: Path) -> None:
    """One rank, since there is one GPU."""
    dist.init_process_group("nccl", init_method=(tmp_path / "rendezvous").as_uri(), rank=0, world_size=1)
    try:
        check([exercise(InsideGroup(dist.group.WORLD, 30.0))])
    finally:
        dist.destroy_process_group()


def test_threads_that_leave_are_named() -> None:
    said = []

    def work(transport: LoopbackTransport) -> None:
        inside = InsideTransport(transport.among([0, 1]), (0, 1))
        if inside.rank == 0:
            try:
                inside.most([0], "vote")
            except ExchangeError as error:
                said.append(str(error))

    run_replicas(work, 2)
    assert said == ["vote: replicas [1] left"]
