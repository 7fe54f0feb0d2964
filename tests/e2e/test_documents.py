"""Every fenced block of README and docs runs, and shows what comes out."""

import argparse
import re
from pathlib import Path

import pytest

from tests.documents import (
    LANGUAGES,
    PAGES,
    ROOT,
    Block,
    Command,
    blocks_of,
    commands_of,
    is_shown,
    make_clone,
    run_command,
    run_machines,
    run_python,
)
from thinwire.lab import support

# Commands that are not run here, and why. A line that fits no command any more fails.
NOT_RUN = {
    r"(make|pip install|git clone|source) ": "makes or enters an environment; that targets exist is tested below",
    r"thinwire lab ": "needs network namespaces, and minutes: test_lab.py and test_lab_compare.py run these",
    r"thinwire study run ": "trains for minutes: test_studies.py runs every study on made-up rows",
    r"thinwire study compare mine": "reads what the command before it would have trained: test_studies_agreement.py",
    r"torchft_lighthouse |.* --(lighthouse|elastic) ": "serves other machines for ever: test_elastic_run.py runs them",
}
PYTHON_NOT_RUN = {"README.md": "test_readme.py runs it under torchrun"}
# Pages whose Python needs several ranks.
RANKS = {"docs/migration.md": 2, "docs/sharding.md": 4}
# What makes trainings short: options that come after those of the page. The first line that fits counts.
TINY = ["--layers", "1", "--width", "32", "--heads", "2", "--batch", "8", "--steps", "1", "--eval-examples", "8"]
TINY += ["--sample-tokens", "4", "--no-tensorboard", "--threads", "1", "--warmup-steps", "0", "--device", "cpu"]
TINY_TEXT = [*TINY, "--mlp-width", "64", "--sequence", "16"]
SHORTER = {
    r".*--(dry-run|print-config|help)": [],
    r"thinwire train --resume runs/mine --replicas 4": ["--steps", "3"],
    r"thinwire train --resume runs/mine": ["--steps", "2"],
    r"thinwire train vit": TINY,
    r"thinwire train .*--dataset ": TINY_TEXT,
    r"(thinwire|torchrun .* -m thinwire) train ": [*TINY_TEXT, "--dataset", argparse.__file__],
}
# Where a page shows the output, only what it leaves out is shortened.
UNSEEN = ["--eval-examples", "8", "--sample-tokens", "0", "--no-tensorboard", "--threads", "1", "--device", "cpu"]
BLOCKS = [block for page in PAGES for block in blocks_of(page)]
COMMANDS = [command for block in BLOCKS for command in commands_of(block)]


def is_left_out(command: Command) -> bool:
    return any(re.match(pattern, command.text) for pattern in NOT_RUN)


def shorter(command: Command) -> list[str]:
    if command.output is not None:
        return UNSEEN if command.words[1] == "train" else []
    return next((options for pattern, options in SHORTER.items() if re.match(pattern, command.text)), [])


@pytest.mark.parametrize("page", sorted({command.block.page for command in COMMANDS if not is_left_out(command)}))
def test_commands_run_and_print_what_the_page_shows(page: str, tmp_path: Path) -> None:
    make_clone(tmp_path)
    (tmp_path / "my-texts").mkdir()
    (tmp_path / "my-texts" / "mine.txt").write_text(Path(argparse.__file__).read_text())
    machines: list[Command] = []
    for command in COMMANDS:
        if command.block.page != page or is_left_out(command):
            continue
        if command.words[0] == "torchrun":
            machines.append(command)
            if len(machines) == 2:
                run_machines(machines, shorter(command), tmp_path)
                machines = []
            continue
        printed = run_command(command, shorter(command), tmp_path)
        if command.output is not None:
            assert is_shown(command.output, printed), f"{command.block}: {command.text}\nprints\n{printed}"
    assert not machines
    if page == "docs/tutorial.md":
        _run_python_of(page, tmp_path)


PYTHON_PAGES = sorted({block.page for block in BLOCKS if block.language == "python"} - {*PYTHON_NOT_RUN, "docs/tutorial.md"})


@pytest.mark.parametrize("page", PYTHON_PAGES)
def test_python_runs(page: str, tmp_path: Path) -> None:
    if page == "docs/lab.md" and support.missing():
        pytest.skip(support.missing() or "")
    make_clone(tmp_path)
    _run_python_of(page, tmp_path)


def _run_python_of(page: str, folder: Path) -> None:
    blocks = [block for block in BLOCKS if block.page == page and block.language == "python"]
    printed = run_python(blocks, RANKS.get(page, 1), folder)
    for block in blocks:
        for value in re.findall(r"^print\(.*\)  # ([\d,.]+)$", block.text, re.MULTILINE):
            assert value.replace(",", "") in printed.splitlines(), (
                f"{block} says that it prints {value}, but it prints\n{printed}"
            )


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_every_block_says_what_it_is(block: Block) -> None:
    assert block.language in LANGUAGES


def test_what_is_left_out_exists() -> None:
    for pattern in [*NOT_RUN, *SHORTER]:
        assert any(re.match(pattern, command.text) for command in COMMANDS), f"no command fits {pattern!r}"
    for page in [*PYTHON_NOT_RUN, *RANKS]:
        assert any(block.page == page and block.language == "python" for block in BLOCKS), f"{page} has no Python"


def test_a_block_that_shows_something_else_is_noticed() -> None:
    assert is_shown("a 1.2345 in 0:01\n...\nend\n", "a 5.4321 in 1:00  \nb\nc\nend\n")
    assert not is_shown("a 16.8 kB\n", "a 16.9 kB\n")
    assert not is_shown("...\nend\n", "end\nand more\n")


def test_options_of_commands_that_are_left_out_exist() -> None:
    sections = re.split(r"^## ", (ROOT / "docs" / "cli.md").read_text(), flags=re.MULTILINE)
    for command in COMMANDS:
        own = re.split(r" -- ", command.text)[0]
        if is_left_out(command) and own.startswith("thinwire "):
            (section,) = (text for text in sections if own.startswith(text.splitlines()[0] + " "))
            for option in re.findall(r" (--[a-z-]+)", own):
                assert f"`{option}`" in section, f"{command.block}: {option} is no option of {section.splitlines()[0]}"


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for page in PAGES:
        for target in re.findall(r"(?:^|`)make ([a-z-]+)", (ROOT / page).read_text(), re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page}: make {target} is not in the Makefile"
