"""`DeMo` as a torch optimizer, with one replica."""

import copy
import inspect
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR

from tests.training import SmallNet, build, flat, train, train_step
from thinwire import DeMo, NonFiniteGradientError, disable_gradient_sync
from thinwire.core.update_rules import UPDATE_RULES
from thinwire.exchange.traffic import Count
from thinwire.exchange.transport import SoloTransport
from thinwire.training import recipes


def one(shape: tuple[int, ...] = (8, 8), **options: Any) -> tuple[nn.Parameter, DeMo]:
    parameter = nn.Parameter(torch.randn(shape))
    parameter.grad = torch.randn(shape)
    return parameter, DeMo([parameter], **{"lr": 0.1, "chunk": 4, "topk": 4, "dense_below": 0, **options})


def test_it_learns() -> None:
    _, _, losses = train(0, 60)
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])


@pytest.mark.parametrize("update", sorted(UPDATE_RULES))
def test_every_rule_knows_which_values_are_its_own(update: str) -> None:
    parameter, optimizer = one((8, 8), update=update, values="auto")
    optimizer.step()
    assert parameter.isfinite().all()


@pytest.mark.parametrize("update", sorted(UPDATE_RULES))
def test_every_rule_learns(update: str) -> None:
    _, _, losses = train(0, 60, update=update, values="sign_scale")
    assert sum(losses[-10:]) < sum(losses[:10])


@pytest.mark.parametrize(
    "shape", [(), (1,), (7,), (1009,), (3, 5), (1, 1), (64, 3, 7, 7), (2, 40, 40), (0,), (4, 0), (5, 1, 3)]
)
def test_every_shape_trains(shape: tuple[int, ...]) -> None:
    for dense_below in (0, 4096):
        parameter, optimizer = one(shape, dense_below=dense_below, chunk=16)
        before = parameter.detach().clone()
        optimizer.step()
        assert torch.isfinite(parameter).all()
        if parameter.numel():
            assert not torch.equal(parameter.detach(), before)


def test_gradients_are_left_as_they_were() -> None:
    model, optimizer, _ = train(0, 2, weight_decay=0.1, maximize=True)
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    optimizer.step()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_missing_gradients_count_as_zero() -> None:
    used, unused = nn.Parameter(torch.ones(8, 8)), nn.Parameter(torch.ones(8, 8))
    optimizer = DeMo([used, unused], lr=0.1, chunk=4, topk=4, dense_below=0)
    used.grad = torch.randn(8, 8)
    optimizer.step()
    assert torch.equal(unused, torch.ones(8, 8))
    assert not torch.equal(used, torch.ones(8, 8))
    momentum = optimizer.state[used]["momentum"].clone()
    used.grad = None
    optimizer.step()
    assert optimizer.state[used]["momentum"].abs().sum() < momentum.abs().sum()


def test_frozen_parameters_are_not_sent_until_they_are_unfrozen() -> None:
    model = build()
    model.wide.requires_grad_(False)
    optimizer = DeMo(model.parameters(), lr=1e-2, chunk=16, topk=8)
    small = optimizer.plan.payload_bytes
    assert model.wide.weight not in optimizer.state
    train_step(model, optimizer, 0, 0)
    model.wide.requires_grad_(True)
    before = model.wide.weight.detach().clone()
    train_step(model, optimizer, 1, 0)
    assert optimizer.plan.payload_bytes > small
    assert not torch.equal(model.wide.weight, before)


def test_a_tensor_in_channels_last_order_trains_like_a_contiguous_one() -> None:
    torch.manual_seed(0)
    plain = nn.Parameter(torch.randn(16, 8, 3, 3))
    other = nn.Parameter(plain.detach().clone().to(memory_format=torch.channels_last))
    gradient = torch.randn(16, 8, 3, 3)
    for parameter in (plain, other):
        parameter.grad = gradient.to(memory_format=torch.channels_last)
        DeMo([parameter], lr=0.1, chunk=8, topk=8, dense_below=0).step()
    assert torch.equal(plain, other)
    assert other.is_contiguous(memory_format=torch.channels_last)


def test_groups_have_their_own_settings() -> None:
    slow, fast = nn.Parameter(torch.zeros(8, 8)), nn.Parameter(torch.zeros(8, 8))
    groups = [{"params": [slow], "lr": 0.01, "topk": 2}, {"params": [fast], "update": "muon", "weight_decay": 0.5}]
    optimizer = DeMo(groups, lr=1.0, chunk=8, dense_below=0)
    for parameter in (slow, fast):
        parameter.grad = torch.randn(8, 8)
    optimizer.step()
    assert slow.abs().max().item() == pytest.approx(0.01)
    assert torch.linalg.svdvals(fast.detach()).max() > 0.5
    kept = [stack.codec.num_kept for stack in optimizer.plan.buckets[0].stacks]
    assert sorted(kept) == [2, 32]


def test_a_group_added_later_trains() -> None:
    _, optimizer = one()
    optimizer.step()
    second = nn.Parameter(torch.zeros(5, 5))
    optimizer.add_param_group({"params": [second], "lr": 0.5})
    second.grad = torch.randn(5, 5)
    optimizer.step()
    assert second.abs().max().item() == pytest.approx(0.5)
    assert [group["num_steps"] for group in optimizer.param_groups] == [2, 1]


def test_an_option_changed_on_the_way_takes_effect() -> None:
    parameter, optimizer = one()
    optimizer.step()
    optimizer.param_groups[0].update(topk=8, update="adamw")
    optimizer.step()
    assert optimizer.plan.buckets[0].stacks[0].codec.num_kept == 8
    assert "second_moment" in optimizer.state[parameter]
    optimizer.param_groups[0]["chunk"] = 8
    with pytest.raises(ValueError, match="chunk of group 0 cannot change during training: it was 4, got 8"):
        optimizer.step()


def test_a_setting_spoilt_on_the_way_is_refused_before_anything_changes() -> None:
    parameter, optimizer = one()
    before = parameter.detach().clone()
    optimizer.param_groups[0]["lr"] = math.nan
    with pytest.raises(ValueError, match="lr must be a finite number"):
        optimizer.step()
    assert torch.equal(parameter, before)
    assert not optimizer.state[parameter]["momentum"].any()


def test_maximize_goes_the_other_way() -> None:
    parameter, optimizer = one(update="sgd", values="float32")
    other = nn.Parameter(parameter.detach().clone())
    other.grad = parameter.grad.clone()
    start = parameter.detach().clone()
    optimizer.step()
    DeMo([other], lr=0.1, chunk=4, topk=4, dense_below=0, update="sgd", values="float32", maximize=True).step()
    assert torch.allclose(parameter - start, start - other, atol=1e-6)


def test_a_closure_is_evaluated_before_the_step_with_gradients_on() -> None:
    parameter, optimizer = one()
    parameter.grad = None

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (parameter**2).sum()
        loss.backward()
        return loss

    before = parameter.detach().clone()
    loss = optimizer.step(closure)
    assert loss.item() == pytest.approx(float((before**2).sum()))
    assert not torch.equal(parameter, before)


def test_schedulers_and_tensor_learning_rates_work() -> None:
    parameter, optimizer = one(lr=torch.tensor(0.1))
    scheduler = CosineAnnealingLR(optimizer, T_max=10)
    optimizer.step()
    scheduler.step()
    before = parameter.detach().clone()
    optimizer.step()
    lr = 0.1 * (1 + math.cos(math.pi / 10)) / 2
    assert (parameter - before).abs().max().item() == pytest.approx(lr, rel=1e-4)


def test_a_schedule_may_end_a_rounding_error_below_zero_and_numbers_may_be_numpys() -> None:
    parameter, optimizer = one(lr=0.1)
    scheduler = LinearLR(optimizer, end_factor=0.0, total_iters=100)
    for _ in range(101):
        optimizer.step()
        scheduler.step()
    optimizer.param_groups[0]["lr"] = np.float32(0.5)
    before = parameter.detach().clone()
    optimizer.step()
    assert (parameter - before).abs().max().item() == pytest.approx(0.5, rel=1e-4)
    assert type(optimizer.state_dict()["param_groups"][0]["lr"]) is float  # which any checkpoint can hold
    optimizer.param_groups[0]["lr"] = -1e-6
    with pytest.raises(ValueError, match="lr must be a finite number from 0"):
        optimizer.step()


def test_a_layer_unfrozen_late_begins_with_steps_of_the_usual_length() -> None:
    layers = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    layers[1].requires_grad_(False)
    optimizer = DeMo(layers.parameters(), lr=1e-3, update="adamw", values="float32", dense_below=0, chunk=8, topk=64)
    for step in range(60):
        layers[1].requires_grad_(step == 59)
        before = layers[1].weight.detach().clone()
        optimizer.zero_grad()
        layers(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
    assert (layers[1].weight - before).abs().max().item() == pytest.approx(1e-3, rel=1e-3)


def test_the_caller_may_be_inside_autocast() -> None:
    results = []
    for enabled in (False, True):
        torch.manual_seed(0)
        parameter, optimizer = one((32, 48), update="muon")
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            optimizer.step()
        results.append(parameter.detach())
    assert torch.equal(*results)


def test_another_cut_is_refused_also_where_the_momentum_would_fit() -> None:
    parameter, optimizer = one((64,), chunk=64, dense_below=100)
    optimizer.step()
    before = parameter.detach().clone()
    optimizer.param_groups[0]["dense_below"] = 0
    with pytest.raises(ValueError, match="dense_below of group 0 cannot change during training: it was 100, got 0"):
        optimizer.step()
    assert torch.equal(parameter, before)


def test_parameters_that_were_added_without_a_name_are_refused() -> None:
    model = build()
    optimizer = DeMo(model.named_parameters())
    optimizer.param_groups[0]["params"].append(nn.Parameter(torch.zeros(3)))
    with pytest.raises(ValueError, match=r"parameters and \d+ names; add parameters with add_param_group"):
        optimizer.step()


def test_gradient_accumulation_and_clipping_are_seen_as_plain_gradients() -> None:
    def run(parts: int) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Linear(16, 16)
        optimizer = DeMo(model.parameters(), lr=0.1, chunk=8, topk=8, dense_below=0, update="sgd", values="float32")
        for images in torch.randn(8, 16).chunk(parts):
            (model(images).square().sum() / 8).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return flat(model)

    assert torch.allclose(run(1), run(4), atol=1e-6)


def test_an_amp_scaler_unscales_and_an_overflow_skips() -> None:
    parameter, optimizer = one(update="sgd", values="float32")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    gradient, start = parameter.grad.clone(), parameter.detach().clone()
    scaler.scale(torch.tensor(1.0))  # the scaler makes its scale at first use
    parameter.grad = gradient * 1024
    scaler.step(optimizer)
    scaler.update()
    expected = nn.Parameter(start.clone())
    expected.grad = gradient
    DeMo([expected], lr=0.1, chunk=4, topk=4, dense_below=0, update="sgd", values="float32").step()
    assert torch.allclose(parameter, expected, atol=1e-5)
    before, momentum = parameter.detach().clone(), optimizer.state[parameter]["momentum"].clone()
    parameter.grad = gradient * math.inf
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(parameter, before)
    assert torch.equal(optimizer.state[parameter]["momentum"], momentum)
    assert optimizer.num_skipped_steps == 1
    assert scaler.get_scale() < 1024


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_non_finite_gradient_changes_nothing(policy: str, bad: float) -> None:
    parameter, optimizer = one(on_nonfinite=policy, weight_decay=0.1)
    optimizer.step()
    before, momentum = parameter.detach().clone(), optimizer.state[parameter]["momentum"].clone()
    parameter.grad[3, 3] = bad
    if policy == "raise":
        with pytest.raises(
            NonFiniteGradientError, match="replica 0 has NaN or Inf in the gradient of parameter 0 of group 0 at step 2"
        ):
            optimizer.step()
    else:
        optimizer.step()
        assert optimizer.num_skipped_steps == 1
    assert torch.equal(parameter, before)
    assert torch.equal(optimizer.state[parameter]["momentum"], momentum)
    assert optimizer.num_steps == 1


@pytest.mark.parametrize("values", ["sign", "int8", "float32", "sign_scale"])
def test_large_gradients_never_spoil_the_momentum(values: str) -> None:
    parameter, optimizer = one((100, 100), chunk=64, topk=32, values=values, update="sgd", lr=1e-9)
    for size in (1e15, 1e-30, 1.0):
        parameter.grad = torch.full((100, 100), size)
        optimizer.step()
        assert torch.isfinite(parameter).all()
        assert torch.isfinite(optimizer.state[parameter]["momentum"]).all()
    parameter.grad = torch.full((100, 100), 1e37)
    with pytest.raises(NonFiniteGradientError):
        optimizer.step()
    wide = nn.Parameter(torch.zeros(8, 8, dtype=torch.float64))
    wide.grad = torch.full_like(wide, 1e33)
    with pytest.raises(NonFiniteGradientError):
        DeMo([wide], values=values, update="sgd").step()


def test_sparse_gradients_are_refused() -> None:
    embedding = nn.Embedding(10, 4, sparse=True)
    optimizer = DeMo(embedding.parameters())
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(TypeError, match="sparse gradient"):
        optimizer.step()


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"lr": -1.0}, ValueError, "lr"),
        ({"lr": "fast"}, TypeError, "lr"),
        ({"topk": 0}, ValueError, "topk must be an integer >= 1, got 0"),
        ({"topk": 2.0}, TypeError, "topk"),
        ({"chunk": 0}, ValueError, "chunk"),
        ({"momentum_decay": 1.5}, ValueError, "momentum_decay"),
        ({"weight_decay": -0.1}, ValueError, "weight_decay"),
        ({"update": "muno"}, ValueError, "did you mean 'muon'"),
        ({"values": "int7"}, ValueError, "did you mean 'int"),
        ({"layout": "publishd"}, ValueError, "did you mean 'published'"),
        ({"combine": "mean"}, ValueError, "mean_over_senders"),
        ({"combine": "majority"}, ValueError, "did you mean 'majority_vote'"),
        ({"clip_to_median": 1}, TypeError, "clip_to_median must be True or False"),
        ({"clip_to_median": True, "combine": "majority_vote"}, ValueError, "clip_to_median=True has no effect"),
        ({"on_nonfinite": "ignore"}, ValueError, "on_nonfinite"),
        ({"momentum_dtype": "int8"}, ValueError, "momentum_dtype"),
        ({"backend": "cuda"}, ValueError, "backend"),
        ({"betas": (0.9,)}, TypeError, "betas"),
        ({"betas": (0.9, 2.0)}, ValueError, r"betas\[1\]"),
        ({"eps": -1.0}, ValueError, "eps"),
        ({"update": "adamw", "betas": (0.9, 1.0)}, ValueError, r"betas\[1\] below 1 and eps above 0, got betas\[1\]=1.0"),
        ({"update": "adamw", "eps": 0.0}, ValueError, r"eps above 0, got .* eps=0.0"),
        ({"maximize": 1}, TypeError, "maximize"),
        ({"lr_in_momentum": None}, TypeError, "lr_in_momentum"),
        ({"num_buckets": 0}, ValueError, "num_buckets"),
        ({"timeout_seconds": 0}, ValueError, "timeout_seconds"),
        ({"sync_parameters": "yes"}, TypeError, "sync_parameters"),
        ({"dense_below": -1}, ValueError, "dense_below"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        DeMo([nn.Parameter(torch.zeros(4, 4))], **options)


def test_bad_parameters_are_named() -> None:
    with pytest.raises(ValueError, match="empty parameter list"):
        DeMo([])
    with pytest.raises(TypeError, match=r"weight has dtype torch.complex64"):
        DeMo([("weight", nn.Parameter(torch.zeros(2, dtype=torch.complex64)))])
    with pytest.raises(ValueError, match="unknown option 'topkk'; did you mean 'topk'"):
        DeMo([{"params": [nn.Parameter(torch.zeros(2))], "topkk": 3}])
    with pytest.raises(ValueError, match="unknown option 'momentum'; did you mean 'momentum_d"):
        DeMo([{"params": [nn.Parameter(torch.zeros(2))], "momentum": 0.9}])
    with pytest.raises(ValueError, match="unknown option 'learning_rate'"):
        DeMo([{"params": [nn.Parameter(torch.zeros(2))], "learning_rate": 0.9}])
    for option in set(inspect.signature(DeMo).parameters) - {"params", *one()[1].defaults}:
        with pytest.raises(ValueError, match=f"has the option '{option}', which is for all groups"):
            DeMo([{"params": [nn.Parameter(torch.zeros(2))], option: None}])
    DeMo([{"params": [nn.Parameter(torch.zeros(2))], "lr_scale": 0.9}])
    twice = nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match="same parameter twice"), pytest.warns(UserWarning, match="duplicate"):
        DeMo([twice, twice])
    with pytest.raises(TypeError, match="must be a dict"):
        one()[1].add_param_group([nn.Parameter(torch.zeros(2))])  # type: ignore[arg-type]
    _, optimizer = one()
    with pytest.raises(TypeError, match="complex64"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, dtype=torch.complex64))]})
    with pytest.raises(ValueError, match="same parameter twice"), pytest.warns(UserWarning, match="duplicate"):
        optimizer.add_param_group({"params": [twice, twice]})
    assert len(optimizer.param_groups) == 1
    optimizer.step()
    optimizer.state_dict()
    with pytest.raises(ValueError, match="pass process_group or transport, not both"):
        DeMo([twice], process_group=object(), transport=SoloTransport())  # type: ignore[arg-type]


def test_automatic_values_depend_on_the_rule() -> None:
    names = {}
    for update in ("sign", "sgd", "adamw", "lion", "muon"):
        names[update] = one(update=update)[1].plan.buckets[0].stacks[0].codec.value_name
    assert names == {"sign": "sign", "sgd": "sign_scale", "adamw": "sign_scale", "lion": "sign", "muon": "sign"}


def test_several_buckets_and_any_number_of_them_give_the_same_result() -> None:
    results = [flat(train(0, 5, num_buckets=n)[0]) for n in (1, 2, 3, 100)]
    for result in results[1:]:
        assert torch.equal(result, results[0])


def test_parameters_and_state_may_be_replaced_between_steps() -> None:
    """As those do who prune, offload, or change dtype on the way."""
    parameter, optimizer = one()
    optimizer.step()
    other = nn.Parameter(parameter.detach().clone())
    optimizer.state[other] = {name: tensor.clone() for name, tensor in optimizer.state.pop(parameter).items()}
    optimizer.param_groups[0]["params"][0] = other
    other.grad = torch.randn(8, 8)
    before, momentum = other.detach().clone(), optimizer.state[other]["momentum"].clone()
    optimizer.step()
    assert not torch.equal(other, before)
    assert not torch.equal(optimizer.state[other]["momentum"], momentum)
    other.data, other.grad = other.data.double(), None
    other.grad = torch.randn(8, 8, dtype=torch.float64)
    optimizer.step()
    assert "torch.float64" in optimizer.plan.description[1]
    optimizer.state.clear()
    optimizer.step()
    assert optimizer.state_dict()["state"][0]["momentum"].any()
    other.data, other.grad = torch.zeros(9, 9), None
    with pytest.raises(ValueError, match="its shape, chunk"):
        optimizer.step()


def test_a_wider_momentum_is_used_as_such() -> None:
    parameter, optimizer = one(momentum_dtype="float64", momentum_decay=1.0, topk=1)
    optimizer.step()
    before = optimizer.state[parameter]["momentum"].clone()
    parameter.grad = torch.zeros(8, 8)
    optimizer.step()
    assert (optimizer.state[parameter]["momentum"] == before).double().mean() > 0.9
    optimizer.param_groups[0]["momentum_dtype"] = "bfloat16"
    optimizer.step()
    assert optimizer.state[parameter]["momentum"].dtype == torch.bfloat16


def test_copies_are_refused_and_frozen_integers_are_not() -> None:
    _, optimizer = one()
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        copy.deepcopy(optimizer)
    frozen = nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
    DeMo([frozen, nn.Parameter(torch.zeros(4))])


def test_a_failed_step_leaves_no_scale_behind() -> None:
    parameter, optimizer = one(update="sgd", values="float32")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.tensor(1.0))
    good = parameter.grad.clone()
    optimizer.param_groups[0]["lr"] = math.nan
    with pytest.raises(ValueError, match="lr"):
        scaler.step(optimizer)
    optimizer.param_groups[0]["lr"] = 0.1
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")
    assert torch.equal(parameter.grad, good)


def test_alone_nothing_crosses_a_wire() -> None:
    _, optimizer, _ = train(0, 2)
    assert optimizer.traffic.total == Count()
    assert optimizer.plan.payload_bytes > 0


def test_disable_gradient_sync_wants_ddp() -> None:
    with pytest.raises(TypeError, match="needs a DistributedDataParallel model, got SmallNet"):
        disable_gradient_sync(SmallNet())


def test_mixed_dtypes_in_one_optimizer() -> None:
    parameters = [nn.Parameter(torch.randn(16, 16).to(dtype)) for dtype in (torch.float32, torch.bfloat16, torch.float64)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    before = copy.deepcopy([parameter.detach() for parameter in parameters])
    optimizer = DeMo(parameters, lr=0.1, chunk=8, topk=8, dense_below=0)
    optimizer.step()
    for old, parameter in zip(before, parameters, strict=True):
        assert not torch.equal(old, parameter)


def test_the_recommended_settings_are_those_of_the_recipe_and_give_way_to_ones_own() -> None:
    matrix = torch.nn.Parameter(torch.zeros(64, 64))
    (group,), recipe = DeMo.recommended([matrix]).param_groups, recipes.build("gpt-small").optim
    for name in ("lr", "update", "topk", "momentum_decay"):
        assert group[name] == getattr(recipe, name), name
    assert group["update"] == "muon"
    (own,) = DeMo.recommended([matrix], lr=0.1, topk=8, weight_decay=0.5).param_groups
    assert (own["lr"], own["topk"], own["weight_decay"], own["momentum_decay"]) == (0.1, 8, 0.5, 0.98)
    with pytest.raises(TypeError, match="tpk"):
        DeMo.recommended([matrix], tpk=8)
