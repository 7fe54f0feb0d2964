"""Lay the site's sources out in build/docs: the pages of docs/, and all that they link to in the rest of the repository.

Documents link to source, tests and results as on a code host. Every file so linked is put under ``repo/``: Markdown as a
page, source and folders as pages that show them, all else as it is. Links are rewritten to these places. Nothing here knows
of the program that makes the site.
"""

import posixpath
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).parent.parent
# The target of a link or image, without its anchor; code, fenced or not, is passed over.
_LINK = re.compile(
    r"^ *(`{3,}).*?^ *\1$|`(?:[^`\n]|\n(?!\n))*`|(?<=\]\()(?P<target>[^)#\s]+)(?=[)#])", re.MULTILINE | re.DOTALL
)

# A figure by itself on a line: many are too small to be read beside the text, and lead to themselves.
_FIGURE = re.compile(r"^!\[(?P<words>[^\]]*)\]\((?P<target>[^)\s]+)\)$", re.MULTILINE)

# The search is for what documents say; code and tables of numbers would drown that.
_UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"


def stage(out: Path) -> None:
    """Write all pages, and what they need."""
    shutil.rmtree(out, ignore_errors=True)
    waiting = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*")) if path.is_file()]
    known = set(waiting)
    while waiting:
        path = waiting.pop()
        place = out / _place(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        content = _content(path)
        if content is None:
            shutil.copy(ROOT / path, place)
            continue
        text, targets = _relinked(content, path)
        text = _FIGURE.sub(r"[\g<0>](\g<target>)", text)
        place.write_text(text, encoding="utf-8")
        waiting += targets - known
        known |= targets


def _relinked(text: str, origin: str) -> tuple[str, set[str]]:
    """The text with links between places in the site, and the files of the repository that it links to."""
    folder, found = posixpath.dirname(_place(origin)) or ".", set()

    def rewritten(match: re.Match[str]) -> str:
        path = match["target"] and posixpath.normpath(posixpath.join(posixpath.dirname(origin), match["target"]))
        if not path or not (ROOT / path).exists():
            return match[0]
        found.add(path)
        return posixpath.relpath(_place(path), folder)

    return _LINK.sub(rewritten, text), found


def _place(path: str) -> str:
    """Where a file or folder of the repository is found in the site's sources."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    is_shown = path.endswith(".py") or (ROOT / path).is_dir()
    return f"repo/{path}.md" if is_shown else f"repo/{path}"


def _content(path: str) -> str | None:
    """The Markdown that shows a file or folder; None for what is no text."""
    full = ROOT / path
    if full.suffix == ".md":
        return (_UNSEARCHED if path.startswith("results/") else "") + full.read_text()
    heading = f"{_UNSEARCHED}# {path}\n\n"
    if full.is_dir():
        names = sorted(entry.name for entry in full.iterdir() if entry.is_file())
        return heading + "\n".join(f"- [`{name}`]({full.name}/{name})" for name in names)
    return f"{heading}````python\n{full.read_text()}````\n" if full.suffix == ".py" else None


if __name__ == "__main__":
    stage(ROOT / "build" / "docs")
