"""Accelerate with DeMo: torchrun --nproc-per-node 2 examples/accelerate_loop.py"""

import argparse
import time
import zlib

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn

from thinwire import DeMo
from thinwire.integrations.accelerate import prepare


def main() -> None:
    """Train, and print a checksum of the parameters, which all ranks must share."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    asked = parser.parse_args()
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    torch.manual_seed(accelerator.process_index)
    model = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
    model, optimizer = prepare(accelerator, model, DeMo(model.parameters(), lr=1e-3, timeout_seconds=60))
    for _ in range(2 * asked.steps):
        inputs = torch.randn(16, 32, device=accelerator.device)
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(inputs), inputs.roll(1, dims=1)))
            optimizer.step()
            optimizer.zero_grad()
    values = torch.cat([parameter.detach().cpu().flatten() for parameter in model.parameters()])
    traffic = optimizer.optimizer.traffic
    print(
        f"rank {accelerator.process_index}: parameters {zlib.crc32(values.numpy().tobytes()):08x}, "
        f"{traffic.last_step.sent_bytes} bytes per step, {traffic.total.num_exchanges} steps",
        flush=True,
    )
    if dist.is_initialized():
        time.sleep(0.5)  # a gloo process may abort if it ends while its threads still run (pytorch issue 190489)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
