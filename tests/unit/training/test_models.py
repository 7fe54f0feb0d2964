"""Models come from transformers configurations, offline."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from thinwire.training import recipes
from thinwire.training.config import DataConfig, ModelConfig, TrainConfig
from thinwire.training.errors import TrainingError
from thinwire.training.examples import Batch
from thinwire.training.models import Sizes, build_model, is_image_model, loss_of, num_parameters
from thinwire.training.shapes import build_on_meta, step_flops

TEXT = TrainConfig(model=ModelConfig(layers=1, width=32, heads=2), data=DataConfig(sequence=16))


def text(architecture: str, **options: object) -> TrainConfig:
    return replace(TEXT, model=replace(TEXT.model, architecture=architecture, **options))


def tokens(num_rows: int = 2, sequence: int = 16) -> Batch:
    return Batch(torch.randint(0, 256, (num_rows, sequence)), torch.randint(0, 256, (num_rows, sequence)))


@pytest.mark.parametrize("architecture", ["llama", "olmo", "gpt2"])
def test_text_models_are_causal(architecture: str) -> None:
    model = build_model(text(architecture), Sizes(vocab_size=256)).eval()
    batch = tokens()
    loss, logits = loss_of(model, batch)
    assert 4.5 < loss.item() < 6.5
    assert logits.shape == (2, 16, 256)
    changed = batch.inputs.clone()
    changed[:, 10:] = 0
    _, other = loss_of(model, Batch(changed, batch.targets))
    torch.testing.assert_close(other[:, :10], logits[:, :10])
    assert not torch.equal(other[:, 10:], logits[:, 10:])


@pytest.mark.parametrize(("name", "count"), [("paper-300m", 319_946_752), ("paper-1b", 1_176_764_416)])
def test_the_papers_shapes(name: str, count: int) -> None:
    assert num_parameters(build_on_meta(recipes.build(name))) == count


@pytest.mark.parametrize("name", ["vit", "cnn"])
def test_image_models(name: str) -> None:
    config = recipes.build(name)
    assert is_image_model(config)
    size = config.data.image_size
    model = build_model(config, Sizes(num_classes=10, num_channels=1))
    loss, logits = loss_of(model, Batch(torch.randn(4, 1, size, size), torch.arange(4)))
    assert logits.shape == (4, 10)
    loss.backward()
    assert step_flops(build_on_meta(config), config, 4) > 1e6


def test_a_model_folder_with_and_without_its_weights(tmp_path: Path) -> None:
    saved = build_model(text("llama"), Sizes(vocab_size=256))
    saved.save_pretrained(tmp_path)
    config = text(str(tmp_path))
    fresh = build_model(config, Sizes(vocab_size=256))
    loaded = build_model(text(str(tmp_path), pretrained=True), Sizes(vocab_size=256))
    assert num_parameters(fresh) == num_parameters(loaded) == num_parameters(saved)
    assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), loaded.parameters(), strict=True))
    assert not torch.equal(next(saved.parameters()), next(fresh.parameters()))
    assert num_parameters(build_on_meta(text(str(tmp_path / "config.json")))) == num_parameters(saved)


def test_parameters_are_float32_whatever_the_folder_says(tmp_path: Path) -> None:
    build_model(text("llama"), Sizes(vocab_size=256)).bfloat16().save_pretrained(tmp_path)
    for pretrained in (False, True):
        model = build_model(text(str(tmp_path), pretrained=pretrained), Sizes(vocab_size=256))
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_models_that_do_not_fit(tmp_path: Path) -> None:
    build_model(text("llama"), Sizes(vocab_size=256)).save_pretrained(tmp_path)
    with pytest.raises(TrainingError, match=r"has 512 tokens, the model .* has room for 256"):
        build_model(text(str(tmp_path)), Sizes(vocab_size=512))
    longer = replace(text(str(tmp_path)), data=DataConfig(sequence=64))
    with pytest.raises(TrainingError, match="sequence=64 is longer than the 16 positions"):
        build_model(longer, Sizes(vocab_size=256))
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(TrainingError, match="the weights cannot be loaded"):
        build_model(text(str(tmp_path), pretrained=True), Sizes(vocab_size=256))


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"architecture='lama' is not one of .*did you mean 'llama'"):
        build_model(text("lama"), Sizes(vocab_size=256))
    with pytest.raises(TrainingError, match="width=32 must be a multiple of heads=3"):
        build_model(text("llama", heads=3), Sizes(vocab_size=256))
    with pytest.raises(TrainingError, match="pretrained needs a model folder"):
        build_model(text("llama", pretrained=True), Sizes(vocab_size=256))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no such model"}))
    with pytest.raises(TrainingError, match=r"is not a model folder or config\.json"):
        build_model(text(str(tmp_path)), Sizes(vocab_size=256))
    vit = recipes.build("vit")
    with pytest.raises(TrainingError, match="image_size=8 must be a multiple of patch_size=3"):
        build_model(replace(vit, model=replace(vit.model, patch_size=3)), Sizes(num_classes=2, num_channels=1))


def test_activation_checkpointing_changes_nothing_but_memory() -> None:
    torch.manual_seed(0)
    plain = build_model(text("llama"), Sizes(vocab_size=256)).train()
    thrifty = build_model(text("llama", activation_checkpointing=True), Sizes(vocab_size=256)).train()
    thrifty.load_state_dict(plain.state_dict())
    batch = tokens()
    for model in (plain, thrifty):
        loss_of(model, batch)[0].backward()
    for here, there in zip(plain.parameters(), thrifty.parameters(), strict=True):
        torch.testing.assert_close(here.grad, there.grad)
    assert thrifty.is_gradient_checkpointing


def test_flops_of_text_are_six_per_parameter_and_token() -> None:
    config = recipes.build("paper-1b")
    flops = step_flops(build_on_meta(config), config, 1)
    assert 1.0 < flops / (6 * 1_176_764_416 * 2048) < 1.3
