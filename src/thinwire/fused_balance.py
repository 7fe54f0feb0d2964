"""Balance for the fused backend: the rows and columns of many gradients in few launches each, without a copy of them.

It computes what `thinwire.core.balance` does. The kernel that accumulates multiplies by the weights as it reads.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from thinwire.core.balance import LEAST_SHARE, Energies, mean_squares
from thinwire.slabs import LocalTensor
from thinwire.wire.payload import Verdict

_MOST_LENGTHS = 8


class FusedBalance:
    """Of those tensors of a stack that are balanced, on one device."""

    def __init__(self, tensors: Sequence[LocalTensor], members: Sequence[int]) -> None:
        self._energies = {index: energies for index in members if (energies := tensors[index].energies) is not None}
        # At the same addresses at every step, so that no table of addresses is written anew.
        self._rooms = {
            index: (torch.ones_like(rows), torch.ones_like(cols)) for index, (rows, cols) in self._energies.items()
        }
        self._lengths: dict[tuple[int, ...], Tensor] = {}
        self._noted: list[Tensor] = []
        self._before: Tensor | None = None
        self.weights: dict[int, Energies] = {}
        """Of rows and columns, of the tensors that have a gradient at this step."""

    def note_(self, gradients: Mapping[int, Tensor], decay: float) -> None:
        """Take the gradients of a step into the energies, and find the weights."""
        self.forget()
        mine = [index for index in gradients if index in self._energies] if decay else []
        if not mine:
            return
        self._noted = _matrix_by_matrix(self._energies[index] for index in mine)
        self._before = torch.cat(self._noted)
        squares = _matrix_by_matrix(mean_squares(gradients[index], self._energies[index]) for index in mine)
        lengths = self._lengths_of(tuple(map(len, squares)))
        # A matrix with NaN or Inf in it is not taken in: no step is taken with it, and not every way back calls `undo_`.
        is_finite = _spread(torch.stack(torch._foreach_norm(squares, 1)).isfinite(), lengths, self._before)
        after = self._before.lerp(torch.where(is_finite, torch.cat(squares), self._before), 1 - decay)
        torch._foreach_copy_(self._noted, list(after.split(list(map(len, squares)))))
        # As `thinwire.core.balance.weights_of`.
        means = _spread(torch.stack(torch._foreach_norm(self._noted, 1)) / lengths, lengths, after)
        weights = torch.where(means > 0, (means / torch.maximum(after, LEAST_SHARE * means)).sqrt_(), 1.0)
        self.weights = {index: self._rooms[index] for index in mine}
        rooms = _matrix_by_matrix(self.weights.values())
        torch._foreach_copy_(rooms, list(weights.split(list(map(len, rooms)))))

    def _lengths_of(self, sizes: tuple[int, ...]) -> Tensor:
        """These numbers on the device. Does not wait for it."""
        if sizes not in self._lengths:
            if len(self._lengths) >= _MOST_LENGTHS:  # other tensors have gradients at every step
                self._lengths.clear()
            lengths, device = torch.tensor(sizes, device="cpu"), self._noted[0].device
            is_cuda = device.type == "cuda"
            self._lengths[sizes] = lengths.pin_memory().to(device, non_blocking=True) if is_cuda else lengths
        return self._lengths[sizes]

    def undo_(self, verdict: Tensor) -> None:
        """If ``verdict`` (int32) is REFUSED, take `note_` back."""
        if self._before is not None:
            kept = torch.where(verdict == Verdict.REFUSED, self._before, torch.cat(self._noted))
            torch._foreach_copy_(self._noted, list(kept.split([len(energy) for energy in self._noted])))

    def forget(self) -> None:
        """Let go of what `undo_` would need."""
        self._noted, self._before, self.weights = [], None, {}


def _spread(values: Tensor, lengths: Tensor, like: Tensor) -> Tensor:
    """Each value as often as its length says; ``like`` has as many elements."""
    return torch.repeat_interleave(values, lengths, output_size=len(like))


def _matrix_by_matrix(pairs: Iterable[Energies]) -> list[Tensor]:
    return [one for pair in pairs for both in pair for one in both.unbind()]
