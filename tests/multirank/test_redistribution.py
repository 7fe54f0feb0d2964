"""What was saved on one mesh goes on there exactly, and on another by a policy that keeps what it promises."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests import training
from tests.multirank.test_sharded import OPTIONS, build, loss_of, whole
from tests.ranks import run_ranks
from thinwire import CheckpointError, DeMo, DriftError
from thinwire.core.layout import plan_layout
from thinwire.exchange.loopback import LoopbackTransport, run_replicas
from thinwire.exchange.sharding import local_of
from thinwire.parallel.distributed_checkpoint import async_save, load, save
from thinwire.parallel.sharded import distribute
from thinwire.planning import specs_of
from thinwire.redistribution import _elements, assemble, shares_of

RULE: dict[str, Any] = {**OPTIONS, "update": "adamw", "values": "float32"}


def residuals(optimizer: DeMo, kind: str = "momentum") -> dict[str, Tensor]:
    """What the momentum means for every whole tensor, zero where this rank holds none of it; or a moment of the rule."""
    found = {}
    for number, group in enumerate(optimizer.param_groups):
        for spec, parameter in specs_of(group, number):
            if parameter not in optimizer.state:
                continue
            layout = plan_layout(spec.shape, group["chunk"], group["dense_below"], group["layout"], spec.part)
            state = optimizer.state[parameter][kind].double()
            elements = _elements(state, layout) if kind == "momentum" else state.view(spec.shape)
            if spec.part is not None:
                whole_tensor = torch.zeros(spec.part.whole_shape, dtype=torch.float64)
                places = zip(spec.part.offset, spec.shape, strict=True)
                whole_tensor[tuple(slice(first, first + size) for first, size in places)] = elements
                elements = whole_tensor
            found[spec.name] = elements
    return found


def total(optimizer: DeMo, kind: str = "momentum") -> dict[str, Tensor]:
    """The sum over all ranks; every part must be on one rank of a replica only."""
    sums = residuals(optimizer, kind)
    for tensor in sums.values():
        dist.all_reduce(tensor)
    return sums


def make(shape: tuple[int, int], seed: int) -> tuple[nn.Module, DeMo]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    return distribute(build(seed), mesh, **RULE)


def take_steps(model: nn.Module, optimizer: DeMo, first: int, last: int, num_shards: int) -> None:
    replica, shard = divmod(dist.get_rank(), num_shards)
    for step in range(first, last):
        optimizer.zero_grad()
        loss_of(model, step, replica, shard, num_shards).backward()
        optimizer.step()


def _save_and_load(rank: int, folder: str) -> dict[str, Any]:
    path = Path(folder)
    model, optimizer = make((2, 2), 0)
    take_steps(model, optimizer, 0, 3, 2)
    save(path / "first", model, optimizer, {"step": 3, "order": torch.arange(3)})
    saving = async_save(path / "second", model, optimizer)
    before, sums, moments = whole(model), total(optimizer), total(optimizer, "second_moment")
    take_steps(model, optimizer, 3, 5, 2)
    saving.wait()

    again, other = make((2, 2), 7)
    results: dict[str, Any] = {"extra": load(path / "first", again, other)}
    take_steps(again, other, 3, 5, 2)
    pairs = zip(whole(model).values(), whole(again).values(), strict=True)
    results["exact"] = all(torch.equal(*pair) for pair in pairs)
    momenta = zip(residuals(optimizer).values(), residuals(other).values(), strict=True)
    results["exact momenta"] = all(torch.equal(*pair) for pair in momenta)
    load(path / "second", again, other)
    # What was written is what was there when it began, not what training has made of it since.
    results["async"] = all(torch.equal(*pair) for pair in zip(whole(again).values(), before.values(), strict=True))

    for policy in ("sum", "mean", "keep", "zero"):
        model, optimizer = make((4, 1), 9)
        load(path / "first", model, optimizer, residual=policy)
        results[f"{policy} parameters"] = all(
            torch.equal(*pair) for pair in zip(whole(model).values(), before.values(), strict=True)
        )
        factor = {"sum": 1.0, "mean": 2.0, "keep": 1.0, "zero": 0.0}[policy]
        pairs = zip(total(optimizer).values(), sums.values(), strict=True)
        results[policy] = max(float((found - factor * wanted).abs().max()) for found, wanted in pairs)
        # The rule's moments are the same on all replicas, of which there are twice as many now.
        pairs = zip(total(optimizer, "second_moment").values(), moments.values(), strict=True)
        results["moments"] = all(torch.allclose(found, 2 * wanted, rtol=1e-12) for found, wanted in pairs)
        assert optimizer.num_steps == 3
        take_steps(model, optimizer, 3, 5, 1)

    # Three axes: shards of shards, of which torch says that they are not shards.
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
    model, optimizer = three_axes(mesh, 11)
    load(path / "first", model, optimizer, residual="sum")
    save(
        path / "three axes", model, optimizer, {"#1": 1, 2: [torch.ones(1)], "a/b": torch.ones(2), "a": {"b": torch.ones(3)}}
    )
    model, optimizer = three_axes(mesh, 12)
    extra = load(path / "three axes", model, optimizer)
    results["three axes"] = all(
        torch.allclose(*pair) for pair in zip(whole(model).values(), before.values(), strict=True)
    ) and (extra["#1"], len(extra[2][0]), len(extra["a/b"]), len(extra["a"]["b"])) == (1, 1, 2, 3)

    messages = []
    model, optimizer = make((2, 2), 9)
    results["same"] = optimizer.check_drift()
    if rank == 3:
        local_of(model.experts).data.view(-1).view(torch.int32)[3] ^= 1
    try:
        optimizer.check_drift()
    except DriftError as error:
        results["drift"] = str(error)
    model, optimizer = make((4, 1), 9)
    for name, more in (("first", {}), ("nowhere", {"residual": "zero"})):
        try:
            load(path / name, model, optimizer, **more)
        except CheckpointError as error:
            messages.append(str(error))
    try:
        save(path / "first", model, optimizer)
    except CheckpointError as error:
        messages.append(str(error))
    return {**results, "messages": messages}


def three_axes(mesh: DeviceMesh, seed: int) -> tuple[nn.Module, DeMo]:
    model = build(seed)
    plan = {f"layers.{i}.up": ColwiseParallel() for i in range(2)} | {
        f"layers.{i}.down": RowwiseParallel() for i in range(2)
    }
    parallelize_module(model, mesh["tp"], plan)
    return distribute(model, mesh, **RULE)


def _load_on_two(rank: int, folder: str) -> dict[str, float]:
    results: dict[str, float] = {}
    model, optimizer = make((1, 2), 3)
    load(Path(folder) / "first", model, optimizer, residual="sum")
    results["norm"] = float(sum(tensor.norm() for tensor in total(optimizer).values()))
    take_steps(model, optimizer, 3, 5, 2)
    # Tensor parallel: norms and the like are on both ranks, and must be counted once.
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "tp"))
    model = build(5)
    plan = {f"layers.{i}.up": ColwiseParallel() for i in range(2)} | {
        f"layers.{i}.down": RowwiseParallel() for i in range(2)
    }
    parallelize_module(model, mesh["tp"], plan)
    model, optimizer = distribute(model, mesh, **RULE)
    load(Path(folder) / "first", model, optimizer, residual="sum")
    save(Path(folder) / "tp", model, optimizer)
    results["norm of a copy"] = float(residuals(optimizer)["norm.weight"].norm())
    model, optimizer = make((2, 1), 3)
    load(Path(folder) / "tp", model, optimizer, residual="sum")
    results["norm of both halves"] = float(total(optimizer)["norm.weight"].norm())
    results["norm after tp"] = float(sum(tensor.norm() for tensor in total(optimizer).values()))
    return results


def test_other_meshes(tmp_path: Path) -> None:
    everyone = run_ranks(_save_and_load, 4, str(tmp_path))
    for rank, results in enumerate(everyone):
        assert results["extra"]["step"] == 3
        assert results["extra"]["order"].tolist() == [0, 1, 2]
        assert results["exact"]
        assert results["exact momenta"]
        assert results["async"]
        assert results["moments"]
        assert results["three axes"]
        # Ranks 1 and 3 hold the shard that differs; the others hear of it inside their replica.
        assert results["same"]
        apart = "after step 0 replicas [1] hold other parameters than replicas [0], first of all in experts"
        assert results["drift"].startswith(apart if rank in (1, 3) else "after step 0 another rank of this replica")
        for policy in ("sum", "mean", "keep", "zero"):
            assert results[f"{policy} parameters"]
            assert results[policy] < 1e-5, (policy, rank)
        mismatch, missing, again = results["messages"]
        assert "the checkpoint was made with another plan" in mismatch or "number of replicas is 2" in mismatch
        assert "nowhere is not there" in missing
        assert "first is there already" in again
    results = run_ranks(_load_on_two, 2, str(tmp_path))
    for result in results:
        assert result["norm"] > 0.1
        assert result["norm after tp"] == pytest.approx(result["norm"], rel=1e-5)
        assert result["norm of both halves"] == pytest.approx(result["norm of a copy"], rel=1e-5)
    damaged = next((tmp_path / "tp" / "model").iterdir())
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    model = build(0)
    with pytest.raises(CheckpointError, match="is damaged"):
        load(tmp_path / "tp", model, DeMo(model.named_parameters(), **RULE), residual="zero")
    damaged.unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        load(tmp_path / "tp", model, DeMo(model.named_parameters(), **RULE), residual="zero")


def test_alone_with_what_is_empty_or_frozen_for_a_while(tmp_path: Path) -> None:
    """One process, without any group."""
    model = nn.Module()
    model.first, model.second = nn.Linear(8, 8), nn.Linear(8, 8)
    model.nothing = nn.Parameter(torch.empty(0, 4))
    optimizer = DeMo(model.named_parameters(), dense_below=0, chunk=4, topk=2)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    momentum = optimizer.state[model.first.weight]["momentum"].clone()
    save(tmp_path / "saved", model, optimizer)
    model.first.requires_grad_(False)
    other = DeMo(model.named_parameters(), dense_below=0, chunk=4, topk=2)
    load(tmp_path / "saved", model, other, residual="keep")
    assert momentum.any()
    assert torch.equal(other.state[model.first.weight]["momentum"], momentum)
    model.first.requires_grad_(True)
    other.step()
    assert other.num_steps == 2
    with pytest.raises(CheckpointError, match="saved is there already"):
        save(tmp_path / "saved", model, optimizer)
    with pytest.raises(CheckpointError, match="a key of a saved dict is True"):
        save(tmp_path / "odd", model, optimizer, {True: 1})
    assert not list(tmp_path.glob("odd*"))


def test_model_files_that_no_rank_lists_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(8, 8)
    optimizer = DeMo(model.named_parameters())
    saving = async_save(tmp_path / "saved", model, optimizer)
    saving.wait()
    saving.wait()
    shutil.copytree(tmp_path / "saved" / "rank-0", tmp_path / "saved" / "rank-0.bak")
    load(tmp_path / "saved", model, optimizer)
    shutil.copytree(tmp_path / "saved", tmp_path / "unlisted")
    listing = tmp_path / "unlisted" / "files-0.json"
    facts = {name: fact for name, fact in json.loads(listing.read_text()).items() if not name.startswith("model")}
    listing.write_text(json.dumps(facts))
    with pytest.raises(CheckpointError, match="no rank's list of files names one of model"):
        load(tmp_path / "unlisted", model, optimizer)
    (written,) = (tmp_path / "saved" / "model").iterdir()
    shutil.copy(written, written.with_name("another.safetensors"))
    with pytest.raises(CheckpointError, match=r"another\.safetensors was not written with this checkpoint"):
        load(tmp_path / "saved", model, optimizer)


def test_shares() -> None:
    """Whatever the numbers, all that was saved is dealt out once."""
    for num_saved in range(1, 7):
        for num_replicas in range(1, 7):
            dealt = dict.fromkeys(range(num_saved), 0.0)
            for replica in range(num_replicas):
                for source, share in shares_of("sum", replica, num_replicas, num_saved).items():
                    dealt[source] += share
            assert dealt == pytest.approx(dict.fromkeys(range(num_saved), 1.0))
    assert shares_of("mean", 0, 1, 4) == dict.fromkeys(range(4), 0.25)
    assert shares_of("mean", 3, 4, 2) == {1: 1.0}
    assert [shares_of("keep", replica, 3, 2) for replica in range(3)] == [{0: 1.0}, {1: 1.0}, {}]
    assert shares_of("zero", 0, 1, 1) == {}


def replicas(num_replicas: int, states: list[dict[str, Any]] | None, residual: str, **others: Any) -> list[dict[str, Any]]:
    """State dicts after a few steps, or right after loading."""

    def work(transport: LoopbackTransport) -> dict[str, Any]:
        model = training.build()
        options: dict[str, Any] = {"chunk": 16, "topk": 8, "dense_below": 60, **others}
        optimizer = DeMo(model.named_parameters(), lr=1e-2, transport=transport, **options)
        if states is not None:
            optimizer.load_state_dict(assemble(optimizer, states, residual))
            return optimizer.state_dict()
        for step in range(3):
            training.train_step(model, optimizer, step, transport.replica)
        return optimizer.state_dict()

    return run_replicas(work, num_replicas)


def test_more_and_fewer_replicas_with_the_same_chunks_keep_every_coefficient() -> None:
    saved = replicas(3, None, "")
    for num_replicas in (1, 2, 5):
        loaded = replicas(num_replicas, saved, "sum")
        for index in saved[0]["state"]:
            before = torch.stack([state["state"][index]["momentum"].double() for state in saved]).sum(0)
            after = torch.stack([state["state"][index]["momentum"].double() for state in loaded]).sum(0)
            assert torch.allclose(after, before, rtol=1e-6, atol=1e-7)
    kept = replicas(2, saved, "keep")
    for index in saved[0]["state"]:
        assert torch.equal(kept[1]["state"][index]["momentum"], saved[1]["state"][index]["momentum"])


@pytest.mark.parametrize("exchange", ["owner", "all_gather"])
def test_what_owners_had_not_sent_is_momentum_of_more_and_fewer_replicas(exchange: str) -> None:
    options = {"values": "float32", "combine": "mean_over_replicas"}
    saved = replicas(3, None, "", exchange="owner", **options)
    for num_replicas in (1, 2, 5):
        loaded = replicas(num_replicas, saved, "sum", exchange=exchange, **options)
        for index in saved[0]["state"]:
            before = torch.stack([state["state"][index]["momentum"].double() for state in saved]).sum(0)
            before += 3 * torch.cat([state["state"][index]["owner_residual"].double() for state in saved])
            after = torch.stack([state["state"][index]["momentum"].double() for state in loaded]).sum(0)
            assert torch.allclose(after, before, rtol=1e-6, atol=1e-6)


def test_what_is_missing_or_other_is_named() -> None:
    saved = replicas(2, None, "")
    with pytest.raises(CheckpointError, match=r"0 of the 1 elements of scale that this rank needs of saved replica 1"):
        replicas(1, saved[:1], "sum")
    with pytest.raises(CheckpointError, match="there is no saved state"):
        replicas(1, [], "sum")
    with pytest.raises(ValueError, match="residual='half'"):
        replicas(1, saved, "half")
    other = [{**state, "param_groups": [{**state["param_groups"][0], "update": "lion"}]} for state in saved]
    with pytest.raises(CheckpointError, match="group 0 was trained with update='lion', and now has 'sign'"):
        replicas(1, other, "sum")
