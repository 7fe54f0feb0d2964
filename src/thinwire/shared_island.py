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
from weakref import ref

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
MOST_ELEMENTS = 1 << 24
"""What all ranks together are sent at once, so that memory does not grow with the model."""
_ALIGNMENT = 16
"""Pieces begin at multiples of so many elements and bytes, as kernels like them."""
_DIGEST_BYTES = 7
Result = TypeVar("Result")


@dataclass(frozen=True)
class _Piece:
    """The share that ``rank`` owns of a tensor: its place among that rank's elements, and among its parameters' bytes."""

    rank: int
    tensor: int
    first: int
    numel: int
    first_byte: int
    num_bytes: int


@dataclass(frozen=True)
class _Run:
    """What of a piece a page has: [start, stop) of the piece, from ``place`` on in the row of its rank."""

    piece: _Piece
    start: int
    stop: int
    place: int

    @property
    def places(self) -> slice:
        """Where it lies in the row."""
        return slice(self.place, self.place + self.stop - self.start)


@dataclass(frozen=True)
class _Page:
    """What is moved at once: rows of ``sizes``, one for each rank."""

    first: int
    sizes: tuple[int, ...]
    runs: tuple[_Run, ...]


class _Sections:
    """What of a bucket belongs to which rank, cut into pages: of gradients, in elements, and of parameters, in bytes."""

    def __init__(self, bucket: Bucket, tensors: Sequence[LocalTensor], num_ranks: int) -> None:
        sources = [tensors[member].source for member in bucket.members]
        # bfloat16 gradients are added up in float32 and lose nothing on the way; float16 ones could be lost when unscaled.
        dtypes = [torch.float32 if source.dtype == torch.float16 else source.dtype for source in sources]
        self.dtype = reduce(torch.promote_types, dtypes) if dtypes else torch.float32
        self.sum_dtype = torch.promote_types(self.dtype, torch.float32)
        self.device = sources[0].device if sources else torch.device("cpu")
        self.pieces: list[_Piece] = []
        self.sizes, num_bytes = [0] * num_ranks, [0] * num_ranks
        for rank in range(num_ranks):
            for member, source in zip(bucket.members, sources, strict=True):
                rows = _share(tensors[member]).rows(rank)
                numel = (rows.stop - rows.start) * math.prod(source.shape[1:])
                if numel:
                    wide = numel * source.element_size()
                    self.pieces.append(_Piece(rank, member, self.sizes[rank], numel, num_bytes[rank], wide))
                    self.sizes[rank] += _aligned(numel)
                    num_bytes[rank] += _aligned(wide)
        per_row = _aligned(max(1, MOST_ELEMENTS // num_ranks))
        self.gradients = _pages([(piece, piece.first, piece.numel) for piece in self.pieces], self.sizes, per_row)
        placed = [(piece, piece.first_byte, piece.num_bytes) for piece in self.pieces]
        self.parameters = _pages(placed, num_bytes, 4 * per_row)


def _pages(placed: Sequence[tuple[_Piece, int, int]], sizes: Sequence[int], per_row: int) -> list[_Page]:
    """Cut rows of these sizes, in which pieces are placed at (first, size), into pages of at most ``per_row`` of each."""
    pages = []
    for first in range(0, max(sizes), per_row):
        runs = []
        for piece, begins, size in placed:
            start, stop = max(first, begins), min(first + per_row, begins + size)
            if start < stop:
                runs.append(_Run(piece, start - begins, stop - begins, start - first))
        pages.append(_Page(first, tuple(min(max(0, size - first), per_row) for size in sizes), tuple(runs)))
    return pages


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
        self._is_open, self._num_swapped = False, 0
        self._heard: ref[Exception] | None = None
        """The last error that all ranks of the island know of; its traceback would hold on to much."""

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
        self._is_open, self._num_swapped = False, 0

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

    def _average(self, bucket: Bucket) -> Tensor:
        sections, own = self._sections[bucket.index], self._inside.rank
        device = self._inside.device or sections.device
        mean_S = torch.empty(sections.sizes[own], dtype=sections.sum_dtype, device=device)
        for page in sections.gradients:
            message_N = self._zeros(sections, page)
            self._fill_(message_N, page)
            received_LS = self._swap(message_N, page, f"average inside the island, bucket {bucket.index}")
            sum_S = mean_S[page.first : page.first + page.sizes[own]].copy_(received_LS[0])
            for row_S in received_LS[1:]:
                sum_S.add_(row_S)
        return mean_S.div_(self._inside.num_ranks)

    def _zeros(self, sections: _Sections, page: _Page) -> Tensor:
        device = self._inside.device or sections.device
        return self._scratch.take("gradients", (sum(page.sizes),), sections.dtype, device).zero_()

    def _fill_(self, message_N: Tensor, page: _Page) -> None:
        """This rank's own gradients, rank by rank; those that are missing, or that nobody could add up, count as zero."""
        rows = message_N.split(list(page.sizes))
        for run in page.runs:
            local = self._tensors[run.piece.tensor]
            gradient = local.source.grad
            if gradient is not None and gradient.layout == torch.strided:
                mine = _share(local).of(gradient, run.piece.rank).reshape(-1)
                rows[run.piece.rank][run.places].copy_(mine[run.start : run.stop])
        if self._grad_scale is not None:
            message_N.div_(self._grad_scale)  # each rank has its own scaler, and one may have backed off

    def _swap(self, message_N: Tensor, page: _Page, what: str) -> Tensor:
        sizes = [size * message_N.element_size() for size in page.sizes]
        received_LB = self._known(lambda: self._inside.swap(message_N.view(torch.uint8), sizes, what))
        own = sizes[self._inside.rank]
        self._traffic.add_inside(sum(sizes) - own, own * (self._inside.num_ranks - 1))
        self._num_swapped += 1
        return received_LB.view(-1).view(message_N.dtype).view(self._inside.num_ranks, page.sizes[self._inside.rank])

    def spread_(self, bucket: Bucket) -> None:
        """Give each other the parameters of a bucket, as their owners have changed them."""
        sections, own = self._sections[bucket.index], self._inside.rank
        device = self._inside.device or sections.device
        targets = {piece: self._target(piece) for piece in sections.pieces}
        contents = {piece: target.contiguous().view(-1).view(torch.uint8) for piece, target in targets.items()}
        for page in sections.parameters:
            shape = (self._inside.num_ranks, max(page.sizes))
            messages_LB = self._scratch.take("parameters", shape, torch.uint8, device)
            for run in (run for run in page.runs if run.piece.rank == own):
                messages_LB[own, run.places].copy_(contents[run.piece][run.start : run.stop])
            with self._traffic.waiting_inside():
                self._inside.gather_(messages_LB, f"updated parameters inside the island, bucket {bucket.index}")
            self._traffic.add_inside(shape[1], shape[1] * (self._inside.num_ranks - 1))
            for run in (run for run in page.runs if run.piece.rank != own):
                contents[run.piece][run.start : run.stop].copy_(messages_LB[run.piece.rank, run.places])
        for piece, target in targets.items():
            if contents[piece].data_ptr() != target.data_ptr():
                target.copy_(contents[piece].view(target.dtype).view(target.shape))
            if piece.rank == own:
                _share(self._tensors[piece.tensor]).average = None

    def _target(self, piece: _Piece) -> Tensor:
        local = self._tensors[piece.tensor]
        return _share(local).of(local.source.detach(), piece.rank)

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
        return self._heard is not None and self._heard() is error

    def _tell(self) -> None:
        pages = [(sections, page) for sections in self._sections for page in sections.gradients]
        try:
            for sections, page in pages[self._num_swapped :] if self._is_open else ():
                self._swap(self._zeros(sections, page), page, "average inside the island, given up")
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
        self._heard, self._is_open = ref(error), False
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
