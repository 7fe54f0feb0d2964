"""frontier: validation loss against bytes sent per step, for DeMo with several k, codecs and rules, and every peer."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.lab.rows import Cell
from thinwire.options import RECOMMENDED_OPTIONS
from thinwire.planner.links import format_bytes
from thinwire.studies.figure import Drawing, Page, edge, logarithmic, lower_left, named_dots, title
from thinwire.studies.labels import Named
from thinwire.studies.measured import OURS, cells, curves, rounds
from thinwire.studies.process_trials import ProcessTrial
from thinwire.studies.q11_compressors import standings
from thinwire.studies.search import ADAMW, as_searched
from thinwire.studies.settings import DEMO_RULES, DENSE_RATES, text_trial
from thinwire.studies.study import FULL, MEDIUM, SIZES, SMALL, Claim, Finding, Study, table
from thinwire.studies.trials import Row, Trial
from thinwire.studies.tuning import Contender, Outcome, due, outcomes, seeds_for

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# As the network lab's peers were trained: two replicas, 400 steps of 16 sequences of 128 bytes.
_LAB: dict[str, Any] = {"steps": 400, "eval_every": 100, "eval_examples": 256}
_TOPK = {SMALL: (16, 64), MEDIUM: (4, 16, 64, 256), FULL: (4, 16, 64, 256)}
# With balanced gradients; the full size has none without.
_BALANCED = {SMALL: (), MEDIUM: (16, 64, 256), FULL: ()}
_CODECS = {SMALL: (), MEDIUM: ("int4", "int8", "float32"), FULL: ("int4", "float32")}
# The other rules, at the rates and with the decays that were best in q9.
_OTHER_RULES = {"adamw": (2e-3, 0.99), "sgd": (1.2, 0.99), "lion": (2e-3, 0.95)}
# The peers as in the lab, variants left out, but that 200 steps are a whole number of rounds, and 1-bit Adam
# has time to learn its variances; and the learning rate that a search begins with. The full size reads the lab's rows.
_PEERS: dict[str, tuple[float, dict[str, Any]]] = {
    "adamw-bf16": (2e-3, {}),
    "adamw-fp16": (2e-3, {}),
    "published-code": (4e-3, {}),
    "powersgd": (2e-3, {"dense_steps": 2}),
    "topk": (2e-3, {}),
    "dgc": (3e-1, {}),
    "randomk": (2e-3, {}),
    "signsgd": (1e-3, {}),
    "ef-signsgd": (5e-1, {}),
    "qsgd": (2e-3, {}),
    "onebit-adam": (1e-3, {"dense_steps": 20}),
    "local-sgd": (2e-3, {"local_steps": 8}),
    "diloco": (2e-3, {"local_steps": 25}),
    "diloco, streaming": (2e-3, {"local_steps": 20, "fragments": 4}),
    "sparseloco": (2e-3, {"local_steps": 20}),
}
# These step with AdamW's update, so they are trained with what was found for AdamW, too; no byte and no time differs.
_SEARCHED = " as searched"
_LIKE_ADAMW = (
    "galore",
    "adamw-bf16",
    "powersgd",
    "topk",
    "randomk",
    "qsgd",
    "onebit-adam",
    "local-sgd",
    "diloco",
    "sparseloco",
)
# Steps on it are measured by benchmarks/frontier_links.py.
LINK, LINKS = "100mbit", "frontier_links"
_ADAMW = "adamw, averaged in full"
# What may differ between a training and its steps on the link: rates, betas, and how often what happens happens.
_NOT_OF_A_STEP = {"lr", "beta1", "beta2", "dense_steps", "local_steps"}
# Their bytes are counted in bfloat16 by the simulator; here they are those whose time was measured.
_AVERAGED, _FLOAT32_IN_BFLOAT16 = ("adamw", "muon", "sgd", "lion", "galore"), 2
_LOSS = "validation loss (nats per byte)"
_WORDS = (
    "*Not beaten*: none has a lower loss without more bytes, or fewer bytes without more loss, by the means over seeds. "
    "Bytes are what a replica sends, a payload counted once; those of what is averaged in full (GaLore, too) are a ring's "
    "of float32. With two replicas as many are received. With more, a replica receives what all others send where payloads "
    "are gathered (DeMo without owners, top-k, signs), and with a ring nearly twice the gradient, however many there are: "
    "q7 and q16 say what DeMo receives. *As searched*: with what was best for AdamW in the study search."
)
# Styles of the figure.
_KINDS = {
    0: "other methods",
    1: "DeMo, sign rule",
    2: "DeMo, muon rule",
    3: "DeMo, muon rule, balanced",
    4: "DeMo, other rules",
}
_TIME = (
    "Seconds are the steps times the lab's median step, whole gradients first where a method begins with them: two hosts "
    "with a CPU core each, real sockets at 100 Mbit/s."
)


def _trial(size: str, optimizer: str, settings: Mapping[str, Any]) -> Trial:
    if size == FULL:
        return Trial("gpt-10m", 2, optimizer, {**_LAB, **settings})
    return text_trial(size, optimizer, 2, settings)


def contenders(size: str) -> list[Contender]:
    """All methods and settings that are trained at a size."""
    dense = ("adamw", "muon", "sgd", "lion") if size == MEDIUM else ("adamw", "muon")
    found = [Contender(f"{one}, averaged in full", _trial(size, one, {}), DENSE_RATES[size][one]) for one in dense]
    for rule, start in DEMO_RULES[size].items():
        for topk in _TOPK[size]:
            found.append(Contender(f"{rule}, k {topk}", _trial(size, "demo", {**start.settings, "topk": topk}), start.rate))
        for values in _CODECS[size]:
            settings = {**start.settings, "values": values}
            found.append(
                Contender(f"{rule}, k {start.settings['topk']}, {values}", _trial(size, "demo", settings), start.rate)
            )
    muon = DEMO_RULES[size]["muon"]
    for topk in _BALANCED[size]:
        settings = {**muon.settings, "topk": topk, "balance": RECOMMENDED_OPTIONS["balance"]}
        found.append(Contender(f"muon, k {topk}, balanced", _trial(size, "demo", settings), muon.rate))
    return [*found, *_only_medium()] if size == MEDIUM else found


def _only_medium() -> list[Contender]:
    """The default k, what is recommended, the other rules, and the peers."""
    sign, muon = DEMO_RULES[MEDIUM]["sign"], DEMO_RULES[MEDIUM]["muon"]
    recommended = {**RECOMMENDED_OPTIONS, "schedule": "linear"}
    found = [
        Contender(f"sign, k {sign.settings['topk']}", _trial(MEDIUM, "demo", sign.settings), sign.rate),
        Contender(f"muon, k {recommended['topk']}, recommended", _trial(MEDIUM, "demo", recommended), muon.rate),
    ]
    for rule, (rate, decay) in _OTHER_RULES.items():
        settings = {"update": rule, "topk": muon.settings["topk"], "momentum_decay": decay}
        found.append(Contender(f"{rule}, k {muon.settings['topk']}", _trial(MEDIUM, "demo", settings), rate))
    found.append(
        Contender(f"adamw{_SEARCHED}", as_searched(_trial(MEDIUM, "adamw", {}), ADAMW), DENSE_RATES[MEDIUM]["adamw"])
    )
    found.append(Contender("galore", _trial(MEDIUM, "galore", {}), 1e-2))
    for name, (rate, settings) in _PEERS.items():
        trial = _trial(MEDIUM, name.split(",")[0], settings)
        found.append(Contender(name, ProcessTrial(**vars(trial)), rate))
    like_adamw = [one for one in found if one.name in _LIKE_ADAMW]
    return found + [replace(one, name=one.name + _SEARCHED, trial=as_searched(one.trial, ADAMW)) for one in like_adamw]


def timed_as(name: str) -> str:
    """Whose steps are measured for it on the link."""
    if not name.endswith(_SEARCHED):
        return name
    peer = name.removesuffix(_SEARCHED)
    return peer if peer in _LIKE_ADAMW else _ADAMW


def _plan(size: str, rows: Sequence[Row]) -> list[Trial]:
    return due(contenders(size), rows, size, seeds_for(size))


@dataclass(frozen=True)
class Point:
    """A method's loss, what a replica sends per step, and seconds of all steps at 100 Mbit/s where they are known."""

    name: str
    loss: float
    sent: float
    seconds: float | None
    is_ours: bool
    words: str
    rate: float
    tries: str
    spread: tuple[float, float]
    """The range over seeds."""
    is_balanced: bool = False

    @property
    def title(self) -> str:
        """With whose it is."""
        return f"DeMo {self.name}" if self.is_ours else self.name

    @property
    def rule(self) -> str:
        """DeMo's update rule, which its settings are named after."""
        return self.name.split(",")[0]

    @property
    def style(self) -> int:
        """Of `_KINDS`."""
        if not self.is_ours:
            return 0
        return 3 if self.is_balanced else {"sign": 1, "muon": 2}.get(self.rule, 4)

    def is_late_beside(self, other: "Point") -> bool:
        """Whether the other ends no higher in no more time, both measured, and not the same in both."""
        if self.seconds is None or other.seconds is None:
            return False
        mine, others = (self.loss, self.seconds), (other.loss, other.seconds)
        return mine != others and other.loss <= self.loss and other.seconds <= self.seconds

    def is_beaten_by(self, other: "Point") -> bool:
        """In loss without more bytes, or in bytes without more loss."""
        return (other.loss, other.sent) != (self.loss, self.sent) and other.loss <= self.loss and other.sent <= self.sent


def _points(rows: Sequence[Row], results: Path) -> list[Point]:
    """All methods, fewest bytes first. The lab's peers were trained as the full size is, and are left out beside others."""
    found: dict[str, Point] = {}
    for size in SIZES:
        mine, measured = outcomes(contenders(size), rows), cells(results, source=LINKS, size=size)
        found |= {name: _point(name, one, measured) for name, one in mine.items()}
        if size == FULL and mine:
            for peer in standings(curves(results), cells(results)):
                if peer.method not in (*OURS, "adamw"):
                    ends = peer.tuned.curve.ends
                    found[peer.method] = Point(
                        peer.method,
                        peer.loss,
                        peer.sent,
                        peer.seconds,
                        False,
                        peer.tuned.words,
                        peer.tuned.curve.lr,
                        peer.tuned.tries,
                        (min(ends), max(ends)),
                    )
    return sorted(found.values(), key=lambda point: (point.sent, point.loss))


def _point(name: str, one: Outcome, measured: Mapping[tuple[str, str], Cell]) -> Point:
    row = one.rows[0]
    trial, num_steps = row["trial"], row["curve"][-1][0]
    cell, dense = measured.get((timed_as(name), LINK)), measured.get((_ADAMW, LINK))
    seconds = None
    if cell is not None and dense is not None and is_of(cell, trial):
        # Some begin with whole gradients, which the lab does not measure with them.
        num_dense = trial["settings"].get("dense_steps", 0)
        seconds = num_dense * dense.seconds + (num_steps - num_dense) * cell.seconds
    sent = row["sent_bytes"] * (_FLOAT32_IN_BFLOAT16 if trial["optimizer"] in _AVERAGED else 1)
    is_ours, is_balanced = trial["optimizer"] == "demo", "balance" in trial["settings"]
    tried, spread = (one.rate, one.tries_words), (min(one.losses), max(one.losses))
    return Point(name, one.mean, float(sent), seconds, is_ours, one.words, *tried, spread, is_balanced)


def is_of(cell: Cell, trial: Mapping[str, Any]) -> bool:
    """Whether the steps that were measured are those of this training, whatever recipes have become in between."""
    trained = asdict(Trial(trial["recipe"], trial["replicas"], trial["optimizer"], trial["settings"]).config.optim)
    return all(cell.settings[name] == trained[name] for name in cell.settings.keys() & trained.keys() - _NOT_OF_A_STEP)


def _find(rows: Sequence[Row], results: Path) -> Finding:
    points = _points(rows, results)
    is_timed = any(point.seconds is not None for point in points)
    lines = []
    for point in points:
        is_best = not any(point.is_beaten_by(other) for other in points)
        seconds = [] if not is_timed else [""] if point.seconds is None else [f"{point.seconds:.3g}"]
        tuned, best = (f"{point.rate:g}", point.tries), "not beaten" if is_best else ""
        lines.append((point.name, point.words, *tuned, format_bytes(point.sent), *seconds, best))
    time = [f"s in all, {LINK}"] if is_timed else []
    heads = ("method", "loss", "learning rate", "rates tried", "sent per step", *time, "")
    words = f"{_WORDS} {_TIME} {_noise(rows, results)}" if is_timed else _WORDS
    return Finding(f"{table(heads, lines)}\n\n{words}", _claims(points), _answer(points))


def _noise(rows: Sequence[Row], results: Path) -> str:
    """How far apart the rounds of one setting are."""
    steps: dict[str, list[float]] = {}
    for size in (size for size in SIZES if outcomes(contenders(size), rows)):
        for cell in rounds(results, LINKS, size):
            steps.setdefault(cell.method, []).append(cell.seconds)
    if not (several := [max(some) / min(some) for some in steps.values() if len(some) > 1]):
        return ""
    typical, most = statistics.median(several), max(several)
    return (
        f"The slowest round of a setting took {typical:.2f} times the fastest in the median, and {most:.2f} times at most."
    )


def _claims(points: Sequence[Point]) -> list[Claim]:
    claims = []
    peers = [point for point in points if not point.is_ours]
    for point in (point for point in points if point.is_ours):
        better = [other.name for other in peers if point.is_beaten_by(other)]
        claims.append(Claim(f"no peer beats DeMo {point.name} in loss and bytes{_these(better)}", not better))
    timed = [point for point in points if point.is_ours and point.seconds is not None]
    for rule in dict.fromkeys(point.rule for point in timed):
        late = {
            point.name: ", ".join(names)
            for point in timed
            if point.rule == rule and (names := [other.name for other in peers if point.is_late_beside(other)])
        }
        these = "".join(f"; {name}: {names}" for name, names in late.items())
        claims.append(
            Claim(f"at 100 Mbit/s no peer ends lower than DeMo with the {rule} rule in less time{these}", not late)
        )
    return claims


def _these(names: Sequence[str]) -> str:
    return f"; these do: {', '.join(names)}" if names else ""


def _answer(points: Sequence[Point]) -> str:
    best = [point for point in points if not any(point.is_beaten_by(other) for other in points)]
    if not best:
        return ""
    words = [f"{point.title} ({point.loss:.3f}, {format_bytes(point.sent)})" for point in best]
    ours = sum(point.is_ours for point in best)
    text = (
        f"Of {len(points)} methods and settings, {len(best)} are beaten by none in loss and bytes per step, {ours} of "
        f"them DeMo's: {'; '.join(words)}."
    )
    soonest = [point for point in points if point.seconds is not None and not any(map(point.is_late_beside, points))]
    if soonest:
        soonest.sort(key=lambda point: point.seconds or 0.0)
        words = [f"{point.title} ({point.loss:.3f}, {point.seconds:.3g} s)" for point in soonest]
        text += f" In loss and time at 100 Mbit/s, these are: {'; '.join(words)}."
    return text


def _draw(rows: Sequence[Row], results: Path) -> dict[str, Drawing]:
    points = _points(rows, results)
    if not points:
        return {}
    timed = [point for point in points if point.seconds is not None]
    page = Page(2 if timed else 1, height=6.4, width=9.6, columns=1)
    kinds = {style: kind for style, kind in _KINDS.items() if any(point.style == style for point in points)}
    page.legend(kinds)
    steps = " or ".join(f"{steps:,}" for steps in sorted({row["curve"][-1][0] for row in rows}))
    replicas = " or ".join(map(str, sorted({row["trial"]["replicas"] for row in rows})))
    runs = f"{steps} steps, {replicas} replicas"
    costs = [point.sent / 1e3 for point in points]
    ticks = [10.0**power for power in range(6) if 10**power < 5 * max(costs)]
    words = (f"Loss against bytes, {runs}", "kB sent per step and replica", _LOSS)
    _panel(page.panels[0], points, costs, ticks, words)
    caption = f"Last validation loss after {steps} steps, mean and range of the seeds, against what a replica sends per step"
    if timed:
        costs = [point.seconds or 0.0 for point in timed]
        ticks = [digit * 10.0**power for power in range(4) for digit in (1, 2, 5)]
        ticks = [tick for tick in ticks if 0.7 * min(costs) < tick < 1.5 * max(costs)]
        words = (f"Loss against time at 100 Mbit/s, {runs}", f"seconds of {steps} steps", _LOSS)
        _panel(page.panels[1], timed, costs, ticks, words)
        caption += ", and against the time of all steps at 100 Mbit/s"
    return {"frontier.png": Drawing(page, f"{caption}. The grey lines join what no other beats in both.")}


def _panel(
    axes: "Axes", points: Sequence[Point], costs: Sequence[float], ticks: Sequence[float], words: tuple[str, str, str]
) -> None:
    named = [Named(cost, point.loss, point.name, point.style) for point, cost in zip(points, costs, strict=True)]
    edge(axes, lower_left((one.x, one.y) for one in named), "not beaten")
    logarithmic(axes, ticks)
    low, high = min(costs), max(costs)
    width = high / low if high > low else 10.0
    axes.set_xlim(low / width**0.08, high * width**0.22)
    title(axes, *words)
    named_dots(axes, named, _KINDS, [point.spread for point in points])


STUDY = Study(
    "frontier",
    "The frontier",
    "Which loss does a byte buy: DeMo with several k, codecs and rules beside every peer?",
    find=_find,
    plan=_plan,
    draw=_draw,
    sources=("lab", "lab_losses", LINKS),
)
