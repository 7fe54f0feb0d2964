"""Write docs/cli.md, the reference of the command line, from what ``--help`` is made of: the commands' dataclasses."""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from thinwire.commands import bench, lab, lab_compare, page, plan, scale, study, train
from thinwire.training import recipes

PAGE = Path(__file__).parent.parent / "docs" / "cli.md"
COMMANDS: dict[str, type] = {
    "train": train.TrainCommand,
    "plan": plan.PlanCommand,
    "plan scale": scale.ScaleCommand,
    "bench": bench.BenchCommand,
    "lab check": lab.CheckCommand,
    "lab run": lab.RunCommand,
    "lab compare": lab_compare.CompareCommand,
    "study list": study.ListCommand,
    "study run": study.RunCommand,
    "study report": study.ReportCommand,
    "study compare": study.CompareCommand,
    "page": page.PageCommand,
}
_HEAD = """# Command line

All options of all commands, as `--help` has them. This page is written by `make docs` from the commands themselves, and a
test compares the two. The defaults of `thinwire train` are those of its recipe `quickstart`; `thinwire train RECIPE --help`
has another's. An option that is on or off can be turned off with `--no-` before its name.
"""


def reference() -> str:
    """The whole page."""
    return _HEAD + "".join(_section(name, command) for name, command in COMMANDS.items())


def _section(name: str, command: type) -> str:
    values = {"settings": recipes.build("quickstart")} if name == "train" else {}
    return f"\n## thinwire {name}\n\n{_tables(command, values, _text(command))}"


def _tables(command: type, values: dict[str, Any], title: str) -> str:
    """A table of this class's own options, if it has any, then those of the sections in it."""
    hints, helps, sections, rows = get_type_hints(command, include_extras=True), _helps(command), "", []
    for option in fields(command):
        kind = _plain(hints[option.name])
        value = values.get(option.name, _default(option))
        if is_dataclass(kind):
            inner = {inner.name: getattr(value, inner.name) for inner in fields(kind)} if value is not MISSING else {}
            sections += _tables(kind, inner, f"\n**{_text(kind)}**")
        else:
            name = option.name.upper() if _is_positional(hints[option.name]) else "--" + option.name.replace("_", "-")
            rows.append(f"`{name}` | {' '.join(helps[option.name].split())}{_choices(kind)}{_shown_default(value)}")
    head = f"{title}\n\n| option | |\n| --- | --- |\n"
    return (head + "".join(f"| {row} |\n" for row in rows) if rows else "") + sections


def _text(command: type) -> str:
    return textwrap.dedent(inspect.cleandoc(command.__doc__ or ""))


def _helps(command: type) -> dict[str, str]:
    """The help texts: strings that follow the fields."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(command))).body
    assert isinstance(body, ast.ClassDef)
    return dict(_pairs(body))


def _pairs(body: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, following in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(following, ast.Expr):
            yield ast.unparse(field.target), ast.literal_eval(following.value)


def _default(option: Field[Any]) -> Any:
    return option.default_factory() if option.default_factory is not MISSING else option.default


def _plain(hint: Any) -> Any:
    """The type without its annotations and without None."""
    while get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    if get_origin(hint) in (Union, UnionType):
        (hint,) = (kind for kind in get_args(hint) if kind is not NoneType)
    return hint


def _is_positional(hint: Any) -> bool:
    return get_origin(hint) is Annotated and any("Positional" in str(mark) for mark in get_args(hint)[1:])


def _choices(kind: Any) -> str:
    if get_origin(kind) is tuple:
        return " Several may be given." + _choices(get_args(kind)[0])
    return (
        f" One of {', '.join(f'`{choice}`' for choice in get_args(kind) if choice)}." if get_origin(kind) is Literal else ""
    )


def _shown_default(value: Any) -> str:
    if value is MISSING:
        return " **Required.**"
    if value is None or value is False or value in ("", ()):
        return ""
    values = value if isinstance(value, tuple) else ("on",) if value is True else (value,)
    return f" *Default: {' '.join(f'`{part}`' for part in values)}.*"


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
