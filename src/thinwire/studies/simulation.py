"""R virtual replicas on one device: a training as `thinwire train --replicas R` would do it, without processes.

Every replica has its own examples and momentum; layout, codecs, combination, owners and update are the optimizer's own. What
is the same on all replicas is there once: the parameters, the state of the update rule, and the owners, of which one has all
chunks, since no chunk knows of another. On a CPU the result is that of R processes, bit for bit.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.core.combine import Decoding
from thinwire.core.errors import NonFiniteGradientError
from thinwire.exchange.choice import OWNER
from thinwire.exchange.plan import ExchangePlan, Stack, stack_records, with_owners
from thinwire.exchange.slices import clear_
from thinwire.exchange.transport import SoloTransport
from thinwire.local_step import Encoding, LocalStep
from thinwire.optimizer import DeMo
from thinwire.ownership import OwnedStack
from thinwire.parallel.dense import HOOKS
from thinwire.planner import owners as planned_owners
from thinwire.planning import group_step
from thinwire.routes import for_answers
from thinwire.slabs import LocalTensor
from thinwire.stack_step import GroupStep
from thinwire.studies.gradients import Gradients, autocast, can_be_batched, gradients_of
from thinwire.studies.weather import Weather
from thinwire.training.config import DECOUPLED_OPTIMIZERS, UNSHARED_OPTIMIZERS, TrainConfig, check
from thinwire.training.errors import TrainingError
from thinwire.training.evaluation import Score, evaluate
from thinwire.training.examples import Batch, Examples, Order
from thinwire.training.job import Data, load_data, seed_everything, sizes_of
from thinwire.training.methods import Decoupled, averaged_optimizers, build_method, lr_share
from thinwire.training.models import build_model, num_parameters
from thinwire.training.settings import set_lrs
from thinwire.wire.payload import PROBLEM_WORD

_CALM = Weather()
_TROUBLE = "a gradient has NaN or Inf in it: the training has failed"
# On a GPU both take the same time for 8 replicas (benchmarks/simulator_speed.py); with more, each pass has less to do.
_LEAST_BATCHED = 16
# Examples that are brought to the device together.
_BLOCK = 4096

Watcher = Callable[[int, LocalStep], None]
"""Sees, and may change, what a replica has kept after it has sent: the replica, and its step."""


class Simulation:
    """A training. ``apart`` gives each replica a part of the data of its own, from one end to the other, instead of a share
    of every pass. ``batched`` says how gradients are computed; None takes what is faster where both give the same."""

    def __init__(
        self,
        config: TrainConfig,
        num_replicas: int,
        device: torch.device,
        weather: Weather = _CALM,
        apart: bool = False,
        batched: bool | None = None,
        data: Data | None = None,
    ) -> None:
        check(config, num_replicas)
        self._config, self._device = config, device
        self._data = data or load_data(config)
        train = self._data.train
        self._train, self._validation = (
            train if isinstance(train, OnDevice) else OnDevice(train, device),
            self._data.validation,
        )
        seed_everything(config.run.seed)
        self.model = build_model(config, sizes_of(self._data)).to(device).train()
        self._num_parts = num_replicas if apart else 1
        sizes = (len(self._train) // self._num_parts, config.schedule.batch // self._num_parts)
        self._order = Order(*sizes, 0, 1, config.run.seed)
        self.step = 0
        is_decoupled = config.optim.optimizer in DECOUPLED_OPTIMIZERS
        num_passes = num_replicas if is_decoupled else 1
        if batched is None:
            batched = device.type == "cuda" and num_passes >= _LEAST_BATCHED and can_be_batched(self.model)
        self.gradients = gradients_of(self.model, config, num_passes, batched)
        self.method: VirtualReplicas | VirtualAverage
        if is_decoupled:
            self.method = VirtualReplicas(self.model, config, num_replicas, weather)
        else:
            self.method = VirtualAverage(self.model, config, num_replicas)

    @property
    def passes(self) -> float:
        """How often the data has been seen."""
        return self.step * self._order.batch / self._order.num_examples

    @torch.no_grad()
    def take_step(self) -> None:
        """One step of all replicas."""
        self.gradients.start_(self._train.fetch(self._indices()))
        self.method.take_step(self.gradients, self.step, lr_share(self._config.schedule, self.step))
        self.step += 1

    def _indices(self) -> "np.ndarray[Any, Any]":
        """Of the examples of this step, in the replicas' order."""
        mine = self._order.indices(self.step * self._order.batch)
        return np.concatenate([mine + part * self._order.num_examples for part in range(self._num_parts)])

    def score(self) -> Score:
        """Of the parameters as they are, with nothing under way."""
        self.method.drain()
        examples, batch = self._config.run.eval_examples, self._config.schedule.batch
        solo, context = SoloTransport(), autocast(self._config, self._device)
        return evaluate(self.model, self._validation, examples, batch, solo, self._device, context)


class OnDevice:
    """Examples that all lie on the device."""

    def __init__(self, examples: Examples, device: torch.device) -> None:
        number, self._device = len(examples), device
        blocks = (np.arange(first, min(number, first + _BLOCK)) for first in range(0, number, _BLOCK))
        parts = [examples.fetch(block).to(device) for block in blocks]
        self._everything = Batch(torch.cat([part.inputs for part in parts]), torch.cat([part.targets for part in parts]))

    def __len__(self) -> int:
        return len(self._everything.targets)

    def fetch(self, indices: "np.ndarray[Any, Any]") -> Batch:
        """The examples with these numbers."""
        rows = torch.from_numpy(indices)
        if self._device.type == "cuda":
            rows = rows.pin_memory().to(self._device, non_blocking=True)  # else the host would wait for the GPU
        return Batch(self._everything.inputs[rows], self._everything.targets[rows])


@dataclass(frozen=True)
class Sent:
    """What replicas have sent at a step, and the settings of that step."""

    payloads_RB: Tensor
    groups: Sequence[GroupStep]


class VirtualReplicas:
    """DeMo among R replicas."""

    def __init__(self, model: torch.nn.Module, config: TrainConfig, num_replicas: int, weather: Weather = _CALM) -> None:
        self.optimizer = _optimizer(model, config)
        self._peaks = [group["lr"] for group in self.optimizer.param_groups]
        self._decoding: Decoding = self.optimizer._decoding
        self._num_replicas, self._weather = num_replicas, weather
        self._delay = config.optim.delay
        self._under_way: deque[Sent] = deque()
        self._backend = config.optim.kernels
        self._prepare([self._first_tensors() for _ in range(num_replicas)])
        self.owner: VirtualOwner | None = None
        if config.optim.exchange == OWNER and num_replicas > 1:
            owner_topk = config.optim.owner_topk or None
            self.owner = VirtualOwner(self.optimizer.plan, self.replicas[0].tensors, owner_topk, self._backend)
        self.watchers: list[Watcher] = []
        self.returned = 0.0
        """The share of what a replica has sent that goes back into its momentum."""
        self.keeps_errors = True
        """Whether what the codec rounded away stays in the momentum."""
        self._has_trouble = torch.zeros((), dtype=torch.bool, device=self.payloads_RB.device)

    def _first_tensors(self) -> list[LocalTensor]:
        """Of one replica: what it keeps for itself is 0, and all else is there once."""
        return [_with_own(one) for one in self.optimizer._local.tensors]

    def _prepare(self, tensors: Sequence[Sequence[LocalTensor]]) -> None:
        """Steps and room for the optimizer's plan, for the tensors of each replica."""
        plan = self.optimizer.plan
        (self._bucket,) = plan.buckets
        self.replicas = [LocalStep(plan, mine, self._backend, self._decoding) for mine in tensors]
        room = self.replicas[0].empty(self._bucket, 0, self._num_replicas)
        self.payloads_RB = room.payloads_RB
        self._rooms = [Encoding(self.payloads_RB, r, room.findings_RW, room.told_RW) for r in range(self._num_replicas)]

    def set_topk(self, topk: int) -> None:
        """Send another number of coefficients from now on, as an optimizer does whose groups are given another ``topk``."""
        assert not self._delay
        assert self.owner is None
        for group in self.optimizer.param_groups:
            group["topk"] = topk
        self.optimizer._refresh()
        self._prepare([local.tensors for local in self.replicas])

    @property
    def sent_bytes(self) -> int:
        """Of one replica, per step, as `DeMo.traffic` counts it: its payload, or slices to all owners and its answer."""
        if self.owner is None:
            return self.optimizer.plan.payload_bytes
        sizes = planned_owners.sizes_of(self.optimizer.plan, self._num_replicas, self.owner.topk)
        return sizes.slice_bytes * (self._num_replicas - 1) + sizes.answer_bytes

    def take_step(self, gradients: Gradients, step: int, lr_share: float) -> None:
        """Let all replicas that are there send, and apply what is due."""
        set_lrs([self.optimizer], [self._peaks], lr_share)
        groups = [group_step(group, None, len(self._under_way)) for group in self.optimizer.param_groups]
        present, lost = self._weather.draw(step, self._num_replicas)
        self.payloads_RB.zero_()
        for replica in present:
            gradients.take_(replica)
            self._encode(replica, groups, is_lost=replica in lost)
        self._has_trouble |= self.payloads_RB.view(torch.int64)[:, PROBLEM_WORD].any()  # the kernels' remarks
        arrived = [replica for replica in present if replica not in lost]
        payloads_RB = self.payloads_RB if len(arrived) == self._num_replicas else self.payloads_RB[arrived]
        self._under_way.append(Sent(payloads_RB.clone() if self._delay else payloads_RB, groups))
        if len(self._under_way) > self._delay:
            self._apply(self._under_way.popleft())

    def _encode(self, replica: int, groups: Sequence[GroupStep], is_lost: bool) -> None:
        local, room = self.replicas[replica], self._rooms[replica]
        room.reset()
        if "torch" in local.backends:
            _check_finite([tensor.gradient for tensor in local.tensors])
        local.encode_(self._bucket, groups, room)
        if is_lost or self.returned or not self.keeps_errors:
            self._leave(local, room, is_lost)
        for stack in self._bucket.stacks:
            local.steps[stack].forget()
        for watch in self.watchers:
            watch(replica, local)

    def _leave(self, local: LocalStep, room: Encoding, is_lost: bool) -> None:
        """Leave in the momenta what `returned` and `keeps_errors` say; all of it where the payload was lost."""
        usual = [tensor.momentum_CE.clone() for tensor in local.tensors]
        local.keep_units(room)
        local.give_back_(room)
        if is_lost:
            return
        # A dense tensor sends a share of all its elements: what stays of them is not an error.
        for stack in (stack for stack in self._bucket.stacks if stack.share == 1 and not self.keeps_errors):
            indices_CK, _ = stack.codec.decode(stack_records(room.payload_B, stack))
            for entry in stack.entries:
                sent_CK = indices_CK[entry.first_chunk :][: entry.layout.num_chunks]
                # What is void has the number of elements as its index.
                room_CE = torch.nn.functional.pad(usual[entry.tensor], (0, 1)).scatter_(1, sent_CK, 0.0)
                usual[entry.tensor].copy_(room_CE[:, :-1])
        for tensor, left_CE in zip(local.tensors, usual, strict=True):
            tensor.momentum_CE.lerp_(left_CE, 1 - self.returned)

    def _apply(self, sent: Sent) -> None:
        if self.owner is None:
            self.replicas[0].apply_(self._bucket, sent.groups, sent.payloads_RB, self._decoding)
        else:
            self.owner.apply_(sent, self._decoding)
        for group in self.optimizer.param_groups:
            group["num_steps"] += 1

    @torch.no_grad()
    def drain(self) -> None:
        """Apply all that is under way."""
        if bool(self._has_trouble):
            raise NonFiniteGradientError(_TROUBLE)
        while self._under_way:
            self._apply(self._under_way.popleft())


class VirtualOwner:
    """The owners of all chunks."""

    def __init__(self, plan: ExchangePlan, tensors: Sequence[LocalTensor], topk: int | None, backend: str) -> None:
        self.topk = topk
        answers = with_owners(plan, topk).answers
        assert answers is not None
        (self._bucket,) = answers.buckets
        (asked,) = plan.buckets
        self._local = LocalStep(answers, tensors, backend)
        self._answer_B = self._local.empty(self._bucket).payload_B
        pairs = zip(asked.stacks, self._bucket.stacks, strict=True)
        self.owned = [_owned(*pair, self._answer_B.device) for pair in pairs]

    def apply_(self, sent: Sent, decoding: Decoding) -> None:
        """Combine, answer, and apply the answer."""
        clear_(self._answer_B, self._bucket)
        for stack, owned in zip(self._bucket.stacks, self.owned, strict=True):
            owned.answer_(sent.payloads_RB, decoding, sent.groups[stack.group].decay, self._answer_B)
            owned.commit_()
        self._local.apply_(self._bucket, sent.groups, self._answer_B[None], for_answers(decoding))


def _with_own(shared: LocalTensor) -> LocalTensor:
    energies = shared.energies and (torch.zeros_like(shared.energies[0]), torch.zeros_like(shared.energies[1]))
    return replace(shared, momentum_CE=torch.zeros_like(shared.momentum_CE), energies=energies)


def _check_finite(gradients: Sequence[Tensor | None]) -> None:
    if not all(bool(torch.isfinite(gradient).all()) for gradient in gradients if gradient is not None):
        raise NonFiniteGradientError(_TROUBLE)


def _owned(asked: Stack, answer: Stack, device: torch.device) -> OwnedStack:
    return OwnedStack(asked, answer, [torch.zeros(asked.num_chunks, asked.codec.num_elements, device=device)])


class VirtualAverage:
    """An optimizer on gradients that are averaged in full: all replicas together are one with all the examples."""

    def __init__(self, model: torch.nn.Module, config: TrainConfig, num_replicas: int) -> None:
        if config.optim.optimizer in (*UNSHARED_OPTIMIZERS, *HOOKS):
            raise TrainingError(f"optimizer={config.optim.optimizer} is not simulated: use thinwire train --replicas")
        self._optimizers = averaged_optimizers(config.optim, model)
        self._peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in self._optimizers]
        self._num_elements, self._num_replicas = num_parameters(model), num_replicas

    @property
    def sent_bytes(self) -> int:
        """Of one replica, per step: a ring all-reduce of bfloat16 gradients."""
        return math.ceil(2 * 2 * self._num_elements * (self._num_replicas - 1) / self._num_replicas)

    def take_step(self, gradients: Gradients, step: int, lr_share: float) -> None:
        """One step on the mean gradient, whose norm is what is clipped."""
        set_lrs(self._optimizers, self._peaks, lr_share)
        gradients.take_(0)
        for optimizer in self._optimizers:
            optimizer.step()

    def drain(self) -> None:
        """Nothing is under way."""


def _optimizer(model: torch.nn.Module, config: TrainConfig) -> DeMo:
    """The optimizer of one replica alone, whose plan all share."""
    alone = replace(config.optim, exchange="all_gather", delay=0, overlap=False, look_ahead=False, check_drift_every=0)
    method = build_method(alone, model, model, SoloTransport())
    assert isinstance(method, Decoupled)
    return method.optimizer
