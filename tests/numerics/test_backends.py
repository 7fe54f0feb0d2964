"""The fused backend does what the torch backend and the oracle do: in Triton's interpreter on a CPU, compiled on a GPU."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from thinwire import DeMo, NonFiniteGradientError, fused
from thinwire.core.combine import COMBINE_RULES, Decoding
from thinwire.core.reference import Oracle, strongest
from thinwire.core.update_rules import UPDATE_RULES, Hyper
from thinwire.exchange.loopback import run_replicas
from thinwire.exchange.plan import Coding, ExchangePlan, TensorSpec, make_plan, stack_records
from thinwire.local_step import Encoding, LocalStep
from thinwire.slabs import LocalTensor
from thinwire.stack_step import GroupStep
from thinwire.wire.payload import PROBLEM_WORD, Problem, Trouble, Verdict
from thinwire.wire.values import VALUE_CODECS

pytest.importorskip("triton", reason="triton has no build for this platform")

# Products in TF32 are off by up to 2**-11 of each factor; the interpreter's are float32.
TRANSFORM_ERROR = {"cpu": 1e-6, "cuda": 2**-9}
Shapes = list[tuple[int, ...]]


def plan_for(shapes: Shapes, dtype: torch.dtype = torch.float32, **coding: Any) -> ExchangePlan:
    settings = {"chunk": 16, "topk": 9, "values": "sign", "layout": "adaptive", "dense_below": 0, **coding}
    return make_plan([TensorSpec(f"p{i}", s, str(dtype), 0) for i, s in enumerate(shapes)], [Coding(**settings)])


def group_step(rule: str = "sign", **settings: Any) -> GroupStep:
    defaults = {"decay": 0.9, "gradient_scale": 1.0, "weight_decay": 0.1, "chunk": 16}
    return GroupStep(rule=UPDATE_RULES[rule], hyper=Hyper(0.1, 3, (0.9, 0.99), 1e-8), **{**defaults, **settings})


def momenta_for(plan: ExchangePlan, device: torch.device, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    layouts = [plan.layout_of(index) for index in range(len(plan.tensors))]
    return [torch.randn(layout.num_chunks, layout.num_elements).to(device, dtype) for layout in layouts]


def local_step(
    plan: ExchangePlan, backend: str, parameters: list[Tensor], momenta: list[Tensor], rule: str = "sign"
) -> LocalStep:
    """Tensors of their own for each backend."""
    tensors = []
    for parameter, momentum in zip(parameters, momenta, strict=True):
        own = nn.Parameter(parameter.clone())
        own.grad_dtype = None if parameter.grad is None else parameter.grad.dtype
        own.grad = parameter.grad
        state = {name: torch.full_like(parameter, 0.01, dtype=torch.float32) for name in UPDATE_RULES[rule].state_names}
        tensors.append(LocalTensor(own, momentum.clone(), state))
    return LocalStep(plan, tensors, backend)


def encoded(plan: ExchangePlan, backend: str, parameters: list[Tensor], momenta: list[Tensor], group: GroupStep) -> Any:
    step = local_step(plan, backend, parameters, momenta)
    assert step.backends == {backend}
    encoding = step.empty(plan.buckets[0])
    step.encode_(plan.buckets[0], [group], encoding)
    return encoding.payload_B, [tensor.momentum_CE for tensor in step.tensors], step, encoding


def parameters_for(shapes: Shapes, device: torch.device, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(shape).to(device, dtype) for shape in shapes]


SHAPES: Shapes = [(20, 25), (30,), (2, 17, 9), (7,), (32, 16)]


CODINGS = [(values, 9) for values in sorted(VALUE_CODECS)] + [(v, k) for v in ("sign", "int8") for k in (1, 100, 256)]


@pytest.mark.parametrize(("values", "topk"), CODINGS)
def test_equal_coefficients_give_equal_bytes(values: str, topk: int, device: torch.device) -> None:
    shapes: Shapes = [(20, 25), (30,)] if topk != 9 else SHAPES
    plan = plan_for(shapes, values=values, topk=topk, dense_below=8)
    parameters, momenta = parameters_for(shapes, device), momenta_for(plan, device)
    expected = encoded(plan, "torch", parameters, momenta, group_step())
    found = encoded(plan, "triton", parameters, momenta, group_step())
    assert torch.equal(found[0], expected[0])
    for mine, theirs in zip(found[1], expected[1], strict=True):
        # The sender's unit, a mean, is rounded in another order; coefficients here are up to about 4.
        assert torch.allclose(mine, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("chunk", "topk"), [(32, 8), (64, 32), (64, 64), (128, 100)])
def test_usual_chunks_give_equal_bytes(chunk: int, topk: int, device: torch.device) -> None:
    shapes: Shapes = [(chunk, 2 * chunk)]
    plan = plan_for(shapes, chunk=chunk, topk=topk)
    parameters, momenta = parameters_for(shapes, device), momenta_for(plan, device)
    expected, found = (encoded(plan, backend, parameters, momenta, group_step()) for backend in ("torch", "triton"))
    assert torch.equal(found[0], expected[0])


@pytest.mark.parametrize("kind", ["ties", "zeros", "few", "extremes", "one size"])
@pytest.mark.parametrize("topk", [5, 90])
def test_indices_are_the_oracles(kind: str, topk: int, device: torch.device) -> None:
    plan = plan_for([(32, 48), (15, 17)], topk=topk, values="float32")
    momenta = momenta_for(plan, device)
    for momentum in momenta:
        if kind == "ties":
            momentum.mul_(1.5).round_()
        elif kind == "zeros":
            momentum[::2] = 0
        elif kind == "few":
            momentum[momentum.abs() < 2.5] = 0
        elif kind == "extremes":
            momentum.mul_(torch.randint(-120, 60, momentum.shape, device=device).float().exp2_())
        else:
            momentum.sign_()
    before = [momentum.cpu() for momentum in momenta]
    group = group_step(decay=1.0)
    payload_B = encoded(plan, "triton", parameters_for([(32, 48), (15, 17)], device), momenta, group)[0].cpu()
    for stack in plan.buckets[0].stacks:
        indices_CK, values_CK = stack.codec.decode(stack_records(payload_B, stack))
        chunks = torch.cat([before[entry.tensor] for entry in stack.entries])
        for chunk, indices, values in zip(chunks, indices_CK, values_CK, strict=True):
            kept = strongest(chunk.tolist(), stack.codec.num_kept)
            assert indices[: len(kept)].tolist() == kept
            assert (indices[len(kept) :] == stack.codec.num_elements).all()
            assert torch.equal(values[: len(kept)], chunk[kept])


def test_where_the_search_begins_changes_nothing(device: torch.device) -> None:
    plan = plan_for([(64, 64)], topk=9)
    parameters, momenta = parameters_for([(64, 64)], device), momenta_for(plan, device)
    expected = encoded(plan, "triton", parameters, momenta, group_step())[0]
    step = local_step(plan, "triton", parameters, momenta)
    (stack,) = plan.buckets[0].stacks
    hints_C = step.steps[stack]._hints_C  # type: ignore[attr-defined]
    hints_C.copy_(torch.randint(1, 0x7F800000, hints_C.shape))
    encoding = step.empty(plan.buckets[0])
    step.encode_(plan.buckets[0], [group_step()], encoding)
    assert torch.equal(encoding.payload_B, expected)


@pytest.mark.parametrize(
    ("gradient_dtype", "momentum_dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16)],
)
def test_gradients_are_accumulated(gradient_dtype: torch.dtype, momentum_dtype: torch.dtype, device: torch.device) -> None:
    shapes: Shapes = [(20, 25), (30,), (32, 16)]
    plan = plan_for(shapes, values="float32", dense_below=40)
    parameters, momenta = parameters_for(shapes, device), momenta_for(plan, device, momentum_dtype)
    for parameter in parameters[:-1]:  # the last has no gradient
        parameter.grad_dtype = gradient_dtype
        parameter.grad = torch.randn_like(parameter).to(gradient_dtype)
    group = group_step(gradient_scale=-0.7)
    results = [encoded(plan, backend, parameters, momenta, group) for backend in ("torch", "triton")]
    totals = []
    for payload_B, after, _, _ in results:  # what was sent and what was kept, whichever is which
        sums = [momentum.float() for momentum in after]
        for stack in plan.buckets[0].stacks:
            indices_CK, values_CK = stack.codec.decode(stack_records(payload_B, stack))
            for entry in stack.entries:
                mine = slice(entry.first_chunk, entry.first_chunk + entry.layout.num_chunks)
                sums[entry.tensor].scatter_add_(
                    1, indices_CK[mine].clamp(max=entry.layout.num_elements - 1), values_CK[mine]
                )
        totals.append(torch.cat([total.view(-1) for total in sums]))
    rounding = 2**-7 if momentum_dtype == torch.bfloat16 else 0.0
    tolerance = TRANSFORM_ERROR[device.type] * 10 + rounding * totals[0].abs().max()
    assert (totals[0] - totals[1]).abs().max() <= tolerance


# The values do not concern a rule, so two kinds of them suffice; coarse ones cancel to 0, whose sign rounding decides.
APPLIED = [("sgd", values, combine) for values in sorted(VALUE_CODECS) for combine in COMBINE_RULES] + [
    ("adamw", "float32", "mean_over_senders"),
    ("lion", "bfloat16", "mean_over_replicas"),
    ("muon", "float32", "mean_over_senders"),
    ("sign", "bfloat16", "mean_over_replicas"),
]


def test_every_rule_is_among_them() -> None:
    assert {rule for rule, _, _ in APPLIED} == set(UPDATE_RULES)


@pytest.mark.parametrize(("rule", "values", "combine"), APPLIED)
def test_payloads_are_applied(rule: str, values: str, combine: str, device: torch.device) -> None:
    shapes: Shapes = [(20, 25), (30,), (32, 16)]
    plan = plan_for(shapes, values=values, dense_below=8)
    parameters = parameters_for(shapes, device)
    everyone = [encoded(plan, "torch", parameters, momenta_for(plan, device), group_step())[0] for _ in range(3)]
    compare_applied(plan, parameters, torch.stack(everyone), rule, combine)


@pytest.mark.parametrize("together", [1, 1200, 1 << 23])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matrices_of_one_shape_change_together_as_each_alone(
    together: int, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("thinwire.fused_stack._ELEMENTS_TOGETHER", together)
    shapes: Shapes = [(32, 16), (20, 25), (32, 16), (3, 32, 16), (25, 20), (7, 13), (32, 16), (13, 7)]
    plan = plan_for(shapes, dtype, values="float32", dense_below=8)
    parameters = parameters_for(shapes, device, dtype)
    everyone = [encoded(plan, "torch", parameters, momenta_for(plan, device), group_step())[0] for _ in range(2)]
    rounding = 2**-7 if dtype == torch.bfloat16 else 0.0
    compare_applied(plan, parameters, torch.stack(everyone), "muon", "mean_over_replicas", rounding)


@pytest.mark.parametrize(
    ("chunk", "topk", "num_replicas"), [(64, 32, 2), (64, 64, 20), (128, 40, 3), (16, 256, 2), (16, 100, 300)]
)
def test_any_number_of_replicas(chunk: int, topk: int, num_replicas: int, device: torch.device) -> None:
    shapes: Shapes = [(chunk, chunk + 16)]
    plan = plan_for(shapes, chunk=chunk, topk=topk)
    parameters = parameters_for(shapes, device)
    few = [encoded(plan, "torch", parameters, momenta_for(plan, device), group_step())[0] for _ in range(3)]
    compare_applied(plan, parameters, torch.stack([few[r % 3] for r in range(num_replicas)]), "sgd", "mean_over_senders")


@pytest.mark.parametrize(
    ("rule", "values", "chunk", "dtype"),
    [("sgd", "int8", 64, torch.bfloat16), ("adamw", "sign", 16, torch.float16), ("muon", "sign", 16, torch.bfloat16)],
)
def test_parameters_of_half_width(rule: str, values: str, chunk: int, dtype: torch.dtype, device: torch.device) -> None:
    shapes: Shapes = [(chunk, 2 * chunk)]
    plan = plan_for(shapes, dtype, chunk=chunk, values=values)
    parameters = parameters_for(shapes, device, dtype)
    everyone = [encoded(plan, "torch", parameters, momenta_for(plan, device), group_step())[0] for _ in range(3)]
    compare_applied(plan, parameters, torch.stack(everyone), rule, "mean_over_senders", rounding=2**-7)


def test_nan_stays_nan_in_half_width(device: torch.device) -> None:
    parameter = nn.Parameter(torch.full((16, 32), float("nan"), dtype=torch.bfloat16, device=device))
    parameter.grad = torch.ones_like(parameter)
    DeMo([parameter], lr=0.1, chunk=16, dense_below=0, backend="triton").step()
    assert parameter.isnan().all()


def compare_applied(
    plan: ExchangePlan, parameters: list[Tensor], payloads_RB: Tensor, rule: str, combine: str, rounding: float = 0.0
) -> None:
    """Apply with both backends; where the sign rules decide by the sign of nearly nothing, they may differ."""
    results, device = [], payloads_RB.device
    in_bfloat16 = rule == "muon" and device.type == "cuda"  # which makes the smallest singular values much of rounding
    rounding += 2**-8 if in_bfloat16 else 0.0
    for backend in ("torch", "triton"):
        step = local_step(plan, backend, parameters, momenta_for(plan, device), rule)
        with torch.no_grad():
            step.apply_(plan.buckets[0], [group_step(rule)], payloads_RB, Decoding(combine, is_exact=False))
        results.append([t for tensor in step.tensors for t in (tensor.parameter.data, *tensor.rule_state.values())])
    num_different, num_all = 0, 0
    for expected, found in zip(*results, strict=True):
        tolerance = TRANSFORM_ERROR[device.type] * 2 + rounding * (1 + expected.abs())
        is_different = (found.float() - expected.float()).abs() > tolerance
        num_different, num_all = num_different + int(is_different.sum()), num_all + found.numel()
    is_coarse = device.type == "cuda" or bool(rounding)
    allowed = 0 if rule in ("sgd", "muon") and not in_bfloat16 else num_all // (100 if is_coarse else 1000)
    assert num_different <= allowed


@pytest.mark.parametrize(
    ("values", "momentum_dtype"), [("sign", torch.float32), ("int4", torch.bfloat16), ("float32", torch.float32)]
)
def test_an_encoding_is_undone_if_the_verdict_says_so(
    values: str, momentum_dtype: torch.dtype, device: torch.device
) -> None:
    plan = plan_for([(20, 25), (30,)], values=values, dense_below=40)
    parameters, momenta = parameters_for([(20, 25), (30,)], device), momenta_for(plan, device, momentum_dtype)
    parameters[0].grad = torch.randn_like(parameters[0])
    for verdict in Verdict:
        step: LocalStep
        encoding: Encoding
        _, after, step, encoding = encoded(plan, "triton", parameters, momenta, group_step())
        as_encoded = [momentum.clone() for momentum in after]
        step.set_verdict_(verdict)
        step.undo_(plan.buckets[0], [group_step()], encoding)
        is_undone = verdict == Verdict.REFUSED
        for found, expected in zip(after, momenta if is_undone else as_encoded, strict=True):
            rounding = 1e-5 if momentum_dtype == torch.float32 else 0.1
            assert torch.allclose(found, expected, atol=rounding if is_undone else 0)
        assert not torch.allclose(as_encoded[0], momenta[0], atol=0.2)


@pytest.mark.parametrize(("rule", "verdict"), [("adamw", Verdict.DAMAGED), ("muon", Verdict.REFUSED)])
def test_nothing_is_applied_if_the_verdict_says_so(rule: str, verdict: Verdict, device: torch.device) -> None:
    shapes: Shapes = [(20, 25), (32, 16)]
    plan = plan_for(shapes)
    parameters = parameters_for(shapes, device)
    payload_B = encoded(plan, "torch", parameters, momenta_for(plan, device), group_step())[0]
    step = local_step(plan, "triton", parameters, momenta_for(plan, device), rule)
    before = [t.clone() for tensor in step.tensors for t in (tensor.parameter.data, *tensor.rule_state.values())]
    step.set_verdict_(verdict)
    with torch.no_grad():
        step.apply_(plan.buckets[0], [group_step(rule)], payload_B[None], Decoding())
    after = [t for tensor in step.tensors for t in (tensor.parameter.data, *tensor.rule_state.values())]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old, new)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 2.0**70])
def test_a_gradient_that_is_not_finite_is_reported_and_leaves_its_chunk_alone(bad: float, device: torch.device) -> None:
    shapes: Shapes = [(32, 16), (7,), (20, 25)]
    plan = plan_for(shapes, dense_below=8)
    parameters, momenta = parameters_for(shapes, device), momenta_for(plan, device)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    parameters[1].grad[3] = parameters[2].grad[10, 3] = parameters[2].grad[19, 24] = bad
    payload_B, after, step, encoding = encoded(plan, "triton", parameters, momenta, group_step())
    word = int(payload_B.view(torch.int64)[PROBLEM_WORD])
    assert Trouble.unpack(word) == Trouble(Problem.NONFINITE, 1)
    assert all(momentum.isfinite().all() for momentum in after)
    step.set_verdict_(Verdict.REFUSED)
    step.undo_(plan.buckets[0], [group_step()], encoding)
    for found, expected in zip(after, momenta, strict=True):
        assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_all_replicas_leave_a_step_out_together(policy: str, device: torch.device) -> None:
    """As in `test_optimizer`, but where the device decides."""

    def train(transport: Any) -> tuple[Tensor, str, int, int]:
        torch.manual_seed(transport.replica)
        parameter = nn.Parameter(torch.randn(16, 32).to(device))
        options: dict[str, Any] = {"chunk": 16, "topk": 12, "dense_below": 0, "weight_decay": 0.1, "backend": "triton"}
        optimizer = DeMo([("w", parameter)], lr=0.05, transport=transport, on_nonfinite=policy, **options)
        said = ""
        for step in range(4):
            parameter.grad = torch.randn(16, 32).to(device)
            before, momentum = parameter.detach().clone(), optimizer.state[parameter]["momentum"].clone()
            if step == 2 and transport.replica == 1:
                parameter.grad[3, 3] = torch.nan
            try:
                optimizer.step()
                optimizer.synchronize()
            except NonFiniteGradientError as error:
                said = str(error)
            if step == 2:
                assert torch.equal(parameter, before)
                assert torch.allclose(optimizer.state[parameter]["momentum"], momentum, atol=1e-5)
        return parameter.detach(), said, optimizer.num_steps, optimizer.num_skipped_steps

    results = run_replicas(train, 2)
    for parameter, said, num_steps, num_skipped in results:
        assert torch.equal(parameter, results[0][0])
        assert num_steps == 3
        assert num_skipped == (policy == "skip")
        assert (policy == "skip") == (said == "")
        assert policy == "skip" or said.startswith("replica 1 has NaN or Inf in the gradient of w at step 3")


@pytest.mark.gpu
@pytest.mark.parametrize(("update", "balance"), [("sign", 0.0), ("adamw", 0.0), ("muon", 0.0), ("muon", 0.9)])
def test_a_step_does_not_wait_for_the_gpu_and_allocates_nothing(update: str, balance: float) -> None:
    parameters = [nn.Parameter(torch.randn(shape, device="cuda")) for shape in ((256, 320), (100, 130), (64,))]
    optimizer = DeMo(parameters, lr=1e-3, update=update, balance=balance, backend="triton")
    for step in range(6):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        torch.cuda.synchronize()
        if step == 3:
            allocated = torch.cuda.memory_stats()["segment.all.allocated"]
            torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.step()
        finally:
            if step == 5:
                torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["segment.all.allocated"] == allocated
    assert optimizer.num_steps == 6


@pytest.mark.parametrize("update", ["sign", "muon"])
def test_training_follows_the_oracle(update: str, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(3)
    start = torch.randn(16, 32, generator=generator)
    gradients = [[torch.randn(16, 32, generator=generator) for _ in range(2)] for _ in range(3)]
    options: dict[str, Any] = {"chunk": 16, "topk": 12, "dense_below": 0, "values": "float32", "update": update}

    def train(transport: Any) -> tuple[Tensor, Tensor]:
        parameter = nn.Parameter(start.clone().to(device))
        settings = {"momentum_decay": 0.9, "exact_decode": False, "backend": "triton", **options}
        optimizer = DeMo([parameter], lr=0.05, transport=transport, **settings)
        for step in gradients:
            parameter.grad = step[transport.replica].to(device)  # a new tensor at each step
            optimizer.step()
        return parameter.detach(), optimizer.state[parameter]["momentum"]

    results = run_replicas(train, 2)
    assert torch.equal(results[0][0], results[1][0])
    oracle = Oracle(start.view(1, 16, 32), 2, (16, 16), 12, rule=update)
    for step in gradients:
        oracle.step([gradient.view(1, 16, 32) for gradient in step], 0.05, 0.9)
    error = TRANSFORM_ERROR[device.type]
    assert oracle.closest_call > 1e-5 or device.type == "cuda"
    different = (results[0][0].cpu() - oracle.parameter.view(16, 32)).abs() > 4 * error
    # On a GPU a coefficient may be kept in place of one nearly as large, which moves a whole chunk, if by little.
    assert different.float().mean() <= (0.1 if device.type == "cuda" else 0.0)


def test_a_parameter_that_is_not_contiguous_is_trained(device: torch.device) -> None:
    results = []
    for backend in ("torch", "triton"):
        torch.manual_seed(0)
        parameter = nn.Parameter(torch.randn(32, 48).to(device).t())
        parameter.grad = torch.randn(32, 48).to(device).t()
        DeMo([parameter], lr=0.1, chunk=16, dense_below=0, topk=64, update="sgd", values="float32", backend=backend).step()
        results.append(parameter.detach())
    assert (results[0] - results[1]).abs().max() <= 4 * TRANSFORM_ERROR[device.type]


def test_what_the_kernels_cannot_do_is_refused_or_left_to_torch(
    device: torch.device, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    double = nn.Parameter(torch.zeros(64, 64, dtype=torch.float64, device=device))
    with pytest.raises(ValueError, match=r"cannot train parameter 0 of group 0: torch\.float64"):
        DeMo([double], backend="triton")
    wide = nn.Parameter(torch.zeros(512, 512, device=device))
    with pytest.raises(ValueError, match="its chunks are 256 x 256"):
        DeMo([wide], chunk=256, backend="triton")
    monkeypatch.setattr(torch.version, "hip", "6.0")
    if device.type == "cuda":
        with caplog.at_level(logging.WARNING, "thinwire"):
            optimizer = DeMo([wide])
        assert optimizer._local.backends == {"torch"}
        assert [record.getMessage() for record in caplog.records] == [
            "the torch backend, which is slower, trains parameter 0 of group 0 and others: "
            "the kernels are written for NVIDIA GPUs, and this is ROCm"
        ]


def test_without_a_gpu_triton_must_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = nn.Parameter(torch.zeros(64, 64))
    assert DeMo([parameter])._local.backends == {"torch"}
    monkeypatch.setattr(fused, "is_interpreted", lambda: False)
    with pytest.raises(ValueError, match="the kernels need a CUDA device, not cpu"):
        DeMo([parameter], backend="triton")
