"""The torch backend, and the readable one: follow `TorchStack.encode_` and `TorchStack.apply_` to follow a gradient to the
wire and back. It runs on every device. Shape letters: C chunks, E elements, K kept coefficients, R replicas, B bytes.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from thinwire.core import transform
from thinwire.core.balance import Energies, note_, weighed, weights_of
from thinwire.core.combine import Decoding, combine
from thinwire.core.exact import inverse_exact_
from thinwire.core.layout import bands_of, chunks_view, crop_to_rows, matrix_shape, rows_of
from thinwire.core.robust import clip_factors, squared_norm, squares_by_exponent
from thinwire.core.scratch import Scratch
from thinwire.core.selection import group_maxima, num_groups_of, select_topk, subtract_sent_
from thinwire.exchange.plan import Stack, stack_records
from thinwire.slabs import Limits, LocalTensor, Piece, Slab, cut_slabs
from thinwire.stack_step import GroupStep
from thinwire.wire.codec import ChunkCodec


class TorchStack:
    """One stack of one replica, slab by slab."""

    def __init__(self, stack: Stack, tensors: Sequence[LocalTensor], limits: dict[torch.device, Limits]) -> None:
        self._stack, self._tensors = stack, tensors
        self._slabs = cut_slabs(stack, tensors, limits)
        self._finished: list[tuple[Slab, Tensor | float]] = []
        """The slabs that are in the payload, each with the sender's unit (or 1): what is needed to undo them, with the
        gradients that are held for it."""
        self._held: dict[int, Tensor] = {}
        self._weights: dict[int, Energies] = {}
        """Of the rows and columns of gradients that are balanced at this step."""
        self._energies_before: list[tuple[Tensor, Tensor]] = []

    def encode_(self, group: GroupStep, payload_B: Tensor) -> None:
        """See `StackStep`."""
        self._finished.clear()
        gradients, scratch = self._gradients(), Scratch()
        self._held = gradients
        self._note_energies(gradients, group.balance)
        records_CB = stack_records(payload_B, self._stack)
        for slab in self._slabs:
            indices_CK, kept_CK = self._accumulate_and_select(slab, gradients, group, scratch)
            encoded = self._stack.codec.encode(indices_CK, kept_CK)
            records_CB[slab.records] = encoded.records_CB.to(records_CB.device)
            self._subtract(slab, indices_CK, encoded.removed_CK)
            self._finished.append((slab, 1.0 if encoded.unit_C1 is None else encoded.unit_C1))

    def undo_(self, group: GroupStep, payload_B: Tensor) -> None:
        """See `StackStep`."""
        gradients, scratch = self._held, Scratch()
        for slab, unit in self._finished:
            self._give_back(slab, payload_B, unit)
            for piece in slab.pieces:
                momentum_CE = self._momentum_of(piece)
                before = momentum_CE.to(slab.dtype)
                self._accumulate(piece, before, gradients, 1.0, -group.gradient_scale, scratch)
                momentum_CE.copy_(before.mul_(1 / group.decay if group.decay else 0.0))
        for energy, energy_before in self._energies_before:
            energy.copy_(energy_before)
        self._finished.clear()
        self.forget()

    def forget(self) -> None:
        """See `StackStep`."""
        self._held, self._weights = {}, {}
        self._energies_before = []

    def give_back_(self, payload_B: Tensor, units: Tensor | float) -> None:
        """See `StackStep`."""
        for slab in self._slabs:
            self._give_back(slab, payload_B, units[slab.records].to(slab.device) if isinstance(units, Tensor) else units)

    def _give_back(self, slab: Slab, payload_B: Tensor, unit: Tensor | float) -> None:
        records_CB = stack_records(payload_B, self._stack)[slab.records]
        indices_CK, sent_CK = self._stack.codec.decode(records_CB.to(slab.device))
        self._subtract(slab, indices_CK, -sent_CK.to(slab.dtype) * unit)

    def apply_(self, group: GroupStep, payloads_RB: Tensor, decoding: Decoding) -> None:
        """See `StackStep`."""
        self.forget()
        decoding, scratch = decoding.for_rule(group.rule.whole_matrices), Scratch()
        targets = {entry.tensor: self._tensors[entry.tensor].parameter.contiguous() for entry in self._stack.entries}
        wholes: dict[int, Tensor] = {}
        stacks_RCB = stack_records(payloads_RB, self._stack)
        factors = self._clip_factors(stacks_RCB) if decoding.clips_values(self._stack.codec.value_name) else None
        for slab in self._slabs:
            messages = self._messages(slab, stacks_RCB)
            if factors is not None:
                pairs = zip(messages, factors, strict=True)
                messages = [(indices, values if factor == 1 else values * factor) for (indices, values), factor in pairs]
            directions = _directions(slab, self._stack, messages, decoding, scratch)
            for tile, direction in zip(slab.tiles, directions, strict=True):
                for piece in tile.pieces:
                    local, target = self._tensors[piece.tensor], targets[piece.tensor]
                    part = direction[piece.tile_chunks]
                    if group.rule.whole_matrices:
                        _apply_whole_(local, target, piece, part, group, wholes)
                    else:
                        _apply_piece_(local, target, piece, part, group)
        for index, target in targets.items():
            if target.data_ptr() != self._tensors[index].parameter.data_ptr():
                self._tensors[index].parameter.copy_(target)

    def _messages(self, slab: Slab, stacks_RCB: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Everyone's indices and values (C, K) of a slab."""
        return [self._stack.codec.decode(records_CB[slab.records].to(slab.device)) for records_CB in stacks_RCB]

    def _clip_factors(self, stacks_RCB: Tensor) -> list[float]:
        """What scales each replica's values down to the median norm; the norms are those of the whole stack."""
        squares = [0] * len(stacks_RCB)
        for slab in self._slabs:
            sums = torch.stack([squares_by_exponent(values_CK) for _, values_CK in self._messages(slab, stacks_RCB)])
            squares = [before + squared_norm(mine) for before, mine in zip(squares, sums.cpu(), strict=True)]
        return clip_factors(squares)

    @property
    def units(self) -> Tensor | float:
        """See `StackStep`."""
        found = [unit for _, unit in self._finished if isinstance(unit, Tensor)]
        return torch.cat([unit.to(found[0].device) for unit in found]) if found else 1.0

    def _gradients(self) -> dict[int, Tensor]:
        found = ((entry.tensor, self._tensors[entry.tensor].gradient) for entry in self._stack.entries)
        return {index: gradient.contiguous() for index, gradient in found if gradient is not None}

    def _note_energies(self, gradients: dict[int, Tensor], decay: float) -> None:
        """What balance multiplies the rows and columns of these gradients with."""
        self._weights, self._energies_before = {}, []
        for index, gradient in gradients.items() if decay else ():
            energies = self._tensors[index].energies
            if energies is not None:
                self._energies_before += [(energy, energy.clone()) for energy in energies]
                note_(gradient, energies, decay)
                self._weights[index] = (weights_of(energies[0]), weights_of(energies[1]))

    def _momentum_of(self, piece: Piece) -> Tensor:
        return self._tensors[piece.tensor].momentum_CE[piece.tensor_chunks]

    def _accumulate_and_select(
        self, slab: Slab, gradients: dict[int, Tensor], group: GroupStep, scratch: Scratch
    ) -> tuple[Tensor, Tensor]:
        """The new momentum of a slab, and from it what is to be sent: indices and values (C, K)."""
        found = []
        for pieces in self._batches(slab):
            if self._stack.codec.index_codec.name == "all":
                kept_CK = torch.cat([self._accumulated(piece, slab, gradients, group, scratch) for piece in pieces])
                found.append((torch.arange(kept_CK.shape[1], device=slab.device).expand_as(kept_CK), kept_CK))
            else:
                found.append(self._select(pieces, slab, self._stack.codec, gradients, group, scratch))
        indices_CK, kept_CK = found[0] if len(found) == 1 else map(torch.cat, zip(*found, strict=True))
        return indices_CK, kept_CK.mul_(self._stack.share) if self._stack.share != 1 else kept_CK

    def _select(
        self,
        pieces: Sequence[Piece],
        slab: Slab,
        codec: ChunkCodec,
        gradients: dict[int, Tensor],
        group: GroupStep,
        scratch: Scratch,
    ) -> tuple[Tensor, Tensor]:
        """Accumulate into these pieces and select from all of them at once: indices and values (C, K)."""
        first, maxima_CG = pieces[0].slab_first, None
        if slab.device.type == "cpu":
            shape = (sum(piece.num_chunks for piece in pieces), num_groups_of(codec.num_elements))
            maxima_CG = scratch.take("maxima", shape, slab.dtype, slab.device)
        parts = []
        for piece in pieces:
            parts.append(self._accumulated(piece, slab, gradients, group, scratch))
            if maxima_CG is not None:
                group_maxima(parts[-1], maxima_CG[piece.slab_first - first :][: piece.num_chunks])
        return select_topk(parts, codec.num_kept, maxima_CG)

    def _batches(self, slab: Slab) -> Sequence[tuple[Piece, ...]]:
        """Pieces to select from at once: many, or those of a tile where momenta are widened, which takes memory."""
        if all(self._tensors[piece.tensor].momentum_CE.dtype == slab.dtype for piece in slab.pieces):
            return slab.batches
        return [tile.pieces for tile in slab.tiles]

    def _accumulated(
        self, piece: Piece, slab: Slab, gradients: dict[int, Tensor], group: GroupStep, scratch: Scratch
    ) -> Tensor:
        """The new momentum of a piece in the compute dtype: the state itself, or a copy of it."""
        momentum_CE = self._momentum_of(piece)
        after = momentum_CE.to(slab.dtype)
        self._accumulate(piece, after, gradients, group.decay, group.gradient_scale, scratch)
        if after is not momentum_CE:
            after = momentum_CE.copy_(after).to(slab.dtype)  # what the state can hold is what is selected from
        return after

    def _accumulate(
        self,
        piece: Piece,
        momentum_CE: Tensor,
        gradients: dict[int, Tensor],
        decay: float,
        gradient_scale: float,
        scratch: Scratch,
    ) -> None:
        """``m <- decay * m + gradient_scale * T(g)`` for the chunks of a piece; a missing gradient counts as zero."""
        gradient = gradients.get(piece.tensor)
        if gradient is None:
            momentum_CE.mul_(decay)
            return
        bands = bands_of(gradient, piece.layout, piece.start, piece.stop).to(momentum_CE.dtype)
        if piece.tensor in self._weights:
            bands = weighed(bands, self._weights[piece.tensor], piece.layout, piece.start, piece.stop)
        transform.accumulate_(momentum_CE, bands, piece.layout, decay, gradient_scale, scratch)

    def _subtract(self, slab: Slab, indices_CK: Tensor, removed_CK: Tensor) -> None:
        subtract_sent_([self._momentum_of(piece) for piece in slab.pieces], indices_CK, removed_CK)


def _directions(
    slab: Slab, stack: Stack, messages: list[tuple[Tensor, Tensor]], decoding: Decoding, scratch: Scratch
) -> Iterator[Tensor]:
    """The update direction of all chunks of each tile, (C, row_edge, col_edge), valid until the next one is asked for."""
    layout, codec = slab.pieces[0].layout, stack.codec
    largest = 1.0 if decoding.has_known_scale(codec.value_name, len(messages)) else None
    is_plain = len(messages) == 1 and not layout.dense and not decoding.is_exact and decoding.combine != "majority_vote"
    if is_plain and 2 * codec.num_kept <= layout.row_edge + layout.col_edge:
        indices_CK, values_CK = messages[0]  # alone, nothing is combined, and few coefficients need little arithmetic
        rows_CK, cols_CK = transform.frequencies_of(indices_CK, layout)
        values_CK = values_CK.to(slab.dtype)
        for where in (tile.slab_chunks for tile in slab.tiles):
            yield transform.inverse_of_few((rows_CK[where], cols_CK[where]), values_CK[where], layout, scratch)
        return
    for tile in slab.tiles:
        mine = [(indices[tile.slab_chunks], values[tile.slab_chunks]) for indices, values in messages]
        shape = (tile.num_chunks, codec.num_elements)
        combined_CE = combine(mine, scratch.take("first", shape, slab.dtype, slab.device), decoding.combine)
        if decoding.is_exact:
            yield inverse_exact_(combined_CE, layout, scratch, largest)
        else:
            yield transform.inverse_(combined_CE, layout, scratch)


def _apply_piece_(local: LocalTensor, target: Tensor, piece: Piece, direction: Tensor, group: GroupStep) -> None:
    """An element-wise rule on the part of a parameter that a piece covers: a view in chunk order, or rows if padded."""
    layout, start, stop = piece.layout, piece.start, piece.stop
    wholes = (target, *local.rule_state.values())
    if layout.is_padded:
        parts = [rows_of(whole, layout, start, stop) for whole in wholes]
        direction = crop_to_rows(direction, layout, start, stop)
    else:
        parts = [chunks_view(bands_of(whole, layout, start, stop), layout) for whole in wholes]
        direction = direction.view(parts[0].shape)
    _change_(parts[0], direction, dict(zip(local.rule_state, parts[1:], strict=True)), group, group.weight_factor)


def _apply_whole_(
    local: LocalTensor, target: Tensor, piece: Piece, direction: Tensor, group: GroupStep, wholes: dict[int, Tensor]
) -> None:
    """A rule on whole matrices: collect the direction of the tensor, and apply it with the last piece."""
    layout = piece.layout
    if piece.start == 0:
        wholes[piece.tensor] = torch.empty(target.shape, dtype=direction.dtype, device=direction.device)
    part = crop_to_rows(direction, layout, piece.start, piece.stop)
    rows_of(wholes[piece.tensor], layout, piece.start, piece.stop).copy_(part)
    if piece.ends_tensor:
        change_whole_(local, target, wholes.pop(piece.tensor), group, group.weight_factor)


def change_whole_(
    local: LocalTensor, target: Tensor, direction: Tensor, group: GroupStep, weight_factor: float | Tensor
) -> None:
    """A rule on whole matrices, with the direction of the whole tensor; ``target`` is the parameter or a copy of it."""
    shape = matrix_shape(tuple(target.shape), group.chunk)
    _change_(target.view(shape), direction.view(shape), local.rule_state, group, weight_factor)


def change_wholes_(
    targets: Sequence[Tensor], directions: Sequence[Tensor], group: GroupStep, weight_factor: float | Tensor
) -> None:
    """`change_whole_` for many tensors and a rule without state: matrices of one shape together, in few operations."""
    alike: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = {}
    for target, direction in zip(targets, directions, strict=True):
        shape = matrix_shape(tuple(target.shape), group.chunk)
        alike.setdefault((*shape[1:],), []).append((target.view(shape), direction.view(shape)))
    for pairs in alike.values():
        if len(pairs) == 1:
            _change_(*pairs[0], {}, group, weight_factor)
            continue
        together, direction = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        _change_(together, direction, {}, group, weight_factor)
        changed = together.split([len(target) for target, _ in pairs])
        torch._foreach_copy_([target for target, _ in pairs], list(changed))


def _change_(
    parameter: Tensor, direction: Tensor, state: dict[str, Tensor], group: GroupStep, weight_factor: float | Tensor
) -> None:
    """Weight decay and update rule, computed in the direction's dtype and rounded once to the parameter's."""
    target = parameter.to(direction.dtype)
    if group.weight_decay:
        target.mul_(weight_factor)
    group.rule.apply_(target, direction, state, group.hyper)
    if target is not parameter:
        parameter.copy_(target)
