"""QSGD (Alistarh, Grubic, Li, Tomioka and Vojnovic 2017): gradients rounded at random to a few levels, right on average."""

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.peers.blocks import Blocks
from thinwire.peers.contract import Flat, Message, Wire, count_step, gather, mean_of
from thinwire.peers.randomness import uniform

_BUCKET = 512
_MOST_LEVELS_IN_FOUR_BITS = 7


class QSGD:
    """A bucket of 512 elements travels as its l2 norm and, per element, one of ``levels`` shares of it with a sign.

    An element between two levels takes the upper one with a probability that makes the mean right. Levels are packed into 4
    bits, or 8 where there are more than 7 of them; the paper's Elias coding, which packs them closer, is not used.
    """

    has_own_parameters = False

    def __init__(self, flat: Flat, optimizer: Optimizer, levels: int, replica: int, seed: int = 0) -> None:
        self.optimizers = [optimizer]
        self.state: dict[str, Tensor] = {}
        self._flat, self._levels = flat, levels
        self._numbers = (seed, replica)
        self._blocks = Blocks(flat.sizes, _BUCKET)

    def compress(self, gradient_N: Tensor) -> Message:
        """Float32 norms and packed levels."""
        step = count_step(self.state)
        blocks_BE = self._blocks.cut(gradient_N)
        norms_B = blocks_BE.norm(dim=1)
        shares_BE = blocks_BE.abs() * (self._levels / norms_B.clamp(min=torch.finfo(torch.float32).tiny))[:, None]
        lower_BE = shares_BE.floor()
        rises = uniform((*shares_BE.shape,), shares_BE.device, *self._numbers, step) < shares_BE - lower_BE
        levels_BE = (lower_BE + rises).clamp(max=self._levels) * blocks_BE.sign()
        return norms_B, self._pack((levels_BE + self._levels).to(torch.uint8))

    def _pack(self, codes_BE: Tensor) -> Tensor:
        if self._levels > _MOST_LEVELS_IN_FOUR_BITS:
            return codes_BE
        return codes_BE[:, ::2] | (codes_BE[:, 1::2] << 4)

    def _decode(self, norms_B: Tensor, packed: Tensor) -> Tensor:
        codes_BE = packed
        if self._levels <= _MOST_LEVELS_IN_FOUR_BITS:
            codes_BE = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)
        return (codes_BE.float() - self._levels) * (norms_B / self._levels)[:, None]

    def exchange(self, message: Message, wire: Wire) -> Message:
        """Everyone's."""
        return gather(message, wire)

    def apply(self, exchanged: Message) -> None:
        """The optimizer's step on the mean."""
        norms_RB, packed_R = exchanged
        decoded = (self._decode(*pair) for pair in zip(norms_RB, packed_R, strict=True))
        self._flat.set_gradient(self._blocks.join(mean_of(decoded, len(norms_RB))))
        self.optimizers[0].step()
