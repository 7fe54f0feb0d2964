"""One exchange behind: what a step sends is applied by the next step, so that the exchange hides behind all of its compute.

Meanwhile the parameters lack one update. *Look-ahead* guesses it: it will be about as the last one was, so the parameters
run ahead by that, and come back before the real one is applied.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from thinwire.attempt import Attempt
from thinwire.core.errors import check_bool, check_int
from thinwire.slabs import LocalTensor


class Delay:
    """The attempt that is still under way, and how far the parameters run ahead. Without delay (0) there is never one."""

    def __init__(self, num_steps: int, looks_ahead: bool, has_islands: bool = False) -> None:
        if check_int("delay", num_steps, 0) > 1 or (check_bool("look_ahead", looks_ahead) and not num_steps):
            raise ValueError(f"delay={num_steps} must be 0 or 1, and look_ahead={looks_ahead} goes with delay=1 only")
        if num_steps and has_islands:
            raise ValueError(f"delay={num_steps} does not go with islands; leave one of them out")
        self.is_on, self._looks_ahead = num_steps == 1, looks_ahead
        self._anchors: list[Tensor] = []
        """The true parameters, while the model's run ahead."""
        self.under_way: Attempt | None = None

    @property
    def num_under_way(self) -> int:
        """Exchanges that were begun and not applied."""
        return 0 if self.under_way is None else 1

    def swap(self, attempt: Attempt) -> Attempt | None:
        """Leave this attempt under way, and take the one before it."""
        if not self.is_on:
            return attempt
        before, self.under_way = self.under_way, attempt.be_late()
        return before

    @contextmanager
    def dropped_on_error(self) -> Iterator[None]:
        """Without a wire, forget the attempt under way; what it had sent returns to the momenta."""
        try:
            yield
        except BaseException:
            if self.under_way is not None:
                self.under_way.take_back_()
                self.under_way = None
            raise

    @contextmanager
    def at_true_parameters(self, tensors: Sequence[LocalTensor]) -> Iterator[None]:
        """Apply an update inside."""
        self.come_back_(tensors)
        if not self._looks_ahead:
            yield
            return
        before = [tensor.parameter.clone() for tensor in tensors]
        yield
        for tensor, old in zip(tensors, before, strict=True):
            parameter = tensor.parameter
            self._anchors.append(parameter.clone())
            parameter.add_(parameter - old)

    def come_back_(self, tensors: Sequence[LocalTensor]) -> None:
        """Make the parameters the true ones."""
        for tensor, anchor in zip(tensors, self._anchors, strict=False):
            tensor.parameter.copy_(anchor)
        self._anchors.clear()
