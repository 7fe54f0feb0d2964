import pytest
import torch

from thinwire.core import reference
from thinwire.core.layout import bands_of, plan_layout
from thinwire.core.scratch import Scratch
from thinwire.core.transform import accumulate_, dct_basis, forward, frequencies_of, inverse_, inverse_of_few

SHAPES = [(64, 64), (50, 33), (1, 40), (40, 1), (97,), (3, 34, 40), (12, 5, 3, 3), (130, 70)]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 128])
def test_the_basis_is_orthonormal(size: int) -> None:
    basis = dct_basis(size, torch.float64, torch.device("cpu"))
    assert torch.allclose(basis @ basis.T, torch.eye(size, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(basis, reference.dct_matrix(size), atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_forward_is_the_oracles_and_inverse_undoes_it(shape: tuple[int, ...], device: torch.device) -> None:
    layout, scratch = plan_layout(shape, 32), Scratch()
    tensor = torch.randn(shape, dtype=torch.float64)
    bands = bands_of(tensor.to(device), layout, 0, layout.num_bands)
    coefficients = forward(bands, layout, scratch).reshape(-1, layout.num_elements).clone()
    matrices = tensor.view(layout.num_matrices, layout.num_rows, layout.num_cols)
    expected = torch.stack(reference.to_chunks(matrices, (layout.row_edge, layout.col_edge), transform=True))
    assert torch.allclose(coefficients.cpu(), expected.view_as(coefficients.cpu()), atol=1e-10)
    back = inverse_(coefficients, layout, scratch).cpu()
    plain = torch.stack(reference.to_chunks(matrices, (layout.row_edge, layout.col_edge), transform=False))
    assert torch.allclose(back, plain, atol=1e-10)


@pytest.mark.parametrize("shape", SHAPES)
def test_few_coefficients_give_the_same_inverse(shape: tuple[int, ...], device: torch.device) -> None:
    layout, scratch = plan_layout(shape, 32), Scratch()
    num_elements, num_kept = layout.num_elements, min(5, layout.num_elements)
    full = torch.zeros(layout.num_chunks, num_elements, dtype=torch.float64, device=device)
    indices = torch.rand(layout.num_chunks, num_elements, device=device).topk(num_kept).indices
    values = torch.randn(layout.num_chunks, num_kept, dtype=torch.float64, device=device)
    indices[0, 0], values[0, 0] = num_elements, 0.0  # a void
    full.scatter_add_(1, indices.clamp(max=num_elements - 1), values)
    few = inverse_of_few(frequencies_of(indices, layout), values, layout, scratch).clone()
    assert torch.allclose(few, inverse_(full, layout, Scratch()), atol=1e-10)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dense_below", [0, 10**9])
def test_gradients_accumulate_into_the_momentum(shape: tuple[int, ...], dense_below: int, device: torch.device) -> None:
    layout, scratch = plan_layout(shape, 32, dense_below), Scratch()
    momentum = torch.randn(layout.num_chunks, layout.num_elements, dtype=torch.float64, device=device)
    bands = bands_of(torch.randn(shape, dtype=torch.float64, device=device), layout, 0, layout.num_bands)
    expected = 0.9 * momentum - 2.5 * forward(bands, layout, Scratch()).reshape(momentum.shape)
    accumulate_(momentum, bands, layout, 0.9, -2.5, scratch)
    assert torch.allclose(momentum, expected, atol=1e-12)


def test_a_dense_layout_has_no_transform() -> None:
    layout = plan_layout((10,), 64, dense_below=11)
    bands = torch.randn(1, 1, 10)
    assert torch.equal(forward(bands, layout, Scratch()).flatten(), bands.flatten())
    assert torch.equal(inverse_(bands.view(1, 10), layout, Scratch()).flatten(), bands.flatten())
