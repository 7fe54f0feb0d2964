"""DeMo replaces the averaging of gradients; this module finds, names and turns off what would still average them."""

import gc
from collections.abc import Iterable

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


def disable_gradient_sync(ddp_model: DistributedDataParallel) -> DistributedDataParallel:
    """Keep a DDP model from averaging gradients, for good, and return it: what DeMo needs.

    The same as running every backward inside ``ddp_model.no_sync()``. Buffers are no longer broadcast either.
    """
    if not isinstance(ddp_model, DistributedDataParallel):
        raise TypeError(
            f"disable_gradient_sync needs a DistributedDataParallel model, got {type(ddp_model).__name__}; "
            "a model that is not wrapped has no gradient sync to turn off"
        )
    ddp_model.require_backward_grad_sync = False
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
