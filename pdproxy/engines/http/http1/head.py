"""The module finds the head of a reply in what has come so far, has httptools read it, and judges it. It does no I/O.

It refuses what two readers could understand in two ways, and guesses nothing: the body's end decides where the next
reply begins.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Final

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from pdproxy.engines.http.base import EngineBroken
from pdproxy.engines.http.http1.chunked import Chunked
from pdproxy.engines.http.http1.framing import Counted, Framing, UntilClose

MAX_HEAD_BYTES: Final = 64 * 1024
"""The most bytes of a reply's head, and of all heads that come before it."""
MAX_HEAD_LINES: Final = 1000

_HTTP_1: Final = b"HTTP/1."
_HTTP_1_0: Final = b"HTTP/1.0"
_BLANK_LINE: Final = b"\r\n\r\n"
_SWITCHING_PROTOCOLS: Final = 101
_FIRST_FINAL: Final = 200
_BODILESS: Final = frozenset((204, 304))


class Head:
    """A `Head` holds status and headers, how the body is framed, and whether the engine takes another request on the
    connection.

    Mutable state: none, once httptools has called `on_header` and `on_headers_complete`.
    """

    __slots__ = ("_fields", "_parser", "framing", "keeps_alive", "status")

    def __init__(self, raw: bytes) -> None:
        """Reads `raw`, which is one head with its blank line. Raises `EngineBroken`."""
        self.status = 0
        self.keeps_alive = False
        self._fields: dict[bytes, bytes] = {}
        self._parser: HttpResponseParser | None = HttpResponseParser(self)
        try:
            self._parser.feed_data(raw)
        except (HttpParserError, HttpParserUpgrade) as error:
            if self.status != _SWITCHING_PROTOCOLS:
                raise EngineBroken(f"its answer's head cannot be read: {error}") from None
        finally:
            self._parser = None
        if self.status == _SWITCHING_PROTOCOLS:
            raise EngineBroken("it wants to change the protocol, which nobody asked it to")
        self.framing = self._framing(is_old=raw.startswith(_HTTP_1_0))

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        earlier = self._fields.get(name)
        self._fields[name] = value if earlier is None else earlier + b", " + value

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self.status = self._parser.get_status_code()
        self.keeps_alive = self._parser.should_keep_alive()

    def header(self, name: str) -> str | None:
        value = self._fields.get(name.lower().encode("latin-1"))
        return None if value is None else value.decode("latin-1")

    def _framing(self, *, is_old: bool) -> Callable[[], Framing]:
        """Returns a function that makes the framing of one body. Raises `EngineBroken` for a way of framing that is not
        understood.

        (httptools has checked that a length is a number, and is told once and not beside a coding.)
        """
        if self.status in _BODILESS:
            return partial(Counted, 0)
        coding = self._fields.get(b"transfer-encoding")
        if coding is not None:
            if coding.lower() != b"chunked" or is_old:
                raise EngineBroken(f"its answer is in a transfer coding that is not understood: {coding!r}")
            return Chunked
        length = self._fields.get(b"content-length")
        return UntilClose if length is None else partial(Counted, int(length))


@lru_cache(maxsize=256)
def read_head(raw: bytes) -> Head:
    """Does the same as `Head`. Within a second an engine writes the same head again and again, since its date is told
    in seconds.
    """
    _check(raw)
    return Head(raw)


def find_head(data: bytes) -> tuple[Head | None, bytes]:
    """Finds the head of a final reply in `data`. Raises `EngineBroken`.

    Returns the head and the bytes after it; or None and the bytes that must be looked at again when more has come.
    """
    start = 0
    while (blank := data.find(_BLANK_LINE, start)) >= 0:
        end = blank + len(_BLANK_LINE)
        head = read_head(data[start:end])
        if head.status >= _FIRST_FINAL:
            return head, data[end:]
        start = end
    begun = data[start:]
    _check(begun)
    return None, begun


def _check(data: bytes) -> None:
    """Checks a head, or the beginning of one. Raises `EngineBroken` where it cannot be one.

    Where a line's end is bare, readers do not agree on where the head ends.
    """
    if not data.startswith(_HTTP_1[: len(data)]):
        raise EngineBroken(f"it did not answer in HTTP/1: {data[:40]!r}")
    if len(data) > MAX_HEAD_BYTES:
        raise EngineBroken(f"its answer's head is larger than {MAX_HEAD_BYTES} bytes")
    num_lines = data.count(b"\n")
    if num_lines > MAX_HEAD_LINES:  # to read them takes a microsecond each
        raise EngineBroken(f"its answer's head has more than {MAX_HEAD_LINES} lines")
    if num_lines != data.count(b"\r\n"):
        raise EngineBroken("its answer's head has lines that do not end as they should")
