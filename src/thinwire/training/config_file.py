"""Configurations as files: flat TOML or YAML, every key a field of the configuration.

A key that does not exist is refused with the nearest one that does, a value of the wrong kind with what is allowed.
"""

import dataclasses
import difflib
import json
import tomllib
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from thinwire.core.errors import check_choice
from thinwire.training.config import TrainConfig, all_fields
from thinwire.training.errors import TrainingError

RECIPE_KEY = "recipe"


def read_file(path: Path) -> dict[str, Any]:
    """The keys and values of a TOML or YAML file, not yet checked."""
    if path.suffix not in (".toml", ".yaml", ".yml"):
        raise TrainingError(f"--config {path}: the name must end in .toml, .yaml or .yml")
    try:
        text = path.read_text(encoding="utf-8")
        values = tomllib.loads(text) if path.suffix == ".toml" else _parse_yaml(text)
    except OSError as error:
        raise TrainingError(f"--config {path}: {error.strerror or error}") from error
    except (ValueError, UnicodeDecodeError) as error:
        raise TrainingError(f"--config {path} is not valid {path.suffix[1:].upper()}: {error}") from error
    return values


def _parse_yaml(text: str) -> dict[str, Any]:
    import yaml

    try:
        values = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    if not isinstance(values, dict):
        raise ValueError(f"expected keys and values, got {type(values).__name__}")
    return values


def override(base: TrainConfig, values: dict[str, Any], where: str) -> TrainConfig:
    """``base`` with the fields named in ``values`` replaced."""
    places = {setting.name: section for section, setting in all_fields()}
    changes: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        if name == RECIPE_KEY:
            continue
        if name not in places:
            near = difflib.get_close_matches(str(name), [*places, RECIPE_KEY], n=1, cutoff=0.6)
            raise TrainingError(f"{where}: there is no setting {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        section = places[name]
        changes.setdefault(section, {})[name] = _checked(name, value, _kind(base, section, name), where)
    sections = {name: dataclasses.replace(getattr(base, name), **new) for name, new in changes.items()}
    return dataclasses.replace(base, **sections)


def _kind(base: TrainConfig, section: str, name: str) -> Any:
    return get_type_hints(type(getattr(base, section)))[name]


def _checked(name: str, value: object, kind: Any, where: str) -> object:
    if get_origin(kind) is Literal:
        return check_choice(f"{where}: {name}", value, get_args(kind))
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is float and isinstance(value, str):
        return _float_of_text(name, value, where)
    if type(value) is not kind:
        words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text in quotes"}
        raise TrainingError(f"{where}: {name} must be {words[kind]}, got {value!r}")
    return value


def _float_of_text(name: str, value: str, where: str) -> float:
    """YAML reads 4e-4 as text, for want of a dot."""
    try:
        return float(value)
    except ValueError:
        raise TrainingError(f"{where}: {name} must be a number, got {value!r}") from None


def as_toml(config: TrainConfig) -> str:
    """The whole configuration as a file that `read_file` reads back."""
    lines: list[str] = []
    heading = ""
    for section, setting in all_fields():
        if section != heading:
            lines += ["", f"# {section}"] if lines else [f"# {section}"]
            heading = section
        lines.append(f"{setting.name} = {_literal(getattr(getattr(config, section), setting.name))}")
    return "\n".join(lines) + "\n"


def _literal(value: object) -> str:
    # JSON's texts and truth values are TOML's too, and Python's floats are written so that they are read back exactly.
    return repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
