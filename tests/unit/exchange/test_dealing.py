import math
from itertools import pairwise

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from thinwire.core.layout import LAYOUTS, Part, plan_layout
from thinwire.exchange.dealing import Dealing, Rows, Share, deal
from thinwire.exchange.plan import Coding

shapes = st.lists(st.integers(0, 70), max_size=4).map(tuple)


def loads_of(dealt: list[tuple[int, ...]], bucket: list[Rows]) -> list[int]:
    pairs = list(zip(dealt, bucket, strict=True))
    return [sum((edges[r + 1] - edges[r]) * rows.elements for edges, rows in pairs) for r in range(len(dealt[0]) - 1)]


@given(
    shapes=st.lists(shapes, min_size=1, max_size=8),
    num_ranks=st.integers(1, 9),
    chunk=st.integers(1, 20),
    dense_below=st.sampled_from([0, 50]),
    layout=st.sampled_from(LAYOUTS),
    whole_matrices=st.booleans(),
)
def test_shares_cover_every_tensor_once_and_keep_its_chunks(
    shapes: list[tuple[int, ...]], num_ranks: int, chunk: int, dense_below: int, layout: str, whole_matrices: bool
) -> None:
    coding = Coding(chunk, 4, "sign", layout, dense_below)
    bucket = [Rows.of(shape, coding, whole_matrices) for shape in shapes]
    for shape, rows, edges in zip(shapes, bucket, deal(bucket, [0] * num_ranks), strict=True):
        assert (edges[0], edges[-1]) == (0, rows.number)
        assert sorted(edges) == list(edges)
        assert all(edge % rows.together == 0 or edge == rows.number for edge in edges)
        whole = plan_layout(shape or (1,), chunk, dense_below, layout)
        num_chunks = 0
        for rank in range(num_ranks):
            share = Share(rank, edges)
            mine, part = share.shape_of(shape), share.part_of(shape)
            assert (part is None) == (mine == (shape or (1,)))
            cut = plan_layout(mine, chunk, dense_below, layout, part)
            num_chunks += cut.num_chunks
            if math.prod(mine):
                assert (cut.row_edge, cut.col_edge, cut.dense) == (whole.row_edge, whole.col_edge, whole.dense)
        assert num_chunks == whole.num_chunks


@given(
    bucket=st.lists(
        st.tuples(st.integers(1, 40), st.integers(1, 9), st.integers(1, 5)).map(lambda n: Rows(n[0], n[1], n[2])),
        min_size=1,
        max_size=9,
    ),
    num_ranks=st.integers(1, 6),
)
@example(bucket=[*[Rows(1, 1, 1)] * 4, Rows(1, 1, 3), *[Rows(1, 1, 1)] * 2], num_ranks=4)  # fewer rows than stay together
def test_no_rank_has_much_more_than_another(bucket: list[Rows], num_ranks: int) -> None:
    total = sum(rows.number * rows.elements for rows in bucket)
    largest = max(min(rows.together, rows.number) * rows.elements for rows in bucket)
    for load in loads_of(deal(bucket, [0] * num_ranks), bucket):
        assert abs(load - total / num_ranks) <= largest


def test_what_cannot_be_cut_goes_round_the_ranks() -> None:
    matrices = [Rows(8, 10, 8)]
    loads = [0, 0, 0, 0]
    for _ in range(8):
        for rank, more in enumerate(loads_of(deal(matrices, loads), matrices)):
            loads[rank] += more
    assert loads == [160] * 4


def test_more_ranks_than_rows() -> None:
    edges = deal([Rows(2, 5, 1)], [0] * 7)[0]
    assert sum(stop > start for start, stop in pairwise(edges)) == 2


def test_what_was_dealt_out_stays_where_it_is() -> None:
    old, new = torch.zeros(64, 4), torch.zeros(32, 4)
    dealing = Dealing(rank=1, num_ranks=2)
    dealing.deal_([[0]], [(old, Rows(64, 4, 16))])
    before = dealing.shares[old]
    dealing.deal_([[1, 0]], [(old, Rows(64, 4, 16)), (new, Rows(32, 4, 16))])
    assert dealing.shares[old] is before
    assert dealing.shares[new].edges == (0, 16, 32)
    assert dealing.shares[new].part_of((32, 4)) == Part((32, 4), (16, 0))


def test_a_scalar_is_on_one_rank_and_nothing_of_it_on_the_others() -> None:
    scalar = torch.tensor(3.0)
    owner, other = Share(1, (0, 0, 1)), Share(0, (0, 0, 1))
    assert (owner.shape_of(()), owner.part_of(())) == ((1,), None)
    assert (other.shape_of(()), other.part_of(())) == ((0,), Part((1,), (0,)))
    owner.of(scalar).fill_(5.0)
    assert scalar == 5.0
    assert other.of(scalar).numel() == 0
