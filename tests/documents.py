"""The fenced blocks of README and docs, and how a test runs them: as they stand, in a folder that looks like a clone."""

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import thinwire
from tests.cli import free_port, replicas, torchrun_sets
from tests.ranks import forkserver

ROOT = Path(thinwire.__file__).parent.parent.parent
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))),
]
LANGUAGES = ("python", "bash", "console", "text")
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
# What differs from run to run and from machine to machine: losses, clocks, speeds and shares of time.
_VARIES = re.compile(r"\b\d+\.\d{4}\b|\b\d+:\d\d\b|(?<=tokens/s )[\d,]+|(?<=wait )\d+%")


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Command:
    """A command of a bash or console block, and the output that a console block shows."""

    block: Block
    text: str
    output: str | None

    @property
    def words(self) -> list[str]:
        """Without comments, as the shell takes them."""
        return shlex.split(self.text, comments=True)


def blocks_of(page: str) -> list[Block]:
    """All fenced blocks of a page."""
    text = (ROOT / page).read_text()
    return [Block(page, text[: match.start()].count("\n") + 1, match[2], match[3]) for match in _FENCE.finditer(text)]


def commands_of(block: Block) -> Iterator[Command]:
    """The commands of a block, one by one."""
    if block.language == "bash":
        for line in block.text.replace("\\\n", "").splitlines():
            if line.strip():
                yield Command(block, line.strip(), None)
    if block.language == "console":
        for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
            line, _, output = part.partition("\n")
            yield Command(block, line, output)


def make_clone(folder: Path) -> None:
    """What a reader has: the files of the repository. Docs and results are copied, since commands write to them."""
    for name in ("LICENSE", "README.md", "benchmarks", "examples", "src"):
        (folder / name).symlink_to(ROOT / name)
    for name in ("docs", "results"):
        shutil.copytree(ROOT / name, folder / name)


def run_command(command: Command, appended: Sequence[str], folder: Path) -> str:
    """Run a command with these options after its own; returns what it printed."""
    words = command.words
    if words[0] == "thinwire":
        words, _, target = _cut(words, ">")
        done = replicas(*words[1:], *appended, cwd=folder, number=_num_replicas(words, folder))
        if target:
            (folder / target[0]).write_text(done.stdout)
    else:
        done = subprocess.run(
            ["bash", "-c", command.text], cwd=folder, capture_output=True, text=True, timeout=60, check=False
        )
    assert done.returncode == 0, f"{command.block}: {command.text}\n{done.stdout}{done.stderr}"
    return done.stdout


def run_machines(commands: Sequence[Command], appended: Sequence[str], folder: Path) -> None:
    """The same ``torchrun ... -m thinwire`` on several machines: as many processes here, with torchrun's variables."""
    places = [dict(zip(command.words[1::2], command.words[2::2], strict=False)) for command in commands]
    assert [place["--node-rank"] for place in places] == [str(rank) for rank in range(len(commands))]
    assert all(place["--nnodes"] == str(len(commands)) for place in places)
    (words,) = {tuple(_cut(command.words, "thinwire")[2]) for command in commands}
    done = replicas(*words, *appended, cwd=folder, number=len(commands), machines=len(commands))
    assert done.returncode == 0, f"{commands[0].block}: {done.stdout}{done.stderr}"


def _num_replicas(words: Sequence[str], folder: Path) -> int:
    """Replicas that the command would start: they are forked here, as torchrun's, to save their imports."""
    if words[1] != "train" or {"--dry-run", "--print-config"} & set(words):
        return 1
    if "--replicas" in words:
        return int(words[words.index("--replicas") + 1])
    if "--resume" in words:
        return int(tomllib.loads((folder / words[words.index("--resume") + 1] / "config.toml").read_text())["replicas"])
    return 1


def _cut(words: Sequence[str], at: str) -> tuple[list[str], str, list[str]]:
    place = words.index(at) if at in words else len(words)
    return list(words[:place]), at, list(words[place + 1 :])


def is_shown(shown: str, printed: str) -> bool:
    """Whether a console block shows what was printed, but for lines left out and for what varies."""
    pattern = ""
    for line in shown.splitlines():
        pattern += r"(?:.*\n)*?" if line.strip() == "..." else re.escape(_steady(line)) + r"\n"
    lines = "".join(_steady(line) + "\n" for line in printed.splitlines())
    return re.fullmatch(pattern, lines) is not None


def _steady(line: str) -> str:
    return _VARIES.sub("#", line.rstrip())


def run_python(blocks: Sequence[Block], num_ranks: int, folder: Path) -> str:
    """Run a page's Python in one process per rank, block after block with the same names; returns what rank 0 printed."""
    port = free_port()
    logs = [folder / f"rank{rank}.log" for rank in range(num_ranks)]
    processes = []
    for rank, log in enumerate(logs):
        variables = torchrun_sets(rank, num_ranks, port) if num_ranks > 1 else {}
        processes.append(forkserver().Process(target=_execute, args=(blocks, variables, folder, log)))
        processes[-1].start()
    for process in processes:
        process.join(100)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    said = [log.read_text() if log.exists() else "" for log in logs]
    assert codes == [0] * num_ranks, f"{blocks[0].page}: exit codes {codes}\n" + "\n".join(said)
    return said[0]


def _execute(blocks: Sequence[Block], variables: dict[str, str], folder: Path, log: Path) -> None:
    os.chdir(folder)
    os.environ.update(variables)
    names: dict[str, object] = {"__name__": "__main__"}
    printed, code = io.StringIO(), 0
    try:
        with contextlib.redirect_stdout(printed):
            for block in blocks:
                # As many lines before it as on the page, so that a traceback names the right one.
                exec(compile("\n" * block.line + block.text, str(ROOT / block.page), "exec"), names)
    except BaseException:
        code = 1
        printed.write(traceback.format_exc())
    log.write_text(printed.getvalue())
    sys.stdout.flush()
    os._exit(code)
