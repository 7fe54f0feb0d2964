"""Save, stop, load, go on: bit for bit as if nothing had happened, or a clear refusal."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.ranks import run_ranks
from tests.training import build, flat, train, train_step
from thinwire import CheckpointError, DeMo
from thinwire.exchange.loopback import LoopbackTransport, run_replicas
from thinwire.redistribution import assemble

OPTIONS = {"chunk": 16, "topk": 8, "dense_below": 60, "update": "adamw", "weight_decay": 0.1}


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    """As `torch.save` and a safe `torch.load` see it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def restore(replica: int, saved: tuple[dict[str, Tensor], dict[str, Any]], **options: Any) -> tuple[nn.Module, DeMo]:
    model = build(99 + replica)
    optimizer = DeMo(model.named_parameters(), lr=0.5, **{**OPTIONS, **options})
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    return model, optimizer


@pytest.mark.parametrize("momentum_dtype", ["float32", "bfloat16"])
def test_one_replica_goes_on_exactly(momentum_dtype: str) -> None:
    whole, _, _ = train(0, 10, **OPTIONS, momentum_dtype=momentum_dtype)
    model, optimizer, _ = train(0, 5, **OPTIONS, momentum_dtype=momentum_dtype)
    saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    model, optimizer = restore(0, (saved["model"], saved["optimizer"]), momentum_dtype=momentum_dtype)
    assert optimizer.num_steps == 5
    assert optimizer.param_groups[0]["lr"] == 1e-2
    for step in range(5, 10):
        train_step(model, optimizer, step, 0)
    assert torch.equal(flat(model), flat(whole))


def test_bfloat16_parameters_keep_float32_momentum_through_a_checkpoint() -> None:
    parameter = nn.Parameter(torch.randn(20, 20).bfloat16())
    optimizer = DeMo([parameter], chunk=8, topk=4, dense_below=0)
    parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    other = DeMo([nn.Parameter(parameter.detach().clone())], chunk=8, topk=4, dense_below=0)
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    (mine,), (theirs,) = optimizer.state.values(), other.state.values()
    assert theirs["momentum"].dtype == torch.float32
    assert torch.equal(mine["momentum"], theirs["momentum"])


def _save(rank: int, folder: str) -> Tensor:
    model, optimizer, _ = train(rank, 5, **OPTIONS)
    torch.save([model.state_dict(), optimizer.state_dict()], Path(folder, f"{rank}.pt"))
    for step in range(5, 9):
        train_step(model, optimizer, step, rank)
    return flat(model)


def _resume(rank: int, folder: str) -> Tensor:
    model, optimizer = restore(rank, torch.load(Path(folder, f"{rank}.pt"), weights_only=True))
    for step in range(5, 9):
        train_step(model, optimizer, step, rank)
    return flat(model)


def test_two_ranks_go_on_exactly_in_new_processes(tmp_path: Path) -> None:
    uninterrupted = run_ranks(_save, 2, str(tmp_path))
    resumed = run_ranks(_resume, 2, str(tmp_path))
    for before, after in zip(uninterrupted, resumed, strict=True):
        assert torch.equal(before, after)


def two_replicas(work: Any) -> list[Any]:
    def one(transport: LoopbackTransport) -> Any:
        return work(transport.replica, train(transport.replica, 4, transport=transport, **OPTIONS)[1])

    return run_replicas(one, 2)


def snapshot(optimizer: DeMo) -> list[Tensor]:
    tensors = [value.clone() for state in optimizer.state.values() for value in state.values()]
    return [*tensors, torch.tensor([group["lr"] for group in optimizer.param_groups])]


def refuse(optimizer: DeMo, state: Any, words: str, **policy: str) -> None:
    before = snapshot(optimizer)
    with pytest.raises(CheckpointError, match=words):
        optimizer.load_state_dict(state, **policy)
    for old, new in zip(before, snapshot(optimizer), strict=True):
        assert torch.equal(old, new), "a refused checkpoint changed the optimizer"


def test_other_replicas_counts_plans_and_files_are_refused_and_change_nothing() -> None:
    states = two_replicas(lambda _, optimizer: through_a_file(optimizer.state_dict()))
    _, alone, _ = train(0, 4, **OPTIONS)
    refuse(alone, states[0], "number of replicas is 2, this optimizer's is 1")
    two_replicas(lambda replica, optimizer: refuse(optimizer, states[1 - replica], f"replica is {1 - replica}"))
    _, other, _ = train(0, 1, **{**OPTIONS, "topk": 9})
    refuse(other, alone.state_dict(), r"it has \[group 0 topk: 8\], this optimizer has \[group 0 topk: 9\]")
    _, other, _ = train(0, 1, **{**OPTIONS, "chunk": 8})
    refuse(other, alone.state_dict(), "as momentum of parameter", residual="keep")
    refuse(alone, {"state": {}, "param_groups": []}, "not a checkpoint of thinwire.DeMo")
    refuse(alone, torch.optim.AdamW(build().parameters()).state_dict(), "not a checkpoint of thinwire.DeMo")
    refuse(alone, {**alone.state_dict(), "thinwire": {"format": 9}}, "format 9")
    refuse(alone, {**alone.state_dict(), "param_groups": []}, "groups hold")
    refuse(alone, {**alone.state_dict(), "thinwire": []}, "format None")
    refuse(alone, {**alone.state_dict(), "thinwire": {**alone.state_dict()["thinwire"], "plan": 3}}, "3 as plan")
    for name, value in {"lr": -1.0, "num_steps": "7", "momentum_decay": 2.0, "betas": 3}.items():
        spoilt = alone.state_dict()
        spoilt["param_groups"][0] = {**spoilt["param_groups"][0], name: value}
        refuse(alone, spoilt, f"group 0 of the checkpoint: {name}")
    spoilt = through_a_file(alone.state_dict())
    spoilt["state"][1]["momentum"][0, 0] = torch.nan
    refuse(alone, spoilt, "NaN or Inf in momentum of parameter 1")
    lost = alone.state_dict()
    lost["state"] = {index: {"momentum": state["momentum"]} for index, state in lost["state"].items()}
    refuse(alone, lost, "nothing as second_moment of parameter 0")
    with pytest.raises(ValueError, match=r"residual='kep'.*did you mean 'keep'"):
        alone.load_state_dict(alone.state_dict(), residual="kep")


def test_a_tensor_learning_rate_is_not_shared_with_the_checkpoint() -> None:
    _, optimizer, _ = train(0, 1, **OPTIONS)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
    saved = optimizer.state_dict()
    _, other, _ = train(0, 1, **OPTIONS)
    other.load_state_dict(saved)
    other.param_groups[0]["lr"].mul_(0.1)
    assert float(optimizer.param_groups[0]["lr"]) == float(saved["param_groups"][0]["lr"]) == 0.5


def test_a_rule_that_changed_while_a_layer_was_frozen_does_not_matter_to_a_checkpoint() -> None:
    model, optimizer, _ = train(0, 2, **OPTIONS)
    model.wide.requires_grad_(False)
    optimizer.param_groups[0]["update"] = "lion"
    train_step(model, optimizer, 2, 0)
    optimizer.load_state_dict(optimizer.state_dict())
    train_step(model, optimizer, 3, 0)
    assert optimizer.num_steps == 4


def test_the_residual_may_be_kept_or_dropped_by_choice() -> None:
    states = two_replicas(lambda _, optimizer: through_a_file(optimizer.state_dict()))
    _, alone, _ = train(0, 1, **OPTIONS)
    alone.load_state_dict(states[1], residual="keep")
    for mine, saved in zip(alone.state.values(), states[1]["state"].values(), strict=True):
        assert torch.equal(mine["momentum"], saved["momentum"])
    alone.load_state_dict(states[0], residual="zero")
    for mine, saved in zip(alone.state.values(), states[0]["state"].values(), strict=True):
        assert not mine["momentum"].any()
        assert torch.equal(mine["second_moment"], saved["second_moment"])
    assert alone.num_steps == 4


def test_a_parameter_frozen_for_a_while_keeps_its_momentum_through_a_checkpoint() -> None:
    model, optimizer, _ = train(0, 3, **OPTIONS)
    model.wide.requires_grad_(False)
    saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    again = build(5)
    again.wide.requires_grad_(False)
    other = DeMo(again.parameters(), lr=1.0, **OPTIONS)  # without names: they are not part of the plan
    again.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    for net, opt in ((model, optimizer), (again, other)):
        train_step(net, opt, 3, 0)
        net.wide.requires_grad_(True)
        train_step(net, opt, 4, 0)
    assert torch.equal(flat(model), flat(again))


def test_a_layer_that_was_unfrozen_and_frozen_again_goes_back_to_before() -> None:
    model = build(0)
    model.wide.requires_grad_(False)
    optimizer = DeMo(model.parameters(), lr=1e-2, **OPTIONS)
    train_step(model, optimizer, 0, 0)
    saved = through_a_file(optimizer.state_dict())
    model.wide.requires_grad_(True)
    train_step(model, optimizer, 1, 0)
    model.wide.requires_grad_(False)
    optimizer.load_state_dict(saved)
    assert model.wide.weight not in optimizer.state
    assert optimizer.num_steps == 1
    model.wide.requires_grad_(True)
    train_step(model, optimizer, 1, 0)


def test_a_layer_frozen_before_its_rule_changed_is_assembled() -> None:
    model, optimizer, _ = train(0, 2, **{**OPTIONS, "update": "sign"})
    model.wide.requires_grad_(False)
    optimizer.param_groups[0]["update"] = "adamw"
    train_step(model, optimizer, 2, 0)
    saved = through_a_file(optimizer.state_dict())
    assembled = assemble(optimizer, [saved], "keep")
    optimizer.load_state_dict(assembled)
    for index, state in saved["state"].items():
        assert assembled["state"][index].keys() == state.keys()
        assert torch.equal(assembled["state"][index]["momentum"], state["momentum"])


def test_load_hooks_see_the_checkpoint_and_the_result() -> None:
    _, optimizer, _ = train(0, 2, **OPTIONS)
    _, other, _ = train(0, 1, **OPTIONS)
    seen: list[Any] = []
    other.register_load_state_dict_pre_hook(lambda _, state: seen.append(len(state["state"])))
    other.register_load_state_dict_post_hook(lambda opt: seen.append((opt.num_steps, len(opt.state))))
    other.load_state_dict(optimizer.state_dict())
    assert seen == [len(optimizer.state), (2, len(optimizer.state))]


def test_every_replica_has_the_same_keys_even_before_the_first_step() -> None:
    def keys(transport: LoopbackTransport) -> list[tuple[int, list[str]]]:
        optimizer = DeMo(build().parameters(), transport=transport, update="adamw")
        return [(index, sorted(state)) for index, state in optimizer.state_dict()["state"].items()]

    first, second = run_replicas(keys, 2)
    assert first == second
    assert len(first) == len(list(build().parameters()))
