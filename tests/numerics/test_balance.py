"""Balanced gradients, on both backends: as the oracle does it, undone with the step, kept by checkpoints, each
replica's own.

`test_oracle.py` follows whole trainings of any shape.
"""

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.numerics.test_backends import TRANSFORM_ERROR
from thinwire import CheckpointError, DeMo
from thinwire.core import reference
from thinwire.core.balance import ENERGIES, energy_shapes, is_balanced, note_, num_matrices, weighed, weights_of
from thinwire.core.layout import bands_of, chunks_view, crop_to_rows, plan_layout
from thinwire.core.scratch import Scratch
from thinwire.exchange.loopback import run_replicas
from thinwire.exchange.plan import Coding, TensorSpec, make_plan
from thinwire.redistribution import assemble
from thinwire.slabs import LocalTensor

BACKENDS = ["torch", "triton"]
SHAPES: list[tuple[int, ...]] = [(12, 20), (2, 9, 10), (14,), (2, 16, 8), (4, 3, 2, 2), (1, 20)]
SETTINGS: dict[str, Any] = {"chunk": 16, "topk": 40, "dense_below": 0, "update": "sgd", "values": "float32", "balance": 0.8}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "triton":
        pytest.importorskip("triton", reason="triton has no build for this platform")
    return str(request.param)


def uneven(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """A gradient whose rows and columns are of very different size."""
    found = torch.randn(shape)
    for dim, size in enumerate(shape):
        found *= torch.randn(size, *[1] * (len(shape) - dim - 1)).exp()
    return found.to(device)


def balanced(gradient: Tensor, energies: tuple[Tensor, Tensor], chunk: int) -> Tensor:
    """A gradient as the torch backend weighs it: two parts of its bands, put together again."""
    layout = plan_layout(tuple(gradient.shape), chunk)
    weights, middle = (weights_of(energies[0]), weights_of(energies[1])), layout.num_bands // 2
    parts = [(0, middle), (middle, layout.num_bands)]
    found = torch.cat([weighed(bands_of(gradient, layout, *part), weights, layout, *part) for part in parts])
    chunks = chunks_view(found, layout).reshape(-1, layout.row_edge, layout.col_edge)
    return crop_to_rows(chunks, layout, 0, layout.num_bands).reshape(gradient.shape)


def parameters_for(shapes: list[tuple[int, ...]], device: torch.device) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape).to(device)) for shape in shapes]


def energies_of(optimizer: DeMo) -> list[Tensor]:
    return [state[name].clone() for state in optimizer.state.values() for name in ENERGIES]


@pytest.mark.parametrize("chunk", [4, 5, 7])
@pytest.mark.parametrize("decay", [0.5, 0.95])
def test_weights_are_the_oracles(decay: float, chunk: int) -> None:
    energies = (torch.zeros(2, 7, dtype=torch.float64), torch.zeros(2, 5, dtype=torch.float64))
    theirs = [([0.0] * 7, [0.0] * 5) for _ in range(2)]
    for step in range(4):
        gradient = uneven((2, 7, 5), torch.device("cpu")).double()
        gradient[0, 3] = 0  # a row that never has a gradient
        gradient[1] *= step > 1  # a matrix that has none at first
        expected = reference.balance(gradient, theirs, decay)
        note_(gradient, energies, decay)
        found = balanced(gradient, energies, chunk)
        assert torch.allclose(found, expected, rtol=1e-12)
        assert found.isfinite().all()
        assert not found[0, 3].any()


def test_every_row_and_column_comes_to_one_size() -> None:
    """Of a gradient that is a product of sizes and signs, all is divided out, but for the size of the whole."""
    sizes = (torch.rand(12, 1, dtype=torch.float64) + 0.01) * (torch.rand(1, 9, dtype=torch.float64) + 0.01)
    gradient = sizes * torch.randn(12, 9, dtype=torch.float64).sign()
    energies = (torch.zeros(1, 12, dtype=torch.float64), torch.zeros(1, 9, dtype=torch.float64))
    note_(gradient, energies, 0.9)
    found = balanced(gradient, energies, 5).abs()
    assert torch.allclose(found, found[0, 0].expand_as(found))
    assert torch.allclose(found[0, 0], gradient.square().mean().sqrt())


def test_what_is_nearly_nothing_is_not_made_much_of() -> None:
    assert weights_of(torch.tensor([[1.0, 1e-30, 1.0, 0.0]])).max() <= 1000
    assert torch.equal(weights_of(torch.zeros(2, 3)), torch.ones(2, 3))
    for mean in (1e-20, 1e-31, 1e-40, 1e-44):  # where a millionth underflows, what is 0 beside it would have no weight
        assert weights_of(torch.tensor([[mean, 0.0, mean]])).isfinite().all(), mean


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((20, 25), ((1, 20), (1, 25))),
        ((3, 17, 9), ((3, 17), (3, 9))),
        ((2, 16, 32), ((2, 16), (2, 32))),
        ((4, 3, 2, 2), ((1, 4), (1, 12))),
        ((30,), ((0, 0), (0, 0))),
        ((), ((0, 0), (0, 0))),
        ((1, 40), ((0, 0), (0, 0))),
        ((40, 1), ((0, 0), (0, 0))),
        ((0, 7), ((0, 0), (0, 0))),
    ],
)
def test_what_has_rows_and_columns(shape: tuple[int, ...], expected: tuple[tuple[int, int], tuple[int, int]]) -> None:
    layout = plan_layout(shape, 16)
    assert energy_shapes(layout) == expected
    assert is_balanced(layout) == (expected[0] != (0, 0))
    assert not is_balanced(plan_layout(shape, 16, dense_below=10_000))
    assert not is_balanced(layout) or num_matrices(layout) == expected[0][0]


def test_both_backends_balance_alike(device: torch.device) -> None:
    pytest.importorskip("triton", reason="triton has no build for this platform")
    starts = [torch.randn(shape) for shape in SHAPES]
    gradients = [[uneven(shape, device) for shape in SHAPES] for _ in range(2)]
    for gradient in gradients[1][::2]:
        gradient.zero_()
    found = []
    for name in BACKENDS:
        parameters = [nn.Parameter(start.to(device)) for start in starts]
        # All is sent, so that nothing is left to rounding.
        optimizer = DeMo(parameters, lr=0.1, backend=name, exact_decode=False, **{**SETTINGS, "topk": 256})
        for step in gradients:
            for parameter, gradient in zip(parameters, step, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
        found.append(([p.detach() - s.to(device) for p, s in zip(parameters, starts, strict=True)], energies_of(optimizer)))
    for mine, theirs in zip(found[0][0], found[1][0], strict=True):
        assert (mine - theirs).abs().max() <= 4 * TRANSFORM_ERROR[device.type] * (1 + mine.abs().max())
    for mine, theirs in zip(found[0][1], found[1][1], strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_find_energies_and_weights_of_tall_and_of_many_matrices(dtype: torch.dtype, device: torch.device) -> None:
    """More bands, and longer vectors, than a program takes at once; a matrix with no gradient, and one that has Inf."""
    pytest.importorskip("triton", reason="triton has no build for this platform")
    from thinwire.fused_stack import FusedStack
    from thinwire.kernels.balance import note_ as note_on_device_

    shapes = [(4101, 20), (3, 40, 70), (5, 2, 33)]
    specs = [TensorSpec(str(place), shape, str(dtype), 0) for place, shape in enumerate(shapes)]
    (bucket,) = make_plan(specs, [Coding(16, 8, "float32", "adaptive", 0)]).buckets
    layouts = [plan_layout(shape, 16) for shape in shapes]
    energies = [[torch.rand(size) for size in energy_shapes(layout)] for layout in layouts]
    gradients = [uneven(shape, torch.device("cpu")).to(dtype) for shape in shapes]
    gradients[1][0] = 0
    gradients[1][1, 7, 9] = torch.inf
    energies[1][0][0] = energies[1][1][0] = 0
    found = []
    for layout, gradient, pair in zip(layouts, gradients, energies, strict=True):
        momentum_CE = torch.zeros(layout.num_chunks, layout.row_edge * layout.col_edge)
        mine = (pair[0].to(device, copy=True), pair[1].to(device, copy=True))
        found.append(LocalTensor(nn.Parameter(gradient.to(device)), momentum_CE.to(device), energies=mine))
    for stack in bucket.stacks:
        step = FusedStack(stack, found, Scratch(), torch.zeros(1, dtype=torch.int32, device=device))
        on_device = {entry.tensor: gradients[entry.tensor].to(device) for entry in stack.entries}
        rows = {entry.tensor: step._encode_row(entry, on_device[entry.tensor], True) for entry in stack.entries}
        for _, table in step._encode_tables.update(lambda entry, rows=rows: rows[entry.tensor]):
            assert table.balance is not None
            note_on_device_(table, 0.8, Scratch())
        for index in on_device:
            pair = (energies[index][0].double(), energies[index][1].double())
            note_(gradients[index].double(), pair, 0.8)
            vectors = step._weights[index].cpu().view(len(pair[0]), -1)
            for place, energy in enumerate(pair):
                size, at = energy.shape[1], place * pair[0].shape[1]
                assert torch.allclose(found[index].energies[place].cpu().double(), energy, rtol=1e-5)  # type: ignore[index]
                assert torch.allclose(vectors[:, at : at + size].double(), weights_of(energy), rtol=1e-5)
                before = vectors[:, vectors.shape[1] // 2 + at :][:, :size]
                assert torch.equal(before, energies[index][place])


def test_it_makes_a_difference_where_rows_differ(backend: str, device: torch.device) -> None:
    """One row is a thousand times stronger than the others, and without balance it alone is sent."""
    shares = []
    for balance in (0.0, 0.9):
        parameter = nn.Parameter(torch.zeros(16, 16, device=device))
        options = {**SETTINGS, "balance": balance, "topk": 256, "backend": backend}
        optimizer = DeMo([parameter], lr=1.0, exact_decode=False, **options)
        parameter.grad = torch.randn(16, 16, device=device)
        parameter.grad[5] *= 1000
        optimizer.step()
        squares = parameter.detach().square()
        shares.append(float(squares[5].sum() / squares.sum()))
    assert shares[0] > 0.99
    assert 0 < shares[1] < 0.3


def test_a_step_that_is_not_taken_leaves_no_trace(backend: str, device: torch.device) -> None:
    parameters = parameters_for(SHAPES[:2], device)
    optimizer = DeMo(parameters, lr=0.1, backend=backend, on_nonfinite="skip", **SETTINGS)
    for step in range(4):
        for parameter in parameters:
            parameter.grad = uneven(tuple(parameter.shape), device)
        before = energies_of(optimizer)
        if step == 2:
            parameters[1].grad[1, 2, 3] = random.choice([torch.nan, torch.inf])  # type: ignore[index]
        optimizer.step()
        assert optimizer.num_skipped_steps == (step >= 2)
        for old, new in zip(before, energies_of(optimizer), strict=True):
            assert torch.equal(old, new) == (step == 2 or old.numel() == 0)
    assert all(bool(parameter.isfinite().all()) for parameter in parameters)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_taken_in_with_a_delay_either(bad: float, backend: str, device: torch.device) -> None:
    """A late step is taken back without `undo_`."""
    parameters = parameters_for(SHAPES[:2], device)
    optimizer = DeMo(parameters, lr=0.1, backend=backend, on_nonfinite="skip", delay=1, **SETTINGS)
    for step in range(5):
        for parameter in parameters:
            parameter.grad = uneven(tuple(parameter.shape), device)
        if step == 2:
            parameters[0].grad[3, 3] = bad  # type: ignore[index]
        optimizer.step()
    optimizer.drain()
    assert optimizer.num_skipped_steps == 1
    assert all(bool(energy.isfinite().all()) and bool(energy.any()) for energy in energies_of(optimizer))


def test_energies_are_as_before_if_encoding_fails(
    backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take the gradients in before these are encoded, for which there may be no memory."""
    parameters = parameters_for(SHAPES[:2], device)
    optimizer = DeMo(parameters, lr=0.1, backend=backend, **SETTINGS)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = uneven(tuple(parameter.shape), device)
        optimizer.step()
    before = energies_of(optimizer)
    place = "thinwire.fused_stack.encode.encode_" if backend == "triton" else "thinwire.wire.codec.ChunkCodec.encode"
    monkeypatch.setattr(place, lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert all(map(torch.equal, before, energies_of(optimizer)))


def test_energies_may_lie_in_memory_as_they_like(device: torch.device) -> None:
    """As they do when somebody has moved or replaced the state."""
    pytest.importorskip("triton", reason="triton has no build for this platform")
    shape, results = (2, 16, 20), []
    gradient, sizes = uneven(shape, device), energy_shapes(plan_layout(shape, 16))
    energies = [torch.rand(*size[::-1]).mT.to(device) for size in sizes]
    for backend in BACKENDS:
        parameter = nn.Parameter(torch.zeros(shape, device=device))
        optimizer = DeMo([parameter], lr=0.1, backend=backend, **SETTINGS)
        optimizer.state[parameter].update(zip(ENERGIES, [energy.mT.clone().mT for energy in energies], strict=True))
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3, device=device))]})  # all is planned anew
        parameter.grad = gradient.clone()
        optimizer.step()
        results.append(optimizer.state[parameter][ENERGIES[1]])
    assert not energies[0].is_contiguous()
    assert torch.allclose(*results, rtol=1e-5)


def test_replicas_stay_the_same_and_keep_their_own(backend: str, device: torch.device) -> None:
    def train(transport: Any) -> tuple[list[Tensor], list[Tensor]]:
        torch.manual_seed(transport.replica)
        parameters = parameters_for(SHAPES[:2], device)
        optimizer = DeMo(parameters, lr=0.1, transport=transport, backend=backend, num_buckets=2, **SETTINGS)
        for step in range(2):
            for parameter in parameters:
                is_missing = step == 1 and transport.replica == 0
                parameter.grad = None if is_missing else uneven(tuple(parameter.shape), device)
            optimizer.step()
        optimizer.check_drift("raise")
        return [parameter.detach() for parameter in parameters], energies_of(optimizer)

    results = run_replicas(train, 2)
    for parameters, energies in results[1:]:
        assert all(map(torch.equal, parameters, results[0][0]))
        assert not any(torch.equal(mine, first) for mine, first in zip(energies, results[0][1], strict=True) if mine.numel())


def trained(num_steps: int, seed: int = 0, **options: Any) -> tuple[list[nn.Parameter], DeMo]:
    torch.manual_seed(seed)
    parameters = parameters_for(SHAPES, torch.device("cpu"))
    optimizer = DeMo(parameters, lr=0.1, **{**SETTINGS, **options})
    go_on(parameters, optimizer, range(num_steps))
    return parameters, optimizer


def go_on(parameters: list[nn.Parameter], optimizer: DeMo, steps: range) -> None:
    for step in steps:
        torch.manual_seed(100 + step)
        for parameter in parameters:
            parameter.grad = uneven(tuple(parameter.shape), torch.device("cpu"))
        optimizer.step()


def test_a_resumed_run_goes_on_bit_for_bit() -> None:
    expected, _ = trained(5)
    first, saved = trained(3)
    parameters, optimizer = trained(1, seed=7)
    optimizer.load_state_dict(saved.state_dict())
    for parameter, value in zip(parameters, first, strict=True):
        parameter.data.copy_(value.data)
    go_on(parameters, optimizer, range(3, 5))
    assert all(map(torch.equal, parameters, expected))


def test_a_checkpoint_with_or_without_it_is_not_taken_for_the_other() -> None:
    _, without = trained(1, balance=0.0)
    _, balanced_ = trained(1)
    before = energies_of(balanced_)
    with pytest.raises(
        CheckpointError, match=r"group 0 of the checkpoint was trained with balance=0\.0, this optimizer has"
    ):
        balanced_.load_state_dict(without.state_dict())
    with pytest.raises(CheckpointError, match=r"trained with balance=0\.8, this optimizer has balance=0\.0"):
        without.load_state_dict(balanced_.state_dict())
    assert all(map(torch.equal, energies_of(balanced_), before))
    for residual in ("keep", "zero"):  # then it is found anew
        balanced_.load_state_dict(without.state_dict(), residual=residual)
        assert not any(energy.any() for energy in energies_of(balanced_))
        assert balanced_.param_groups[0]["balance"] == 0.8


def test_other_replicas_take_over_what_is_known() -> None:
    _, saved = trained(2)
    states = [saved.state_dict()]
    for residual, chunk in (("mean", 16), ("zero", 16), ("mean", 8)):
        _, optimizer = trained(0, chunk=chunk)
        optimizer.load_state_dict(assemble(optimizer, states, residual))
        found = energies_of(optimizer)
        if residual == "mean" and chunk == 16:
            assert all(map(torch.equal, found, energies_of(saved)))
        else:
            assert not any(energy.any() for energy in found)


@pytest.mark.parametrize("residual", ["mean", "zero", "keep", "sum"])
@pytest.mark.parametrize("options", [{"balance": 0.0}, {"balance": 0.8, "momentum_dtype": "float64", "update": "adamw"}])
def test_other_replicas_may_begin_or_leave_off(options: dict[str, Any], residual: str) -> None:
    _, saved = trained(2, **options)
    _, other = trained(0, **{**options, "balance": 0.8 - options["balance"]})
    other.load_state_dict(assemble(other, [saved.state_dict()], residual))
    assert other.param_groups[0]["balance"] == 0.8 - options["balance"]
    assert not any(energy.any() for state in other.state.values() for name, energy in state.items() if name in ENERGIES)
    _, same = trained(0, **options)
    same.load_state_dict(assemble(same, [saved.state_dict()], residual))


def test_it_may_begin_during_training() -> None:
    parameters, optimizer = trained(1, balance=0.0)
    assert not set(ENERGIES) & set(optimizer.state[parameters[0]])
    optimizer.param_groups[0]["balance"] = 0.9
    go_on(parameters, optimizer, range(1, 3))
    assert all(energy.any() for energy in energies_of(optimizer) if energy.numel())


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (1.0, "balance must be a number from 0 to below 1, got 1"),
        (-0.1, "balance must be a finite number from 0"),
        (True, "balance must be a number"),
    ],
)
def test_what_it_cannot_be_is_refused(value: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        DeMo([nn.Parameter(torch.zeros(3, 3))], balance=value)
