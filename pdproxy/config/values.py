"""The module defines the kinds of values that options have, and how each is read from text."""

from __future__ import annotations

import os
import re
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
    "round_robin",
    "least_slots",
    "least_queued_tokens",
    "power_of_two",
    "session_affinity",
    "prefix_affinity",
    "cache_aware",
]
WhenNobody = Literal["local", "refuse"]
DecodePolicy = Literal[
    "round_robin",
    "least_resident",
    "least_slots",
    "power_of_two",
    "session_affinity",
    "prefix_affinity",
    "cache_aware",
]
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
MAX_PORT = 65535
_ZMQ_ADDRESS = re.compile(r"tcp://(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253}):(?P<port>[0-9]{1,5})")


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


def read_key(value: object) -> object:
    """Returns a key without the white space around it, such as the line break at the end of a file. Raises
    `ValueError`, which does not show the key, where nothing is left, or where such characters are within it.
    """
    if not isinstance(value, str):
        return value
    key = value.strip()
    if not key:
        raise ValueError("the key is empty; give one, or leave the option out")
    if " " in key or not key.isprintable():
        raise ValueError("a blank or a control character is within the key; give a key without them")
    return key


def read_ascii_key(value: object) -> object:
    """Returns a key as `read_key` does. Raises `ValueError` also for one that is not ASCII alone."""
    key = read_key(value)
    if isinstance(key, str) and not key.isascii():
        raise ValueError("the key has characters beyond ASCII; give a key without them")
    return key


def split_keys(value: object) -> object:
    """Turns ``"a, b"``, or lines with a key each, into a list of keys. Raises `ValueError`, which shows no key, where
    `read_key` does for one of them.
    """
    if isinstance(value, str):
        value = [part for part in re.split(r"[,\r\n]", value) if part.strip()]
    if not isinstance(value, list | tuple):
        return split_list(value)
    keys = []
    for number, key in enumerate(value, 1):
        try:
            keys.append(read_key(key))
        except ValueError as error:
            raise ValueError(
                f"key {number} of {len(value)}: {error}; commas or line breaks are between keys, and comments, names "
                "and limits go into api_keys_file"
            ) from None
    return keys


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


def check_zmq_address(text: str) -> str:
    """Returns `text`. Raises `ValueError` where it is not the address of a ZMQ socket on a host."""
    found = _ZMQ_ADDRESS.fullmatch(text)
    if found is None or not 0 < int(found["port"]) <= MAX_PORT:
        raise ValueError(f"{text[:80]!r} is not tcp://HOST:PORT")
    return text


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
MAX_RANKS = 1024
"""The most data-parallel ranks behind one address."""
Ranks = Annotated[int, Field(ge=1, le=MAX_RANKS)] | None
PortNumber = Annotated[int, Field(ge=1, le=MAX_PORT)]
ZmqAddress = Annotated[str, AfterValidator(check_zmq_address)]
Workers = Annotated[int, BeforeValidator(read_workers), Field(ge=1, le=MAX_WORKERS)]
CommaList = Annotated[tuple[str, ...], NoDecode, BeforeValidator(split_list)]
Key = Annotated[str, BeforeValidator(read_key)]
AsciiKey = Annotated[str, BeforeValidator(read_ascii_key)]
Keys = Annotated[tuple[str, ...], NoDecode, BeforeValidator(split_keys)]
Discover = Literal["kubernetes"]
Preset = Literal["llm-d", "aibrix", "lws"]
DiscoverPresets = Annotated[tuple[Preset, ...], NoDecode, BeforeValidator(split_list)]
Ports = Annotated[tuple[PortNumber, ...], NoDecode, BeforeValidator(split_list)]
Port = Annotated[int, Field(ge=0, le=65535)]
ByteSize = Annotated[int, BeforeValidator(read_size), Field(gt=0)]
ModelFolder = Annotated[Path, AfterValidator(model_folder)]
