"""Lightning with DeMo: torchrun --nproc-per-node 2 examples/lightning_module.py --out runs/lightning"""

import argparse
import os
import time
import zlib

import lightning
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from thinwire import DeMo
from thinwire.integrations.lightning import DeMoStrategy


class Roll(lightning.LightningModule):
    """Learns to roll its input by one place."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        """The loss of a batch."""
        return nn.functional.mse_loss(self.net(batch[0]), batch[0].roll(1, dims=1))

    def configure_optimizers(self) -> DeMo:
        """Called by Lightning when the processes have joined."""
        return DeMo(self.parameters(), lr=1e-3, timeout_seconds=60)


def main() -> None:
    """Train, save, and print a checksum of the parameters, which all ranks must share."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--resume", default=None)
    asked = parser.parse_args()
    lightning.seed_everything(0, verbose=False)
    data = DataLoader(TensorDataset(torch.randn(4096, 32)), batch_size=16)
    trainer = lightning.Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        strategy=DeMoStrategy(),
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        max_steps=asked.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Roll()
    trainer.fit(module, data, ckpt_path=asked.resume)
    trainer.save_checkpoint(f"{asked.out}/last.ckpt")
    values = torch.cat([parameter.detach().cpu().flatten() for parameter in module.parameters()])
    (optimizer,) = trainer.strategy.optimizers
    sent = optimizer.traffic.last_step.sent_bytes
    print(
        f"rank {trainer.global_rank}: parameters {zlib.crc32(values.numpy().tobytes()):08x}, {sent} bytes per step",
        flush=True,
    )
    if dist.is_initialized():
        time.sleep(0.5)  # a gloo process may abort if it ends while its threads still run (pytorch issue 190489)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
