"""``thinwire train --dry-run``: what a run would need, from shapes and a short test of this machine. Nothing is trained."""

import math
import time
from collections.abc import Iterable
from dataclasses import replace

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from thinwire.core.balance import ENERGIES
from thinwire.exchange.choice import OWNER, choose_exchange
from thinwire.exchange.transport import SoloTransport
from thinwire.optimizer import DeMo
from thinwire.ownership import FIRST, RESIDUAL
from thinwire.parallel.mesh import MeshShape, shape_of
from thinwire.planner.cost import DEVICES, DeviceCosts, Workload, ddp, predict
from thinwire.planner.link_spec import parse_link
from thinwire.planner.links import Link, format_bandwidth, format_bytes, format_seconds
from thinwire.planner.owners import Sizes, both_exchanges, sizes_of
from thinwire.training.config import DECOUPLED_OPTIMIZERS, PEERS, OptimConfig, TrainConfig
from thinwire.training.exchanges import settle_exchange
from thinwire.training.groups import split_for_muon, split_matrices
from thinwire.training.methods import Decoupled
from thinwire.training.models import num_parameters
from thinwire.training.peer_costs import power_sgd_exchange, rehearse
from thinwire.training.progress import format_clock
from thinwire.training.shapes import build_on_meta, specs_of, step_flops
from thinwire.training.wording import count

# Training reaches about this share of the rate of a large matrix product.
_UTILISATION = 0.4
_BANDWIDTHS = (1e7, 1e8, 1e9, 1e10)
_ROUND_TRIP_SECONDS = 0.01
_DENSE_STATES = {"adamw": 2, "adamw-bf16": 2, "adamw-fp16": 2, "powersgd": 3, "sgd": 1, "lion": 1}
_HALVES = ("adamw-bf16", "adamw-fp16")
_PROBE_EDGE = {"cpu": 512, "cuda": 4096}


def describe(config: TrainConfig, num_replicas: int, console: Console) -> None:
    """Print it."""
    model = build_on_meta(config)
    specs, num_trained = specs_of(model), num_parameters(model)
    device = _device(config)
    rate = matmul_rate(device, config.model.precision)
    share = config.schedule.batch // num_replicas
    compute_seconds = step_flops(model, config, share) / (rate * _UTILISATION)
    console.print(f"{config.model.architecture}: {num_trained:,} parameters in {len(specs)} tensors", highlight=False)
    console.print(
        f"{config.schedule.steps:,} {'step' if config.schedule.steps == 1 else 'steps'} of "
        f"{count(config.schedule.batch, 'example')}, {share} per rank, {count(num_replicas, 'rank')}",
        highlight=False,
    )
    mesh = shape_of(config.launch.mesh, config.launch.islands, num_replicas)
    optim = _settled(config, model, mesh)
    console.print(_memory_table(memory_bytes(optim, model, mesh, bool(config.launch.islands))))
    workload = workload_of(optim, model, mesh, compute_seconds, device)
    sent, received = format_bytes(workload.sent_bytes), format_bytes(workload.received_bytes)
    by = "" if workload.exchange_name is None else f", exchange {workload.exchange_name}"
    console.print(f"bytes per step and rank: {sent} sent, {received} received{by}", highlight=False)
    console.print(
        f"forward and backward: about {format_seconds(compute_seconds)} per step on this {device.type}, from a matrix "
        f"product that ran at {rate / 1e9:,.0f} GFLOP/s, of which training is taken to reach {_UTILISATION:.0%}",
        highlight=False,
        soft_wrap=True,
    )
    console.print(_time_table(workload, config.schedule.steps, config.launch.link))


def _settled(config: TrainConfig, model: nn.Module, mesh: MeshShape) -> OptimConfig:
    """With the exchange that the run would have."""
    launch, optim = config.launch, config.optim
    link = parse_link(launch.link).link if launch.link else None
    wanted = settle_exchange(optim, model, mesh.replicate, link)
    can_change = launch.elastic or bool(launch.lighthouse)
    has_owners = choose_exchange(wanted, False, mesh.replicate, optim.delay, can_change) == OWNER
    return replace(optim, exchange="owner" if has_owners else "all_gather")


def memory_bytes(config: OptimConfig, model: nn.Module, mesh: MeshShape, has_islands: bool = False) -> dict[str, int]:
    """Memory of one rank, activations and temporary tensors apart; shards are taken to be even. The ranks of an island hold
    all parameters and gradients, and share the rest."""
    needs = {"parameters": _bytes_of(model.parameters()), "gradients": _bytes_of(model.parameters())}
    if config.optimizer in DECOUPLED_OPTIMIZERS:
        optimizer = Decoupled(config, model, model, SoloTransport()).optimizer
        states = optimizer.state.values()
        needs["momentum"] = _bytes_of(state["momentum"] for state in states)
        apart = ("momentum", RESIDUAL, FIRST, *ENERGIES)
        needs["state of the update rule"] = _bytes_of(
            t for state in states for name, t in state.items() if name not in apart
        )
        needs["balance"] = _bytes_of(state[name] for state in states for name in ENERGIES if name in state)
        needs |= _exchange_bytes(optimizer, mesh.replicate)
    elif config.optimizer in PEERS:
        needs |= rehearse(config, model, mesh.replicate)[1]
    elif config.optimizer == "galore":
        needs["optimizer state"] = _galore_bytes(config, model)
    elif config.optimizer == "muon":
        hidden, rest = split_for_muon(model)
        needs["optimizer state"] = _bytes_of(p for _, p in hidden) + 2 * _bytes_of(p for _, p in rest)
    else:
        needs["optimizer state"] = needs["parameters"] * _DENSE_STATES[config.optimizer]
    whole = ("parameters", "gradients") if has_islands else ()
    return {name: needed // (1 if name in whole else mesh.shard) for name, needed in needs.items() if needed}


def _exchange_bytes(optimizer: DeMo, num_replicas: int) -> dict[str, int]:
    """Everyone's payloads; or, with owners, a payload whole, cut up and as it comes from all, and the answers twice."""
    plan = optimizer.plan
    if plan.answers is None:
        return {"payloads": plan.payload_bytes * num_replicas}
    payloads = 3 * plan.payload_bytes + 2 * plan.answers.payload_bytes
    num_coefficients = sum(state["momentum"].numel() for state in optimizer.state.values())
    return {"payloads": payloads, "residual of what is owned": 4 * num_coefficients // num_replicas}


def _galore_bytes(config: OptimConfig, model: nn.Module) -> int:
    """Two moments of what is projected, and the projection; the rest as AdamW has it."""
    hidden, rest = split_matrices(model)
    projected = ((min(p.shape), max(p.shape)) for _, p in hidden)
    num_elements = sum(min(config.rank, short) * (short + 2 * long) for short, long in projected)
    return 4 * (num_elements + 2 * sum(p.numel() for _, p in rest))


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def matmul_rate(device: torch.device, precision: str) -> float:
    """Floating-point operations per second of a matrix product on this device: the best of a few."""
    edge, dtype = _PROBE_EDGE[device.type], torch.bfloat16 if precision == "bfloat16" else torch.float32
    matrix = torch.randn(edge, edge, device=device, dtype=dtype)
    best = math.inf
    for _ in range(5):
        began = time.perf_counter()
        float((matrix @ matrix)[0, 0])  # reading a number waits for the device
        best = min(best, time.perf_counter() - began)
    return 2 * edge**3 / best


def _device(config: TrainConfig) -> torch.device:
    use_gpu = config.launch.device != "cpu" and torch.cuda.is_available()
    return torch.device("cuda" if use_gpu else "cpu")


def workload_of(
    config: OptimConfig, model: nn.Module, mesh: MeshShape, compute_seconds: float, device: torch.device
) -> Workload:
    """A step of the run, whatever the link."""
    costs, num_trained = DEVICES["gpu" if device.type == "cuda" else "cpu"], num_parameters(model)
    if config.optimizer not in DECOUPLED_OPTIMIZERS:
        width = 2 if config.optimizer in _HALVES else 4
        dense = ddp(num_trained, width, f"float{8 * width}", mesh.replicate, compute_seconds, costs)
        if config.optimizer == "powersgd":
            return replace(dense, method="powersgd", exchange=power_sgd_exchange(config, model, mesh.replicate))
        if config.optimizer in PEERS:
            exchange = rehearse(config, model, mesh.replicate)[0]
            return replace(dense, method=config.optimizer, exchange=exchange, hidden_seconds=0.0)
        if config.optimizer == "muon":
            hidden = costs.rule_seconds("muon", [parameter.shape for _, parameter in split_for_muon(model)[0]], config.chunk)
            return replace(dense, optimizer_seconds=dense.optimizer_seconds + hidden)
        return dense
    optimizer = Decoupled(config, model, model, SoloTransport()).optimizer
    plan = optimizer.plan
    whole = sizes_of(plan, mesh.replicate)
    payload, part, answer = (size // mesh.shard for size in (whole.payload_bytes, whole.slice_bytes, whole.answer_bytes))
    sizes = Sizes(payload, part, answer, whole.num_buckets if config.overlap else 1)
    settings = (config.topk, plan.codings[0].values, mesh.replicate, compute_seconds, costs)
    gather, owner = both_exchanges(num_trained // mesh.shard, sizes, *settings)
    chosen = gather if plan.answers is None else owner
    return replace(chosen, optimizer_seconds=chosen.optimizer_seconds + _rule_seconds(optimizer, costs) / mesh.shard)


def _rule_seconds(optimizer: DeMo, costs: DeviceCosts) -> float:
    """What the update rules of all groups cost besides the sign rule's step."""
    groups = optimizer.param_groups
    return sum(costs.rule_seconds(one["update"], [p.shape for p in one["params"]], one["chunk"]) for one in groups)


def _memory_table(needs: dict[str, int]) -> Table:
    table = Table(title="memory of a rank, without activations", title_justify="left")
    table.add_column("")
    table.add_column("bytes", justify="right")
    for name, needed in needs.items():
        table.add_row(name, format_bytes(needed))
    table.add_row("together", format_bytes(sum(needs.values())))
    return table


def _time_table(workload: Workload, steps: int, link: str) -> Table:
    title = f"predicted times, {format_seconds(_ROUND_TRIP_SECONDS)} round trip (the model: docs/planner.md)"
    table = Table(title=title, title_justify="left")
    for name in ("link", "step", "of it network", "whole run"):
        table.add_column(name, justify="right")
    links = {format_bandwidth(bandwidth): Link(bandwidth, _ROUND_TRIP_SECONDS) for bandwidth in _BANDWIDTHS}
    if link:
        links[f"--link {link}"] = parse_link(link).link
    for name, each in links.items():
        row = predict(workload, each)
        whole = format_clock(row.step_seconds * steps)
        table.add_row(name, format_seconds(row.step_seconds), format_seconds(row.exposed_seconds), whole)
    return table
