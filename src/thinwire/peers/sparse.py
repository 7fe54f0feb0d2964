"""Vectors of which only some elements are known."""

import torch
from torch import Tensor


def mean_of_sparse(num_elements: int, indices_RK: Tensor, values_RK: Tensor) -> Tensor:
    """The mean over replicas of vectors with these elements and zeros elsewhere.

    One replica after the other: no index occurs twice in a row, so that the order of additions is fixed also on a GPU.
    """
    total_N = torch.zeros(num_elements, device=values_RK.device)
    for indices_K, values_K in zip(indices_RK, values_RK, strict=True):
        total_N.index_add_(0, indices_K, values_K)
    return total_N / len(values_RK)


def num_kept(num_elements: int, density: float) -> int:
    """How many elements a share is: at least one."""
    return min(num_elements, max(1, round(density * num_elements)))
