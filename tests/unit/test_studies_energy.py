"""Where the momentum's energy is: bases, shares, and what is looked at."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from thinwire.core import transform
from thinwire.core.layout import plan_layout
from thinwire.core.reference import strongest, to_chunks
from thinwire.core.scratch import Scratch
from thinwire.studies import toy
from thinwire.studies.bases import (
    BASES,
    FIXED,
    fitted,
    hadamard,
    in_place_of_the_dct,
    share_in_noise,
    share_of_strongest,
    shares_by_basis,
)
from thinwire.studies.chunks import KINDS, Sample, kind_of, take_samples, to_coefficients, to_elements
from thinwire.studies.q1_energy import COUNTS, GATHERED, SELECTED, EnergyProbe, EnergyTrial
from thinwire.studies.simulation import VirtualReplicas
from thinwire.studies.trials import Trial

CPU = torch.device("cpu")
TINY: dict[str, Any] = {"layers": 1, "width": 64, "heads": 1, "mlp_width": 64, "sequence": 16, "batch": 4, "chunk": 16}
TINY |= {"steps": 4, "warmup_steps": 1, "eval_every": 4, "eval_examples": 4, "lr": 1e-2, "update": "sign", "topk": 8}
TINY |= {"momentum_decay": 0.9}


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [1, 2, 16, 64])
@pytest.mark.parametrize("name", FIXED)
def test_bases_are_orthonormal(name: str, size: int) -> None:
    basis = FIXED[name](size)
    assert torch.allclose(basis @ basis.T, torch.eye(size, dtype=torch.float64), atol=1e-12)
    assert torch.equal(basis, FIXED[name](size))


def test_hadamard_has_entries_of_one_size_and_needs_a_power_of_two() -> None:
    assert torch.allclose(hadamard(8).abs(), torch.full((8, 8), 8**-0.5, dtype=torch.float64))
    with pytest.raises(ValueError, match="size=48"):
        hadamard(48)


def test_shares_are_those_of_a_slow_sum() -> None:
    chunks = noise(3, 20)
    chunks[1] *= 10
    total = sum(value**2 for chunk in chunks.tolist() for value in chunk)
    for count in (1, 4, 20, 30):
        wanted = 0.0
        for chunk in chunks.tolist():
            wanted += sum(chunk[index] ** 2 for index in strongest(chunk, count))
        assert math.isclose(share_of_strongest(chunks, [2, count])[1], wanted / total, rel_tol=1e-9)
    assert share_of_strongest(torch.zeros(2, 20), [4]) == [0.0]


def test_a_share_in_noise_is_between_the_even_one_and_all() -> None:
    assert 32 / 4096 < share_in_noise(32, 4096) < 0.2
    assert math.isclose(share_in_noise(64, 64), 1.0)


def test_each_basis_holds_what_is_made_of_it() -> None:
    """A chunk that is one basis vector of rows by one of columns has all its energy in one coefficient."""
    for name, basis in FIXED.items():
        chunks = torch.outer(basis(16)[3], basis(16)[5])[None].repeat(2, 1, 1)
        found = shares_by_basis(chunks, [1, 4])
        assert tuple(found) == BASES
        for other in (name, "fitted", "own SVD"):
            assert math.isclose(found[other][0], 1.0, rel_tol=1e-9)
        assert all(found[other][0] < 0.9 for other in FIXED if other != name)


def test_a_fitted_basis_holds_more_of_what_has_few_directions() -> None:
    left, right = noise(16, 2, seed=1), noise(2, 16, seed=2)
    chunks = left @ noise(50, 2, 2, seed=3) @ right
    rows, cols = fitted(chunks)
    assert torch.allclose(rows @ rows.T, torch.eye(16, dtype=torch.float64), atol=1e-9)
    coefficients = rows @ chunks @ cols.T
    assert math.isclose(share_of_strongest(coefficients.flatten(1), [4])[0], 1.0, rel_tol=1e-9)
    assert shares_by_basis(chunks, [4])["DCT"][0] < 0.9


def test_no_basis_holds_more_than_the_own_svd() -> None:
    found = shares_by_basis(noise(20, 16, 16) * noise(20, 16, 1, seed=1), [1, 4, 16])
    for basis in BASES:
        assert all(share <= bound + 1e-12 for share, bound in zip(found[basis], found["own SVD"], strict=True))


def test_coefficients_and_back() -> None:
    chunks = noise(5, 16, 8)
    assert torch.allclose(to_elements(to_coefficients(chunks)), chunks)
    assert torch.allclose(to_coefficients(chunks)[1], to_chunks(chunks, (16, 8), transform=True)[1])


def test_kinds() -> None:
    assert kind_of("model.embed_tokens.weight") == "embedding"
    assert kind_of("model.layers.3.self_attn.q_proj.weight") == "attention"
    assert kind_of("model.layers.3.mlp.down_proj.weight") == "mlp"
    assert kind_of("model.layers.3.post_attention_layernorm.weight") is None
    assert kind_of("model.norm.weight") is None


def test_samples_are_chunks_of_what_they_say() -> None:
    simulation = Trial("quickstart", 2, settings=TINY).build(CPU)
    assert isinstance(simulation.method, VirtualReplicas)
    samples = take_samples(simulation.method, 16, 5)
    assert {sample.kind for sample in samples} == set(KINDS)
    for kind in KINDS:
        assert sum(len(sample.chunks_N) for sample in samples if sample.kind == kind) == 5
    looked = []

    def watch(replica: int, local: Any) -> None:
        if replica == 0:
            looked.append(1)
            for sample in samples:
                gradient = local.tensors[sample.tensor].source.grad
                wanted = to_chunks(gradient[None].double(), (16, 16), transform=False)
                for mine, chunk in zip(sample.gradient_of(local), sample.chunks_N.tolist(), strict=True):
                    assert torch.equal(mine.double(), wanted[chunk])

    simulation.method.watchers.append(watch)
    simulation.take_step()
    assert looked


def test_the_probe_sees_what_a_replica_selects_from() -> None:
    """What it reconstructs, less what stays, has a value only where the payload has one, and these are the strongest."""
    simulation = Trial("quickstart", 2, settings=TINY).build(CPU)
    assert isinstance(simulation.method, VirtualReplicas)
    method, probe = simulation.method, EnergyProbe(simulation, 0.9, 16, [])
    method.watchers.remove(probe.watch)
    seen = []

    def check(replica: int, local: Any) -> None:
        if replica == 0:
            before = probe.selected_from([sample.gradient_of(local) for sample in probe._samples])
            for sample, elements in zip(probe._samples, before, strict=True):
                assert isinstance(elements, Tensor)
                _check_sent(sample, to_coefficients(elements), sample.residual_of(local), method.payloads_RB[0])
                seen.append(sample.kind)
        probe.watch(replica, local)

    method.watchers.append(check)
    for _ in range(4):
        simulation.take_step()
    assert set(seen) == set(KINDS)


def _check_sent(sample: Sample, before: Tensor, after: Tensor, payload_B: Tensor) -> None:
    is_sent = sample.is_sent_in(payload_B)
    assert is_sent.flatten(1).sum(dim=1).tolist() == [8] * len(before)
    scale = float(before.abs().max())
    assert float(((before - after) * ~is_sent).abs().max()) < 1e-5 * scale
    for chunk, chosen in zip(before.flatten(1).tolist(), is_sent.flatten(1), strict=True):
        assert strongest(chunk, 8) == chosen.nonzero()[:, 0].tolist()


def test_a_row_has_all_that_was_asked_for() -> None:
    row = EnergyTrial("quickstart", 2, settings=TINY).run(CPU)
    assert len(row["energy"]) == 3 * 2 * len(KINDS) * len(BASES)  # two of the four probes are the same step
    assert {entry["of"] for entry in row["energy"]} == {SELECTED, GATHERED}
    for entry in row["energy"]:
        assert len(entry["shares"]) == len(COUNTS)
        assert entry["shares"] == sorted(entry["shares"])
    first = {entry["of"]: entry["shares"] for entry in row["energy"] if entry["step"] == 1}
    assert first[SELECTED] == first[GATHERED]  # nothing has been taken out before the first step


def test_the_toy_has_fast_and_slow_components() -> None:
    course = toy.run_toy("DCT")
    assert course.steps[0] == 1
    assert course.steps[-1] == toy.STEPS
    assert course.shares == sorted(course.shares)
    assert math.isclose(course.shares[-1], 1.0)
    assert course.steps_to(2.0, of_fast=True) == 1
    assert course.steps_to(-1.0, of_fast=False) is None


@pytest.mark.parametrize("name", FIXED)
def test_another_basis_takes_the_place_of_the_dct_for_a_while(name: str) -> None:
    layout, gradient, scratch = plan_layout((64, 128), 64), noise(1, 64, 128).float(), Scratch()
    basis, before = FIXED[name](64).float(), transform.dct_basis
    with in_place_of_the_dct(name):
        coefficients = transform.forward(gradient, layout, scratch).clone()
        back = transform.inverse_(coefficients.reshape(2, -1).clone(), layout, scratch).clone()
    for place in range(2):
        chunk = gradient[0, :, 64 * place : 64 * (place + 1)]
        assert_close(coefficients[0, place], basis @ chunk @ basis.T)
        assert_close(back[place], chunk)
    assert transform.dct_basis is before
