"""A DDP model with DeMo: torchrun --nproc-per-node 2 examples/ddp.py"""

import argparse
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire import DeMo, disable_gradient_sync


def main() -> None:
    """Train, and print a checksum of the parameters, which all ranks must share."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    asked = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)))
    disable_gradient_sync(model)
    optimizer = DeMo(model.parameters(), lr=1e-3, overlap=True, timeout_seconds=60)
    for _ in range(asked.steps):
        inputs = torch.randn(16, 32)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), inputs.roll(1, dims=1)).backward()
        optimizer.step()
    values = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    sent = optimizer.traffic.last_step.sent_bytes
    print(
        f"rank {dist.get_rank()}: parameters {zlib.crc32(values.numpy().tobytes()):08x}, {sent} bytes per step", flush=True
    )
    if dist.is_initialized():
        time.sleep(0.5)  # a gloo process may abort if it ends while its threads still run (pytorch issue 190489)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
