"""FSDP2 and tensor parallel inside a replica, DeMo between replicas:

torchrun --nproc-per-node 8 examples/fsdp2_tp.py --replicas 2 --shards 2 --tensor-parallel 2
"""

import argparse
import time
import zlib

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from thinwire.parallel.sharded import distribute


class Block(nn.Module):
    """A residual layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Add what the layer finds."""
        return hidden + self.down(nn.functional.gelu(self.up(self.norm(hidden))))


class Model(nn.Module):
    """Embedding, layers, logits."""

    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.layers = nn.ModuleList([Block(width) for _ in range(layers)])
        self.out = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token."""
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.out(hidden)


def initialise(model: nn.Module) -> None:
    """Values for a model from the meta device; those of replica 0 count."""
    for name, parameter in model.named_parameters():
        nn.init.ones_(parameter) if name.endswith("norm.weight") else nn.init.normal_(parameter, std=0.02)


def main() -> None:
    """Train, and print a checksum of the parameters, which all ranks must share."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, required=True)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    asked = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = ("replicate", "shard", "tp")
    mesh = init_device_mesh(device, (asked.replicas, asked.shards, asked.tensor_parallel), mesh_dim_names=names)
    replica, shard, _ = mesh.get_coordinate() or ()
    with torch.device("meta"):
        model: nn.Module = Model()
    if asked.tensor_parallel > 1:
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model, optimizer = distribute(model, mesh, initialise=initialise, lr=1e-3, overlap=True, timeout_seconds=60)
    generator = torch.Generator().manual_seed(1000 * replica + shard)
    for _ in range(asked.steps):
        tokens = torch.randint(0, 256, (8, 33), generator=generator).to(device)
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
    whole = [getattr(parameter, "full_tensor", lambda p=parameter: p)().detach().cpu() for parameter in model.parameters()]
    values = torch.cat([value.flatten() for value in whole])
    sent = optimizer.traffic.last_step.sent_bytes
    print(
        f"rank {dist.get_rank()}: parameters {zlib.crc32(values.numpy().tobytes()):08x}, {sent} bytes per step", flush=True
    )
    if dist.is_initialized():
        time.sleep(0.5)  # a gloo process may abort if it ends while its threads still run (pytorch issue 190489)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
