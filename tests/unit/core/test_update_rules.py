import pytest
import torch

from thinwire.core import reference
from thinwire.core.update_rules import UPDATE_RULES, Hyper, orthogonalise


@pytest.mark.parametrize("name", sorted(UPDATE_RULES))
@pytest.mark.parametrize("shape", [(1, 4, 6), (3, 6, 4), (2, 1, 5)])
def test_rules_follow_the_oracle(name: str, shape: tuple[int, int, int]) -> None:
    rule = UPDATE_RULES[name]
    p = torch.randn(shape, dtype=torch.float64)
    expected, theirs = p.clone(), {}
    state = {key: torch.zeros_like(p) for key in rule.state_names}
    for step in range(1, 4):
        d = torch.randn(shape, dtype=torch.float64)
        reference.update(expected, d, theirs, name, 0.1, step)
        rule.apply_(p, d.clone(), state, Hyper(0.1, step, (0.9, 0.99), 1e-8))
    assert torch.allclose(p, expected, atol=1e-9)


@pytest.mark.parametrize("name", sorted(UPDATE_RULES))
def test_no_direction_no_change(name: str) -> None:
    p = torch.randn(2, 3, 4)
    before = p.clone()
    state = {key: torch.zeros_like(p) for key in UPDATE_RULES[name].state_names}
    UPDATE_RULES[name].apply_(p, torch.zeros_like(p), state, Hyper(0.1, 1, (0.9, 0.99), 1e-8))
    assert torch.equal(p, before)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_orthogonalise_brings_singular_values_near_one_at_any_scale(scale: float, device: torch.device) -> None:
    for shape in ((5, 40, 12), (12, 40)):
        values = torch.linalg.svdvals(orthogonalise((torch.randn(shape) * scale).to(device)))
        assert values.min() > 0.5
        assert values.max() < 1.3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_orthogonalise_follows_the_oracle_on_every_device(dtype: torch.dtype, device: torch.device) -> None:
    """In bfloat16 where a GPU is given float32."""
    for shape in ((3, 40, 12), (1, 7, 300), (2, 64, 64), (4, 1, 9)):
        d = torch.randn(shape, dtype=torch.float64)
        expected = torch.zeros_like(d)
        reference.update(expected, d, {}, "muon", -1.0, 1)
        expected /= max(1.0, shape[1] / shape[2]) ** 0.5
        found = orthogonalise(d.to(device, dtype))
        assert found.dtype == dtype
        rounded = device.type == "cuda" and dtype == torch.float32
        off = torch.linalg.matrix_norm(found.cpu() - expected) / torch.linalg.matrix_norm(expected)
        assert off.max() < (0.1 if rounded else 1e-4)
