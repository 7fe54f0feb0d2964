"""1-bit Adam (Tang et al. 2021): Adam as usual at first; then its variance is kept, and the momentum travels as signs."""

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.peers.blocks import Blocks
from thinwire.peers.contract import Flat, Message, Wire, average, count_step, gather, mean_of
from thinwire.wire.bitpack import pack_bits, unpack_bits

_BLOCK = 2048
_EPS = 1e-8


class OneBitAdam:
    """After ``dense_steps`` of Adam every replica sends the signs of its momentum, with one size per block, and twice: to
    the replica that averages this part of the vector, and, averaged, from there to all. Sender and averager both keep what
    the signs leave out and add it the next time. ``optimizer`` multiplies by lr and decays, no more.
    """

    has_own_parameters = False

    def __init__(
        self, flat: Flat, optimizer: Optimizer, *, betas: tuple[float, float], dense_steps: int, num_replicas: int
    ) -> None:
        self.optimizers = [optimizer]
        self._flat, self._betas, self._dense_steps = flat, betas, dense_steps
        self._blocks = Blocks(flat.sizes, _BLOCK, num_replicas)
        self._is_real_BE = self._blocks.is_real(flat.device)
        own = len(self._blocks.counts) // num_replicas
        self.state = {name: flat.zeros() for name in ("momentum", "variance", "error")}
        self.state["error of the average"] = torch.zeros(own, _BLOCK, device=flat.device)

    def compress(self, gradient_N: Tensor) -> Message:
        """At first the gradient; later packed signs and a float32 per block, a row for each replica."""
        if count_step(self.state) < self._dense_steps:
            return (gradient_N,)
        error_N = self.state["error"]
        error_N += self.state["momentum"].lerp(gradient_N, 1 - self._betas[0])
        packed_BE, scales_B = _encode(self._blocks.cut(error_N), self._is_real_BE)
        error_N -= self._blocks.join(_decode(packed_BE, scales_B))
        return packed_BE, scales_B

    def exchange(self, message: Message, wire: Wire) -> Message:
        """The mean gradient, or everyone's part of the averaged momentum."""
        if len(message) == 1:
            return average(message, wire)
        packed_BE, scales_B = (tensor.view(wire.num_replicas, -1).view(torch.uint8) for tensor in message)
        rows_R = wire.all_to_all(torch.cat([packed_BE, scales_B], dim=1))
        packed_R, scales_R = (part.contiguous() for part in rows_R.split([packed_BE.shape[1], scales_B.shape[1]], dim=1))
        parts = (
            _decode(packed.view(-1, _BLOCK // 8), scales.view(torch.float32))
            for packed, scales in zip(packed_R, scales_R, strict=True)
        )
        error_BE = self.state["error of the average"]
        error_BE += mean_of(parts, wire.num_replicas)
        is_real = self._is_real_BE.view(wire.num_replicas, -1, _BLOCK)[wire.replica]
        message = _encode(error_BE, is_real)
        error_BE -= _decode(*message)
        return gather(message, wire)

    def apply(self, exchanged: Message) -> None:
        """Adam's step; where the variance that was kept is zero, nothing was ever learned, and nothing moves."""
        (beta1, beta2), momentum_N, variance_N = self._betas, self.state["momentum"], self.state["variance"]
        step = int(self.state["step"])
        if len(exchanged) == 1:
            momentum_N.lerp_(exchanged[0], 1 - beta1)
            variance_N.mul_(beta2).addcmul_(exchanged[0], exchanged[0], value=1 - beta2)
        else:
            packed_RBE, scales_RB = exchanged
            momentum_N.copy_(self._blocks.join(_decode(packed_RBE.flatten(0, 1), scales_RB.flatten())))
        root_N = (variance_N / (1 - beta2 ** min(step, self._dense_steps))).sqrt_() if self._dense_steps else variance_N
        direction_N = momentum_N / (1 - beta1**step) / (root_N + _EPS)
        self._flat.set_gradient(direction_N.masked_fill_(variance_N == 0, 0.0))
        self.optimizers[0].step()


def _encode(blocks_BE: Tensor, is_real_BE: Tensor) -> tuple[Tensor, Tensor]:
    """Packed signs, and the mean size of each block's real elements."""
    scales_B = (blocks_BE.abs() * is_real_BE).sum(dim=1) / is_real_BE.sum(dim=1).clamp(min=1)
    return pack_bits((blocks_BE >= 0).to(torch.uint8)), scales_B


def _decode(packed_BE: Tensor, scales_B: Tensor) -> Tensor:
    return (unpack_bits(packed_BE).float() * 2 - 1) * scales_B[:, None]
