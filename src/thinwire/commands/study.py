"""``thinwire study``: the questions that were asked of DeMo, and the trainings that answer them."""

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import torch
import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from thinwire.commands.asked import device_of
from thinwire.core.errors import check_float, check_int
from thinwire.training.errors import TrainingError

if TYPE_CHECKING:
    from thinwire.studies.study import Study
    from thinwire.studies.trials import Book

_RESULTS, _PAGE = Path("results"), Path("docs/results.md")


@dataclass(frozen=True)
class ListCommand:
    """Name all studies and their questions."""

    results: Path = _RESULTS
    """Folder of all results."""
    debug: bool = False
    """Show where an error came from."""


@dataclass(frozen=True)
class RunCommand:
    """Run the trainings of some studies, or those that are missing, and write what they say. A study without trainings is
    reported anew."""

    names: tyro.conf.Positional[tuple[str, ...]]
    """Studies, such as q3, or all."""
    size: Literal["small", "medium", "full"] = "small"
    """small: a minute or two each on a CPU, no evidence. medium: the same model trained longer, with tuned learning rates
    and three seeds, minutes to an hour each. full: a larger model, for a GPU."""
    device: str = "auto"
    """cuda, cpu, or auto: a GPU if there is one."""
    at_once: int = 1
    """Trainings at the same time, each in a process of its own."""
    seconds: float = 0.0
    """Begin no training after this time; a later call goes on. 0: no limit."""
    results: Path = _RESULTS
    """Folder of all results: rows go to STUDY/DATE_HARDWARE in it, to the newest of this hardware and size."""
    anew: bool = False
    """Begin a new folder, instead of going on in the newest."""
    debug: bool = False
    """Show where an error came from."""


@dataclass(frozen=True)
class ReportCommand:
    """Write summaries and figures from stored rows; for all studies, also one page of them, and the same as Markdown.
    Nothing is run."""

    names: tyro.conf.Positional[tuple[str, ...]] = ("all",)
    """Studies, such as q3, or all."""
    results: Path = _RESULTS
    """Folder of all results."""
    page: Path | None = None
    """Where the page of all studies goes; report.html in the folder of all results unless given."""
    markdown: Path | None = None
    """Where the same goes as Markdown; docs/results.md unless given, or results.md in another folder of results than the
    usual one."""
    debug: bool = False
    """Show where an error came from."""


@dataclass(frozen=True)
class CompareCommand:
    """Say which claims the rows of another folder of results bear out as the stored ones do, and which not: a study that was
    run again, or on another machine. Nothing is run. The exit code is 1 where claims differ."""

    others: tyro.conf.Positional[Path]
    """The other folder, as of: thinwire study run all --results FOLDER."""
    names: tyro.conf.Positional[tuple[str, ...]] = ("all",)
    """Studies, such as q3, or all."""
    results: Path = _RESULTS
    """Folder of the stored results."""
    debug: bool = False
    """Show where an error came from."""


_Command = (
    Annotated[ListCommand, tyro.conf.subcommand("list")]
    | Annotated[RunCommand, tyro.conf.subcommand("run")]
    | Annotated[ReportCommand, tyro.conf.subcommand("report")]
    | Annotated[CompareCommand, tyro.conf.subcommand("compare")]
)


def command(arguments: list[str]) -> int:
    """Run it."""
    asked: ListCommand | RunCommand | ReportCommand | CompareCommand = tyro.cli(
        _Command, prog="thinwire study", args=arguments
    )
    console = Console()
    if isinstance(asked, ListCommand):
        return _list(asked, console)
    if isinstance(asked, ReportCommand):
        return _report(asked, console)
    if isinstance(asked, CompareCommand):
        return _compare(asked, console)
    check_int("--at-once", asked.at_once, 1)
    check_float("--seconds", asked.seconds, 0.0)
    return _run(asked, console)


def _list(asked: ListCommand, console: Console) -> int:
    from thinwire.studies.questions import STUDIES
    from thinwire.studies.results import best_folder

    lines = Table()
    for heading in ("study", "question", "best rows"):
        lines.add_column(heading)
    for study in STUDIES.values():
        folder = best_folder(asked.results, study.name)
        best = "none" if folder is None else folder.name
        lines.add_row(study.name, study.question, best if study.has_trials else "has no trainings")
    console.print(lines)
    return 0


def _chosen(names: tuple[str, ...]) -> "list[Study]":
    from thinwire.studies.questions import STUDIES

    if not names:
        raise TrainingError("name one study or more, such as q3, or all; thinwire study list says what there is")
    for name in names:
        if name != "all" and name not in STUDIES:
            raise TrainingError(f"there is no study {name!r}; there are all, {', '.join(STUDIES)}")
    return list(STUDIES.values()) if "all" in names else [STUDIES[name] for name in dict.fromkeys(names)]


def _run(asked: RunCommand, console: Console) -> int:
    from thinwire.studies.results import book_of, folder_for

    device, deadline = device_of(asked.device), time.monotonic() + (asked.seconds or math.inf)
    studies = _chosen(asked.names)
    with_trials = [one for one in studies if one.has_trials and asked.size in one.sizes]
    for one in studies:
        if one.has_trials and one not in with_trials and one.name in asked.names:
            raise TrainingError(f"--size {asked.size}: {one.name} has the sizes {' and '.join(one.sizes)} alone")
    if device.type == "cpu":
        torch.set_num_threads(1)  # as in processes of their own: losses must not depend on how many run at once
    folders = {one.name: folder_for(asked.results, one.name, device, asked.size, asked.anew) for one in with_trials}
    left, failures = 0, list[TrainingError]()
    # Where the time counts, nothing else must run, and what others have found is read.
    for alone in (False, True):
        mine = [one for one in with_trials if one.alone == alone]
        books = [book_of(one, asked.size, folders[one.name]) for one in mine]
        try:
            _run_books(books, asked, device, 1 if alone else asked.at_once, deadline, console)
        except TrainingError as error:
            failures.append(error)
        left += _conclude_books(books, asked.results, console)
    for study in studies:
        if not study.has_trials:
            _conclude(study, asked.results / study.name, asked.results, console)
    if failures:
        raise failures[0]
    return 3 if left else 0


def _run_books(
    books: "list[Book]", asked: RunCommand, device: torch.device, at_once: int, deadline: float, console: Console
) -> None:
    from thinwire.studies.trials import run_all

    for book in books:
        if due := len(book.due):
            console.print(f"[dim]{book.name}: {due} trainings to begin with[/dim]", highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bars = {book.name: progress.add_task(book.name, total=None) for book in books}
        num_done = dict.fromkeys(bars, 0)
        for book, row in run_all(books, device, at_once, deadline):
            loss = "failed" if row["loss"] is None else f"{row['loss']:.4f}"
            console.print(f"[dim]{book.name}: {loss}, {row['seconds']:.0f} s[/dim]", highlight=False)
            left = len(book.due)
            num_done[book.name] += 1
            done = num_done[book.name]
            progress.update(bars[book.name], completed=done, total=done + left, visible=left > 0)


def _conclude_books(books: "list[Book]", results: Path, console: Console) -> int:
    """Write what each says; returns the number of trainings that are left."""
    from thinwire.studies.questions import STUDIES

    for book in books:
        if book.rows.rows:
            _conclude(STUDIES[book.name], book.rows.folder, results, console)
        if left := len(book.due):
            console.print(f"{book.name}: {left} trainings are left, or more as others end; call it again to go on")
    return sum(len(book.due) for book in books)


def _conclude(study: "Study", folder: Path, results: Path, console: Console) -> None:
    """Write what the rows of a folder say, and print its claims."""
    from thinwire.studies.results import write_summary

    finding, _ = write_summary(study, folder, results)
    console.print(f"{study.name} {study.title}: {folder}", soft_wrap=True, highlight=False)
    for claim in finding.claims:
        console.print(f"  {'holds' if claim.holds else 'DOES NOT HOLD'}: {claim.text}", soft_wrap=True, highlight=False)


def _report(asked: ReportCommand, console: Console) -> int:
    from thinwire.studies.report import answers, write_markdown, write_page

    studies = _chosen(asked.names)
    _check_folder("--results", asked.results)
    found = answers(studies, asked.results)
    written = [path for one in found if (path := one.folder / "summary.md").exists()]
    for one in found:
        if not (one.folder / "summary.md").exists():
            console.print(f"{one.study.name}: there are no rows; {one.origins[0].command} makes them", highlight=False)
    if "all" in asked.names:
        page = asked.page or asked.results / "report.html"
        # The repository's own page is of the repository's own rows.
        text = asked.markdown or (_PAGE if asked.results == _RESULTS else asked.results / _PAGE.name)
        write_page(found, page)
        write_markdown(found, text)
        written += [page, text]
    for path in written:
        console.print(f"{path}", soft_wrap=True, highlight=False)
    return 0


def _compare(asked: CompareCommand, console: Console) -> int:
    from thinwire.studies.agreement import agreements

    studies = _chosen(asked.names)
    _check_folder("--results", asked.results)
    _check_folder("others", asked.others)
    with console.status("reading"):
        found = agreements(studies, asked.results, asked.others)
    if not found:
        raise TrainingError(f"{asked.others}: it has no rows of the same study and size as {asked.results}")
    lines = Table("study", "size")
    for heading in ("claims", "the same"):
        lines.add_column(heading, justify="right")
    for one in found:
        lines.add_row(one.study, one.size, str(len(one.pairs)), str(len(one.pairs) - len(one.differing)))
    console.print(lines)
    for one in found:
        for pair in one.differing:
            console.print(f"{one.study} {one.size}", highlight=False)
            for root, claim in zip((asked.results, asked.others), pair, strict=True):
                says = "nothing like it" if claim is None else claim.line.removeprefix("- ").replace("**", "")
                console.print(f"  {root}: {says}", soft_wrap=True, highlight=False, markup=False)
    total, differing = sum(len(one.pairs) for one in found), sum(len(one.differing) for one in found)
    console.print(f"{total - differing} of {total} claims are the same", highlight=False)
    return 1 if differing else 0


def _check_folder(field: str, folder: Path) -> None:
    if not folder.is_dir():
        raise TrainingError(f"{field} {folder}: there is no such folder; thinwire study run makes rows in it")
