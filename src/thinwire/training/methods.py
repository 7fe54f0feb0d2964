"""How replicas train together: DeMo, an optimizer whose gradients DDP averages, or a peer. The loop sees only `Method`."""

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from thinwire.drift import DriftCheck
from thinwire.exchange.traffic import Traffic
from thinwire.exchange.transport import Transport
from thinwire.optimizer import DeMo
from thinwire.parallel.dense import HOOKS, AveragedModel
from thinwire.parallel.power_sgd import PowerSGD
from thinwire.parallel.shaped import ShapedLink, link_of
from thinwire.redistribution import assemble
from thinwire.training.compressed import Compressed
from thinwire.training.config import DECOUPLED_OPTIMIZERS, PEERS, OptimConfig, ScheduleConfig
from thinwire.training.errors import TrainingError
from thinwire.training.exchanges import settle_exchange
from thinwire.training.galore import galore
from thinwire.training.groups import decay_groups, decoupled_groups, split_for_muon, split_matrices, trained
from thinwire.training.settings import clip_, own_settings, parameters_of, set_lrs


class Method(Protocol):
    """One replica's way to take steps."""

    model: nn.Module
    """What the loop calls, and calls backward on."""
    traffic: Traffic
    drift: DriftCheck | None
    """What looks after replicas that must hold the same, if anything does."""
    state_is_shared: bool
    """Whether all replicas have the same optimizer state, so that one copy of it is enough."""
    waits_in: str
    """The phase in which it waits for the others: backward or optimizer."""

    def start_step(self, lr_share: float) -> None:
        """Called first in a step: makes every learning rate this share of its peak."""
        ...

    def accumulating(self) -> AbstractContextManager[Any]:
        """A context for the backward passes of all micro-batches but the last."""
        ...

    def after_backward(self, largest_norm: float) -> None:
        """Called once between the last backward and `step`: clips the gradients to this norm, unless it is 0."""
        ...

    def step(self) -> None:
        """Change the parameters, the same way on every replica, and forget the gradients."""
        ...

    def drain(self) -> None:
        """Apply what is still under way, before the model is scored or saved."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs."""
        ...

    def load_state_dict(self, states: Iterable[dict[str, Any]], residual: str) -> None:
        """Go on from this rank's own state, if ``residual`` is exact or there is only one; else from those of all ranks, see
        `thinwire.redistribution.assemble`."""
        ...


def build_method(
    config: OptimConfig,
    model: nn.Module,
    callable_model: nn.Module,
    transport: Transport,
    islands: dict[str, Any] | None = None,
) -> Method:
    """``callable_model`` is ``model`` itself or its compiled form; ``transport`` reaches the other replicas, unless
    ``islands`` are options of DeMo that do."""
    if config.optimizer in DECOUPLED_OPTIMIZERS:
        return Decoupled(config, model, callable_model, transport, islands)
    if config.optimizer in PEERS:
        return Compressed(config, model, callable_model, transport)
    return Averaged(config, model, callable_model, transport.num_replicas, link_of(transport))


def lr_share(config: ScheduleConfig, step: int) -> float:
    """The share of the peak learning rate at a step, the first being 0."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    progress = (step - config.warmup_steps) / max(1, config.steps - 1 - config.warmup_steps)
    falling = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * min(1.0, progress))) / 2
    return config.final_lr_share + (1 - config.final_lr_share) * falling


class Decoupled:
    """DeMo: each replica's own gradients, and what it exchanges is the optimizer's affair."""

    drift: DriftCheck | None
    state_is_shared, waits_in = False, "optimizer"

    def __init__(
        self,
        config: OptimConfig,
        model: nn.Module,
        callable_model: nn.Module,
        transport: Transport,
        islands: dict[str, Any] | None = None,
    ) -> None:
        self.model = callable_model
        groups = decoupled_groups(config, model)
        common: dict[str, Any] = {"momentum_decay": config.momentum_decay, "chunk": config.chunk, "topk": config.topk}
        link = link_of(transport)
        if config.optimizer == "published":
            self.optimizer = DeMo.published(groups, config.lr, **common, transport=transport)
        else:
            self.optimizer = DeMo(
                groups,
                config.lr,
                **common,
                balance=config.balance,
                update=config.update,
                values=config.values,
                combine=config.combine,
                clip_to_median=config.clip_to_median,
                exact_decode=config.exact_decode,
                check_drift_every=config.check_drift_every,
                on_drift=config.on_drift,
                on_nonfinite=config.on_nonfinite,
                on_bad_payload=config.on_bad_payload,
                exchange=settle_exchange(config, model, transport.num_replicas, None if link is None else link.spec.link),
                owner_topk=config.owner_topk or None,
                betas=(config.beta1, config.beta2),
                **(islands or {"transport": transport}),
                backend=config.kernels,
                overlap=config.overlap,
                delay=config.delay,
                look_ahead=config.look_ahead,
            )
        self.traffic, self.drift = self.optimizer.traffic, self.optimizer.drift
        self._peaks = [group["lr"] for group in self.optimizer.param_groups]

    def start_step(self, lr_share: float) -> None:
        """Set all learning rates."""
        set_lrs([self.optimizer], [self._peaks], lr_share)

    def accumulating(self) -> AbstractContextManager[Any]:
        """Hold the exchange back, if it would begin during backward."""
        return self.optimizer.accumulate()

    def after_backward(self, largest_norm: float) -> None:
        """Clip what `step` will see."""
        clip_(parameters_of([self.optimizer]), largest_norm)

    def step(self) -> None:
        """Step, then drop the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def drain(self) -> None:
        """Apply what a delayed exchange brings."""
        self.optimizer.drain()

    def state_dict(self) -> dict[str, Any]:
        """The optimizers' own."""
        return self.optimizer.state_dict()

    def load_own(self, state: dict[str, Any], has_residual: bool) -> None:
        """Before meeting the others: what this replica would start from by itself."""
        with own_settings(self.optimizer):
            self.optimizer.load_state_dict(state, residual="keep" if has_residual else "zero")

    def load_state_dict(self, states: Iterable[dict[str, Any]], residual: str) -> None:
        """The optimizer's own, or one made from several."""
        state = next(iter(states)) if residual == "exact" else assemble(self.optimizer, states, residual)
        with own_settings(self.optimizer):
            self.optimizer.load_state_dict(state)


class Averaged:
    """Any optimizer of torch's kind, on gradients averaged by DDP; alone, without DDP."""

    drift: DriftCheck | None = None
    state_is_shared, waits_in = True, "backward"

    def __init__(
        self,
        config: OptimConfig,
        model: nn.Module,
        callable_model: nn.Module,
        num_replicas: int,
        link: ShapedLink | None = None,
    ) -> None:
        self.model = callable_model
        self._averaged: AveragedModel | None = None
        self._power_sgd: PowerSGD | None = None
        if num_replicas > 1:
            if config.optimizer == "powersgd":
                if any(parameter.dim() == 0 for _, parameter in trained(model)):
                    raise TrainingError(
                        "optimizer=powersgd is torch's hook, which takes no scalars, and this model has some"
                    )
                self._power_sgd = PowerSGD(model, config.rank, config.dense_steps)
                self.state_is_shared = False
            hook = self._power_sgd or HOOKS.get(config.optimizer)
            device, bucket_mb = next(model.parameters()).device, config.bucket_mb or None
            self._averaged = AveragedModel(callable_model, device, hook, link, bucket_mb)
            self.model = self._averaged
        self.traffic = self._averaged.traffic if self._averaged else Traffic()
        self._optimizers = averaged_optimizers(config, model)
        self._peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in self._optimizers]

    def start_step(self, lr_share: float) -> None:
        """Set all learning rates, and count the traffic of a new step."""
        set_lrs(self._optimizers, self._peaks, lr_share)
        self.traffic.start_step()

    def accumulating(self) -> AbstractContextManager[Any]:
        """Hold DDP's averaging back, where there is any."""
        return self._averaged.ddp.no_sync() if self._averaged else nullcontext()

    def after_backward(self, largest_norm: float) -> None:
        """Clip what `step` will see."""
        if self._averaged:
            self._averaged.count_wait()
        clip_(parameters_of(self._optimizers), largest_norm)

    def step(self) -> None:
        """Step, then drop the gradients."""
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def drain(self) -> None:
        """Nothing is under way."""

    def state_dict(self) -> dict[str, Any]:
        """The optimizers' own, and what PowerSGD keeps on this replica."""
        state: dict[str, Any] = {str(place): optimizer.state_dict() for place, optimizer in enumerate(self._optimizers)}
        return state if self._power_sgd is None else {**state, "powersgd": self._power_sgd.state_dict()}

    def load_state_dict(self, states: Iterable[dict[str, Any]], residual: str) -> None:
        """The optimizers' own, the same on all replicas."""
        state = next(iter(states))
        if self._power_sgd is not None:
            self._power_sgd.load_state_dict(state["powersgd"])
        for place, optimizer in enumerate(self._optimizers):
            with own_settings(optimizer):
                optimizer.load_state_dict(state[str(place)])


def averaged_optimizers(config: OptimConfig, model: nn.Module) -> list[Optimizer]:
    """What steps on averaged gradients: one optimizer, or two for different parameters."""
    named, decay = trained(model), config.weight_decay
    if config.optimizer == "sgd":
        return [torch.optim.SGD(decay_groups(named, decay), config.lr, momentum=config.beta1, fused=True)]
    betas = (config.beta1, config.beta2)
    if config.optimizer in ("adamw", "adamw-bf16", "adamw-fp16", "powersgd"):
        return [torch.optim.AdamW(decay_groups(named, decay), config.lr, betas=betas, fused=True)]
    if config.optimizer == "lion":
        return [_lion()(decay_groups(named, decay), lr=config.lr, betas=betas)]
    if config.optimizer == "galore":
        hidden, rest = split_matrices(model)
        return [galore(hidden, decay_groups(rest, decay), config.rank, decay, lr=config.lr, betas=betas)]
    hidden, rest = split_for_muon(model)
    # With steps of AdamW's size, one learning rate serves the hidden matrices and the rest.
    muon = torch.optim.Muon(hidden, config.lr, weight_decay=decay, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(decay_groups(rest, decay), config.lr, betas=betas, fused=True)]


def _lion() -> Any:
    try:
        from pytorch_optimizer import Lion
    except ImportError:
        raise TrainingError("optimizer=lion needs the package pytorch-optimizer: pip install pytorch-optimizer") from None
    return Lion
