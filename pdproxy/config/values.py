"""The module defines the kinds of values that options have, and how each is read from text."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_settings import NoDecode

from pdproxy.config.model_folder import model_folder
from transfer.errors import GeometryError
from transfer.geometry import parse_size

Role = Literal["prefill", "decode"]
Engine = Literal["builtin", "vllm_nixl", "vllm_transfer", "lmcache", "sglang", "mooncake"]
FirstToken = Literal["auto", "prefiller", "decoder"]
EngineClientKind = Literal["auto", "relay", "httpx"]
RoutingPolicy = Literal[
    "round_robin", "least_slots", "least_queued_tokens", "power_of_two", "session_affinity", "prefix_affinity"
]
DecodePolicy = Literal["round_robin", "least_slots", "power_of_two", "session_affinity", "prefix_affinity"]
"""The policies by which decoders are chosen. `least_queued_tokens` is missing: a decoder reads no prompts, so that no
prompt tokens are queued there.
"""
Assemble = Literal["all", "completions", "none"]
Oversized = Literal["local", "refuse", "window"]
"""The ways to serve a prompt that is too large. `window` falls back to `local` at a decoder that cannot do it."""
Seconds = Annotated[float, Field(gt=0)]


MAX_NAME_CHARS = 128
"""The most characters of an instance's name, which is a label of metrics and a header of answers."""
MAX_MODEL_NAME_CHARS = 1024


def check_printable(text: str) -> str:
    """Returns `text`. Raises `ValueError` where it has characters that cannot be printed, such as line breaks."""
    if not text.isprintable():
        raise ValueError("has characters that cannot be printed; leave them out")
    return text


def split_list(value: object) -> object:
    """Turns ``"a, b"`` into a list of two, and a number into a list of one, from a flag, the environment or
    the file.
    """
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return [value] if isinstance(value, int) else value


def read_size(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return parse_size(value)
    except GeometryError as error:
        raise ValueError(str(error)) from None


def split_words(value: object) -> object:
    """Turns ``"--threads 2"`` into two words, as a shell would split them."""
    return shlex.split(value) if isinstance(value, str) else value


def split_texts(value: object) -> object:
    """Turns the names of GPUs into a list of texts. A name may be given as a number."""
    parts = split_list(value)
    return [str(part) for part in parts] if isinstance(parts, list) else parts


def is_wanted(value: object) -> object:
    """Turns ``true`` into an empty table, in which every key has its default, and ``false`` into None."""
    if isinstance(value, bool):
        return {} if value else None
    return value


Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS), AfterValidator(check_printable)]
MAX_WORKERS = 256


def read_workers(given: Any) -> Any:
    """Returns a number of processes; ``auto`` is one for each core that this process may use, but one."""
    return max(1, len(os.sched_getaffinity(0)) - 1) if given == "auto" else given


ModelName = Annotated[str, Field(min_length=1, max_length=MAX_MODEL_NAME_CHARS), AfterValidator(check_printable)]
PortNumber = Annotated[int, Field(ge=1, le=65535)]
Workers = Annotated[int, BeforeValidator(read_workers), Field(ge=1, le=MAX_WORKERS)]
CommaList = Annotated[tuple[str, ...], NoDecode, BeforeValidator(split_list)]
Discover = Literal["kubernetes"]
Preset = Literal["llm-d", "aibrix", "lws"]
DiscoverPresets = Annotated[tuple[Preset, ...], NoDecode, BeforeValidator(split_list)]
Ports = Annotated[tuple[PortNumber, ...], NoDecode, BeforeValidator(split_list)]
Port = Annotated[int, Field(ge=0, le=65535)]
ByteSize = Annotated[int, BeforeValidator(read_size), Field(gt=0)]
ModelFolder = Annotated[Path, AfterValidator(model_folder)]
