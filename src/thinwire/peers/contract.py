"""What every peer is: three calls per step, `compress`, `exchange` and `apply`, of which only the middle one is collective.

Letters: N elements of all trained parameters together, R replicas, K kept elements.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.exchange.traffic import Traffic

Message = tuple[Tensor, ...]


class Wire(Protocol):
    """What a peer may ask of the network. Every call is collective, blocks until it is done, and is metered."""

    replica: int
    num_replicas: int
    traffic: Traffic

    def all_reduce_(self, tensor: Tensor) -> None:
        """Sum over all replicas, in place, as a ring does it."""
        ...

    def all_gather(self, message: Tensor) -> Tensor:
        """``(R, *message.shape)``: everyone's."""
        ...

    def all_to_all(self, rows: Tensor) -> Tensor:
        """Row r of ``rows (R, ...)`` goes to replica r; row r of the result has come from replica r."""
        ...


class Peer(Protocol):
    """One replica's side of a method."""

    optimizers: Sequence[Optimizer]
    """What changes the parameters; a schedule sets the learning rates of their groups before each step."""
    state: dict[str, Tensor]
    """What this replica must keep between steps besides the optimizers' own state: errors fed back, counters."""

    def compress(self, gradient_N: Tensor) -> Message:
        """This replica's message; what it cannot say of the gradient is kept in ``state``. Empty: nothing is due."""
        ...

    def exchange(self, message: Message, wire: Wire) -> Message:
        """Everyone's messages, or what the network made of them. Collective; does nothing for an empty message."""
        ...

    def apply(self, exchanged: Message) -> None:
        """Change the parameters by what was exchanged, the same way on every replica."""
        ...


class Flat:
    """All trained parameters as one vector of N elements, in float32."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.sizes = [parameter.numel() for parameter in self.parameters]
        self.num_elements = sum(self.sizes)

    def gradient(self) -> Tensor:
        """A copy of all gradients; zero where there is none."""
        zero = (torch.zeros(size, device=p.device) for p, size in zip(self.parameters, self.sizes, strict=True))
        parts = [
            nothing if parameter.grad is None else parameter.grad.detach().float().flatten()
            for parameter, nothing in zip(self.parameters, zero, strict=True)
        ]
        return torch.cat(parts)

    def set_gradient(self, vector_N: Tensor) -> None:
        """Let every parameter's gradient be its part of the vector."""
        for parameter, part in zip(self.parameters, vector_N.split(self.sizes), strict=True):
            parameter.grad = part.view_as(parameter).to(parameter.dtype)

    @torch.no_grad()
    def values(self) -> Tensor:
        """A copy of all parameters."""
        return torch.cat([parameter.detach().float().flatten() for parameter in self.parameters])

    @torch.no_grad()
    def set_values(self, vector_N: Tensor) -> None:
        """Overwrite all parameters."""
        for parameter, part in zip(self.parameters, vector_N.split(self.sizes), strict=True):
            parameter.copy_(part.view_as(parameter))
