"""DeMo replaces the averaging of gradients; this module finds, names and turns off what would still average them."""

import gc
from collections.abc import Iterable
from typing import TypeVar

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

Model = TypeVar("Model", bound=nn.Module)


def ddp_in(model: nn.Module) -> DistributedDataParallel | None:
    """A DDP model, also one that was compiled after it was wrapped; None if it is none."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, DistributedDataParallel) else None


def disable_gradient_sync(ddp_model: Model) -> Model:
    """Keep a DDP model from averaging gradients, for good, and return it: what DeMo needs.

    The same as running every backward inside ``ddp_model.no_sync()``. Buffers are no longer broadcast either.
    """
    found = ddp_in(ddp_model)
    if found is None:
        raise TypeError(
            f"disable_gradient_sync needs a DistributedDataParallel model, got {type(ddp_model).__name__}; "
            "a model that is not wrapped has no gradient sync to turn off"
        )
    found.require_backward_grad_sync = False
    return ddp_model


def is_synchronised_by_ddp(parameters: Iterable[Tensor]) -> bool:
    """Whether some live DDP model averages the gradients of one of these parameters."""
    ours = {id(parameter) for parameter in parameters}
    for thing in gc.get_objects():
        # type(), not isinstance(): lazily loaded objects of other libraries answer isinstance with an import
        is_active = issubclass(type(thing), DistributedDataParallel) and thing.require_backward_grad_sync
        if is_active and any(id(parameter) in ours for parameter in thing.parameters()):
            return True
    return False
