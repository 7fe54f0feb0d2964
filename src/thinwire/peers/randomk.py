"""Random-k: a few elements that all replicas draw alike, so that only their values travel (Stich et al. 2018)."""

from torch import Tensor
from torch.optim import Optimizer

from thinwire.peers.contract import Flat, Message, Wire, average, count_step
from thinwire.peers.randomness import one_of_each
from thinwire.peers.sparse import num_kept


class RandomK:
    """The values of ``gradient + error`` at K random places are averaged; the rest stays as error."""

    has_own_parameters = False

    def __init__(self, flat: Flat, optimizer: Optimizer, density: float, seed: int = 0) -> None:
        self.optimizers = [optimizer]
        self.state = {"error": flat.zeros()}
        self._flat, self._num_kept, self._seed = flat, num_kept(flat.num_elements, density), seed
        self._indices_K: Tensor | None = None

    def compress(self, gradient_N: Tensor) -> Message:
        """The values alone."""
        step = count_step(self.state)
        indices_K = one_of_each(gradient_N.numel(), self._num_kept, gradient_N.device, self._seed, step)
        error_N = self.state["error"].add_(gradient_N)
        values_K = error_N[indices_K]
        error_N[indices_K] = 0
        self._indices_K = indices_K
        return (values_K,)

    def exchange(self, message: Message, wire: Wire) -> Message:
        """Their mean over all replicas."""
        return average(message, wire)

    def apply(self, exchanged: Message) -> None:
        """The optimizer's step, with zeros elsewhere."""
        assert self._indices_K is not None
        gradient_N = self._flat.zeros()
        gradient_N[self._indices_K] = exchanged[0]
        self._flat.set_gradient(gradient_N)
        self.optimizers[0].step()
