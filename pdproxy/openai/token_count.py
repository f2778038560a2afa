"""The module counts the tokens of one request's answer as the client gets it, and takes the times between them.

While a stream runs this looks at bytes only and parses nothing. What an engine says in a ``usage`` is exact and comes
first; it is read once, at the end. Else the ids that a stream tells are counted, or its events.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from pdproxy.openai.sse import split

_IDS: Final = b'"token_ids":['
_SPACED_IDS: Final = b'"token_ids": ['
"""The bytes with which the ids of an event's tokens begin, as one engine or another writes JSON. (In a text the quotes
would be escaped.)"""
_LEAST_BYTES: Final = 64
"""Less than any event with ids has before them. `find` takes as long as all the rest that is done with one event."""
_CHOICE: Final = b'"finish_reason"'
_CHOICES: Final = b'"choices"'
"""The bytes that every choice of an event has once, also while it is null; and those that every event has, for engines
that leave out what is null."""
_ROLE: Final = b'"role":'
_PROMPT: Final = b'"prompt_tokens"'
_OUTPUT: Final = b'"completion_tokens"'
_INPUT: Final = b'"input_tokens"'
_WRITTEN: Final = b'"output_tokens"'
_CACHE_READ: Final = b'"cache_read_input_tokens"'
_BEFORE_NUMBER: Final = frozenset(b": \t\r\n")
_ZERO: Final = ord("0")
_NINE: Final = ord("9")
MAX_DIGITS: Final = 12
"""The most digits of a number of tokens that are read."""

BY_USAGE: Final = "usage"
BY_IDS: Final = "ids"
BY_EVENTS: Final = "events"
"""The ways in which the tokens of an answer are counted: the engine tells them, each id is one, or each choice of an
event is one. The last is no exact number: an event may have several tokens, or none."""


class TokenCount:
    """A `TokenCount` belongs to one request, over all its attempts. Times are on `clock`, in seconds.

    Mutable state: how many tokens were shown; the bytes with which their ids begin, where they are told, and else those
    that stand for one each; when the first and the last of them came, and the longest time between two pieces of the
    answer; the latest bytes with a usage, until they are read; the numbers that were read last. The prompt's may come
    from the prefiller instead.
    """

    __slots__ = (
        "_clock",
        "_each",
        "_first_at",
        "_ids",
        "_last_at",
        "_num_prompt",
        "_num_told",
        "_unread",
        "longest_gap_s",
        "mark",
        "num_sequences",
        "num_shown",
    )

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.num_sequences = 1
        """The number of answers that the request asks for, which come side by side."""
        self.mark = b""
        """The bytes that stand once for each piece of an answer in another form than OpenAI's completions; else
        empty."""
        self._num_prompt: int | None = None
        self.clear()

    def clear(self) -> None:
        """Forgets the answer, of which the client has seen nothing, because it begins anew."""
        self.num_shown = 0
        self._ids = b""
        self._each = _CHOICE
        self._first_at = 0.0
        self._last_at = 0.0
        self.longest_gap_s = 0.0
        """Seconds of the longest time between two pieces of the answer that have tokens."""
        self._unread = b""
        self._num_told: int | None = None

    # ── what comes ──────────────────────────────────────────────────────────────────────────────────────────────────

    def add(self, events: bytes) -> None:
        """Counts whole events, which the client gets now."""
        if not self.num_shown:
            self._begin(events)
            return
        ids = self._ids
        num = _num_ids(events, ids) if ids else events.count(self._each)
        if not num:  # a usage, a comment or the end
            return
        self.num_shown += num
        now = self._clock()
        gap_s = now - self._last_at
        if gap_s > self.longest_gap_s:
            self.longest_gap_s = gap_s
        self._last_at = now

    def _begin(self, events: bytes) -> None:
        """Counts the first piece of the answer, which shows what can be counted. It may also have events that tell a
        role, and no token."""
        if self.mark:
            self._each = self.mark
            self.num_shown = events.count(self.mark)
            if self.num_shown:
                self._first_at = self._last_at = self._clock()
            return
        self._ids = _IDS if events.find(_IDS) >= 0 else _SPACED_IDS if events.find(_SPACED_IDS) >= 0 else b""
        if self._ids:
            self.num_shown = _num_ids(events, self._ids)
        else:
            self._each = each = _CHOICE if events.find(_CHOICE) >= 0 else _CHOICES
            self.num_shown = events.count(each)
            if self.num_shown > 1 and events.find(_ROLE) >= 0:
                self.num_shown = sum([one.count(each) for one in split(events) if one.find(_ROLE) < 0]) or 1
        self._first_at = self._last_at = self._clock()

    def tell(self, data: bytes) -> None:
        """Takes whole events, or a whole answer, with a usage that counts all of the answer so far."""
        self._unread = data

    def tell_prompt(self, num_tokens: int) -> None:
        """Takes the number of the prompt's tokens as the prefiller counted them."""
        self._num_prompt = num_tokens

    # ── what is known ───────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def num_prompt(self) -> int | None:
        """The number of the prompt's tokens, as an engine counted them; None where none has told it."""
        if self._unread:
            self.settle()
        return self._num_prompt

    @property
    def num_output(self) -> int:
        """The number of tokens of the answer so far, of all its choices."""
        if self._unread:
            self.settle()
        return self.num_shown if self._num_told is None else self._num_told

    @property
    def source(self) -> str:
        """The way in which `num_output` was counted: `BY_USAGE`, `BY_IDS` or `BY_EVENTS`."""
        if self._unread:
            self.settle()
        return BY_USAGE if self._num_told is not None else BY_IDS if self._ids else BY_EVENTS

    @property
    def mean_gap_s(self) -> float | None:
        """The seconds per token after the first one: from the first piece of the stream to the last one with tokens, by
        the number of tokens less one. None for a stream of one token, one that came in one piece, and for several
        answers side by side."""
        num, stream_s = self.num_output, self._last_at - self._first_at
        if num < 2 or stream_s <= 0.0 or self.num_sequences != 1:
            return None
        return stream_s / (num - 1)

    def settle(self) -> None:
        """Reads the latest usage, and lets go of its bytes. Numbers that it lacks stay as they are."""
        if not self._unread:
            return
        data, self._unread = self._unread, b""
        if self.mark:
            num_prompt, num_output = _last_number(data, _INPUT), _last_number(data, _WRITTEN)
            num_cached = _last_number(data, _CACHE_READ)  # Anthropic's count of the prompt is without these
            num_prompt = None if num_prompt is None else num_prompt + (num_cached or 0)
            num_output = num_output or None  # a stream's first event tells none, because none was written yet
        else:
            num_prompt, num_output = _last_number(data, _PROMPT), _last_number(data, _OUTPUT)
        self._num_prompt = self._num_prompt if num_prompt is None else num_prompt
        self._num_told = self._num_told if num_output is None else num_output

    def __repr__(self) -> str:
        return f"<TokenCount {self.num_output} by {self.source}>"


def _last_number(data: bytes, name: bytes) -> int | None:
    """Returns the number behind the last `name`; None where there is none. It is at the end of a whole answer."""
    at = data.rfind(name)
    if at < 0:
        return None
    at += len(name)
    end = len(data)
    while at < end and data[at] in _BEFORE_NUMBER:
        at += 1
    start, number = at, 0
    while at < end and at < start + MAX_DIGITS and _ZERO <= data[at] <= _NINE:  # an expression takes ten times as long
        number = 10 * number + data[at] - _ZERO
        at += 1
    return number if at > start else None


def _num_ids(events: bytes, ids: bytes) -> int:
    """Returns the number of tokens of which whole events tell the ids. Their lists begin with the bytes `ids`."""
    num, start = 0, events.find(ids)
    while start >= 0:
        start += len(ids)
        end = events.find(b"]", start)
        if end > start:
            num += events.count(b",", start, end) + 1
        if len(events) - end < _LEAST_BYTES:  # as a rule: what comes behind the ids is the event's end
            break
        start = events.find(ids, end)
    return num
