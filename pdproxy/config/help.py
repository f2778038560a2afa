"""The module makes the help of ``pdproxy serve`` from the settings' fields."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_settings import CLI_SUPPRESS

from pdproxy.config.settings import Settings

SECTIONS = {
    "config": "The file, and where the proxy listens",
    "instances": "The fleet",
    "first_token": "What is special about some engines",
    "prefill_policy": "Who gets a request",
    "proxy_host": "KV signals",
    "model": "The model and the PD buffer",
    "admission": "Admission and the queue",
    "retries": "Retries and continued streams",
    "assemble": "Whole answers",
    "min_priority": "Priorities",
    "request_timeout_s": "Time limits",
    "probe_interval_s": "Health",
    "watch_config": "Changes while the proxy runs",
    "canary": "The canary",
    "max_body_bytes": "Sizes of requests and answers, and memory",
    "api_keys": "Keys, HTTPS and browsers",
    "log_level": "Logs and spans",
}
"""The headings, each by the option that is the first below it. Options stand in the order in which they are declared.
"""
METAVARS = (
    ("N", ("per_s",)),
    ("SECONDS", ("_s",)),
    ("PORT", ("port",)),
    ("HOST", ("host",)),
    ("URL", ("prefill", "decode", "endpoint")),
    ("ORIGIN", ("origins",)),
    ("KEY", ("key", "keys")),
    ("FILE", ("file", "config")),
    ("FOLDER", ("model",)),
    ("SIZE", ("buffer_size", "bytes", "limit", "memory_budget")),
    ("SHARE", ("share",)),
    ("TEXT", ("dtype", "header", "password")),
    ("N", ("",)),
)
"""The ways in which a person writes a value, each for options whose names have one of these ends."""
SIZE_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def rows() -> Iterator[tuple[str, tuple[str, str]]]:
    """Yields the heading of each option, and its two columns: how it is written, and what it means."""
    heading = ""
    for name, field in Settings.model_fields.items():
        heading = SECTIONS.get(name, heading)
        if CLI_SUPPRESS not in field.metadata:
            flag = name.replace("_", "-")
            value = f"/ --no-{flag}" if field.annotation is bool else metavar(name, field)
            default = default_of(name, field)
            yield heading, (f"--{flag} {value}", f"{field.description}{default and f'  [default: {default}]'}")


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
    if value in (None, (), ""):
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
