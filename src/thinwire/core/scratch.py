"""Memory that is used again from slab to slab, so that a step does not pay the operating system for each of them."""

import math

import torch
from torch import Tensor


class Scratch:
    """Buffers by role. A buffer is valid until the same role is taken again.

    The roles ``first`` and ``second`` are two buffers as large as a tile, which the stages of a step use in turn.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def take(self, role: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised tensor of this shape."""
        key, numel = (role, dtype, device), math.prod(shape)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < numel:
            buffer = self._buffers[key] = torch.empty(numel, dtype=dtype, device=device)
        return buffer[:numel].view(shape)

    def like(self, role: str, tensor: Tensor) -> Tensor:
        """An uninitialised tensor of the same shape, dtype and device."""
        return self.take(role, tuple(tensor.shape), tensor.dtype, tensor.device)
