"""Whole pages: one file, with style and script inside and nothing from anywhere else."""

import base64
import hashlib
from collections.abc import Iterable, Sequence
from functools import cache
from html import escape
from importlib.resources import files

from thinwire.pages.markdown import inline
from thinwire.pages.strips import HATCHES
from thinwire.pages.styles import COLOURS, COLOURS_ON_DARK

_HATCHES = (
    "",
    '<path d="M-1 1L1 -1M0 8L8 0M7 9L9 7"/>',
    '<circle cx="2" cy="2" r="1"/><circle cx="6" cy="6" r="1"/>',
    '<path d="M0 0L8 8M0 8L8 0"/>',
    '<path d="M0 4H8"/>',
)
assert len(_HATCHES) == HATCHES


def document(title: str, body: Iterable[str], refresh_seconds: int = 0) -> str:
    """A page. It loads itself anew every so many seconds, if any, and stays where the reader was."""
    style, script = _style(), _file("script.js")
    # Only this very style and script may act, and nothing may be fetched.
    allowed = f"style-src {_hash(style)}; script-src {_hash(script)}; img-src data:"
    policy = f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"
    reload = f'<noscript><meta http-equiv="refresh" content="{refresh_seconds}"></noscript>' if refresh_seconds else ""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy, quote=True)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>{reload}\n<style>{style}</style></head>\n"
        f'<body data-refresh="{refresh_seconds}">{_patterns()}<main>\n'
        + "\n".join(body)
        + f"\n</main><script>{script}</script></body></html>\n"
    )


def figures(charts: Iterable[str]) -> str:
    """Figures side by side where there is room."""
    return f'<div class="figures">{"".join(charts)}</div>'


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Names and values, large."""
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in pairs)
    return f'<dl class="facts">{items}</dl>'


def settings(pairs: Iterable[tuple[str, str]]) -> str:
    """Names and values, small, in columns."""
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in pairs)
    return f'<dl class="settings">{items}</dl>'


def folded(summary: str, inner: str, is_open: bool = False) -> str:
    """Something that can be shown and hidden."""
    return f"<details{' open' if is_open else ''}><summary>{inline(summary)}</summary>{inner}</details>"


def section(identity: str, heading: str, inner: Sequence[str]) -> str:
    """A part of a page that links can lead to."""
    name = escape(identity, quote=True)
    return f'<section id="{name}"><h2>{inline(heading)}</h2>\n' + "\n".join(inner) + "</section>"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@cache
def _file(name: str) -> str:
    return (files("thinwire.pages") / name).read_text(encoding="utf-8")


@cache
def _style() -> str:
    """The style sheet, with the colours of series for light and dark pages."""
    light, dark = (
        "".join(f"--c{number}:{colour};" for number, colour in enumerate(colours)) for colours in (COLOURS, COLOURS_ON_DARK)
    )
    classes = "".join(f".c{number}{{color:var(--c{number})}}" for number in range(len(COLOURS)))
    on_dark = f"@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}"
    return f":root{{{light}}}{on_dark}{classes}\n{_file('style.css')}"


def _patterns() -> str:
    """What fills the parts of bars, beside their colours."""
    defined = "".join(
        f'<pattern id="hatch{number}" width="8" height="8" patternUnits="userSpaceOnUse">{lines}</pattern>'
        for number, lines in enumerate(_HATCHES)
    )
    return f'<svg class="patterns" aria-hidden="true"><defs>{defined}</defs></svg>'
