"""q11: against other compressors, each with its own learning rate: loss against bytes, and against time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.lab.rows import Cell
from thinwire.planner.links import format_bytes
from thinwire.studies.figure import Drawing, Page, edge, logarithmic, lower_left, named_dots, title
from thinwire.studies.labels import Named
from thinwire.studies.measured import ADAMW, DEMO, DEMO_MUON, KINDS, NOTHING, OURS, Tuned, cells, curves, ours_in_words
from thinwire.studies.study import Claim, Finding, Study, table
from thinwire.studies.trials import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LINK, _LOSS = "100mbit", "validation loss (nats per byte)"
_READING = (
    "Two replicas, a byte-level GPT of 10 M parameters (`gpt-10m`), the same data and steps for all. Losses are those at "
    "the best learning rate, mean and range over seeds. Bytes are what a replica sends per step by the meter, headers "
    "included, a mean where replicas speak only now and then; with two replicas as many are received. Seconds are the "
    "lab's, on real sockets at 100 Mbit/s and CPU cores; no run was trained to its end there. *Not beaten*: no other method "
    "has both a lower loss and fewer bytes.\n\n"
    "DeMo is `demo` (sign rule, k 32) and `demo-muon` (muon rule, k 64); `published-code` is another implementation of "
    "published DeMo. Peers have AdamW's usual betas, and a cosine: what other settings do for them is said in the "
    "study frontier. Part of `demo-muon`'s low loss is the muon rule's: Muon on whole gradients is not among these methods. "
    "AdamW with half-precision averaging and streaming DiLoCo were measured on links but not trained here; with a smaller "
    "model they were, in the study frontier. With more replicas, methods that gather (DeMo, top-k, signs) "
    "receive more, and those that reduce do not."
)


@dataclass(frozen=True)
class Standing:
    """A method's loss, and what it costs on the link."""

    method: str
    tuned: Tuned
    cell: Cell

    @property
    def loss(self) -> float:
        """After the last step."""
        return self.tuned.loss

    @property
    def sent(self) -> float:
        """Bytes per step."""
        return self.cell.meter_sent

    @property
    def seconds(self) -> float:
        """Of all steps."""
        return self.tuned.curve.points[-1][0] * self.cell.seconds

    def is_beaten_by(self, other: "Standing") -> bool:
        """In both loss and bytes."""
        return other.loss < self.loss and other.sent < self.sent


def standings(found: Mapping[str, Tuned], measured: Mapping[tuple[str, str], Cell]) -> list[Standing]:
    """All methods that were trained and measured, fewest bytes first."""
    known = [Standing(name, one, measured[name, _LINK]) for name, one in found.items() if (name, _LINK) in measured]
    return sorted(known, key=lambda one: (one.sent, one.loss))


def not_beaten(all_of_them: Sequence[Standing]) -> list[str]:
    """Methods that no other beats in both loss and bytes."""
    return [one.method for one in all_of_them if not any(one.is_beaten_by(other) for other in all_of_them)]


def _find(rows: Sequence[Row], results: Path) -> Finding:
    measured = cells(results)
    known = standings(curves(results), measured)
    if not known:
        return Finding(NOTHING)
    best = not_beaten(known)
    lines = [
        (
            one.method,
            one.tuned.words,
            f"{one.tuned.curve.lr:g}",
            one.tuned.tries,
            str(len(one.tuned.curve.ends)),
            format_bytes(one.sent),
            f"{one.cell.seconds:.2f}",
            f"{one.seconds:,.0f}",
            "not beaten" if one.method in best else "",
        )
        for one in known
    ]
    heads = ("method", "loss", "learning rate", "rates tried", "seeds", "sent per step", "s per step", "s in all", "")
    claims = _claims({one.method: one for one in known}, best)
    return Finding(f"{_READING} {ours_in_words(measured)}\n\n{table(heads, lines)}", claims, _answer(known, best))


def _answer(known: Sequence[Standing], best: Sequence[str]) -> str:
    parts = [f"{one.method} ({one.loss:.3f}, {format_bytes(one.sent)})" for one in known if one.method in best]
    words = f"Of {len(known)} methods, these are beaten by none in both loss and bytes per step: {', '.join(parts)}."
    behind = [
        f"{one.method} by {', '.join(other.method for other in known if one.is_beaten_by(other))}"
        for one in known
        if one.method in OURS and one.method not in best
    ]
    adamw = next((one for one in known if one.method == ADAMW), None)
    if adamw is not None:
        words += f" AdamW on whole gradients ends at {adamw.loss:.3f} with {format_bytes(adamw.sent)}."
    return words + (f" Of DeMo's, {'; '.join(behind)} is beaten." if behind else "")


def _claims(by_name: Mapping[str, Standing], best: Sequence[str]) -> list[Claim]:
    peers = [one for one in by_name.values() if one.method not in OURS]
    if DEMO not in by_name or not peers:
        return []
    demo, claims = by_name[DEMO], []
    for name in (name for name in (DEMO, DEMO_MUON) if name in by_name):
        mine = by_name[name]
        better = [one.method for one in by_name.values() if mine.is_beaten_by(one)]
        claims.append(Claim(f"no method has both a lower loss and fewer bytes than {name}{_these(better)}", not better))
        fewer = [f"{one.method} ({format_bytes(one.sent)})" for one in peers if one.sent < mine.sent]
        claims.append(Claim(f"no peer sends fewer bytes than {name}{_these(fewer)}", not fewer))
        lower = [f"{one.method} ({one.loss:.3f})" for one in peers if one.loss < mine.loss]
        claims.append(Claim(f"no peer ends with a lower loss than {name} ({mine.loss:.3f}){_these(lower)}", not lower))
        sooner = [one.method for one in peers if one.loss < mine.loss and one.seconds < mine.seconds]
        text = f"at 100 Mbit/s no peer takes all steps in less time and ends lower than {name}{_these(sooner)}"
        claims.append(Claim(text, not sooner))
    lower_peers = [one for one in peers if one.loss < demo.loss]
    if lower_peers:
        least = min(lower_peers, key=lambda one: one.sent)
        text = f"every peer that ends below demo sends at least 10 times its bytes: the least is {least.method}'s"
        claims.append(Claim(f"{text}, {least.sent / demo.sent:.1f} times", least.sent >= 10 * demo.sent))
    if ADAMW in by_name and DEMO_MUON in by_name:
        muon, adamw = by_name[DEMO_MUON], by_name[ADAMW]
        text = f"demo-muon ends below AdamW with every seed, by {adamw.loss - muon.loss:.3f}"
        text += f", with {adamw.sent / muon.sent:.0f} times fewer bytes"
        claims.append(Claim(text, max(muon.tuned.curve.ends) < min(adamw.tuned.curve.ends)))
    return claims


def _these(names: Sequence[str]) -> str:
    return f"; these do: {', '.join(names)}" if names else ""


def _draw(rows: Sequence[Row], results: Path) -> dict[str, Drawing]:
    known = standings(curves(results), cells(results))
    if not known:
        return {}
    page = Page(2, height=5.2, width=6.4)
    _draw_panel(page.panels[0], known, [one.sent / 1e3 for one in known])
    logarithmic(page.panels[0], (10, 100, 1000, 10_000, 100_000))
    title(page.panels[0], "Loss against bytes, 2 replicas", "kB sent per step and replica", _LOSS)
    _draw_panel(page.panels[1], known, [one.seconds for one in known])
    logarithmic(page.panels[1], (250, 500, 1000, 2000))
    num_steps = known[0].tuned.curve.points[-1][0]
    title(page.panels[1], "Loss against time at 100 Mbit/s, 2 replicas", f"seconds of {num_steps} steps", _LOSS)
    caption = (
        "Last validation loss of every method, with the range of its seeds, against what a replica sends "
        "per step, and against the time of all steps at 100 Mbit/s. The grey lines join methods that no other beats in both."
    )
    return {"frontier.png": Drawing(page, caption)}


def _draw_panel(axes: "Axes", known: Sequence[Standing], costs: Sequence[float]) -> None:
    """Every method's loss against what it costs, and the lower left edge of them all."""
    axes.set_xscale("log")
    low, high = min(costs), max(costs)
    axes.set_xlim(low * (low / high) ** 0.12, high * (high / low) ** 0.2)
    pairs = zip(known, costs, strict=True)
    points = [Named(cost, one.loss, one.method, int(one.method in OURS)) for one, cost in pairs]
    edge(axes, lower_left((point.x, point.y) for point in points), "not beaten")
    ends = [one.tuned.curve.ends for one in known]
    named_dots(axes, points, KINDS, [(min(some), max(some)) for some in ends])


STUDY = Study(
    "q11",
    "Other compressors",
    "How does DeMo compare with other compressors, in the same harness and each with its own learning rate?",
    find=_find,
    draw=_draw,
    sources=("lab", "lab_losses"),
)
