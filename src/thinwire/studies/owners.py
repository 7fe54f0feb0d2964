"""owners: does training bear an owner exchange? The loss for several numbers of coefficients that owners answer with."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from thinwire.exchange.plan import OWNER_TIMES
from thinwire.studies.figure import Drawing, Page, line, logarithmic, room_for_labels, rule, title
from thinwire.studies.study import FULL, SMALL, Claim, Finding, Study, table
from thinwire.studies.trials import Row, Trial
from thinwire.studies.tuning import SEEDS

_RULES: dict[str, dict[str, Any]] = {
    "muon": {"update": "muon", "lr": 4e-2, "topk": 64, "momentum_decay": 0.95},
    "sign": {"update": "sign", "lr": 1e-3, "topk": 32, "momentum_decay": 0.99},
}
_COMMON: dict[str, Any] = {"combine": "mean_over_replicas", "batch": 64, "warmup_steps": 30, "eval_examples": 512}
_LONG = {"steps": 600, "eval_every": 100}
_SHORT = {"steps": 60, "eval_every": 60, "layers": 2, "width": 96, "heads": 2, "mlp_width": 192, "sequence": 64}
_TIMES = (2, 4, 8, 16)


def _plan(size: str, rows: Sequence[Row]) -> list[Trial]:
    small = size == SMALL
    trials = []
    for seed in SEEDS:
        for num_replicas in (8,) if small else (8, 64):
            for name, settings in _RULES.items():
                if small and name == "sign":
                    continue
                base = {**settings, "seed": seed, **_COMMON, **(_SHORT if small else _LONG)}
                trials.append(Trial("quickstart", num_replicas, settings=base))
                for times in (2, 8) if small else _TIMES:
                    owner = {"exchange": "owner", "owner_topk": times * settings["topk"]}
                    trials.append(Trial("quickstart", num_replicas, settings={**base, **owner}))
    return trials


Key = tuple[str, int, int]
"""Rule, replicas, and how many times a sender's coefficients owners answer with; 0 is an all-gather."""


def _losses(rows: Sequence[Row]) -> dict[Key, list[float]]:
    found: dict[Key, list[float]] = {}
    for row in rows:
        settings = row["trial"]["settings"]
        times = settings.get("owner_topk", 0) // settings["topk"]
        if row["loss"] is not None:
            found.setdefault((settings["update"], row["trial"]["replicas"], times), []).append(row["loss"])
    return found


def _words(losses: Sequence[float]) -> str:
    return f"{statistics.mean(losses):.3f} ({min(losses):.3f} to {max(losses):.3f})" if losses else ""


def _find(rows: Sequence[Row], results: Path) -> Finding:
    found = _losses(rows)
    cases = sorted({(name, replicas) for name, replicas, _ in found})
    times = sorted({one for _, _, one in found if one})
    lines = [
        (f"{name} rule, {replicas} replicas", *(_words(found.get((name, replicas, one), [])) for one in (0, *times)))
        for name, replicas in cases
    ]
    claims = []
    for name, replicas in cases:
        everyone = found.get((name, replicas, 0))
        for one in times:
            mine = found.get((name, replicas, one))
            if everyone and mine:
                gap = statistics.mean(mine) - statistics.mean(everyone)
                text = f"{name} rule, {replicas} replicas, K' = {one} K: within the seeds of an all-gather ({gap:+.3f})"
                claims.append(Claim(text, min(mine) <= max(everyone)))
    text = table(("", "all-gather", *(f"owners, K' = {one} K" for one in times)), lines)
    return Finding(text, claims, _answer(found, cases, times))


def _answer(found: dict[Key, list[float]], cases: Sequence[tuple[str, int]], times: Sequence[int]) -> str:
    """What answers of the usual size cost, and the best ones."""
    parts = []
    for name, replicas in cases:
        everyone = found.get((name, replicas, 0))
        gaps = {
            one: statistics.mean(mine) - statistics.mean(everyone)
            for one in times
            if everyone and (mine := found.get((name, replicas, one)))
        }
        if gaps:
            best = min(gaps, key=lambda one: gaps[one])
            usual = f"{gaps[OWNER_TIMES]:+.3f} with {OWNER_TIMES} K, " if OWNER_TIMES in gaps and best != OWNER_TIMES else ""
            parts.append(
                f"{name} rule, {replicas} replicas: {usual}{gaps[best]:+.3f} with {best} K, the best of those tried"
            )
    head = "Beside an all-gather, by the coefficients in an answer, of which DeMo's default is"
    return f"{head} {OWNER_TIMES} K, the loss changes by: {'; '.join(parts)}." if parts else ""


def _draw(rows: Sequence[Row], results: Path) -> dict[str, Drawing]:
    found = _losses(rows)
    names = [name for name in _RULES if any(key[0] == name for key in found)]
    page = Page(len(names))
    for axes, name in zip(page.panels, names, strict=True):
        for index, replicas in enumerate(sorted({key[1] for key in found if key[0] == name})):
            mine = {
                one: losses for (rule_, count, one), losses in found.items() if (rule_, count) == (name, replicas) and one
            }
            points = [(float(one), statistics.mean(losses)) for one, losses in mine.items()]
            spread = [(min(mine[one]), max(mine[one])) for one in sorted(mine)]
            line(axes, points, f"{replicas} replicas", 2 * index, spread)
            if (name, replicas, 0) in found:
                rule(axes, statistics.mean(found[name, replicas, 0]), f"all-gather, {replicas} replicas")
        logarithmic(axes, sorted({key[2] for key in found if key[2]}), " K")
        room_for_labels(axes)
        title(axes, f"{name} rule", "coefficients that owners answer with", "validation loss (nats per byte)")
    caption = "Last validation loss, mean and range of the seeds, against the coefficients in an owner's answer."
    return {"owners.png": Drawing(page, caption)}


STUDY = Study(
    "owners",
    "Owner exchange",
    "What does an owner exchange cost in loss, for how many coefficients in the answers?",
    find=_find,
    plan=_plan,
    draw=_draw,
    sizes=(SMALL, FULL),
)
