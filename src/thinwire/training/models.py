"""Models, built offline from `transformers` configurations. Nothing here is a model of our own."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.core.errors import check_choice, first_line
from thinwire.training.config import TrainConfig
from thinwire.training.errors import TrainingError
from thinwire.training.examples import Batch

TEXT_ARCHITECTURES = ("llama", "olmo", "gpt2")
IMAGE_ARCHITECTURES = ("vit", "resnet")


@dataclass(frozen=True)
class Sizes:
    """What the data decides about a model: tokens in the vocabulary, or classes and channels."""

    vocab_size: int = 0
    num_classes: int = 0
    num_channels: int = 0


def is_image_model(config: TrainConfig) -> bool:
    """Whether the model classifies images; else it continues text."""
    name = config.model.architecture
    if name in TEXT_ARCHITECTURES:
        return False
    if name in IMAGE_ARCHITECTURES:
        return True
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES

    return _read_config(name).model_type in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES


def build_model(config: TrainConfig, sizes: Sizes) -> nn.Module:
    """The model, on the current default device, with weights that depend on torch's random state."""
    from transformers import AutoModelForCausalLM, AutoModelForImageClassification

    kind: Any = AutoModelForImageClassification if is_image_model(config) else AutoModelForCausalLM
    name = config.model.architecture
    if name in TEXT_ARCHITECTURES or name in IMAGE_ARCHITECTURES:
        model_config = _own_config(config, sizes)
    else:
        model_config = _read_config(name)
        _check_fits(model_config, config, sizes)
    model: nn.Module = (
        _load_pretrained(kind, name) if config.model.pretrained else kind.from_config(model_config, dtype=torch.float32)
    )
    if config.model.activation_checkpointing:
        # Its name since transformers 5.22, and the one before.
        names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
        next(getattr(model, name) for name in names if hasattr(model, name))()
    return model


def loss_of(model: nn.Module, batch: Batch, reduction: str = "mean") -> tuple[Tensor, Tensor]:
    """Cross entropy in nats, in float32, and the logits."""
    output = model(batch.inputs, use_cache=False) if batch.targets.dim() == 2 else model(batch.inputs)
    logits = output.logits
    loss = nn.functional.cross_entropy(logits.float().flatten(0, -2), batch.targets.flatten(), reduction=reduction)
    return loss, logits


def num_parameters(model: nn.Module) -> int:
    """Trained elements, shared ones counted once."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def _own_config(config: TrainConfig, sizes: Sizes) -> Any:
    import transformers

    kind: Any
    model, data = config.model, config.data
    if model.pretrained:
        raise TrainingError(f"pretrained needs a model folder as --architecture, got {model.architecture!r}")
    mlp_width = model.mlp_width or 4 * model.width
    if model.architecture != "resnet" and model.width % model.heads:
        raise TrainingError(f"width={model.width} must be a multiple of heads={model.heads}")
    if model.architecture in ("llama", "olmo"):
        if model.width // model.heads % 2:
            raise TrainingError(
                f"width={model.width} must be an even multiple of heads={model.heads}: {model.architecture} turns pairs of "
                "numbers by their position"
            )
        kind = transformers.LlamaConfig if model.architecture == "llama" else transformers.OlmoConfig
        return kind(
            vocab_size=sizes.vocab_size,
            hidden_size=model.width,
            intermediate_size=mlp_width,
            num_hidden_layers=model.layers,
            num_attention_heads=model.heads,
            max_position_embeddings=data.sequence,
            tie_word_embeddings=model.tie_embeddings,
            **_NO_SPECIAL_TOKENS,
        )
    if model.architecture == "gpt2":
        kind = transformers.GPT2Config
        return kind(
            vocab_size=sizes.vocab_size,
            n_positions=data.sequence,
            n_embd=model.width,
            n_layer=model.layers,
            n_head=model.heads,
            n_inner=mlp_width,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            tie_word_embeddings=model.tie_embeddings,
            **_NO_SPECIAL_TOKENS,
        )
    return _image_config(config, sizes, mlp_width)


# Bytes and token shards have none, and the architectures' own numbers would name ordinary tokens.
_NO_SPECIAL_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def _image_config(config: TrainConfig, sizes: Sizes, mlp_width: int) -> Any:
    import transformers

    kind: Any
    model, data = config.model, config.data
    if model.architecture == "resnet":
        kind = transformers.ResNetConfig
        return kind(
            num_channels=sizes.num_channels,
            embedding_size=model.width,
            hidden_sizes=[model.width, 2 * model.width, 4 * model.width],
            depths=[model.layers] * 3,
            layer_type="basic",
            num_labels=sizes.num_classes,
        )
    if data.image_size % model.patch_size:
        raise TrainingError(f"image_size={data.image_size} must be a multiple of patch_size={model.patch_size}")
    kind = transformers.ViTConfig
    return kind(
        image_size=data.image_size,
        patch_size=model.patch_size,
        num_channels=sizes.num_channels,
        hidden_size=model.width,
        intermediate_size=mlp_width,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=sizes.num_classes,
    )


def _read_config(path: str) -> Any:
    from transformers import AutoConfig

    if not Path(path).exists():
        check_choice("architecture", path, (*TEXT_ARCHITECTURES, *IMAGE_ARCHITECTURES, "the path of a model folder"))
    try:
        # Code that lies beside a model is never run, and nothing is downloaded.
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise TrainingError(f"architecture={path!r} is not a model folder or config.json: {first_line(error)}") from error


def _load_pretrained(kind: Any, path: str) -> nn.Module:
    try:
        model: nn.Module = kind.from_pretrained(
            path, local_files_only=True, trust_remote_code=False, use_safetensors=True, dtype=torch.float32
        )
    except Exception as error:  # safetensors and transformers raise many kinds
        reason = first_line(error)
        raise TrainingError(f"architecture={path!r}: the weights cannot be loaded (safetensors only): {reason}") from error
    return model


def _check_fits(model_config: Any, config: TrainConfig, sizes: Sizes) -> None:
    name = config.model.architecture
    vocab_size = getattr(model_config, "vocab_size", None)
    if sizes.vocab_size and vocab_size is not None and sizes.vocab_size > vocab_size:
        raise TrainingError(
            f"the tokenizer {config.data.tokenizer!r} has {sizes.vocab_size} tokens, the model {name!r} has room for "
            f"{vocab_size}: they do not belong together"
        )
    longest = getattr(model_config, "max_position_embeddings", None)
    if sizes.vocab_size and longest is not None and config.data.sequence > longest:
        raise TrainingError(f"sequence={config.data.sequence} is longer than the {longest} positions of the model {name!r}")
    if sizes.num_classes:
        model_config.num_labels = sizes.num_classes
