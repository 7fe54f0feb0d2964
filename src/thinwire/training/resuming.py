"""The settings that a run folder holds; what of them may change when the run is resumed, and what may not."""

from dataclasses import fields
from pathlib import Path

from thinwire.core.errors import CheckpointError
from thinwire.training.config import TrainConfig, all_fields
from thinwire.training.config_file import override, read_file

# The position in the data and the optimizer's state mean something else under other values of these.
_FIXED_SECTIONS = ("model", "data")
_FIXED = (
    *("optimizer", "update", "rest_update", "chunk", "topk", "topk_of", "values", "batch", "seed"),
    *("rank", "dense_steps", "local_steps", "fragments"),
)
# Where the data lies is not what it is, which the checkpoint knows.
_FREE = ("compile", "activation_checkpointing", "workers", "pretrained", "dataset", "tokenizer")


def saved_config(folder: Path) -> TrainConfig:
    """The settings of a run; those that it does not know have their defaults."""
    path = folder / "config.toml"
    if not path.is_file():
        raise CheckpointError(f"{folder}: this is not a run folder, it has no config.toml")
    values = read_file(path)
    # A setting that is newer than the run has a default that means what the run did. A file that was cut off lacks whole
    # sections.
    sections = {section for section, setting in all_fields() if setting.name in values}
    for section in fields(TrainConfig):
        if section.name not in sections:
            raise CheckpointError(f"{path} is not whole: it has no setting of the {section.name}")
    return override(TrainConfig(), values, str(path))


def check_unchanged(saved: TrainConfig, wanted: TrainConfig) -> None:
    """Refuse a resumed run that would not be the same run."""
    for section, setting in all_fields():
        name = setting.name
        if name in _FREE or not (section in _FIXED_SECTIONS or name in _FIXED):
            continue
        before, now = getattr(getattr(saved, section), name), getattr(getattr(wanted, section), name)
        if before != now:
            raise CheckpointError(
                f"{name}={now!r} cannot change in a resumed run, it was {before!r}; start a new run instead"
            )
