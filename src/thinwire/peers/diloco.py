"""DiLoCo (Douillard et al. 2023), and its streaming form (Douillard et al. 2025): local steps, and an outer optimizer."""

from torch import Tensor
from torch.optim import Optimizer

from thinwire.peers.contract import Flat, Message, Wire, average, count_step


class DiLoCo:
    """After ``local_steps`` steps of ``optimizer`` the replicas' changes are averaged, and SGD with Nesterov momentum takes
    that mean change as a gradient, from where all set out the last time.

    With F ``fragments`` the vector of parameters is cut into F parts that take turns, one every ``local_steps / F`` steps:
    the same bytes altogether, in F smaller portions.
    """

    has_own_parameters = True

    def __init__(
        self,
        flat: Flat,
        optimizer: Optimizer,
        *,
        local_steps: int,
        fragments: int,
        outer_lr: float,
        outer_momentum: float,
    ) -> None:
        self.optimizers = [optimizer]
        self.state = {"start": flat.values(), "outer momentum": flat.zeros()}
        self._flat, self._every, self._fragments = flat, local_steps // fragments, fragments
        self._outer_lr, self._outer_momentum = outer_lr, outer_momentum

    def _turn(self, step: int) -> slice:
        """Whose turn it is after so many steps."""
        turn, num_elements = (step // self._every - 1) % self._fragments, self._flat.num_elements
        return slice(turn * num_elements // self._fragments, (turn + 1) * num_elements // self._fragments)

    def compress(self, gradient_N: Tensor) -> Message:
        """Step; a fragment's change, downhill being positive, when it is time."""
        self._flat.set_gradient(gradient_N)
        self.optimizers[0].step()
        step = count_step(self.state) + 1
        if step % self._every:
            return ()
        part = self._turn(step)
        return (self.state["start"][part] - self._flat.values()[part],)

    def exchange(self, message: Message, wire: Wire) -> Message:
        """The mean change."""
        return average(message, wire)

    def apply(self, exchanged: Message) -> None:
        """The outer step."""
        if not exchanged:
            return
        (change,), part = exchanged, self._turn(int(self.state["step"]))
        momentum = self.state["outer momentum"][part].mul_(self._outer_momentum).add_(change)
        start = self.state["start"][part].sub_(change + self._outer_momentum * momentum, alpha=self._outer_lr)
        values_N = self._flat.values()
        values_N[part] = start
        self._flat.set_values(values_N)
