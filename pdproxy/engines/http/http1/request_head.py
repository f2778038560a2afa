"""The module writes the head of a request as bytes. It computes once what is the same in every call to a host. It does
no I/O.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Final
from urllib.parse import quote

_KEPT_IN_TARGET: Final = "/?&=%:@!$'()*+,;~-._[]"
_BREAKS: Final = frozenset("\r\n\0")
"""The characters that would make two headers of one, or end one where it does not end."""


class HeadWriter:
    """A `HeadWriter` writes heads for one host, which gets the `standing` headers (names in lower case) with every
    call.

    A call's own headers, with names in lower case too, replace standing ones of the same name.
    """

    def __init__(self, host: str, standing: Mapping[str, str]) -> None:
        """Makes the writer. Raises `ValueError` for a header that cannot be sent."""
        self._standing = {"host": host, "accept": "*/*", "accept-encoding": "identity", **standing}
        self._standing_of_post = self._standing | {"content-type": "application/json"}
        self._names = frozenset(self._standing_of_post)
        self._lines = _lines(self._standing)
        self._post_start = lru_cache(maxsize=64)(self._start_of_post)

    def get(self, target: str, headers: Mapping[str, str] | None = None) -> bytes:
        """Returns the head of a GET. Raises `ValueError` as `post` does."""
        lines = _lines({**self._standing, **headers}) if headers else self._lines
        return b"GET %b HTTP/1.1\r\n%b\r\n" % (_quoted(target), lines)

    def post(self, target: str, headers: Mapping[str, str], num_body_bytes: int) -> bytes:
        """Returns the head of a POST. Raises `ValueError` for a header with a line end in it, which would be two
        headers.
        """
        start = self._post_start(target) if self._names.isdisjoint(headers) else self._start_of_post(target, headers)
        return b"%b%bcontent-length: %d\r\n\r\n" % (start, _lines(headers), num_body_bytes)

    def _start_of_post(self, target: str, without: Collection[str] = ()) -> bytes:
        """Returns everything before a call's own headers. It lacks the standing headers that are named in `without`."""
        standing = {name: value for name, value in self._standing_of_post.items() if name not in without}
        return b"POST %b HTTP/1.1\r\n%b" % (_quoted(target), _lines(standing))


def _lines(headers: Mapping[str, str]) -> bytes:
    each = [f"{name}: {value}\r\n" for name, value in headers.items()]
    lines = "".join(each)
    if lines.count("\n") != len(each) or lines.count("\r") != len(each) or "\0" in lines:
        bad = [line for line in each if not _BREAKS.isdisjoint(line[:-2])]
        raise ValueError(f"not to be sent as a header: {bad[0][:-2]!r}")
    return lines.encode("latin-1")


@lru_cache(maxsize=256)
def _quoted(target: str) -> bytes:
    return quote(target, safe=_KEPT_IN_TARGET).encode("ascii") or b"/"
