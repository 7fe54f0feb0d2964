"""The fused backend: a stack in a few kernel launches, whatever the number of its tensors.

The kernels find the tensors through tables of addresses. Addresses may change from step to step (a gradient is a new
tensor after `zero_grad`), so they are compared at each step, and a table that no longer fits is written anew.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.core.balance import num_matrices
from thinwire.core.combine import Decoding
from thinwire.core.scratch import Scratch
from thinwire.exchange.plan import Entry, Stack
from thinwire.kernels import balance, decode, encode, undo
from thinwire.kernels.table import ChunkTable, Cut, Row, Starts, upload
from thinwire.slabs import LocalTensor
from thinwire.stack_step import GroupStep
from thinwire.torch_stack import change_whole_, change_wholes_
from thinwire.wire.payload import Trouble, Verdict

_MOST_MAPS = 8
# Rules on whole matrices change at least so many elements together: many small matrices, each with its own dozens of
# launches, would leave a GPU waiting.
_ELEMENTS_TOGETHER = 1 << 23


class Form(NamedTuple):
    """What the tensors of one launch have in common; no gradient dtype means no gradient."""

    gradient: torch.dtype | None
    momentum: torch.dtype
    parameter: torch.dtype
    padded: bool
    aligned: bool
    balanced: bool = False


class FusedStack:
    """One stack of one replica. ``verdict`` (int32) lies on the device: what it is when a kernel runs decides whether
    `apply_` applies (0) and whether `undo_` undoes (REFUSED)."""

    def __init__(self, stack: Stack, tensors: Sequence[LocalTensor], scratch: Scratch, verdict: Tensor) -> None:
        self._stack, self._tensors, self._scratch, self._verdict = stack, tensors, scratch, verdict
        has_unit = stack.codec.value_codec.unit is not None
        self._units_C = torch.zeros(stack.num_chunks if has_unit else 0, dtype=torch.float32, device=verdict.device)
        self._hints_C = torch.zeros(stack.num_chunks, dtype=torch.int32, device=verdict.device)
        self._encoded: list[ChunkTable] = []
        """The tables that are in the payload: what `undo_` must take back, from the gradients that are held for it."""
        self._noted: list[ChunkTable] = []
        """Those whose gradients are in the energies, which they are before they are in the payload."""
        self._held: dict[int, Tensor] = {}
        self._weights: dict[int, Tensor] = {}
        """Room for what `kernels.balance` finds; at the same addresses at every step."""
        rows_of_chunks: dict[tuple[int, ...], Tensor] = {}
        self._encode_tables = _Tables(stack.entries, verdict.device, rows_of_chunks)
        # Tensors of one shape side by side, so that a rule on whole matrices can change many together.
        self._by_shape = sorted(stack.entries, key=lambda entry: tuple(tensors[entry.tensor].parameter.shape))
        self._apply_tables = _Tables(self._by_shape, verdict.device, rows_of_chunks)

    def encode_(self, group: GroupStep, payload_B: Tensor) -> None:
        """See `StackStep`. A gradient with NaN or Inf in it is reported in the payload's header."""
        self.forget()
        gradients = self._held = self._gradients()
        codec, offset, is_balanced = self._stack.codec, self._stack.offset_bytes, group.balance > 0
        tables = self._encode_tables.update(lambda entry: self._encode_row(entry, gradients.get(entry.tensor), is_balanced))
        for _, table in tables:
            if table.balance is not None:
                balance.note_(table, group.balance, self._scratch)
                self._noted.append(table)
            encode.encode_(
                table, codec, payload_B, offset, self._units_C, self._hints_C, self._scratch, self._settings(group)
            )
            self._encoded.append(table)

    def undo_(self, group: GroupStep, payload_B: Tensor) -> None:
        """See `StackStep`. The gradients must still be what they were."""
        codec, offset = self._stack.codec, self._stack.offset_bytes
        for table in self._encoded:
            undo.undo_(table, codec, payload_B, offset, self._units_C, self._hints_C, self._settings(group), self._verdict)
        for table in self._noted:
            balance.undo_(table, self._verdict)
        self.forget()

    def give_back_(self, payload_B: Tensor, units: Tensor | float) -> None:
        """See `StackStep`."""
        codec, offset = self._stack.codec, self._stack.offset_bytes
        units_C = units.reshape(-1) if isinstance(units, Tensor) else self._units_C
        for _, table in self._encode_tables.current:
            undo.give_back_(table, codec, payload_B, offset, units_C, torch.full_like(self._verdict, Verdict.REFUSED))

    def forget(self) -> None:
        """See `StackStep`."""
        self._encoded.clear()
        self._noted.clear()
        self._held = {}

    def _settings(self, group: GroupStep) -> encode.Settings:
        return encode.Settings(group.decay, group.gradient_scale, self._stack.share, Trouble(group.trouble, 0).pack())

    @property
    def units(self) -> Tensor | float:
        """See `StackStep`."""
        return 1.0 if self._stack.codec.value_codec.unit is None else self._units_C[:, None]

    def apply_(self, group: GroupStep, payloads_RB: Tensor, decoding: Decoding) -> None:
        """See `StackStep`."""
        if decoding.clips_values(self._stack.codec.value_name):
            raise ValueError("the kernels do not clip to the median; a LocalStep made for such a decoding has no FusedStack")
        self.forget()
        decoding = decoding.for_rule(group.rule.whole_matrices)
        targets = {entry.tensor: self._tensors[entry.tensor].parameter.contiguous() for entry in self._stack.entries}
        hyper, beta = group.hyper, group.hyper.betas[1]
        rests = (1 - hyper.betas[0], 1 - beta)
        settings = decode.Settings(hyper.lr, group.weight_factor, *hyper.betas, *rests, hyper.eps, 1 - beta**hyper.step)
        direction = self._whole_direction() if group.rule.whole_matrices else None
        for entries, table in self._apply_tables.update(lambda entry: self._apply_row(entry, targets, direction)):

            def decode_(chunks: tuple[int, int], rule: str, table: ChunkTable = table) -> None:
                where = (self._stack.codec, payloads_RB, self._stack.offset_bytes)
                decode.decode_(table, *where, decoding, rule, settings, self._scratch, chunks, self._verdict)

            if direction is None:
                decode_((0, table.num_chunks), group.rule.name)
                continue
            # These rules are not kernels and cannot ask for the verdict: no direction and no decay change nothing.
            weight_factor = torch.where(self._verdict == 0, group.weight_factor, 1.0)
            first = 0
            for run in self._runs(entries):
                direction[: self._end_of(run)].zero_()
                last = first + sum(entry.layout.num_chunks for entry in run)
                decode_((first, last), "whole")
                self._change_wholes_(run, targets, direction, group, weight_factor)
                first = last
        for index, target in targets.items():
            if target.data_ptr() != self._tensors[index].parameter.data_ptr():
                self._tensors[index].parameter.copy_(target)

    def _gradients(self) -> dict[int, Tensor]:
        found = ((entry.tensor, self._tensors[entry.tensor].gradient) for entry in self._stack.entries)
        gradients = {index: gradient.contiguous() for index, gradient in found if gradient is not None}
        return {index: g.float() if g.dtype == torch.float64 else g for index, g in gradients.items()}

    def _change_wholes_(
        self, run: list[Entry], targets: dict[int, Tensor], direction: Tensor, group: GroupStep, weight_factor: Tensor
    ) -> None:
        mine = [targets[entry.tensor] for entry in run]
        places = [self._places[entry.tensor][1] for entry in run]
        parts = [direction[at : at + one.numel()].view(one.shape) for at, one in zip(places, mine, strict=True)]
        if group.rule.state_names:
            for entry, target, part in zip(run, mine, parts, strict=True):
                change_whole_(self._tensors[entry.tensor], target, part, group, weight_factor)
        else:
            change_wholes_(mine, parts, group, weight_factor)

    @cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        """In which run each tensor's direction is made, and where it lies then."""
        sizes = [_aligned(self._tensors[entry.tensor].parameter.numel()) for entry in self._by_shape]
        most = max(_ELEMENTS_TOGETHER, max(sizes) // 2)  # half: several are copied to be changed together, one is not
        places, run, filled = {}, 0, 0
        for entry, size in zip(self._by_shape, sizes, strict=True):
            if filled and filled + size > most:
                run, filled = run + 1, 0
            places[entry.tensor] = (run, filled)
            filled += size
        return places

    def _end_of(self, entries: Sequence[Entry]) -> int:
        """Where the last of their directions ends."""
        return max(self._places[entry.tensor][1] + self._tensors[entry.tensor].parameter.numel() for entry in entries)

    def _runs(self, entries: list[Entry]) -> list[list[Entry]]:
        """Those of a table that are changed together."""
        return [list(run) for _, run in itertools.groupby(entries, lambda entry: self._places[entry.tensor][0])]

    def _whole_direction(self) -> Tensor:
        """Room for the directions of a run."""
        return self._scratch.take("direction", (self._end_of(self._stack.entries),), torch.float32, self._units_C.device)

    def _encode_row(self, entry: Entry, gradient: Tensor | None, is_balanced: bool) -> tuple[Form, Row]:
        local = self._tensors[entry.tensor]
        row = Row(0 if gradient is None else gradient.data_ptr(), local.momentum_CE.data_ptr())
        form = self._form(entry, local, None if gradient is None else gradient.dtype, row)
        if gradient is None or local.energies is None or not is_balanced:
            return form, row
        of_rows, of_cols = local.energies
        if entry.tensor not in self._weights:
            self._weights[entry.tensor] = of_rows.new_empty(2 * (of_rows.numel() + of_cols.numel()))
        row = replace(row, weights=self._weights[entry.tensor].data_ptr())
        row = replace(row, row_energy=of_rows.data_ptr(), col_energy=of_cols.data_ptr())
        return form._replace(balanced=True), row

    def _apply_row(self, entry: Entry, targets: dict[int, Tensor], direction: Tensor | None) -> tuple[Form, Row]:
        local = self._tensors[entry.tensor]
        state = next(iter(local.rule_state.values()), None)
        address = 0 if state is None else state.data_ptr()
        if direction is not None:
            address = direction.data_ptr() + self._places[entry.tensor][1] * direction.element_size()
        row = Row(parameter=targets[entry.tensor].data_ptr(), rule_state=address)
        return self._form(entry, local, None, row), row

    def _form(self, entry: Entry, local: LocalTensor, gradient: torch.dtype | None, row: Row) -> Form:
        layout = entry.layout
        addresses = (row.gradient, row.momentum, row.parameter, row.rule_state)
        is_aligned = layout.col_edge % 16 == layout.num_cols % 16 == 0 and all(a % 16 == 0 for a in addresses)
        return Form(gradient, local.momentum_CE.dtype, local.parameter.dtype, layout.is_padded, is_aligned)


def _aligned(numel: int) -> int:
    """Rounded up, so that what follows begins at a multiple of 16 bytes."""
    return -(-numel // 4) * 4


class _Tables:
    """The tables of a stack, one per form, and what they were made from."""

    def __init__(
        self, entries: Sequence[Entry], device: torch.device, rows_of_chunks: dict[tuple[int, ...], Tensor]
    ) -> None:
        self._entries, self._device, self._rows_of_chunks = entries, device, rows_of_chunks
        self._known: list[tuple[Form, Row]] = []
        self._tables: list[tuple[list[Entry], ChunkTable]] = []
        self._starts: dict[tuple[int, ...], Starts] = {}

    @property
    def current(self) -> list[tuple[list[Entry], ChunkTable]]:
        """Those of the last `update`."""
        return self._tables

    def update(self, describe: Callable[[Entry], tuple[Form, Row]]) -> list[tuple[list[Entry], ChunkTable]]:
        """The entries of each launch and their table, as of now."""
        found = [describe(entry) for entry in self._entries]
        if found != self._known:
            tables = []
            for form in dict.fromkeys(form for form, _ in found):
                members = [(entry, row) for entry, (its, row) in zip(self._entries, found, strict=True) if its == form]
                tables.append(([entry for entry, _ in members], self._table(form, members)))
            self._known, self._tables = found, tables
        return self._tables

    def _table(self, form: Form, members: list[tuple[Entry, Row]]) -> ChunkTable:
        layout = members[0][0].layout
        cut = Cut(layout.row_edge, layout.col_edge, layout.dense, form.padded, form.aligned)
        rows, first = [], 0
        for entry, row in members:
            its = entry.layout
            # Where weights are those of matrices, these are told apart also where a stack is one tall matrix else.
            matrices = num_matrices(its) if form.balanced else its.num_matrices
            num_rows, num_bands = its.num_rows * its.num_matrices // matrices, its.num_bands // matrices
            shape = (first, entry.first_chunk, num_rows, its.num_cols, its.chunks_per_band, num_bands)
            of_balance = (row.weights, row.row_energy, row.col_energy)
            rows.append([row.gradient, row.momentum, row.parameter, *shape, row.rule_state, entry.tensor, *of_balance])
            first += its.num_chunks
        entries = [entry for entry, _ in members]
        on_device = upload(torch.tensor(rows, dtype=torch.int64, device="cpu"), self._device)
        kinds = (form.gradient, form.momentum, form.parameter)
        starts = self._starts_of(entries) if form.balanced else None
        return ChunkTable(on_device, self._row_of_chunk(entries), cut, *kinds, starts)

    def _row_of_chunk(self, entries: list[Entry]) -> Tensor:
        """To which row each chunk belongs, one copy for all tables of the same tensors."""
        key = tuple(entry.tensor for entry in entries)
        if key not in self._rows_of_chunks:
            if len(self._rows_of_chunks) >= _MOST_MAPS:  # other tensors have gradients at every step
                self._rows_of_chunks.clear()
            counts = torch.tensor([entry.layout.num_chunks for entry in entries], device="cpu")
            rows = torch.repeat_interleave(torch.arange(len(entries), dtype=torch.int32, device="cpu"), counts)
            self._rows_of_chunks[key] = upload(rows, self._device)
        return self._rows_of_chunks[key]

    def _starts_of(self, entries: list[Entry]) -> Starts:
        """Where bands, columns of chunks and matrices begin; like the rows of chunks, it does not change with addresses."""
        key = tuple(entry.tensor for entry in entries)
        if key not in self._starts:
            if len(self._starts) >= _MOST_MAPS:
                self._starts.clear()
            found: tuple[list[Tensor], ...] = ([], [], [])
            first = 0
            for layout in (entry.layout for entry in entries):
                last = first + layout.num_chunks
                matrices = torch.arange(first, last, layout.num_chunks // num_matrices(layout), device="cpu")
                found[0].append(torch.arange(first, last, layout.chunks_per_band, device="cpu"))
                found[1].append((matrices[:, None] + torch.arange(layout.chunks_per_band, device="cpu")).flatten())
                found[2].append(matrices)
                first = last
            self._starts[key] = Starts(*(upload(torch.cat(one).to(torch.int32), self._device) for one in found))
        return self._starts[key]
