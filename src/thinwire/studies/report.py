"""All studies on one page, and the same as Markdown: question, answer, claims, figures, table, and what made it."""

import base64
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from thinwire.pages.markdown import inline, markdown
from thinwire.pages.page import document, figures, folded, section
from thinwire.studies.charts import charts_of
from thinwire.studies.figure import Drawing
from thinwire.studies.results import best_folder, folders_of, rank, size_in, write_summary
from thinwire.studies.setup_words import setup_in_words
from thinwire.studies.study import FULL, MEDIUM, SMALL, Claim, Finding, Study
from thinwire.studies.trials import Rows

# What stores the rows that are no study's own.
MADE_BY = {
    "lab": "thinwire lab compare",
    "lab_overlap": "thinwire lab compare --methods adamw adamw-after adamw-bf16 adamw-bf16-after demo demo-after demo-muon "
    "demo-muon-after --hosts 2 --links 10mbit 100mbit 1gbit 10mbit,80ms 100mbit,80ms 1gbit,80ms --rounds 3",
    "lab_losses": "python benchmarks/lab_losses.py",
    "frontier_links": "python benchmarks/frontier_links.py",
    "lab_runs": "python benchmarks/lab_runs.py",
    "step": "thinwire bench step --shapes 300m 1b --topk 1 8 32 64 --replicas 1 8 64 --backends triton --rounds 7",
    "step_muon": "thinwire bench step --shapes 300m --backends triton --updates sign muon --balances 0 0.95",
    "received_bytes": "python benchmarks/received_bytes.py",
}
# What a reader should know of rows that are not of the full size.
CAUTIONS = {
    SMALL: "These rows are of the small size: they show that the study runs, and are no evidence.",
    MEDIUM: "These rows are of the medium size: three seeds, but a very small model and few steps.",
}
_TITLE = "Results"
_INTRODUCTION = (
    "What readers of the DeMo paper asked, and what stored rows say. `thinwire study report` writes this page from the rows "
    "under `results/`, answers and claims included; a claim that does not hold stays. Each answer says what was trained for "
    "it. *Small*: a model of 0.2 M parameters, for 120 steps at most, which shows that a study runs, and no more. *Medium*: "
    "mostly the same model for 200 steps, with three seeds, and learning rates tuned alike wherever methods are compared: "
    "evidence, but of very small models. Without a word: on a GPU, mostly 4.9 M parameters for 500 steps of 16,384 bytes, "
    "none of which is seen twice, tuned as in the medium size. Text is a byte a token, and judged by other text, the same "
    "for all."
)


@dataclass(frozen=True)
class Origin:
    """Where rows come from: the command that makes them, their folder, and what they were made on."""

    command: str
    folder: Path | None
    facts: str


@dataclass(frozen=True)
class Answer:
    """All that a report says of a study. ``folder`` has its figures and its summary."""

    study: Study
    folder: Path
    finding: Finding
    drawings: dict[str, Drawing]
    origins: Sequence[Origin]
    size: str | None
    """None where it has no rows of its own."""

    @property
    def notes(self) -> list[str]:
        """What a reader should know before the answer."""
        caution = CAUTIONS.get(self.size or FULL)
        words = setup_in_words(Rows(self.folder).rows) if self.size else []
        return [*([caution] if caution else []), *([" ".join(words)] if words else [])]

    @property
    def words(self) -> str:
        """The answer in a paragraph."""
        return self.finding.answer or f"Nothing is known yet: `{self.origins[0].command}` makes the rows."

    @property
    def score(self) -> str:
        """How many of the claims hold."""
        claims = self.finding.claims
        return f"{sum(claim.holds for claim in claims)} of {len(claims)} claims hold" if claims else "no claims"


def answers(studies: Iterable[Study], results: Path) -> list[Answer]:
    """Write the summaries and figures of all folders of these studies, and return what a report says of each."""
    return [_answer(study, results) for study in studies]


def _answer(study: Study, results: Path) -> Answer:
    folders = folders_of(results, study)
    written = {folder: write_summary(study, folder, results) for folder in folders}
    folder = chosen_folder(study, results, {folder: finding for folder, (finding, _) in written.items()})
    finding, drawings = written.get(folder, (Finding(""), {}))
    size = size_of(study, folder)
    return Answer(study, folder, finding, drawings, origins(study, folder, results, size), size)


def chosen_folder(study: Study, results: Path, findings: dict[Path, Finding]) -> Path:
    """The best one that has an answer, else the best one: rows of a GPU may not be enough for one yet."""
    if not study.has_trials:
        return results / study.name
    best = best_folder(results, study.name) or results / study.name
    ranked = sorted(findings, key=lambda folder: (folder == best, rank(folder)))
    return next((folder for folder in reversed(ranked) if findings[folder].answer), best)


def size_of(study: Study, folder: Path) -> str | None:
    """Of a study's own rows, if there are any."""
    return size_in(folder) if study.has_trials and Rows(folder).rows else None


def origins(study: Study, folder: Path, results: Path, size: str | None) -> list[Origin]:
    """Of a study's own rows, and of those that it reads."""
    found = []
    if study.has_trials:
        found.append(Origin(_command(study.name, size or SMALL), folder if folder.is_dir() else None, _facts(folder)))
    for name in study.sources:
        source = best_folder(results, name)
        command = MADE_BY.get(name) or _command(name, SMALL if source is None else size_in(source))
        found.append(Origin(command, source, "no rows" if source is None else _facts(source)))
    return found or [Origin(f"thinwire study report {study.name}", None, "computed, without rows")]


def _command(study: str, size: str) -> str:
    return f"thinwire study run {study} --size {size}{' --device cuda' if size == FULL else ''}"


def _facts(folder: Path) -> str:
    """Rows, seeds and machine."""
    rows = Rows(folder).rows
    if not rows:
        return "no rows"
    seeds = {row["trial"]["settings"].get("seed", 0) for row in rows if "trial" in row}
    parts = [f"{len(rows)} rows", *([f"{len(seeds)} seed{'s' if len(seeds) > 1 else ''}"] if seeds else [])]
    path = folder / "environment.json"
    if path.exists():
        stored = json.loads(path.read_text(encoding="utf-8"))
        # What was measured in several rounds has a machine for each.
        machine = stored[-1] if isinstance(stored, list) else stored
        parts.append(machine.get("gpu") or f"CPU with {machine['cpu_count']} cores")
        # Rows may have been added later; each names its commit.
        parts.append(f"since {machine['date']}")
    return ", ".join(parts)


def write_markdown(found: Sequence[Answer], path: Path) -> None:
    """The report as Markdown, with the figures' PNGs."""
    lines = [f"# {_TITLE}", _INTRODUCTION, "| study | question | claims | rows |\n| --- | --- | --- | --- |"]
    lines[-1] += "".join(
        f"\n| [{one.study.name}](#{_anchor(one.study)}) | {one.study.question} | {one.score} | {_standing(one)} |"
        for one in found
    )
    lines += [_section(one, path.parent) for one in found]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join(lines) + "\n", encoding="utf-8")


def _heading(study: Study) -> str:
    return f"{study.name}: {study.title}"


def _anchor(study: Study) -> str:
    return "".join(letter for letter in _heading(study).lower().replace(" ", "-") if letter.isalnum() or letter == "-")


def _standing(one: Answer) -> str:
    """How large the study was; of the small size there is no more to say."""
    facts = one.origins[0].facts
    return {SMALL: "small size", MEDIUM: f"medium size, {facts}"}.get(one.size or FULL, facts)


def _section(one: Answer, beside: Path) -> str:
    parts = [f"## {_heading(one.study)}", f"**{one.study.question}**", *one.notes]
    parts.append(told(one.finding, one.words))
    for name, (_, caption) in one.drawings.items():
        parts.append(f"![{caption}]({_relative(one.folder / name, beside)})\n\n{caption}")
    made = []
    for origin in one.origins:
        facts = f"[{origin.facts}]({_relative(origin.folder, beside)})" if origin.folder else origin.facts
        made.append(f"`{origin.command}`: {facts}")
    return "\n\n".join([*parts, f"Made by {'; '.join(made)}."])


def told(finding: Finding, answer: str) -> str:
    """Answer, claims and table of a study, as they stand in the Markdown."""
    parts = [answer]
    if finding.claims:
        parts.append("\n".join(claim.line for claim in finding.claims))
    # Headings in the text belong below that of the study.
    return "\n\n".join([*parts, finding.text.replace("\n## ", "\n### ")])


def _relative(path: Path, beside: Path) -> str:
    return Path(os.path.relpath(path, beside)).as_posix()


def write_page(found: Sequence[Answer], path: Path) -> None:
    """The report as one page that needs nothing else."""
    head = f'<header><h1>{_TITLE}</h1><p class="lead">{inline(_INTRODUCTION)}</p></header>'
    overview = section("overview", "All questions", [f'<ul class="overview">{"".join(map(_line, found))}</ul>'])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        document(f"Thinwire: {_TITLE.lower()}", [head, overview, *(_part(one, path.parent) for one in found)]),
        encoding="utf-8",
    )


def _line(one: Answer) -> str:
    """A study in the list of all."""
    name, question = one.study.name, inline(one.study.question)
    standing = f'<span class="muted">{one.score}; {escape(_standing(one))}</span>'
    return f'<li><a href="#{name}"><b>{name}</b> {question}</a> {standing}</li>'


def _part(one: Answer, beside: Path) -> str:
    inner = [f'<p class="lead">{inline(one.study.question)}</p>', f'<p class="answer">{inline(one.words)}</p>']
    inner += [f'<p class="warning">{inline(note)}</p>' for note in one.notes]
    for name, (page, caption) in one.drawings.items():
        charts = [chart.html() for chart in charts_of(page)] or [_picture(one.folder / name, caption)]
        inner += [figures(charts), f'<p class="caption">{inline(caption)}</p>']
    if one.finding.claims:
        inner.append(folded(one.score.capitalize(), _claims(one.finding.claims), is_open=True))
    if one.finding.text:
        inner.append(folded("Table and how to read it", markdown(one.finding.text, level=3)))
    for origin in one.origins:
        where = f" ([rows]({_relative(origin.folder, beside)}))" if origin.folder else ""
        inner.append(f'<p class="muted">{inline(f"Made by `{origin.command}`: {origin.facts}{where}.")}</p>')
    return section(one.study.name, _heading(one.study), inner)


def _claims(claims: Sequence[Claim]) -> str:
    items = "".join(f"<li{'' if one.holds else ' class=no'}>{inline(one.text)}.</li>" for one in claims)
    return f'<ul class="claims">{items}</ul>'


def _picture(path: Path, caption: str) -> str:
    """A figure that is no chart, as it was drawn."""
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<figure class="picture"><img alt="{escape(caption, quote=True)}" src="data:image/png;base64,{data}"></figure>'
