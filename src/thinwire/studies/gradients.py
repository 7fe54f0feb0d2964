"""The gradients of R virtual replicas of one model: one after the other, or all in one batched pass.

On a GPU either is captured once as a CUDA graph and replayed, since a small model would wait for Python otherwise.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from thinwire.training.config import TrainConfig
from thinwire.training.examples import Batch
from thinwire.training.models import loss_of
from thinwire.training.settings import clip_

_WARM_UPS = 3
_PLAIN = "thinwire_plain"


class Gradients(Protocol):
    """Where the gradients of a step come from."""

    def start_(self, batch: Batch) -> None:
        """Begin a step with the examples of all replicas, in the replicas' order."""
        ...

    def take_(self, replica: int) -> None:
        """Let every parameter's gradient be this replica's, clipped."""
        ...


def gradients_of(model: nn.Module, config: TrainConfig, num_replicas: int, batched: bool) -> Gradients:
    """One of the two."""
    return Batched(model, config, num_replicas) if batched else Looped(model, config, num_replicas)


def can_be_batched(model: nn.Module) -> bool:
    """Batch norms change their buffers as they go, and cannot."""
    return not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


def autocast(config: TrainConfig, device: torch.device) -> AbstractContextManager[Any]:
    """The precision that the configuration asks for."""
    # A graph cannot keep casts from one replay to the next.
    is_on = config.model.precision == "bfloat16"
    return torch.autocast(device.type, torch.bfloat16, enabled=is_on, cache_enabled=device.type == "cpu")


class Looped:
    """A forward and a backward pass per replica."""

    def __init__(self, model: nn.Module, config: TrainConfig, num_replicas: int) -> None:
        self._config, self._num_replicas = config, num_replicas
        compiled: Any = torch.compile(model) if config.model.compile else model
        self._model: nn.Module = compiled
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._device = self._parameters[0].device
        self._replay: Replay | None = None
        self._parts: list[Batch] = []

    def start_(self, batch: Batch) -> None:
        """See `Gradients`."""
        inputs, targets = batch.inputs.chunk(self._num_replicas), batch.targets.chunk(self._num_replicas)
        self._parts = [Batch(*pair) for pair in zip(inputs, targets, strict=True)]

    def take_(self, replica: int) -> None:
        """See `Gradients`."""
        part = self._parts[replica]
        if self._device.type != "cuda":
            self._compute(part)
            return
        if self._replay is None:
            self._replay = Replay(self._compute, part)
        self._replay(part)

    def _compute(self, batch: Batch) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        with torch.enable_grad():
            with autocast(self._config, self._device):
                loss, _ = loss_of(self._model, batch)
            loss.backward()
        clip_(self._parameters, self._config.optim.clip)


class Batched:
    """One pass for all replicas: what is a matrix product with the weights becomes one product per replica in backward."""

    def __init__(self, model: nn.Module, config: TrainConfig, num_replicas: int) -> None:
        self._model, self._config, self._num_replicas = model, config, num_replicas
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._device = next(iter(self._parameters.values())).device
        self._replay: Replay | None = None
        self._found: dict[str, Tensor] = {}
        _use_plain_attention(model)

    def start_(self, batch: Batch) -> None:
        """See `Gradients`."""
        if self._device.type != "cuda":
            self._compute(batch)
            return
        if self._replay is None:
            self._replay = Replay(self._compute, batch)
        self._replay(batch)

    def take_(self, replica: int) -> None:
        """See `Gradients`."""
        for name, parameter in self._parameters.items():
            parameter.grad = self._found[name][replica]

    def _compute(self, batch: Batch) -> None:
        def loss_at(parameters: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
            with autocast(self._config, self._device):
                return loss_of(_Called(self._model, parameters), Batch(inputs, targets))[0]  # type: ignore[arg-type]

        values = {name: parameter.detach() for name, parameter in self._parameters.items()}
        shares = [part.unflatten(0, (self._num_replicas, -1)) for part in (batch.inputs, batch.targets)]
        self._found = vmap(grad(loss_at), in_dims=(None, 0, 0))(values, *shares)
        if self._config.optim.clip > 0:
            self._clip_()

    def _clip_(self) -> None:
        """To the largest norm, each replica for itself, as torch's clip_grad_norm_ does."""
        squares = [found.flatten(1).square().sum(dim=1) for found in self._found.values()]
        norms_R = torch.stack(squares).sum(dim=0).sqrt()
        factors_R = (self._config.optim.clip / (norms_R + 1e-6)).clamp(max=1.0)
        for found in self._found.values():
            found.mul_(factors_R.view(-1, *(1,) * (found.dim() - 1)))


def _use_plain_attention(model: nn.Module) -> None:
    """In place of fused attention, which cannot be batched once more, nor its mask be made inside a graph."""
    from transformers import AttentionInterface, PreTrainedModel

    if isinstance(model, PreTrainedModel):
        AttentionInterface.register(_PLAIN, _attend)
        model.set_attn_implementation(_PLAIN)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: object, scaling: float | None = None, **_: Any
) -> tuple[Tensor, None]:
    """Attention over all that came before, or over all, as the module wants it. (B, H, S, D) to (B, S, H, D)."""
    scores = query @ key.mT * (scaling or query.shape[-1] ** -0.5)
    if getattr(module, "is_causal", False):
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
    return (weights @ value).transpose(1, 2).contiguous(), None


class _Called:
    """A model with other parameters, to be called like a model."""

    def __init__(self, model: nn.Module, parameters: dict[str, Tensor]) -> None:
        self._model, self._parameters = model, parameters

    def __call__(self, *inputs: Tensor, **options: Any) -> Any:
        return functional_call(self._model, self._parameters, inputs, options)


class Replay:
    """A CUDA graph of a function of a batch; what it computes, stays where it was when the graph was made."""

    def __init__(self, compute: Callable[[Batch], None], like: Batch) -> None:
        self._batch = Batch(like.inputs.clone(), like.targets.clone())
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                compute(self._batch)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            compute(self._batch)

    def __call__(self, batch: Batch) -> None:
        """Compute for another batch."""
        self._batch.inputs.copy_(batch.inputs)
        self._batch.targets.copy_(batch.targets)
        self._graph.replay()
