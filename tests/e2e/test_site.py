"""The documentation site builds without a warning and needs no other host; links lead somewhere; nothing is undocumented."""

import ast
import contextlib
import importlib.util
import io
import os
import pkgutil
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest

import thinwire
import thinwire.planner
import thinwire.wire
from tests.documents import PAGES, ROOT, blocks_of
from thinwire import commands as package
from thinwire.cli import run

os.environ.setdefault("NO_MKDOCS_2_WARNING", "1")
# Code that the site or a reader runs, and Markdown whose links are followed.
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
DOCUMENTS = [*(ROOT / page for page in PAGES), ROOT / "CHANGELOG.md", *sorted((ROOT / "results").rglob("*.md"))]
_CODE = re.compile(r"^ *(`{3,}).*?^ *\1$|`[^`]*`", re.MULTILINE | re.DOTALL)


def load(name: str) -> ModuleType:
    """A script of website/, which is no package."""
    specification = importlib.util.spec_from_file_location(name, ROOT / "website" / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


_MARKUP = re.compile(r"^\s*(?:[-*] |\d+\. |\|)", re.MULTILINE)


class Page(HTMLParser):
    """What a page of the site has to say about itself."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.ids |= {value for name in ("id", "name") if (value := found.get(name))}
        if tag == "a" and found.get("href"):
            self.links.append(found["href"] or "")
        elif found.get("rel") != "canonical":
            self.loaded += [value for name in ("src", "href", "data", "poster") if (value := found.get(name))]


def test_the_site_builds_and_is_whole(tmp_path: Path) -> None:
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    load("stage").stage(tmp_path / "docs")
    # A warning raises, since the configuration is strict.
    site = tmp_path / "site"
    build(load_config(str(ROOT / "mkdocs.yml"), docs_dir=str(tmp_path / "docs"), site_dir=str(site)))
    pages = {path: Page(path) for path in site.rglob("*.html")}
    assert len(pages) > 100
    for path, page in pages.items():
        for link in [*page.links, *page.loaded]:
            assert_leads_somewhere(link, path, pages, site)
        # A list or table that the site's Markdown does not see, though a code host's does.
        broken = [words for words in re.findall(r"<p>(.*?)</p>", path.read_text(), re.DOTALL) if _MARKUP.search(words)]
        assert not broken, f"{path.name} has Markdown in {broken[0][:200]}"
        outside = [link for link in page.loaded if urlsplit(link).netloc]
        assert not outside, f"{path.name} loads {outside}"
    for style in site.rglob("*.css"):
        outside = re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", style.read_text())
        assert not outside, f"{style.name} loads from another host"
    assert (site / "search" / "search_index.json").stat().st_size > 100_000
    undocumented = [name for name in public_names() if name not in pages[site / "api.html"].ids]
    assert not undocumented, f"not in docs/api.md: {undocumented}"


def assert_leads_somewhere(link: str, path: Path, pages: dict[Path, Page], site: Path) -> None:
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        assert parts.scheme in ("data", "mailto"), f"{path.name} links to {link}"
        return
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if path.name == "404.html":  # it is shown at any address, so its links begin at the root
        target = site / unquote(parts.path).lstrip("/")
    target = target / "index.html" if target.is_dir() else target
    assert target.exists(), f"{path.relative_to(site)} links to {link}"
    if parts.fragment and target in pages and not parts.fragment.startswith("__"):
        assert unquote(parts.fragment) in pages[target].ids, f"{path.relative_to(site)} links to {link}: no such anchor"


def public_names() -> Iterator[str]:
    """All of the ``__all__`` there are, and what documents and examples import."""
    for module in (thinwire, thinwire.planner, thinwire.wire):
        yield from (f"{module.__name__}.{name}" for name in module.__all__)
    sources = [block.text for page in PAGES for block in blocks_of(page) if block.language == "python"]
    for source in [*sources, *(path.read_text() for path in EXAMPLES)]:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "thinwire":
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_anchors_lead_somewhere_on_a_code_host(document: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", _CODE.sub("", document.read_text())):
        path = document.parent / target if target else document
        assert path.exists(), f"{document.name} links to {target}"
        assert not anchor or anchor in headings(path), f"{document.name} links to {target}#{anchor}: no such heading"


def headings(path: Path) -> set[str]:
    """Anchors as code hosts make them from headings."""
    text = re.sub(r"^ *(`{3,}).*?^ *\1$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"^#+ +(.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def test_the_reference_of_the_command_line_is_the_commands_own() -> None:
    reference = load("cli_reference")
    assert reference.PAGE.read_text() == reference.reference(), "run make docs"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert run(["--help"]) == 0
    commands = set(re.findall(r"^  ([a-z]+)", printed.getvalue(), re.MULTILINE))
    assert commands == {name.split()[0] for name in reference.COMMANDS}
    modules = [importlib.import_module(f"{package.__name__}.{one.name}") for one in pkgutil.iter_modules(package.__path__)]
    offered_by = {value for module in modules for name, value in vars(module).items() if name.endswith("Command")}
    forgotten = {one for one in offered_by if isinstance(one, type)} - set(reference.COMMANDS.values())
    assert not forgotten, f"not in website/cli_reference.py: {forgotten}"
    for name in reference.COMMANDS:
        section = re.split(r"^## ", reference.reference().split(f"\n## thinwire {name}\n")[1], flags=re.MULTILINE)[0]
        documented = set(re.findall(r"^\| `(--[a-z0-9-]+)`", section, re.MULTILINE))
        offered = options_of(name.split())
        assert offered - documented == {"--help"}, f"{name}: not documented: {offered - documented}"
        assert documented <= offered, f"{name}: no options: {documented - offered}"


def options_of(command: list[str]) -> set[str]:
    """The options that its help offers."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert run([*command, "--help"]) == 0
    return set(re.findall(r"^[│| ]*(?:-h, )?(--[a-z][a-z0-9-]*)", printed.getvalue(), re.MULTILINE))
