"""A small part of Markdown as HTML: headings, paragraphs, lists, tables, code, strong words and links. All else is text."""

import re
from collections.abc import Iterator, Sequence
from html import escape

_TABLE_RULE = re.compile(r"\|(\s*:?-+:?\s*\|)+")
_SPAN = re.compile(
    r"\\(?P<plain>[\\`*_\[\]|])|`(?P<code>[^`]+)`|\*\*(?P<strong>.+?)\*\*"
    r"|(?<![\w*])\*(?P<stressed>[^\s*](?:[^*]*[^\s*])?)\*(?!\w)"
    r"|\[(?P<text>[^\]]+)\]\((?P<target>[^)\s]+)\)"
)
_CELL_END = re.compile(r"(?<!\\)\|")


def markdown(text: str, level: int = 2) -> str:
    """HTML for a text; ``level`` is that of its first headings. Links lead to places beside or inside the page alone."""
    return "\n".join(_block(block, level) for block in _blocks(text))


def _blocks(text: str) -> Iterator[list[str]]:
    """Lines that belong together: up to an empty line, or a whole fenced piece."""
    lines: list[str] = []
    is_fenced = False
    for line in text.splitlines():
        if line.startswith("```"):
            if lines and not is_fenced:
                yield lines
                lines = []
            is_fenced = not is_fenced
            lines.append(line)
            if not is_fenced:
                yield lines
                lines = []
        elif line.strip() or is_fenced:
            lines.append(line)
        elif lines:
            yield lines
            lines = []
    if lines:
        yield lines


def _block(lines: Sequence[str], level: int) -> str:
    if lines[0].startswith("```"):
        inner = lines[1:-1] if lines[-1].startswith("```") else lines[1:]
        return f"<pre><code>{escape(chr(10).join(inner))}</code></pre>"
    if heading := re.match(r"(#+) (.*)", lines[0]):
        depth = min(6, level + len(heading[1]) - 1)
        rest = "\n" + _block(lines[1:], level) if len(lines) > 1 else ""
        return f"<h{depth}>{inline(heading[2])}</h{depth}>{rest}"
    if len(lines) > 1 and _TABLE_RULE.fullmatch(lines[1].strip()):
        return _table(lines)
    if all(re.match(r"[-*] |  ", line) for line in lines):
        items = re.split(r"^[-*] ", "\n".join(lines), flags=re.MULTILINE)[1:]
        return f"<ul>{''.join(f'<li>{inline(item.strip())}</li>' for item in items)}</ul>"
    return f"<p>{inline(' '.join(lines))}</p>"


def inline(text: str) -> str:
    """One piece of running text."""
    parts, end = [], 0
    for found in _SPAN.finditer(text):
        parts.append(escape(text[end : found.start()]))
        parts.append(_span(found))
        end = found.end()
    return "".join([*parts, escape(text[end:])])


def _span(found: re.Match[str]) -> str:
    if found["plain"]:
        return escape(found["plain"])
    if found["code"]:
        return f"<code>{escape(found['code'])}</code>"
    if found["strong"]:
        return f"<strong>{inline(found['strong'])}</strong>"
    if found["stressed"]:
        return f"<em>{inline(found['stressed'])}</em>"
    # A scheme or a host would lead out of the page's own surroundings, or run something.
    is_beside = re.fullmatch(r"(?!//)[\w.#%/~+=&?-]+", found["target"])
    words = inline(found["text"])
    return f'<a href="{escape(found["target"], quote=True)}">{words}</a>' if is_beside else words


def _cells(line: str) -> list[str]:
    inner = line.strip().removeprefix("|").removesuffix("|")
    return [cell.strip() for cell in _CELL_END.split(inner)]


def _table(lines: Sequence[str]) -> str:
    is_right = [cell.endswith(":") for cell in _cells(lines[1])]
    return table(_cells(lines[0]), [_cells(line) for line in lines[2:]], is_right)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], is_right: Sequence[bool]) -> str:
    """A table in a box of its own, which scrolls if it is wide. Cells are running text."""
    sides = [' class="right"' if right else "" for right in is_right]
    top = "".join(f'<th scope="col"{side}>{inline(cell)}</th>' for cell, side in zip(head, sides, strict=False))
    body = "".join(
        f"<tr>{''.join(f'<td{side}>{inline(cell)}</td>' for cell, side in zip(row, sides, strict=False))}</tr>"
        for row in rows
    )
    return f'<div class="wide" tabindex="0"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
