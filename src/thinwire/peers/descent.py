"""The plainest optimizer, for peers whose message is the direction already."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer


class Descent(Optimizer):
    """``p <- p * (1 - lr * weight_decay) - lr * gradient``; with ``has_lr`` the gradient has that last lr in it already."""

    def __init__(self, params: Iterable[Any], lr: float, has_lr: bool = False) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})
        self._has_lr = has_lr

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Change every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.sub_(parameter.grad, alpha=1.0 if self._has_lr else group["lr"])
