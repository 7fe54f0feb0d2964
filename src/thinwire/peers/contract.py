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

    def all_gathers(self, messages: Sequence[Tensor]) -> list[Tensor]:
        """The same for several messages, all begun before the first is waited for."""
        ...

    def all_to_all(self, rows: Tensor) -> Tensor:
        """Row r of ``rows (R, ...)`` goes to replica r; row r of the result has come from replica r."""
        ...


class Peer(Protocol):
    """One replica's side of a method."""

    optimizers: list[Optimizer]
    """What changes the parameters; a schedule sets the learning rates of their groups before each step."""
    state: dict[str, Tensor]
    """What this replica must keep between steps besides the optimizers' own state: errors fed back, counters."""
    has_own_parameters: bool
    """Whether replicas part between two synchronisations; if not, all hold the same bits after every step."""

    def compress(self, gradient_N: Tensor) -> Message:
        """This replica's message; what it cannot say of the gradient is kept in ``state``. Empty: nothing is due.

        Methods that synchronise once in a while take their local step here."""
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
        self.device = self.parameters[0].device

    def zeros(self) -> Tensor:
        """A vector of N zeros."""
        return torch.zeros(self.num_elements, device=self.device)

    def gradient(self) -> Tensor:
        """A copy of all gradients; zero where there is none."""
        parts = [
            torch.zeros(size, device=self.device) if parameter.grad is None else parameter.grad.detach().float().flatten()
            for parameter, size in zip(self.parameters, self.sizes, strict=True)
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

    def rates(self, optimizer: Optimizer) -> list[float]:
        """The learning rate of every parameter."""
        rates = {id(parameter): group["lr"] for group in optimizer.param_groups for parameter in group["params"]}
        return [rates[id(parameter)] for parameter in self.parameters]


def gather(message: Message, wire: Wire) -> Message:
    """Everyone's: each tensor with a dimension R in front. One exchange, of the tensors' bytes one after the other, since a
    second one would pay the latency of the link again."""
    pieces = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in message]
    rows_RB = wire.all_gather(torch.cat(pieces))
    parts = rows_RB.split([piece.numel() for piece in pieces], dim=1)
    return tuple(
        part.clone(memory_format=torch.contiguous_format).view(tensor.dtype).view(len(rows_RB), *tensor.shape)
        for part, tensor in zip(parts, message, strict=True)
    )


def average(message: Message, wire: Wire) -> Message:
    """The mean over all replicas of a message of one tensor, which is overwritten; nothing for an empty one."""
    if not message:
        return ()
    (tensor,) = message
    wire.all_reduce_(tensor)
    return (tensor.div_(wire.num_replicas),)


def mean_of(rows: Iterable[Tensor], num_replicas: int) -> Tensor:
    """The mean over replicas, added up in their order, so that all find the same bits."""
    ordered = iter(rows)
    total = next(ordered).clone()
    for row in ordered:
        total += row
    return total / num_replicas


def count_step(state: dict[str, Tensor]) -> int:
    """Count a step in ``state``, which is what resumes; how many there were before it."""
    step = int(state.setdefault("step", torch.zeros((), dtype=torch.int64, device="cpu")))
    state["step"] += 1
    return step
