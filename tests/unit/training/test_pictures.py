"""Image data: the digits, folders, and Hugging Face datasets."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from thinwire.training.config import DataConfig
from thinwire.training.errors import TrainingError
from thinwire.training.pictures import load_images


def draw(path: Path, colour: tuple[int, int, int]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (12, 10), colour).save(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(10):
        draw(tmp_path / "set" / "red" / f"{number}.png", (255, 0, 0))
        draw(tmp_path / "set" / "blue" / f"{number}.png", (0, 0, 255))
    return tmp_path / "set"


def test_digits_need_no_download() -> None:
    data = load_images(DataConfig(dataset="digits", image_size=16, validation=0.2))
    assert (len(data.train), len(data.validation), data.num_classes, data.num_channels) == (1438, 359, 10, 1)
    batch = data.train.fetch(np.arange(1438))
    assert batch.inputs.shape == (1438, 1, 16, 16)
    assert -1 <= float(batch.inputs.min()) < float(batch.inputs.max()) <= 1
    assert torch.bincount(batch.targets).min() > 100


def test_a_folder_per_class(folder: Path) -> None:
    data = load_images(DataConfig(dataset=str(folder), image_size=4, validation=0.2))
    assert (len(data.train), len(data.validation), data.num_classes, data.num_channels) == (16, 4, 2, 3)
    batch = data.train.fetch(np.arange(16))
    red, blue = batch.inputs[:, 0, 0, 0], batch.inputs[:, 2, 0, 0]
    assert torch.equal(batch.targets, (red > blue).long())  # classes are in the order of their names: blue, red


def test_hidden_files_are_no_images_and_names_need_not_be_utf_8(folder: Path) -> None:
    (folder / "red" / "._0.png").write_bytes(b"what a system left")
    (folder / "red" / ".cache").mkdir()
    draw(folder / "red" / ".cache" / "0.png", (255, 0, 0))
    draw(folder / "red" / os.fsdecode(b"\xff.png"), (255, 0, 0))
    data = load_images(DataConfig(dataset=str(folder), image_size=4, validation=0.2))
    assert len(data.train) + len(data.validation) == 21
    data.train.fetch(np.arange(len(data.train)))


def test_train_and_val_folders(tmp_path: Path) -> None:
    for part in ("train", "val"):
        for name in ("a", "b"):
            draw(tmp_path / part / name / f"{part}.jpg", (1, 2, 3))
    data = load_images(DataConfig(dataset=str(tmp_path), image_size=4))
    assert (len(data.train), len(data.validation), data.num_classes) == (2, 2, 2)


def test_what_is_wrong_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="there is no such folder of images"):
        load_images(DataConfig(dataset="/no/such/place"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(TrainingError, match="needs a subfolder of images"):
        load_images(DataConfig(dataset=str(tmp_path / "empty")))
    for path in (folder / "red").glob("*.png"):
        path.write_text("no image")
    data = load_images(DataConfig(dataset=str(folder), validation=0.2))
    with pytest.raises(TrainingError, match="cannot be read as an image"):
        data.train.fetch(np.arange(len(data.train)))


def test_hugging_face_images(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hub"))
    data = load_images(DataConfig(dataset=f"hf:{folder}", image_size=4, validation=0.2))
    assert (len(data.train), len(data.validation), data.num_classes) == (16, 4, 2)
    assert data.train.fetch(np.arange(3)).inputs.shape == (3, 3, 4, 4)
