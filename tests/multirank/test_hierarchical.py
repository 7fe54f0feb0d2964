"""Islands of real processes over gloo: found in three ways, saved, resumed, and stopped by what goes wrong on one rank."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from tests.islands import OPTIONS, Shapes, set_gradients, train_plain
from tests.ranks import run_ranks
from tests.training import batch, build, flat, train_step
from thinwire import DeMo, ThinwireError
from thinwire.exchange.loopback import LoopbackTransport, run_replicas
from thinwire.parallel import distributed_checkpoint


def _islands(rank: int, islands: Any, num_steps: int = 3, **options: Any) -> tuple[Tensor, list[int]]:
    """Parameters at the end; and what the last step sent to other islands, in payloads, and kept as momentum."""
    model = Shapes(rank)
    optimizer = DeMo(model.named_parameters(), islands=islands, **{**OPTIONS, **options})
    for step in range(num_steps):
        set_gradients(model, step, rank)
        optimizer.step()
    elements = sum(state["momentum"].numel() for state in optimizer.state.values())
    return flat(model), [optimizer.traffic.last_step.sent_bytes, optimizer.plan.payload_bytes, elements]


def _real_gradients(rank: int, overlap: bool) -> Tensor:
    model = build(rank)
    options = {"chunk": 16, "topk": 8, "dense_below": 60, "update": "sgd", "values": "float32", "overlap": overlap}
    optimizer = DeMo(model.named_parameters(), lr=1e-2, islands=2, **options)
    for step in range(3):
        train_step(model, optimizer, step, rank)
    return flat(model)


def _nan_on_one(rank: int) -> tuple[str, int, Tensor]:
    model, said = Shapes(0), ""
    optimizer = DeMo(model.named_parameters(), islands=2, num_buckets=2, **OPTIONS)
    for step in range(3):
        set_gradients(model, step, rank)
        if step == 1 and rank == 3:
            model.tensors[3].grad[0, 0, 0] = torch.inf
        try:
            optimizer.step()
        except ThinwireError as error:
            said = str(error)
    return said, optimizer.num_steps, flat(model)


def _resumed(rank: int, folder: str) -> list[Tensor]:
    """Go on at once; from a sharded checkpoint; and from the same as four whole replicas."""
    ends = []
    for kind in ("first", "again", "apart"):
        model = Shapes(rank if kind == "first" else 7)
        options = {} if kind == "apart" else {"islands": 2}
        optimizer = DeMo(model.named_parameters(), update="adamw", **options, **OPTIONS)
        if kind != "first":
            residual = "exact" if kind == "again" else "sum"
            assert distributed_checkpoint.load(f"{folder}/saved", model, optimizer, residual=residual) == {"step": 2}
        for step in range(0 if kind == "first" else 2, 4):
            if step == 2 and kind == "first":
                distributed_checkpoint.save(f"{folder}/saved", model, optimizer, {"step": 2})
            set_gradients(model, step, rank)
            optimizer.step()
        ends.append(flat(model))
    return ends


def _refused(rank: int) -> dict[str, str]:
    meshes = {
        "one axis": init_device_mesh("cpu", (4,)),
        "few ranks": DeviceMesh("cpu", torch.tensor([[0, 1]])),
    }
    whole = init_device_mesh("cpu", (4,))
    spread = nn.Parameter(distribute_tensor(torch.zeros(8, 8), whole, [Replicate()]))
    cases: dict[str, tuple[Any, Any]] = {
        "three": (Shapes().parameters(), 3),
        "not all": (Shapes().parameters(), 2 if rank == 3 else 4),
        "none here": (Shapes().parameters(), None if rank == 1 else 2),
        "dtensor": ([spread], 2),
        **{name: (Shapes().parameters(), mesh) for name, mesh in meshes.items()},
    }
    said = {}
    for name, (parameters, islands) in cases.items():
        try:
            DeMo(parameters, islands=islands, timeout_seconds=20, **OPTIONS)
            said[name] = "no error"
        except (ValueError, ThinwireError) as error:
            said[name] = str(error)
    return said


def _one_fails_then_one_stays_away(rank: int) -> list[str]:
    model, said = Shapes(0), []
    optimizer = DeMo(model.named_parameters(), islands=2, num_buckets=2, timeout_seconds=1.5, **OPTIONS)
    for step in range(4):
        set_gradients(model, step, rank)
        encode = optimizer._local.encode_
        if step == 1 and rank == 2:
            optimizer._local.encode_ = _no_room  # type: ignore[method-assign]
        try:
            if step < 3 or rank != 1:
                optimizer.step()
            said.append("stepped")
        except (ThinwireError, MemoryError) as error:
            said.append(f"{type(error).__name__}: {error}")
        optimizer._local.encode_ = encode  # type: ignore[method-assign]
    return said


def _no_room(*_: Any) -> None:
    raise MemoryError("no room")


def _all_on_four_ranks(rank: int, folder: str) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("between", "inside"))
    return {
        "consecutive": _islands(rank, 2),
        "mesh": _islands(rank, mesh, update="muon", num_buckets=3),
        "subgroup": _islands(rank, 2, process_group=dist.new_group([0, 1, 2, 3], backend="gloo")),
        "hosts": _islands(rank, "hosts"),
        "signed": _islands(rank, 2, secret=b"sixteen bytes..."),
        "real": [_real_gradients(rank, overlap) for overlap in (False, True)],
        "nan": _nan_on_one(rank),
        "resumed": _resumed(rank, folder),
        "refused": _refused(rank),
        "fails": _one_fails_then_one_stays_away(rank),
    }


def test_two_islands_of_two_ranks(tmp_path: Path) -> None:
    """Starting processes takes longer than what they do, so they do all of it."""
    results = run_ranks(_all_on_four_ranks, 4, str(tmp_path))
    _check_bits_and_bytes(results)
    _check_real_gradients([rank["real"] for rank in results])
    for said, num_steps, found in (rank["nan"] for rank in results):
        assert said.startswith("replica 1 has NaN or Inf in the gradient of tensors.3 at step 2")
        assert num_steps == 2
        assert torch.equal(found, results[0]["nan"][2])
    for first, again, apart in (rank["resumed"] for rank in results):
        assert torch.equal(first, results[0]["resumed"][0])
        assert torch.equal(again, first)
        assert torch.equal(apart, results[0]["resumed"][2])
    _check_refusals([rank["refused"] for rank in results])
    _check_failures([rank["fails"] for rank in results])


def _check_bits_and_bytes(results: list[dict[str, Any]]) -> None:
    options: dict[str, dict[str, Any]] = {"mesh": {"update": "muon", "num_buckets": 3}}
    for name in ("consecutive", "mesh", "subgroup", "hosts", "signed"):
        num_islands, size = (1, 4) if name == "hosts" else (2, 2)
        expected, plain = train_plain(num_islands, size, **options.get(name, {}))
        for rank in results:
            assert torch.equal(rank[name][0], expected), name
        island = [rank[name][1] for rank in results[:size]]
        num_buckets = len(plain.plan.buckets)
        tags = 32 if name == "signed" else 0
        assert all(sent == (payload + tags if num_islands > 1 else 0) for sent, payload, _ in island)
        extra = sum(payload for _, payload, _ in island) - plain.plan.payload_bytes - num_buckets * (size - 1) * 64
        assert 0 <= extra <= 8 * num_buckets * size
        assert sum(elements for _, _, elements in island) == sum(s["momentum"].numel() for s in plain.state.values())


def _check_real_gradients(results: list[list[Tensor]]) -> None:
    """To rounding what two replicas come to that add up the gradients of two batches."""

    def work(transport: LoopbackTransport) -> Tensor:
        model = build(0)
        options = {"chunk": 16, "topk": 8, "dense_below": 60, "update": "sgd", "values": "float32"}
        optimizer = DeMo(model.named_parameters(), lr=1e-2, transport=transport, **options)
        for step in range(3):
            optimizer.zero_grad()
            for rank in (2 * transport.replica, 2 * transport.replica + 1):
                images, labels = batch(step, rank)
                (nn.functional.cross_entropy(model(images), labels) / 2).backward()
            optimizer.step()
        return flat(model)

    expected = run_replicas(work, 2)[0]
    for late, early in results:
        assert torch.equal(late, results[0][0])
        assert torch.equal(early, late)
        assert torch.allclose(late, expected, atol=1e-5)


def _check_refusals(results: list[dict[str, str]]) -> None:
    for said in results:
        assert said["three"] == "islands=3 does not divide 4 ranks: islands must be of equal size"
        assert "has [islands: [[0, 1, 2, 3]]], rank 3 has [islands: [[0, 1], [2, 3]]]" in said["not all"]
        assert "0 has [islands: [[0, 1], [2, 3]]]" in said["none here"]
        assert "1 has [islands: None]" in said["none here"]
        assert "is a DTensor: its shards are the ranks' shares already, so leave islands out" in said["dtensor"]
        assert said["one axis"] == "islands must be a mesh with the axes (between islands, inside); this one has 1"
        assert "each needs its place" in said["few ranks"]


def _check_failures(results: list[list[str]]) -> None:
    for rank, said in enumerate(results):
        assert (said[0], said[2]) == ("stepped", "stepped")
        assert said[1].startswith("MemoryError: no room" if rank == 2 else "ExchangeError: ")
    assert "waited for ranks of the island [1], which did not come or died" in results[0][3]
    assert all(said[3].startswith("ExchangeError: ") for said in (results[2], results[3]))


def _two_by_three(rank: int) -> tuple[Tensor, list[int]]:
    return _islands(rank, 3, num_steps=2, update="lion", num_buckets=2, overlap=True)


def test_two_islands_of_three_ranks() -> None:
    expected, _ = train_plain(2, 3, num_steps=2, update="lion", num_buckets=2)
    for found, _ in run_ranks(_two_by_three, 6):
        assert torch.equal(found, expected)
