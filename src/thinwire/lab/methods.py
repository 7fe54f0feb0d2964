"""The methods that are compared, as changes to a recipe, each at the setting that `docs/lab.md` gives reasons for."""

import dataclasses
import difflib
from dataclasses import dataclass, field
from typing import Any

from thinwire.training import recipes
from thinwire.training.config import TrainConfig
from thinwire.training.config_file import override

# Between two synchronisations this many steps are measured; what happens in each does not depend on how many there are.
_MEASURED_PERIOD = 3
# How long methods that begin with whole gradients do so in the lab, which measures what comes after.
DENSE_STEPS = 4


@dataclass(frozen=True)
class LabMethod:
    """``optimizer`` is the trainer's name, ``changes`` are other settings than the recipe's."""

    optimizer: str
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def period(self) -> int:
        """Replicas speak in one of so many steps; fewer are measured, and weighted."""
        local_steps: int = self.changes.get("local_steps", 1)
        return local_steps // self._num_fragments

    @property
    def _num_fragments(self) -> int:
        return int(self.changes.get("fragments", 1))

    @property
    def measured_period(self) -> int:
        """Steps that must be measured together."""
        return min(self.period, _MEASURED_PERIOD)

    def train_config(self, recipe: str) -> TrainConfig:
        """The run of two replicas, as it would be trained."""
        return override(recipes.build(recipe, self.optimizer), self.changes, "the method's settings")

    def lab_config(self, recipe: str, num_hosts: int, num_threads: int) -> TrainConfig:
        """The run of one host. Each has the recipe's batch for two replicas, however many hosts there are."""
        base = override(self.train_config(recipe), {"dense_steps": DENSE_STEPS}, "the lab")
        if self.period > 1:
            base = override(base, {"local_steps": self.measured_period * self._num_fragments}, "the lab")
        return dataclasses.replace(
            base,
            schedule=dataclasses.replace(base.schedule, batch=base.schedule.batch * num_hosts // 2),
            run=dataclasses.replace(base.run, tensorboard=False, checkpoint_every=0, sample_tokens=0),
            launch=dataclasses.replace(base.launch, threads=num_threads, device="cpu", timeout_seconds=600.0),
        )


_EARLY = {"overlap": True, "clip": 0.0}
_SIGN = {"update": "sign", "topk": 32, "momentum_decay": 0.999, "lr": 1e-3, "balance": 0.0, "rest_update": ""}
_ALL_IN_ONE = 1e5  # megabytes
# The learning rates are the best of those tried: results/lab_losses. Those of demo-owner and adamw-after are
# demo's and adamw's.
METHODS: dict[str, LabMethod] = {
    "demo": LabMethod("demo", {**_SIGN, **_EARLY}),
    "demo-owner": LabMethod("demo", {**_SIGN, **_EARLY, "exchange": "owner"}),
    "demo-after": LabMethod("demo", _SIGN),
    "demo-owner-after": LabMethod("demo", {**_SIGN, "exchange": "owner"}),
    "demo-muon": LabMethod("demo", {**_EARLY}),
    "demo-muon-after": LabMethod("demo"),
    "published-code": LabMethod("published-code"),
    "adamw": LabMethod("adamw", {"lr": 3e-4}),
    "adamw-after": LabMethod("adamw", {"lr": 3e-4, "bucket_mb": _ALL_IN_ONE}),
    "adamw-bf16": LabMethod("adamw-bf16", {"lr": 3e-4}),
    "adamw-bf16-after": LabMethod("adamw-bf16", {"lr": 3e-4, "bucket_mb": _ALL_IN_ONE}),
    "adamw-fp16": LabMethod("adamw-fp16", {"lr": 3e-4}),
    "powersgd": LabMethod("powersgd", {"lr": 3e-4, "dense_steps": 2}),
    "topk": LabMethod("topk", {"lr": 1e-3}),
    "dgc": LabMethod("dgc", {"lr": 0.3}),
    "randomk": LabMethod("randomk", {"lr": 1e-3}),
    "signsgd": LabMethod("signsgd", {"lr": 3e-4}),
    "ef-signsgd": LabMethod("ef-signsgd", {"lr": 0.75}),
    "qsgd": LabMethod("qsgd", {"lr": 1e-3}),
    "onebit-adam": LabMethod("onebit-adam", {"lr": 1.2e-4, "dense_steps": 2}),
    "local-sgd": LabMethod("local-sgd", {"lr": 1e-3, "local_steps": 8}),
    "diloco": LabMethod("diloco", {"lr": 3e-4, "local_steps": 32}),
    "diloco-streaming": LabMethod("diloco", {"lr": 3e-4, "local_steps": 32, "fragments": 4}),
    "sparseloco": LabMethod("sparseloco", {"lr": 1e-3, "local_steps": 16}),
    "galore": LabMethod("galore", {"lr": 1.2e-2}),
}


def choose(names: list[str]) -> dict[str, LabMethod]:
    """Those of these names; all for ``all``."""
    if names == ["all"]:
        return METHODS
    for name in names:
        if name not in METHODS:
            near = difflib.get_close_matches(name, METHODS, n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"methods={name!r} is unknown; there are {', '.join(METHODS)}, or all{hint}")
    return {name: METHODS[name] for name in names}
