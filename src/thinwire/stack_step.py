"""What one replica does with the chunks of one stack at a step: the contract that every backend meets."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from thinwire.core.combine import Decoding
from thinwire.core.update_rules import Hyper, UpdateRule
from thinwire.wire.payload import Problem


@dataclass(frozen=True)
class GroupStep:
    """What one parameter group does at this step: ``m <- decay * m + gradient_scale * T(g)``, then its update rule."""

    decay: float
    gradient_scale: float
    rule: UpdateRule
    hyper: Hyper
    weight_decay: float
    chunk: int
    balance: float = 0.0
    """The decay of the energies that rows and columns of gradients are divided by; 0 leaves gradients as they are."""
    trouble: Problem = Problem.NONFINITE
    """What it is if a gradient has NaN or Inf in it."""

    @property
    def weight_factor(self) -> float:
        """What weight decay leaves of a parameter."""
        return 1 - self.hyper.lr * self.weight_decay


class StackStep(Protocol):
    """One stack of one replica."""

    def encode_(self, group: GroupStep, payload_B: Tensor) -> None:
        """Accumulate the gradients into the momenta, and move the strongest coefficients from there into the stack's
        records, which are 0 before. Does not wait for the device if the backend can do without."""
        ...

    def undo_(self, group: GroupStep, payload_B: Tensor) -> None:
        """Take `encode_`, whole or as far as it came, back after an exchange that failed, to the rounding of momentum plus
        gradient.

        What was sent is added again, this step's gradient is taken out, and the decay is divided out. A decay of 0 had
        erased the old momentum, which then comes back as 0.
        """
        ...

    def forget(self) -> None:
        """Let go of the gradients that `undo_` would need."""
        ...

    def give_back_(self, payload_B: Tensor, units: "Tensor | float") -> None:
        """Add to the momentum what the records of a payload took from it when it was made, with the `units` of that time.
        For when `undo_` comes too late, because the gradients are gone."""
        ...

    @property
    def units(self) -> Tensor | float:
        """How much momentum one unit of each record's values stood for when it was sent: (C, 1), or 1 for all."""
        ...

    def apply_(self, group: GroupStep, payloads_RB: Tensor, decoding: Decoding) -> None:
        """Combine everyone's records, transform back, and let the update rule change the parameters."""
        ...
