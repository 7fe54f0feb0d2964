"""How one tensor of any shape is cut into chunks, and how chunks are put back.

A tensor is viewed as matrices, each matrix is cut into *bands* of ``row_edge`` rows, and each band into ``chunks_per_band``
chunks of ``row_edge x col_edge`` elements. Everything here is shape arithmetic and views; no ranks, no state.

Shape letters: C chunks, E elements per chunk, K kept coefficients per chunk.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

LAYOUTS = ("adaptive", "published")


@dataclass(frozen=True)
class ChunkLayout:
    """The cut of one tensor. ``num_matrices`` is 1 unless padding keeps stacked matrices apart."""

    shape: tuple[int, ...]
    num_matrices: int
    num_rows: int
    num_cols: int
    row_edge: int
    col_edge: int
    dense: bool

    @cached_property
    def bands_per_matrix(self) -> int:
        """Chunks from top to bottom of one matrix."""
        return math.ceil(self.num_rows / self.row_edge)

    @cached_property
    def num_bands(self) -> int:
        """Bands of the whole tensor; 0 for an empty one."""
        return self.num_matrices * self.bands_per_matrix

    @cached_property
    def chunks_per_band(self) -> int:
        """Chunks from left to right."""
        return math.ceil(self.num_cols / self.col_edge)

    @cached_property
    def num_chunks(self) -> int:
        """C."""
        return self.num_bands * self.chunks_per_band

    @cached_property
    def num_elements(self) -> int:
        """E, padding included."""
        return self.row_edge * self.col_edge

    @cached_property
    def is_padded(self) -> bool:
        """Whether some chunk reaches over the tensor's edge."""
        return self.num_rows % self.row_edge != 0 or self.num_cols % self.col_edge != 0

    @cached_property
    def bands_per_cut(self) -> int:
        """The tensor may be handled in parts of so many bands: whole matrices where each has its own padding."""
        return 1 if self.num_matrices == 1 else self.bands_per_matrix

    def kept(self, topk: int, chunk: int, layout: str) -> int:
        """K: ``topk`` coefficients of a full ``chunk x chunk`` chunk, in proportion for a smaller one."""
        if self.dense:
            return self.num_elements
        if layout == "published":
            return min(topk, self.num_elements)
        return min(max(1, round(topk * self.num_elements / chunk**2)), self.num_elements)


@dataclass(frozen=True)
class Part:
    """Where a tensor lies in a larger one, of which others hold the rest."""

    whole_shape: tuple[int, ...]
    offset: tuple[int, ...]


def plan_layout(
    shape: tuple[int, ...], chunk: int, dense_below: int = 0, layout: str = "adaptive", part: Part | None = None
) -> ChunkLayout:
    """Choose the cut of a tensor of this shape. ``published`` cuts every dim by its largest divisor, whatever its size."""
    numel = math.prod(shape)
    if numel == 0:
        return ChunkLayout(shape, 1, 0, 1, 1, 1, dense=False)
    if part is not None:
        return _plan_part(shape, part, chunk, dense_below, layout)
    if layout == "published":
        matrices, rows, cols = 1, *_published_matrix(shape)
        row_edge, col_edge = _largest_divisor(rows, chunk), _largest_divisor(cols, chunk)
        if len(shape) < 2:
            row_edge = 1
        return _banded(shape, matrices, rows, cols, row_edge, col_edge, dense=False)
    dense = numel < dense_below
    matrices, rows, cols = (1, 1, numel) if dense else matrix_shape(shape, chunk)
    return _banded(shape, matrices, rows, cols, cut_edge(rows, chunk), cut_edge(cols, chunk), dense)


def _plan_part(shape: tuple[int, ...], part: Part, chunk: int, dense_below: int, layout: str) -> ChunkLayout:
    """The cut of the whole, if the part begins and ends between its chunks; else a cut of its own."""
    whole = plan_layout(part.whole_shape, chunk, dense_below, layout)
    window = _window(shape, part, whole.dense, chunk if layout == "adaptive" else 0)
    if window is not None:
        matrices, (rows, row_offset, whole_rows), (cols, col_offset, whole_cols) = window
        fits = _ends_between_chunks(rows, row_offset, whole_rows, whole.row_edge)
        if fits and _ends_between_chunks(cols, col_offset, whole_cols, whole.col_edge):
            return _banded(shape, matrices, rows, cols, whole.row_edge, whole.col_edge, whole.dense)
    return plan_layout(shape, chunk, math.prod(shape) + 1 if whole.dense else 0, layout)


Extent = tuple[int, int, int]
"""Size, offset, size of the whole."""


def _window(shape: tuple[int, ...], part: Part, dense: bool, chunk: int) -> tuple[int, Extent, Extent] | None:
    """A part as (matrices, rows, cols) of the whole's; None if it is no window of them. ``chunk`` 0: no stacked matrices."""
    whole, offset = part.whole_shape, part.offset
    if dense or len(whole) < 2:
        per_row = math.prod(whole[1:])
        if shape[1:] != whole[1:]:
            return None
        return 1, (1, 0, 1), (math.prod(shape), offset[0] * per_row if whole else 0, math.prod(whole))
    if chunk and is_stack(whole, chunk):
        rows, cols = (shape[-2], offset[-2], whole[-2]), (shape[-1], offset[-1], whole[-1])
        return math.prod(shape[:-2]), rows, cols
    per_col = math.prod(whole[2:])
    if shape[2:] != whole[2:]:
        return None
    return 1, (shape[0], offset[0], whole[0]), (shape[1] * per_col, offset[1] * per_col, whole[1] * per_col)


def _ends_between_chunks(size: int, offset: int, whole: int, edge: int) -> bool:
    return offset % edge == 0 and (size % edge == 0 or offset + size == whole)


def matrix_shape(shape: tuple[int, ...], chunk: int) -> tuple[int, int, int]:
    """View any shape as (matrices, rows, cols).

    Convolutions become ``out x (in * kernel)``. Where both last dims are at least half a chunk wide the tensor is taken
    for a stack of matrices (experts), and the leading dims become the batch.
    """
    if len(shape) < 2:
        return 1, 1, math.prod(shape)
    if is_stack(shape, chunk):
        return math.prod(shape[:-2]), shape[-2], shape[-1]
    return 1, shape[0], math.prod(shape[1:])


def rows_per_cut(shape: tuple[int, ...], chunk: int, dense_below: int = 0, layout: str = "adaptive") -> int:
    """A part of dim 0 that begins and ends at multiples of so many keeps the chunks of the whole, see `Part`. It is all of
    dim 0 where the tensor is not to be cut."""
    if 0 in shape:
        return 1
    whole = plan_layout(shape, chunk, dense_below, layout)
    if whole.dense or not shape:
        return shape[0] if shape else 1
    if len(shape) < 2:
        return whole.col_edge
    return 1 if layout == "adaptive" and is_stack(shape, chunk) else whole.row_edge


def is_stack(shape: tuple[int, ...], chunk: int) -> bool:
    """Whether a tensor is taken for a stack of matrices, see `matrix_shape`."""
    return len(shape) > 2 and min(shape[-2:]) >= chunk / 2


def cut_edge(size: int, chunk: int) -> int:
    """The chunk edge for a dim: its largest divisor <= chunk if that is at least half of chunk, else an even cut, padded."""
    if size <= chunk:
        return size
    divisor = _largest_divisor(size, chunk)
    if 2 * divisor >= chunk:
        return divisor
    return math.ceil(size / math.ceil(size / chunk))


def _published_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    if len(shape) < 2:
        return 1, math.prod(shape)
    return shape[0], math.prod(shape[1:])


def _largest_divisor(size: int, limit: int) -> int:
    return next(edge for edge in range(min(size, limit), 0, -1) if size % edge == 0)


def _banded(
    shape: tuple[int, ...], matrices: int, rows: int, cols: int, row_edge: int, col_edge: int, dense: bool
) -> ChunkLayout:
    if row_edge == 1 and rows == 1 and cols % col_edge == 0:
        rows, cols = cols // col_edge, col_edge  # a vector: one chunk per band, so that it can be handled in parts
    if rows % row_edge == 0:
        matrices, rows = 1, matrices * rows  # no band crosses a matrix, so the stack is one tall matrix
    return ChunkLayout(shape, matrices, rows, cols, row_edge, col_edge, dense)


def bands_of(tensor: Tensor, layout: ChunkLayout, start: int, stop: int) -> Tensor:
    """Bands [start, stop) of a tensor as (bands, row_edge, cols): a view where nothing is padded, else a padded copy."""
    if not layout.is_padded:
        return tensor.reshape(layout.num_bands, layout.row_edge, layout.num_cols)[start:stop]
    rows = layout.row_edge * layout.bands_per_matrix - layout.num_rows
    cols = layout.col_edge * layout.chunks_per_band - layout.num_cols
    padded = F.pad(rows_of(tensor, layout, start, stop), (0, cols, 0, rows if _reaches_end(layout, stop) else 0))
    return padded.reshape(stop - start, layout.row_edge, layout.chunks_per_band * layout.col_edge)


def rows_of(tensor: Tensor, layout: ChunkLayout, start: int, stop: int) -> Tensor:
    """The rows that bands [start, stop) cover, as a view (matrices, rows, cols) without padding."""
    matrices = tensor.view(layout.num_matrices, layout.num_rows, layout.num_cols)
    if layout.num_matrices > 1:
        return matrices[start // layout.bands_per_matrix : stop // layout.bands_per_matrix]
    return matrices[:, start * layout.row_edge : stop * layout.row_edge]


def chunks_view(bands: Tensor, layout: ChunkLayout) -> Tensor:
    """(bands, row_edge, cols) seen as (bands, chunks_per_band, row_edge, col_edge): chunk order, no copy."""
    return bands.view(-1, layout.row_edge, layout.chunks_per_band, layout.col_edge).transpose(1, 2)


def crop_to_rows(chunks: Tensor, layout: ChunkLayout, start: int, stop: int) -> Tensor:
    """Chunks of bands [start, stop) back as (matrices, rows, cols), padding dropped: the inverse of `bands_of`."""
    bands = chunks.view(stop - start, layout.chunks_per_band, layout.row_edge, layout.col_edge).transpose(1, 2)
    if layout.num_matrices > 1:
        rows = bands.reshape((stop - start) // layout.bands_per_matrix, -1, layout.chunks_per_band * layout.col_edge)
        return rows[:, : layout.num_rows, : layout.num_cols]
    rows = bands.reshape(1, -1, layout.chunks_per_band * layout.col_edge)
    num_rows = min(stop * layout.row_edge, layout.num_rows) - start * layout.row_edge
    return rows[:, :num_rows, : layout.num_cols]


def _reaches_end(layout: ChunkLayout, stop: int) -> bool:
    return layout.num_matrices > 1 or stop == layout.num_bands


def empty_momentum(layout: ChunkLayout, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The residual momentum of a tensor that has seen no gradient: (C, E) of zeros."""
    return torch.zeros(layout.num_chunks, layout.num_elements, dtype=dtype, device=device)
