"""The module keeps one client's stream over all the engines that write it: what reaches the client, and what it has
seen.

A whole answer that is put together from streams is such a stream, too. Its client is the code that puts it together.

The module works on whole events. As long as the first decoder lives it works on their bytes only and parses nothing.
"""

from __future__ import annotations

from pdproxy.openai.first_token import Opening, as_events, stream_with_opening_counted
from pdproxy.openai.request import GenerationRequest
from pdproxy.openai.sse import DONE
from pdproxy.openai.token_count import TokenCount
from pdproxy.openai.transcript import NotReadableError, Shown, Transcript
from pdproxy.openai.usage import Head, PromptUsage, continued, usage_event, without_token_ids


class StreamedAnswer:
    """A `StreamedAnswer` is one client's stream.

    Mutable state: the transcript; the first stream's head, once another stream continues it; the opening that came
    before the decoder's events, where there is one.
    """

    __slots__ = ("_head", "_opening", "_request", "_transcript", "tokens")

    def __init__(self, request: GenerationRequest, *, tokens: TokenCount, limit_bytes: int) -> None:
        """Makes a stream of which at most `limit_bytes` are kept. With 0 nothing is kept, and no other engine can
        continue it. `tokens` counts what the client gets.
        """
        self._request = request
        self.tokens = tokens
        self._transcript = Transcript(limit_bytes) if limit_bytes else None
        self._head: Head | None = None
        self._opening: Opening | None = None

    def start_over(self) -> None:
        """Forgets everything. Nothing has reached the client, and another stream comes now, from its beginning."""
        self._transcript = None
        self._head = None
        self._opening = None
        self.tokens.clear()

    @property
    def asks_for_ids(self) -> bool:
        """Tells whether the decoder is to say which tokens its answer is made of."""
        return self._transcript is not None

    @property
    def num_bytes(self) -> int:
        """Returns the number of bytes shown so far; 0 where nothing is kept."""
        return 0 if self._transcript is None else self._transcript.num_bytes

    def keep_nothing(self) -> None:
        """Stops keeping the answer, because its engine says too little of it for another one to continue."""
        self._transcript = None

    def take(self, events: bytes) -> bytes:
        """Returns an engine's whole events as the client gets them. From here on they count as shown."""
        if self._head is not None:
            events = continued(events, self._head)
        self.tokens.add(events)
        if self._transcript is None:
            return events
        self._transcript.add(events)
        return events if self._request.wants_token_ids else without_token_ids(events)

    def open(self, opening: Opening, events: bytes) -> bytes:
        """Returns what the client gets before `events`, which are the decoder's first."""
        self._opening = opening
        return self.take(as_events(opening, events, self._request))

    @property
    def is_as_it_comes(self) -> bool:
        """Tells whether the client gets exactly what the engine writes: nothing is kept, and nothing was put
        before it.
        """
        return self._transcript is None and self._head is None and self._opening is None

    @property
    def has_opening(self) -> bool:
        """Tells whether the stream began with something that did not come from the decoder."""
        return self._opening is not None

    def with_opening_counted(self, events: bytes) -> bytes:
        """Returns whole events whose usages count the tokens of the opening as well."""
        return events if self._opening is None else stream_with_opening_counted(events, self._opening)

    def read(self) -> Shown:
        """Returns what was shown. What comes from now on continues it. Raises `NotReadableError`."""
        if self._transcript is None:
            raise NotReadableError("nothing is kept of it")
        shown = self._transcript.read()
        self._head = Head(shown.id, shown.created)
        return shown

    def can_end(self, shown: Shown, prompt: PromptUsage | None) -> bool:
        """Tells whether everything was shown except the end, and whether the proxy can write that end."""
        has_usage = shown.is_done or shown.has_usage or not self._request.include_usage
        return shown.is_finished and (has_usage or prompt is not None)

    def rest(self, shown: Shown, prompt: PromptUsage | None) -> bytes:
        """Returns the end that such a stream lacks; empty where it lacks nothing."""
        if shown.is_done:
            return b""
        if not self._request.include_usage or shown.has_usage or prompt is None:
            return DONE
        usage = usage_event(shown.first_chunk, prompt, len(shown.answer_ids))
        self.tokens.tell(usage)
        return usage + DONE
