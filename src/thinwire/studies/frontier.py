"""frontier: validation loss against bytes sent per step, for DeMo with several k, codecs and rules, and every peer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.planner.links import format_bytes
from thinwire.studies.figure import Drawing, Page, logarithmic, named_dots, title
from thinwire.studies.labels import Named
from thinwire.studies.measured import DEMO_MUON, KINDS, OURS, cells, curves
from thinwire.studies.process_trials import ProcessTrial
from thinwire.studies.q11_compressors import standings
from thinwire.studies.settings import DEMO_RULES, DENSE_RATES, text_trial
from thinwire.studies.study import FULL, MEDIUM, SIZES, SMALL, Claim, Finding, Study, table
from thinwire.studies.trials import Row, Trial
from thinwire.studies.tuning import Contender, Outcome, due, outcomes, seeds_for

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# As the network lab's peers were trained: two replicas, 400 steps of 16 sequences of 128 bytes.
_LAB: dict[str, Any] = {"steps": 400, "eval_every": 100, "eval_examples": 256}
_TOPK = {SMALL: (16, 64), MEDIUM: (4, 16, 64, 256), FULL: (4, 16, 64, 256)}
_CODECS = {SMALL: (), MEDIUM: ("int4", "float32"), FULL: ("int4", "float32")}
# The peers as in the lab, variants left out, but that 200 steps are a whole number of rounds, and 1-bit Adam
# has time to learn its variances; and the learning rate that a search begins with. The full size reads the lab's rows.
_PEERS: dict[str, tuple[float, dict[str, Any]]] = {
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
    "sparseloco": (2e-3, {"local_steps": 20}),
}
_LINK, _BITS_PER_SECOND = "100mbit", 100e6
_LOSS = "validation loss (nats per byte)"
_WORDS = (
    "*Not beaten*: none has a lower loss without more bytes, or fewer bytes without more loss, by the means over seeds. "
    "Bytes are what a replica sends, a payload counted once; those of what is averaged in full are a ring's, in bfloat16."
)


def _trial(size: str, optimizer: str, settings: Mapping[str, Any]) -> Trial:
    if size == FULL:
        return Trial("gpt-10m", 2, optimizer, {**_LAB, **settings})
    return text_trial(size, optimizer, 2, settings)


def _contenders(size: str) -> list[Contender]:
    found = [
        Contender(f"{name}, averaged in full", _trial(size, name, {}), DENSE_RATES[size][name]) for name in ("adamw", "muon")
    ]
    for rule, start in DEMO_RULES[size].items():
        for topk in _TOPK[size]:
            found.append(Contender(f"{rule}, k {topk}", _trial(size, "demo", {**start.settings, "topk": topk}), start.rate))
        for values in _CODECS[size]:
            settings = {**start.settings, "values": values}
            found.append(
                Contender(f"{rule}, k {start.settings['topk']}, {values}", _trial(size, "demo", settings), start.rate)
            )
    if size == MEDIUM:
        galore = Contender("galore", _trial(size, "galore", {}), 1e-2)
        peers = {name: ProcessTrial(**vars(_trial(size, name, one))) for name, (_, one) in _PEERS.items()}
        found += [galore, *(Contender(name, trial, _PEERS[name][0]) for name, trial in peers.items())]
    return found


def _plan(size: str, rows: Sequence[Row]) -> list[Trial]:
    return due(_contenders(size), rows, size, seeds_for(size))


@dataclass(frozen=True)
class Point:
    """A method's loss, what a replica sends per step, and seconds per step at 100 Mbit/s where they are known."""

    name: str
    loss: float
    sent: float
    seconds: float | None
    is_ours: bool
    words: str

    def is_beaten_by(self, other: "Point") -> bool:
        """In loss without more bytes, or in bytes without more loss."""
        return (other.loss, other.sent) != (self.loss, self.sent) and other.loss <= self.loss and other.sent <= self.sent


def _points(rows: Sequence[Row], results: Path) -> list[Point]:
    """All methods, fewest bytes first. The lab's peers were trained as the full size is, and are left out beside others."""
    found: dict[str, Outcome] = {}
    has_peers = False
    for size in SIZES:
        mine = outcomes(_contenders(size), rows)
        found |= mine
        has_peers = has_peers or (size == FULL and bool(mine))
    points = []
    measured = cells(results) if has_peers else {}
    for name, one in found.items():
        is_dense = "averaged" in name
        is_ours = not is_dense and one.rows[0]["trial"]["optimizer"] == "demo"
        sent = float(one.rows[0]["sent_bytes"])
        points.append(Point(name, one.mean, sent, _seconds(sent, measured, is_dense), is_ours, one.words))
    if has_peers:
        for peer in standings(curves(results), cells(results)):
            if peer.method not in (*OURS, "adamw"):
                points.append(Point(peer.method, peer.loss, peer.sent, peer.cell.seconds, False, peer.tuned.words))
    return sorted(points, key=lambda point: (point.sent, point.loss))


def _seconds(sent: float, measured: Mapping[tuple[str, str], Any], is_dense: bool) -> float | None:
    """The lab's step with DeMo's muon rule or AdamW, and the time of the bytes that are more or fewer on the link."""
    cell = measured.get(("adamw" if is_dense else DEMO_MUON, _LINK))
    return None if cell is None else float(max(cell.seconds + (sent - cell.meter_sent) * 8 / _BITS_PER_SECOND, cell.compute))


def _find(rows: Sequence[Row], results: Path) -> Finding:
    points = _points(rows, results)
    lines = []
    for point in points:
        is_best = not any(point.is_beaten_by(other) for other in points)
        seconds = "" if point.seconds is None else f"{point.seconds:.2f}"
        lines.append((point.name, point.words, format_bytes(point.sent), seconds, "not beaten" if is_best else ""))
    claims = []
    peers = [point for point in points if not point.is_ours]
    for point in (point for point in points if point.is_ours):
        better = [other.name for other in peers if point.is_beaten_by(other)]
        these = f"; these do: {', '.join(better)}" if better else ""
        claims.append(Claim(f"no peer beats DeMo {point.name} in loss and bytes{these}", not better))
    heads = ("method", "loss", "sent per step", f"s per step, {_LINK}", "")
    shown = [place for place, _ in enumerate(heads) if place != 3 or any(line[3] for line in lines)]
    cells = [[line[place] for place in shown] for line in (heads, *lines)]
    return Finding(f"{table(cells[0], cells[1:])}\n\n{_WORDS}", claims, _answer(points))


def _answer(points: Sequence[Point]) -> str:
    best = [point for point in points if not any(point.is_beaten_by(other) for other in points)]
    if not best:
        return ""
    words = [
        f"{'DeMo ' if point.is_ours else ''}{point.name} ({point.loss:.3f}, {format_bytes(point.sent)})" for point in best
    ]
    ours = sum(point.is_ours for point in best)
    return (
        f"Of {len(points)} methods and settings, {len(best)} are beaten by none in loss and bytes per step, {ours} of "
        f"them DeMo's: {'; '.join(words)}."
    )


def _draw(rows: Sequence[Row], results: Path) -> dict[str, Drawing]:
    points = _points(rows, results)
    if not points:
        return {}
    timed = [point for point in points if point.seconds is not None]
    page = Page(2 if timed else 1, height=5.6, width=7.0)
    _panel(page.panels[0], [(point, point.sent / 1e3) for point in points])
    most = max(point.sent for point in points) / 1e3
    logarithmic(page.panels[0], [tick for tick in (1, 10, 100, 1000, 10_000, 100_000) if tick < 5 * most])
    title(page.panels[0], "Loss against bytes, 2 replicas", "kB sent per step and replica", _LOSS)
    if timed:
        _panel(page.panels[1], [(point, point.seconds or 0.0) for point in timed])
        title(page.panels[1], "Loss against time at 100 Mbit/s", "seconds per step", _LOSS)
    caption = "Last validation loss, a mean over seeds, against what a replica sends per step"
    if timed:
        caption += ", and against the time of a step at 100 Mbit/s: the network lab's, for DeMo with the bytes that differ"
    return {"frontier.png": Drawing(page, f"{caption}. Diamonds are DeMo's.")}


def _panel(axes: "Axes", pairs: Sequence[tuple[Point, float]]) -> None:
    axes.set_xscale("log")
    costs = [cost for _, cost in pairs]
    low, high = min(costs), max(costs)
    spread = high / low if high > low else 10.0
    axes.set_xlim(low / spread**0.08, high * spread**0.2)
    named_dots(axes, [Named(cost, point.loss, point.name, int(point.is_ours)) for point, cost in pairs], KINDS)


STUDY = Study(
    "frontier",
    "The frontier",
    "Which loss does a byte buy: DeMo with several k, codecs and rules beside every peer?",
    find=_find,
    plan=_plan,
    draw=_draw,
    sources=("lab", "lab_losses"),
)
