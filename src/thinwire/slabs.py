"""How the chunks of a stack are handled a bounded part at a time.

A *slab* is a run of consecutive records that are packed into bytes together. It is cut into *tiles*, small enough that
what is as large as the chunks themselves (coefficients, magnitudes) stays in the cache; a tile is made of *pieces* of
one or many tensors. A few tiles are a *batch*, whose coefficients are selected together. So the extra memory of a step
does not grow with the model, and small tensors are handled together.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from thinwire.core.layout import ChunkLayout
from thinwire.exchange.plan import Stack


@dataclass(frozen=True)
class Limits:
    """The largest tile, batch and slab, in elements."""

    tile_elements: int
    batch_elements: int
    slab_elements: int


# A CPU wants tiles that fit its cache; a GPU wants enough work per launch to fill it.
_LIMITS = {"cpu": Limits(3 << 16, 3 << 18, 1 << 21), "cuda": Limits(1 << 25, 1 << 25, 1 << 25)}


@dataclass(frozen=True)
class LocalTensor:
    """A parameter, and what this replica keeps for it: residual momentum (C, E) and the state of its update rule."""

    parameter: Tensor
    momentum_CE: Tensor
    rule_state: dict[str, Tensor] = field(default_factory=dict)

    @property
    def compute_dtype(self) -> torch.dtype:
        """float64 for float64 parameters, else float32."""
        return torch.float64 if self.parameter.dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Piece:
    """Bands [start, stop) of one tensor, whose chunks begin at ``tile_first`` of the tile and ``slab_first`` of the slab."""

    tensor: int
    layout: ChunkLayout
    start: int
    stop: int
    tile_first: int
    slab_first: int

    @cached_property
    def num_chunks(self) -> int:
        """Chunks of this piece."""
        return (self.stop - self.start) * self.layout.chunks_per_band

    @cached_property
    def tensor_chunks(self) -> slice:
        """Where the chunks lie in the tensor's own momentum."""
        return slice(self.start * self.layout.chunks_per_band, self.stop * self.layout.chunks_per_band)

    @cached_property
    def tile_chunks(self) -> slice:
        """Where the chunks lie in the tile."""
        return slice(self.tile_first, self.tile_first + self.num_chunks)

    @cached_property
    def slab_chunks(self) -> slice:
        """Where the chunks lie in the slab."""
        return slice(self.slab_first, self.slab_first + self.num_chunks)

    @cached_property
    def ends_tensor(self) -> bool:
        """Whether this is the last piece of its tensor."""
        return self.stop == self.layout.num_bands


@dataclass(frozen=True)
class Tile:
    """Pieces whose chunks are transformed and selected together."""

    pieces: tuple[Piece, ...]

    @cached_property
    def num_chunks(self) -> int:
        """Chunks of the tile."""
        return sum(piece.num_chunks for piece in self.pieces)

    @cached_property
    def slab_chunks(self) -> slice:
        """Where the chunks lie in the slab."""
        first = self.pieces[0].slab_first
        return slice(first, first + self.num_chunks)


@dataclass(frozen=True)
class Slab:
    """Consecutive records of a stack, all on one device and in one compute dtype."""

    first_chunk: int
    tiles: tuple[Tile, ...]
    device: torch.device
    dtype: torch.dtype

    @cached_property
    def num_chunks(self) -> int:
        """Records in the slab."""
        return sum(tile.num_chunks for tile in self.tiles)

    @cached_property
    def records(self) -> slice:
        """Where the records lie in the stack."""
        return slice(self.first_chunk, self.first_chunk + self.num_chunks)

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """All pieces, in order."""
        return tuple(piece for tile in self.tiles for piece in tile.pieces)

    @cached_property
    def batches(self) -> list[tuple[Piece, ...]]:
        """The pieces in runs of several tiles, to select from at once: enough to make up for the price of each call."""
        num_tiles = max(1, _limits(self.device).batch_elements // _limits(self.device).tile_elements)
        runs = [self.tiles[first : first + num_tiles] for first in range(0, len(self.tiles), num_tiles)]
        return [tuple(piece for tile in run for piece in tile.pieces) for run in runs]


def cut_slabs(stack: Stack, tensors: Sequence[LocalTensor]) -> list[Slab]:
    """Cut a stack into slabs; one ends when it is full, or where the device or the compute dtype changes."""
    slabs: list[Slab] = []
    parts: list[tuple[int, ChunkLayout, int, int]] = []
    first = filled = 0
    place: tuple[torch.device, torch.dtype] | None = None
    for tensor, layout, start, stop in _tile_sized_parts(stack, tensors):
        here = (tensors[tensor].parameter.device, tensors[tensor].compute_dtype)
        num_chunks = (stop - start) * layout.chunks_per_band
        limit = _limits(here[0]).slab_elements // layout.num_elements
        if place is not None and parts and (here != place or filled + num_chunks > limit):
            slabs.append(Slab(first, _tiles(parts, place[0]), *place))
            first, filled, parts = first + filled, 0, []
        parts.append((tensor, layout, start, stop))
        filled, place = filled + num_chunks, here
    if place is not None:
        slabs.append(Slab(first, _tiles(parts, place[0]), *place))
    return slabs


def _limits(device: torch.device) -> Limits:
    return _LIMITS.get(device.type, _LIMITS["cpu"])


def _tile_sized_parts(stack: Stack, tensors: Sequence[LocalTensor]) -> Iterator[tuple[int, ChunkLayout, int, int]]:
    """Every tensor of the stack as (tensor, layout, start, stop) in bands, no part larger than a tile if it can be cut."""
    for entry in stack.entries:
        layout = entry.layout
        cut_elements = layout.bands_per_cut * layout.chunks_per_band * layout.num_elements
        limit = _limits(tensors[entry.tensor].parameter.device).tile_elements
        step = max(1, limit // cut_elements) * layout.bands_per_cut
        for start in range(0, layout.num_bands, step):
            yield entry.tensor, layout, start, min(start + step, layout.num_bands)


def _tiles(parts: list[tuple[int, ChunkLayout, int, int]], device: torch.device) -> tuple[Tile, ...]:
    tiles: list[Tile] = []
    pieces: list[Piece] = []
    slab_first = tile_first = 0
    for tensor, layout, start, stop in parts:
        num_chunks = (stop - start) * layout.chunks_per_band
        if pieces and (tile_first + num_chunks) * layout.num_elements > _limits(device).tile_elements:
            tiles.append(Tile(tuple(pieces)))
            pieces, tile_first = [], 0
        pieces.append(Piece(tensor, layout, start, stop, tile_first, slab_first))
        tile_first, slab_first = tile_first + num_chunks, slab_first + num_chunks
    return (*tiles, Tile(tuple(pieces)))
