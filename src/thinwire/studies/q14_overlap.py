"""q14: does overlap make compression pointless? With and without it, for DDP and for DeMo."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from thinwire.lab.rows import Cell
from thinwire.planner.link_spec import UNSHAPED
from thinwire.studies.figure import Drawing, Page, line, logarithmic, room_for_labels, title
from thinwire.studies.measured import NOTHING, RATES, cells, link_words, ours_in_words, rounds
from thinwire.studies.study import Claim, Finding, Study, table
from thinwire.studies.trials import Row

SOURCE = "lab_overlap"
_NUM_HOSTS = 2


class Pair(NamedTuple):
    """The same steps, sent while backward runs and when it is over."""

    overlapped: str
    after: str


_DDP, _DDP_BF16 = Pair("adamw", "adamw-after"), Pair("adamw-bf16", "adamw-bf16-after")
_DENSE = {"DDP": _DDP, "DDP in bfloat16": _DDP_BF16}
_OURS = {"DeMo, sign rule": Pair("demo", "demo-after"), "DeMo, muon rule": Pair("demo-muon", "demo-muon-after")}
_PAIRS = {**_DENSE, **_OURS}
_READING = (
    "Seconds per step of `gpt-10m`, two hosts with a CPU core each: medians over rounds, least and most; in a round all are "
    "measured, one after the other. *After* sends when backward is over (and DeMo then clips gradients, which takes some "
    "milliseconds; DDP has one bucket for all gradients), *overlap* while it runs. *Perfect* is computed: what is not "
    "waiting, or all bytes at the measured rate of the link, round trips not counted, whichever is longer; no DDP can be "
    "faster with these bytes. What DDP hides is not measured."
)


def wire_seconds(cell: Cell) -> float:
    """How long the bytes of a step take on the link, at the rate that was measured, round trips not counted."""
    assert cell.measured_bits is not None
    return 8 * cell.meter_sent / cell.measured_bits


def perfect_overlap(cell: Cell) -> float:
    """A step in which everything hides that can."""
    return max(0.0, cell.seconds - cell.parts["exposed"], wire_seconds(cell))


class Reading(NamedTuple):
    """What was measured: by method and link, the rounds as one and each."""

    measured: Mapping[tuple[str, str], Cell]
    by_round: Mapping[tuple[str, str], Mapping[int, Cell]]

    @property
    def links(self) -> list[str]:
        """Those on which all was measured."""
        names = dict.fromkeys(link for _, link in self.measured if link != UNSHAPED)
        wanted = [name for pair in _PAIRS.values() for name in pair]
        return [link for link in names if all((name, link) in self.measured for name in wanted)]

    def words(self, name: str, link: str) -> str:
        """Median, least and most of the rounds."""
        seconds = [cell.seconds for cell in self.by_round[name, link].values()]
        return f"{self.measured[name, link].seconds:.2f} ({min(seconds):.2f} to {max(seconds):.2f})"

    def is_shortened(self, pair: Pair, link: str) -> bool:
        """Whether overlap made the step shorter in every round."""
        after, overlapped = (self.by_round[name, link] for name in (pair.after, pair.overlapped))
        is_paired = overlapped.keys() == after.keys()
        return is_paired and all(overlapped[turn].seconds < after[turn].seconds for turn in overlapped)


def read(results: Path) -> Reading:
    """All of it."""
    by_round: dict[tuple[str, str], dict[int, Cell]] = {}
    for cell in (cell for cell in rounds(results, SOURCE) if cell.num_hosts == _NUM_HOSTS):
        by_round.setdefault((cell.method, cell.link), {})[cell.round] = cell
    return Reading(cells(results, _NUM_HOSTS, SOURCE), by_round)


def _find(rows: Sequence[Row], results: Path) -> Finding:
    reading = read(results)
    if not reading.links:
        return Finding(NOTHING)
    lines = []
    for link in reading.links:
        for what, pair in _PAIRS.items():
            perfect = f"{perfect_overlap(reading.measured[pair.overlapped, link]):.2f}" if what in _DENSE else ""
            cell = reading.measured[pair.overlapped, link]
            hidden = "" if what in _DENSE else f"{cell.hidden:.2f}"
            both = (reading.words(name, link) for name in (pair.after, pair.overlapped))
            lines.append((link, what, *both, perfect, hidden, f"{cell.parts['exposed']:.2f}"))
    heads = ("link", "method", "after", "overlap", "perfect (computed)", "hidden", "exposed")
    text = f"{_READING} {ours_in_words(reading.measured)}\n\n{table(heads, lines, 2)}"
    return Finding(text, _claims(reading), _answer(reading))


def _answer(reading: Reading) -> str:
    leads, sentences = [], []
    for what, pair in _OURS.items():
        found = {link_words(link): _beside(reading, pair, link) for link in RATES if link in reading.links}
        pointless = [where for where, (mine, bound) in found.items() if mine >= bound]
        where = f"only {' and '.join(pointless)}" if pointless else "no"
        words = what.replace("DeMo, ", "DeMo's ")
        leads.append(f"With {words} {where}.")
        parts = [f"{where} {mine:.2f} s against {bound:.2f} s" for where, (mine, bound) in found.items()]
        sentences.append(
            f"A step without overlap, beside one of DDP with gradients in bfloat16 and perfect overlap, takes with {words} "
            f"{'; '.join(parts)}."
        )
    return " ".join([*leads, *sentences])


def _beside(reading: Reading, pair: Pair, link: str) -> tuple[float, float]:
    """Without overlap, beside the fastest of dense methods."""
    return reading.measured[pair.after, link].seconds, perfect_overlap(reading.measured[_DDP_BF16.overlapped, link])


def _claims(reading: Reading) -> list[Claim]:
    claims = []
    for what, pair in _OURS.items():
        for link in (link for link in RATES if link in reading.links):
            after, bound = _beside(reading, pair, link)
            text = f"{link_words(link)}, {what} without overlap is faster than DDP in bfloat16 with perfect overlap"
            claims.append(Claim(f"{text}: {after:.2f} s against {bound:.2f} s", after < bound))
    for what, pair in _OURS.items():
        saved = {
            link: reading.measured[pair.after, link].seconds - reading.measured[pair.overlapped, link].seconds
            for link in reading.links
        }
        longer = [link for link in reading.links if not reading.is_shortened(pair, link)]
        text = f"overlap shortens the step of {what} on every link in every round"
        text += f", in the median by up to {1e3 * max(saved.values()):.0f} ms" if max(saved.values()) > 0 else ""
        text += f"; not on {', '.join(longer)}" if longer else ""
        claims.append(Claim(text, not longer))
    slowest = next((link for link in RATES if link in reading.links), None)
    if slowest is not None:
        perfect = perfect_overlap(reading.measured[_DDP.overlapped, slowest])
        saving = 1 - perfect / reading.measured[_DDP.after, slowest].seconds
        text = f"{link_words(slowest)}, overlap cannot shorten DDP's step by more than a tenth"
        claims.append(Claim(f"{text}: by {100 * saving:.1f} % at best", saving <= 0.1))
    return claims


def _draw(rows: Sequence[Row], results: Path) -> dict[str, Drawing]:
    reading = read(results)
    if not reading.links:
        return {}
    kinds = {
        f"{what}, {words}": name
        for what, pair in {"DDP": _DDP, **_OURS}.items()
        for words, name in (("after", pair.after), ("overlap", pair.overlapped))
    }
    links_by_delay = {delay: [link for link in RATES if link + delay in reading.links] for delay in ("", ",80ms")}
    shown = {delay: links for delay, links in links_by_delay.items() if links}
    page = Page(len(shown), height=4.4, width=6.2)
    for axes, (delay, links) in zip(page.panels, shown.items(), strict=True):
        axes.set_yscale("log")
        for index, (what, name) in enumerate(kinds.items()):
            line(axes, [(float(RATES[link]), reading.measured[name, link + delay].seconds) for link in links], what, index)
        bounds = [
            (float(RATES[link]), perfect_overlap(reading.measured[_DDP_BF16.overlapped, link + delay])) for link in links
        ]
        line(axes, bounds, "DDP in bfloat16, perfect", len(kinds))
        logarithmic(axes, list(RATES.values()))
        room_for_labels(axes, 0.5)
        axes.set_yticks([0.5, 1, 2, 5, 10, 20, 50], ["0.5", "1", "2", "5", "10", "20", "50"])
        axes.minorticks_off()
        title(axes, f"Overlap, {'round trip 80 ms' if delay else 'no delay'}, 2 hosts", "link (Mbit/s)", "seconds per step")
    return {"overlap.png": Drawing(page, "Seconds per step with and without overlap, against the rate of the link.")}


STUDY = Study(
    "q14",
    "Overlap",
    "Does overlap make compression pointless? With and without overlap, for DDP and for DeMo.",
    find=_find,
    draw=_draw,
    sources=(SOURCE,),
)
