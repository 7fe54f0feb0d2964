"""Every peer keeps the same promises: one row each in the table of the trainer's names, and none is left out."""

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from thinwire.exchange.loopback import LoopbackTransport, run_replicas
from thinwire.exchange.transport import SoloTransport
from thinwire.parallel.state_files import read_state, write_state
from thinwire.parallel.wire import TransportWire
from thinwire.peers.contract import Flat, Message, Peer
from thinwire.peers.dense import Dense
from thinwire.training.compressed import Compressed, build_peer
from thinwire.training.config import PEERS, OptimConfig
from thinwire.training.errors import TrainingError
from thinwire.training.peer_costs import rehearse

RATES = {"dgc": 0.5, "ef-signsgd": 0.5, "signsgd": 3e-3, "published-code": 3e-3}
# How a message travels, which says how many bytes it makes.
GATHERED = ("topk", "dgc", "signsgd", "ef-signsgd", "qsgd", "sparseloco")
REDUCED = ("dense", "randomk", "local-sgd", "diloco")
LOCAL_STEPS, DENSE_STEPS, NUM_STEPS = 3, 4, 9
_SEEDING = threading.Lock()


class Net(nn.Module):
    """Sizes that no block divides, a parameter that never has a gradient, and one that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.wide, self.norm = nn.Embedding(20, 16), nn.Linear(16, 33), nn.LayerNorm(33)
        self.out = nn.Linear(33, 20)
        self.unused = nn.Parameter(torch.randn(7))
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(torch.relu(self.norm(self.wide(self.embedding(tokens)))))


def net(seed: int = 0) -> Net:
    with _SEEDING:
        torch.manual_seed(seed)
        return Net()


def config_of(name: str, **changes: Any) -> OptimConfig:
    small = {"density": 0.2, "topk": 8, "chunk": 8, "local_steps": LOCAL_STEPS, "dense_steps": DENSE_STEPS}
    rest = {"weight_decay": 0.01, "momentum_decay": 0.9, **small, **changes}
    return OptimConfig(optimizer=name, lr=RATES.get(name, 1e-2), **rest)  # type: ignore[arg-type]


def peer_of(name: str, model: nn.Module, replica: int, num_replicas: int) -> tuple[Peer, Flat]:
    flat = Flat(model.parameters())
    if name == "dense":
        return Dense(flat, torch.optim.AdamW(flat.parameters, 1e-2, weight_decay=0.0)), flat
    return build_peer(config_of(name), model, flat, replica, num_replicas), flat


def backward(model: nn.Module, step: int, replica: int) -> float:
    generator = torch.Generator().manual_seed(1000 * step + replica)
    tokens = torch.randint(0, 20, (64,), generator=generator)
    model.zero_grad()
    loss = nn.functional.cross_entropy(model(tokens), (tokens + 1) % 20)
    loss.backward()
    return loss.item()


@dataclass
class Story:
    """What one replica saw."""

    losses: list[float] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    bytes: list[tuple[int, int]] = field(default_factory=list)
    model: Net | None = None
    peer: Peer | None = None


def train(name: str, num_replicas: int, num_steps: int = NUM_STEPS) -> list[Story]:
    def work(transport: LoopbackTransport) -> Story:
        model, story, wire = net(), Story(), TransportWire(transport)
        peer, flat = peer_of(name, model, transport.replica, transport.num_replicas)
        for step in range(num_steps):
            story.losses.append(backward(model, step, transport.replica))
            wire.traffic.start_step()
            with torch.no_grad():
                message = peer.compress(flat.gradient())
                story.messages.append(tuple(tensor.clone() for tensor in message))
                peer.apply(peer.exchange(message, wire))
            story.values.append(flat.values())
            story.bytes.append((wire.traffic.last_step.sent_bytes, wire.traffic.last_step.received_bytes))
        story.model, story.peer = model, peer
        return story

    return run_replicas(work, num_replicas)


@pytest.mark.parametrize("num_replicas", [1, 2, 4])
@pytest.mark.parametrize("name", ["dense", *PEERS])
def test_replicas_learn_and_hold_the_same_bits(name: str, num_replicas: int) -> None:
    stories = train(name, num_replicas, 4 * NUM_STEPS)
    has_own = stories[0].peer is not None and stories[0].peer.has_own_parameters
    for step in range(4 * NUM_STEPS):
        is_synchronised = not has_own or (step + 1) % LOCAL_STEPS == 0
        if is_synchronised:
            assert all(torch.equal(story.values[step], stories[0].values[step]) for story in stories), f"step {step}"
        elif num_replicas > 1:
            assert not torch.equal(stories[0].values[step], stories[1].values[step])
    for story in stories:
        assert sum(story.losses[-4:]) < 0.85 * sum(story.losses[:4])
        before, after = net(), story.model
        assert after is not None
        assert torch.equal(after.frozen, before.frozen)
        # What has no gradient anywhere stays where it was, or, with signsgd, never leaves it by more than a step.
        tolerance = 1.01 * RATES[name] if name == "signsgd" else 0.0
        torch.testing.assert_close(after.unused, before.unused, rtol=0, atol=tolerance)


@pytest.mark.parametrize("num_replicas", [1, 2, 4])
@pytest.mark.parametrize("name", ["dense", *PEERS])
def test_what_is_metered_is_what_is_sent(name: str, num_replicas: int) -> None:
    for story in train(name, num_replicas):
        for message, (sent, received) in zip(story.messages, story.bytes, strict=True):
            size, others = sum(tensor.nbytes for tensor in message), num_replicas - 1
            if num_replicas == 1:
                assert (sent, received) == (0, 0)
            elif name in GATHERED:
                assert (sent, received) == (size, others * size)
            elif name in REDUCED or (name == "onebit-adam" and len(message) == 1):
                assert sent == received == 2 * others * size // num_replicas
            elif name == "onebit-adam":
                assert (sent, received) == (size, 2 * others * size // num_replicas)
            else:
                package: Any = story.peer and story.peer.optimizers[0]
                assert (sent, received) == (package.data_transmit, package.data_receive - package.data_transmit)
                assert sent > 0
    if name not in ("dense", "onebit-adam", "dgc"):
        config, model = config_of(name), net().to("meta")
        exchange, _ = rehearse(config, model, num_replicas)
        assert exchange.sent_bytes == sum(sent for sent, _ in story.bytes) // NUM_STEPS, "the dry run says otherwise"
        assert exchange.received_bytes == sum(received for _, received in story.bytes) // NUM_STEPS


@pytest.mark.parametrize("name", ["local-sgd", "diloco", "sparseloco"])
def test_nothing_is_sent_when_nothing_is_due(name: str) -> None:
    for story in train(name, 2):
        for step, (message, counted) in enumerate(zip(story.messages, story.bytes, strict=True)):
            is_due = (step + 1) % LOCAL_STEPS == 0
            assert bool(message) is is_due
            assert (counted != (0, 0)) is is_due


@pytest.mark.parametrize("name", PEERS)
def test_a_saved_state_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    first, more = 5, 6  # in the middle of a round, and after the dense steps

    def method_of(transport: LoopbackTransport, seed: int) -> tuple[Net, Compressed]:
        model = net(seed)
        return model, Compressed(config_of(name), model, model, transport)

    def take_steps(model: Net, method: Compressed, steps: range, replica: int) -> Tensor:
        for step in steps:
            method.start_step(1 / (1 + step))
            backward(model, step, replica)
            method.after_backward(0.5)
            method.step()
            assert all(parameter.grad is None for parameter in model.parameters())
        return Flat(model.parameters()).values()

    def straight(transport: LoopbackTransport) -> Tensor:
        model, method = method_of(transport, transport.replica)
        take_steps(model, method, range(first), transport.replica)
        write_state(method.state_dict(), tmp_path / f"{transport.replica}")
        torch.save(model.state_dict(), tmp_path / f"{transport.replica}.pt")
        return take_steps(model, method, range(first, first + more), transport.replica)

    def resumed(transport: LoopbackTransport) -> Tensor:
        model, method = method_of(transport, 7)
        model.load_state_dict(torch.load(tmp_path / "0.pt", weights_only=True))
        method.load_state_dict([read_state(tmp_path / f"{transport.replica}")], "exact")
        return take_steps(model, method, range(first, first + more), transport.replica)

    whole, parts = run_replicas(straight, 2), run_replicas(resumed, 2)
    assert all(torch.equal(*pair) for pair in zip(whole, parts, strict=True))
    solo = Compressed(config_of(name), net(), net(), SoloTransport())
    with pytest.raises(TrainingError, match="is of replica 1 of 2, this is replica 0 of 1: with optimizer="):
        solo.load_state_dict([read_state(tmp_path / "1")], "exact")
    with pytest.raises(TrainingError, match=f"--residual zero is for optimizer=demo; {name} goes on exactly"):
        solo.load_state_dict([read_state(tmp_path / "0")], "zero")


def test_dgc_clips_a_replicas_gradient_to_its_part_of_the_mean() -> None:
    flat = Flat(net().parameters())
    peer = build_peer(config_of("dgc", clip=2.0, beta1=0.0, density=1.0), net(), flat, 0, 4)
    peer.compress(torch.full((flat.num_elements,), 1.0))
    (_, values) = peer.compress(torch.full((flat.num_elements,), 1.0))
    assert float(values.norm()) == pytest.approx(2.0 / 4**0.5, rel=1e-3)


def _lost_and_found(name: str, peer: Peer, flat: Flat, gradient_N: Tensor) -> tuple[Tensor, Tensor]:
    """What went into a step, and what came out of it: sent, or kept for later."""
    state = {key: tensor.clone() for key, tensor in peer.state.items()}
    message = peer.compress(gradient_N.clone())
    wire = TransportWire(SoloTransport())
    exchanged = peer.exchange(message, wire)
    if name == "sparseloco":
        change_N = state["start"] - flat.values()
        peer.apply(exchanged)
        return 0.95 * state["error"] + change_N, state["start"] - peer.state["start"] + peer.state["error"]
    peer.apply(exchanged)
    if name == "onebit-adam":
        join = peer._blocks.join  # type: ignore[attr-defined]
        errors = [one["error"] + join(one["error of the average"]) for one in (state, peer.state)]
        momentum_N = 0.9 * state["momentum"] + 0.1 * gradient_N
        return momentum_N + errors[0], peer.state["momentum"] + errors[1]
    kept, rate = ("sum", 1.0) if name == "dgc" else ("error", RATES[name] if name == "ef-signsgd" else 1.0)
    return rate * gradient_N + state[kept], flat.gradient() + peer.state[kept]


@pytest.mark.parametrize("name", ["topk", "dgc", "randomk", "ef-signsgd", "onebit-adam", "sparseloco"])
def test_what_is_not_sent_is_kept(name: str) -> None:
    model = net()
    flat = Flat(model.parameters())
    changes = {"local_steps": 1, "outer_lr": 1.0, "weight_decay": 0.0, "clip": 0.0, "dense_steps": 0}
    changes |= {"beta1": 0.0} if name == "dgc" else {}
    peer = build_peer(config_of(name, **changes), model, flat, 0, 1)
    generator = torch.Generator().manual_seed(5)
    for _ in range(4):
        before, after = _lost_and_found(name, peer, flat, torch.randn(flat.num_elements, generator=generator))
        torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-6)
        assert before.abs().max() > 0.01
