"""What a step sets in any optimizer, and what a resumed run leaves as it is."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn
from torch.optim import Optimizer


@contextmanager
def own_settings(optimizer: Optimizer) -> Iterator[None]:
    """Load a state without its settings: a resumed run has those that it was started with."""
    kept = ("params", "param_names", "num_steps", "step")
    before = [{name: value for name, value in group.items() if name not in kept} for group in optimizer.param_groups]
    yield
    for group, settings in zip(optimizer.param_groups, before, strict=True):
        group.update(settings)


def set_lrs(optimizers: Sequence[Optimizer], peaks: list[list[float]], share: float) -> None:
    """Make every learning rate this share of its peak."""
    for optimizer, own_peaks in zip(optimizers, peaks, strict=True):
        for group, peak in zip(optimizer.param_groups, own_peaks, strict=True):
            group["lr"] = peak * share


def clip_(parameters: Iterable[Tensor], largest_norm: float) -> None:
    """Scale the gradients down to this norm, unless it is 0."""
    if largest_norm > 0:
        nn.utils.clip_grad_norm_(parameters, largest_norm)


def parameters_of(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    """All that they change."""
    return [parameter for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]]
