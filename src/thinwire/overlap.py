"""Begin to exchange while backward still runs: a bucket is sent as soon as the last of its gradients is there.

Buckets are sent in their own order on every replica, whatever the order in which gradients arrive, so that the replicas'
exchanges match. What is not complete when backward ends is sent by `DeMo.step`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from weakref import WeakMethod

import torch
from torch import Tensor

from thinwire.attempt import Attempt
from thinwire.core.errors import ThinwireError
from thinwire.exchange.plan import ExchangePlan

_REMEDY = (
    "call backward inside `with optimizer.accumulate():` for all but the last time before step(), and every time if "
    "gradients are to be clipped or unscaled"
)


class Overlap:
    """Hooks on the parameters of a plan. ``begin`` makes the attempt of the step to come, or None if that must wait for
    `step()`; it is held weakly, since parameters may live longer than the optimizer."""

    def __init__(
        self, plan: ExchangePlan, parameters: Sequence[Tensor], begin: "WeakMethod[Callable[[], Attempt | None]]"
    ) -> None:
        self._plan, self._begin = plan, begin
        self._bucket_of = {tensor: bucket.index for bucket in plan.buckets for tensor in bucket.tensors}
        self._handles = []
        for index, parameter in enumerate(parameters):
            if index in self._bucket_of:
                self._handles.append(parameter.register_post_accumulate_grad_hook(partial(self._arrived, index)))
        self._attempt: Attempt | None = None
        self._missing: list[set[int]] = []
        self._is_left_to_step = False

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    @property
    def is_under_way(self) -> bool:
        """Whether something was sent that no step has taken yet."""
        return self._attempt is not None

    def take(self) -> Attempt | None:
        """The attempt under way, for `step()` to finish."""
        attempt, self._attempt, self._is_left_to_step = self._attempt, None, False
        return attempt

    @torch.no_grad()
    def arrived(self, tensor: int) -> None:
        """The gradient of a tensor is there."""
        begin = self._begin()
        if self._is_left_to_step or begin is None:
            return
        if self._attempt is None:
            self._attempt = begin()
            self._is_left_to_step = self._attempt is None
            self._missing = [set(bucket.tensors) for bucket in self._plan.buckets]
        attempt, bucket = self._attempt, self._bucket_of[tensor]
        if attempt is None:
            return
        if bucket < attempt.num_sent:
            name = self._plan.tensors[tensor].name
            raise ThinwireError(f"{name} got another gradient after the first was sent; {_REMEDY}")
        self._missing[bucket].discard(tensor)
        try:
            while attempt.num_sent < len(self._missing) and not self._missing[attempt.num_sent]:
                attempt.send_next_()
        except BaseException:
            self.take()
            raise

    def _arrived(self, tensor: int, parameter: Tensor) -> None:
        self.arrived(tensor)

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Send nothing inside."""
        if self.is_under_way:
            raise ThinwireError(f"accumulate() after a backward whose gradients were sent; call step() first, or {_REMEDY}")
        before, self._is_left_to_step = self._is_left_to_step, True
        try:
            yield
        finally:
            self._is_left_to_step = before


def check_nothing_changed(attempt: Attempt, plan: ExchangePlan, digest: bytes, is_scaled: bool) -> None:
    """Raise if what `step()` finds is not what was sent during backward."""
    if attempt.header.digest != digest:
        raise ThinwireError(
            "an option, a learning rate or the parameters changed between backward and step(); with overlap=True change "
            "them before backward"
        )
    if is_scaled:
        raise ThinwireError(f"the gradients were sent during backward, before the GradScaler could unscale them; {_REMEDY}")
    changed = attempt.changed_gradient()
    if changed is not None:
        raise ThinwireError(f"the gradient of {plan.tensors[changed].name} changed after it was sent; {_REMEDY}")
