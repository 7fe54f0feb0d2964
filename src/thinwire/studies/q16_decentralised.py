"""q16: all-reduce or gossip, and what "decentralised" means here: what each exchange needs, and what it was seen to receive.

The page for readers is docs/decentralised.md.
"""

from collections.abc import Sequence
from pathlib import Path

from thinwire.exchange.choice import ALL_GATHER, HIERARCHICAL, OWNER
from thinwire.studies.figure import Drawing, Page, line, logarithmic, logarithmic_up, room_for_labels, title
from thinwire.studies.results import stored
from thinwire.studies.study import Claim, Finding, Study, table
from thinwire.studies.trials import Row

_ELASTIC = "elastic"
# Up to here an all-gather is as good, and owners are not for it.
_FEW = 8
_NEEDS = {
    ALL_GATHER: (
        "everyone's payload to everyone",
        "every replica, every step",
        "the others stop within the deadline, unchanged, and name it",
    ),
    OWNER: (
        "each replica combines a part of the chunks for all: an all-to-all, then an all-gather",
        "every replica, twice a step",
        "as above; what it had left over as an owner is lost with it",
    ),
    HIERARCHICAL: (
        "whole gradients inside an island, payloads between islands",
        "its island, and its counterpart in every other island, every step",
        "all islands stop; after a loss while parameters are gathered, go on from a checkpoint",
    ),
    _ELASTIC: (
        "as all_gather or owner, between those who are there",
        "every replica of the last meeting, every step; the lighthouse when someone is lost, comes, or every 30 s",
        "the others meet and take the step again, if more than half are left; it may come back",
    ),
}
_READING = (
    "No exchange is gossip: replicas that train together all take the same step. None is an all-reduce of gradients "
    "either, but inside islands: payloads are gathered, and everyone adds them up by itself in the same order, or "
    "owners do for all. Received bytes are those of `optimizer.traffic` in a step of two layers of 1,024 x 1,024, per"
    " rank, from other replicas or other islands: gloo processes up to 8 ranks, threads of one process for more; "
    "islands of 2 ranks, and of 8 among 64 and more. An elastic transport moves what its exchange does, and was not "
    "measured apart. What it all means is told in `docs/decentralised.md`."
)


def _find(rows: Sequence[Row], results: Path) -> Finding:
    measured = stored(results, "received_bytes")
    numbers = sorted({row["ranks"] for row in measured})
    found = {(row["exchange"], row["ranks"]): row for row in measured}
    lines = []
    for exchange, words in _NEEDS.items():
        known = [found.get((exchange, number)) for number in numbers]
        lines.append([exchange, *words, *("" if row is None else f"{row['received'] / 1e3:,.1f}" for row in known)])
    heads = ("exchange", "what moves", "what a replica must reach", "when one is gone")
    text = table((*heads, *(f"kB received, {number} ranks" for number in numbers)), lines, len(heads))
    inside = [row["inside_received"] / 1e6 for row in measured if row["inside_received"]]
    if inside:
        text += f"\n\nInside its island a rank receives {min(inside):.1f} to {max(inside):.1f} MB besides, over fast links."
    claims = _claims(measured) if measured else []
    answer = (
        "Neither. Replicas that train together exchange payloads without a server, every one of them in every step, and all "
        f"take the same step; with an elastic transport they may come and go. {_growth(measured)}"
    )
    return Finding(f"{_READING}\n\n{text}", claims, answer if claims else "")


def _growth(measured: Sequence[Row]) -> str:
    parts = []
    for exchange in (ALL_GATHER, OWNER):
        mine = sorted((row["ranks"], row["received"] / 1e3) for row in measured if row["exchange"] == exchange)
        if mine:
            parts.append(f"{exchange} {mine[0][1]:,.1f} kB with {mine[0][0]} and {mine[-1][1]:,.1f} kB with {mine[-1][0]}")
    return f"What a replica received in a step, by their number: {'; '.join(parts)}."


def _claims(measured: Sequence[Row]) -> list[Claim]:
    gathered = [row for row in measured if row["exchange"] == ALL_GATHER]
    claims = [
        Claim(
            "in an all-gather a replica receives exactly the payloads of all others, R - 1 of them",
            bool(gathered) and all(row["received"] == (row["replicas"] - 1) * row["payload"] for row in gathered),
        ),
        Claim(
            "what a replica sends in an all-gather does not depend on how many there are",
            len({row["sent"] for row in gathered}) == 1,
        ),
    ]
    owned = {row["ranks"]: row["received"] for row in measured if row["exchange"] == OWNER}
    for number in sorted(owned)[1:]:
        if number > _FEW:
            times = owned[number] / owned[min(owned)]
            text = f"with owners, {number} replicas receive at most 2.5 times what {min(owned)} do: {times:.1f} times"
            claims.append(Claim(text, times <= 2.5))
    for row in gathered:
        if row["ranks"] > _FEW and row["ranks"] in owned:
            times = row["received"] / owned[row["ranks"]]
            text = f"with {row['ranks']} replicas owners receive fewer bytes than in an all-gather: {times:.1f} times fewer"
            claims.append(Claim(text, times > 1))
    return claims


def _draw(rows: Sequence[Row], results: Path) -> dict[str, Drawing]:
    measured = [row for row in stored(results, "received_bytes") if row["received"]]
    if not measured:
        return {}
    page = Page()
    (axes,) = page.panels
    points: dict[str, list[tuple[float, float]]] = {}
    for row in measured:
        # The size of islands changes on the way, and what is received with it: a line for each.
        islands = f",\nislands of {row['ranks'] // row['replicas']}" if row["exchange"] == HIERARCHICAL else ""
        points.setdefault(f"{row['exchange']}{islands}", []).append((float(row["ranks"]), row["received"] / 1e3))
    for index, (name, some) in enumerate(points.items()):
        line(axes, some, name, index)
    logarithmic(axes, sorted({row["ranks"] for row in measured}))
    logarithmic_up(axes)
    room_for_labels(axes)
    title(axes, "Received in a step, two layers of 1,024 x 1,024", "ranks", "kB received per rank and step")
    return {
        "received.png": Drawing(
            page, "What a rank receives in a step from other replicas, or from other islands of that many ranks."
        )
    }


STUDY = Study(
    "q16",
    "Decentralised",
    "All-reduce or gossip: what does decentralised mean here, what must each replica reach, and what if one is gone?",
    find=_find,
    draw=_draw,
    sources=("received_bytes",),
)
