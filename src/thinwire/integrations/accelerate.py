"""Hugging Face Accelerate with DeMo.

model, optimizer, loader = prepare(accelerator, model, DeMo(model.parameters(), lr=1e-3), loader)
"""

from typing import Any

from accelerate import Accelerator
from torch import nn

from thinwire.exchange.gradient_sync import ddp_in, disable_gradient_sync
from thinwire.optimizer import DeMo


def prepare(accelerator: Accelerator, model: nn.Module, optimizer: DeMo, *others: Any) -> tuple[Any, ...]:
    """`accelerator.prepare`, with DDP's averaging turned off. Build the optimizer after the accelerator, which joins the
    processes."""
    if not isinstance(optimizer, DeMo):
        raise TypeError(f"the optimizer must be thinwire.DeMo, got {type(optimizer).__name__}; others need the averaging")
    prepared = accelerator.prepare(model, optimizer, *others)
    if ddp_in(prepared[0]) is not None:
        disable_gradient_sync(prepared[0])
    elif accelerator.num_processes > 1:
        raise TypeError(
            f"accelerate wrapped the model in {type(prepared[0]).__name__}, whose averaging this cannot turn off; for FSDP2 "
            "use thinwire.parallel.sharded.distribute"
        )
    return tuple(prepared)
