"""The head of a request, as bytes. What is the same in every call to a host is put together once. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from urllib.parse import quote

_KEPT_IN_TARGET = "/?&=%:@!$'()*+,;~-._[]"


class HeadWriter:
    """Writes heads for one host, which is shown `standing` headers (names in lower case) with every call.

    A call's own headers, names in lower case too, come before the standing ones of the same name.
    """

    def __init__(self, host: str, standing: Mapping[str, str]) -> None:
        self._standing = {"host": host, "accept": "*/*", "accept-encoding": "identity", **standing}
        self._lines = "".join([f"{name}: {value}\r\n" for name, value in self._standing.items()])
        _check(self._lines, len(self._standing), self._lines)

    def get(self, target: str) -> bytes:
        return f"GET {_quoted(target)} HTTP/1.1\r\n{self._lines}\r\n".encode("latin-1")

    def post(self, target: str, headers: Mapping[str, str], num_body_bytes: int) -> bytes:
        """Raises `ValueError` for a header that is none: with a line end in it, it would be two."""
        own = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        _check(own, len(headers), headers)
        if "content-type" not in headers:
            own += "content-type: application/json\r\n"
        standing = self._lines if self._standing.keys().isdisjoint(headers) else self._standing_without(headers)
        return (f"POST {_quoted(target)} HTTP/1.1\r\n{standing}{own}content-length: {num_body_bytes}\r\n\r\n").encode(
            "latin-1"
        )

    def _standing_without(self, headers: Mapping[str, str]) -> str:
        return "".join([f"{name}: {value}\r\n" for name, value in self._standing.items() if name not in headers])


def _check(lines: str, num_lines: int, headers: object) -> None:
    if not (lines.count("\r") == lines.count("\n") == num_lines) or "\0" in lines:
        raise ValueError(f"not to be sent as headers: {headers!r}")


@lru_cache(maxsize=256)
def _quoted(target: str) -> str:
    return quote(target, safe=_KEPT_IN_TARGET) or "/"
