"""Sharded replicas end where unsharded ones end; what one rank of a replica finds, all ranks of it obey."""

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from filelock import FileLock
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.ranks import run_ranks
from thinwire import DeMo, ExchangeError, NonFiniteGradientError, ThinwireError
from thinwire.exchange import sharding
from thinwire.exchange.loopback import LoopbackTransport, run_replicas
from thinwire.parallel.sharded import _blocks, distribute

OPTIONS: dict[str, Any] = {"lr": 1e-2, "chunk": 16, "topk": 8, "dense_below": 200}


class Net(nn.Module):
    """Embedding tied to the output, convolution, stacked experts, norm, a frozen layer and a low-rank adapter on it."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.conv = nn.Conv1d(width, width, 3, padding=1)
        self.layers = nn.ModuleList([Block(width) for _ in range(2)])
        self.experts = nn.Parameter(torch.randn(4, width, width) * 0.1)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        hidden = hidden + self.conv(hidden.mT).mT
        for layer in self.layers:
            hidden = layer(hidden)
        hidden = hidden + torch.einsum("bsw,ewv->bsv", hidden, self.experts)
        hidden = hidden + self.frozen(hidden) + self.up(self.down(hidden))
        return nn.functional.linear(self.norm(hidden), self.embed.weight)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 64), nn.Linear(64, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.relu(self.up(hidden)))


def build(seed: int, width: int = 32) -> Net:
    torch.manual_seed(seed)
    return Net(width)


def loss_of(model: nn.Module, step: int, replica: int, shard: int, num_shards: int) -> Tensor:
    """The mean over a shard's share of its replica's batch."""
    generator = torch.Generator().manual_seed(100 * step + replica)
    tokens = torch.randint(0, 64, (6, 12), generator=generator).to(next(model.parameters()).device)
    mine = tokens.chunk(num_shards)[shard]
    return nn.functional.cross_entropy(model(mine[:, :-1]).flatten(0, 1), mine[:, 1:].flatten())


def whole(model: nn.Module) -> dict[str, Tensor]:
    """All parameters, gathered."""
    found = {}
    for name, parameter in model.named_parameters():
        value = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        found[name] = value.detach().clone()
    return found


def _sharded(
    rank: int, shape: tuple[int, int], options: dict[str, Any], fsdp: dict[str, Any], width: int
) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    replica, shard = mesh.get_coordinate()
    model, optimizer = distribute(build(replica, width), mesh, fsdp=fsdp, **{**OPTIONS, **options})
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, step, replica, shard, shape[1]).backward()
        optimizer.step()
    return whole(model)


def unsharded(num_replicas: int, options: dict[str, Any], num_shards: int, width: int) -> list[dict[str, Tensor]]:
    """The same on whole replicas, each of which averages over the same shares of its batch."""

    def work(transport: LoopbackTransport) -> dict[str, Tensor]:
        model = models[transport.replica]
        optimizer = DeMo(model.named_parameters(), transport=transport, **{**OPTIONS, **options})
        for step in range(4):
            optimizer.zero_grad()
            for shard in range(num_shards):
                with optimizer.accumulate() if shard < num_shards - 1 else nullcontext():
                    (loss_of(model, step, transport.replica, shard, num_shards) / num_shards).backward()
            optimizer.step()
        return whole(model)

    models = [build(replica, width) for replica in range(num_replicas)]
    return run_replicas(work, num_replicas)


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).abs().max()) for name in found)


TWO_BY_TWO: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"update": "sgd", "values": "float32"}, {}),
    ({"update": "adamw", "values": "int8", "num_buckets": 3, "overlap": True}, {"reshard_after_forward": False}),
]


def _all_on_four_ranks(rank: int) -> dict[str, Any]:
    """Starting processes takes longer than what they do, so they do all of it."""
    return {
        "two by two": [_sharded(rank, (2, 2), options, fsdp, 32) for options, fsdp in TWO_BY_TWO],
        "given gradients": _given_gradients(rank, (2, 2), 32),
        "tensor parallel": _tensor_parallel(rank),
        "both": _both(rank),
        **{policy: _nan_on_one(rank, policy) for policy in ("raise", "skip")},
        "clipped": _clipped(rank),
        "one fails": _one_fails(rank),
        "one stays away": _one_stays_away(rank),
    }


@pytest.fixture(scope="session")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Run once, whichever workers share the tests among them."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "four_ranks.pt"
    with FileLock(f"{shared}.lock"):
        if not shared.exists():
            torch.save(run_ranks(_all_on_four_ranks, 4), shared)
    found: list[dict[str, Any]] = torch.load(shared, weights_only=True)
    return found


@pytest.mark.parametrize("place", range(len(TWO_BY_TWO)))
def test_two_by_two_ends_where_two_whole_replicas_end(place: int, four_ranks: list[dict[str, Any]]) -> None:
    results = [rank["two by two"][place] for rank in four_ranks]
    expected = unsharded(2, TWO_BY_TWO[place][0], 2, 32)
    for result in results:
        assert difference(result, results[0]) == 0, "ranks differ"
        # The chunks are the same; a mean over shards may be added in another order than autograd adds.
        assert difference(result, expected[0]) < 1e-5


def test_uneven_and_empty_shards_train() -> None:
    """22 rows over 3 ranks, 4 experts over 3, 4 rows of the adapter over 3: parts that no chunk ends between."""
    results = run_ranks(_sharded, 3, (1, 3), {"update": "sgd", "values": "float32"}, {}, 22)
    for result in results:
        assert difference(result, results[0]) == 0
        start = whole(build(0, 22))
        assert all(torch.equal(result[name], start[name]) == name.startswith("frozen") for name in start)


def _given_gradients(rank: int, shape: tuple[int, int], width: int) -> dict[str, Tensor]:
    """Gradients that are the same to the bit, whole or sharded: only the optimizer is compared. On the way a second model
    takes over from checkpoints, each rank from its own."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    replica, _ = mesh.get_coordinate()
    model, optimizer = distribute(build(0, width), mesh, **OPTIONS)
    for step in range(4):
        if step == 2:
            other, its_optimizer = distribute(build(9, width), mesh, **OPTIONS)
            other.load_state_dict(model.state_dict())
            its_optimizer.load_state_dict(optimizer.state_dict())
            model, optimizer = other, its_optimizer
        set_gradients(model, step, replica)
        optimizer.step()
    return whole(model)


def set_gradients(model: nn.Module, step: int, replica: int) -> None:
    generator = torch.Generator().manual_seed(50 * step + replica)
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=generator)
        if parameter.requires_grad:
            is_sharded = isinstance(parameter, DTensor)
            parameter.grad = (
                distribute_tensor(gradient, parameter.device_mesh, parameter.placements) if is_sharded else gradient
            )


def test_aligned_shards_give_the_same_bits(four_ranks: list[dict[str, Any]]) -> None:
    def work(transport: LoopbackTransport) -> dict[str, Tensor]:
        optimizer = DeMo(models[transport.replica].named_parameters(), transport=transport, **OPTIONS)
        for step in range(4):
            set_gradients(models[transport.replica], step, transport.replica)
            optimizer.step()
        return whole(models[transport.replica])

    models = [build(0, 32) for _ in range(2)]
    expected = run_replicas(work, 2)[0]
    for rank in four_ranks:
        unequal = [name for name in expected if not torch.equal(rank["given gradients"][name], expected[name])]
        assert unequal == []


def _tensor_parallel(rank: int) -> tuple[dict[str, Tensor], str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "tp"))
    replica, _ = mesh.get_coordinate()
    model = build(0)
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model, optimizer = distribute(model, mesh, update="sgd", values="float32", **OPTIONS)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, step, replica, 0, 1).backward()
        optimizer.step()
    return whole(model), str(type(model.layers[0].up.weight).__name__)  # type: ignore[union-attr, index]


def test_tensor_parallel_ends_where_two_whole_replicas_end(four_ranks: list[dict[str, Any]]) -> None:
    results = [rank["tensor parallel"] for rank in four_ranks]
    expected = unsharded(2, {"update": "sgd", "values": "float32"}, 1, 32)
    for result, kind in results:
        assert kind == "DTensor"
        assert difference(result, results[0][0]) == 0
        assert difference(result, expected[0]) < 1e-4


def _both(rank: int) -> tuple[dict[str, Tensor], int]:
    """FSDP2 over tensor parallel, from the meta device, with a mixed precision policy."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
    with torch.device("meta"):
        model = Net()
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})

    def initialise(model: nn.Module) -> None:
        torch.manual_seed(0)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.1)

    policy = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
    model, optimizer = distribute(model, mesh, initialise=initialise, fsdp=policy, **OPTIONS)
    before = whole(model)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, step, 0, mesh.get_coordinate()[1], 2).backward()
        optimizer.step()
    after = whole(model)
    return after, sum(not torch.equal(before[name], after[name]) for name in after)


def test_fsdp_over_tensor_parallel_from_the_meta_device(four_ranks: list[dict[str, Any]]) -> None:
    results = [rank["both"] for rank in four_ranks]
    for result, num_changed in results:
        assert difference(result, results[0][0]) == 0
        assert num_changed == len(result) - 2  # all but the frozen layer's two


def _nan_on_one(rank: int, policy: str) -> tuple[str, dict[str, Tensor], int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    replica, shard = mesh.get_coordinate()
    model, optimizer = distribute(build(0), mesh, on_nonfinite=policy, **OPTIONS)
    said, before = "", whole(model)
    for step in range(3):
        set_gradients(model, step, replica)
        if step == 1 and (replica, shard) == (1, 1):
            model.conv.weight.grad.to_local()[0, 0, 0] = torch.nan  # type: ignore[union-attr, operator]
        try:
            optimizer.step()
        except NonFiniteGradientError as error:
            said = str(error)
    assert difference(whole(model), before) > 0
    return said, whole(model), optimizer.num_steps


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_nan_on_one_rank_is_one_decision_on_the_whole_mesh(policy: str, four_ranks: list[dict[str, Any]]) -> None:
    results = [rank[policy] for rank in four_ranks]
    for said, parameters, num_steps in results:
        assert num_steps == 2
        assert difference(parameters, results[0][1]) == 0
        assert said.startswith("replica 1 has NaN or Inf in the gradient of conv.weight at step 2") == (policy == "raise")


def _clipped(rank: int) -> str:
    """Clipping after backward, when overlap has sent the gradients."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, optimizer = distribute(build(0), mesh, overlap=True, **OPTIONS)
    replica, shard = mesh.get_coordinate()
    loss_of(model, 0, replica, shard, 2).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    try:
        optimizer.step()
    except ThinwireError as error:
        return str(error)
    return "no error"


def test_clipping_after_sending_is_noticed(four_ranks: list[dict[str, Any]]) -> None:
    for rank in four_ranks:
        assert "changed after it was sent" in rank["clipped"]


def _one_fails(rank: int) -> tuple[str, dict[str, Tensor], int]:
    """An error on one rank, before it has sent anything."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    replica, _ = mesh.get_coordinate()
    model, optimizer = distribute(build(0), mesh, timeout_seconds=5, **OPTIONS)
    said = ""
    for step in range(3):
        set_gradients(model, step, replica)
        attempt = optimizer._attempt
        if step == 1 and rank == 3:
            optimizer._attempt = _no_room  # type: ignore[method-assign]
        try:
            optimizer.step()
        except (ThinwireError, MemoryError) as error:
            said = f"{type(error).__name__}: {error}"
            break
        finally:
            optimizer._attempt = attempt  # type: ignore[method-assign]
    return said, whole(model), optimizer.num_steps


def _no_room() -> None:
    raise MemoryError("no room")


def test_a_failure_on_one_rank_stops_all_at_the_same_step(four_ranks: list[dict[str, Any]]) -> None:
    results = [rank["one fails"] for rank in four_ranks]
    for said, parameters, num_steps in results:
        assert num_steps == 1
        assert difference(parameters, results[0][1]) == 0
        assert said
    assert results[3][0] == "MemoryError: no room"
    assert "another rank of this replica could not take step 2" in results[2][0]


def _one_stays_away(rank: int) -> list[str]:
    """Rank 1 does not come to what rank 0 wants to decide with it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, _ = distribute(build(0), mesh, **OPTIONS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding, "_TO_TELL_SECONDS", 0.0)
        island = sharding.find_island(model.named_parameters(), (), timeout_seconds=0.5)
    said = []
    for work in (lambda: island.any(True), lambda: _fail_inside(island)) if rank == 0 else ():
        try:
            work()
        except (ExchangeError, MemoryError) as error:
            said.append(str(error))
    return said


def _fail_inside(island: sharding.Island) -> None:
    with island.told_of_failure():
        _no_room()


def test_a_rank_of_this_replica_that_does_not_come_is_named_and_hides_no_error(four_ranks: list[dict[str, Any]]) -> None:
    decision, failure = four_ranks[0]["one stays away"]
    assert "waited for ranks of this replica [1], which did not come or died, after" in decision
    assert failure == "no room"


def test_blocks_are_found_once_and_lists_are_no_blocks() -> None:
    shared = nn.Linear(2, 2)
    model = nn.Module()
    model.layers = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), shared, shared, nn.Identity()])
    assert len(_blocks(model)) == 3


def _refused(rank: int, kind: str) -> str:
    names = ("replicate", "shard") if kind != "names" else ("dp", "shard")
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=names)
    model: nn.Module = build(0)
    options: dict[str, Any] = dict(OPTIONS)
    if kind == "muon":
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=names)
        options["update"] = "muon"
    if kind == "balance":
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=names)
        options["balance"] = 0.9
    if kind == "world":
        mesh = DeviceMesh("cpu", torch.tensor([[rank]]), mesh_dim_names=names)
    if kind == "group":
        options["process_group"] = dist.group.WORLD
    if kind == "meta":
        model = model.to("meta")
    try:
        if kind == "hybrid":
            from torch.distributed.fsdp import fully_shard

            DeMo(fully_shard(model, mesh=mesh).parameters(), process_group=mesh.get_group("replicate"))
        elif kind == "wrong axis":
            from torch.distributed.fsdp import fully_shard

            distribute(fully_shard(model, mesh=mesh["replicate"]), mesh, **options)
        else:
            distribute(model, mesh, **options)
    except ValueError as error:
        return str(error)
    return "no error"


REFUSED = {
    "names": "the mesh needs an axis 'replicate'",
    "world": "the mesh has 1 ranks, and the world 2",
    "group": "process_group follows from the mesh",
    "meta": "pass initialise",
    "hybrid": "are replicas of each other for DeMo",
    "wrong axis": "is a DTensor on the axis 'replicate' already",
    "muon": "update='muon' needs whole matrices",
    "balance": "balance=0.9 needs whole matrices",
}


def _all_refused(rank: int) -> dict[str, str]:
    return {kind: _refused(rank, kind) for kind in REFUSED}


def test_meshes_that_cannot_work_are_refused() -> None:
    for said in run_ranks(_all_refused, 2):
        for kind, words in REFUSED.items():
            assert words in said[kind], kind


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_fsdp2_on_a_gpu(tmp_path: Path, compiled: bool) -> None:
    """One rank, since there is one GPU: DTensor parameters, FSDP2's streams and the fused kernels together."""
    dist.init_process_group("nccl", init_method=(tmp_path / "rendezvous").as_uri(), rank=0, world_size=1)
    try:
        ends = []
        for is_sharded in (True, False):
            model = build(0).cuda()
            options = {**OPTIONS, "backend": "triton", "update": "sgd", "values": "float32"}
            if is_sharded:
                mesh = init_device_mesh("cuda", (1, 1), mesh_dim_names=("replicate", "shard"))
                model, optimizer = distribute(model, mesh, **options)  # type: ignore[assignment]
            else:
                optimizer = DeMo(model.named_parameters(), **options)
            if compiled:
                model.compile()
            for step in range(4):
                optimizer.zero_grad()
                loss_of(model, step, 0, 0, 1).backward()
                optimizer.step()
            ends.append(whole(model))
        assert difference(*ends) < 1e-5
    finally:
        dist.destroy_process_group()
