import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire.core.layout import Part, bands_of, chunks_view, crop_to_rows, cut_edge, matrix_shape, plan_layout, rows_of

SHAPES = st.lists(st.integers(1, 40), min_size=0, max_size=4).map(tuple).filter(lambda shape: math.prod(shape) <= 3000)


@given(shape=SHAPES, chunk=st.integers(1, 17), dense=st.booleans(), layout=st.sampled_from(["adaptive", "published"]))
def test_cut_and_crop_give_every_part_of_the_tensor_back(
    shape: tuple[int, ...], chunk: int, dense: bool, layout: str
) -> None:
    cut = plan_layout(shape, chunk, 10**9 if dense else 0, layout)
    tensor = torch.randn(shape)
    step = cut.bands_per_cut * 2
    for start in range(0, cut.num_bands, step):
        stop = min(start + step, cut.num_bands)
        bands = bands_of(tensor, cut, start, stop)
        chunks = chunks_view(bands, cut).reshape(-1, cut.row_edge, cut.col_edge)
        assert len(chunks) == (stop - start) * cut.chunks_per_band
        assert torch.equal(crop_to_rows(chunks, cut, start, stop), rows_of(tensor, cut, start, stop))
        padding = chunks.numel() - rows_of(tensor, cut, start, stop).numel()
        assert torch.isclose(chunks.abs().sum(), rows_of(tensor, cut, start, stop).abs().sum(), rtol=1e-4)
        assert (padding > 0) <= cut.is_padded
    covered = sum(rows_of(tensor, cut, s, min(s + step, cut.num_bands)).numel() for s in range(0, cut.num_bands, step))
    assert covered == tensor.numel()


@pytest.mark.parametrize(
    ("size", "chunk", "edge"),
    [
        (4096, 64, 64),
        (1000, 64, 50),
        (10, 64, 10),
        (64, 64, 64),
        (65, 64, 33),
        (1009, 64, 64),
        (96, 64, 48),
        (7, 4, 4),
        (1, 1, 1),
    ],
)
def test_edges_are_divisors_where_large_enough_else_even_cuts(size: int, chunk: int, edge: int) -> None:
    assert cut_edge(size, chunk) == edge


@given(size=st.integers(1, 5000), chunk=st.integers(1, 128))
def test_an_edge_wastes_less_than_one_chunk_and_never_exceeds_it(size: int, chunk: int) -> None:
    edge = cut_edge(size, chunk)
    assert 1 <= edge <= chunk
    assert math.ceil(size / edge) * edge - size < math.ceil(size / edge)


@pytest.mark.parametrize(
    ("shape", "view"),
    [
        ((), (1, 1, 1)),
        ((7,), (1, 1, 7)),
        ((3, 5), (1, 3, 5)),
        ((64, 3, 7, 7), (1, 64, 147)),
        ((64, 32, 5), (1, 64, 160)),
        ((8, 128, 256), (8, 128, 256)),
        ((2, 4, 128, 256), (8, 128, 256)),
    ],
)
def test_convolutions_become_matrices_and_experts_stay_a_stack(shape: tuple[int, ...], view: tuple[int, int, int]) -> None:
    assert matrix_shape(shape, 64) == view


def test_kept_coefficients_scale_with_the_chunk() -> None:
    assert plan_layout((128, 128), 64).kept(32, 64, "adaptive") == 32
    assert plan_layout((100, 128), 64).kept(32, 64, "adaptive") == round(32 * 50 * 64 / 4096)
    assert plan_layout((6400,), 64).kept(32, 64, "adaptive") == 1
    assert plan_layout((4, 4), 64).kept(10**6, 64, "adaptive") == 16
    assert plan_layout((100, 128), 64, layout="published").kept(32, 64, "published") == 32
    assert plan_layout((2, 2), 64, layout="published").kept(32, 64, "published") == 4
    dense = plan_layout((10,), 64, dense_below=11)
    assert dense.dense
    assert dense.kept(32, 64, "adaptive") == 10


def test_published_layout_takes_the_largest_divisor_however_small() -> None:
    cut = plan_layout((65, 1009), 64, layout="published")
    assert (cut.row_edge, cut.col_edge, cut.is_padded) == (13, 1, False)


def test_an_empty_tensor_has_no_chunks() -> None:
    assert plan_layout((0, 5), 64).num_chunks == 0
    assert plan_layout((3, 0), 64, 4096).num_chunks == 0


@pytest.mark.parametrize(
    ("whole", "local", "offset", "edges"),
    [
        ((128, 96), (64, 96), (64, 0), (32, 32)),  # rows that end between chunks
        ((128, 96), (128, 32), (0, 64), (32, 32)),  # columns too
        ((103, 96), (25, 96), (78, 0), (26, 32)),  # the end of the whole may be inside a chunk
        ((96, 8, 3, 3), (32, 8, 3, 3), (32, 0, 0, 0), (32, 24)),  # a convolution by its outputs
        ((6, 64, 64), (2, 64, 64), (4, 0, 0), (32, 32)),  # experts
        ((4096,), (1024,), (2048,), (1, 32)),
    ],
)
def test_a_part_has_the_chunks_of_the_whole(
    whole: tuple[int, ...], local: tuple[int, ...], offset: tuple[int, ...], edges: tuple[int, int]
) -> None:
    layout = plan_layout(local, 32, part=Part(whole, offset))
    all_of_it = plan_layout(whole, 32)
    assert (layout.row_edge, layout.col_edge) == (all_of_it.row_edge, all_of_it.col_edge) == edges
    assert layout.num_chunks == math.ceil(math.prod(local) / math.prod(edges))


def test_a_part_that_ends_inside_a_chunk_is_cut_by_its_own_shape() -> None:
    for local, offset in (((20, 64), (20, 0)), ((64, 20), (0, 20))):
        layout = plan_layout(local, 32, part=Part((64, 64), offset))
        assert layout == plan_layout(local, 32)
    assert plan_layout((0, 64), 32, part=Part((1, 64), (1, 0))).num_chunks == 0


def test_whether_a_part_is_dense_depends_on_the_whole() -> None:
    assert plan_layout((4, 8), 32, 100, part=Part((8, 8), (4, 0))).dense
    assert plan_layout((8, 4), 32, 100, part=Part((8, 8), (0, 4))).dense  # no run of the flat tensor
    assert not plan_layout((4, 8), 32, 60, part=Part((8, 8), (4, 0))).dense
    assert plan_layout((32, 16), 32, layout="published", part=Part((64, 16), (32, 0))).row_edge == 32
    assert plan_layout((8, 4, 2), 32, part=Part((8, 4, 4), (0, 0, 2))).num_chunks > 0
