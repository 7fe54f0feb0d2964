"""q1: is the momentum's energy concentrated? Its share in the strongest few coefficients, in several bases.

All bases look at the same chunks of the same training, so no learning rate has to be tuned for this.
"""

import random
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from thinwire.local_step import LocalStep
from thinwire.studies.bases import BASES, share_in_noise, shares_by_basis
from thinwire.studies.chunks import KINDS, take_samples, to_elements, watched_trials
from thinwire.studies.figure import Drawing, Page, line, logarithmic, room_for_labels, title
from thinwire.studies.settings import DEMO_RULES
from thinwire.studies.simulation import Simulation, VirtualReplicas
from thinwire.studies.study import FULL, Claim, Finding, Study, table
from thinwire.studies.toy import STEPS as TOY_STEPS
from thinwire.studies.toy import run_toy
from thinwire.studies.trials import Row, Trial, train

COUNTS = (4, 16, 32, 64, 256)
PROBES = (0.05, 0.25, 0.5, 1.0)
# With what is sent taken out, as DeMo has it, and as it would be without sending.
SELECTED, GATHERED = "selected from", "gathered"
_OF = {SELECTED: "what is selected from", GATHERED: "all gradients"}
_EDGE = 64
_MOST_CHUNKS = 256
_SHOWN = 32
_MOST_SHOWN = 1024


class EnergyProbe:
    """Watches some chunks of replica 0 at every step, and measures at some.

    Of a chunk it measures two momenta. ``selected from`` is what a replica chooses its message from: the residual of the
    step before, decayed, plus this step's gradient. The strongest coefficients of a DCT have been taken out of it at every
    step before, which no other basis had to bear. ``gathered`` is the same sum of gradients with nothing taken out."""

    def __init__(self, simulation: Simulation, decay: float, edge: int, at_steps: Sequence[int]) -> None:
        assert isinstance(simulation.method, VirtualReplicas)
        self._samples = take_samples(simulation.method, edge, _MOST_CHUNKS)
        self._decay, self._at_steps, self._step = decay, at_steps, 0
        self._residuals: list[Tensor | float] = [0.0 for _ in self._samples]
        self._gathered: list[Tensor | float] = [0.0 for _ in self._samples]
        self.found: list[Row] = []
        """An entry per step, momentum, kind and basis: the shares for all `COUNTS`."""
        simulation.method.watchers.append(self.watch)

    def watch(self, replica: int, local: LocalStep) -> None:
        """See `thinwire.studies.simulation.Watcher`."""
        if replica != 0:
            return
        self._step += 1
        gradients = [sample.gradient_of(local) for sample in self._samples]
        self._gathered = [self._decay * old + new for old, new in zip(self._gathered, gradients, strict=True)]
        if self._step in self._at_steps:
            self._measure(GATHERED, self._gathered)
            self._measure(SELECTED, self.selected_from(gradients))
        self._residuals = [sample.residual_of(local) for sample in self._samples]

    def selected_from(self, gradients: Sequence[Tensor]) -> list[Tensor | float]:
        """What the replica has chosen from at this step, as elements."""
        pairs = zip(self._residuals, gradients, strict=True)
        return [new + (self._decay * to_elements(old) if isinstance(old, Tensor) else 0.0) for old, new in pairs]

    def _measure(self, of: str, momenta: Sequence[Tensor | float]) -> None:
        for kind in KINDS:
            pairs = zip(self._samples, momenta, strict=True)
            chunks = [one for sample, one in pairs if sample.kind == kind and isinstance(one, Tensor)]
            if not chunks or not all(bool(one.isfinite().all()) for one in chunks):
                continue  # a training that has failed is found out later, when it is scored
            for basis, shares in shares_by_basis(torch.cat(chunks), COUNTS).items():
                rounded = [round(share, 5) for share in shares]
                self.found.append({"step": self._step, "of": of, "kind": kind, "basis": basis, "shares": rounded})


class EnergyTrial(Trial):
    """A training whose row says where the momentum's energy was."""

    @property
    def at_steps(self) -> list[int]:
        """When it is measured."""
        return [max(1, round(share * self.config.schedule.steps)) for share in PROBES]

    def run(self, device: torch.device) -> Row:
        """See `Trial`."""
        simulation, optim = self.build(device), self.config.optim
        probe = EnergyProbe(simulation, optim.momentum_decay, min(_EDGE, optim.chunk), self.at_steps)
        return {**train(self, simulation), "energy": probe.found}

    def made_up(self, chance: random.Random) -> Row:
        """See `Trial`."""
        cases = product(self.at_steps, _OF, KINDS, BASES)
        names = ("step", "of", "kind", "basis")
        shares = [sorted(chance.random() for _ in COUNTS) for _ in product(self.at_steps, _OF, KINDS, BASES)]
        return {"energy": [{**dict(zip(names, c, strict=True)), "shares": s} for c, s in zip(cases, shares, strict=True)]}


def _plan(size: str, rows: Sequence[Row]) -> list[Trial]:
    return watched_trials(EnergyTrial, size)


Case = tuple[str, str, str, int, int]
"""Of which momentum, the rule, the kind, the seed, the step."""


def _cases(rows: Sequence[Row], count: int = _SHOWN) -> dict[Case, dict[str, float]]:
    """The share of so many coefficients by basis, for all that was measured."""
    found: dict[Case, dict[str, float]] = {}
    for row in rows:
        settings = row["trial"]["settings"]
        for entry in row["energy"]:
            case = (entry["of"], settings["update"], entry["kind"], settings.get("seed", 0), entry["step"])
            found.setdefault(case, {})[entry["basis"]] = entry["shares"][COUNTS.index(count)]
    return found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _lines(cases: dict[Case, dict[str, float]]) -> Iterator[list[str]]:
    """A line for each momentum, rule and kind: means over steps and seeds."""
    for head in dict.fromkeys(case[:3] for case in cases):
        mine = [shares for case, shares in cases.items() if case[:3] == head]
        means = [_mean([shares[basis] for shares in mine]) for basis in BASES]
        yield [f"{_OF[head[0]]}, {head[1]} rule, {head[2]}", *(f"{100 * mean:.1f} %" for mean in means)]


def _compared(cases: dict[Case, dict[str, float]], of: str) -> Iterator[Claim]:
    """The DCT against other bases that need not be sent."""
    mine = [shares for case, shares in cases.items() if case[0] == of]
    for other in ("identity", "Hadamard", "random"):
        gains = [shares["DCT"] - shares[other] for shares in mine]
        num_won = sum(gain > 0 for gain in gains)
        yield Claim(
            f"of {_OF[of]}, the strongest {_SHOWN} coefficients of a DCT hold more energy than those of the {other} basis, "
            f"in every layer kind at every probe ({num_won} of {len(gains)}; {100 * _mean(gains):+.1f} points on average, "
            f"{100 * min(gains):+.1f} at worst)",
            num_won == len(gains),
        )


def _claims(cases: dict[Case, dict[str, float]]) -> Iterator[Claim]:
    for of in _OF:
        yield from _compared(cases, of)
    noise = share_in_noise(_SHOWN, _EDGE**2)
    for of in _OF:
        shares = [one["DCT"] for case, one in cases.items() if case[0] == of]
        yield Claim(
            f"of {_OF[of]}, the strongest {_SHOWN} coefficients of a DCT hold more energy than of white noise "
            f"({100 * noise:.1f} %) in every case; at least {100 * min(shares):.1f} %",
            min(shares) > noise,
        )
        yield Claim(
            f"of {_OF[of]}, they hold more than half in every case; {100 * _mean(shares):.1f} % on average",
            min(shares) > 0.5,
        )
    gains = [one["fitted"] - one["DCT"] for one in cases.values()]
    yield Claim(
        f"a basis fitted to the layer kind would hold more than the DCT in every case; {100 * _mean(gains):+.1f} points on "
        f"average",
        min(gains) > 0,
    )


def _toy_claims() -> Iterator[Claim]:
    dct, plain = run_toy("DCT"), run_toy("identity")
    fast, slow = dct.steps_to(0.1, of_fast=True), dct.steps_to(0.1, of_fast=False)
    last = TOY_STEPS + 1
    text = f"in the toy, nine tenths of the fast error are gone by step {fast or last}, of the slow by step {slow or last}"
    yield Claim(text, (fast or last) < (slow or last))
    without = plain.steps_to(0.1, of_fast=True)
    text = f"in the toy, the fast error goes sooner with a DCT (step {fast or last}) than without (step {without or last})"
    yield Claim(text, (fast or last) < (without or last))
    dropped = run_toy("DCT", kept=0.0)
    text = (
        f"in the toy, the slow error goes because the residual is kept: {100 * dct.slow[-1]:.0f} % of it is left at the "
        f"end, {100 * dropped.slow[-1]:.0f} % if the residual is dropped"
    )
    yield Claim(text, dct.slow[-1] < dropped.slow[-1])


def _find(rows: Sequence[Row], results: Path) -> Finding:
    cases = _cases(rows)
    if not cases:
        return Finding("")
    head = (
        f"Share of the energy in the strongest {_SHOWN} of {_EDGE**2} coefficients, mean over probes and seeds. Of what is "
        "selected from, the strongest of a DCT were taken out at every step before, and those of no other basis; of all "
        "gradients, decayed and summed, nothing was. *Fitted* is the best separable basis of a layer kind, known only "
        "afterwards (a Karhunen-Loeve transform); *own SVD* is a basis of each chunk's own. The output layer counts as an "
        "embedding."
    )
    text = f"{head}\n\n{table(('of', *BASES), list(_lines(cases)))}"
    return Finding(text, [*_claims(cases), *_toy_claims()], _answer(cases))


def _answer(cases: dict[Case, dict[str, float]]) -> str:
    noise, parts, means = share_in_noise(_SHOWN, _EDGE**2), [], []
    for of, words in _OF.items():
        mine = [shares for case, shares in cases.items() if case[0] == of]
        mean = {basis: 100 * _mean([shares[basis] for shares in mine]) for basis in mine[0]}
        best = max(("identity", "Hadamard", "random"), key=lambda basis: mean[basis])
        means.append(mean["DCT"])
        parts.append(
            f"of {words}, the strongest {_SHOWN} of {_EDGE**2} coefficients of a DCT hold {mean['DCT']:.1f} % of the energy "
            f"on average, those of the {best} basis {mean[best]:.1f} %, of one fitted afterwards {mean['fitted']:.1f} %"
        )
    lead = "Yes" if min(means) > 50 else "No, less than half of it" if max(means) > 100 * noise else "No"
    dct, last = run_toy("DCT"), TOY_STEPS + 1
    fast, slow = (dct.steps_to(0.1, of_fast=of_fast) or last for of_fast in (True, False))
    return (
        f"{lead}: {'; '.join(parts)}. White noise would have {100 * noise:.1f} % there. Fast components are few and "
        f"steep, slow ones many and below the noise: in the toy, nine tenths of the fast error are gone by step {fast}, of "
        f"the slow by step {slow}."
    )


def _draw_over_training(rows: Sequence[Row]) -> Page:
    cases, page = _cases(rows), Page(len(KINDS))
    update = next(iter(DEMO_RULES[FULL]))
    for axes, kind in zip(page.panels, KINDS, strict=True):
        for index, basis in enumerate(BASES):
            points: dict[int, list[float]] = {}
            for (of, one, other, _, step), shares in cases.items():
                if (of, one, other) == (SELECTED, update, kind):
                    points.setdefault(step, []).append(100 * shares[basis])
            if points:
                line(axes, [(step, _mean(some)) for step, some in points.items()], basis, index)
        level = 100 * share_in_noise(_SHOWN, _EDGE**2)
        line(axes, [(step, level) for step in sorted({case[-1] for case in cases})], "white noise", len(BASES))
        title(axes, f"{kind}, {update} rule", "step", f"energy in the strongest {_SHOWN} (%)")
        room_for_labels(axes)
    return page


def _draw_over_counts(rows: Sequence[Row], of: str) -> Page:
    by_count, page = {count: _cases(rows, count) for count in COUNTS}, Page(len(KINDS))
    update = next(iter(DEMO_RULES[FULL]))
    for axes, kind in zip(page.panels, KINDS, strict=True):
        for index, basis in enumerate(BASES):
            points = []
            for count, cases in by_count.items():
                mine = [100 * shares[basis] for case, shares in cases.items() if case[:3] == (of, update, kind)]
                points += [(count, _mean(mine))] if mine else []
            if points:
                line(axes, points, basis, index)
        logarithmic(axes, COUNTS)
        title(axes, f"{kind}, {update} rule", f"coefficients of {_EDGE**2}", "energy in them (%)")
        room_for_labels(axes)
    return page


def _draw_toy() -> Page:
    page = Page(2)
    first, second = page.panels
    for index, basis in enumerate(("DCT", "identity")):
        course = run_toy(basis)
        pairs = zip(course.counts, course.shares, strict=True)
        line(first, [(count, 100 * share) for count, share in pairs if count <= _MOST_SHOWN], basis, index)
        for place, (word, left) in enumerate({"fast": course.fast, "slow": course.slow}.items()):
            points = [(step, 100 * one) for step, one in zip(course.steps, left, strict=True)]
            line(second, points, f"{word}, {basis}", 2 * index + place)
    dropped = run_toy("DCT", kept=0.0)
    points = [(step, 100 * one) for step, one in zip(dropped.steps, dropped.slow, strict=True)]
    line(second, points, "slow, DCT,\nresidual dropped", 4)
    logarithmic(first, (1, 4, 16, 64, 256, _MOST_SHOWN))
    logarithmic(second, (1, 10, 100, 1000))
    title(first, "The toy's momentum at step 11", "coefficients of 4096", "energy in them (%)")
    title(second, "Its fast and slow components", "step", "squared error left (%)")
    for axes in page.panels:
        room_for_labels(axes)
    return page


def _draw(rows: Sequence[Row], results: Path) -> dict[str, Drawing]:
    if not rows:
        return {}
    gathered = (
        "Energy of all gradients, decayed and summed, in their strongest coefficients, mean over probes and seeds. Fitted: "
        "one basis for a layer kind, known only afterwards. Own SVD: a basis for each chunk, which would have to be sent; "
        "no separable basis holds more."
    )
    selected = "The same of what is selected from, which has lost what was sent before."
    toy = "A matrix whose error is a few steep waves (fast) and many shallow ones, below the noise (slow)."
    return {
        "energy_gathered.png": Drawing(_draw_over_counts(rows, GATHERED), gathered),
        "energy_selected.png": Drawing(_draw_over_counts(rows, SELECTED), selected),
        "energy_training.png": Drawing(_draw_over_training(rows), "The latter over the training."),
        "toy.png": Drawing(_draw_toy(), toy),
    }


STUDY = Study(
    "q1",
    "Where the momentum's energy is",
    "What are fast and slow components, and is the momentum's energy concentrated in few of them (conjecture 1)?",
    find=_find,
    plan=_plan,
    draw=_draw,
)
