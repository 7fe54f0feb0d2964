"""The methods of `thinwire.peers` in the trainer: from a configuration to a peer, and from a peer to what the loop sees."""

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from thinwire.drift import DriftCheck
from thinwire.exchange.transport import Transport
from thinwire.parallel.wire import wire_over
from thinwire.peers.contract import Flat, Peer
from thinwire.peers.descent import Descent
from thinwire.peers.dgc import DeepGradientCompression
from thinwire.peers.diloco import DiLoCo
from thinwire.peers.ef_signsgd import ErrorFeedbackSignSGD
from thinwire.peers.local_sgd import LocalSGD
from thinwire.peers.onebit_adam import OneBitAdam
from thinwire.peers.qsgd import QSGD
from thinwire.peers.randomk import RandomK
from thinwire.peers.signsgd import SignSGD
from thinwire.peers.sparseloco import SparseLoCo
from thinwire.peers.topk import TopK
from thinwire.training.config import OptimConfig
from thinwire.training.errors import TrainingError
from thinwire.training.groups import decay_groups, trained
from thinwire.training.settings import clip_, own_settings, set_lrs


class Compressed:
    """A peer on each replica's own gradients, which are clipped before it sees them."""

    drift: DriftCheck | None = None
    state_is_shared, waits_in = False, "optimizer"

    def __init__(self, config: OptimConfig, model: nn.Module, callable_model: nn.Module, transport: Transport) -> None:
        self.model = callable_model
        self._name = config.optimizer
        self._wire = wire_over(transport)
        self.traffic = self._wire.traffic
        for tensor in (*model.parameters(), *model.buffers()):
            self.traffic.setup.add(tensor.numel() * tensor.element_size(), transport.num_replicas)
            transport.broadcast_(tensor.data, "first copy of replica 0's parameters")
        self._flat = Flat(model.parameters())
        self.peer = build_peer(config, model, self._flat, transport.replica, transport.num_replicas)
        self._peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in self.peer.optimizers]

    def start_step(self, lr_share: float) -> None:
        """Set all learning rates, and count the traffic of a new step."""
        set_lrs(self.peer.optimizers, self._peaks, lr_share)
        self.traffic.start_step()

    def accumulating(self) -> AbstractContextManager[Any]:
        """Gradients add up by themselves."""
        return nullcontext()

    def after_backward(self, largest_norm: float) -> None:
        """Clip this replica's gradients: the mean's norm is known too late."""
        clip_(self._flat.parameters, largest_norm)

    @torch.no_grad()
    def step(self) -> None:
        """Compress, exchange and apply, then drop the gradients."""
        gradient_N = self._flat.gradient()
        with self.traffic.encoding():
            message = self.peer.compress(gradient_N)
        exchanged = self.peer.exchange(message, self._wire)
        with self.traffic.applying():
            self.peer.apply(exchanged)
        for parameter in self._flat.parameters:
            parameter.grad = None

    def drain(self) -> None:
        """Nothing is under way. Replicas that part between synchronisations are scored and saved as they are."""

    def state_dict(self) -> dict[str, Any]:
        """This replica's own, with its parameters where they may differ from the others'."""
        own: dict[str, Any] = {"num_replicas": self._wire.num_replicas, "replica": self._wire.replica}
        own["peer"] = dict(self.peer.state)
        own["optimizers"] = {str(place): optimizer.state_dict() for place, optimizer in enumerate(self.peer.optimizers)}
        if self.peer.has_own_parameters:
            own["parameters"] = self._flat.values()
        return own

    def load_state_dict(self, states: Iterable[dict[str, Any]], residual: str) -> None:
        """This replica's own; there is no other way to go on."""
        if residual != "exact":
            raise TrainingError(f"--residual {residual} is for optimizer=demo; {self._name} goes on exactly, or not at all")
        state = next(iter(states))
        saved, now = (state["num_replicas"], state["replica"]), (self._wire.num_replicas, self._wire.replica)
        if saved != now:
            raise TrainingError(
                f"the state is of replica {saved[1]} of {saved[0]}, this is replica {now[1]} of {now[0]}: with "
                f"optimizer={self._name} each replica has a state of its own, so start as many as there were"
            )
        device = self._flat.device
        for name, tensor in state["peer"].items():
            self.peer.state[name] = tensor.clone().to(self.peer.state[name].device if name in self.peer.state else "cpu")
        for place, optimizer in enumerate(self.peer.optimizers):
            with own_settings(optimizer):
                optimizer.load_state_dict(state["optimizers"][str(place)])
        if "parameters" in state:
            self._flat.set_values(state["parameters"].to(device))


def build_peer(config: OptimConfig, model: nn.Module, flat: Flat, replica: int, num_replicas: int) -> Peer:
    """The peer of this name."""
    groups = decay_groups(trained(model), config.weight_decay)
    if config.optimizer == "published-code":
        return _published_code(config, flat, groups, num_replicas)
    if config.optimizer in ("local-sgd", "diloco", "sparseloco"):
        return _local(config, flat, _adamw(config, groups, flat.device))
    if config.optimizer in ("topk", "randomk", "qsgd"):
        adamw = _adamw(config, groups, flat.device)
        if config.optimizer == "topk":
            return TopK(flat, adamw, config.density)
        return (
            RandomK(flat, adamw, config.density)
            if config.optimizer == "randomk"
            else QSGD(flat, adamw, config.levels, replica)
        )
    descent = Descent(groups, config.lr, has_lr=config.optimizer == "ef-signsgd")
    if config.optimizer == "dgc":
        return DeepGradientCompression(
            flat,
            descent,
            density=config.density,
            momentum=config.beta1,
            warmup_steps=config.dense_steps,
            largest_norm=config.clip / math.sqrt(num_replicas),
        )
    if config.optimizer == "signsgd":
        return SignSGD(flat, descent, config.beta1, replica)
    if config.optimizer == "ef-signsgd":
        return ErrorFeedbackSignSGD(flat, descent)
    assert config.optimizer == "onebit-adam"
    betas = (config.beta1, config.beta2)
    return OneBitAdam(flat, descent, betas=betas, dense_steps=config.dense_steps, num_replicas=num_replicas)


def _adamw(config: OptimConfig, groups: list[dict[str, Any]], device: torch.device) -> Optimizer:
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, config.lr, betas=betas, fused=device.type != "meta")


def _local(config: OptimConfig, flat: Flat, adamw: Optimizer) -> Peer:
    """The methods that synchronise every few steps."""
    if config.optimizer == "local-sgd":
        return LocalSGD(flat, adamw, config.local_steps)
    common: dict[str, Any] = {"local_steps": config.local_steps, "outer_lr": config.outer_lr}
    if config.optimizer == "diloco":
        return DiLoCo(flat, adamw, fragments=config.fragments, outer_momentum=config.outer_momentum, **common)
    return SparseLoCo(flat, adamw, topk=config.topk, chunk=config.chunk**2, **common)


def _published_code(config: OptimConfig, flat: Flat, groups: list[dict[str, Any]], num_replicas: int) -> Peer:
    try:
        from thinwire.peers.published_code import PublishedCode
    except ImportError:
        raise TrainingError(
            "optimizer=published-code needs the packages pytorch-optimizer and einops: pip install pytorch-optimizer einops"
        ) from None
    for name, parameter in (pair for group in groups for pair in group["params"]):
        if parameter.dim() not in (1, 2):
            raise TrainingError(
                f"optimizer=published-code handles vectors and matrices only, and {name} has the shape "
                f"{tuple(parameter.shape)}; use optimizer=published"
            )
    return PublishedCode(
        flat,
        [{**group, "params": [parameter for _, parameter in group["params"]]} for group in groups],
        lr=config.lr,
        decay=config.momentum_decay,
        topk=config.topk,
        chunk=config.chunk,
        num_replicas=num_replicas,
    )
