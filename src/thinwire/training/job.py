"""What one process is asked to do, and what it needs before the first step: a device, data, agreement with the others."""

import fcntl
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from thinwire.core.errors import AgreementError
from thinwire.exchange.agreement import hold_roll_call
from thinwire.exchange.transport import Transport, all_gather
from thinwire.parallel.place import Place
from thinwire.training.config import TrainConfig
from thinwire.training.config_file import as_toml
from thinwire.training.errors import TrainingError
from thinwire.training.examples import fingerprint
from thinwire.training.models import Sizes, is_image_model
from thinwire.training.pictures import ImageData, load_images
from thinwire.training.text import TextData, load_text

# What may differ between the replicas of one run.
_OWN_SETTINGS = (
    "out",
    "replicas",
    "device",
    "threads",
    "port",
    "workers",
    "backend",
    "slot",
    "lighthouse",
    "elastic",
    "tensorboard",
    "wandb",
    "dataset",
    "tokenizer",
    "key_file",
)
_LONGEST_NAME = 256
_TOKEN_CACHE = Path.home() / ".cache" / "thinwire" / "tokens"

Data = TextData | ImageData


@dataclass(frozen=True)
class Job:
    """A run, and this process's place in it. ``parent``: stop when this process, which started this one, is gone."""

    config: TrainConfig
    place: Place
    folder: Path
    resume: bool = False
    residual: str = "exact"
    parent: int | None = None


def choose_device(job: Job) -> torch.device:
    """The GPU of this replica's own, or a shared one where there are fewer GPUs than replicas, or the CPU."""
    wanted, num_gpus = job.config.launch.device, torch.cuda.device_count()
    if wanted == "cuda" and num_gpus == 0:
        raise TrainingError("device=cuda, but torch sees no CUDA device here; use --device cpu")
    if wanted == "cpu" or num_gpus == 0:
        return torch.device("cpu")
    local_number = job.config.launch.slot if job.config.launch.lighthouse else job.place.local_replica
    device = torch.device("cuda", local_number % num_gpus)
    torch.cuda.set_device(device)
    return device


def agree_on_key(has_key: bool, transport: Transport) -> None:
    """All replicas must sign, or none; to be asked while none does."""
    rows = all_gather(transport, torch.tensor([has_key], dtype=torch.uint8), "use of a key")
    for replica, row in enumerate(rows.cpu()):
        if bool(row[0]) != bool(rows[0, 0]):
            raise AgreementError(f"of replicas 0 and {replica} one was started with --key-file and the other without")


def settle_folder(job: Job, transport: Transport) -> Job:
    """A folder that nobody named has the time in its name: all replicas take replica 0's."""
    message = torch.zeros(_LONGEST_NAME, dtype=torch.uint8)
    text = bytes([job.resume]) + job.folder.name.encode()[: _LONGEST_NAME - 1]
    message[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    rows = [row.cpu().numpy().tobytes() for row in all_gather(transport, message, "name of the run folder")]
    for replica, row in enumerate(rows):
        if row[0] != rows[0][0]:
            raise AgreementError(f"of replicas 0 and {replica} one was started with --resume and the other without")
    if job.config.run.out or job.resume:
        return job
    name = rows[0][1:].rstrip(b"\0").decode(errors="replace")
    # What a peer sends must be a name, and not lead out of this folder.
    if not re.fullmatch(r"[\w-]+", name):
        raise AgreementError(f"replica 0 names the run folder {name!r}, which is no name of a folder")
    return replace(job, folder=job.folder.parent / name)


@contextmanager
def lock(folder: Path, name: str = ".lock") -> Iterator[None]:
    """Hold a run folder for one run at a time, as long as the context lasts or the process lives."""
    with (folder / name).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TrainingError(f"{folder}: another run is writing to this folder; end it first") from None
        yield


def load_data(config: TrainConfig) -> Data:
    """Text or images, as the model wants."""
    if not config.data.dataset:
        raise TrainingError("this recipe has no data of its own: name yours with --dataset, such as a folder of .bin shards")
    return load_images(config.data) if is_image_model(config) else load_text(config.data, _TOKEN_CACHE)


def sizes_of(data: Data) -> Sizes:
    """What the data decides about the model."""
    if isinstance(data, TextData):
        return Sizes(vocab_size=data.vocab_size)
    return Sizes(num_classes=data.num_classes, num_channels=data.num_channels)


def seed_everything(seed: int) -> None:
    """All random states that models and data may draw from."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def describe(data: Data) -> str:
    """What of the data must be the same on all replicas, and when a run is resumed; not where it lies."""
    return f"{data.description.split(': ', 1)[-1]}, fingerprint {fingerprint(data.train, data.validation)}"


def agree(config: TrainConfig, data: str, first_step: int, transport: Transport) -> None:
    """All replicas must train the same thing, on the same data, from the same step; a difference is named on all of them."""
    if transport.num_replicas > 1:
        lines = [*common_facts(config, data), f"first step: {first_step}"]
        hold_roll_call(lines, lambda message, what: all_gather(transport, message, what))


def common_facts(config: TrainConfig, data: str) -> list[str]:
    """Lines that must be the same on all replicas; ``data`` is what `describe` says of it."""
    lines = [line for line in as_toml(config).splitlines() if line.split(" = ")[0] not in _OWN_SETTINGS]
    return [*lines, f"data: {data}"]


def check_data(config: TrainConfig, before: str, now: str) -> None:
    """Refuse to go on with other data than the checkpoint's; one from before this was written down is taken as it is."""
    if before and before != now:
        raise TrainingError(
            f"dataset={config.data.dataset!r} is not what the run was trained on: it has {now}, and that had {before}; name "
            "that with --dataset and --tokenizer, or start a new run"
        )
