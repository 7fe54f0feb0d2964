"""Orthonormal bases for chunks, and how much of a chunk's energy a few of its coefficients hold in each."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from unittest.mock import patch

import torch
from torch import Tensor

from thinwire.core import transform
from thinwire.core.transform import dct_basis

_CPU = torch.device("cpu")
_SEED = 1


def dct(size: int) -> Tensor:
    """The project's own."""
    return dct_basis(size, torch.float64, _CPU)


def identity(size: int) -> Tensor:
    """No transform."""
    return torch.eye(size, dtype=torch.float64)


def hadamard(size: int) -> Tensor:
    """Sylvester's; the size is a power of two."""
    if size & (size - 1):
        raise ValueError(f"size={size} is not a power of two: there is no Sylvester matrix of that size")
    basis = torch.ones(1, 1, dtype=torch.float64)
    while len(basis) < size:
        basis = torch.cat([torch.cat([basis, basis], dim=1), torch.cat([basis, -basis], dim=1)])
    return basis.mul_(size**-0.5)


def random_orthogonal(size: int) -> Tensor:
    """Drawn once: the same for the same size."""
    noise = torch.randn(size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(_SEED + size))
    basis: Tensor = torch.linalg.qr(noise).Q
    return basis


FIXED = {"DCT": dct, "identity": identity, "Hadamard": hadamard, "random": random_orthogonal}


@contextmanager
def in_place_of_the_dct(name: str) -> Iterator[None]:
    """Let the torch backend transform chunks to another basis of `FIXED`, unless it decodes in whole numbers."""

    @cache
    def basis_of(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return FIXED[name](size).to(dtype=dtype, device=device)

    with patch.object(transform, "dct_basis", basis_of):
        yield


def fitted(chunks_NRC: Tensor) -> tuple[Tensor, Tensor]:
    """The separable Karhunen-Loeve basis of these chunks: one basis of rows and one of columns for all of them, the
    eigenvectors of the sums of ``X X^T`` and ``X^T X``. One that is not separable would have as many dimensions as a
    chunk has elements, more than there are chunks to fit it to."""
    rows = torch.linalg.eigh(torch.einsum("nrc,nsc->rs", chunks_NRC, chunks_NRC)).eigenvectors.T
    cols = torch.linalg.eigh(torch.einsum("nrc,nrd->cd", chunks_NRC, chunks_NRC)).eigenvectors.T
    return rows, cols


def share_of_strongest(coefficients_NE: Tensor, counts: Sequence[int]) -> list[float]:
    """For each count k: the energy of every chunk's k strongest coefficients, as a share of the energy of all chunks.
    Chunks with more energy count for more, as they do in what is sent."""
    squares_NE = coefficients_NE.square()
    most = min(max(counts), squares_NE.shape[1])
    sums_K = squares_NE.topk(most, dim=1).values.sum(dim=0).cumsum(dim=0)
    total = squares_NE.sum().clamp(min=torch.finfo(squares_NE.dtype).tiny)
    return [float(sums_K[min(count, most) - 1] / total) for count in counts]


def shares_by_basis(chunks_NRC: Tensor, counts: Sequence[int]) -> dict[str, list[float]]:
    """`share_of_strongest` in every basis, for chunks of elements whose edges are powers of two.

    ``fitted`` knows all these chunks, and if they are few it fits their noise, too. ``own SVD`` has a basis of its own for
    each chunk, which would have to be sent with it: a bound, since k coefficients in any separable basis make a matrix of
    rank k at most, and none of that rank is nearer than the SVD's."""
    chunks_NRC = chunks_NRC.to("cpu", torch.float64)
    num_rows, num_cols = chunks_NRC.shape[1:]
    pairs = {name: (basis(num_rows), basis(num_cols)) for name, basis in FIXED.items()}
    pairs["fitted"] = fitted(chunks_NRC)
    found = {name: rows @ chunks_NRC @ cols.T for name, (rows, cols) in pairs.items()}
    found["own SVD"] = torch.linalg.svdvals(chunks_NRC)
    return {name: share_of_strongest(coefficients.flatten(1), counts) for name, coefficients in found.items()}


BASES = (*FIXED, "fitted", "own SVD")


def share_in_noise(count: int, num_elements: int) -> float:
    """What the strongest hold where no basis can do better than another: in chunks of white noise."""
    noise = torch.randn(64, num_elements, dtype=torch.float64, generator=torch.Generator().manual_seed(_SEED))
    return share_of_strongest(noise, [count])[0]
