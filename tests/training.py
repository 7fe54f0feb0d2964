"""A small model and its data, and a loop that any transport can run: the same numbers wherever it runs."""

import threading
from typing import Any

import torch
from torch import Tensor, nn

from thinwire import DeMo

# Replicas that are threads share torch's random generator.
_SEEDING = threading.Lock()


class SmallNet(nn.Module):
    """Conv, linear layers of awkward sizes, norm, bias, and a scalar: most of what a plan must handle."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3)
        self.norm = nn.LayerNorm(37)
        self.wide = nn.Linear(6 * 6 * 6, 37)
        self.out = nn.Linear(37, 5)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.relu(self.conv(images)).flatten(1)
        return self.scale * self.out(self.norm(self.wide(hidden)))


def batch(step: int, replica: int) -> tuple[Tensor, Tensor]:
    """A batch that depends on step and replica alone."""
    generator = torch.Generator().manual_seed(1000 * step + replica)
    images = torch.randn(8, 1, 8, 8, generator=generator)
    return images, images.mean(dim=(1, 2, 3)).mul(20).clamp(-2, 2).round().long() + 2


def build(seed: int = 0) -> SmallNet:
    """A model whose first parameters depend on the seed."""
    with _SEEDING:
        torch.manual_seed(seed)
        return SmallNet()


def train_step(model: nn.Module, optimizer: DeMo, step: int, replica: int) -> float:
    """Forward, backward, step."""
    device = next(model.parameters()).device
    images, labels = (tensor.to(device) for tensor in batch(step, replica))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss.item()


def train(
    replica: int, num_steps: int, first_seed: int = 0, device: str = "cpu", **options: Any
) -> tuple[SmallNet, DeMo, list[float]]:
    """Train from a seed of this replica's own, so that only the optimizer can have made replicas equal."""
    model = build(first_seed + replica).to(device)
    options = {"chunk": 16, "topk": 8, "dense_below": 60, **options}
    optimizer = DeMo(model.named_parameters(), lr=1e-2, **options)
    return model, optimizer, [train_step(model, optimizer, step, replica) for step in range(num_steps)]


def flat(model: nn.Module) -> Tensor:
    """All parameters in one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
