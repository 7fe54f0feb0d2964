"""Which rank of an island owns which rows of which tensor: pure arithmetic, the same on every rank.

The ranks of an island hold all parameters and share the work: each owns some rows (of dim 0) of each tensor, its *share*.
Rows are cut between chunks only, so that the chunks, and with them the bits, are those of a tensor that is not shared. Ranks
follow each other along the tensors of a bucket, so that most tensors lie on one rank and all ranks have about equally much.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from thinwire.core.layout import Part, is_stack, rows_per_cut
from thinwire.exchange.plan import Coding


@dataclass(frozen=True)
class Rows:
    """Dim 0 of a tensor: how many rows it has, the elements of one, and how many must stay together."""

    number: int
    elements: int
    together: int

    @classmethod
    def of(cls, shape: tuple[int, ...], coding: Coding, whole_matrices: bool) -> "Rows":
        """Those of a whole tensor; a scalar is one row. ``whole_matrices``: its rule must see them whole."""
        number = shape[0] if shape else 1
        together = rows_per_cut(shape, coding.chunk, coding.dense_below, coding.layout)
        if whole_matrices and not is_stack(shape, coding.chunk):
            together = max(1, number)
        return cls(number, math.prod(shape[1:]), together)


def deal(bucket: Sequence[Rows], loads: Sequence[int]) -> list[tuple[int, ...]]:
    """Deal the tensors of a bucket out to ranks that have ``loads`` elements already: for each tensor, where the rows of
    each rank begin, and where the last one's end. Who has less is given more."""
    num_ranks, total = len(loads), sum(rows.number * rows.elements for rows in bucket)
    wanted = [max(0, sum(loads) + total - num_ranks * load) for load in loads]
    ends = [sum(wanted[: rank + 1]) for rank in range(num_ranks)]
    dealt, seen = [], 0
    for rows in bucket:
        edges, together = [0], min(rows.together, rows.number)
        for end in ends[:-1]:
            # To the nearest cut; all in integers, since the ranks must not differ by a rounding.
            place, unit = total * end - seen * ends[-1], together * rows.elements * ends[-1]
            cuts = (2 * place + unit) // (2 * unit) if unit else 0
            edges.append(min(max(0, cuts * together), rows.number))
        dealt.append((*edges, rows.number))
        seen += rows.number * rows.elements
    return dealt


@dataclass
class Share:
    """What of a tensor this rank of an island owns. ``edges`` are where the rows of each rank begin, and where they end."""

    rank: int
    edges: tuple[int, ...]
    average: Tensor | None = field(default=None, compare=False)
    """The island's mean of its gradient, while a step is under way."""

    def of(self, tensor: Tensor, rank: int | None = None) -> Tensor:
        """These rows of a tensor, or those of another rank, in place."""
        rank = self.rank if rank is None else rank
        return tensor.view(-1)[self.rows(rank)] if tensor.dim() == 0 else tensor[self.rows(rank)]

    def rows(self, rank: int) -> slice:
        """Those of a rank."""
        return slice(self.edges[rank], self.edges[rank + 1])

    def shape_of(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Of the share of a tensor of this shape; of a scalar it is one element or none."""
        rows = self.rows(self.rank)
        return (rows.stop - rows.start, *whole[1:])

    def part_of(self, whole: tuple[int, ...]) -> Part | None:
        """Where it lies; None if it is all of the tensor."""
        whole = whole or (1,)
        if self.shape_of(whole) == whole:
            return None
        return Part(whole, (self.edges[self.rank], *(0 for _ in whole[1:])))


class Dealing:
    """Who owns what, as far as it has been dealt out. What a rank has it keeps, since its momentum is there: parameters that
    come later, or are trained only later, are dealt out among themselves."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self.shares: dict[Tensor, Share] = {}

    @property
    def is_on(self) -> bool:
        """Whether there is anybody to share with."""
        return self.num_ranks > 1

    def deal_(self, buckets: Sequence[Sequence[int]], tensors: Sequence[tuple[Tensor, Rows]]) -> None:
        """Deal out what is new, bucket by bucket."""
        for bucket in buckets:
            new = [index for index in bucket if tensors[index][0] not in self.shares]
            dealt = deal([tensors[index][1] for index in new], self._loads())
            for index, edges in zip(new, dealt, strict=True):
                self.shares[tensors[index][0]] = Share(self.rank, edges)

    def _loads(self) -> list[int]:
        loads = [0] * self.num_ranks
        for parameter, share in self.shares.items():
            row = math.prod(parameter.shape[1:])
            for rank in range(self.num_ranks):
                loads[rank] += (share.edges[rank + 1] - share.edges[rank]) * row
        return loads
