"""What was trained, in words computed from rows: how large, how long, on what, and with which settings."""

import json
from collections.abc import Iterable, Iterator, Sequence

from thinwire.studies.settings import rules_in_words
from thinwire.studies.trials import Row, Trial
from thinwire.training.config import TrainConfig
from thinwire.training.recipes import RECIPES

_USUAL_BETA1 = 0.9


def setup_in_words(rows: Sequence[Row]) -> list[str]:
    """Sentences; none for rows of no trials."""
    mine = [row for row in rows if "trial" in row and "parameters" in row and row["trial"]["recipe"] in RECIPES]
    if not mine:
        return []
    configs = list(_configs(mine))
    sizes = _range(
        f"{float(format(row['parameters'] / 1e6, '.2g')):g} M"
        for row in sorted(mine, key=lambda row: int(row["parameters"]))
    )
    steps = _range(f"{steps:,}" for steps in sorted({config.schedule.steps for config in configs}))
    replicas = _range(str(count) for count in sorted({row["trial"]["replicas"] for row in mine}))
    data = " and ".join(f"`{name}`" for name in sorted({config.data.dataset for config in configs}))
    found = [f"Trained here: {sizes} parameters, {steps} steps, {replicas} replica{'' if replicas == '1' else 's'}, {data}."]
    rules = rules_in_words(row["trial"]["settings"] for row in mine if row["trial"]["optimizer"] == "demo")
    return [*found, *filter(None, (rules, _adamw_in_words(configs)))]


def _configs(rows: Iterable[Row]) -> Iterator[TrainConfig]:
    """Each once, but for learning rates and seeds."""
    known = {}
    for row in rows:
        trial = row["trial"]
        settings = {name: value for name, value in trial["settings"].items() if name not in ("lr", "seed")}
        one = Trial(trial["recipe"], trial["replicas"], trial["optimizer"], settings)
        known[json.dumps(one.facts, sort_keys=True)] = one
    return (one.config for one in known.values())


def _range(words: Iterable[str]) -> str:
    """The first and the last."""
    first, *others = dict.fromkeys(words)
    return f"{first} to {others[-1]}" if others else first


def _adamw_in_words(configs: Sequence[TrainConfig]) -> str:
    """What AdamW had, unless it was searched, too."""
    mine = [config for config in configs if config.optim.optimizer == "adamw"]
    if not mine or any(config.optim.beta1 < _USUAL_BETA1 for config in mine):
        return ""
    betas = " or ".join(sorted({f"{config.optim.beta1:g} and {config.optim.beta2:g}" for config in mine}))
    return (
        f"AdamW has its usual betas, {betas}, and schedule: what other settings do for it is said in *search* and *recipe*."
    )
