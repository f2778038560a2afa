"""The module puts one answer together as a client saw it, streamed or not, from what came over the wire."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from pdproxy.openai.answer import Choice, Usage
from scripts.dev.common.events import DONE


@dataclass(slots=True)
class Said:
    """Said is one choice."""

    text: str = ""
    tokens: list[str] = field(default_factory=list)
    """Holds the tokens as the logprobs tell them."""
    finish_reason: str | None = None


@dataclass(slots=True)
class Reply:
    """Reply is what has come of one answer.

    Mutable state: it grows with `feed_event` or `feed_body` until `is_complete`.
    """

    status: int = 0
    """The HTTP status; 0 until the head of the answer has come."""
    path: str = ""
    """The proxy's word for the way that the request went."""
    request_id: str = ""
    """The proxy's name for the request, under which its log has it."""
    retry_after: str | None = None
    """The header ``Retry-After`` as it came."""
    choices: dict[int, Said] = field(default_factory=dict)
    usage: Usage | None = None
    error: dict[str, Any] | None = None
    ids: set[tuple[str, int]] = field(default_factory=set)
    """Holds every (`id`, `created`) that was told; one answer has one."""
    num_events: int = 0
    is_complete: bool = False

    def feed_body(self, body: bytes) -> None:
        """Takes the whole of a reply that is not streamed. Raises `ValueError` for what is no answer."""
        self._feed(body)
        self.is_complete = True

    def feed_event(self, data: bytes) -> None:
        """Takes the data of an event of a stream. Raises `ValueError` as `feed_body` does."""
        self.num_events += 1
        if data == DONE:
            self.is_complete = True
        else:
            self._feed(data)

    def _feed(self, data: bytes) -> None:
        content = _decoder.decode(data)
        if content.error is not None:
            self.error = content.error
            return
        if content.id is None or content.created is None:
            raise ValueError(f"{data[:80]!r} has no id, or was never made")
        self.ids.add((content.id, content.created))
        self.usage = content.usage or self.usage
        for choice in content.choices:
            said = self.choices.setdefault(choice.index, Said())
            said.text += choice.said
            said.tokens += choice.tokens
            said.finish_reason = choice.finish_reason or said.finish_reason


class _Choice(Choice, kw_only=True):
    index: int
    logprobs: dict[str, Any] | None = None

    @property
    def tokens(self) -> list[str]:
        """Returns the tokens as the logprobs of a completion or of a chat tell them."""
        logprobs = self.logprobs or {}
        return logprobs.get("tokens") or [entry["token"] for entry in logprobs.get("content") or []]


class _Content(msgspec.Struct):
    id: str | None = None
    created: int | None = None
    choices: list[_Choice] = []
    usage: Usage | None = None
    error: dict[str, Any] | None = None


_decoder = msgspec.json.Decoder(_Content)
