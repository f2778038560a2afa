"""The module reads and writes server-sent events as far as a relay needs it: where an event ends, and what it
carries.
"""

from __future__ import annotations

from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"
DATA_DONE = b"data: [DONE]"
_USUAL_START = b"data: "
"""The start of nearly every event, which is one line and a blank line."""


def event(data: Any) -> bytes:
    """Returns one event whose data is `data` as JSON."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def has_done(events: bytes) -> bool:
    """Tells whether the event that ends a stream is among these whole events. (A text may quote it, but not with a
    line's end.)
    """
    # `find` is ten times as fast as `in` is with bytes.
    if events.find(DATA_DONE) < 0:
        return False
    return b"data: [DONE]\n" in events or b"data: [DONE]\r" in events


def data_of(raw_event: bytes) -> bytes | None:
    """Returns the event's data, with several ``data:`` lines joined as the standard says; None for an event without
    such a line.
    """
    is_usual = raw_event.startswith(_USUAL_START) and raw_event.find(b"\n") == len(raw_event) - 2
    if is_usual and raw_event.find(b"\r") < 0:
        return raw_event[len(_USUAL_START) : -2]
    lines = [line[5:].removeprefix(b" ") for line in raw_event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


class EventBuffer:
    """Cuts a byte stream at event borders, so that what was relayed never ends in the middle of an event.

    Mutable state: `_rest`, the bytes after the last border.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> bytes:
        """Returns the whole events that are there now, as they came (possibly none)."""
        if not self._rest and chunk.endswith(b"\n\n"):  # as nearly all that comes
            return chunk
        data = self._rest + chunk
        end = _border_after_last_event(data)
        self._rest = data[end:]
        return data[:end]

    @property
    def num_pending_bytes(self) -> int:
        """Returns the number of bytes of an event that has not ended."""
        return len(self._rest)


def split(data: bytes) -> list[bytes]:
    """Returns whole events as a list, each with its closing blank line."""
    if data.find(b"\r") < 0:  # as nearly all that comes
        return [event + b"\n\n" for event in data.split(b"\n\n")[:-1]]
    events: list[bytes] = []
    start = 0
    while (end := _border_after_first_event(data, start)) > start:
        events.append(data[start:end])
        start = end
    return events


def _border_after_first_event(data: bytes, start: int) -> int:
    """Returns the index after the first blank line at or after `start`; `start` where there is no blank line."""
    end = data.find(b"\n\n", start) + 2
    other = data.find(b"\r\n\r\n", start, end if end > 1 else len(data)) + 4
    if other > 3:
        return other
    return end if end > 1 else start


def _border_after_last_event(data: bytes) -> int:
    return max(_after(data, b"\n\n"), _after(data, b"\r\n\r\n"))


def _after(data: bytes, blank: bytes) -> int:
    found = data.rfind(blank)
    return 0 if found < 0 else found + len(blank)
