"""Which optimizers read a setting, so that one that would do nothing is refused instead of dropped in silence."""

from collections.abc import Iterable

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


def refuse_unread(asked: OptimConfig, arguments: Iterable[str]) -> None:
    """An error if a flag among these arguments would change nothing. What a file says is let be: that of a run has every
    setting there is."""
    flags = (argument.partition("=")[0] for argument in arguments if argument.startswith("--"))
    given = {flag.removeprefix("--").replace("-", "_").removeprefix("no_") for flag in flags}
    for name, readers in READERS.items():
        if name in given and asked.optimizer not in readers:
            instead = f"use --optimizer {readers[0]}" if len(readers) == 1 else f"use one of {', '.join(readers)}"
            raise TrainingError(
                f"--{name.replace('_', '-')} would change nothing with optimizer={asked.optimizer}: leave it out, "
                f"or {instead}"
            )
    if "rest_lr" in given and not asked.rest_update:
        raise TrainingError("--rest-lr would change nothing without --rest-update: leave it out, or add --rest-update adamw")
