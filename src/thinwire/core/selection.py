"""Which coefficients of a chunk are kept: the K largest by magnitude, ties to the lower index.

A slot without a coefficient is *void*: its index is E, one past the last. Zeros are never kept, so a chunk with no
momentum sends nothing and does not vote.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# From here on numpy's vectorised partition needs half the processor time of torch.topk on a CPU.
_PARTITION_FROM_ELEMENTS = 1 << 15


def select_topk(magnitude_CE: Tensor, num_kept: int, copy_CE: Tensor | None = None) -> Tensor:
    """Return the kept indices (C, K), ascending, voids last.

    ``copy_CE`` is memory that may be overwritten; with it, large float32 chunks on a CPU take a faster way.
    """
    is_large = magnitude_CE.numel() >= _PARTITION_FROM_ELEMENTS and num_kept < magnitude_CE.shape[1]
    if copy_CE is not None and is_large and magnitude_CE.device.type == "cpu" and magnitude_CE.dtype == torch.float32:
        indices_CK = _select_by_partition(magnitude_CE.numpy(), num_kept, copy_CE.numpy())
        if indices_CK is not None:
            return indices_CK
    return _select_by_topk(magnitude_CE, num_kept)


def _select_by_topk(magnitude_CE: Tensor, num_kept: int) -> Tensor:
    num_elements = magnitude_CE.shape[1]
    # One more than needed: whether the first one left out equals the last one kept tells if there is a tie to settle.
    values, indices = torch.topk(magnitude_CE, min(num_kept + 1, num_elements), dim=1, sorted=True)
    values_CK, indices_CK = values[:, :num_kept], indices[:, :num_kept]
    if num_kept < num_elements:
        last_kept = values[:, num_kept - 1]
        tied = (values[:, num_kept] == last_kept) & (last_kept > 0)
        if bool(tied.any()):
            indices_CK = indices_CK.clone()
            indices_CK[tied] = _settle_ties(magnitude_CE[tied], num_kept)
    # The magnitudes of a settled row are the same numbers, so `values` still tells which slots are void.
    return torch.where(values_CK > 0, indices_CK, num_elements).sort(dim=1).values


def _settle_ties(magnitude_CE: Tensor, num_kept: int) -> Tensor:
    order = torch.sort(magnitude_CE, dim=1, descending=True, stable=True).indices
    return order[:, :num_kept]


def _select_by_partition(magnitude_CE: NDArray[np.float32], num_kept: int, copy_CE: NDArray[np.float32]) -> Tensor | None:
    """The same for float32 on a CPU: find each chunk's smallest kept magnitude, and list what is at least as large.

    None where a chunk has a tie at that magnitude, or fewer than K coefficients that are not 0.
    """
    num_chunks, num_elements = magnitude_CE.shape
    np.copyto(copy_CE, magnitude_CE)
    first_kept = num_elements - num_kept
    copy_CE.partition(first_kept - 1, axis=1)
    smallest_kept = copy_CE[:, first_kept:].min(axis=1)
    if (copy_CE[:, first_kept - 1] == smallest_kept).any() or not smallest_kept.all():
        return None
    flat = np.flatnonzero(magnitude_CE >= smallest_kept[:, None])
    flat = flat.reshape(num_chunks, num_kept)
    flat -= np.arange(0, num_chunks * num_elements, num_elements)[:, None]
    return torch.from_numpy(flat)


def gather_kept(coefficients_CE: Tensor, indices_CK: Tensor) -> Tensor:
    """The kept coefficients (C, K); 0 in void slots."""
    num_elements = coefficients_CE.shape[1]
    kept = coefficients_CE.gather(1, indices_CK.clamp(max=num_elements - 1))
    return kept.masked_fill_(indices_CK == num_elements, 0)


def subtract_sent_(coefficients_CE: Tensor, indices_CK: Tensor, sent_CK: Tensor) -> Tensor:
    """Take what was sent out of the residual momentum, in place. Void slots hold 0 and change nothing."""
    num_elements = coefficients_CE.shape[1]
    slots = indices_CK.clamp(max=num_elements - 1)
    return coefficients_CE.scatter_add_(1, slots, sent_CK.to(coefficients_CE.dtype).neg_())
