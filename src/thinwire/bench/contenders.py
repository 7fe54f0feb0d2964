"""The optimizers whose step is measured, and what each must move through memory at least.

All contenders of a run share parameters and gradients: only the time of a step matters here, not where it leads.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.core.combine import Decoding
from thinwire.core.layout import empty_momentum
from thinwire.core.update_rules import UPDATE_RULES, Hyper
from thinwire.exchange.plan import Coding, ExchangePlan, TensorSpec, make_plan
from thinwire.exchange.transport import Done, Pending
from thinwire.local_step import LocalStep
from thinwire.optimizer import DeMo
from thinwire.planning import group_step
from thinwire.sealing import seal_
from thinwire.slabs import LocalTensor
from thinwire.stack_step import GroupStep
from thinwire.wire.payload import HEADER_BYTES

Shapes = tuple[tuple[int, ...], ...]


def olmo(dim: int, num_layers: int = 16, vocabulary: int = 50304) -> Shapes:
    """The matrices of the paper's models."""
    layer = ((3 * dim, dim), (dim, dim), (8 * dim, dim), (dim, 4 * dim))
    return ((vocabulary, dim), *(layer * num_layers))


SHAPES: dict[str, Shapes] = {"300m": olmo(1024), "1b": olmo(2048), "10m": olmo(320, 6, 256), "tiny": olmo(64, 2, 256)}


@dataclass(frozen=True)
class Contender:
    """``parts`` are run and timed one after the other; ``prepare`` is run before, untimed. ``floor_bytes`` and
    ``state_bytes`` are per parameter; ``held_bytes`` is what is held between steps besides parameters, gradients, state."""

    name: str
    parts: dict[str, Callable[[], None]]
    floor_bytes: float
    state_bytes: float
    prepare: Callable[[], None] = field(default=lambda: None)
    topk: int | None = None
    replicas: int | None = None
    held_bytes: int = 0


def make_parameters(shapes: Shapes, device: torch.device) -> list[nn.Parameter]:
    """Random parameters with random gradients."""
    parameters = [nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return parameters


def others(parameters: Sequence[nn.Parameter]) -> Iterator[Callable[[], Contender]]:
    """Builders of the optimizers to compare with; float32 parameters, gradients and states are read and written once."""
    yield lambda: _torch("AdamW fused", torch.optim.AdamW(parameters, lr=1e-6, fused=True), 28, 8)
    yield lambda: _torch("SGD fused", torch.optim.SGD(parameters, 1e-6, momentum=0.9, fused=True), 20, 4)
    yield lambda: _torch("Muon", torch.optim.Muon(list(parameters), lr=1e-6), 20, 4)
    yield lambda: _published(parameters)


def _torch(name: str, optimizer: torch.optim.Optimizer, floor_bytes: float, state_bytes: float) -> Contender:
    return Contender(name, {"step": lambda: _call(optimizer)}, floor_bytes, state_bytes)


def _published(parameters: Sequence[nn.Parameter]) -> Contender:
    """pytorch-optimizer's DeMo needs a process group, of one process here. It overwrites gradients: it gets its own."""
    import tempfile

    import pytorch_optimizer

    from thinwire.parallel.group import join_alone

    join_alone(tempfile.mkdtemp())
    own = [nn.Parameter(parameter.detach()) for parameter in parameters]
    optimizer = pytorch_optimizer.DeMo(own, lr=1e-6)

    def restore() -> None:
        for mine, parameter in zip(own, parameters, strict=True):
            mine.grad = None if parameter.grad is None else parameter.grad.clone()

    return Contender("published DeMo", {"step": lambda: _call(optimizer)}, 20, 4, restore, topk=32, replicas=1)


def _call(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


class LocalWorld:
    """The local step of one replica among R, without a wire: its own payload, and R that others might have sent."""

    def __init__(self, parameters: Sequence[nn.Parameter], backend: str, topk: int, most_replicas: int) -> None:
        held = _allocated(parameters[0].device)
        specs = [TensorSpec(f"p{i}", tuple(p.shape), str(p.dtype), 0) for i, p in enumerate(parameters)]
        plan = make_plan(specs, [Coding(64, topk, "sign", "adaptive", 4096)])
        (self._bucket,) = plan.buckets
        self._tensors = [self._local_tensor(plan, i, p) for i, p in enumerate(parameters)]
        self._step = LocalStep(plan, self._tensors, backend)
        self._groups = [GroupStep(0.999, 1.0, UPDATE_RULES["sign"], Hyper(1e-6, 1, (0.9, 0.99), 1e-8), 0.0, 64)]
        self._encoding = self._step.empty(self._bucket)
        self._everyone_RB = self._encoding.payload_B.new_zeros(most_replicas, self._bucket.payload_bytes)
        for payload_B in self._everyone_RB:
            self.refresh()
            self.encode()
            payload_B.copy_(self._encoding.payload_B)
        self.num_replicas = self._most_replicas = most_replicas
        momentum_bytes = sum(tensor.momentum_CE.numel() * 4 for tensor in self._tensors)
        self._held_bytes = max(0, _allocated(parameters[0].device) - held - momentum_bytes)

    @staticmethod
    def _local_tensor(plan: ExchangePlan, index: int, parameter: Tensor) -> LocalTensor:
        return LocalTensor(parameter, empty_momentum(plan.layout_of(index), torch.float32, parameter.device))

    @property
    def payload_bytes(self) -> int:
        """Length of a payload."""
        return self._bucket.payload_bytes

    def refresh(self) -> None:
        """Random momenta."""
        _shake([tensor.momentum_CE for tensor in self._tensors])

    def encode(self) -> None:
        """From gradients to a payload."""
        self._encoding.payload_B.zero_()
        self._encoding.begun.clear()
        self._step.encode_(self._bucket, self._groups, self._encoding)

    def decode(self) -> None:
        """From everyone's payloads to parameters."""
        self._step.apply_(self._bucket, self._groups, self._everyone_RB[: self.num_replicas], Decoding())

    def contender(self, backend: str, topk: int, replicas: int) -> Contender:
        """This world with so many replicas. Gradient, momentum and parameter, and the payloads: 20 bytes and a little."""

        def prepare() -> None:
            self.num_replicas = replicas
            self.refresh()

        num_parameters = sum(tensor.parameter.numel() for tensor in self._tensors)
        floor_bytes = 20 + (replicas + 1) * self.payload_bytes / num_parameters
        parts = {"encode": self.encode, "decode": self.decode}
        held_bytes = self._held_bytes - (self._most_replicas - replicas) * self.payload_bytes
        return Contender(f"thinwire {backend}", parts, floor_bytes, 4, prepare, topk, replicas, held_bytes)


class EchoTransport:
    """A wire without length: what the other replicas say is there already, and they agree with this one."""

    replica = 0

    def __init__(self, num_replicas: int) -> None:
        self.num_replicas = num_replicas

    def start_all_gather_(self, messages_RB: Tensor, what: str) -> Pending:
        """Payloads are left as they are; of any other message everyone sends the same."""
        if not what.startswith("exchange"):
            messages_RB.copy_(messages_RB[0].expand_as(messages_RB))
        return Done()

    def start_all_to_all_(self, sent_RB: Tensor, received_RB: Tensor, what: str) -> Pending:
        """Everyone sends what this replica has for itself."""
        received_RB.copy_(sent_RB[0].expand_as(sent_RB))
        return Done()

    def broadcast_(self, tensor: Tensor, what: str, source: int = 0) -> None:
        """Nothing to do."""


def whole_step(
    parameters: Sequence[nn.Parameter], backend: str, topk: int, replicas: int, update: str = "sign", balance: float = 0.0
) -> Contender:
    """All of ``DeMo.step()`` but the wire: gradients checked, payload sealed, everyone's checked."""
    device = parameters[0].device
    held = _allocated(device)
    optimizer, prepare = with_echoes(parameters, backend, topk, replicas, update, balance)
    prepare()
    optimizer.step()
    (bucket,), num_parameters = optimizer.plan.buckets, sum(parameter.numel() for parameter in parameters)
    states = [state for parameter in parameters for state in optimizer.state[parameter].values()]
    held_bytes = max(0, _allocated(device) - held - sum(4 * state.numel() for state in states))
    floor_bytes = 20 + (replicas + 1) * bucket.payload_bytes / num_parameters
    step = {"step": lambda: _call(optimizer)}
    state_names = UPDATE_RULES[update].state_names
    name = f"thinwire {backend}, step()" + ("" if update == "sign" else f", {update} rule")
    name += f", balance {balance:g}" if balance else ""
    # A state of the rule is read and written once, too; with balance a gradient is read twice, since every element of it
    # has a share in every weight.
    floor_bytes += 8 * len(state_names) + 4 * (balance > 0)
    state_bytes = 4 + 4 * len(state_names)
    return Contender(name, step, floor_bytes, state_bytes, prepare, topk, replicas, held_bytes)


def with_echoes(
    parameters: Sequence[nn.Parameter], backend: str, topk: int, replicas: int, update: str = "sign", balance: float = 0.0
) -> tuple[DeMo, Callable[[], None]]:
    """An optimizer whose other replicas have all sent something already, and what must be called before each step."""
    transport = EchoTransport(replicas)
    options: dict[str, Any] = {"update": update, "topk": topk, "balance": balance}
    optimizer = DeMo(list(parameters), lr=1e-6, **options, backend=backend, transport=transport)
    optimizer._company.has_compared = True  # an echo has the same gradients
    (bucket,) = optimizer.plan.buckets
    momenta = [optimizer.state[parameter]["momentum"] for parameter in parameters]
    encoding = optimizer._local.empty(bucket, 0, replicas)
    optimizer._local.rooms = {0: [encoding]}
    groups = [group_step(group, None, 0) for group in optimizer.param_groups]
    for payload_B in reversed(encoding.payloads_RB.unbind()):
        _shake(momenta)
        encoding.payload_B.zero_()
        optimizer._local.encode_(bucket, groups, encoding)
        payload_B.copy_(encoding.payload_B)

    def prepare() -> None:
        _shake(momenta)
        for replica in range(1, replicas):
            header = replace(optimizer._header()[0], replica=replica)
            packed = torch.frombuffer(bytearray(header.pack()), dtype=torch.uint8)
            encoding.payloads_RB[replica, :HEADER_BYTES].copy_(packed)
            seal_(encoding.payloads_RB[replica], optimizer._local.is_fused)

    return optimizer, prepare


def _shake(momenta: Sequence[Tensor]) -> None:
    """A momentum that has seen much: random, and the same kind of random at every step."""
    for momentum in momenta:
        momentum.normal_()


def _allocated(device: torch.device) -> int:
    """Bytes in use, where the device tells."""
    return int(torch.cuda.memory_allocated(device)) if device.type == "cuda" else 0
