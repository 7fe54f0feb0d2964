"""Images and their classes: scikit-learn's digits, folders of images, Hugging Face datasets."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.training.config import DataConfig
from thinwire.training.errors import TrainingError
from thinwire.training.examples import Examples, Images, LazyImages
from thinwire.training.text import hugging_face_split

_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif")


@dataclass(frozen=True)
class ImageData:
    """Training and validation images."""

    train: Examples
    validation: Examples
    num_classes: int
    num_channels: int
    description: str


def load_images(config: DataConfig) -> ImageData:
    """The data set that ``config.dataset`` names."""
    if config.dataset == "digits":
        return _load_digits(config)
    if config.dataset.startswith("hf:"):
        return _load_hugging_face(config)
    if config.dataset in ("stdlib", "packages"):
        raise TrainingError(f"dataset={config.dataset} holds text: it needs a text model, such as --architecture llama")
    folder = Path(config.dataset)
    if not folder.is_dir():
        raise TrainingError(f"dataset={config.dataset!r}: there is no such folder of images; digits needs no download")
    return _load_folder(config, folder)


def _load_digits(config: DataConfig) -> ImageData:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 8 - 1
    images = torch.nn.functional.interpolate(images, size=config.image_size, mode="nearest")
    labels = torch.from_numpy(digits.target).long()
    kept, held_back = _split(len(labels), config.validation)
    train, validation = Images(images[kept], labels[kept]), Images(images[held_back], labels[held_back])
    return _described(config, train, validation, 10, 1)


def _load_folder(config: DataConfig, folder: Path) -> ImageData:
    """One subfolder per class, or train/ and val/ with the same classes in each."""
    parts = [folder / "train", folder / "val"]
    if all(part.is_dir() for part in parts):
        classes = _class_names(parts[0])
        (train_files, train_labels), (files, labels) = (_list_images(part, classes) for part in parts)
        train, validation = _from_files(config, train_files, train_labels), _from_files(config, files, labels)
    else:
        classes = _class_names(folder)
        all_files, all_labels = _list_images(folder, classes)
        order = sorted(range(len(all_files)), key=lambda i: hashlib.sha256(os.fsencode(all_files[i].name)).digest())
        kept, held_back = ([order[i] for i in part] for part in _split(len(order), config.validation))
        train, validation = (
            _from_files(config, [all_files[i] for i in part], [all_labels[i] for i in part]) for part in (kept, held_back)
        )
    return _described(config, train, validation, len(classes), 3)


def _class_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _list_images(folder: Path, classes: list[str]) -> tuple[list[Path], list[int]]:
    files, labels = [], []
    for label, name in enumerate(classes):
        images = (path for path in Path(folder, name).rglob("*") if path.suffix.lower() in _SUFFIXES)
        # Hidden files, such as the ._0.png that some systems leave beside 0.png, are none.
        found = sorted(path for path in images if not any(part.startswith(".") for part in path.relative_to(folder).parts))
        files += found
        labels += [label] * len(found)
    if not files:
        raise TrainingError(f"dataset: {folder} needs a subfolder of images ({', '.join(_SUFFIXES)}) per class, found none")
    return files, labels


def _from_files(config: DataConfig, files: Sequence[Path], labels: Sequence[int]) -> LazyImages:
    from PIL import Image, UnidentifiedImageError

    def load(index: int) -> Tensor:
        try:
            with Image.open(files[index]) as image:
                return _to_tensor(image, config.image_size)
        except (UnidentifiedImageError, OSError) as error:
            raise TrainingError(f"dataset: {files[index]} cannot be read as an image: {error}") from error

    return LazyImages(load, labels)


def _to_tensor(image: Any, size: int) -> Tensor:
    pixels = np.asarray(image.convert("RGB").resize((size, size)), dtype=np.float32)
    return torch.from_numpy(pixels / 127.5 - 1).permute(2, 0, 1).contiguous()


def _load_hugging_face(config: DataConfig) -> ImageData:
    rows: Any = hugging_face_split(config, "train", (config.image_column, config.label_column))
    labels = [int(label) for label in rows[config.label_column]]
    kept, held_back = _split(len(labels), config.validation)

    def part(indices: list[int]) -> LazyImages:
        load = lambda index: _to_tensor(rows[indices[index]][config.image_column], config.image_size)  # noqa: E731
        return LazyImages(load, [labels[index] for index in indices])

    return _described(config, part(kept), part(held_back), max(labels) + 1, 3)


def _split(num_examples: int, validation: float) -> tuple[list[int], list[int]]:
    """Numbers of the training and the validation examples, the same in every run."""
    order = np.random.default_rng(0).permutation(num_examples).tolist()
    cut = num_examples - max(1, int(num_examples * validation))
    return order[:cut], order[cut:]


def _described(config: DataConfig, train: Examples, validation: Examples, num_classes: int, channels: int) -> ImageData:
    if len(train) == 0 or len(validation) == 0:
        raise TrainingError(
            f"dataset={config.dataset!r} has {len(train)} training and {len(validation)} validation images; both are needed"
        )
    description = (
        f"{config.dataset}: {len(train):,} training and {len(validation):,} validation images, {num_classes} classes"
    )
    return ImageData(train, validation, num_classes, channels, description)
