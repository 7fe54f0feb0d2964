"""What may change when a run is resumed, and what may not."""

from thinwire.core.errors import CheckpointError
from thinwire.training.config import TrainConfig, all_fields

# The position in the data and the optimizer's state mean something else under other values of these.
_FIXED_SECTIONS = ("model", "data")
_FIXED = (
    *("optimizer", "update", "rest_update", "chunk", "topk", "values", "batch", "seed"),
    *("rank", "dense_steps", "local_steps", "fragments"),
)
_FREE = ("compile", "activation_checkpointing", "workers", "pretrained")


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
