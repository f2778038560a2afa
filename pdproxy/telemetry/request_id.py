"""A request's id is taken from the client where it is harmless, and made here otherwise. Every log line knows it."""

from __future__ import annotations

import re
from contextvars import ContextVar
from typing import Final

from pdproxy.ids import fresh_id

HEADER: Final = "x-request-id"
MAX_CHARS: Final = 128
current: ContextVar[str] = ContextVar("request_id", default="")
"""The id of the request that the running task serves; empty where it serves none. Tasks started for a request inherit
it."""

_FIT: Final = re.compile(rf"[A-Za-z0-9._~:/+=@#-]{{1,{MAX_CHARS}}}")


def accept(given: str | None) -> str:
    """Returns `given`, where it is short enough and has only letters, digits and ``._~:/+=@#-``; else a fresh id."""
    return given if given is not None and _FIT.fullmatch(given) else f"req-{fresh_id()}"
