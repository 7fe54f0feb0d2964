"""Balance: rows and columns of a gradient brought to one size, so that all count alike when the strongest are chosen.

Some neurons have far larger gradients than others, and would take most of the K places of their chunks. So each row and
column is divided by its usual size, the root of the running mean of its squares, which every replica keeps for itself. What
is divided out is not put back: it is part of the method, as division by root mean squares is of Adam's.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from thinwire.core.layout import ChunkLayout

ENERGIES = ("row_energy", "col_energy")
"""What a tensor keeps for it: running means of squares, 0 at first; (matrices, rows) and (matrices, cols)."""
LEAST_SHARE = 1e-6
"""Of the mean energy: what is weaker is not made stronger any further."""
LEAST_MEAN = 1e-30
"""A matrix with less mean energy is left as it is: `LEAST_SHARE` of it might underflow, and 0 / 0 is NaN."""

Energies = tuple[Tensor, Tensor]


def is_balanced(layout: ChunkLayout) -> bool:
    """Whether a tensor cut like this has rows and columns to balance: no chunks of one row, and no matrix of one column."""
    return not layout.dense and len(layout.shape) > 1 and layout.row_edge > 1 and layout.num_cols > 1


def num_matrices(layout: ChunkLayout) -> int:
    """How many matrices are stacked, also where their chunks make one tall matrix of them."""
    *leading, rows, cols = layout.shape
    return math.prod(leading) if leading and rows > 1 and cols == layout.num_cols else 1


def energy_shapes(layout: ChunkLayout) -> tuple[tuple[int, int], tuple[int, int]]:
    """Of rows and of columns; empty where there is nothing to balance."""
    if not is_balanced(layout):
        return (0, 0), (0, 0)
    matrices = num_matrices(layout)
    return (matrices, layout.num_matrices * layout.num_rows // matrices), (matrices, layout.num_cols)


def mean_squares(gradient: Tensor, energies: Energies) -> Energies:
    """Of the rows and of the columns of a gradient, in the dtype of the energies."""
    rows, cols = energies
    matrices = gradient.view(len(rows), rows.shape[1], cols.shape[1])
    norms = (torch.linalg.vector_norm(matrices, dim=dim, dtype=rows.dtype) for dim in (2, 1))
    of_rows, of_cols = (norm.square_() for norm in norms)
    return of_rows.div_(cols.shape[1]), of_cols.div_(rows.shape[1])


def note_(gradient: Tensor, energies: Energies, decay: float) -> None:
    """Take a gradient into the running means, ``e <- decay * e + (1 - decay) * mean(g^2)``; but not a matrix with NaN or Inf
    in it, with which no step is taken."""
    for energy, squares in zip(energies, mean_squares(gradient, energies), strict=True):
        is_finite = squares.sum(dim=-1, keepdim=True).isfinite()
        energy.lerp_(torch.where(is_finite, squares, energy), 1 - decay)


def weights_of(energy: Tensor) -> Tensor:
    """What rows, or columns, are multiplied with: the root of the mean energy of their matrix over their own."""
    mean = energy.mean(dim=-1, keepdim=True)
    weights = (mean / torch.maximum(energy, LEAST_SHARE * mean)).sqrt_()
    return torch.where(mean > LEAST_MEAN, weights, 1.0)


def weighed(bands: Tensor, weights: Energies, layout: ChunkLayout, start: int, stop: int) -> Tensor:
    """A copy of bands [start, stop) of a gradient, see `bands_of`, with the rows and columns of each matrix weighted."""
    of_rows, of_cols = weights
    bands_per_matrix = layout.num_bands // len(of_rows)
    rows = F.pad(of_rows, (0, bands_per_matrix * layout.row_edge - of_rows.shape[1])).view(-1, layout.row_edge, 1)
    cols = F.pad(of_cols, (0, bands.shape[-1] - of_cols.shape[1]))
    matrices = torch.arange(start, stop, device=bands.device) // bands_per_matrix
    return (bands * rows[start:stop]).mul_(cols[matrices, None])
