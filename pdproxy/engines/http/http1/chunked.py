"""The module reads the chunked transfer coding and strips its framing. It does no I/O."""

from __future__ import annotations

import re
from typing import Final

from pdproxy.engines.http.base import EngineBroken
from pdproxy.engines.http.http1.framing import Framing

MAX_LINE_BYTES: Final = 16 * 1024
"""The most bytes of a chunk's size line, and of all trailers together."""

_CRLF: Final = b"\r\n"
_SIZE_LINE: Final = re.compile(rb"([0-9a-fA-F]{1,16})(?:;[^\r\n\0]*)?\r\n")
_BEGUN_SIZE_LINE: Final = re.compile(rb"[0-9a-fA-F]{1,16}(?:;[^\r\n\0]*)?\r?")
_TRAILER_LINE: Final = re.compile(rb"(?:[^\s:]+:[^\r\n\0]*)?\r\n")
_BEGUN_TRAILER_LINE: Final = re.compile(rb"(?:[^\s:]+(?::[^\r\n\0]*)?)?\r?")
_USUAL_SIZES: Final = {b"%x\r\n" % size: size for size in range(1, 2049)}
"""The chunk sizes by their size lines, for usual sizes. An event is hardly ever larger. A line that is found here is
well-formed.
"""
_MAX_USUAL_LINE: Final = max(map(len, _USUAL_SIZES))


class Chunked(Framing):
    """A `Chunked` frames a body that comes in chunks.

    Mutable state: `_left`, the bytes that are to come of the chunk under way, its line's end included; `_begun`, a line
    whose end has not come yet; whether the last chunk was there; the trailers' size.
    """

    __slots__ = ("_begun", "_is_last", "_left", "_num_trailer_bytes", "has_surplus", "is_complete")

    def __init__(self) -> None:
        self._left = 0
        self._begun = b""
        self._is_last = False
        self._num_trailer_bytes = 0
        self.is_complete = False
        self.has_surplus = False

    def strip(self, data: bytes) -> bytes:
        """Returns the bytes of `data` that are body. Nearly all data is made of whole chunks of a usual size. Raises
        `EngineBroken`.
        """
        bodies: list[bytes] = []
        at = 0
        if self._begun:
            data, self._begun = self._begun + data, b""
        if self._left:
            at = self._read_rest_of_chunk(data, 0, bodies)
        num_bytes = len(data)
        while at < num_bytes:
            body_at = data.find(_CRLF, at, at + _MAX_USUAL_LINE) + 2
            body_end = body_at + (_USUAL_SIZES.get(data[at:body_at], num_bytes) if body_at > at else num_bytes)
            if data[body_end : body_end + 2] == _CRLF and not self._is_last:
                bodies.append(data[body_at:body_end])
                at = body_end + 2
            else:
                at = self._read_unusual(data, at, bodies)
        return b"".join(bodies)

    def closed(self) -> None:
        if not self.is_complete:
            raise EngineBroken("it closed the connection before the last chunk of its answer")

    # ── reading ──

    def _read_unusual(self, data: bytes, at: int, bodies: list[bytes]) -> int:
        """Reads one chunk that is large, or not whole, or has an extension; or the last one, and trailers up to the
        data's end.

        Returns where it ends.
        """
        if not self._is_last:
            at = self._read_size_line(data, at)
        if self._left:
            return self._read_rest_of_chunk(data, at, bodies)
        if self._is_last:
            self._read_trailers(data, at)
        return len(data)

    def _read_rest_of_chunk(self, data: bytes, at: int, bodies: list[bytes]) -> int:
        """Reads the rest of the chunk under way. Returns where it ends in `data`, or the end of `data` where the chunk
        goes on.
        """
        body_end, num_bytes = at + self._left - len(_CRLF), len(data)
        if body_end > at:
            bodies.append(data[at:body_end])
        end = min(body_end + len(_CRLF), num_bytes)
        found = data[max(body_end, at) : end]
        if found and found != _CRLF[max(at - body_end, 0) :][: len(found)]:
            raise EngineBroken("a chunk of its answer does not end where it should")
        self._left -= end - at
        return end

    def _read_size_line(self, data: bytes, at: int) -> int:
        """Reads a size line and sets `_left`. Returns where the chunk's body starts.

        Where the line is not whole, keeps it and returns the end of `data`.
        """
        line = _SIZE_LINE.match(data, at)
        if line is None:
            self._keep_begun(data[at:], _BEGUN_SIZE_LINE)
            return len(data)
        size = int(line[1], 16)
        self._left = size + len(_CRLF) if size else 0
        self._is_last = size == 0
        return line.end()

    def _read_trailers(self, data: bytes, at: int) -> None:
        while at < len(data) and not self.is_complete:
            line = _TRAILER_LINE.match(data, at)
            if line is None:
                self._keep_begun(data[at:], _BEGUN_TRAILER_LINE)
                return
            self.is_complete = line[0] == _CRLF
            self._num_trailer_bytes += len(line[0])
            if self._num_trailer_bytes > MAX_LINE_BYTES:
                raise EngineBroken("its answer's trailers are too long")
            at = line.end()
        self.has_surplus = at < len(data)

    def _keep_begun(self, line: bytes, pattern: re.Pattern[bytes]) -> None:
        if not pattern.fullmatch(line):
            raise EngineBroken(f"its answer is not framed as it says: {line[:40]!r}")
        if len(line) > MAX_LINE_BYTES:
            raise EngineBroken("a line of its answer's framing is too long")
        self._begun = line
