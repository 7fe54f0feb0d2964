"""A vector of all parameters as equally long blocks, none of which has elements of two tensors."""

import torch
from torch import Tensor
from torch.nn import functional as F


class Blocks:
    """B blocks of E elements; a tensor's last block ends in zeros, and ``multiple`` rounds B up with blocks of zeros."""

    def __init__(self, sizes: list[int], length: int, multiple: int = 1) -> None:
        self.length = length
        self._sizes = sizes
        counts = [min(length, size - start) for size in sizes for start in range(0, size, length)]
        self._num_added = -len(counts) % multiple
        self.counts = counts + [0] * self._num_added
        """How many elements of each block are real."""

    def cut(self, vector_N: Tensor) -> Tensor:
        """``(B, E)``, a copy."""
        parts = [F.pad(part, (0, -part.numel() % self.length)) for part in vector_N.split(self._sizes)]
        return torch.cat([*parts, vector_N.new_zeros(self._num_added * self.length)]).view(-1, self.length)

    def join(self, blocks_BE: Tensor) -> Tensor:
        """The vector again, ``(N,)``."""
        padded = [size + -size % self.length for size in self._sizes]
        parts = blocks_BE.reshape(-1).split([*padded, self._num_added * self.length])
        return torch.cat([part[:size] for part, size in zip(parts, self._sizes, strict=False)])

    def is_real(self, device: torch.device) -> Tensor:
        """``(B, E)``: which elements are not there to fill up."""
        counts_B1 = torch.tensor(self.counts, device=device)[:, None]
        return torch.arange(self.length, device=device) < counts_B1
