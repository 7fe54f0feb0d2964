"""signSGD with majority vote in its momentum form, Signum (Bernstein, Zhao, Azizzadenesheli and Anandkumar 2019)."""

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.peers.contract import Flat, Message, Wire, count_step, gather
from thinwire.wire.bitpack import pack_bits, unpack_bits


class SignSGD:
    """Every replica votes with the signs of its momentum, one bit each; an element moves by ``lr`` as most of them say.

    A tie moves nothing. One bit cannot say zero: an element without momentum votes for one side and the other in turn, and
    so do neighbouring replicas, that it does not walk away.
    """

    has_own_parameters = False

    def __init__(self, flat: Flat, optimizer: Optimizer, momentum: float, replica: int) -> None:
        self.optimizers = [optimizer]
        self.state = {"momentum": flat.zeros()}
        self._flat, self._momentum, self._replica = flat, momentum, replica

    def compress(self, gradient_N: Tensor) -> Message:
        """Packed signs."""
        step = count_step(self.state)
        momentum_N = self.state["momentum"].lerp_(gradient_N, 1 - self._momentum)
        votes_N = momentum_N >= 0 if (step + self._replica) % 2 else momentum_N > 0
        return (pack_bits(votes_N.to(torch.uint8)),)

    def exchange(self, message: Message, wire: Wire) -> Message:
        """Everyone's."""
        return gather(message, wire)

    def apply(self, exchanged: Message) -> None:
        """The optimizer's step in the direction of the majority."""
        (packed_RB,) = exchanged
        votes_N = torch.zeros(self._flat.num_elements, dtype=torch.int32, device=packed_RB.device)
        for packed_B in packed_RB:
            votes_N += unpack_bits(packed_B)[: self._flat.num_elements]
        self._flat.set_gradient((2 * votes_N - len(packed_RB)).sign().float())
        self.optimizers[0].step()
