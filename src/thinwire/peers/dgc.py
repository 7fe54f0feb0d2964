"""Deep gradient compression (Lin, Han, Mao, Wang and Dally 2018): top-k of a momentum that every replica keeps to itself."""

import math

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.peers.contract import Flat, Message, Wire, count_step, gather
from thinwire.peers.sparse import mean_of_sparse, num_kept

# While warming up, this share is sent at first, then its square, and so on.
_FIRST_DENSITY = 0.25


class DeepGradientCompression:
    """What is accumulated and sent is the momentum (its "momentum correction"), of each tensor the largest elements.

    Where an element was sent, the momentum begins anew, as does the sum ("momentum factor masking"): what has waited for
    long would otherwise push on in a direction that is no longer right. ``largest_norm`` bounds each replica's gradient: it
    is the bound on the mean's, divided by the root of R. ``optimizer`` must have no momentum of its own.
    """

    has_own_parameters = False

    def __init__(
        self,
        flat: Flat,
        optimizer: Optimizer,
        *,
        density: float,
        momentum: float,
        warmup_steps: int,
        largest_norm: float,
    ) -> None:
        self.optimizers = [optimizer]
        self.state = {"momentum": flat.zeros(), "sum": flat.zeros()}
        self._flat, self._density, self._momentum = flat, density, momentum
        self._warmup_steps, self._largest_norm = warmup_steps, largest_norm

    def density_at(self, step: int) -> float:
        """A quarter at first, and a quarter of that in each later stage of the warm-up, down to ``density``."""
        if step >= self._warmup_steps:
            return self._density
        num_stages = max(1, math.ceil(math.log(self._density, _FIRST_DENSITY)) - 1)
        stage = step * num_stages // self._warmup_steps
        return float(max(self._density, _FIRST_DENSITY ** (stage + 1)))

    def compress(self, gradient_N: Tensor) -> Message:
        """Int32 indices and float32 values."""
        density = self.density_at(count_step(self.state))
        if self._largest_norm > 0:
            gradient_N = gradient_N * (self._largest_norm / (gradient_N.norm() + 1e-6)).clamp(max=1.0)
        momentum_N = self.state["momentum"].mul_(self._momentum).add_(gradient_N)
        sum_N = self.state["sum"].add_(momentum_N)
        indices_K = self._largest(sum_N, density)
        values_K = sum_N[indices_K]
        sum_N[indices_K] = 0
        momentum_N[indices_K] = 0
        return indices_K.to(torch.int32), values_K

    def _largest(self, vector_N: Tensor, density: float) -> Tensor:
        """Places of each tensor's largest elements."""
        places, start = [], 0
        for part in vector_N.abs().split(self._flat.sizes):
            places.append(part.topk(num_kept(part.numel(), density), sorted=False).indices + start)
            start += part.numel()
        return torch.cat(places)

    def exchange(self, message: Message, wire: Wire) -> Message:
        """Everyone's."""
        return gather(message, wire)

    def apply(self, exchanged: Message) -> None:
        """The optimizer's step on the mean."""
        self._flat.set_gradient(mean_of_sparse(self._flat.num_elements, *exchanged))
        self.optimizers[0].step()
