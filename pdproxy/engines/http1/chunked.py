"""The chunked transfer coding, read in two ways: stripped of its framing, or as frames to be passed on as they came.

Passing frames on costs no copy: data that is made of whole chunks is returned as it is. The last chunk and its trailers
are never among the frames, for whoever passes the others on may have something to add.
"""

from __future__ import annotations

import re

from pdproxy.engines.base import EngineBroken

MAX_LINE_BYTES = 16 * 1024
"""Of a chunk's size line; of all trailers together."""

_CRLF = b"\r\n"
_SIZE_LINE = re.compile(rb"([0-9a-fA-F]{1,16})(?:;[^\r\n\0]*)?\r\n")
_BEGUN_SIZE_LINE = re.compile(rb"[0-9a-fA-F]{1,16}(?:;[^\r\n\0]*)?\r?")
_TRAILER_LINE = re.compile(rb"(?:[^\s:]+:[^\r\n\0]*)?\r\n")
_BEGUN_TRAILER_LINE = re.compile(rb"(?:[^\s:]+(?::[^\r\n\0]*)?)?\r?")
_USUAL_SIZES = {b"%x" % size: size for size in range(1, 2049)}
"""An event is hardly ever larger. To be found here is to be well-formed."""
_MAX_USUAL_LINE = max(map(len, _USUAL_SIZES)) + len(_CRLF)

Span = tuple[int, int]


class Chunked:
    """Implements `Framing`.

    Mutable state: `_left`, what is to come of the chunk under way, its line's end included; `_begun`, a line without
    its end so far; whether the last chunk was there; `_num_hidden` bytes that are to come and belong to a chunk that
    was shown stripped; the trailers' size.
    """

    __slots__ = ("_begun", "_is_last", "_left", "_num_hidden", "_num_trailer_bytes", "has_surplus", "is_complete")

    def __init__(self) -> None:
        self._left = 0
        self._begun = b""
        self._is_last = False
        self._num_hidden = 0
        self._num_trailer_bytes = 0
        self.is_complete = False
        self.has_surplus = False

    def strip(self, data: bytes) -> bytes:
        """What of `data` is body."""
        data = self._with_begun_line(data)
        spans, _ = self._scan(data)
        if len(spans) == 1:
            return data[slice(*spans[0])]
        return b"".join([data[start:end] for start, end in spans])

    def frames(self, data: bytes) -> bytes:
        """`data` as it came, without the last chunk; a size line that has only begun is held back until it is whole."""
        if not (self._left or self._begun or self._is_last) and _read_whole_chunks(data, 0, None) == len(data):
            return data
        data = self._with_begun_line(data)
        num_hidden = min(self._num_hidden, len(data)) if self._num_hidden else 0
        self._num_hidden -= num_hidden
        _, end = self._scan(data)
        return data[num_hidden:end]

    def to_frames(self, unread: bytes) -> bytes:
        """From here on the rest is read as `frames`, behind those that are returned: they hold `unread`, which was
        stripped, and begin the rest of the chunk under way, if there is one."""
        num_due = len(unread) + max(self._left - len(_CRLF), 0)
        if self._left > len(_CRLF):
            return b"%x\r\n%b" % (num_due, unread)
        if not unread:
            self._num_hidden = self._left
            return b""
        return b"%x\r\n%b%b" % (num_due, unread, _CRLF[: len(_CRLF) - self._left])

    @property
    def is_between_chunks(self) -> bool:
        """All frames so far are whole: another one may follow them."""
        return self._left == 0

    def closed(self) -> None:
        if not self.is_complete:
            raise EngineBroken("it closed the connection before the last chunk of its answer")

    # ── reading ──

    def _with_begun_line(self, data: bytes) -> bytes:
        if self._begun:
            data, self._begun = self._begun + data, b""
        return data

    def _scan(self, data: bytes) -> tuple[list[Span], int]:
        """Where the body is, and where the frames end that can be passed on."""
        if self._is_last:
            return [], self._read_trailers(data, 0)
        spans: list[Span] = []
        at = self._read_rest_of_chunk(data, spans) if self._left else 0
        at = _read_whole_chunks(data, at, spans)
        while at < len(data):
            line_at, at = at, self._read_size_line(data, at)
            if self._is_last:
                self._read_trailers(data, at)
            if not self._left:
                return spans, line_at
            at = self._read_rest_of_chunk(data, spans, at)
        return spans, at

    def _read_rest_of_chunk(self, data: bytes, spans: list[Span], at: int = 0) -> int:
        """Where it ends in `data`, if it does."""
        body_end, num_bytes = at + self._left - len(_CRLF), len(data)
        if body_end > at:
            spans.append((at, min(body_end, num_bytes)))
        end = min(body_end + len(_CRLF), num_bytes)
        found = data[max(body_end, at) : end]
        if found and found != _CRLF[max(at - body_end, 0) :][: len(found)]:
            raise EngineBroken("a chunk of its answer does not end where it should")
        self._left -= end - at
        return end

    def _read_size_line(self, data: bytes, at: int) -> int:
        """Where the chunk's body starts, which is `_left` then; a line that is not whole is kept, up to the end."""
        line = _SIZE_LINE.match(data, at)
        if line is None:
            self._keep_begun(data[at:], _BEGUN_SIZE_LINE)
            return len(data)
        size = int(line[1], 16)
        self._left = size + len(_CRLF) if size else 0
        self._is_last = size == 0
        return line.end()

    def _read_trailers(self, data: bytes, at: int) -> int:
        """0: nothing of them is passed on."""
        while at < len(data) and not self.is_complete:
            line = _TRAILER_LINE.match(data, at)
            if line is None:
                self._keep_begun(data[at:], _BEGUN_TRAILER_LINE)
                return 0
            self.is_complete = line[0] == _CRLF
            self._num_trailer_bytes += len(line[0])
            if self._num_trailer_bytes > MAX_LINE_BYTES:
                raise EngineBroken("its answer's trailers are too long")
            at = line.end()
        self.has_surplus = at < len(data)
        return 0

    def _keep_begun(self, line: bytes, pattern: re.Pattern[bytes]) -> None:
        if not pattern.fullmatch(line):
            raise EngineBroken(f"its answer is not framed as it says: {line[:40]!r}")
        if len(line) > MAX_LINE_BYTES:
            raise EngineBroken("a line of its answer's framing is too long")
        self._begun = line


def _read_whole_chunks(data: bytes, at: int, spans: list[Span] | None) -> int:
    """Index behind as many as follow there of the usual kind. Nearly all data is made of nothing else."""
    while (line_end := data.find(b"\r\n", at, at + _MAX_USUAL_LINE)) > 0:
        size = _USUAL_SIZES.get(data[at:line_end])
        if size is None:
            break
        end = line_end + size + 4
        if data[end - 2 : end] != b"\r\n":
            break
        if spans is not None:
            spans.append((line_end + 2, end - 2))
        at = end
    return at
