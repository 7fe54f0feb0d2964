"""An island whose ranks all hold the whole model: gradients are averaged in full inside it, and each rank owns a share.

Per step the ranks of an island compare what they are about to do, average the gradients bucket by bucket so that each rank
gets the mean of its share (a reduce-scatter: what belongs to a rank is sent to it, and added up there in rank order, so that
the sum does not depend on the links), decide together, and give each other the parameters they have changed.

A rank that fails goes on to send what it owes, zeros, until all have come to the decision: so nobody waits for it in vain.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import NoReturn, TypeVar

import torch
from torch import Tensor

from thinwire.core.errors import AgreementError, ExchangeError
from thinwire.core.scratch import Scratch
from thinwire.exchange.agreement import RECEIVED, name_the_difference
from thinwire.exchange.dealing import Share
from thinwire.exchange.inside import Inside
from thinwire.exchange.plan import NOTE, Bucket, ExchangePlan, digest_of
from thinwire.exchange.sharding import FAILED, Island
from thinwire.exchange.traffic import Traffic
from thinwire.slabs import LocalTensor

_log = logging.getLogger("thinwire")
_ALIGNMENT = 16
"""Pieces begin at multiples of so many elements and bytes, as kernels like them."""
_DIGEST_BYTES = 7
Result = TypeVar("Result")


@dataclass(frozen=True)
class _Piece:
    """The share that ``rank`` owns of a tensor: its place among that rank's elements, and in its message of parameters."""

    rank: int
    tensor: int
    numel: int
    first: int
    first_byte: int
    num_bytes: int


class _Sections:
    """What of a bucket belongs to which rank."""

    def __init__(self, bucket: Bucket, tensors: Sequence[LocalTensor], num_ranks: int) -> None:
        sources = [tensors[member].source for member in bucket.members]
        # bfloat16 gradients are added up in float32 and lose nothing on the way; float16 ones could be lost when unscaled.
        dtypes = [torch.float32 if source.dtype == torch.float16 else source.dtype for source in sources]
        self.dtype = reduce(torch.promote_types, dtypes) if dtypes else torch.float32
        self.sum_dtype = torch.promote_types(self.dtype, torch.float32)
        self.device = sources[0].device if sources else torch.device("cpu")
        self.pieces: list[_Piece] = []
        self.sizes: list[int] = []
        self.row_bytes = 0
        for rank in range(num_ranks):
            first = first_byte = 0
            for member in bucket.members:
                source, share = tensors[member].source, _share(tensors[member])
                rows = share.rows(rank)
                numel = (rows.stop - rows.start) * math.prod(source.shape[1:])
                if numel:
                    num_bytes = numel * source.element_size()
                    self.pieces.append(_Piece(rank, member, numel, first, first_byte, num_bytes))
                    first += _aligned(numel)
                    first_byte += _aligned(num_bytes)
            self.sizes.append(first)
            self.row_bytes = max(self.row_bytes, first_byte)


class SharedIsland(Island):
    """This rank among those of its island; each owns what ``tensors`` say is its share."""

    unscales = True

    def __init__(self, inside: Inside, plan: ExchangePlan, tensors: Sequence[LocalTensor], traffic: Traffic) -> None:
        super().__init__(())
        self.is_one_rank, self.axes = False, [tuple(inside.ranks)]
        self._inside, self._plan, self._tensors, self._traffic = inside, plan, tensors, traffic
        self._sections = [_Sections(bucket, tensors, inside.num_ranks) for bucket in plan.buckets]
        self._dealt = _in_words(plan, tensors)
        self._scratch = Scratch()
        self._describe: Callable[[], Sequence[str]] = list
        self._grad_scale: float | None = None
        self._is_open, self._num_averaged = False, 0
        self._heard: BaseException | None = None
        """The last error that all ranks of the island know of."""

    # What all must have in mind.

    def agree(self, describe: Callable[[], Sequence[str]]) -> None:
        """See `Island`."""
        lines = self._lines(describe())
        digest = int.from_bytes(digest_of(lines)[:_DIGEST_BYTES], "little")
        worst, most, least = self._most([0, digest, -digest])
        if worst == FAILED:
            self._hear(ExchangeError("another rank of this island could not go on; it says why"))
        if most != -least:
            try:
                self._known(lambda: name_the_difference(lines, self._all_gather))
            except AgreementError as error:
                self._hear(AgreementError(f"inside an island, whose ranks are meant by replicas here: {error}"))

    def _lines(self, description: Sequence[str]) -> list[str]:
        """What must be the same on all ranks of the island: how the work is dealt out, and all that is not of this share."""
        others = description[len(self._plan.description) :]
        return [*self._dealt, *(line for line in others if not line.startswith(RECEIVED))]

    def _all_gather(self, message_B: Tensor, what: str) -> Tensor:
        messages_LB = message_B.new_empty(self._inside.num_ranks, message_B.numel())
        messages_LB[self._inside.rank] = message_B
        self._inside.gather_(messages_LB, what)
        return messages_LB

    # A step.

    def begin(self, describe: Callable[[], Sequence[str]], grad_scale: float | None) -> None:
        """See `Island`."""
        self._describe, self._grad_scale = describe, grad_scale
        self._is_open, self._num_averaged = False, 0

    def ready_(self, bucket: Bucket, sources: Sequence[Tensor]) -> None:
        """Average the gradients of a bucket, so that each rank has the mean of its share of them."""
        if not self._is_open:
            self.agree(self._describe)
            self._describe = list  # it is the optimizer's, which holds this
            self._is_open = True
        mean_S = self._average(bucket)
        for piece in self._sections[bucket.index].pieces:
            if piece.rank == self._inside.rank:
                local = self._tensors[piece.tensor]
                average = mean_S[piece.first : piece.first + piece.numel].view(local.parameter.shape)
                _share(local).average = average.to(local.source.device)

    def _average(self, bucket: Bucket, has_failed: bool = False) -> Tensor:
        sections = self._sections[bucket.index]
        device = self._inside.device or sections.device
        message_N = self._scratch.take("gradients", (sum(sections.sizes),), sections.dtype, device)
        if has_failed:
            message_N.zero_()
        else:
            self._fill_(message_N, sections)
        sizes = [size * message_N.element_size() for size in sections.sizes]
        what = f"average inside the island, bucket {bucket.index}"
        received_LB = self._known(lambda: self._inside.swap(message_N.view(torch.uint8), sizes, what))
        own = sizes[self._inside.rank]
        self._traffic.add_inside(sum(sizes) - own, own * (self._inside.num_ranks - 1))
        self._num_averaged += 1
        received_LS = received_LB.view(sections.dtype)
        mean_S = received_LS[0].to(sections.sum_dtype, copy=True)
        for row_S in received_LS[1:]:
            mean_S.add_(row_S)
        return mean_S.div_(self._inside.num_ranks)

    def _fill_(self, message_N: Tensor, sections: _Sections) -> None:
        """This rank's own gradients, rank by rank; those that are missing, or that nobody could add up, count as zero."""
        starts = [sum(sections.sizes[:rank]) for rank in range(len(sections.sizes))]
        for piece in sections.pieces:
            place = message_N[starts[piece.rank] + piece.first :][: piece.numel]
            local = self._tensors[piece.tensor]
            gradient = local.source.grad
            if gradient is None or gradient.layout != torch.strided:
                place.zero_()
            else:
                mine = _share(local).of(gradient, piece.rank)
                place.view(mine.shape).copy_(mine)
            message_N[starts[piece.rank] + piece.first + piece.numel :][: _aligned(piece.numel) - piece.numel].zero_()
        if self._grad_scale is not None:
            message_N.div_(self._grad_scale)  # each rank has its own scaler, and one may have backed off

    def spread_(self, bucket: Bucket) -> None:
        """Give each other the parameters of a bucket, as their owners have changed them."""
        sections, own = self._sections[bucket.index], self._inside.rank
        device = self._inside.device or sections.device
        shape = (self._inside.num_ranks, sections.row_bytes)
        messages_LB = self._scratch.take("parameters", shape, torch.uint8, device)
        for piece in (piece for piece in sections.pieces if piece.rank == own):
            local = self._tensors[piece.tensor]
            _place(messages_LB, piece).copy_(local.parameter.contiguous().view(-1).view(torch.uint8))
            _share(local).average = None
        with self._traffic.waiting_inside():
            self._inside.gather_(messages_LB, f"updated parameters inside the island, bucket {bucket.index}")
        self._traffic.add_inside(sections.row_bytes, sections.row_bytes * (self._inside.num_ranks - 1))
        for piece in (piece for piece in sections.pieces if piece.rank != own):
            local = self._tensors[piece.tensor]
            target = _share(local).of(local.source.detach(), piece.rank)
            target.copy_(_place(messages_LB, piece).view(target.dtype).view(target.shape))

    # What all decide together.

    def _worst(self, code: int) -> int:
        self._is_open = False
        return self._most([code, 0, 0])[0]

    def any(self, found: bool) -> bool:
        """See `Island`."""
        worst = self._worst(int(found))
        if worst == FAILED:
            self._hear(ExchangeError("another rank of this island could not go on; it says why"))
        return worst > 0

    @contextmanager
    def told_of_failure(self) -> Iterator[None]:
        """See `Island`; what this rank owes the others is sent first."""
        try:
            yield
        except BaseException as error:
            if not self.has_heard(error):
                self._tell()
            raise

    def told_early(self) -> AbstractContextManager[None]:
        """See `Island`."""
        return self.told_of_failure()

    def has_heard(self, error: BaseException) -> bool:
        """See `Island`."""
        return error is self._heard

    def _tell(self) -> None:
        try:
            while self._is_open and self._num_averaged < len(self._plan.buckets):
                self._average(self._plan.buckets[self._num_averaged], has_failed=True)
            self._worst(FAILED)
        except ExchangeError as error:
            _log.warning("could not tell the other ranks of the island that this one failed: %s", error)

    def _most(self, words: Sequence[int]) -> list[int]:
        self._traffic.add_inside(8 * len(words), 8 * len(words) * (self._inside.num_ranks - 1))
        return self._known(lambda: self._inside.most(words, "decision of the island"))

    def _known(self, exchange: Callable[[], Result]) -> Result:
        """If an exchange inside the island fails, nobody is left to be told."""
        try:
            with self._traffic.waiting_inside():
                return exchange()
        except ExchangeError as error:
            self._hear(error)

    def _hear(self, error: Exception) -> NoReturn:
        self._heard, self._is_open = error, False
        raise error


def _in_words(plan: ExchangePlan, tensors: Sequence[LocalTensor]) -> list[str]:
    lines = []
    for number, (spec, local) in enumerate(zip(plan.tensors, tensors, strict=True)):
        whole, edges = tuple(local.source.shape), _share(local).edges
        lines.append(f"tensor {number}: shape {whole}, {spec.dtype}, group {spec.group}, rows {edges}{NOTE}{spec.name}")
    return lines + [f"bucket {bucket.index}: tensors {bucket.members}" for bucket in plan.buckets]


def _aligned(number: int) -> int:
    return -(-number // _ALIGNMENT) * _ALIGNMENT


def _share(local: LocalTensor) -> Share:
    assert local.share is not None
    return local.share


def _place(messages_LB: Tensor, piece: _Piece) -> Tensor:
    return messages_LB[piece.rank, piece.first_byte : piece.first_byte + piece.num_bytes]
