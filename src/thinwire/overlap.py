"""Begin to exchange while backward still runs: a bucket is sent as soon as the last of its gradients is there.

Buckets are sent in their own order on every replica, whatever the order in which gradients arrive, so that the replicas'
exchanges match. What is not complete when backward ends is sent by `DeMo.step`.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from weakref import WeakMethod, ref

import torch
from torch import Tensor

from thinwire.attempt import Attempt
from thinwire.core.errors import ThinwireError
from thinwire.exchange.plan import ExchangePlan
from thinwire.exchange.sharding import Island, local_of

_REMEDY = (
    "call backward inside `with optimizer.accumulate():` for all but the last time before step(), and every time if "
    "gradients are to be clipped or unscaled"
)


class Overlap:
    """Hooks on the parameters of a plan. ``begin`` makes the attempt of the step to come, or None if that must wait for
    `step()`; it and ``island`` are held weakly, since parameters may live longer than the optimizer."""

    def __init__(
        self,
        plan: ExchangePlan,
        parameters: Sequence[Tensor],
        begin: "WeakMethod[Callable[[], Attempt | None]]",
        island: Island,
    ) -> None:
        self._plan, self._begin, self._island = plan, begin, ref(island)
        self._bucket_of = {tensor: bucket.index for bucket in plan.buckets for tensor in bucket.members}
        self._handles = []
        for index, parameter in enumerate(parameters):
            if index in self._bucket_of:
                self._handles.append(parameter.register_post_accumulate_grad_hook(partial(self._arrived, index)))
        self._attempt: Attempt | None = None
        self._missing: list[set[int]] = []
        self._arrivals: list[torch.cuda.Event] = []
        """Where other streams and devices had got to when their gradients arrived."""
        devices = {parameter.device for parameter in parameters if parameter.is_cuda}
        self._side = torch.cuda.Stream(devices.pop()) if len(devices) == 1 else None
        """Where buckets are encoded while backward goes on, if one GPU does all of it."""
        self._turn = threading.RLock()  # autograd has a thread per device
        self._is_left_to_step = False

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    @property
    def is_under_way(self) -> bool:
        """Whether something was sent that no step has taken yet."""
        return self._attempt is not None

    def check_idle(self) -> None:
        """Before anything that would meet half a step."""
        if self.is_under_way:
            raise ThinwireError("backward has sent gradients for a step that was not taken yet; call step() first")

    def take(self) -> Attempt | None:
        """The attempt under way, for `step()` to finish."""
        attempt, self._attempt, self._is_left_to_step = self._attempt, None, False
        if self._side is not None:
            torch.cuda.current_stream(self._side.device).wait_stream(self._side)
        return attempt

    @torch.no_grad()
    def _arrived(self, tensor: int, parameter: Tensor) -> None:
        """The gradient of a tensor is there."""
        begin, island = self._begin(), self._island()
        if self._is_left_to_step or begin is None or island is None:
            return
        with self._turn, island.told_early():
            if self._attempt is None:
                self._attempt = begin()
                self._is_left_to_step = self._attempt is None
                self._missing = [set(bucket.members) for bucket in self._plan.buckets]
                self._arrivals.clear()
            if self._attempt is not None:
                if parameter.is_cuda:
                    self._arrivals.append(torch.cuda.current_stream(parameter.device).record_event())
                if self._side is not None and parameter.grad is not None:
                    local_of(parameter.grad).record_stream(self._side)
                try:
                    with torch.cuda.stream(self._side):
                        self._send_what_is_complete(self._attempt, tensor)
                except BaseException:
                    self.take()
                    raise

    def _send_what_is_complete(self, attempt: Attempt, tensor: int) -> None:
        bucket = self._bucket_of[tensor]
        if bucket < attempt.num_sent:
            attempt.abandon_()
            name = self._plan.tensors[tensor].name
            raise ThinwireError(
                f"{name} got another gradient after the first was sent; {_REMEDY}; after a backward that failed, "
                "call it again"
            )
        self._missing[bucket].discard(tensor)
        while attempt.num_sent < len(self._missing) and not self._missing[attempt.num_sent]:
            for event in self._arrivals:
                event.wait()
            attempt.send_next_()

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
    """Raise, with the attempt taken back, if what `step()` finds is not what was sent during backward."""
    changed = attempt.changed_gradient()
    words = ""
    if attempt.header.digest != digest:
        words = (
            "an option, a learning rate or the parameters changed between backward and step(); with overlap=True change "
            "them before backward"
        )
    elif is_scaled:
        words = f"the gradients were sent during backward, before the GradScaler could unscale them; {_REMEDY}"
    elif changed is not None:
        words = f"the gradient of {plan.tensors[changed].name} changed after it was sent; {_REMEDY}"
    if words:
        attempt.abandon_()
        raise ThinwireError(words)
