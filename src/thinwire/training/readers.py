"""Which optimizers read a setting, so that one that would do nothing is refused instead of dropped in silence."""

from dataclasses import fields

from thinwire.training.config import DECOUPLED_OPTIMIZERS, OptimConfig
from thinwire.training.errors import TrainingError

_CODED = (*DECOUPLED_OPTIMIZERS, "published-code")
_ADAMW = ("adamw", "adamw-bf16", "adamw-fp16", "powersgd", "galore", "muon")
_LOCAL = ("local-sgd", "diloco", "sparseloco")
_BETAS = (*_ADAMW, "lion", "topk", "randomk", "qsgd", "onebit-adam", *_LOCAL)

READERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("update", "values", "combine"), DECOUPLED_OPTIMIZERS),  # of the published, `check` says more
    **dict.fromkeys(("exact_decode", "check_drift_every", "on_drift", "on_bad_payload", "kernels", "rest_lr"), ("demo",)),
    "momentum_decay": _CODED,
    **dict.fromkeys(("topk", "chunk"), (*_CODED, "sparseloco")),
    "beta1": ("demo", *_BETAS, "sgd", "dgc", "signsgd"),
    "beta2": ("demo", *_BETAS),
    "rank": ("powersgd", "galore"),
    "density": ("topk", "dgc", "randomk"),
    "levels": ("qsgd",),
    "dense_steps": ("powersgd", "onebit-adam", "dgc"),
    "local_steps": _LOCAL,
    "outer_lr": ("diloco", "sparseloco"),
    "outer_momentum": ("diloco",),
}
"""Of what is not here, all read it, or `check` refuses it where it has no meaning."""


def refuse_unread(asked: OptimConfig, default: OptimConfig) -> None:
    """An error if a setting that was asked for, unlike the recipe's, would change nothing."""
    for name in (field.name for field in fields(OptimConfig)):
        readers, value = READERS.get(name), getattr(asked, name)
        if readers is not None and value != getattr(default, name) and asked.optimizer not in readers:
            raise TrainingError(
                f"{name}={value} would change nothing with optimizer={asked.optimizer}: leave it out, or take one of "
                f"{', '.join(readers)}"
            )
