"""The peer that compresses nothing: gradients are averaged whole, as DistributedDataParallel does, but after backward."""

from torch import Tensor
from torch.optim import Optimizer

from thinwire.peers.contract import Flat, Message, Wire, average


class Dense:
    """``optimizer`` steps on the mean gradient."""

    has_own_parameters = False

    def __init__(self, flat: Flat, optimizer: Optimizer) -> None:
        self.optimizers = [optimizer]
        self.state: dict[str, Tensor] = {}
        self._flat = flat

    def compress(self, gradient_N: Tensor) -> Message:
        """The gradient itself."""
        return (gradient_N,)

    def exchange(self, message: Message, wire: Wire) -> Message:
        """Its mean over all replicas."""
        return average(message, wire)

    def apply(self, exchanged: Message) -> None:
        """The optimizer's step."""
        (mean_N,) = exchanged
        self._flat.set_gradient(mean_N)
        self.optimizers[0].step()
