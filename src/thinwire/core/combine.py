"""From everyone's coefficients to one set: the combine rules.

Replicas are added one after the other, in replica order, and no replica names an index twice, so the sum of every
coefficient is formed in the same order on every replica and device: no float atomics decide anything.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.core.errors import check_bool, check_choice

COMBINE_RULES = ("mean_over_senders", "mean_over_replicas", "majority_vote")


class Decoding(NamedTuple):
    """How everyone's coefficients become a direction: the combine rule, whether to transform back in whole numbers, and
    whether to scale replicas down to the median norm first (`core.robust`)."""

    combine: str = "mean_over_replicas"
    is_exact: bool = True
    clips: bool = False

    @classmethod
    def checked(cls, combine: str, exact_decode: bool, clip_to_median: bool) -> "Decoding":
        """From a user's options."""
        check_choice("combine", combine, COMBINE_RULES)
        check_bool("exact_decode", exact_decode)
        if check_bool("clip_to_median", clip_to_median) and combine == "majority_vote":
            raise ValueError("clip_to_median=True has no effect with combine='majority_vote', where sizes do not count")
        return cls(combine, exact_decode, clip_to_median)

    def are_votes(self, value_name: str) -> bool:
        """Whether each value counts as 1 or -1 (or 0), so that no combined coefficient can be larger than 1."""
        return self.combine == "majority_vote" or value_name == "sign"

    def has_known_scale(self, value_name: str, num_replicas: int) -> bool:
        """Whether combined coefficients may be rounded as numbers up to 1. Votes may, unless they are divided by the number
        of replicas, of which only a few send the same coefficient: then most are much smaller."""
        return self.are_votes(value_name) and (self.combine != "mean_over_replicas" or num_replicas == 1)

    def clips_values(self, value_name: str) -> bool:
        """Whether values written in this way are scaled. Votes of the codec sign have one size already."""
        return self.clips and value_name != "sign"

    def for_rule(self, whole_matrices: bool) -> "Decoding":
        """Rules on whole matrices orthogonalise them, in floating point anyway, which would make much of rounded whole
        numbers: small singular values grow to the size of the large ones."""
        return self._replace(is_exact=self.is_exact and not whole_matrices)


def combine(messages: Sequence[tuple[Tensor, Tensor]], combined_CE: Tensor, rule: str) -> Tensor:
    """Combine each replica's (indices_CK, values_CK) into ``combined_CE``, which is overwritten and returned.

    ``mean_over_senders`` divides a coefficient by the number of replicas that sent it, ``mean_over_replicas`` by the
    number of replicas. ``majority_vote`` is the sign of the sum of signs, and 0 where votes are equal. A value of 0 is not
    a vote: it does not count as sent.
    """
    is_majority = rule == "majority_vote"
    combined_CE.zero_()
    for indices_CK, values_CK in messages:
        combined_CE.scatter_add_(
            1, _slots(indices_CK, combined_CE), (values_CK.sign() if is_majority else values_CK).to(combined_CE.dtype)
        )
    if is_majority:
        return combined_CE.sign_()
    if len(messages) == 1:
        return combined_CE
    if rule == "mean_over_senders":
        return _divide_by_senders_(combined_CE, messages)
    # A tensor, since a GPU would multiply by the rounded inverse of a number.
    return combined_CE.div_(torch.full((), len(messages), dtype=combined_CE.dtype, device=combined_CE.device))


def _divide_by_senders_(sums_CE: Tensor, messages: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Only where something was sent, which is in few places; who sent to the same one finds the same quotient."""
    num_senders = torch.zeros_like(sums_CE, dtype=torch.int16)
    all_slots = [_slots(indices_CK, sums_CE) for indices_CK, _ in messages]
    for slots_CK, (_, values_CK) in zip(all_slots, messages, strict=True):
        num_senders.scatter_add_(1, slots_CK, (values_CK != 0).to(torch.int16))
    quotients = [sums_CE.gather(1, slots).div_(num_senders.gather(1, slots).clamp_(min=1)) for slots in all_slots]
    for slots_CK, quotients_CK in zip(all_slots, quotients, strict=True):
        sums_CE.scatter_(1, slots_CK, quotients_CK)
    return sums_CE


def _slots(indices_CK: Tensor, like_CE: Tensor) -> Tensor:
    """Indices with voids moved into range; they carry the value 0 and count for nothing there."""
    return indices_CK.clamp(max=like_CE.shape[1] - 1)
