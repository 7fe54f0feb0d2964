"""Balance: rows and columns of a gradient brought to one size, so that all count alike when the strongest are chosen.

Some neurons have far larger gradients than others, and would take most of the K places of their chunks. So each row and
column is divided by its usual size, the root of the running mean of its squares, which every replica keeps for itself. What
is divided out is not put back: rules that look at directions alone, such as muon and sign, do not miss it.
"""

import math

import torch
from torch import Tensor

from thinwire.core.layout import ChunkLayout

ENERGIES = ("row_energy", "col_energy")
"""What a tensor keeps for it: running means of squares, 0 at first; (matrices, rows) and (matrices, cols)."""
LEAST_SHARE = 1e-6
"""Of the mean energy: what is weaker is not made stronger any further."""

Energies = tuple[Tensor, Tensor]


def is_balanced(layout: ChunkLayout) -> bool:
    """Whether a tensor cut like this has rows and columns to balance."""
    return not layout.dense and len(layout.shape) > 1 and layout.row_edge > 1


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
    """Take a gradient into the running means, ``e <- decay * e + (1 - decay) * mean(g^2)``."""
    for energy, squares in zip(energies, mean_squares(gradient, energies), strict=True):
        energy.lerp_(squares, 1 - decay)


def weights_of(energy: Tensor) -> Tensor:
    """What rows, or columns, are multiplied with: the root of the mean energy of their matrix over their own."""
    mean = energy.mean(dim=-1, keepdim=True)
    weights = (mean / torch.maximum(energy, LEAST_SHARE * mean)).sqrt_()
    return torch.where(mean > 0, weights, 1.0)


def balanced(gradient: Tensor, energies: Energies) -> Tensor:
    """A copy of a gradient with its rows and columns weighted, in the dtype of the energies."""
    of_rows, of_cols = map(weights_of, energies)
    matrices = gradient.view(len(of_rows), of_rows.shape[1], of_cols.shape[1])
    return (matrices * of_rows[:, :, None]).mul_(of_cols[:, None, :]).view(gradient.shape)
