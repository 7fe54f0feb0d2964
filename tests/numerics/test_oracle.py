"""`DeMo` follows the oracle, for every rule, codec and combine rule, on awkward shapes."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from thinwire import DeMo, slabs
from thinwire.core.balance import ENERGIES, is_balanced
from thinwire.core.combine import COMBINE_RULES
from thinwire.core.layout import matrix_shape, plan_layout
from thinwire.core.reference import Oracle
from thinwire.core.update_rules import UPDATE_RULES
from thinwire.exchange.loopback import run_replicas
from thinwire.exchange.plan import Coding, TensorSpec, make_plan, with_owners
from thinwire.wire.values import VALUE_CODECS


def train(
    shape: tuple[int, ...], gradients: list[list[Tensor]], start: Tensor, **options: Any
) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Parameters and state of each replica after steps with ``gradients[step][replica]``."""

    def work(transport: Any) -> tuple[Tensor, dict[str, Tensor]]:
        parameter = nn.Parameter(start.clone())
        optimizer = DeMo([parameter], transport=transport, exact_decode=False, **options)
        for step in gradients:
            parameter.grad = step[transport.replica].to(parameter.dtype)
            optimizer.step()
        return parameter.detach(), optimizer.state[parameter]

    return run_replicas(work, len(gradients[0]))


def follow(shape: tuple[int, ...], num_replicas: int, num_steps: int, seed: int, **options: Any) -> bool:
    """Train in float64 and compare with the oracle; with clipping less closely, as its norms are rounded to 16 bits.

    False if rounding alone decided a selection, as in a padded chunk with a single element, whose coefficients come in pairs
    of one size: then only the replicas are compared, with each other. Elements are left out where coarse values cancelled:
    AdamW takes one for new whose values were exactly 0, so that rounding decides.
    """
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(shape, generator=generator, dtype=torch.float64)
    gradients = [
        [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(num_replicas)] for _ in range(num_steps)
    ]
    options = {"lr": 0.05, "momentum_decay": 0.9, "weight_decay": 0.1, "momentum_dtype": "float64", **options}
    chunk, topk = options["chunk"], options["topk"]
    coding = Coding(chunk, topk, options["values"], "adaptive", options["dense_below"])
    plan = make_plan([TensorSpec("p", shape, "float64", 0)], [coding])
    (stack,) = plan.buckets[0].stacks
    owner: dict[str, Any] = {}
    if options.get("exchange") == "owner" and num_replicas > 1:
        answers: Any = with_owners(plan, options["owner_topk"]).answers
        answer_codec = answers.buckets[0].stacks[0].codec
        owner = {"owner_kept": answer_codec.num_kept, "owner_values": answer_codec.value_name}
    layout = plan_layout(shape, chunk, options["dense_below"])
    view = (1, 1, start.numel()) if layout.dense else matrix_shape(shape, chunk)
    oracle = Oracle(
        start.view(view),
        num_replicas,
        (layout.row_edge, layout.col_edge),
        stack.codec.num_kept,
        values=stack.codec.value_name,
        combine=options["combine"],
        clips=options.get("clip_to_median", False),
        rule=options["update"],
        share=stack.share,
        transform=not layout.dense,
        lr_in_momentum=options["lr_in_momentum"],
        balance=options.get("balance", 0.0) if is_balanced(layout) else 0.0,
        **owner,
    )
    is_clear = torch.ones(view, dtype=torch.bool)
    for step in gradients:
        oracle.step([gradient.view(view) for gradient in step], options["lr"], options["momentum_decay"], 0.1)
        is_clear &= oracle.state["v"] > 1e-18 if options["update"] == "adamw" else True
    results = train(shape, gradients, start, **options)
    assert all(torch.equal(parameter, results[0][0]) for parameter, _ in results), "replicas differ"
    if oracle.closest_call < 1e-9:
        return False
    tolerance = 1e-5 if options.get("clip_to_median") else 1e-7
    for replica, (parameter, state) in enumerate(results):
        momentum = state["momentum"]
        difference = (parameter.view(view) - oracle.parameter)[is_clear]
        assert torch.allclose(difference, torch.zeros_like(difference), atol=tolerance), "parameters"
        expected = torch.stack(oracle.momenta[replica]).view_as(momentum)
        assert torch.allclose(momentum, expected, atol=1e-7), "residual momentum"
        for which, name in enumerate(ENERGIES if options.get("balance") and is_balanced(layout) else ()):
            energies = torch.tensor([its[which] for its in oracle.energies[replica]], dtype=torch.float64)
            assert torch.allclose(state[name], energies, atol=1e-12), name
    if owner:
        residual = torch.cat([state["owner_residual"] for _, state in results])
        assert torch.allclose(residual, torch.stack(oracle.residuals).view_as(residual), atol=tolerance), "owners' residuals"
    return True


@pytest.mark.parametrize("values", sorted(VALUE_CODECS))
@pytest.mark.parametrize("update", sorted(UPDATE_RULES))
def test_every_rule_with_every_codec(update: str, values: str) -> None:
    options = {"chunk": 6, "topk": 5, "dense_below": 0, "combine": "mean_over_senders", "lr_in_momentum": False}
    assert follow((13, 10), 3, 4, seed=1, update=update, values=values, **options)


@given(
    shape=st.lists(st.integers(1, 14), min_size=0, max_size=4).map(tuple).filter(lambda shape: math.prod(shape) <= 1500),
    num_replicas=st.integers(1, 5),
    chunk=st.integers(1, 9),
    topk=st.integers(1, 12),
    update=st.sampled_from(["sign", "sgd", "adamw", "lion"]),
    values=st.sampled_from(sorted(VALUE_CODECS)),
    combine=st.sampled_from(COMBINE_RULES),
    dense_below=st.sampled_from([0, 20]),
    lr_in_momentum=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_any_shape(shape: tuple[int, ...], num_replicas: int, seed: int, **options: Any) -> None:
    is_coarse = options["values"] != "float32" or options["combine"] == "majority_vote"
    if is_coarse and options["update"] in ("sign", "lion"):
        options["update"] = "sgd"  # coarse values may cancel to exactly 0, whose sign rounding decides
    follow(shape, num_replicas, 3, seed, **options)


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 5])
@pytest.mark.parametrize("values", sorted(VALUE_CODECS))
def test_votes_and_clipped_values_with_every_codec(values: str, num_replicas: int) -> None:
    options = {"chunk": 6, "topk": 5, "update": "sgd", "values": values, "lr_in_momentum": False}
    for shape, dense_below in (((13, 10), 0), ((7, 5), 100)):
        for robust in ({"combine": "majority_vote"}, {"combine": "mean_over_senders", "clip_to_median": True}):
            seed = int(torch.randint(2**31, ()))
            follow(shape, num_replicas, 3, seed, dense_below=dense_below, **options, **robust)


@pytest.mark.parametrize("combine", COMBINE_RULES)
@pytest.mark.parametrize("values", sorted(VALUE_CODECS))
def test_owners_with_every_codec_and_combine_rule(values: str, combine: str) -> None:
    options = {"chunk": 6, "topk": 5, "update": "sgd", "values": values, "lr_in_momentum": False, "exchange": "owner"}
    for shape, dense_below in (((13, 10), 0), ((7, 5), 100)):
        assert follow(shape, 2, 4, 3, dense_below=dense_below, owner_topk=7, combine=combine, **options)


@given(
    shape=st.lists(st.integers(1, 14), min_size=0, max_size=4).map(tuple).filter(lambda shape: math.prod(shape) <= 1500),
    num_replicas=st.integers(1, 6),
    chunk=st.integers(1, 9),
    topk=st.integers(1, 8),
    owner_topk=st.integers(1, 20),
    update=st.sampled_from(["sgd", "adamw"]),
    values=st.sampled_from(sorted(VALUE_CODECS)),
    combine=st.sampled_from(COMBINE_RULES),
    dense_below=st.sampled_from([0, 20]),
    seed=st.integers(0, 2**32),
)
def test_any_shape_with_owners(shape: tuple[int, ...], num_replicas: int, seed: int, **options: Any) -> None:
    follow(shape, num_replicas, 3, seed, lr_in_momentum=False, exchange="owner", **options)


@given(
    shape=st.lists(st.integers(1, 14), min_size=0, max_size=4).map(tuple).filter(lambda shape: math.prod(shape) <= 1500),
    num_replicas=st.sampled_from([1, 2, 3, 5]),
    chunk=st.integers(1, 9),
    values=st.sampled_from(sorted(VALUE_CODECS)),
    combine=st.sampled_from(["mean_over_senders", "mean_over_replicas"]),
    dense_below=st.sampled_from([0, 20]),
    seed=st.integers(0, 2**32),
)
def test_any_shape_with_clipped_values(shape: tuple[int, ...], num_replicas: int, seed: int, **options: Any) -> None:
    follow(shape, num_replicas, 3, seed, update="sgd", topk=5, lr_in_momentum=False, clip_to_median=True, **options)


@given(
    shape=st.lists(st.integers(1, 12), min_size=1, max_size=4).map(tuple).filter(lambda shape: math.prod(shape) <= 1500),
    chunk=st.integers(2, 8),
    seed=st.integers(0, 2**32),
)
def test_muon_on_any_shape(shape: tuple[int, ...], chunk: int, seed: int) -> None:
    options = {"topk": 6, "values": "sign_scale", "combine": "mean_over_replicas", "lr_in_momentum": False}
    follow(shape, 2, 2, seed, update="muon", chunk=chunk, dense_below=0, **options)


@given(
    shape=st.lists(st.integers(1, 14), min_size=0, max_size=4).map(tuple).filter(lambda shape: math.prod(shape) <= 1500),
    num_replicas=st.integers(1, 3),
    chunk=st.integers(1, 9),
    update=st.sampled_from(["sgd", "adamw"]),
    balance=st.sampled_from([0.5, 0.95]),
    dense_below=st.sampled_from([0, 20]),
    seed=st.integers(0, 2**32),
)
def test_any_shape_balanced(shape: tuple[int, ...], num_replicas: int, update: str, seed: int, **options: Any) -> None:
    # Rows of one element are of one size then, so that coefficients cancel: coarse values would make much of rounding.
    options |= {"topk": 6, "values": "float32", "combine": "mean_over_replicas", "lr_in_momentum": False}
    follow(shape, num_replicas, 3, seed, update=update, **options)


def test_a_tensor_larger_than_a_tile_is_handled_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    small = slabs.Limits(tile_elements=40, batch_elements=80, slab_elements=200)
    monkeypatch.setattr(slabs, "_limits", lambda *_: small)
    options = {"combine": "mean_over_senders", "lr_in_momentum": False, "dense_below": 0, "chunk": 4, "topk": 3}
    for update in ("adamw", "muon"):
        for shape in ((23, 10), (3, 7, 9), (50,), (12, 16)):
            assert follow(shape, 2, 3, 3, update=update, values="sign_scale", **options)


@pytest.mark.parametrize("momentum_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("gradient_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("parameter_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_mix_and_one_step_is_the_oracles_to_rounding(
    parameter_dtype: torch.dtype, gradient_dtype: torch.dtype, momentum_dtype: str, device: torch.device
) -> None:
    while True:  # until no rounding can decide which coefficients are kept
        gradient = torch.randn(24, 16).to(gradient_dtype)
        start = torch.randn(24, 16).to(parameter_dtype)
        oracle = Oracle(start.view(1, 24, 16), 1, (8, 8), 16, rule="sgd")
        oracle.step([gradient.double().view(1, 24, 16)], 0.5, 0.999)
        if oracle.closest_call > 2**-7:
            break
    parameter = nn.Parameter(start.to(device))
    parameter.grad_dtype = gradient_dtype  # torch ties the dtype of .grad to the parameter's unless told otherwise
    parameter.grad = gradient.to(device)
    options = {"chunk": 8, "topk": 16, "dense_below": 0, "values": "float32", "update": "sgd", "backend": "torch"}
    optimizer = DeMo([parameter], lr=0.5, momentum_dtype=momentum_dtype, exact_decode=False, **options)
    optimizer.step()
    rounding = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[parameter_dtype]
    if momentum_dtype == "bfloat16":
        rounding += 2**-7  # what is sent comes from the momentum as it is kept
    expected = oracle.parameter.view(24, 16)
    assert ((parameter.detach().double().cpu() - expected).abs() <= rounding * (1 + expected.abs())).all()
    momentum = optimizer.state[parameter]["momentum"].double().cpu()
    assert str(optimizer.state[parameter]["momentum"].dtype) == f"torch.{momentum_dtype}"
    kept = torch.stack(oracle.momenta[0]).view_as(momentum)
    assert ((momentum - kept).abs() <= (2**-8 if momentum_dtype == "bfloat16" else 1e-5) * (1 + kept.abs())).all()
