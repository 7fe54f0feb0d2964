"""Top-k: the largest elements of gradient and memory (Stich, Cordonnier and Jaggi 2018, "Sparsified SGD with memory")."""

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.peers.contract import Flat, Message, Wire, gather
from thinwire.peers.sparse import mean_of_sparse, num_kept


class TopK:
    """A replica sends the K largest of ``gradient + error`` and keeps the rest as error; ``optimizer`` steps on the mean."""

    has_own_parameters = False

    def __init__(self, flat: Flat, optimizer: Optimizer, density: float) -> None:
        self.optimizers = [optimizer]
        self.state = {"error": flat.zeros()}
        self._flat, self._num_kept = flat, num_kept(flat.num_elements, density)

    def compress(self, gradient_N: Tensor) -> Message:
        """Int32 indices and float32 values."""
        error_N = self.state["error"].add_(gradient_N)
        indices_K = error_N.abs().topk(self._num_kept, sorted=False).indices
        values_K = error_N[indices_K]
        error_N[indices_K] = 0
        return indices_K.to(torch.int32), values_K

    def exchange(self, message: Message, wire: Wire) -> Message:
        """Everyone's."""
        return gather(message, wire)

    def apply(self, exchanged: Message) -> None:
        """The optimizer's step on the mean."""
        self._flat.set_gradient(mean_of_sparse(self._flat.num_elements, *exchanged))
        self.optimizers[0].step()
