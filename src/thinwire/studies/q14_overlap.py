"""q14: does overlap make compression pointless? With and without it, for DDP and for DeMo."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from thinwire.lab.rows import Cell
from thinwire.planner.link_spec import UNSHAPED
from thinwire.studies.figure import Drawing, Page, line, logarithmic, room_for_labels, title
from thinwire.studies.measured import ADAMW, ADAMW_AFTER, DEMO, DEMO_AFTER, NOTHING, RATES, cells, link_words, ours_in_words
from thinwire.studies.study import Claim, Finding, Study, table
from thinwire.studies.trials import Row

_READING = (
    "Seconds per step of `gpt-10m`, two hosts with a CPU core each, medians. `demo` sends while backward runs, `demo-after` "
    "sends when it is over (and clips gradients, which takes some milliseconds). `adamw` is DDP, which sends while backward "
    "runs; `adamw-after` is DDP with one bucket for all gradients, which begins when backward is over. It was measured on "
    "another day, when the machine computed more slowly: its waiting is added here to what `adamw` does besides waiting. "
    "*Perfect* is computed: what is not waiting, or all bytes at the measured rate of the link, round trips not counted, "
    "whichever is longer; no DDP can be faster with these bytes."
)
_NEEDED = (ADAMW, ADAMW_AFTER, DEMO, DEMO_AFTER)


def wire_seconds(cell: Cell) -> float:
    """How long the bytes of a step take on the link, at the rate that was measured, round trips not counted."""
    assert cell.measured_bits is not None
    return 8 * cell.meter_sent / cell.measured_bits


def local_seconds(cell: Cell) -> float:
    """All of a step that is not waiting for the network."""
    return max(0.0, cell.seconds - cell.parts["exposed"])


def without_overlap(cell: Cell, after: Cell) -> float:
    """A step that computes as long as one cell's, and waits as long as the other's, which sends when all else is done."""
    return local_seconds(cell) + after.parts["exposed"]


def perfect_overlap(cell: Cell) -> float:
    """A step in which everything hides that can."""
    return max(local_seconds(cell), wire_seconds(cell))


def _links(measured: Mapping[tuple[str, str], Cell]) -> list[str]:
    names = dict.fromkeys(link for _, link in measured)
    return [link for link in names if link != UNSHAPED and all((name, link) in measured for name in _NEEDED)]


def _find(rows: Sequence[Row], results: Path) -> Finding:
    measured = cells(results)
    links = _links(measured)
    if not links:
        return Finding(NOTHING)
    lines = []
    for link in links:
        adamw, waiting, demo, after = (measured[name, link] for name in _NEEDED)
        values = (
            without_overlap(adamw, waiting),
            adamw.seconds,
            perfect_overlap(adamw),
            after.seconds,
            demo.seconds,
            demo.hidden,
        )
        lines.append([link, *(f"{value:.2f}" for value in values), f"{demo.parts['exposed']:.2f}"])
    heads = ("link", "DDP: after (of two days)", "DDP: overlap", "DDP: perfect (computed)", "DeMo: after", "DeMo: overlap")
    text = f"{_READING} {ours_in_words(measured)}\n\n{table((*heads, 'hidden', 'exposed'), lines)}"
    claims = _claims(measured, links)
    pairs = {
        link_words(link): (measured[DEMO_AFTER, link].seconds, perfect_overlap(measured[ADAMW, link]))
        for link in RATES
        if link in links
    }
    pointless = [where for where, (mine, bound) in pairs.items() if mine >= bound]
    words = "; ".join(f"{where} {mine:.2f} s against {bound:.2f} s" for where, (mine, bound) in pairs.items())
    lead = f"Only {' and '.join(pointless)}" if pointless else "No"
    answer = f"{lead}. A step of DeMo without overlap, beside one of DDP with perfect overlap, takes {words}."
    return Finding(text, claims, answer)


def _claims(measured: Mapping[tuple[str, str], Cell], links: Sequence[str]) -> list[Claim]:
    claims = []
    for link in (link for link in RATES if link in links):
        after, bound = measured[DEMO_AFTER, link].seconds, perfect_overlap(measured[ADAMW, link])
        text = f"{link_words(link)}, DeMo without overlap is faster than DDP with perfect overlap"
        text += f": {after:.2f} s against {bound:.2f} s"
        claims.append(Claim(text, after < bound))
    saved = {link: measured[DEMO_AFTER, link].seconds - measured[DEMO, link].seconds for link in links}
    slower = [link for link in links if saved[link] <= 0]
    text = f"overlap shortens DeMo's step on every link, by up to {1e3 * max(saved.values()):.0f} ms"
    claims.append(Claim(text + (f"; not on {', '.join(slower)}" if slower else ""), not slower))
    slowest = next((link for link in RATES if link in links), None)
    if slowest is not None:
        ddp = measured[ADAMW, slowest]
        saving = 1 - perfect_overlap(ddp) / without_overlap(ddp, measured[ADAMW_AFTER, slowest])
        text = (
            f"{link_words(slowest)}, overlap cannot shorten DDP's step by more than a tenth: by {100 * saving:.1f} % at best"
        )
        claims.append(Claim(text, saving <= 0.1))
    return claims


def _draw(rows: Sequence[Row], results: Path) -> dict[str, Drawing]:
    measured = cells(results)
    links = [link for link in RATES if link in _links(measured)]
    if not links:
        return {}
    kinds = {
        "DDP, without": lambda link: without_overlap(measured[ADAMW, link], measured[ADAMW_AFTER, link]),
        "DDP, with": lambda link: measured[ADAMW, link].seconds,
        "DDP, perfect (computed)": lambda link: perfect_overlap(measured[ADAMW, link]),
        "DeMo, without": lambda link: measured[DEMO_AFTER, link].seconds,
        "DeMo, with": lambda link: measured[DEMO, link].seconds,
    }
    page = Page(2, height=4.4, width=6.2)
    for axes, delay in zip(page.panels, ("", ",80ms"), strict=True):
        axes.set_yscale("log")
        for index, (name, seconds) in enumerate(kinds.items()):
            points = [(float(RATES[link]), seconds(link + delay)) for link in links if link + delay in _links(measured)]
            line(axes, points, name, index)
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
    sources=("lab",),
)
