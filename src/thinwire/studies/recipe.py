"""recipe: which settings of DeMo beat tuned AdamW at equal tokens, with at least 100 times fewer bytes sent?"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from thinwire.studies.figure import Drawing, Page, dot, room_for_labels, title
from thinwire.studies.settings import DEMO_RULES, DENSE_RATES, PILOT, Start, text_trial
from thinwire.studies.study import FULL, SMALL, Claim, Finding, Study, table, verdict
from thinwire.studies.trials import Row, Trial
from thinwire.studies.tuning import Contender, Outcome, due, is_below, outcomes

RECOMMENDED: dict[str, Any] = {**DEMO_RULES[FULL]["muon"].settings, "combine": "mean_over_replicas"}
_LEAST_RATIO = 100


def _length(steps: int, batch: int) -> dict[str, Any]:
    """Of a training; ``batch`` sequences of all replicas together. Of the standard library alone, some 10 MB, 2,000 steps
    would see so much again that every method's validation loss grows in the end."""
    return {
        "steps": steps,
        "batch": batch,
        "warmup_steps": steps // 10,
        "eval_every": steps // 5,
        "dataset": "packages",
    }


_SHORT, _LONGER, _LONGEST = "500 steps", "2,000 steps", "5,000 steps"
# Lengths as in the pilot, and another family of models: learned positions, biases, layer norms, no gates.
_SET_UPS: dict[str, dict[str, Any]] = {
    _SHORT: _length(500, 128),
    _LONGER: _length(2000, 64),
    _LONGEST: _length(5000, 64),
    "GPT-2, 500 steps": {**_length(500, 128), "architecture": "gpt2", "mlp_width": 2048},
}
# Where the search began. What differs from it, one thing at a time, is tried with one seed, for 500 steps on a small text.
_FIRST: dict[str, Any] = {**RECOMMENDED, "momentum_decay": 0.95}
_VARIATIONS: tuple[dict[str, Any], ...] = (
    *({"lr": lr} for lr in (3e-2, 4e-2, 6e-2)),
    {"momentum_decay": 0.9},
    *({"combine": rule} for rule in ("mean_over_senders", "majority_vote")),
    *({"values": values} for values in ("sign_scale", "int4")),
    *({"chunk": chunk, "topk": chunk**2 // 64} for chunk in (32, 128)),
    *({"topk": topk} for topk in (32, 128)),
    *({"weight_decay": decay} for decay in (0.01, 0.1)),
    *({"rest_update": rule, "rest_lr": lr} for rule, lr in (("sign", 1e-3), ("adamw", 3e-3))),
    *({"warmup_steps": steps} for steps in (10, 100)),
    {"final_lr_share": 0.0},
    {"schedule": "linear"},
    {"clip": 0.0},
)
# The same for 2,000 steps, on more text.
_LONGER_VARIATIONS: tuple[dict[str, Any], ...] = (
    {"momentum_decay": 0.98},
    {"momentum_decay": 0.98, "lr": 2e-2},
    {"momentum_decay": 0.98, "combine": "mean_over_senders"},
    {"momentum_decay": 0.99},
    {"momentum_decay": 0.99, "lr": 2e-2},
    {"final_lr_share": 0.0},
    *({"momentum_decay": decay, "weight_decay": 0.1} for decay in (0.95, 0.98, 0.99)),
    {"weight_decay": 0.3},
)
# What differs from the recommended settings, by the length; k by the kind of layer with as many bytes.
_LATER_VARIATIONS: dict[str, tuple[dict[str, Any], ...]] = {
    _SHORT: ({"weight_decay": 0.01}, {"topk": 256}, {"topk_of": "attn=32,mlp=80"}, {"topk_of": "attn=96,mlp=48"}),
    _LONGER: (
        {"weight_decay": 3e-3},
        {"weight_decay": 0.01},
        {"weight_decay": 0.01, "lr": 8e-2},
        {"topk": 88, "values": "sign_scale"},
        {"final_lr_share": 0.3},
        {"schedule": "linear"},
    ),
    _LONGEST: ({"weight_decay": 0.01},),
}
# AdamW has other settings, too: what differs from its own, for 2,000 steps.
_ADAMW_VARIATIONS: tuple[dict[str, Any], ...] = (
    {"weight_decay": 0.1},
    {"weight_decay": 0.1, "lr": 2e-3},
    {"beta2": 0.99},
    {"beta2": 0.999},
    {"beta1": 0.8},
    {"beta1": 0.95},
    {"final_lr_share": 0.0},
    {"schedule": "linear"},
    {"beta1": 0.8, "schedule": "linear"},
)
# k of the first and of the second half of the steps, with the bytes of the recommended one.
_SCHEDULES_OF_K = ((32, 96), (96, 32))
# What a search with very small models found (`thinwire.studies.search`).
_FOUND_SMALL = ({"topk": 96, "schedule": "linear"}, 32)
# k, and the share of what was sent that goes back into the momentum, which a large k would empty.
_RETURNED = {_SHORT: ((120, 0.5), (256, 0.75)), _LONGER: ((120, 0.5),)}
_ONE_SEED = {"lr": 4e-2, "seed": 0}
_SIGN = Start(1e-3, {"update": "sign", "topk": 64, "momentum_decay": 0.99})
_DENSE = {"AdamW": "adamw", "Muon, averaged in full": "muon"}


def _trial(optimizer: str = "demo", **settings: Any) -> Trial:
    """Of 26 million parameters."""
    return Trial("gpt-small", 4, optimizer, {**PILOT, **settings})


def _contenders(set_up: str) -> list[Contender]:
    if set_up == SMALL:
        found = [Contender(name, text_trial(SMALL, one), DENSE_RATES[SMALL][one]) for name, one in _DENSE.items()]
        settings = {**RECOMMENDED, **DEMO_RULES[SMALL]["muon"].settings}
        return [*found, Contender("DeMo, recommended", text_trial(SMALL, settings=settings), 8e-2)]
    length = _SET_UPS[set_up]
    found = [Contender(name, _trial(one, **length), DENSE_RATES[FULL][one]) for name, one in _DENSE.items()]
    found.append(Contender("DeMo, recommended", _trial(**RECOMMENDED, **length), 4e-2))
    if set_up == _SHORT:
        found.append(Contender("DeMo, sign rule", _trial(**_SIGN.settings, **length), _SIGN.rate))
    return found


def _plan(size: str, rows: Sequence[Row]) -> list[Trial]:
    if size == SMALL:
        return due(_contenders(SMALL), rows, size)
    tried = [_trial(**{**_FIRST, **_ONE_SEED, **one}) for one in _VARIATIONS]
    tried += [_trial(**{**_FIRST, **_SET_UPS[_LONGER], **_ONE_SEED, **one}) for one in _LONGER_VARIATIONS]
    adamw = {**_SET_UPS[_LONGER], "lr": DENSE_RATES[FULL]["adamw"], "seed": 0}
    tried += [_trial("adamw", **{**adamw, **one}) for one in _ADAMW_VARIATIONS]
    tried += [_try(set_up, **one) for set_up, each in _LATER_VARIATIONS.items() for one in each]
    tried += [replace(_try(_SHORT, topk=first), later_topk=then) for first, then in _SCHEDULES_OF_K]
    settings, then = _FOUND_SMALL
    tried += [replace(_try(set_up, **settings), later_topk=then) for set_up in (_SHORT, _LONGER)]
    tried += [replace(_try(set_up, topk=k), returned=share) for set_up, each in _RETURNED.items() for k, share in each]
    return [trial for set_up in _SET_UPS for trial in due(_contenders(set_up), rows, size)] + tried


def _try(set_up: str, **settings: Any) -> Trial:
    return _trial(**{**RECOMMENDED, **_SET_UPS[set_up], **_ONE_SEED, **settings})


def _found(rows: Sequence[Row]) -> dict[str, dict[str, Outcome]]:
    """By the set-up."""
    found = {set_up: outcomes(_contenders(set_up), rows) for set_up in (SMALL, *_SET_UPS)}
    return {set_up: by_name for set_up, by_name in found.items() if by_name}


def ratio(row: Row) -> float:
    """How many times fewer bytes than gradients of 16 bits."""
    return float(2 * row["parameters"] / row["sent_bytes"])


def _find(rows: Sequence[Row], results: Path) -> Finding:
    lines, claims, sentences = [], [], []
    for set_up, by_name in _found(rows).items():
        for name, one in by_name.items():
            fewer = f"{ratio(one.rows[0]):.0f} x" if name.startswith("DeMo") else "1 x"
            lines.append((set_up, name, one.words, fewer, f"{one.rate:g}", str(one.tries), str(len(one.losses))))
        adamw, demo = by_name.get("AdamW"), by_name.get("DeMo, recommended")
        if adamw is not None and demo is not None:
            gap = demo.mean - adamw.mean
            text = f"{set_up}: every seed of the recommended recipe ends below every seed of AdamW ({gap:+.3f})"
            claims.append(Claim(text, is_below(demo, adamw)))
            fewer_text = f"{set_up}: it sends at least {_LEAST_RATIO} times fewer bytes ({ratio(demo.rows[0]):.0f} times)"
            claims.append(Claim(fewer_text, ratio(demo.rows[0]) >= _LEAST_RATIO))
            sentences.append(
                f"Last loss, {set_up}: {demo.words} with the recipe and {ratio(demo.rows[0]):.0f} times fewer bytes, "
                f"{adamw.words} with AdamW."
            )
    heads = ("set-up", "method", "loss", "fewer bytes", "learning rate", "rates tried", "seeds")
    lead = verdict(claims, "The recommended recipe does", "The recommended recipe does in part", "None of those tried")
    answer = f"{lead}. {' '.join(sentences)}" if claims else ""
    count = "*Fewer bytes* is against one copy of the gradients in 16 bits, of which a ring all-reduce among four sends 1.5."
    return Finding(f"{table(heads, lines, 2)}\n\n{count}\n\n## All that was tried\n\n{_log(rows)}", claims, answer)


def _log(rows: Sequence[Row]) -> str:
    """Every training there is, and what it gave."""
    lines = []
    for row in rows:
        trial, settings = row["trial"], dict(row["trial"]["settings"])
        lengths = [str(settings.pop(name, "")) for name in ("steps", "batch")]
        for name in ("eval_every", "eval_examples", "compile"):
            settings.pop(name, None)
        words = ", ".join(
            f"{name} {value if isinstance(value, str) else json.dumps(value)}" for name, value in settings.items()
        )
        loss = "failed" if row["loss"] is None else f"{row['loss']:.3f}"
        what = f"{trial['recipe']}, {trial['replicas']} replicas, {trial['optimizer']}"
        words += f", topk {trial['later_topk']} after half of the steps" if trial["later_topk"] else ""
        words += f", {trial['returned']:g} of what was sent put back" if trial["returned"] else ""
        lines.append((f"{what}: {words}", *lengths, loss))
    lines.sort(key=lambda line: line[1:])
    return table(("training", "steps", "batch", "loss"), lines)


def _draw(rows: Sequence[Row], results: Path) -> dict[str, Drawing]:
    found = _found(rows)
    if not found:
        return {}
    page = Page(len(found), width=4.6)
    for axes, (set_up, by_name) in zip(page.panels, found.items(), strict=True):
        for index, (name, one) in enumerate(by_name.items()):
            for seed, loss in enumerate(one.losses):
                dot(axes, index, loss, name if seed == 0 else "", index)
        axes.set_xticks([])
        room_for_labels(axes, 0.8)
        title(axes, set_up, "", "validation loss (nats per byte)")
    caption = "Last validation loss of every seed, each method at the best learning rate of those tried."
    return {"recipe.png": Drawing(page, caption)}


STUDY = Study(
    "recipe",
    "The recipe",
    "Which settings of DeMo beat tuned AdamW at equal tokens, with at least 100 times fewer bytes sent?",
    find=_find,
    plan=_plan,
    draw=_draw,
    sizes=(SMALL, FULL),
)
