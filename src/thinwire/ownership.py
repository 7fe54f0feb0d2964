"""What an owner does in an owner exchange: it combines everyone's coefficients of its chunks and answers with the strongest.

What it does not send, and what quantising takes from it, stays in the owner's *residual* and is added to what comes next:
nothing is lost between those who send, the owner, and those who receive. The residual is momentum, like a sender's, and
decays as it does. Letters: C chunks, E elements, K kept, S senders.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.core.combine import Decoding, combine
from thinwire.core.robust import clip_factors, squared_norm, squares_by_exponent
from thinwire.core.selection import select_topk, subtract_sent_
from thinwire.exchange.plan import Records, Stack, stack_records
from thinwire.wire.codec import ChunkCodec

# Bounds what a step takes beside the residual; a GPU wants much work per launch.
_ELEMENTS_AT_ONCE, _ELEMENTS_AT_ONCE_ON_GPU = 1 << 21, 1 << 25


@dataclass(frozen=True)
class Place:
    """Which chunks of one tensor a replica owns, counted in the tensor."""

    tensor: int
    first: int
    num_chunks: int


def places(stack: Stack, owned: range) -> list[Place]:
    """What of each tensor of a stack these chunks are, in order; it may be nothing."""
    found = []
    for entry in stack.entries:
        end = entry.first_chunk + entry.layout.num_chunks
        first, stop = max(owned.start, entry.first_chunk), min(owned.stop, end)
        found.append(Place(entry.tensor, max(0, first - entry.first_chunk), max(0, stop - first)))
    return found


RESIDUAL, FIRST = "owner_residual", "owner_first"
"""In the state of a parameter: what its owner has not sent yet of the chunks (C, E) from the first on."""


def folded(momentum_CE: Tensor, state: Mapping[str, Any], codec: ChunkCodec, combine_rule: str, num_replicas: int) -> Tensor:
    """A momentum that has what is in an owner's residual as well: what would bring it to all if this replica sent it.

    For when the replica no longer owns these chunks. A residual of votes has no size; each counts as much as the
    coefficients that the momentum would send.
    """
    residual_CE = state.get(RESIDUAL)
    if residual_CE is None or not len(residual_CE):
        return momentum_CE
    first = int(state[FIRST])
    both_CE = momentum_CE.to(torch.promote_types(momentum_CE.dtype, torch.float32), copy=True)
    mine_CE = both_CE[first : first + len(residual_CE)]
    if combine_rule == "majority_vote" or codec.value_name == "sign":
        _, kept_CK = select_topk([mine_CE], codec.num_kept)
        mine_CE += residual_CE * kept_CK.abs().mean(dim=1, keepdim=True)
    else:
        mine_CE += residual_CE * (num_replicas if combine_rule == "mean_over_replicas" else 1)
    return both_CE.to(momentum_CE.dtype)


class OwnedStack:
    """The chunks of one stack that this replica owns. ``residuals`` are their tensors' (C, E), in the order of the stack."""

    def __init__(self, run: Records, answer_run: Records, residuals: Sequence[Tensor]) -> None:
        self._run, self._answer_run = run, answer_run
        self._residuals = residuals
        self._num_chunks = sum(map(len, residuals))
        self._after_CE: Tensor | None = None

    def answer_(self, slices_SB: Tensor, decoding: Decoding, decay: float, answer_B: Tensor) -> None:
        """Combine the slices of all that count, and write the strongest into the answer; `commit_` or `drop` follows."""
        if not self._num_chunks:
            return
        records_SCB = stack_records(slices_SB, self._run)
        answers_CB = stack_records(answer_B, self._answer_run)
        device = self._residuals[0].device  # a model may lie on several
        after_CE = torch.cat([residual.to(device) for residual in self._residuals]).mul_(decay)
        at_once = max(1, (_ELEMENTS_AT_ONCE_ON_GPU if after_CE.is_cuda else _ELEMENTS_AT_ONCE) // after_CE.shape[1])
        factors = self._clip_factors(records_SCB, at_once) if decoding.clips_values(self._run.codec.value_name) else None
        for first in range(0, self._num_chunks, at_once):
            where = slice(first, min(first + at_once, self._num_chunks))
            messages = self._messages(records_SCB[:, where].to(after_CE.device))
            if factors is not None:
                pairs = zip(messages, factors, strict=True)
                messages = [(indices, values * factor) for (indices, values), factor in pairs]
            some_CE = after_CE[where]
            some_CE += combine(messages, torch.empty_like(some_CE), decoding.combine)
            answers_CB[where] = _take_strongest_(some_CE, self._answer_run.codec).to(answers_CB.device)
        self._after_CE = after_CE

    def _messages(self, records_SCB: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Everyone's indices and values (C, K), decoded together."""
        found = self._run.codec.decode(records_SCB.flatten(0, 1))
        indices_SCK, values_SCK = (tensor.unflatten(0, records_SCB.shape[:2]) for tensor in found)
        return list(zip(indices_SCK, values_SCK, strict=True))

    def commit_(self) -> None:
        """The answer counts: what it left is the residual from now on."""
        if self._after_CE is not None:
            parts = self._after_CE.split([len(residual) for residual in self._residuals])
            for residual, after in zip(self._residuals, parts, strict=True):
                residual.copy_(after)
        self.drop()

    def drop(self) -> None:
        """The answer does not count: the residual is as it was."""
        self._after_CE = None

    def _clip_factors(self, records_SCB: Tensor, at_once: int) -> list[float]:
        """As in `TorchStack`, by the norms of what came for these chunks."""
        squares = []
        for records_CB in records_SCB:
            sums = (squares_by_exponent(self._run.codec.decode(some)[1]).cpu() for some in records_CB.split(at_once))
            squares.append(sum(map(squared_norm, sums)))
        return clip_factors(squares)


def _take_strongest_(coefficients_CE: Tensor, codec: ChunkCodec) -> Tensor:
    """Move the strongest coefficients into records (C, B)."""
    if codec.index_codec.name == "all":
        kept_CK = coefficients_CE.clone()
        indices_CK = torch.arange(codec.num_kept, device=kept_CK.device).expand_as(kept_CK)
    else:
        indices_CK, kept_CK = select_topk([coefficients_CE], codec.num_kept)
    encoded = codec.encode(indices_CK, kept_CK)
    subtract_sent_([coefficients_CE], indices_CK, encoded.removed_CK)
    return encoded.records_CB
