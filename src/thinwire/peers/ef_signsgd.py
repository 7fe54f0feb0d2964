"""signSGD with error feedback (Karimireddy, Rebjock, Stich and Jaggi 2019)."""

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.peers.contract import Flat, Message, Wire, gather, mean_of
from thinwire.wire.bitpack import pack_bits, unpack_bits


class ErrorFeedbackSignSGD:
    """With ``p = lr * gradient + error`` a replica sends of each tensor the signs of p and the mean of their sizes; what
    that leaves of p is the next error. ``optimizer`` subtracts the mean of what was sent as it is."""

    has_own_parameters = False

    def __init__(self, flat: Flat, optimizer: Optimizer) -> None:
        self.optimizers = [optimizer]
        self.state = {"error": flat.zeros()}
        self._flat = flat

    def compress(self, gradient_N: Tensor) -> Message:
        """Packed signs, and a float32 per tensor."""
        error_N = self.state["error"]
        parts = zip(error_N.split(self._flat.sizes), gradient_N.split(self._flat.sizes), strict=True)
        for (error, gradient), rate in zip(parts, self._flat.rates(self.optimizers[0]), strict=True):
            error.add_(gradient, alpha=rate)
        scales_T = torch.stack([part.abs().mean() for part in error_N.split(self._flat.sizes)])
        packed_B = pack_bits((error_N >= 0).to(torch.uint8))
        error_N.sub_(self._decode(packed_B, scales_T))
        return packed_B, scales_T

    def _decode(self, packed_B: Tensor, scales_T: Tensor) -> Tensor:
        signs_N = unpack_bits(packed_B)[: self._flat.num_elements].float().mul_(2).sub_(1)
        for part, scale in zip(signs_N.split(self._flat.sizes), scales_T, strict=True):
            part.mul_(scale)
        return signs_N

    def exchange(self, message: Message, wire: Wire) -> Message:
        """Everyone's."""
        return gather(message, wire)

    def apply(self, exchanged: Message) -> None:
        """Subtract the mean."""
        packed_RB, scales_RT = exchanged
        sent = (self._decode(*pair) for pair in zip(packed_RB, scales_RT, strict=True))
        self._flat.set_gradient(mean_of(sent, len(packed_RB)))
        self.optimizers[0].step()
