"""From parameter groups and optimizer state to what is trained: plan, tensors with their state, and both in words."""

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinwire.core.balance import ENERGIES, energy_shapes, is_balanced
from thinwire.core.layout import empty_momentum, matrix_shape, plan_layout
from thinwire.core.update_rules import UPDATE_RULES, Hyper
from thinwire.exchange.dealing import Dealing, Rows, Share
from thinwire.exchange.inside import Inside
from thinwire.exchange.plan import ExchangePlan, Stack, TensorSpec, lay_out, split_into_buckets, with_owners
from thinwire.exchange.sharding import is_sharded, local_of, part_of
from thinwire.exchange.slices import deal
from thinwire.exchange.traffic import Count
from thinwire.exchange.transport import Transport, bytes_on_wire
from thinwire.options import MOMENTUM_DTYPES, check_parameter, coding_of, lr_of, settings_lines
from thinwire.ownership import FIRST, RESIDUAL, folded, places
from thinwire.slabs import LocalTensor
from thinwire.stack_step import GroupStep
from thinwire.wire.payload import Problem

Group = dict[str, Any]
State = MutableMapping[Tensor, dict[str, Any]]
_ON_CPU: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
_NO_SHARES: Mapping[Tensor, Share] = MappingProxyType({})


def specs_of(group: Group, index: int, shares: Mapping[Tensor, Share] = _NO_SHARES) -> Iterator[tuple[TensorSpec, Tensor]]:
    """The parameters of a group, in order; of those in ``shares``, this rank's share."""
    names = group.get("param_names") or [f"parameter {place} of group {index}" for place in range(len(group["params"]))]
    if len(names) != len(group["params"]):
        words = f"group {index} has {len(group['params'])} parameters and {len(names)} names"
        raise ValueError(f"{words}; add parameters with add_param_group")
    for name, parameter in zip(names, group["params"], strict=True):
        shape, part = tuple(local_of(parameter).shape), part_of(parameter)
        if parameter in shares:
            shape, part = shares[parameter].shape_of(shape), shares[parameter].part_of(shape)
        yield TensorSpec(name, shape, str(parameter.dtype), index, part), parameter


def signature_of(groups: Sequence[Group], state: State) -> list[object]:
    """All that plan and tensors are made from, so that a change is noticed: a layer unfrozen, another topk, parameters or
    state moved to other tensors."""
    signature: list[object] = []
    for group in groups:
        signature.append((coding_of(group), group["update"], group["momentum_dtype"], group["balance"] > 0))
        for parameter in group["params"]:
            kept = [id(tensor) for tensor in state[parameter].values()] if parameter in state else []
            local = local_of(parameter)
            tensor = (id(parameter), parameter.requires_grad, local.shape, parameter.dtype, local.device)
            signature.append((*tensor, kept))
    return signature


def check_codings(plan: ExchangePlan, groups: Sequence[Group]) -> None:
    """Refuse another cut than the momenta were made for, which may even have the same shape."""
    for index, (planned, group) in enumerate(zip(plan.codings, groups, strict=True)):
        for name in ("chunk", "layout", "dense_below"):
            before, now = getattr(planned, name), getattr(coding_of(group), name)
            if before != now:
                raise ValueError(f"{name} of group {index} cannot change during training: it was {before}, got {now}")


class Owning(NamedTuple):
    """What a replica must know to own a part of the chunks; ``topk`` is what owners keep, None for their default."""

    topk: int | None
    replica: int
    num_replicas: int
    combine: str


def plan_and_tensors(
    groups: Sequence[Group], state: State, num_buckets: int, dealing: Dealing, owning: Owning | None = None
) -> tuple[ExchangePlan, list[LocalTensor]]:
    """The plan, and every parameter that takes part with its state, which is made where there is none yet."""
    codings = [coding_of(group) for group in groups]
    trained = _trained(groups, {})
    buckets = split_into_buckets([spec for spec, _ in trained], codings, num_buckets)
    if dealing.is_on:
        dealing.deal_(buckets, [(parameter, _rows(spec, parameter, groups)) for spec, parameter in trained])
        trained = _trained(groups, dealing.shares)
    plan = lay_out([spec for spec, _ in trained], codings, buckets, dealing.is_on)
    tensors = []
    for index, (spec, parameter) in enumerate(trained):
        check_parameter(parameter, spec.name)
        _check_whole_matrices(spec, groups[spec.group])
        share = dealing.shares.get(parameter)
        tensors.append(_local_tensor(plan, index, parameter, groups[spec.group], state[parameter], share))
    if owning is not None:
        plan = with_owners(plan, owning.topk)
        _own(plan, tensors, [state[parameter] for _, parameter in trained], owning)
    return plan, tensors


def owned_stacks(plan: ExchangePlan, owning: Owning) -> Iterator[tuple[Stack, range]]:
    """Which chunks of each stack a replica owns. Alone, it owns none: there is nobody to send for."""
    for bucket in plan.buckets:
        mine = deal(bucket, owning.num_replicas)[owning.replica]
        for stack, chunks in zip(bucket.stacks, mine, strict=True):
            yield stack, chunks if owning.num_replicas > 1 else range(0)


def _own(plan: ExchangePlan, tensors: list[LocalTensor], states: Sequence[dict[str, Any]], owning: Owning) -> None:
    """Give every tensor the residual of the chunks that this replica owns; of those that it owned before, and does not any
    more, it returns to the momentum."""
    for state in states:  # the same keys on all ranks, also where a shard is empty
        state.setdefault(RESIDUAL, torch.zeros(0, state["momentum"].shape[1], **_ON_CPU))
        state.setdefault(FIRST, torch.tensor(0, device="cpu"))
    for stack, mine in owned_stacks(plan, owning):
        for place in places(stack, mine):
            local, state = tensors[place.tensor], states[place.tensor]
            wanted = (place.num_chunks, stack.codec.num_elements)
            is_same = state[RESIDUAL].shape == wanted and int(state[FIRST]) == place.first
            if not is_same:
                local.momentum_CE.copy_(folded(local.momentum_CE, state, stack.codec, owning.combine, owning.num_replicas))
                state[RESIDUAL], state[FIRST] = torch.zeros(wanted, **_ON_CPU), torch.tensor(place.first, device="cpu")
            state[RESIDUAL] = state[RESIDUAL].to(dtype=local.compute_dtype, device=local.momentum_CE.device)
            tensors[place.tensor] = replace(local, owned_CE=state[RESIDUAL])


def _trained(groups: Sequence[Group], shares: Mapping[Tensor, Share]) -> list[tuple[TensorSpec, Tensor]]:
    pairs = (pair for index, group in enumerate(groups) for pair in specs_of(group, index, shares))
    return [(spec, parameter) for spec, parameter in pairs if parameter.requires_grad]


def _rows(spec: TensorSpec, parameter: Tensor, groups: Sequence[Group]) -> Rows:
    """How a parameter may be dealt out to the ranks of an island, which all hold it."""
    if is_sharded(parameter):
        raise ValueError(
            f"{spec.name} is a DTensor: its shards are the ranks' shares already, so leave islands out, and pass the group "
            "between replicas as process_group (thinwire.parallel.sharded.distribute does so)"
        )
    group = groups[spec.group]
    return Rows.of(spec.shape, coding_of(group), needs_whole_matrices(group, spec.shape))


def _check_whole_matrices(spec: TensorSpec, group: Group) -> None:
    """Refuse what needs whole matrices where this rank has only a piece of them."""
    if spec.part is None or 0 in spec.shape or not needs_whole_matrices(group, spec.part.whole_shape):
        return
    whole, chunk = spec.part.whole_shape, group["chunk"]
    if len(whole) < 2 or matrix_shape(whole, chunk)[1:] != matrix_shape(spec.shape, chunk)[1:]:
        instead = {"update": "use another rule"} if UPDATE_RULES[group["update"]].whole_matrices else {}
        instead |= {"balance": "leave balance at 0"} if group["balance"] else {}
        what = " and ".join(f"{name}={group[name]!r}" for name in instead)
        raise ValueError(
            f"{what} needs whole matrices, and this rank has {spec.shape} of {spec.name}, which is {whole}; "
            f"{' and '.join(instead.values())} for sharded matrices, or leave them unsharded"
        )


def needs_whole_matrices(group: Group, shape: tuple[int, ...]) -> bool:
    """Whether the rule looks at whole matrices, or balance does, which leaves some tensors alone."""
    if UPDATE_RULES[group["update"]].whole_matrices:
        return True
    layout = plan_layout(shape, group["chunk"], group["dense_below"], group["layout"])
    return group["balance"] > 0 and is_balanced(layout)


def _local_tensor(
    plan: ExchangePlan, index: int, parameter: Tensor, group: Group, state: dict[str, Any], share: Share | None
) -> LocalTensor:
    layout, device = plan.layout_of(index), local_of(parameter).device
    momentum, dtype = state.get("momentum"), MOMENTUM_DTYPES[group["momentum_dtype"]]
    if momentum is None:
        momentum = empty_momentum(layout, dtype, device)
    if momentum.shape != (layout.num_chunks, layout.num_elements):
        raise ValueError(
            f"{plan.tensors[index].name} already has momentum in chunks of another size; its shape, chunk, layout and "
            "dense_below cannot change during training"
        )
    state["momentum"] = momentum.to(dtype=dtype, device=device).contiguous()
    local = LocalTensor(parameter, state["momentum"], share=share)
    kind = (device, local.compute_dtype)
    for name in UPDATE_RULES[group["update"]].state_names:
        tensor = state.get(name, torch.zeros(local.parameter.shape, device="cpu"))
        state[name] = tensor.to(*kind).contiguous()
        local.rule_state[name] = state[name]
    if group["balance"] > 0:
        for name, shape in zip(ENERGIES, energy_shapes(layout), strict=True):
            energy = state.get(name, torch.zeros(shape, device="cpu"))
            state[name] = (energy if energy.shape == shape else torch.zeros(shape, device="cpu")).to(*kind).contiguous()
        if is_balanced(layout):
            local = replace(local, energies=(state[ENERGIES[0]], state[ENERGIES[1]]))
    return local


def name_empty_groups_(groups: Sequence[dict[str, Any]], new: dict[str, Any]) -> None:
    """torch takes names in all groups or in none, and counts an empty one as without: let those go with the others."""
    if isinstance(new["params"], Tensor | set):  # one parameter, or what torch refuses
        return
    new["params"] = list(new["params"])
    is_named = any("param_names" in group for group in (*groups, new) if group["params"])
    is_named |= any(isinstance(parameter, tuple) for parameter in new["params"])
    for group in (group for group in (*groups, new) if not group["params"]):
        group.pop("param_names", None)
        group |= {"param_names": []} if is_named else {}


def check_members(group: Group, index: int) -> None:
    """Raise unless DeMo can train every parameter of a group that requires a gradient."""
    if len(set(map(id, group["params"]))) < len(group["params"]):
        raise ValueError("a parameter group holds the same parameter twice")
    for spec, parameter in specs_of(group, index):
        if parameter.requires_grad:
            check_parameter(parameter, spec.name)


def group_step(group: Group, grad_scale: float | None, num_under_way: int, is_unscaled: bool = False) -> GroupStep:
    """What a group does at the step to come; gradients are larger by ``grad_scale``, if a GradScaler says so and the island
    has not taken that out."""
    lr = float(lr_of(group))  # type: ignore[arg-type]
    scale = (lr if group["lr_in_momentum"] else 1.0) / (1.0 if is_unscaled else grad_scale or 1.0)
    return GroupStep(
        decay=group["momentum_decay"],
        gradient_scale=-scale if group["maximize"] else scale,
        rule=UPDATE_RULES[group["update"]],
        hyper=Hyper(lr, group["num_steps"] + num_under_way + 1, tuple(group["betas"]), group["eps"]),
        weight_decay=group["weight_decay"],
        chunk=group["chunk"],
        balance=group["balance"],
        trouble=Problem.NONFINITE if grad_scale is None else Problem.OVERFLOW,
    )


def copy_first_parameters(groups: Sequence[Group], transport: Transport, inside: Inside, setup: Count) -> None:
    """Overwrite every parameter with replica 0's; into an island it comes once, and goes from there to all of its ranks."""
    for parameter in (parameter for group in groups for parameter in group["params"]):
        local = local_of(parameter).data
        if local.numel() and local.layout == torch.strided:
            if inside.rank == 0 and transport.num_replicas > 1:
                setup.add(bytes_on_wire(transport, local.numel() * local.element_size()), transport.num_replicas)
                transport.broadcast_(local, "first copy of replica 0's parameters")
            if inside.num_ranks > 1:
                inside.broadcast_(local, "first copy of the parameters inside the island")


def describe(plan: ExchangePlan, groups: Sequence[Group], facts: dict[str, object]) -> list[str]:
    """A line per fact that all replicas must share: the plan, ``facts``, and the settings of each group."""
    lines = [*plan.description, *(f"{name}: {value!r}" for name, value in facts.items())]
    for index, group in enumerate(groups):
        lines += settings_lines(index, group)
        # They are not trained, but must be the same on all replicas.
        lines += [f"frozen: {spec.fact}" for spec, parameter in specs_of(group, index) if not parameter.requires_grad]
    return lines
