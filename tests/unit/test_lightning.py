"""What Lightning's own loop does around a DeMo step."""

import pickle
from collections.abc import Iterator
from typing import Any

import lightning
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from thinwire import DeMo
from thinwire.integrations.lightning import DeMoStrategy


class _Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.clipped: list[float] = []

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        return self.layer(batch[0]).float().square().sum()

    def configure_optimizers(self) -> DeMo:
        return DeMo(self.parameters(), lr=1e-3, on_nonfinite="skip")

    def configure_gradient_clipping(self, optimizer: Any, *limits: Any, **named: Any) -> None:
        super().configure_gradient_clipping(optimizer, *limits, **named)
        gradients = [parameter.grad.flatten() for parameter in self.parameters() if parameter.grad is not None]
        self.clipped.append(float(torch.cat(gradients).norm()))


@pytest.fixture
def no_group_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("no_group_left")
def test_half_precision_gradients_are_clipped_after_they_are_unscaled() -> None:
    torch.manual_seed(0)
    module = _Module()
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=64.0))
    trainer = lightning.Trainer(
        accelerator="cpu", strategy=DeMoStrategy(), devices=1, plugins=[plugin], gradient_clip_val=0.5, max_steps=3,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    before = module.layer.weight.detach().clone()
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(12, 8)), batch_size=4))
    (optimizer,) = trainer.strategy.optimizers
    assert isinstance(optimizer, DeMo)
    assert (optimizer.num_steps, optimizer.num_skipped_steps) == (3, 0)
    assert not torch.equal(module.layer.weight, before)
    assert module.clipped == pytest.approx([0.5] * 3, rel=1e-3)
    # By that name Lightning finds the scaler's state in a checkpoint.
    assert type(trainer.precision_plugin).__qualname__ == type(plugin).__qualname__
    pickle.loads(pickle.dumps(type(trainer.precision_plugin)))  # as processes that are spawned get it
