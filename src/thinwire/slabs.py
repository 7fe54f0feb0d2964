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
from thinwire.exchange.dealing import Share
from thinwire.exchange.plan import Stack
from thinwire.exchange.sharding import local_of


@dataclass(frozen=True)
class Limits:
    """The largest tile, batch and slab, in elements."""

    tile_elements: int
    batch_elements: int
    slab_elements: int


@dataclass(frozen=True)
class LocalTensor:
    """A parameter, and what this replica keeps for it: residual momentum (C, E) and the state of its update rule.

    ``source`` is the parameter as the model has it; all work is done on the part of it that lies on this rank, or that this
    rank of an island owns, its ``share``. ``owned_CE`` is the owner's residual of the chunks that this replica owns, if any,
    and ``energies`` those of the rows and columns of its gradients (`thinwire.core.balance`), if they are balanced.
    """

    source: Tensor
    momentum_CE: Tensor
    rule_state: dict[str, Tensor] = field(default_factory=dict)
    share: Share | None = None
    owned_CE: Tensor = field(default_factory=lambda: torch.empty(0, 0, device="cpu"))
    energies: tuple[Tensor, Tensor] | None = None

    @property
    def parameter(self) -> Tensor:
        """This rank's part."""
        return local_of(self.source) if self.share is None else self.share.of(self.source.detach())

    @property
    def gradient(self) -> Tensor | None:
        """This rank's part of the gradient; where it owns a share, the island's mean, or what cannot be averaged."""
        mine = self.source.grad
        if self.share is not None and (mine is None or mine.layout == torch.strided):
            return self.share.average
        return None if mine is None else local_of(mine)

    @property
    def compute_dtype(self) -> torch.dtype:
        """float64 for float64 parameters or momentum, else float32."""
        return torch.float64 if torch.float64 in (self.parameter.dtype, self.momentum_CE.dtype) else torch.float32


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
    """Consecutive records of a stack, all on one device and in one compute dtype.

    ``batches`` are the pieces in runs of several tiles, to select from at once: enough to make up for the price of a call.
    """

    first_chunk: int
    tiles: tuple[Tile, ...]
    batches: tuple[tuple[Piece, ...], ...]
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


def limits_for(tensors: Sequence[LocalTensor]) -> dict[torch.device, Limits]:
    """The limits on each device.

    A GPU wants enough work per launch to fill it. A CPU wants tiles that fit its cache, and small ones for a small model:
    the memory for a few of them should be little beside its largest tensor.
    """
    largest: dict[torch.device, int] = {}
    for tensor in tensors:
        device = tensor.parameter.device
        largest[device] = max(largest.get(device, 0), tensor.parameter.numel())
    return {device: _limits(device, numel) for device, numel in largest.items()}


def _limits(device: torch.device, largest_numel: int) -> Limits:
    if device.type == "cuda":
        return Limits(1 << 25, 1 << 25, 1 << 25)
    tile_elements = min(max(largest_numel // 3, 3 << 16), 1 << 19)
    return Limits(tile_elements, 4 * tile_elements, 8 * tile_elements)


def cut_slabs(stack: Stack, tensors: Sequence[LocalTensor], limits: dict[torch.device, Limits]) -> list[Slab]:
    """Cut a stack into slabs; one ends when it is full, or where the device or the compute dtype changes."""
    slabs: list[Slab] = []
    parts: list[tuple[int, ChunkLayout, int, int]] = []
    first = filled = 0
    place: tuple[torch.device, torch.dtype] | None = None
    for tensor, layout, start, stop in _tile_sized_parts(stack, tensors, limits):
        here = (tensors[tensor].parameter.device, tensors[tensor].compute_dtype)
        num_chunks = (stop - start) * layout.chunks_per_band
        limit = limits[here[0]].slab_elements // layout.num_elements
        if place is not None and parts and (here != place or filled + num_chunks > limit):
            slabs.append(_slab(first, parts, place, limits[place[0]]))
            first, filled, parts = first + filled, 0, []
        parts.append((tensor, layout, start, stop))
        filled, place = filled + num_chunks, here
    if place is not None:
        slabs.append(_slab(first, parts, place, limits[place[0]]))
    return slabs


def _tile_sized_parts(
    stack: Stack, tensors: Sequence[LocalTensor], limits: dict[torch.device, Limits]
) -> Iterator[tuple[int, ChunkLayout, int, int]]:
    """Every tensor of the stack as (tensor, layout, start, stop) in bands, no part larger than a tile if it can be cut."""
    for entry in stack.entries:
        layout = entry.layout
        cut_elements = layout.bands_per_cut * layout.chunks_per_band * layout.num_elements
        limit = limits[tensors[entry.tensor].parameter.device].tile_elements
        step = max(1, limit // cut_elements) * layout.bands_per_cut
        for start in range(0, layout.num_bands, step):
            yield entry.tensor, layout, start, min(start + step, layout.num_bands)


def _slab(
    first: int, parts: list[tuple[int, ChunkLayout, int, int]], place: tuple[torch.device, torch.dtype], limits: Limits
) -> Slab:
    tiles = _tiles(parts, limits.tile_elements)
    per_batch = max(1, limits.batch_elements // limits.tile_elements)
    runs = [tiles[start : start + per_batch] for start in range(0, len(tiles), per_batch)]
    return Slab(first, tiles, tuple(tuple(piece for tile in run for piece in tile.pieces) for run in runs), *place)


def _tiles(parts: list[tuple[int, ChunkLayout, int, int]], tile_elements: int) -> tuple[Tile, ...]:
    tiles: list[Tile] = []
    pieces: list[Piece] = []
    slab_first = tile_first = 0
    for tensor, layout, start, stop in parts:
        num_chunks = (stop - start) * layout.chunks_per_band
        if pieces and (tile_first + num_chunks) * layout.num_elements > tile_elements:
            tiles.append(Tile(tuple(pieces)))
            pieces, tile_first = [], 0
        pieces.append(Piece(tensor, layout, start, stop, tile_first, slab_first))
        tile_first, slab_first = tile_first + num_chunks, slab_first + num_chunks
    return (*tiles, Tile(tuple(pieces)))
