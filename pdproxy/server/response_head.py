"""ResponseHeadWriter makes the head of an answer, as bytes."""

from __future__ import annotations

from typing import Final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE
from uvicorn.server import ServerState

from pdproxy.orchestrator.context import Headers

CHUNKED: Final = b"transfer-encoding: chunked\r\n"
CLOSE: Final = b"connection: close\r\n"


class ResponseHeadWriter:
    """ResponseHeadWriter writes heads. It adds what the server puts into all of them (``date``), which changes once a
    second.

    Mutable state: the server's list of those headers, and the same as bytes.
    """

    __slots__ = ("_defaults", "_encoded", "_state")

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._defaults: Headers = []
        self._encoded = b""

    def write(self, status: int, headers: Headers, framing: bytes) -> bytes:
        """Returns the head as bytes. `framing` is whole lines. Raises `ValueError` for a line break in a header, which
        would make two headers of one."""
        defaults = self._state.default_headers
        if defaults is not self._defaults:
            self._defaults, self._encoded = defaults, _lines(defaults)
        return b"%b%b%b%b\r\n" % (STATUS_LINE[status], self._encoded, _lines(headers), framing)


def _lines(headers: Headers) -> bytes:
    pieces: list[bytes] = []
    for name, value in headers:  # joined all at once: to format each line by itself takes three times as long
        pieces.append(name)
        pieces.append(b": ")
        pieces.append(value)
        pieces.append(b"\r\n")
    lines = b"".join(pieces)
    if len(lines) - len(lines.translate(None, b"\r\n")) != 2 * len(headers):
        raise ValueError(f"there is a line break within the headers {headers}")
    return lines


def declared_bytes(headers: Headers) -> int | None:
    """Returns the length of the body in bytes, where the headers tell; else None."""
    for name, value in headers:
        if name == b"content-length":
            return int(value)
    return None
