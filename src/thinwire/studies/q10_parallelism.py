"""q10: what of other parallelism, and of mixed precision? Sharded replicas against whole ones, in real processes; and
bfloat16 in compute, momentum and parameters, in the simulator."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from thinwire.exchange.plan import ExchangePlan
from thinwire.parallel.rehearsal import Rehearsal, difference, on_a_mesh, on_whole_replicas
from thinwire.slabs import LocalTensor
from thinwire.studies.figure import Drawing, Page, dots_above_names, title
from thinwire.studies.settings import DEMO_RULES, text_trial
from thinwire.studies.simulation import Simulation, VirtualReplicas
from thinwire.studies.study import SIZES, Claim, Finding, Study, table, verdict
from thinwire.studies.trials import Row, Trial, train
from thinwire.studies.tuning import Contender, Outcome, outcomes, seeds_for
from thinwire.training.config import TrainConfig

_FLOAT, _SHORT = "float32", "bfloat16"
# Sums in another order: a few units in the last place.
_ROUNDING = 1e-5
# Nats per byte that count as little.
_LITTLE = 0.02


@dataclass(frozen=True)
class MeshTrial(Trial):
    """A rehearsal on a mesh of processes, and the same on whole replicas; no recipe of the trainer."""

    shards: int = 1
    tensor_parallel: int = 1
    compute_dtype: str = _FLOAT

    @property
    def config(self) -> TrainConfig:
        """None of its own."""
        return TrainConfig()

    def run(self, device: torch.device) -> Row:
        """Rehearse on CPUs: with given gradients, with a rule in which rounding stays rounding, and with DeMo's defaults."""
        plan = Rehearsal(self.replicas, self.shards, self.tensor_parallel, compute_dtype=self.compute_dtype)
        smooth = replace(plan, options={"update": "sgd", "values": "float32", "lr": 0.1})
        plans = [replace(plan, given_gradients=True), smooth, plan]
        ready = time.perf_counter()
        found = on_a_mesh(plans)
        seconds = time.perf_counter() - ready
        whole = [on_whole_replicas(one) for one in plans]
        given, trained, _ = (difference(*pair) for pair in zip(found, whole, strict=True))
        start = on_whole_replicas(replace(plan, steps=0))
        return {
            "trial": self.facts,
            "loss": round(found[2].loss, 6),
            "accuracy": None,
            "curve": [[plan.steps, round(found[2].loss, 6)]],
            "sent_bytes": found[2].sent_bytes,
            "parameters": sum(value.numel() for value in start.parameters.values()),
            "seconds": round(seconds, 2),
            "step_seconds": round(seconds / sum(one.steps for one in plans), 5),
            "given_difference": given,
            "trained_difference": trained,
            "moved": difference(whole[1], start),
            "whole_loss": round(whole[2].loss, 6),
            "whole_bytes": whole[2].sent_bytes,
            "agrees": all(one.agrees for one in found),
        }

    def made_up(self, chance: random.Random) -> Row:
        """See `Trial`."""
        sizes = {"given_difference": 0.0, "trained_difference": chance.uniform(0, 1e-6), "moved": 0.5}
        return {**sizes, "whole_loss": 1.5, "whole_bytes": 900, "agrees": True}


@dataclass(frozen=True)
class PrecisionTrial(Trial):
    """A training whose momentum or parameters are stored in another precision."""

    momentum_dtype: str = _FLOAT
    parameter_dtype: str = _FLOAT

    def build(self, device: torch.device) -> Simulation:
        """See `Trial`."""
        simulation = super().build(device)
        for parameter in simulation.model.parameters():
            parameter.data = parameter.data.to(_dtype(self.parameter_dtype))
        simulation.method = _Stored(_dtype(self.momentum_dtype), simulation.model, self.config, self.replicas)
        return simulation

    def run(self, device: torch.device) -> Row:
        """Train, and say what travels."""
        simulation = self.build(device)
        assert isinstance(simulation.method, VirtualReplicas)
        return {**train(self, simulation), "wire": what_travels(simulation.method.optimizer.plan)}

    def made_up(self, chance: random.Random) -> Row:
        """See `Trial`."""
        return {"wire": "9 + 1 bits (sign), 8 bits (int8)"}


class _Stored(VirtualReplicas):
    """Replicas with a momentum of another precision."""

    def __init__(self, dtype: torch.dtype, model: torch.nn.Module, config: TrainConfig, num_replicas: int) -> None:
        self._dtype = dtype
        super().__init__(model, config, num_replicas)

    def _first_tensors(self) -> list[LocalTensor]:
        return [replace(one, momentum_CE=one.momentum_CE.to(self._dtype)) for one in super()._first_tensors()]


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found


def what_travels(plan: ExchangePlan) -> str:
    """Bits of a coefficient's index and value, and the value codec, of every kind of record; most bytes first."""
    sizes: dict[str, int] = {}
    for stack in (stack for bucket in plan.buckets for stack in bucket.stacks):
        codec = stack.codec
        index = f"{codec.index_bits / codec.num_kept:.1f} + " if codec.index_bits else ""
        words = f"{index}{codec.value_codec.num_bits} bits ({codec.value_name})"
        sizes[words] = sizes.get(words, 0) + stack.num_bytes
    return ", ".join(sorted(sizes, key=lambda words: -sizes[words]))


_MESHES = {
    "2 whole replicas": MeshTrial("rehearsal", 2),
    "HSDP: 2 replicas on 2 ranks each": MeshTrial("rehearsal", 2, shards=2),
    "FSDP2: 1 replica on 2 ranks": MeshTrial("rehearsal", 1, shards=2),
    "TP: 2 replicas on 2 ranks each": MeshTrial("rehearsal", 2, tensor_parallel=2),
    "FSDP2 and TP: 1 replica on 2 x 2 ranks": MeshTrial("rehearsal", 1, shards=2, tensor_parallel=2),
    "HSDP, bfloat16 compute": MeshTrial("rehearsal", 2, shards=2, compute_dtype=_SHORT),
}


class Case(NamedTuple):
    """A rule with something in bfloat16."""

    rule: str
    precision: str
    contender: Contender


_WHOLE = "all float32"
_IN_SHORT: dict[str, dict[str, Any]] = {
    _WHOLE: {},
    "bfloat16 compute": {"precision": _SHORT},
    "bfloat16 momentum": {"momentum_dtype": _SHORT},
    "bfloat16 parameters": {"parameter_dtype": _SHORT},
}


def _cases(size: str) -> list[Case]:
    found = []
    for rule, start in DEMO_RULES[size].items():
        for precision, choice in _IN_SHORT.items():
            stored = {name: value for name, value in choice.items() if name != "precision"}
            base = text_trial(size, settings={**start.settings, "precision": choice.get("precision", _FLOAT)})
            trial = PrecisionTrial(base.recipe, base.replicas, base.optimizer, base.settings, **stored)
            found.append(Case(rule, precision, Contender(f"{rule} {precision}", trial, start.rate)))
    return found


def _plan(size: str, rows: Sequence[Row]) -> list[Trial]:
    """All at one learning rate: the point is that nothing else is changed."""
    cases = [case.contender for case in _cases(size)]
    return [*_MESHES.values(), *(one.at(one.rate, seed) for one in cases for seed in seeds_for(size))]


def _mesh_rows(rows: Sequence[Row]) -> dict[str, Row]:
    return {name: row for name, trial in _MESHES.items() for row in rows if row["trial"] == trial.facts}


def _outcomes(rows: Sequence[Row]) -> dict[tuple[str, str], Outcome]:
    """By rule and precision; of the larger size, if it was run."""
    for cases in map(_cases, reversed(SIZES)):
        if found := outcomes([case.contender for case in cases], rows):
            return {(one.rule, one.precision): found[one.contender.name] for one in cases if one.contender.name in found}
    return {}


def _find(rows: Sequence[Row], results: Path) -> Finding:
    meshes, found = _mesh_rows(rows), _outcomes(rows)
    sharded = [
        (
            name,
            f"{row['given_difference']:.1g}",
            f"{row['trained_difference']:.1g}",
            f"{row['loss']:.4f}",
            f"{row['whole_loss']:.4f}",
            f"{row['sent_bytes']:,}",
            f"{row['whole_bytes']:,}",
        )
        for name, row in meshes.items()
    ]
    head = ("mesh", "given gradients", "trained", "loss", "of whole replicas", "sent bytes", "of whole replicas")
    lines = []
    for (rule, precision), one in found.items():
        whole = found.get((rule, _WHOLE))
        beside = "" if whole is None else f"{one.mean - whole.mean:+.3f}"
        lines.append((f"{rule} rule, {precision}", one.words, beside, f"{one.rows[0]['sent_bytes']:,}", one.rows[0]["wire"]))
    text = (
        "Largest differences of a parameter from that of whole replicas after 8 steps: with the same gradients on both, and "
        "trained (sgd rule, float values). The losses are the sign rule's. Bytes are those of all ranks of a replica at a "
        "step: every rank has a header of its own, and what TP does not split, all of its ranks send.\n\n"
        f"{table(head, sharded)}\n\n"
        "Trained in the simulator, at one learning rate per rule; what travels is bits per index and value.\n\n"
        f"{table(('stored or computed in', 'loss', 'beside float32', 'sent bytes', 'what travels'), lines)}"
    )
    return Finding(text, [*_mesh_claims(meshes), *_precision_claims(found)], _answer(meshes, found))


def _answer(meshes: dict[str, Row], found: dict[tuple[str, str], Outcome]) -> str:
    parts, claims = [], _mesh_claims(meshes)
    if claims:
        lead = verdict(claims, "give", "give, in part,", "do not give")
        given = max(row["given_difference"] for row in meshes.values())
        words = f"Replicas that FSDP2, HSDP or tensor parallel plans spread over ranks {lead} the result of whole ones"
        parts.append(f"{words}: given the same gradients, parameters differ by {given:.1g} at most.")
    gaps = [
        f"{rule} rule, {precision} {_gap_in_words(gap)}"
        for (rule, precision), one in found.items()
        if precision != _WHOLE and (whole := found.get((rule, _WHOLE))) is not None and (gap := _gaps(one, whole))
    ]
    if gaps:
        wires = dict.fromkeys(f"{rule} rule {row['wire']}" for (rule, _), one in found.items() for row in one.rows)
        bits = "; ".join(wires)
        parts.append(f"With one thing in bfloat16, the loss changes: {'; '.join(gaps)}. Bits per index and value: {bits}.")
    return " ".join(parts)


def _mesh_claims(meshes: dict[str, Row]) -> list[Claim]:
    if not meshes:
        return []
    plain = [row for row in meshes.values() if row["trial"]["compute_dtype"] == _FLOAT]
    claims = [Claim("after a rehearsal all ranks hold the same bits", all(row["agrees"] for row in meshes.values()))]
    given = max(row["given_difference"] for row in meshes.values())
    claims.append(Claim("given the same gradients, sharded replicas end with the bits of whole ones", given == 0))
    if plain:
        trained, moved = max(row["trained_difference"] for row in plain), min(row["moved"] for row in plain)
        text = f"trained, they end within rounding of whole ones: {trained:.1g}, where parameters moved by up to {moved:.2g}"
        claims.append(Claim(text, trained < _ROUNDING))
    return claims


def _gaps(one: Outcome, other: Outcome) -> list[float]:
    """By the seed: each has the same start and data in both."""
    found, beside = ({row["trial"]["settings"].get("seed", 0): row["loss"] for row in each.rows} for each in (one, other))
    return [found[seed] - beside[seed] for seed in sorted(found.keys() & beside.keys())]


def _gap_in_words(gaps: Sequence[float]) -> str:
    """Mean and range."""
    return f"{sum(gaps) / len(gaps):+.3f} ({min(gaps):+.3f} to {max(gaps):+.3f} by seed)"


def _precision_claims(found: dict[tuple[str, str], Outcome]) -> list[Claim]:
    claims = []
    for rule in dict.fromkeys(rule for rule, _ in found):
        mine = {precision: one for (of, precision), one in found.items() if of == rule}
        sent = {(row["sent_bytes"], row["wire"]) for one in mine.values() for row in one.rows}
        claims.append(Claim(f"with the {rule} rule, precision changes nothing about what travels", len(sent) == 1))
        for precision in (name for name in mine if name != _WHOLE and _WHOLE in mine):
            if gaps := _gaps(mine[precision], mine[_WHOLE]):
                text = f"with the {rule} rule, {precision} ends less than {_LITTLE} nats per byte above float32 in the mean"
                claims.append(Claim(f"{text}: {_gap_in_words(gaps)}", sum(gaps) / len(gaps) < _LITTLE))
    return claims


def _draw(rows: Sequence[Row], results: Path) -> dict[str, Drawing]:
    found = _outcomes(rows)
    rules = list(dict.fromkeys(rule for rule, _ in found))
    page = Page(max(1, len(rules)), height=3.6, width=4.8)
    for axes, rule in zip(page.panels, rules, strict=False):
        dots_above_names(axes, {precision: one.losses for (of, precision), one in found.items() if of == rule})
        title(axes, f"{rule.capitalize()} rule", "", "validation loss (nats per byte)")
    return {
        "precision.png": Drawing(
            page, "Last validation loss of every seed, with one thing in bfloat16 and the rest in float32."
        )
    }


STUDY = Study(
    "q10",
    "Other parallelism, and mixed precision",
    "What of other parallelism, and of mixed precision? Which bits travel?",
    find=_find,
    plan=_plan,
    draw=_draw,
)
