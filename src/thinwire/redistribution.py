"""From the saved state of some ranks to that of others: the replicas may be sharded otherwise, and be more or fewer.

Residual momenta are sums, so they can be cut, moved and added up: where the saved chunks are not the wanted ones, a momentum
is brought back from frequencies to elements, and from there to the frequencies of the wanted chunks, in float64.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from thinwire.checkpoint import KEY, check_form, identity
from thinwire.core.balance import ENERGIES, energy_shapes
from thinwire.core.errors import CheckpointError, check_choice
from thinwire.core.layout import ChunkLayout, Part, bands_of, crop_to_rows, plan_layout
from thinwire.core.scratch import Scratch
from thinwire.core.transform import forward, inverse_
from thinwire.core.update_rules import UPDATE_RULES
from thinwire.exchange.plan import Coding, TensorSpec
from thinwire.optimizer import DeMo
from thinwire.options import MOMENTUM_DTYPES, coding_of
from thinwire.ownership import folded
from thinwire.planning import specs_of
from thinwire.wire.codec import ChunkCodec

REDISTRIBUTIONS = ("keep", "zero", "sum", "mean")

_EXACT: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}


def assemble(optimizer: DeMo, saved: Iterable[dict[str, Any]], residual: str) -> dict[str, Any]:
    """A state dict that ``optimizer`` can load, made from those of all ranks of a run with the same model.

    ``residual`` says what becomes of the residual momenta of R' saved replicas in the R of now. ``keep``: each replica takes
    the one of the same number; what has no taker is lost, and who finds none starts without. ``zero``: all start without.
    ``sum``: the momenta are split or added up, so that their sum over all replicas stays what it was. ``mean``: so that the
    mean does. What owners had not sent yet counts as their momentum. The saved states are looked at one after the other, so
    they may be read as they are asked for.
    """
    check_choice("residual", residual, REDISTRIBUTIONS)
    wanted = _wanted(optimizer)
    groups: list[dict[str, Any]] = []
    num_skipped_steps = 0
    shares: dict[int, float] = {}
    for state in saved:
        whose = check_form(state)
        if not groups:
            groups, num_skipped_steps = state["param_groups"], whose["num_skipped_steps"]
            _check_groups(groups, optimizer)
            shares = shares_of(residual, optimizer.replica, optimizer.num_replicas, whose["num_replicas"])
        cuts = _saved_cuts(whose, groups)
        for index in sorted(wanted.keys() - cuts.keys()):
            if not wanted[index].is_frozen:
                raise CheckpointError(f"the checkpoint has no state of {wanted[index].name}: it was not trained there")
            del wanted[index]
        for index, piece in wanted.items():
            found = _without_owner(state["state"][index], cuts[index], optimizer, whose["num_replicas"])
            _take(piece, cuts[index], found, whose["replica"], shares.get(whose["replica"], 0.0))
    if not groups:
        raise CheckpointError("there is no saved state to go on from")
    for piece in wanted.values():
        piece.check_whole(shares)
    tensors = {index: piece.state() for index, piece in wanted.items()}
    whose = {**identity(optimizer), "num_skipped_steps": num_skipped_steps}
    # Energies that are not there are found anew, so that gradients may be balanced from now on, or no more.
    groups = [{**group, "balance": own["balance"]} for group, own in zip(groups, optimizer.param_groups, strict=True)]
    return {"state": tensors, "param_groups": groups, KEY: whose}


def shares_of(residual: str, replica: int, num_replicas: int, num_saved: int) -> dict[int, float]:
    """Which saved replicas' momenta a replica takes, and how much of each."""
    if residual == "zero":
        return {}
    if residual == "keep":
        return {replica: 1.0} if replica < num_saved else {}
    scale = num_replicas / num_saved if residual == "mean" else 1.0
    if num_replicas <= num_saved:
        return dict.fromkeys(range(replica, num_saved, num_replicas), scale)
    source = replica % num_saved
    return {source: scale / len(range(source, num_replicas, num_saved))}


@dataclass(frozen=True)
class _Cut:
    """Where a rank's part of a tensor lies, and how it is cut into chunks."""

    shape: tuple[int, ...]
    whole_shape: tuple[int, ...]
    offset: tuple[int, ...]
    layout: ChunkLayout
    coding: Coding = field(compare=False)

    def overlap(self, other: "_Cut") -> tuple[slice, ...]:
        """What of this part the other has, as a place in this part; some slices are empty if there is nothing."""
        slices = []
        for size, start, other_size, other_start in zip(self.shape, self.offset, other.shape, other.offset, strict=True):
            first, last = max(start, other_start), min(start + size, other_start + other_size)
            slices.append(slice(first - start, max(first, last) - start))
        return tuple(slices)


def _cut(shape: Sequence[int], part: Part | None, group: dict[str, Any]) -> _Cut:
    shape = tuple(shape) or (1,)  # a scalar may lie on one rank of an island, and then the others have none of it
    layout = plan_layout(shape, group["chunk"], group["dense_below"], group["layout"], part)
    whole, offset = (shape, (0,) * len(shape)) if part is None else (part.whole_shape, part.offset)
    return _Cut(shape, whole, offset, layout, coding_of(group))


class _Piece:
    """What one rank wants of a parameter's state, as far as it has been found."""

    def __init__(self, spec: TensorSpec, cut: _Cut, group: dict[str, Any], dtype: torch.dtype, is_frozen: bool) -> None:
        self.name, self.cut, self.is_frozen, self._shape = spec.name, cut, is_frozen, spec.shape
        self._momentum_dtype = MOMENTUM_DTYPES[group["momentum_dtype"]]
        self.momentum_CE = torch.zeros(cut.layout.num_chunks, cut.layout.num_elements, **_EXACT)
        compute_dtype = torch.promote_types(dtype, torch.float32)
        if self._momentum_dtype == torch.float64:
            compute_dtype = torch.float64
        names = UPDATE_RULES[group["update"]].state_names
        self.rule_state = {name: torch.zeros(cut.shape, dtype=compute_dtype, device="cpu") for name in names}
        shapes = zip(ENERGIES, energy_shapes(cut.layout) if group["balance"] else (), strict=False)
        self.energies = {name: torch.zeros(shape, dtype=compute_dtype, device="cpu") for name, shape in shapes}
        """Those of the first saved replica whose momentum is taken; 0, to be found anew, where it is cut otherwise."""
        self.num_found: dict[int, int] = {}
        """Elements found of each saved replica."""
        self.seen: set[tuple[int, tuple[int, ...]]] = set()
        """Replicas and offsets of the parts that have been looked at: several ranks may hold the same."""

    def check_whole(self, shares: dict[int, float]) -> None:
        """Refuse to go on with less than all of it."""
        numel = torch.Size(self.cut.shape).numel()
        # The rule's state is the same on all replicas: any one will do.
        most = max(self.num_found, key=lambda replica: self.num_found[replica], default=0)
        for replica in {*shares, *([most] if self.rule_state else [])}:
            if self.num_found.get(replica, 0) != numel:
                raise CheckpointError(
                    f"the checkpoint has {self.num_found.get(replica, 0)} of the {numel} elements of {self.name} that this "
                    f"rank needs of saved replica {replica}; are the files of all ranks here?"
                )

    def state(self) -> dict[str, Tensor]:
        """As the optimizer keeps it."""
        rule_state = {name: tensor.view(self._shape) for name, tensor in self.rule_state.items()}
        return {"momentum": self.momentum_CE.to(self._momentum_dtype), **rule_state, **self.energies}


def _wanted(optimizer: DeMo) -> dict[int, _Piece]:
    pieces, first = {}, 0
    for number, group in enumerate(optimizer.param_groups):
        for index, (spec, parameter) in enumerate(specs_of(group, number, optimizer._company.dealing.shares), first):
            # What is frozen now may have been trained before, and may be again.
            is_frozen, cut = not parameter.requires_grad, _cut(spec.shape, spec.part, group)
            pieces[index] = _Piece(spec, cut, group, parameter.dtype, is_frozen)
        first += len(group["params"])
    return pieces


def _saved_cuts(whose: dict[str, Any], groups: list[dict[str, Any]]) -> dict[int, _Cut]:
    group_of = {index: group for group in groups for index in group["params"]}
    cuts = {}
    for index, facts in whose["parts"].items():
        part = Part(tuple(facts["whole_shape"]), tuple(facts["offset"])) if "whole_shape" in facts else None
        cuts[index] = _cut(facts["shape"], part, group_of[index])
    return cuts


def _check_groups(saved: list[dict[str, Any]], optimizer: DeMo) -> None:
    theirs, mine = [len(group["params"]) for group in saved], [len(group["params"]) for group in optimizer.param_groups]
    if theirs != mine:
        raise CheckpointError(f"the checkpoint's groups hold {theirs} parameters, this optimizer's hold {mine}")
    for number, (old, new) in enumerate(zip(saved, optimizer.param_groups, strict=True)):
        if old["update"] != new["update"]:
            raise CheckpointError(f"group {number} was trained with update={old['update']!r}, and now has {new['update']!r}")


def _without_owner(state: dict[str, Tensor], cut: _Cut, optimizer: DeMo, num_saved: int) -> dict[str, Tensor]:
    """What an owner had not sent yet is momentum of its own again: other replicas may own other chunks."""
    combine, values = optimizer._decoding.combine, cut.coding.values
    codec = ChunkCodec(
        cut.layout.num_elements, cut.layout.kept(cut.coding.topk, cut.coding.chunk, cut.coding.layout), values
    )
    return {**state, "momentum": folded(state["momentum"], state, codec, combine, num_saved)}


def _take(piece: _Piece, theirs: _Cut, state: dict[str, Tensor], replica: int, share: float) -> None:
    """Add what a saved rank has of a parameter to what was found of it."""
    if theirs.whole_shape != piece.cut.whole_shape:
        raise CheckpointError(
            f"the checkpoint's {piece.name} is {theirs.whole_shape}, this model's is {piece.cut.whole_shape}"
        )
    here, there = piece.cut.overlap(theirs), theirs.overlap(piece.cut)
    num_shared = torch.Size([place.stop - place.start for place in here]).numel()
    if num_shared == 0 or (replica, theirs.offset) in piece.seen:
        return
    piece.seen.add((replica, theirs.offset))
    piece.num_found[replica] = piece.num_found.get(replica, 0) + num_shared
    if share:
        for name, energy in piece.energies.items():
            if theirs == piece.cut and name in state and not energy.any():
                energy.copy_(state[name])
        momentum_CE = state["momentum"].double()
        if theirs != piece.cut:
            elements = torch.zeros(piece.cut.shape, **_EXACT)
            elements[here] = _elements(momentum_CE, theirs.layout)[there]
            momentum_CE = _coefficients(elements, piece.cut.layout)
        piece.momentum_CE += share * momentum_CE
    for name in [name for name in piece.rule_state if name not in state]:  # frozen since before its group had this rule
        del piece.rule_state[name]
    for name, tensor in piece.rule_state.items():
        tensor[here] = state[name].view(theirs.shape)[there].to(tensor.dtype)


def _elements(momentum_CE: Tensor, layout: ChunkLayout) -> Tensor:
    """What a momentum means for the elements of its tensor; what it has beyond the edges is dropped."""
    chunks = inverse_(momentum_CE.clone(), layout, Scratch())
    return crop_to_rows(chunks, layout, 0, layout.num_bands).reshape(layout.shape)


def _coefficients(elements: Tensor, layout: ChunkLayout) -> Tensor:
    """The momentum that means this."""
    bands = bands_of(elements, layout, 0, layout.num_bands)
    return forward(bands, layout, Scratch()).reshape(layout.num_chunks, layout.num_elements)
