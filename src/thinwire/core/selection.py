"""Which coefficients of a chunk are kept: the K largest by magnitude, ties to the lower index.

A slot without a coefficient is *void*: its index is E, one past the last. Zeros are never kept, so a chunk with no
momentum sends nothing and does not vote.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

# Near sqrt(E / K) for the usual 64 x 64 chunk with 32 kept: as much work to find the groups as to look into them.
_GROUP_SIZE = 8


def num_groups_of(num_elements: int) -> int:
    """G: how many groups the elements of a chunk form."""
    return num_elements // math.gcd(num_elements, _GROUP_SIZE)


def group_maxima(coefficients_CE: Tensor, maxima_CG: Tensor) -> None:
    """Write down the largest magnitude in each group of elements, best while the coefficients are in the cache.

    Group g holds the elements g, g + G, g + 2 * G and so on, so that these are maxima of whole rows. Taking magnitudes
    first would cost a pass more.
    """
    rows = coefficients_CE.view(len(coefficients_CE), -1, maxima_CG.shape[1])
    torch.amax(rows, dim=1, out=maxima_CG)
    torch.maximum(maxima_CG, rows.amin(dim=1).neg_(), out=maxima_CG)


def select_topk(parts: Sequence[Tensor], num_kept: int, maxima_CG: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the kept indices (C, K), ascending, voids last, and the coefficients there, 0 in voids.

    The chunks come as the rows of one or more tensors (C, E), so that those of many parameters are handled together.
    With their `group_maxima` a CPU has a faster way.
    """
    found = None if maxima_CG is None else _select_by_groups(parts, maxima_CG, num_kept)
    if found is not None:
        return found
    if parts[0].device.type == "cpu":  # part by part, so that it takes no more memory than a part
        indices_CK = torch.cat([_select_by_topk(part.abs(), num_kept) for part in parts])
    else:
        indices_CK = _select_by_topk(torch.cat([part.abs() for part in parts]), num_kept)
    where = indices_CK.split([len(part) for part in parts])
    return indices_CK, torch.cat([gather_kept(part, indices) for part, indices in zip(parts, where, strict=True)])


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


def _select_by_groups(parts: Sequence[Tensor], maxima_CG: Tensor, num_kept: int) -> tuple[Tensor, Tensor] | None:
    """The same by looking only into the K groups with the largest maxima.

    Each of these maxima is larger than all that other groups hold, and there are K of them, so nothing else can be kept.
    None where a tie or a lack of coefficients that are not 0 keeps this from being so.
    """
    num_elements, num_groups = parts[0].shape[1], maxima_CG.shape[1]
    groups_CK = _largest(maxima_CG, num_kept)
    if groups_CK is None:
        return None
    first_of_rows = torch.arange(0, num_elements, num_groups, device=maxima_CG.device)[:, None]
    indices_CJ = (groups_CK[:, None, :] + first_of_rows).view(len(groups_CK), -1)  # ascending, as the result has to be
    where = indices_CJ.split([len(part) for part in parts])
    values_CJ = torch.cat([part.gather(1, indices) for part, indices in zip(parts, where, strict=True)])
    if num_groups == num_elements:
        return indices_CJ, values_CJ
    slots_CK = _largest(values_CJ.abs(), num_kept)
    return None if slots_CK is None else (indices_CJ.gather(1, slots_CK), values_CJ.gather(1, slots_CK))


def _largest(values_CN: Tensor, num_kept: int) -> Tensor | None:
    """Where the K largest of each row are, ascending: the smallest of them is found, and all that is as large is listed.

    None where this does not work: a tie at the smallest, a smallest of 0, or no more than K values in a row.
    """
    num_rows, num_values = values_CN.shape
    first_kept = num_values - num_kept
    if first_kept < 1:
        return None
    parted = values_CN.clone().numpy()  # torch's memory, so that its profiler and allocator know of it
    parted.partition(first_kept - 1, axis=1)  # numpy's is vectorised, torch has none
    smallest_kept = parted[:, first_kept:].min(axis=1)
    if (parted[:, first_kept - 1] == smallest_kept).any() or not smallest_kept.all():
        return None
    is_kept = torch.empty_like(values_CN, dtype=torch.bool).numpy()
    np.greater_equal(values_CN.numpy(), smallest_kept[:, None], out=is_kept)
    places = np.flatnonzero(is_kept).reshape(num_rows, num_kept)
    places -= np.arange(0, num_rows * num_values, num_values)[:, None]
    return torch.from_numpy(places)


def gather_kept(coefficients_CE: Tensor, indices_CK: Tensor) -> Tensor:
    """The kept coefficients (C, K); 0 in void slots."""
    num_elements = coefficients_CE.shape[1]
    kept = coefficients_CE.gather(1, indices_CK.clamp(max=num_elements - 1))
    return kept.masked_fill_(indices_CK == num_elements, 0)


def subtract_sent_(parts: Sequence[Tensor], indices_CK: Tensor, sent_CK: Tensor) -> None:
    """Take what was sent out of the residual momentum of the parts, in place. Void slots hold 0 and change nothing."""
    sizes = [len(part) for part in parts]
    slots = indices_CK.clamp(max=parts[0].shape[1] - 1).split(sizes)
    for part, where, negative in zip(parts, slots, sent_CK.neg().split(sizes), strict=True):
        part.scatter_add_(1, where, negative.to(part.dtype))
