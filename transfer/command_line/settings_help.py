"""The module makes the help of a command whose options are settings, and suggests options for mistyped ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_settings import CLI_SUPPRESS

from transfer.command_line.commands import did_you_mean

METAVARS = (
    ("N", ("per_s",)),
    ("MICROSECONDS", ("_us",)),
    ("SECONDS", ("_s",)),
    ("PORT", ("port",)),
    ("HOST", ("host",)),
    ("HOST,…", ("hosts",)),
    ("URL", ("prefill", "decode", "endpoint")),
    ("ORIGIN", ("origins",)),
    ("KEY", ("key", "keys")),
    ("FILE", ("file", "config")),
    ("FOLDER", ("model",)),
    ("SIZE", ("buffer_size", "cache_size", "bytes", "limit", "memory_budget")),
    ("SHARE", ("share",)),
    ("NAME", ("name",)),
    ("NAME,…", ("backends",)),
    ("DEVICE", ("device",)),
    ("TEXT", ("dtype", "header", "password")),
    ("N", ("",)),
)
"""The ways in which a person writes a value, each for options whose names have one of these ends."""
SIZE_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def rows(settings: type[BaseModel], sections: Mapping[str, str]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yields the heading of each option, and its two columns: how it is written, and what it means. `sections` has the
    headings, each by the option that is the first below it."""
    heading = ""
    for name, field in settings.model_fields.items():
        heading = sections.get(name, heading)
        if CLI_SUPPRESS not in field.metadata:
            flag = name.replace("_", "-")
            value = f"/ --no-{flag}" if field.annotation is bool else metavar(name, field)
            default = default_of(name, field)
            note = "  [required]" if field.is_required() else default and f"  [default: {default}]"
            yield heading, (f"--{flag} {value}", f"{field.description}{note}")


def metavar(name: str, field: FieldInfo) -> str:
    """Returns a value of the option as a person writes it."""
    kind = field.annotation
    if get_origin(kind) not in (None, Literal, tuple):  # it may be left out: X | None
        (kind,) = (one for one in get_args(kind) if one is not type(None))
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    value = next(value for value, ends in METAVARS if name.endswith(ends))
    return f"{value}[,{value}]" if get_origin(kind) is tuple else value


def default_of(name: str, field: FieldInfo) -> str:
    """Returns the option's default as a person writes it; empty where there is none, or where the help tells it."""
    value = field.default
    if isinstance(value, bool):
        return "on" if value else "off"
    if field.is_required() or value in (None, (), ""):
        return ""
    if metavar(name, field) == "SIZE":
        return with_unit(value)
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def with_unit(size: int) -> str:
    for unit, factor in SIZE_UNITS:
        if size % factor == 0:
            return f"{size // factor}{unit}"
    return str(size)


def suggestion(settings: type[BaseModel], message: str) -> str:
    """Returns in brackets what may have been meant by the unknown options in a parser's message; empty where nothing is
    like them."""
    _, unknown, words = message.partition("unrecognized arguments: ")
    fields = {name.replace("_", "-"): field for name, field in settings.model_fields.items()} if unknown else {}
    known = [f"--{flag}" for flag in fields] + [
        f"--no-{flag}" for flag, one in fields.items() if one.annotation is bool
    ]
    wrong = [word.partition("=")[0] for word in words.split() if word.startswith("--")]
    meant = did_you_mean(wrong, known)
    return f" ({meant})" if meant else ""
