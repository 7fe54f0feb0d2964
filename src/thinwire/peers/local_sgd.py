"""Local SGD (Stich 2019; McMahan et al. 2017): every replica trains for itself, and now and then parameters are averaged."""

from torch import Tensor
from torch.optim import Optimizer

from thinwire.peers.contract import Flat, Message, Wire, average, count_step


class LocalSGD:
    """``local_steps`` steps of ``optimizer`` on a replica's own gradients, then the mean of everyone's parameters. The
    optimizer's own state is not averaged."""

    has_own_parameters = True

    def __init__(self, flat: Flat, optimizer: Optimizer, local_steps: int) -> None:
        self.optimizers = [optimizer]
        self.state: dict[str, Tensor] = {}
        self._flat, self._local_steps = flat, local_steps

    def compress(self, gradient_N: Tensor) -> Message:
        """Step; all parameters when it is time."""
        self._flat.set_gradient(gradient_N)
        self.optimizers[0].step()
        is_due = (count_step(self.state) + 1) % self._local_steps == 0
        return (self._flat.values(),) if is_due else ()

    def exchange(self, message: Message, wire: Wire) -> Message:
        """Their mean over all replicas."""
        return average(message, wire)

    def apply(self, exchanged: Message) -> None:
        """Go on from the mean."""
        if exchanged:
            self._flat.set_values(exchanged[0])
