"""q2: do components that are sent vary less in time than those that are kept?

How alike two steps are in a group of components is the cosine of the gradient's DCT coefficients at the two steps, over the
components of the group, without taking means away. A direction that never changes, with noise that is drawn anew at each
step, gives the direction's share of the energy, at every lag; noise alone gives 0. The share that is missing to 1 is what
varies. Cosines are averaged over steps, each of which counts the same, and all of it is of replica 0.

A choice must not be judged by the noise that led to it. So ``sent`` and ``kept`` are what a step t has sent and kept, and
the gradients compared are those of step t + 1 and of step t + 1 + lag. ``often``, ``seldom`` and ``never`` are counted in
the first half of the steps, and the gradients are compared in the second. The first tenth of the steps is left out.

``values`` and ``residual`` are no gradients: they are what was sent, 0 where nothing was, and what stayed behind, each
compared with itself ``lag`` steps later. The residual is a sum over many steps, and two sums that share most of their parts
are alike whatever the parts are.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.local_step import LocalStep
from thinwire.studies.chunks import KINDS, take_samples, to_coefficients, watched_trials
from thinwire.studies.figure import Drawing, Page, line, logarithmic, room_for_labels, rule, title
from thinwire.studies.simulation import Simulation, VirtualReplicas
from thinwire.studies.study import Claim, Finding, Study, table, verdict
from thinwire.studies.trials import Row, Trial, train

LAGS = (1, 2, 4, 8, 16)
GROUPS = ("sent", "kept", "often", "seldom", "never", "values", "residual")
_WORDS = {"values": "sent values", "residual": "residual itself"}
_EDGE = 64
_MOST_CHUNKS = 8
# A component is sent often if it is so many times as often as all are on average, or more.
_OFTEN = 4
# Of gradients; what is no gradient has panels of its own, with another scale.
_DRAWN, _THEMSELVES = ("sent", "kept", "often", "seldom", "never"), ("values", "residual")
_LEAST_RANGE = 0.2


class Record(NamedTuple):
    """T steps of N chunks, (T, N, row_edge, col_edge) each: the gradient's coefficients, which were sent, the residual."""

    gradient: Tensor
    is_sent: Tensor
    residual: Tensor


class Recorder:
    """Writes down some chunks of replica 0 at every step, on the device they are on."""

    def __init__(self, simulation: Simulation, edge: int, num_steps: int) -> None:
        assert isinstance(simulation.method, VirtualReplicas)
        self._method, self._step = simulation.method, 0
        self._samples = take_samples(simulation.method, edge, _MOST_CHUNKS)
        self._records = [_empty(num_steps, len(s.chunks_N), edge, s.chunks_N.device) for s in self._samples]
        simulation.method.watchers.append(self.watch)

    def watch(self, replica: int, local: LocalStep) -> None:
        """See `thinwire.studies.simulation.Watcher`."""
        if replica != 0:
            return
        for sample, record in zip(self._samples, self._records, strict=True):
            record.gradient[self._step] = to_coefficients(sample.gradient_of(local))
            record.is_sent[self._step] = sample.is_sent_in(self._method.payloads_RB[0])
            record.residual[self._step] = sample.residual_of(local)
        self._step += 1

    def of(self, kind: str) -> Record | None:
        """What there is of a layer kind, if there is any."""
        pairs = zip(self._samples, self._records, strict=True)
        mine = [record for sample, record in pairs if sample.kind == kind]
        if not mine:
            return None
        return Record(*(torch.cat(parts, dim=1)[: self._step] for parts in zip(*mine, strict=True)))


def _empty(num_steps: int, num_chunks: int, edge: int, device: torch.device) -> Record:
    shape = (num_steps, num_chunks, edge, edge)
    gradient, residual = torch.zeros(shape, device=device), torch.zeros(shape, device=device)
    return Record(gradient, torch.zeros(shape, dtype=torch.bool, device=device), residual)


def likeness(first_T: Tensor, second_T: Tensor, group_T: Tensor | None = None) -> float | None:
    """The mean over steps of the cosine over the components in the group; steps with nothing in it do not count."""
    first, second = (one if group_T is None else one * group_T for one in (first_T, second_T))
    first, second = first.flatten(1), second.flatten(1)
    products = (first * second).sum(dim=1)
    norms = first.norm(dim=1) * second.norm(dim=1)
    is_there = norms > 0
    num_there = int(is_there.sum())
    return float((products[is_there] / norms[is_there]).sum() / num_there) if num_there else None


def measure(record: Record, decay: float) -> dict[str, list[float | None]]:
    """The `likeness` of every group at every lag, see above."""
    gradient, is_sent, residual = (one[len(record.gradient) // 10 :] for one in record)
    by_count, second_half = groups_by_count(is_sent), gradient[len(gradient) // 2 :]
    values = torch.zeros_like(gradient)
    values[1:] = is_sent[1:] * (decay * residual[:-1] + gradient[1:] - residual[1:])
    found: dict[str, list[float | None]] = {group: [] for group in GROUPS}
    for lag in LAGS:
        chosen = is_sent[: -1 - lag]
        for group, is_in in (("sent", chosen), ("kept", ~chosen)):
            found[group].append(likeness(gradient[1:-lag], gradient[1 + lag :], is_in))
        for group, is_in in by_count.items():
            found[group].append(likeness(second_half[:-lag], second_half[lag:], is_in))
        for group, series in (("values", values[1:]), ("residual", residual)):
            found[group].append(likeness(series[:-lag], series[lag:]))
    return found


def groups_by_count(is_sent: Tensor) -> dict[str, Tensor]:
    """Which components were sent often, seldom and never in the first half of the steps."""
    counts = is_sent[: len(is_sent) // 2].sum(dim=0)
    is_often, is_never = counts >= _OFTEN * counts.float().mean(), counts == 0
    return {"often": is_often & ~is_never, "seldom": ~is_often & ~is_never, "never": is_never}


def sizes(record: Record) -> dict[str, float]:
    """The share of components in each group, for ``sent`` and ``kept`` that of a step."""
    is_sent = record.is_sent[len(record.is_sent) // 10 :]
    groups = {"sent": is_sent, "kept": ~is_sent, **groups_by_count(is_sent)}
    return {group: float(is_in.float().mean()) for group, is_in in groups.items()}


class TimeTrial(Trial):
    """A training whose row says how alike the steps were."""

    def run(self, device: torch.device) -> Row:
        """See `Trial`."""
        simulation, config = self.build(device), self.config
        recorder = Recorder(simulation, min(_EDGE, config.optim.chunk), config.schedule.steps)
        row = train(self, simulation)
        found = []
        for kind in KINDS:
            record = recorder.of(kind)
            if record is not None and len(record.gradient) > 4 * max(LAGS):
                likenesses = measure(record, config.optim.momentum_decay)
                shares = {group: round(share, 5) for group, share in sizes(record).items()}
                found.append({"kind": kind, "likeness": _rounded(likenesses), "sizes": shares})
        return {**row, "time": found}

    def made_up(self, chance: random.Random) -> Row:
        """See `Trial`."""
        entries = []
        for kind in KINDS:
            likenesses = {group: [chance.uniform(-0.1, 0.9) for _ in LAGS] for group in GROUPS}
            shares = {group: chance.random() for group in _DRAWN}
            entries.append({"kind": kind, "likeness": likenesses, "sizes": shares})
        return {"time": entries}


def _rounded(likenesses: Mapping[str, Sequence[float | None]]) -> dict[str, list[float | None]]:
    return {group: [one if one is None else round(one, 5) for one in some] for group, some in likenesses.items()}


def _plan(size: str, rows: Sequence[Row]) -> list[Trial]:
    return watched_trials(TimeTrial, size)


def _entries(rows: Sequence[Row]) -> list[tuple[str, Row]]:
    """All that was measured, with the update rule."""
    return [(row["trial"]["settings"]["update"], entry) for row in rows for entry in row["time"]]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _likeness_at(rows: Sequence[Row], update: str, kind: str, group: str, place: int) -> float | None:
    """Mean over seeds, at one lag."""
    mine = [entry for one, entry in _entries(rows) if (one, entry["kind"]) == (update, kind)]
    return _mean([entry["likeness"][group][place] for entry in mine])


def _lines(rows: Sequence[Row]) -> Iterator[list[str]]:
    for update, kind in dict.fromkeys((update, entry["kind"]) for update, entry in _entries(rows)):
        sized = [entry["sizes"] for one, entry in _entries(rows) if (one, entry["kind"]) == (update, kind)]
        for group in GROUPS:
            share = _mean([sizes.get(group) for sizes in sized])
            found = [_likeness_at(rows, update, kind, group, place) for place in range(len(LAGS))]
            cells = ["" if one is None else f"{one:.3f}" for one in found]
            size = "" if share is None else f"{100 * share:.1f} %"
            yield [f"{update} rule, {kind}, {_WORDS.get(group, group)}", size, *cells]


def _compared(rows: Sequence[Row], more: str, less: str, text: str) -> Claim:
    """Whether the first of two groups is more alike in every training and layer kind, on average over lags."""
    pairs = [[_mean(entry["likeness"][group]) for group in (more, less)] for _, entry in _entries(rows)]
    gains = [first - second for first, second in pairs if first is not None and second is not None]
    if not gains:
        return Claim(f"{text} (nothing to compare)", False)
    num_won = sum(gain > 0 for gain in gains)
    counted = f"{num_won} of {len(gains)}; {sum(gains) / len(gains):+.3f} on average, {min(gains):+.3f} at worst"
    return Claim(f"{text}, in every training and layer kind on average over lags ({counted})", num_won == len(gains))


def _find(rows: Sequence[Row], results: Path) -> Finding:
    if not _entries(rows):
        return Finding("")
    head = (
        "How alike two steps are, by the number of steps between them: the cosine of the gradient's coefficients in a group "
        "of components, for sent values and residual that of themselves. 1 is always the same, 0 is noise. Often is "
        f"{_OFTEN} times as often as the average component, or more; the share is that of all components."
    )
    lags = [f"{lag} step{'s' if lag > 1 else ''}" for lag in LAGS]
    text = f"{head}\n\n{table(('group', 'share', *lags), list(_lines(rows)))}"
    claims = [
        _compared(rows, "sent", "kept", "the gradient of what was just sent varies less than that of what was kept"),
        _compared(rows, "often", "never", "the gradient of what is often sent varies less than that of what never is"),
        _compared(rows, "values", "residual", "sent values vary less than the residual, which is a sum over many steps"),
    ]
    lead = verdict(claims[:2], "Yes", "Only in part", "No, not in every training and layer kind")
    mean = {
        group: _mean([one for _, entry in _entries(rows) for one in entry["likeness"][group]])
        for group in ("sent", "kept", "often", "never", "values", "residual")
    }
    words = {group: "unknown" if one is None else f"{one:.3f}" for group, one in mean.items()}
    answer = (
        f"{lead}. How alike two steps are, as a cosine, on average: the gradient of what was just sent {words['sent']}, of "
        f"what was kept {words['kept']}; of what is sent often {words['often']}, of what never is {words['never']}; 0 is "
        f"noise. The values that are sent have {words['values']}, the residual, a sum over many steps, {words['residual']}."
    )
    return Finding(text, claims, answer)


def _draw(rows: Sequence[Row], results: Path) -> dict[str, Drawing]:
    figures = {}
    for update in dict.fromkeys(update for update, _ in _entries(rows)):
        page = Page(2 * len(KINDS), height=3.8, columns=len(KINDS))
        for axes, (groups, kind) in zip(page.panels, product((_DRAWN, _THEMSELVES), KINDS), strict=True):
            for index, group in enumerate(GROUPS):
                if group not in groups:
                    continue
                found = [(lag, _likeness_at(rows, update, kind, group, place)) for place, lag in enumerate(LAGS)]
                points = [(lag, one) for lag, one in found if one is not None]
                if points:
                    line(axes, points, _WORDS.get(group, group), index)
            rule(axes, 0.0, "noise")
            low, high = axes.get_ylim()
            axes.set_ylim(min(low, -_LEAST_RANGE), max(high, _LEAST_RANGE))  # else noise would fill the panel
            logarithmic(axes, LAGS)
            of_what = "gradients" if groups == _DRAWN else "what is sent and what stays"
            title(axes, f"{kind}, {update} rule: {of_what}", "steps between", "likeness (cosine)")
            room_for_labels(axes)
        caption = (
            f"How alike the gradients of two steps are in components that replica 0 sent or kept, with the {update} rule; "
            "and, below, how alike are the values that it sent, and its residual."
        )
        figures[f"time_{update}.png"] = Drawing(page, caption)
    return figures


STUDY = Study(
    "q2",
    "What varies in time",
    "Do components that are sent vary less in time than those that are kept (conjecture 2)?",
    find=_find,
    plan=_plan,
    draw=_draw,
)
