"""Random numbers that follow from a few whole numbers, so that a resumed run draws the same ones and no state is kept."""

import torch
from torch import Tensor

_MULTIPLIER = 6_364_136_223_846_793_005  # Knuth's


def seed_of(*numbers: int) -> int:
    """One number from several; neighbours become strangers."""
    seed = 0
    for number in numbers:
        seed = ((seed + number + 1) * _MULTIPLIER + 1_442_695_040_888_963_407) % 2**64
    return seed >> 1


def uniform(shape: tuple[int, ...], device: torch.device, *numbers: int) -> Tensor:
    """Float32 from 0 to below 1, drawn on the device."""
    if device.type == "meta":
        return torch.empty(shape, device=device)
    generator = torch.Generator(device).manual_seed(seed_of(*numbers))
    return torch.rand(shape, generator=generator, device=device)


def one_of_each(num_elements: int, num_parts: int, device: torch.device, *numbers: int) -> Tensor:
    """An index from each of ``num_parts`` equal parts of a vector: no index twice, and each as likely as any other.

    Drawn on the host, so that all kinds of devices find the same. A part at a time, since a permutation of all elements
    would take longer than the step.
    """
    generator = torch.Generator("cpu").manual_seed(seed_of(*numbers))
    ends = torch.arange(1, num_parts + 1, device="cpu") * num_elements // num_parts
    starts = torch.arange(num_parts, device="cpu") * num_elements // num_parts
    share = torch.rand(num_parts, dtype=torch.float64, generator=generator, device="cpu")
    return (starts + (share * (ends - starts)).long()).to(device)
