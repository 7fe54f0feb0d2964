"""Balance for the fused backend: the rows and columns of many gradients in few launches, without a copy of them.

It computes what `thinwire.core.balance` does. The kernel that accumulates multiplies by the weights as it reads.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from thinwire.core.balance import LEAST_SHARE, Energies, mean_squares
from thinwire.slabs import LocalTensor
from thinwire.wire.payload import Verdict


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
        torch._foreach_lerp_(self._noted, squares, 1 - decay)
        self.weights = {index: self._rooms[index] for index in mine}
        torch._foreach_copy_(_matrix_by_matrix(self.weights.values()), self._weights())

    def _weights(self) -> list[Tensor]:
        """`thinwire.core.balance.weights_of` all that was noted, in few operations."""
        sizes = tuple(map(len, self._noted))
        if sizes not in self._lengths:
            self._lengths.clear()  # other tensors have gradients
            self._lengths[sizes] = torch.tensor(sizes, device="cpu").to(self._noted[0].device)
        lengths = self._lengths[sizes]
        means = torch.stack(torch._foreach_norm(self._noted, 1)) / lengths
        means = torch.repeat_interleave(means, lengths, output_size=sum(sizes))
        weights = (means / torch.maximum(torch.cat(self._noted), LEAST_SHARE * means)).sqrt_()
        return list(torch.where(means > 0, weights, 1.0).split(sizes))

    def undo_(self, verdict: Tensor) -> None:
        """If ``verdict`` (int32) is REFUSED, take `note_` back."""
        if self._before is not None:
            kept = torch.where(verdict == Verdict.REFUSED, self._before, torch.cat(self._noted))
            torch._foreach_copy_(self._noted, list(kept.split([len(energy) for energy in self._noted])))

    def forget(self) -> None:
        """Let go of what `undo_` would need."""
        self._noted, self._before, self.weights = [], None, {}


def _matrix_by_matrix(pairs: Iterable[Energies]) -> list[Tensor]:
    return [one for pair in pairs for both in pair for one in both.unbind()]
