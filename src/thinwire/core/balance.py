"""Balance: rows and columns of a gradient brought to one size, so that all count alike when the strongest are chosen.

Some neurons have far larger gradients than others, and would take most of the K places of their chunks. So each row and
column is divided by its usual size, the root of the running mean of its squares, which every replica keeps for itself. What
is divided out is not put back: rules that look at directions alone, such as muon and sign, do not miss it.
"""

import torch
from torch import Tensor

from thinwire.core.layout import ChunkLayout

ENERGIES = ("row_energy", "col_energy")
"""What a tensor keeps for it: running means of squares, 0 at first."""
LEAST_SHARE = 1e-6
"""Of the mean energy: what is weaker is not made stronger any further."""


def is_balanced(layout: ChunkLayout) -> bool:
    """Whether a tensor cut like this has rows and columns to balance."""
    return not layout.dense and len(layout.shape) > 1 and layout.row_edge > 1


def num_energies(layout: ChunkLayout) -> tuple[int, int]:
    """Rows and columns; stacked matrices have their rows below each other and share their columns."""
    return (layout.num_matrices * layout.num_rows, layout.num_cols) if is_balanced(layout) else (0, 0)


def note_(gradient: Tensor, energies: tuple[Tensor, Tensor], decay: float) -> None:
    """Take a gradient into the running means, ``e <- decay * e + (1 - decay) * mean(g^2)``."""
    rows_RC = gradient.view(len(energies[0]), len(energies[1]))
    for dim, energy in zip((1, 0), energies, strict=True):
        norms = torch.linalg.vector_norm(rows_RC, dim=dim, dtype=energy.dtype)
        energy.lerp_(norms.square_().div_(rows_RC.shape[dim]), 1 - decay)


def weights_of(energy: Tensor) -> Tensor:
    """What rows, or columns, are multiplied with: the root of their mean energy over their own."""
    mean = energy.mean()
    weights = (mean / torch.maximum(energy, LEAST_SHARE * mean)).sqrt_()
    return torch.where(mean > 0, weights, 1.0)


def balanced(gradient: Tensor, energies: tuple[Tensor, Tensor]) -> Tensor:
    """A copy of a gradient with its rows and columns weighted, in the dtype of the energies."""
    row_weights, col_weights = map(weights_of, energies)
    rows_RC = gradient.view(len(row_weights), len(col_weights))
    return (rows_RC * row_weights[:, None]).mul_(col_weights).view(gradient.shape)
