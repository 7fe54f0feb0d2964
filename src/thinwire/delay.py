"""One exchange behind: what a step sends is applied by the next step, so that the exchange hides behind all of its compute.

Meanwhile the parameters lack one update. *Look-ahead* guesses it: it will be about as the last one was, so the parameters
run ahead by that, and come back before the real one is applied.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from thinwire.attempt import Attempt
from thinwire.core.errors import check_bool, check_int
from thinwire.exchange.sharding import Island
from thinwire.slabs import LocalTensor


class Delay:
    """The attempt that is still under way, and how far the parameters run ahead. Without delay (0) there is never one."""

    def __init__(self, num_steps: int, looks_ahead: bool, has_islands: bool = False) -> None:
        if check_int("delay", num_steps, 0) > 1 or (check_bool("look_ahead", looks_ahead) and not num_steps):
            raise ValueError(f"delay={num_steps} must be 0 or 1, and look_ahead={looks_ahead} goes with delay=1 only")
        if num_steps and has_islands:
            raise ValueError(f"delay={num_steps} does not go with islands; leave one of them out")
        self.is_on, self.looks_ahead = num_steps == 1, looks_ahead
        self._anchors: list[tuple[LocalTensor, Tensor]] = []
        """The true parameters, while the model's run ahead."""
        self.newest: Attempt | None = None
        self.under_way: Attempt | None = None

    def check(self, island: Island) -> None:
        """Refuse replicas of several ranks: these would have to settle an error of one of them together."""
        if self.is_on and not island.is_one_rank:
            raise ValueError("delay=1 does not go with sharded replicas; leave it out")

    @property
    def facts(self) -> dict[str, object]:
        """What all replicas must share."""
        return {"delay": int(self.is_on), "look_ahead": self.looks_ahead}

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
    def settled_on_error(self, finish: Callable[[Attempt], None]) -> Iterator[None]:
        """Begin an attempt inside. If that fails, do with the one under way what the other replicas do."""
        try:
            yield
        except BaseException:
            has_failed = self.newest is not None and self.newest.has_failed
            if not self.settle(finish) and has_failed:
                self._drop()
            raise

    def settle(self, finish: Callable[[Attempt], None]) -> bool:
        """After an error of this replica's own: the others, who know nothing of it yet, have finished the attempt under way
        and left the newest in its place, which they will find given up. So does this one. Whether it had such an error."""
        if not self.is_unsettled:
            return False
        assert self.newest is not None
        before, self.newest = self.swap(self.newest), None
        if before is not None:
            finish(before)
        return True

    def drain_(self, finish: Callable[[Attempt], None]) -> None:
        """Finish what is under way; the parameters are the true ones afterwards, also where that fails."""
        try:
            self.settle(finish)
            attempt, self.under_way = self.under_way, None
            if attempt is not None:
                finish(attempt)
        finally:
            self.come_back_()

    @property
    def is_unsettled(self) -> bool:
        """Whether this replica has given up the newest attempt, and the others do not know it yet."""
        return self.is_on and self.newest is not None and self.newest.has_given_up

    @contextmanager
    def dropped_on_error(self) -> Iterator[None]:
        """If what all replicas have sent cannot be had, forget the attempt under way; what it had sent returns to the
        momenta."""
        try:
            yield
        except BaseException:
            self._drop()
            raise

    def _drop(self) -> None:
        if self.under_way is not None:
            self.under_way.drop_()
            self.under_way = None
        self.come_back_()

    @contextmanager
    def at_true_parameters(self, tensors: Sequence[LocalTensor]) -> Iterator[None]:
        """Apply an update inside."""
        self.come_back_()
        if not self.looks_ahead:
            yield
            return
        before = [tensor.parameter.clone() for tensor in tensors]
        yield
        for tensor, old in zip(tensors, before, strict=True):
            parameter = tensor.parameter
            self._anchors.append((tensor, parameter.clone()))
            parameter.add_(parameter - old)

    def come_back_(self) -> None:
        """Make the parameters the true ones."""
        for tensor, anchor in self._anchors:
            tensor.parameter.copy_(anchor)
        self._anchors.clear()
