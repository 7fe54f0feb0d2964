"""Hugging Face's Trainer with DeMo.

    trainer = DeMoTrainer(model, args, train_dataset=data, demo={"topk": 32})

Everything else is Trainer's: arguments, schedules, logging, checkpoints. DDP wraps the model but averages nothing, each
replica clips its own gradient, and checkpoints hold every rank's residual momentum.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from thinwire.exchange.gradient_sync import ddp_in, disable_gradient_sync
from thinwire.integrations.replica_files import load_beside, save_beside
from thinwire.optimizer import DeMo

_SCHEDULER = "scheduler.pt"


class DeMoTrainer(Trainer):
    """`transformers.Trainer` whose optimizer is DeMo. ``demo`` are options of DeMo; learning rate and weight decay are those
    of ``args``."""

    def __init__(
        self, model: nn.Module, args: TrainingArguments, *, demo: dict[str, Any] | None = None, **options: Any
    ) -> None:
        if options.get("optimizers") or options.get("optimizer_cls_and_kwargs"):
            raise ValueError("DeMoTrainer makes its own optimizer; pass its options as demo={...}")
        options["optimizer_cls_and_kwargs"] = (DeMo, {"lr": args.learning_rate, **(demo or {})})
        super().__init__(model, args, **options)

    @property
    def demo(self) -> DeMo:
        """The optimizer itself, whatever accelerate has wrapped around it."""
        optimizer: Any = self.optimizer
        found = getattr(optimizer, "optimizer", optimizer)
        assert isinstance(found, DeMo)
        return found

    def training_step(self, model: nn.Module, *args: Any, **options: Any) -> Tensor:
        """Forward and backward, without DDP's averaging."""
        if ddp_in(model) is not None:
            disable_gradient_sync(model)
        loss: Tensor = super().training_step(model, *args, **options)
        return loss

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        save_beside(self.demo, Path(output_dir, "optimizer"))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        load_beside(self.demo, Path(checkpoint, "optimizer"))
        schedule = torch.load(Path(checkpoint, _SCHEDULER), map_location="cpu", weights_only=True)
        assert self.lr_scheduler is not None
        self.lr_scheduler.load_state_dict(schedule)
