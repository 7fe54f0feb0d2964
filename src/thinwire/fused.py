"""Can the fused kernels train this stack? Asked without importing triton, which may not be there."""

import importlib.util
import os
from collections.abc import Sequence

import torch

from thinwire.core.combine import Decoding
from thinwire.exchange.plan import Stack
from thinwire.slabs import LocalTensor

_PARAMETER_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LARGEST_EDGE = 128
_MOST_COLUMNS = 1 << 23
_OLDEST_CAPABILITY = (8, 0)
# A gradient, a product and a basis, as float32 tiles.
_SHARED_BYTES_PER_ELEMENT = 12


def is_interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, on CPU tensors: for tests."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0", "false", "off", "no")


def why_not(stack: Stack, tensors: Sequence[LocalTensor], decoding: Decoding) -> str | None:
    """The reason in words, or None if they can."""
    if decoding.clips_values(stack.codec.value_name):
        return f"the kernels do not clip {stack.codec.value_name} values to the median (clip_to_median)"
    members = [tensors[entry.tensor] for entry in stack.entries]
    devices = {member.parameter.device for member in members}
    if len(devices) > 1:
        return f"its tensors are on several devices ({', '.join(sorted(map(str, devices)))})"
    reason = why_not_on(devices.pop())
    if reason is not None:
        return reason
    layout = stack.entries[0].layout
    if max(layout.row_edge, layout.col_edge) > _LARGEST_EDGE:
        return f"its chunks are {layout.row_edge} x {layout.col_edge}, and the kernels have edges up to {_LARGEST_EDGE}"
    if members[0].parameter.device.type == "cuda":
        needed = _SHARED_BYTES_PER_ELEMENT * _block(layout.row_edge) * _block(layout.col_edge)
        properties = torch.cuda.get_device_properties(members[0].parameter.device)
        there = int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block))
        if needed > there:
            return f"its chunks need {needed} bytes of shared memory, and this GPU has {there}"
    if any(entry.layout.num_cols > _MOST_COLUMNS for entry in stack.entries):
        return f"it has rows of more than {_MOST_COLUMNS} elements"
    for member in members:
        if member.parameter.dtype not in _PARAMETER_DTYPES or member.compute_dtype == torch.float64:
            return f"{member.parameter.dtype} parameters with {member.momentum_CE.dtype} momentum need float64 arithmetic"
    return None


def _block(edge: int) -> int:
    """`kernels.table.Cut`'s, which cannot be asked without triton."""
    return max(16, 1 << (edge - 1).bit_length())


def why_not_on(device: torch.device) -> str | None:
    """Why the kernels cannot run on a device, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device.type != "cuda":
        return None if is_interpreted() and device.type == "cpu" else f"the kernels need a CUDA device, not {device}"
    if torch.version.hip is not None:
        return "the kernels are written for NVIDIA GPUs, and this is ROCm"
    capability = torch.cuda.get_device_capability(device)
    if capability < _OLDEST_CAPABILITY:
        return f"the kernels need compute capability 8.0, and this GPU has {capability[0]}.{capability[1]}"
    return None
