"""Exact decoding: whole numbers, and so the same bits wherever it runs."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.numerics.test_backends import Shapes, group_step, momenta_for, parameters_for, plan_for
from thinwire import DeMo
from thinwire.core.combine import COMBINE_RULES, Decoding
from thinwire.core.exact import inverse_exact_
from thinwire.core.layout import ChunkLayout
from thinwire.core.reference import dct_matrix
from thinwire.core.scratch import Scratch
from thinwire.core.update_rules import UPDATE_RULES
from thinwire.exchange.plan import ExchangePlan
from thinwire.local_step import LocalStep
from thinwire.slabs import LocalTensor
from thinwire.wire.values import VALUE_CODECS

EDGES = [(64, 64), (1, 64), (32, 1), (37, 64), (128, 128), (16, 5), (2, 2), (300, 520)]


def layout_of(rows: int, cols: int) -> ChunkLayout:
    return ChunkLayout((rows, cols), 1, rows, cols, rows, cols, dense=False)


def sparse(rows: int, cols: int, num_chunks: int = 3) -> Tensor:
    chunks = torch.randn(num_chunks, rows * cols) * torch.tensor([1e-20, 1.0, 3e7])[:num_chunks, None]
    return chunks.where(torch.rand_like(chunks) < 0.1, 0.0)


def in_python(chunk: Tensor) -> Tensor:
    """As `core/exact.py` says it, with integers that have no limit."""
    rows, cols = chunk.shape

    def basis(size: int, bits: int) -> tuple[list[list[int]], int, int]:
        exponent = 0 if size == 1 else math.floor(bits + 0.5 * math.log2(size / 2))
        found = [[round(value * 2**exponent) for value in row] for row in dct_matrix(size).tolist()]
        return found, exponent, max(sum(abs(row[place]) for row in found) for place in range(size))

    bits, basis_bits = 8, 8 if max(rows, cols) <= 64 else 7
    (a, a_exponent, a_sum), (b, b_exponent, b_sum) = basis(rows, basis_bits), basis(cols, basis_bits)
    drop = 0
    while b_sum * 2**bits > 2**drop * min(2**11, 2**24 // a_sum):
        drop += 1
    largest = float(chunk.abs().max())
    exponent = max(-100, math.ceil(math.log2(largest))) if largest else -100
    n = [[round(value * 2.0 ** (bits - exponent)) for value in row] for row in chunk.tolist()]
    t = [[round(sum(n[f][g] * b[g][y] for g in range(cols)) / 2**drop) for y in range(cols)] for f in range(rows)]
    d = [[float(sum(a[f][x] * t[f][y] for f in range(rows))) for y in range(cols)] for x in range(rows)]
    return torch.tensor(d) * 2.0 ** (exponent + drop - bits - a_exponent - b_exponent)


@pytest.mark.parametrize(("rows", "cols"), [(1, 64), (32, 1), (16, 5), (37, 24), (2, 2), (70, 12)])
def test_it_is_what_it_says(rows: int, cols: int) -> None:
    chunks = sparse(rows, cols)
    found = inverse_exact_(chunks.clone(), layout_of(rows, cols), Scratch(), None)
    for chunk, mine in zip(chunks, found, strict=True):
        assert torch.equal(mine, in_python(chunk.view(rows, cols)))


@pytest.mark.parametrize(("rows", "cols"), EDGES)
def test_sums_are_exact_and_close_to_real_arithmetic(rows: int, cols: int) -> None:
    """In float64 every sum is exact; equal results mean that float32 rounded none, whatever the order of its additions."""
    chunks = sparse(rows, cols)
    chunks[1] = torch.rand(rows * cols).sub_(0.5).sign_()
    chunks[2].fill_(1.0)  # the largest sums there can be: all of them add up in the first column
    layout = layout_of(rows, cols)
    found = inverse_exact_(chunks.clone(), layout, Scratch(), None)
    assert torch.equal(found, inverse_exact_(chunks.double(), layout, Scratch(), None).float())
    real = dct_matrix(rows).T @ chunks.view(-1, rows, cols).double() @ dct_matrix(cols)
    for mine, theirs in zip(found.double(), real, strict=True):
        assert (mine - theirs).norm() <= (0.06 if max(rows, cols) == 128 else 0.03) * theirs.norm()


def test_votes_need_no_search_for_the_largest() -> None:
    votes = torch.randint(-3, 4, (4, 256)) / 3.0
    votes[:, 0] = 1.0
    layout = layout_of(16, 16)
    assert torch.equal(
        inverse_exact_(votes.clone(), layout, Scratch(), 1.0), inverse_exact_(votes.clone(), layout, Scratch(), None)
    )
    assert not inverse_exact_(torch.zeros(2, 256), layout, Scratch(), None).any()


def applied(
    plan: ExchangePlan, backend: str, device: torch.device, given: tuple[list[Tensor], list[Tensor], Tensor], *how: Any
) -> list[Tensor]:
    """The parameters and the state of the rule, after these payloads have been applied."""
    rule, combine = how
    tensors = []
    for parameter, momentum in zip(given[0], given[1], strict=True):
        own = nn.Parameter(parameter.to(device, copy=True))
        state = {name: torch.full_like(own, 0.01, dtype=torch.float32) for name in UPDATE_RULES[rule].state_names}
        tensors.append(LocalTensor(own, momentum.to(device, copy=True), state))
    step = LocalStep(plan, tensors, backend)
    assert step.backends == {backend}
    with torch.no_grad():
        step.apply_(plan.buckets[0], [group_step(rule)], given[2].to(device), Decoding(combine, is_exact=True))
    return [t.detach().cpu() for tensor in tensors for t in (tensor.parameter, *tensor.rule_state.values())]


def payload_of(plan: ExchangePlan, parameters: list[Tensor], momenta: list[Tensor]) -> Tensor:
    pairs = zip(parameters, momenta, strict=True)
    sender = LocalStep(plan, [LocalTensor(nn.Parameter(p), m) for p, m in pairs], "torch")
    encoding = sender.empty(plan.buckets[0])
    with torch.no_grad():
        sender.encode_(plan.buckets[0], [group_step()], encoding)
    return encoding.payload_B


MEANS = [rule for rule in COMBINE_RULES if rule.startswith("mean")]
CASES = [("sgd", values, MEANS[place % 2], 3) for place, values in enumerate(sorted(VALUE_CODECS))] + [
    *(("sgd", values, "majority_vote", (1, 2, 3, 5)[place % 4]) for place, values in enumerate(sorted(VALUE_CODECS))),
    ("sign", "float32", "majority_vote", 1),
    ("adamw", "int4", "majority_vote", 5),
    ("lion", "sign", "majority_vote", 20),
    ("sign", "sign", "mean_over_senders", 3),
    ("sign", "sign", "mean_over_replicas", 20),
    ("sgd", "sign", "mean_over_replicas", 7),
    ("adamw", "sign_scale", "mean_over_senders", 5),
    ("lion", "sign", "mean_over_senders", 1),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rule", "values", "combine", "num_replicas"), CASES)
def test_every_backend_and_device_finds_the_same_bits(
    rule: str, values: str, combine: str, num_replicas: int, dtype: torch.dtype, device: torch.device
) -> None:
    pytest.importorskip("triton", reason="triton has no build for this platform")
    shapes: Shapes = [(20, 25), (30,), (32, 16), (5,)]
    cpu = torch.device("cpu")
    plan = plan_for(shapes, dtype, values=values, dense_below=8)
    parameters, momenta = parameters_for(shapes, cpu, dtype), momenta_for(plan, cpu)
    payloads = [payload_of(plan, parameters, momenta_for(plan, cpu)) for _ in range(num_replicas)]
    given = (parameters, momenta, torch.stack(payloads))
    expected = applied(plan, "torch", cpu, given, rule, combine)
    for backend in ("torch", "triton"):
        found = applied(plan, backend, device, given, rule, combine)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True)), backend


@pytest.mark.parametrize("num_replicas", [255, 256, 511, 512])
def test_many_votes_are_the_same_bits(num_replicas: int, device: torch.device) -> None:
    """On both sides of where counters become wider, and of where votes are no longer divided with their scale."""
    pytest.importorskip("triton", reason="triton has no build for this platform")
    shapes: Shapes = [(20, 25), (5,)]
    cpu = torch.device("cpu")
    plan = plan_for(shapes, values="sign", dense_below=8)
    parameters, momenta = parameters_for(shapes, cpu), momenta_for(plan, cpu)
    few = [payload_of(plan, parameters, momenta_for(plan, cpu)) for _ in range(5)]
    given = (parameters, momenta, torch.stack([few[replica % 5] for replica in range(num_replicas)]))
    expected = applied(plan, "torch", cpu, given, "sgd", "mean_over_replicas")
    found = applied(plan, "triton", device, given, "sgd", "mean_over_replicas")
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


def test_votes_may_be_divided_with_their_scale() -> None:
    """The kernel multiplies votes by scale / replicas, where others divide and multiply: what is rounded is the same."""
    pytest.importorskip("triton", reason="triton has no build for this platform")
    from thinwire.kernels.decode import MOST_LATER_DIVISOR

    for num_replicas in range(2, MOST_LATER_DIVISOR + 1):
        votes = torch.arange(num_replicas + 1, dtype=torch.float32)
        for bits in range(8, 9 + num_replicas.bit_length()):
            quotients = votes / num_replicas * 2.0**bits
            possible = quotients <= 256  # a scale is that of the largest in the chunk
            products = votes * (torch.tensor(2.0**bits) / num_replicas)
            assert torch.equal(quotients[possible].round(), products[possible].round()), (num_replicas, bits)


@pytest.mark.parametrize("num_replicas", [1, 4, 32])
@pytest.mark.parametrize("combine", MEANS)
def test_few_signs_are_not_those_of_real_arithmetic(combine: str, num_replicas: int) -> None:
    """However many replicas votes are divided by."""
    cpu, shapes = torch.device("cpu"), [(128, 128)]
    plan = plan_for(shapes, values="sign", chunk=64, topk=32)
    parameters, momenta = [torch.zeros(128, 128)], momenta_for(plan, cpu)
    payloads_RB = torch.stack([payload_of(plan, parameters, momenta_for(plan, cpu)) for _ in range(num_replicas)])
    directions = []
    for is_exact in (True, False):
        local = LocalTensor(nn.Parameter(parameters[0].double()), momenta[0].clone())
        step = LocalStep(plan, [local], "torch")
        with torch.no_grad():
            step.apply_(plan.buckets[0], [group_step("sgd")], payloads_RB, Decoding(combine, is_exact))
        directions.append(local.parameter)
    exact, real = directions
    assert (exact.sign() != real.sign()).double().mean() < 0.008  # of 3,000 draws the most was 0.0061, with 4 replicas
    # Random inputs: of 60 draws the least was 0.99992, with 4 replicas.
    assert torch.cosine_similarity(exact.flatten(), real.flatten(), dim=0) > 0.9998


@pytest.mark.parametrize("values", ["int4", "int8"])
def test_a_value_of_0_is_no_vote(values: str, device: torch.device) -> None:
    """One coefficient so large that the sender's others round to 0: these are no votes against the other's."""
    pytest.importorskip("triton", reason="triton has no build for this platform")
    plan, cpu = plan_for([(16, 16)], values=values), torch.device("cpu")
    parameters, momenta = parameters_for([(16, 16)], cpu), momenta_for(plan, cpu)
    one_large = [-momentum for momentum in momenta]
    one_large[0][:, 0] = 1e6
    payloads = [payload_of(plan, parameters, sent) for sent in (one_large, [momentum.clone() for momentum in momenta])]
    given = (parameters, momenta, torch.stack(payloads))
    expected = applied(plan, "torch", cpu, given, "sgd", "majority_vote")
    assert torch.equal(applied(plan, "triton", device, given, "sgd", "majority_vote")[0], expected[0])


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_muon_is_left_alone(backend: str, device: torch.device) -> None:
    """It would blow up what rounding adds: small singular values become as large as the others."""
    pytest.importorskip("triton", reason="triton has no build for this platform")
    ends = []
    gradient = torch.randn(32, 48)
    for is_exact in (False, True):
        parameter = nn.Parameter(torch.zeros(32, 48, device=device))
        parameter.grad = gradient.to(device)
        options: dict[str, Any] = {"update": "muon", "chunk": 16, "topk": 8, "dense_below": 0, "exact_decode": is_exact}
        DeMo([parameter], backend=backend, **options).step()
        ends.append(parameter.detach())
    assert torch.equal(*ends)
    assert ends[0].any()


@pytest.mark.parametrize(("chunk", "topk"), [(64, 32), (128, 100), (32, 8)])
def test_usual_chunks(chunk: int, topk: int, device: torch.device) -> None:
    pytest.importorskip("triton", reason="triton has no build for this platform")
    plan = plan_for([(chunk, 2 * chunk)], chunk=chunk, topk=topk)
    cpu = torch.device("cpu")
    parameters, momenta = parameters_for([(chunk, 2 * chunk)], cpu), momenta_for(plan, cpu)
    sender = LocalStep(plan, [LocalTensor(nn.Parameter(parameters[0]), momenta[0].clone())], "torch")
    encoding = sender.empty(plan.buckets[0])
    with torch.no_grad():
        sender.encode_(plan.buckets[0], [group_step()], encoding)
    given = (parameters, momenta, encoding.payload_B[None])
    expected = applied(plan, "torch", cpu, given, "sgd", "mean_over_senders")
    found = applied(plan, "triton", device, given, "sgd", "mean_over_senders")
    assert torch.equal(found[0], expected[0])
