"""The trainings that most studies share, so that their figures can be put side by side."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from thinwire.options import RECOMMENDED_LR, RECOMMENDED_OPTIONS
from thinwire.studies.study import FULL, MEDIUM, SMALL
from thinwire.studies.trials import Trial

MANY = "many"
"""A size of model for many replicas on a GPU."""
USUAL_COMBINE = "mean_over_replicas"
# A byte-level GPT of 0.2 million parameters: 5 seconds for four replicas on a CPU.
_TINY: dict[str, Any] = {
    "layers": 2,
    "width": 96,
    "heads": 2,
    "mlp_width": 192,
    "sequence": 64,
    "batch": 16,
    "steps": 120,
    "warmup_steps": 12,
    "eval_every": 40,
    "eval_examples": 128,
}
# The same model with more steps: 15 seconds.
_LONGER: dict[str, Any] = {**_TINY, "steps": 200, "warmup_steps": 20, "eval_every": 50, "eval_examples": 256}
# Where there are many replicas: the recipe's 0.9 million parameters, for a GPU.
_MANY: dict[str, Any] = {"steps": 600, "batch": 64, "warmup_steps": 30, "eval_every": 100}
# For a GPU: 500 steps of 128 sequences of 256 bytes, of 26 million parameters with the recipe's own sizes.
PILOT: dict[str, Any] = {
    "steps": 500,
    "batch": 128,
    "warmup_steps": 50,
    "eval_every": 100,
    "eval_examples": 512,
    "compile": True,
}
# 5 million parameters and half the batch: a tenth of the time. No byte is seen twice.
_USUAL: dict[str, Any] = {
    **PILOT,
    "layers": 6,
    "width": 256,
    "heads": 4,
    "mlp_width": 704,
    "batch": 64,
    "dataset": "packages",
}

_TEXT = {
    SMALL: ("quickstart", _TINY),
    MEDIUM: ("quickstart", _LONGER),
    MANY: ("quickstart", _MANY),
    FULL: ("gpt-small", _USUAL),
}


@dataclass(frozen=True)
class Start:
    """Settings of an optimizer, and the learning rate that a search for the best begins with."""

    rate: float
    settings: Mapping[str, Any]


_SIGN = {"update": "sign", "topk": 32, "momentum_decay": 0.99}
_BRIEF_MUON = {"update": "muon", "topk": 64, "momentum_decay": 0.95}
# The two kinds of DeMo that most studies compare: as published but for codec and decay, and the recommended one; the smaller
# sizes have it without balance (q9, search and length compare both). Few steps of a tiny model want larger rates, and
# a shorter memory with the muon rule.
DEMO_RULES: dict[str, dict[str, Start]] = {
    SMALL: {"sign": Start(8e-3, _SIGN), "muon": Start(8e-2, _BRIEF_MUON)},
    MEDIUM: {"sign": Start(4e-3, _SIGN), "muon": Start(8e-2, _BRIEF_MUON)},
    FULL: {"sign": Start(1e-3, _SIGN), "muon": Start(RECOMMENDED_LR, RECOMMENDED_OPTIONS)},
}
# For gradients that are averaged in full.
_TINY_RATES = {"adamw": 2e-3, "muon": 2e-2, "sgd": 3e-1, "lion": 1e-3}
DENSE_RATES: dict[str, dict[str, float]] = {
    SMALL: _TINY_RATES,
    MEDIUM: _TINY_RATES,
    FULL: {"adamw": 1e-3, "muon": 4e-3, "sgd": 1e-1, "lion": 3e-4},
}


def rules_in_words(settings: Iterable[Mapping[str, Any]]) -> str:
    """What DeMo's update rules had in these trainings: decay and balance, one or several; nothing if no row says it."""
    decays: dict[str, set[float]] = {}
    balances: dict[str, set[float]] = {}
    combines: dict[str, set[str]] = {}
    for one in settings:
        if "update" in one and "momentum_decay" in one:
            rule = one["update"]
            decays.setdefault(rule, set()).add(one["momentum_decay"])
            balances.setdefault(rule, set()).add(one.get("balance", 0.0))
            combines.setdefault(rule, set()).add(one.get("combine", USUAL_COMBINE))
    rules: dict[str, list[str]] = {}
    for rule, known in decays.items():
        words = f"a momentum decay of {_one_of(f'{decay:g}' for decay in sorted(known))}"
        if any(balances[rule]):
            words += f" and a balance of {_one_of(f'{balance:g}' for balance in sorted(balances[rule]))}"
        if combines[rule] != {USUAL_COMBINE}:
            words += f", combined by {_one_of(f'`{combine}`' for combine in sorted(combines[rule]))}"
        rules.setdefault(words, []).append(rule)
    parts = [f"with the {_one_of(names)} rule {words}" for words, names in rules.items()]
    return f"DeMo has here, {'; '.join(parts)}." if parts else ""


def _one_of(words: Iterable[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


def text_trial(
    size: str, optimizer: str = "demo", replicas: int = 4, settings: Mapping[str, Any] = MappingProxyType({})
) -> Trial:
    """A byte-level language model of Python source: some 0.2 million parameters, or 5 million; `MANY` has 0.9 million."""
    recipe, usual = _TEXT[size]
    return Trial(recipe, replicas, optimizer, {**usual, **settings})
