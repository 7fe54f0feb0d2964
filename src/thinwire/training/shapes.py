"""Models without their weights: shapes and costs, from a configuration alone."""

from dataclasses import replace

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from thinwire.exchange.plan import TensorSpec
from thinwire.training.config import TrainConfig
from thinwire.training.examples import Batch
from thinwire.training.models import Sizes, build_model, is_image_model, loss_of
from thinwire.training.text import vocab_size_of

# Only shapes count here; the number of classes hardly changes them.
_USUAL_CLASSES, _USUAL_CHANNELS = 10, 1


def build_on_meta(config: TrainConfig) -> nn.Module:
    """The model with parameters that have shapes but no memory, and no data read."""
    config = replace(config, model=replace(config.model, pretrained=False))
    with torch.device("meta"):
        return build_model(config, _usual_sizes(config))


def _usual_sizes(config: TrainConfig) -> Sizes:
    if is_image_model(config):
        channels = _USUAL_CHANNELS if config.data.dataset == "digits" else 3
        return Sizes(num_classes=_USUAL_CLASSES, num_channels=channels)
    return Sizes(vocab_size=vocab_size_of(config.data))


def specs_of(model: nn.Module) -> list[TensorSpec]:
    """The trained parameters, as the plan wants them."""
    return [
        TensorSpec(name, tuple(parameter.shape), str(parameter.dtype), 0)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]


def step_flops(model: nn.Module, config: TrainConfig, num_examples: int) -> float:
    """Floating-point operations of forward and backward over so many examples; backward counts twice a forward."""
    forward = _image_flops(model, config) if is_image_model(config) else _text_flops(model, config)
    return 3.0 * forward * num_examples


def _image_flops(model: nn.Module, config: TrainConfig) -> float:
    size, channels = config.data.image_size, _usual_sizes(config).num_channels
    batch = Batch(torch.empty(1, channels, size, size, device="meta"), torch.zeros(1, dtype=torch.long, device="meta"))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        loss_of(model.eval(), batch)
    return float(counter.get_total_flops())


def _text_flops(model: nn.Module, config: TrainConfig) -> float:
    """2 per token and element of a matrix, and 4 * S * width per token and layer for the scores and sums of attention.

    Counted by hand: the causal masks of transformers read values, which parameters without memory do not have.
    """
    tokens, sizes = config.data.sequence, model.config
    matrices = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() >= 2)
    if not sizes.tie_word_embeddings:  # type: ignore[union-attr]
        matrices -= model.get_input_embeddings().weight.numel()  # type: ignore[operator]
    attention = 4 * tokens * int(sizes.hidden_size) * int(sizes.num_hidden_layers)  # type: ignore[union-attr, arg-type]
    return float(tokens * (2 * matrices + attention))
