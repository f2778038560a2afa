"""The module reads an answer as it comes: what it is, when its pieces come, and how it ends. It does no I/O.

Every token of every stream passes through here, so the code reads only those parts of an event which a record needs.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from typing import Any

import msgspec

from pdproxy.engines.http.base import EngineBroken
from pdproxy.loadtest.log_histogram import LogHistogram
from pdproxy.openai.answer import Choice, CountedChunk, Usage
from pdproxy.openai.sse import EventBuffer, data_of, split

MAX_COMPLAINT = 300


_content = msgspec.json.Decoder(CountedChunk)


class Answer:
    """Answer collects what a target answers to one request. It implements `engines.http.base.Sink` for a stream;
    `take_whole` takes every other reply. With `keeps_text` it keeps the text for a later turn. `leaves_at` is the
    number of pieces after which the client has seen enough and leaves.

    Mutable state: it grows with what it is fed, until `over` is set. By then it is known how the answer ended.
    """

    def __init__(
        self,
        now_s: Callable[[], float],
        over: asyncio.Future[None],
        *,
        keeps_text: bool = False,
        leaves_at: int | None = None,
    ) -> None:
        self.over = over
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.num_chunks = 0
        self.gaps: LogHistogram | None = None
        self.usage: Usage | None = None
        self.finish_reason = ""
        self.error = ""
        self.complaint = ""
        self.has_left = False
        self.over_s: float | None = None
        self._now_s = now_s
        self._keeps_text = keeps_text
        self._leaves_at = leaves_at
        self._events = EventBuffer()
        self._is_done = False
        self._has_choices = False
        self._said: list[str] = []
        self._digest = 0

    @property
    def text(self) -> str:
        return "".join(self._said)

    @property
    def digest(self) -> str:
        """Returns a checksum of the text in hexadecimal; it does not depend on how the text was cut into pieces."""
        return f"{self._digest:08x}"

    # ── a stream ────────────────────────────────────────────────────────────────────────────────────────────────────

    def feed(self, data: bytes) -> None:
        at_s = self._now_s()
        for raw in split(self._events.feed(data)):
            event = data_of(raw)
            if event is not None and not self.over.done():
                self._take_event(event, at_s)

    def end(self) -> None:
        if not self._is_done and not self.finish_reason and not self.error:
            self._fail("cut", "the stream ended without its end")
        self._check_choices()
        self._set_over()

    def fail(self, error: EngineBroken) -> None:
        if not self._is_done:
            self._fail("broken", str(error))
        self._set_over()

    def _take_event(self, event: bytes, at_s: float) -> None:
        if event == b"[DONE]":
            self._is_done = True
            return
        content = self._understood(event)
        if content is None:
            return
        if content.error is not None:
            self._fail(*read_error(content.error, "error_event"))
        self.usage = content.usage or self.usage
        for choice in content.choices:
            self._take_choice(choice, at_s)

    def _take_choice(self, choice: Choice, at_s: float) -> None:
        self._has_choices = True
        self.finish_reason = choice.finish_reason or self.finish_reason
        if self._say(choice) or (choice.finish_reason and self.first_token_s is None):
            self._piece_came(at_s)

    def _piece_came(self, at_s: float) -> None:
        self.num_chunks += 1
        if self.last_token_s is None:
            self.first_token_s = at_s
        else:
            if self.gaps is None:
                self.gaps = LogHistogram()
            self.gaps.add(at_s - self.last_token_s)
        self.last_token_s = at_s
        if self.num_chunks == self._leaves_at:
            self.has_left = True
            self._set_over()

    # ── any other reply ─────────────────────────────────────────────────────────────────────────────────────────────

    def take_whole(self, status: int, body: bytes) -> None:
        if status == 200:
            content = self._understood(body)
            if content is not None and content.error is not None:
                self._fail(*read_error(content.error, "error"))
            elif content is not None:
                self.usage = content.usage
                for choice in content.choices:
                    self._has_choices = True
                    self.finish_reason = choice.finish_reason or self.finish_reason
                    self._say(choice)
                self._check_choices()
        else:
            self._fail(*read_refusal(status, body))
        self._set_over()

    # ── inside ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _say(self, choice: Choice) -> bool:
        """Takes the text of a choice, and tells whether the choice holds any part of an answer."""
        text = choice.said
        if not text:
            return choice.has_parts
        self._digest = zlib.crc32(text.encode("utf-8", "surrogatepass"), self._digest)
        if self._keeps_text:
            self._said.append(text)
        return True

    def _check_choices(self) -> None:
        """Fails the answer if no choice came: a reply can be well-formed and still answer nothing."""
        if not self._has_choices:
            self._fail("malformed", "there is no choice in it")

    def _understood(self, data: bytes) -> CountedChunk | None:
        try:
            return _content.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self._fail("malformed", f"{error}: {data[:80]!r}")
            return None

    def _fail(self, error: str, complaint: str) -> None:
        """Keeps the first error and its message; later errors change nothing."""
        if not self.error:
            self.error, self.complaint = error, complaint[:MAX_COMPLAINT]

    def _set_over(self) -> None:
        if not self.over.done():
            self.over_s = self._now_s()
            self.over.set_result(None)


def read_refusal(status: int, body: bytes) -> tuple[str, str]:
    """Returns a record's `error` and `complaint` for a reply whose status is not 200."""
    try:
        content = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        content = body.decode(errors="replace").strip()
    told = (content.get("error") or content) if isinstance(content, dict) else content
    return read_error(told, f"http_{status}")


def read_error(told: Any, otherwise: str) -> tuple[str, str]:
    """Returns the error object's code, or else its type, or else `otherwise`; and its message."""
    if not isinstance(told, dict):
        return otherwise, str(told)
    name = next((told[key] for key in ("code", "type") if isinstance(told.get(key), str) and told[key]), otherwise)
    return name, str(told.get("message") or told.get("detail") or "")
