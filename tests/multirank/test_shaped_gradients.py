"""Gradients that DDP averages, and peers' collectives, over a modelled link: later, and otherwise the same."""

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.ranks import run_ranks
from tests.training import batch, build, flat
from thinwire.exchange.collective import default_transport
from thinwire.exchange.transport import Transport
from thinwire.parallel.shaped import ShapedLink, shape
from thinwire.parallel.wire import GroupWire
from thinwire.planner.cost import Exchange, network_seconds, num_rounds, ring_all_reduce
from thinwire.planner.link_spec import LinkSpec
from thinwire.training.config import OptimConfig
from thinwire.training.methods import build_method

SPEC = LinkSpec(8e6, 8e6, 0.01)
NUM_STEPS = 2


def _averaged(rank: int, transport: Transport) -> tuple[Tensor, float, int, float]:
    """Parameters, the shortest backward, and what the meter says of bytes and of waiting."""
    model = build(rank)
    method = build_method(OptimConfig(optimizer="adamw", lr=1e-2), model, model, transport)
    shortest = float("inf")
    for step in range(NUM_STEPS):
        images, labels = batch(step, rank)
        method.start_step(1.0)
        loss = torch.nn.functional.cross_entropy(method.model(images), labels)
        began = time.monotonic()
        loss.backward()
        shortest = min(shortest, time.monotonic() - began)
        method.after_backward(0.0)
        method.step()
    return flat(model), shortest, method.traffic.total.sent_bytes, method.traffic.total.wait_seconds


def _exchanges(link: ShapedLink | None) -> tuple[list[list[float]], float, float]:
    wire = GroupWire(30.0, link)
    message = torch.arange(5000.0) + wire.replica
    summed = message.clone()
    wire.all_reduce_(summed)
    results = [summed, wire.all_gather(message), wire.all_to_all(torch.stack([message, message + 1]))]
    total = wire.traffic.total
    return [result.flatten().tolist() for result in results], total.wait_seconds, total.exchange_seconds


def _work(rank: int) -> list[Any]:
    plain = default_transport(dist.group.WORLD, 30.0)
    shaped = shape(plain, SPEC, 30.0)
    return [_averaged(rank, plain), _averaged(rank, shaped), _exchanges(None), _exchanges(shaped.link)]


def test_ddp_and_peers_over_a_link() -> None:
    results = run_ranks(_work, 2)
    gradient_bytes = 4 * flat(build()).numel()
    for (plain, _, sent, _), (held, shortest, held_sent, waited), free, shaped in results:
        assert torch.equal(plain, held)
        assert torch.equal(held, results[0][1][0])
        assert sent == held_sent
        step = network_seconds(ring_all_reduce(gradient_bytes, 2), SPEC.link, 2)
        assert shortest >= step, "backward ends when the last bucket is there"
        assert waited >= NUM_STEPS * 2 * 0.01, "at least the latency of the last bucket cannot hide"
        assert shaped[0] == free[0]
        exchanges = [Exchange(20_000, 20_000, num_rounds(name, 2)) for name in ("all-reduce", "all-gather", "all-to-all")]
        least = sum(network_seconds(exchange, SPEC.link, 2) for exchange in exchanges)
        assert least <= shaped[1] <= shaped[2] + 1e-3
