"""q4: why can a larger k beat AdamW, if everything sent is only Signum? From one coefficient of a chunk to all of them."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.local_step import LocalStep
from thinwire.studies.figure import Drawing, Page, line, logarithmic, room_for_labels, rule, title
from thinwire.studies.search import ADAMW as SEARCHED
from thinwire.studies.search import AS_SEARCHED, SEARCHED_WORDS, as_searched
from thinwire.studies.settings import DEMO_RULES, DENSE_RATES, text_trial
from thinwire.studies.simulation import VirtualReplicas
from thinwire.studies.study import FULL, MEDIUM, SIZES, SMALL, Claim, Finding, Study, table
from thinwire.studies.trials import Row, Trial, train
from thinwire.studies.tuning import Contender, Outcome, due, is_below, outcomes, seeds_for

ALL = 64 * 64
_TOPKS = (1, 2, 4, 8, 16, 32, 64, 256, 1024, ALL)
# In the small size there is time for some.
_FEW = {"sign": (1, 4, 16, 32, 64, 256, 1024, ALL), "muon": (16, 64, 256)}
_RULES = tuple(_FEW)
ADAMW, SGD, MUON = "dense AdamW", "dense SGD", "dense Muon"
ADAMW_SEARCHED = f"{ADAMW}, {AS_SEARCHED}"
# Lion with equal decays is Signum. DeMo's decay first, then the usual one.
SIGNUM = {f"dense Signum, decay {decay}": decay for decay in (0.99, 0.9)}
_SIGNUM_RATES = {SMALL: 2e-3, MEDIUM: 1e-3, FULL: 2.5e-4}
# Where most of the momentum is sent at once, its direction is that of few gradients, and smaller steps are better.
_LARGE_TOPK, _LEAST_SHARE = 64, 0.25


@dataclass(frozen=True)
class MemoryTrial(Trial):
    """A training that also measures how much of the past a replica remembers: the root mean square of its residual momentum,
    divided by that of its gradients. Matrices of the first replica, in the second half of the training."""

    def run(self, device: torch.device) -> Row:
        """Train, and return what was measured."""
        simulation = self.build(device)
        memory, first = Memory(), self.config.schedule.steps // 2
        if isinstance(simulation.method, VirtualReplicas):
            simulation.method.watchers.append(lambda replica, local: memory.see(replica, local, simulation.step >= first))
        return {**train(self, simulation), "memory": memory.in_gradients}

    def made_up(self, chance: random.Random) -> Row:
        """See `Trial`."""
        return {"memory": chance.uniform(0.5, 7.0) if self.optimizer == "demo" else None}


class Memory:
    """The sums that a `MemoryTrial` divides; they stay on the device, which nobody waits for."""

    def __init__(self) -> None:
        self._kept: Tensor | float = 0.0
        self._gradients: Tensor | float = 0.0

    def see(self, replica: int, local: LocalStep, counts: bool) -> None:
        """What a replica has kept after it has sent."""
        if replica or not counts:
            return
        for tensor in local.tensors:
            if tensor.parameter.dim() >= 2 and tensor.gradient is not None:
                self._kept = self._kept + tensor.momentum_CE.float().square().sum()
                self._gradients = self._gradients + tensor.gradient.float().square().sum()

    @property
    def in_gradients(self) -> float | None:
        """The residual's size in gradients; None if there was none."""
        gradients = float(self._gradients)
        return round((float(self._kept) / gradients) ** 0.5, 4) if gradients else None


def name_of(update: str, topk: int) -> str:
    """A contender's."""
    return f"{update} rule, k = {'all' if topk == ALL else topk}"


def contenders(size: str) -> list[Contender]:
    """DeMo with both rules, then what averages gradients in full."""
    found = []
    for update, start in DEMO_RULES[size].items():
        for topk in _FEW[update] if size == SMALL else _TOPKS:
            share = max(_LEAST_SHARE, min(1.0, (_LARGE_TOPK / topk) ** 0.5))
            trial = _measured(size, "demo", {**start.settings, "topk": topk})
            found.append(Contender(name_of(update, topk), trial, start.rate * share))
    for name, decay in SIGNUM.items():
        trial = _measured(size, "lion", {"beta1": decay, "beta2": decay})
        found.append(Contender(name, trial, _SIGNUM_RATES[size]))
    for name, optimizer in ((SGD, "sgd"), (ADAMW, "adamw"), (MUON, "muon")):
        found.append(Contender(name, _measured(size, optimizer, {}), DENSE_RATES[size][optimizer]))
    searched = as_searched(_measured(size, "adamw", {}), SEARCHED)
    return [*found, Contender(ADAMW_SEARCHED, searched, DENSE_RATES[size]["adamw"])]


def _measured(size: str, optimizer: str, settings: dict[str, Any]) -> Trial:
    return MemoryTrial(**vars(text_trial(size, optimizer, settings=settings)))


def _plan(size: str, rows: Sequence[Row]) -> list[Trial]:
    return due(contenders(size), rows, size, seeds_for(size))


def _outcomes(rows: Sequence[Row]) -> dict[str, Outcome]:
    return outcomes([one for size in SIZES for one in contenders(size)], rows)


def of_rule(found: dict[str, Outcome], update: str) -> dict[int, Outcome]:
    """What came of one rule, by k."""
    return {topk: found[name_of(update, topk)] for topk in _TOPKS if name_of(update, topk) in found}


def _find(rows: Sequence[Row], results: Path) -> Finding:
    found = _outcomes(rows)
    lines = [
        (name, one.words, f"{one.rate:g}", one.tries_words, f"{one.rows[0]['sent_bytes']:,}", _memory(one))
        for name, one in found.items()
    ]
    head = ("method", "loss", "learning rate", "rates tried", "bytes sent per step", "residual, in gradients")
    return Finding(f"{table(head, lines)}\n\n{_explanation(found)}", _claims(found), _answer(found))


def _answer(found: dict[str, Outcome]) -> str:
    """Which k is best, beside what, and what it does to the memory."""
    parts, beats = [], []
    for update in _RULES:
        by_topk = of_rule(found, update)
        if not by_topk:
            continue
        best = min(by_topk, key=lambda topk: by_topk[topk].mean)
        adamw = [found[name] for name in (ADAMW, ADAMW_SEARCHED) if name in found]
        beats += [all(is_below(by_topk[best], one) for one in adamw)] if adamw else []
        few, many = (by_topk[topk].rows[0]["memory"] for topk in (min(by_topk), max(by_topk)))
        parts.append(
            f"with the {update} rule k = {best} is best, {by_topk[best].mean:.3f}, and the residual is {few:.1f} gradients "
            f"large at k = {min(by_topk)} and {many:.1f} at k = {max(by_topk)}"
        )
    if not parts:
        return ""
    dense = ", ".join(f"{name} {found[name].mean:.3f}" for name in (ADAMW, ADAMW_SEARCHED, *SIGNUM, MUON) if name in found)
    lead = "It can" if beats and all(beats) else "With some rules it can" if any(beats) else "Here it does not"
    return (
        f"{lead}, since what is sent is not Signum: signs of coefficients, averaged and transformed back, are a direction "
        f"with sizes, and k decides how much of the past stays in the residual. In these rows {'; '.join(parts)}. "
        f"Optimizers on gradients that are averaged in full: {dense or 'not trained'}."
    )


def _whole(decay: float) -> float:
    """The size, in gradients, of a momentum of independent gradients that loses nothing by being sent."""
    return math.sqrt(1 / (1 - decay**2))


def _explanation(found: dict[str, Outcome]) -> str:
    decays = {
        update: one.rows[0]["trial"]["settings"]["momentum_decay"]
        for update in _RULES
        for one in list(of_rule(found, update).values())[:1]
    }
    whole = " and ".join(f"{_whole(decay):.1f} ({update} rule)" for update, decay in decays.items())
    return (
        "What is sent leaves the residual, so k decides how much of the past a replica remembers. The last column is the "
        f"size of its residual momentum, in gradients; a momentum from which nothing is taken would have {whole}, if "
        "gradients were independent of each other. With all coefficients sent, only what one bit could not say stays "
        "behind; Signum's momentum loses nothing by being used. And what arrives is not a sign per parameter: signs of "
        f"coefficients, averaged and transformed back, are a direction with sizes, and the update rule sees those. "
        f"{SEARCHED_WORDS}"
    )


def _memory(one: Outcome) -> str:
    return "-" if one.rows[0]["memory"] is None else f"{one.rows[0]['memory']:.2f}"


def _claims(found: dict[str, Outcome]) -> list[Claim]:
    claims = []
    signum = min((found[name] for name in SIGNUM if name in found), key=lambda one: one.mean, default=None)
    for update in _RULES:
        by_topk = of_rule(found, update)
        if not by_topk:
            continue
        best = min(by_topk, key=lambda topk: by_topk[topk].mean)
        adamw = [(found.get(name), name) for name in (ADAMW, ADAMW_SEARCHED)]
        for rival, words in (*adamw, (signum, "dense Signum at its better decay")):
            if rival is not None:
                text = f"with the {update} rule the best k, {best}, reaches {by_topk[best].mean:.3f}, below {words}"
                claims.append(Claim(f"{text} ({rival.mean:.3f})", is_below(by_topk[best], rival)))
        claims += _claims_on_size(update, by_topk, best)
    sent_all = found.get(name_of("sign", ALL))
    if sent_all is not None and signum is not None:
        text = "with all coefficients sent the sign rule is no Signum: it ends below dense Signum at its better decay"
        claims.append(Claim(f"{text} ({sent_all.mean:.3f} and {signum.mean:.3f})", is_below(sent_all, signum)))
    return claims


def _claims_on_size(update: str, by_topk: dict[int, Outcome], best: int) -> list[Claim]:
    ends = (min(by_topk), max(by_topk))
    words = " and ".join(f"{by_topk[topk].mean:.3f} at k = {topk}" for topk in ends)
    text = (
        f"with the {update} rule every seed ends lower at k = {best} than at the least and the most: "
        f"{by_topk[best].mean:.3f}, {words}"
    )
    memories = [by_topk[topk].rows[0]["memory"] for topk in sorted(by_topk)]
    shrinks = (
        f"with the {update} rule the residual shrinks with every larger k, from {memories[0]:.2f} to {memories[-1]:.2f}"
    )
    return [
        Claim(text, all(is_below(by_topk[best], by_topk[end]) for end in ends)),
        Claim(f"{shrinks} gradients", all(more > less for more, less in pairwise(memories))),
    ]


def _draw(rows: Sequence[Row], results: Path) -> dict[str, Drawing]:
    found = _outcomes(rows)
    page = Page(2)
    losses, memories = page.panels
    for index, update in enumerate(_RULES):
        by_topk = of_rule(found, update)
        if by_topk:
            spread = [(min(one.losses), max(one.losses)) for one in by_topk.values()]
            line(losses, [(topk, one.mean) for topk, one in by_topk.items()], f"{update} rule", index, spread)
            line(memories, [(topk, one.rows[0]["memory"]) for topk, one in by_topk.items()], f"{update} rule", index)
    dense = sorted((found[name].mean, name) for name in (*SIGNUM, SGD, ADAMW, ADAMW_SEARCHED, MUON) if name in found)
    for loss, name in dense:
        rule(losses, loss, name)
    for axes in page.panels:
        logarithmic(axes, [topk for topk in _TOPKS if topk not in (2, 8)])
        room_for_labels(axes, 0.2)
    title(losses, "Loss, each at its best learning rate", "coefficients sent of 4096", "validation loss (nats per byte)")
    title(memories, "What a replica remembers", "coefficients sent of 4096", "residual momentum, in gradients")
    caption = (
        "Last validation loss against k, with the range over seeds, and the levels of optimizers on gradients "
        "that are averaged in full; and how large the residual momentum is after sending."
    )
    return {"why_k.png": Drawing(page, caption)}


STUDY = Study(
    "q4",
    "A larger k",
    "Why can a larger k beat AdamW, if everything sent is only Signum?",
    find=_find,
    plan=_plan,
    draw=_draw,
)
