"""One client's stream over all the engines that write it: what of their events reaches it, and what it has seen.

A whole answer that is put together from streams is such a stream, too; its client is the one who does that.

All is done to whole events, and as long as the first decoder lives only to their bytes: nothing is parsed.
"""

from __future__ import annotations

from pdproxy.openai.first_token import Opening, as_events, stream_with_opening_counted
from pdproxy.openai.request import GenerationRequest
from pdproxy.openai.sse import DONE
from pdproxy.openai.transcript import NotReadableError, Shown, Transcript
from pdproxy.openai.usage import Head, PromptUsage, continued, usage_event, without_token_ids


class StreamedAnswer:
    """Mutable state: the transcript; the first stream's head, once another goes on with it; what it opened with, where
    that was not the decoder's."""

    __slots__ = ("_head", "_opening", "_request", "_transcript")

    def __init__(self, request: GenerationRequest, *, limit_bytes: int) -> None:
        """`limit_bytes` 0: nothing is kept, and nobody can go on."""
        self._request = request
        self._transcript = Transcript(limit_bytes) if limit_bytes else None
        self._head: Head | None = None
        self._opening: Opening | None = None

    def start_over(self) -> None:
        """Nothing of it has reached the client, and what comes now is another stream, from its beginning."""
        self._transcript = None
        self._head = None
        self._opening = None

    @property
    def asks_for_ids(self) -> bool:
        """The decoder is to say which tokens its answer is made of."""
        return self._transcript is not None

    @property
    def num_bytes(self) -> int:
        """Of what was shown; grows with it where it is kept at all."""
        return 0 if self._transcript is None else self._transcript.num_bytes

    def keep_nothing(self) -> None:
        """Whoever writes it says too little of it for another one to go on."""
        self._transcript = None

    def take(self, events: bytes) -> bytes:
        """An engine's whole events as the client gets them; from here they count as shown."""
        if self._head is not None:
            events = continued(events, self._head)
        if self._transcript is None:
            return events
        self._transcript.add(events)
        return events if self._request.wants_token_ids else without_token_ids(events)

    def open(self, opening: Opening, events: bytes) -> bytes:
        """What the client gets in front of `events`, which are the decoder's first."""
        self._opening = opening
        return self.take(as_events(opening, events, self._request))

    @property
    def is_as_it_comes(self) -> bool:
        """Nothing is kept of it and nothing was put before it: the client gets what the engine writes."""
        return self._transcript is None and self._head is None and self._opening is None

    @property
    def has_opening(self) -> bool:
        """It began with something that was not the decoder's."""
        return self._opening is not None

    def with_opening_counted(self, events: bytes) -> bytes:
        """Whole events whose usages tell the tokens of the opening as well."""
        return events if self._opening is None else stream_with_opening_counted(events, self._opening)

    def read(self) -> Shown:
        """What was shown; what comes from now on goes on with it. Raises `NotReadableError`."""
        if self._transcript is None:
            raise NotReadableError("nothing is kept of it")
        shown = self._transcript.read()
        self._head = Head(shown.id, shown.created)
        return shown

    def can_end(self, shown: Shown, prompt: PromptUsage | None) -> bool:
        """Everything was shown but the end, and that is known here."""
        has_usage = shown.is_done or shown.has_usage or not self._request.include_usage
        return shown.is_finished and (has_usage or prompt is not None)

    def rest(self, shown: Shown, prompt: PromptUsage | None) -> bytes:
        """The end that such a stream lacks."""
        if shown.is_done:
            return b""
        if not self._request.include_usage or shown.has_usage or prompt is None:
            return DONE
        return usage_event(shown.first_chunk, prompt, len(shown.answer_ids)) + DONE
