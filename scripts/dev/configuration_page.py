"""Writes docs/configuration.md from the options that the proxy and the built-in engine declare.

usage: python -m scripts.dev.configuration_page

`tests/docs/test_configuration.py` fails when the file is not what this module makes of the options.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import typer
from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from pydantic_settings import CLI_SUPPRESS

from pdproxy.config.help import SECTIONS
from pdproxy.config.instances import InstanceSettings, LaunchSettings, ModelSettings
from pdproxy.config.settings import Settings
from pdproxy.config.values import read_size
from transfer.command_line.commands import Command
from transfer.command_line.settings_help import default_of, with_unit
from transfer.engine.config import EngineSettings
from transfer.engine.help import SECTIONS as ENGINE_SECTIONS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"
COMMAND = "python -m scripts.dev.configuration_page"
app = typer.Typer(add_completion=False, rich_markup_mode=None)

SECRET = "the key itself, where there is no file: 64 hexadecimal digits"
UNDESCRIBED = {"attempt_key": SECRET, "fleet_key": SECRET}
"""Meanings of options that the help does not show."""
NOTHING = "–"

INTRODUCTION = f"""# Configuration

Every option of `pdproxy serve` and of the built-in engine. This page is made from the options themselves by
`{COMMAND}`, and a test fails when the two differ.
[serve.md](serve.md) explains the options that matter most.

How to write a value:

| type | how a person writes it |
|---|---|
| on or off | as a flag, `--canary` or `--no-canary`; elsewhere `true` or `false` |
| size | a number of bytes, or `512MiB`, `2GiB` |
| seconds | a number, `0.5` as well |
| list | values with commas between them; in the file also a TOML list |
| path | of a file or a folder |
| names in a row | one of them |
"""
PROXY_INTRODUCTION = """## `pdproxy serve`

Each option is a flag, an environment variable, and a key of the TOML file that `--config` names. A key of the file is
the option's name as it stands in the first column. A flag beats the environment, the environment beats the file, and
the file beats the default.
"""
ENGINE_INTRODUCTION = """## `python -m transfer.engine`

Each option of the built-in engine is a flag and an environment variable. A flag beats the environment.
"""
TABLES: tuple[tuple[type[BaseModel], str], ...] = (
    (
        InstanceSettings,
        "### `[[instances]]`: one instance of the fleet\n\nThese tables stand in the file only. "
        "[engines.md](engines.md#fields-of-an-instance) says which fields are for which kind of engine.",
    ),
    (
        LaunchSettings,
        "### `launch`: how `pdproxy up` starts an instance\n\n"
        "A table inside one of `[[instances]]`, or `launch = true`. [launch.md](launch.md) explains it.",
    ),
    (ModelSettings, "### `[[models]]`: the folder of a model\n\nThese tables stand in the file only."),
)


def page() -> str:
    """Returns the whole page as Markdown."""
    parts = [INTRODUCTION, PROXY_INTRODUCTION, *_sections(Settings, SECTIONS)]
    for model, heading in TABLES:
        parts.append(f"{heading}\n\n{_file_table(model)}")
    parts += [ENGINE_INTRODUCTION, *_sections(EngineSettings, ENGINE_SECTIONS)]
    return "\n".join(parts)


@app.command(cls=Command)
def main() -> None:
    """Write docs/configuration.md from the options that the proxy and the built-in engine declare."""
    PAGE.write_text(page())
    typer.echo(f"{PAGE} is written")


# ── tables ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _sections(model: type[BaseModel], headings: Mapping[str, str]) -> Iterator[str]:
    """Yields a heading and a table for each section. Raises `ValueError` for headings that belong to no option."""
    if unknown := headings.keys() - model.model_fields.keys():
        raise ValueError(f"these sections begin with no option of {model.__name__}: {sorted(unknown)}")
    rows: list[str] = []
    for name, field in model.model_fields.items():
        if name in headings and rows:
            yield _table(rows)
            rows = []
        if name in headings:
            yield f"### {headings[name]}\n"
        rows.append(_option_row(model, name, field))
    yield _table(rows)


def _table(rows: list[str]) -> str:
    head = "| option | environment | flag | type | default | meaning |\n|---|---|---|---|---|---|\n"
    return head + "".join(rows)


def _option_row(model: type[BaseModel], name: str, field: FieldInfo) -> str:
    prefix = str(model.model_config.get("env_prefix", ""))
    is_in_file_only = "(file only)" in (field.description or "")
    environment = NOTHING if is_in_file_only else f"`{prefix}{name.upper()}`"
    cells = [
        f"`{name}`",
        environment,
        _flag(name, field),
        _type(model, name, field),
        _default(model, name, field),
        _meaning(field.description or UNDESCRIBED[name]),
    ]
    return f"| {' | '.join(cells)} |\n"


def _file_table(model: type[BaseModel]) -> str:
    meanings = _field_docs(model)
    rows = []
    for name, field in model.model_fields.items():
        default = "required" if field.is_required() else _default(model, name, field)
        rows.append(f"| `{name}` | {_type(model, name, field)} | {default} | {_meaning(meanings[name])} |\n")
    return "| key | type | default | meaning |\n|---|---|---|---|\n" + "".join(rows)


def _field_docs(model: type[BaseModel]) -> dict[str, str]:
    """Returns the text that stands below each field of a class."""
    (tree,) = ast.parse(inspect.getsource(model)).body
    assert isinstance(tree, ast.ClassDef)
    found: dict[str, str] = {}
    for node, following in zip(tree.body, tree.body[1:], strict=False):
        is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and is_text:
            found[node.target.id] = inspect.cleandoc(following.value.value)  # type: ignore[attr-defined]
    return found


# ── cells ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _flag(name: str, field: FieldInfo) -> str:
    """Returns the option's flags, or a dash where the command line does not take it."""
    if CLI_SUPPRESS in field.metadata:
        return NOTHING
    flag = name.replace("_", "-")
    return f"`--{flag}`, `--no-{flag}`" if field.annotation is bool else f"`--{flag}`"


def _type(model: type[BaseModel], name: str, field: FieldInfo) -> str:
    if _is_size(model, name, field):
        return "size"
    inner, metadata = _without_none(field.annotation), list(field.metadata)
    if get_origin(inner) is tuple:
        return _list_type(get_args(inner)[0])
    if get_origin(inner) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(inner))
    if hasattr(inner, "__metadata__"):
        metadata += inner.__metadata__
        inner = get_args(inner)[0]
    if name.endswith("_s") and not name.endswith("_per_s"):
        return "seconds" + _range(metadata)
    if inner in (int, float):
        return ("whole number" if inner is int else "number") + _range(metadata)
    known = {bool: "on or off", str: "text", Path: "path", LaunchSettings: "`true` or a table"}
    return known.get(inner) or "table"


def _list_type(item: Any) -> str:
    if isinstance(item, type) and issubclass(item, BaseModel):
        return "tables"
    return "list of texts" if item is str else "list of ports"


def _without_none(annotation: Any) -> Any:
    """Returns ``X`` of ``X | None``."""
    if get_origin(annotation) in (Union, UnionType):
        (annotation,) = (one for one in get_args(annotation) if one is not type(None))
    return annotation


def _is_size(model: type[BaseModel], name: str, field: FieldInfo) -> bool:
    """Tells whether a person may write a unit: by the field's own type, or by a validator of its class."""
    inner = _without_none(field.annotation)
    marks = [*field.metadata, *getattr(inner, "__metadata__", ())]
    if any(isinstance(mark, BeforeValidator) and mark.func is read_size for mark in marks):
        return True
    validator = model.__pydantic_decorators__.field_validators.get("_size")
    return validator is not None and name in validator.info.fields


def _range(metadata: list[Any]) -> str:
    bounds = {
        kind: value
        for mark in _flat(metadata)
        for kind in ("ge", "gt", "le")
        if (value := getattr(mark, kind, None)) is not None
    }
    low, high = bounds.get("ge"), bounds.get("le")
    if low is not None and high is not None:
        return f", {low} to {high}"
    if low is not None:
        return f", {low} or more"
    return f", above {bounds['gt']}" if "gt" in bounds else ""


def _flat(metadata: list[Any]) -> Iterator[Any]:
    """Yields the marks, those that are inside of another field's description included."""
    for mark in metadata:
        if isinstance(mark, FieldInfo):
            yield from mark.metadata
        else:
            yield mark


def _default(model: type[BaseModel], name: str, field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    if value in (None, (), {}, ""):
        return NOTHING
    if _is_size(model, name, field):
        return f"`{with_unit(value)}`"
    if isinstance(value, bool):
        return default_of(name, field)
    return f"`{value if isinstance(value, int) else default_of(name, field)}`"


def _meaning(text: str) -> str:
    """Returns the text as one table cell, written like the others, without the mark that only the help needs."""
    text = " ".join(text.replace("``", "`").split()).removesuffix(" (file only)").removesuffix(".")
    first = text.split()[0]
    if first[1:].islower() or len(first) == 1:  # names such as SGLang stay as they are
        text = text[0].lower() + text[1:]
    return text.replace("|", "\\|").replace("*", "\\*")


if __name__ == "__main__":
    app(prog_name=COMMAND)
