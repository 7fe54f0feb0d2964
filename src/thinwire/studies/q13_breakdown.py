"""q13: where an iteration's time goes, and whether the compressor eats the gain: on CPU cores and links, and on a GPU."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from thinwire.lab.figure import breakdown
from thinwire.lab.rows import Cell
from thinwire.studies.figure import Drawing, Page
from thinwire.studies.measured import ADAMW, DEMO, DEMO_MUON, NOTHING, RATES, cells, link_words, ours_in_words
from thinwire.studies.results import stored
from thinwire.studies.study import Claim, Finding, Study, table
from thinwire.studies.trials import Row

_LINKS = ("unshaped", *reversed(RATES))
_SHOWN = (DEMO, "demo-after", "demo-muon", "published-code", ADAMW, "powersgd", "topk", "signsgd", "qsgd")
_COLUMNS = ("forward", "backward", "encode", "exposed", "apply", "other")
_SHAPES, _TOPK = "1b", 32
# Measured after the others, with the update rules: the smaller shapes alone.
_LATER, _LATER_SHAPES, _LATER_REPLICAS = "step_muon", "300m", 8
_ADAMW_STEP, _OURS_STEP, _PUBLISHED_STEP = "AdamW fused", "thinwire triton", "published DeMo"
_RULES = {DEMO: "sign rule", DEMO_MUON: "muon rule"}
_READING = (
    "Milliseconds of a step of `gpt-10m` with two hosts, a CPU core each, on the lab's links: means over steps and hosts. "
    "*Hidden* is exchange that ran while backward did, *exposed* what was waited for; *apply* is decoding and the update. "
    "For AdamW and PowerSGD, encoding is a part of *backward* and *exposed*, since it happens inside DDP and its hooks, and "
    "the update is *other*. All parts but *hidden* add up to the mean step. A method's own "
    "work is *encode*, *apply* and *other*."
)
_GPU = (
    "**On a GPU** (H200, the paper's 1B model of 1,177 M parameters, k 32, milliseconds of the local step, no network). "
    "Decoding grows with the number of payloads; the update is a part of it."
)
_GPU_LATER = (
    f"**With other rules, and balance** (H200, {_LATER_SHAPES} parameters, k 32, {_LATER_REPLICAS} payloads, milliseconds "
    "of the local step, no network; the code of a later day). `step()` is all of it, checks of payloads included."
)


def compressor_seconds(cell: Cell) -> float:
    """What making, reading and applying messages takes."""
    return cell.parts["encode"] + cell.parts["apply"] + cell.parts["other"]


def _find(rows: Sequence[Row], results: Path) -> Finding:
    measured, steps = cells(results), stored(results, "step")
    parts, claims = [], list[Claim]()
    if measured:
        parts += [f"{_READING} {ours_in_words(measured)}", _table(measured)]
        claims += _link_claims(measured)
    if steps:
        parts += [_GPU, _gpu_table(steps)]
        claims += _gpu_claims(steps)
    if later := stored(results, _LATER):
        parts += [_GPU_LATER, _later_table(later)]
        claims += _later_claims(later)
    return Finding("\n\n".join(parts) or NOTHING, claims, _answer(measured, steps, later) if claims else "")


def _answer(measured: Mapping[tuple[str, str], Cell], steps: Sequence[Row], later: Sequence[Row]) -> str:
    leads, sentences = [], []
    for name, words in _RULES.items():
        gains = _gains(measured, name)
        eaten = [link_words(link) for link, (saved, cost) in gains.items() if saved <= cost]
        where = f"only {' and '.join(eaten)}" if eaten else "no"
        leads += [f"with the {words} {where}"] if gains else []
        parts = [
            f"{link_words(link)} {1e3 * saved:,.0f} ms less waiting for {1e3 * cost:,.0f} ms more of its own work"
            for link, (saved, cost) in gains.items()
        ]
        sentences += [f"Beside AdamW, a step of DeMo with the {words} has {'; '.join(parts)}."] if parts else []
    lead = "; ".join(leads)
    words = " ".join([*([f"{lead[0].upper()}{lead[1:]}."] if lead else []), *sentences])
    known = {(row["contender"], row["replicas"]): row["median_ms"] for row in _gpu_rows(steps)}
    mine = [f"{spent:.1f} ms with {replicas}" for (name, replicas), spent in known.items() if name == _OURS_STEP]
    if mine and (_ADAMW_STEP, None) in known:
        words += f" On a GPU, a whole local step of the 1B model takes {', '.join(mine)} replicas' payloads, and fused AdamW"
        words += f" {known[_ADAMW_STEP, None]:.1f} ms."
    whole = [f"{spent:.1f} ms with {name}" for name, spent in _later_steps(later).items()]
    if whole:
        words += f" There a step of {_LATER_SHAPES} parameters takes {', '.join(whole)}."
    return words.strip()


def _table(measured: Mapping[tuple[str, str], Cell]) -> str:
    lines = []
    for link in _LINKS:
        for name in _SHOWN:
            if cell := measured.get((name, link)):
                values = [*(cell.parts[part] for part in _COLUMNS), cell.hidden]
                lines.append([link, name, f"{1e3 * cell.seconds:,.0f}", *(f"{1e3 * value:,.0f}" for value in values)])
    return table(("link", "method", "step (median)", *_COLUMNS, "hidden"), lines, 2)


def _gains(measured: Mapping[tuple[str, str], Cell], name: str) -> dict[str, tuple[float, float]]:
    """Seconds of waiting that a DeMo saves beside AdamW in a step on each link, and what its compressor and update cost."""
    found = {}
    for link in _LINKS:
        demo, adamw = measured.get((name, link)), measured.get((ADAMW, link))
        if demo is not None and adamw is not None:
            saved = adamw.parts["exposed"] - demo.parts["exposed"]
            found[link] = (saved, compressor_seconds(demo) - compressor_seconds(adamw))
    return found


def _link_claims(measured: Mapping[tuple[str, str], Cell]) -> list[Claim]:
    claims = []
    for name in _RULES:
        for link, (saved, cost) in _gains(measured, name).items():
            text = f"{link_words(link)}, {name}'s compressor and update save more waiting than they cost"
            text += f": {1e3 * saved:,.0f} ms saved, {1e3 * cost:,.0f} ms more than AdamW's update"
            claims.append(Claim(text, saved > cost))
        known = [(cell, link) for link in _LINKS if (cell := measured.get((name, link)))]
        if known:
            worst, link = max(known, key=lambda pair: compressor_seconds(pair[0]) / pair[0].compute)
            share = compressor_seconds(worst) / worst.compute
            text = f"encoding, decoding and the update take {name} less than a third of forward and backward"
            claims.append(Claim(f"{text}: {100 * share:.0f} % at most, {link_words(link)}", share < 1 / 3))
    return claims


def _gpu_rows(steps: Sequence[Row]) -> list[Row]:
    wanted = (_ADAMW_STEP, _OURS_STEP, _PUBLISHED_STEP)
    mine = [row for row in steps if row["shapes"] == _SHAPES and row["contender"] in wanted and row["topk"] in (None, _TOPK)]
    return sorted(mine, key=lambda row: (wanted.index(row["contender"]), row["replicas"] or 0))


def _gpu_table(steps: Sequence[Row]) -> str:
    lines = []
    for row in _gpu_rows(steps):
        split = [f"{row['parts_ms'][part]:.2f}" if part in row["parts_ms"] else "" for part in ("encode", "decode")]
        lines.append([row["contender"], str(row["replicas"] or ""), f"{row['median_ms']:.2f}", *split])
    return table(("step", "replicas", "in all", "encode", "decode and update"), lines)


def _gpu_claims(steps: Sequence[Row]) -> list[Claim]:
    known = {(row["contender"], row["replicas"]): row["median_ms"] for row in _gpu_rows(steps)}
    adamw, claims = known.get((_ADAMW_STEP, None)), []
    for (name, replicas), mine in known.items():
        if adamw is not None and name == _OURS_STEP:
            text = "on a GPU, encode, decode and update take no longer than fused AdamW's update alone"
            text += f" with {replicas} payload{'s' if replicas > 1 else ''}"
            claims.append(Claim(f"{text}: {mine:.1f} ms against {adamw:.1f} ms", mine <= adamw))
    published, alone = known.get((_PUBLISHED_STEP, 1)), known.get((_OURS_STEP, 1))
    if published is not None and alone is not None:
        text = f"published DeMo's step takes at least 10 times as long: {published:.0f} ms, {published / alone:.0f} times"
        claims.append(Claim(text, published >= 10 * alone))
    return claims


def _later_steps(steps: Sequence[Row]) -> dict[str, float]:
    """Milliseconds of whole steps, by what they are of."""
    names = {_ADAMW_STEP: "fused AdamW", "Muon": "Muon"}
    names |= {
        f"{_OURS_STEP}, step()": "DeMo's sign rule",
        f"{_OURS_STEP}, step(), muon rule": "its muon rule",
        f"{_OURS_STEP}, step(), muon rule, balance 0.95": "that and balance",
    }
    known = {row["contender"]: row["median_ms"] for row in steps if row["shapes"] == _LATER_SHAPES}
    return {words: known[name] for name, words in names.items() if name in known}


def _later_table(steps: Sequence[Row]) -> str:
    mine = [row for row in steps if row["shapes"] == _LATER_SHAPES]
    lines = [
        (row["contender"], f"{row['median_ms']:.2f}", f"{row['low_ms']:.2f} to {row['high_ms']:.2f}")
        for row in sorted(mine, key=lambda row: row["median_ms"])
    ]
    return table(("step", "median", "least and most"), lines)


def _later_claims(steps: Sequence[Row]) -> list[Claim]:
    """The same of the code of a later day, so that a step that has become slower does not hide behind older rows."""
    known = {(row["contender"], row["replicas"]): row["median_ms"] for row in steps if row["shapes"] == _LATER_SHAPES}
    mine, adamw = known.get((_OURS_STEP, _LATER_REPLICAS)), known.get((_ADAMW_STEP, None))
    if mine is None or adamw is None:
        return []
    text = f"the same when it was last measured, with {_LATER_SHAPES} parameters and {_LATER_REPLICAS} payloads"
    return [Claim(f"{text}: {mine:.1f} ms against {adamw:.1f} ms", mine <= adamw)]


def _draw(rows: Sequence[Row], results: Path) -> dict[str, Drawing]:
    measured = cells(results)
    figures = {}
    for link, rate in RATES.items():
        chosen = [measured[name, link] for name in _SHOWN if (name, link) in measured]
        if chosen:
            page = Page(figure=breakdown(chosen, f"Where a step's time goes: {rate} Mbit/s, 2 hosts"))
            caption = f"Where a step's time goes at {rate} Mbit/s, two hosts."
            figures[f"breakdown_{link}.png"] = Drawing(page, caption)
    return figures


STUDY = Study(
    "q13",
    "Where the time goes",
    "Where does an iteration's time go, and does the compressor eat the gain?",
    find=_find,
    draw=_draw,
    sources=("lab", "step", _LATER),
)
