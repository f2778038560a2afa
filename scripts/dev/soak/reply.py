"""The module puts one answer together as a client saw it, streamed or not, from what came over the wire."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

DATA = "data: "


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

    Mutable state: it grows with `feed_line` or `feed_body` until `is_complete`.
    """

    status: int = 0
    """Holds the status; 0 until the head of the answer has come."""
    path: str = ""
    """Holds the proxy's word for the way that the request went."""
    choices: dict[int, Said] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    ids: set[tuple[str, int]] = field(default_factory=set)
    """Holds every (`id`, `created`) that was told; one answer has one."""
    num_events: int = 0
    is_complete: bool = False

    def feed_body(self, body: bytes) -> None:
        """Takes the whole of a reply that is not streamed. Raises `ValueError` for what is no JSON object."""
        self._feed(_json_object(body))
        self.is_complete = True

    def feed_line(self, line: str) -> None:
        """Takes a line of an event stream. Raises `ValueError` as `feed_body` does."""
        if not line.startswith(DATA):
            return
        self.num_events += 1
        if line == f"{DATA}[DONE]":
            self.is_complete = True
        else:
            self._feed(_json_object(line.removeprefix(DATA).encode()))

    def _feed(self, content: dict[str, Any]) -> None:
        if content.get("error") is not None:
            self.error = content["error"]
            return
        self.ids.add((content["id"], content["created"]))
        self.usage = content.get("usage") or self.usage
        for choice in content["choices"]:
            _add(self.choices.setdefault(choice["index"], Said()), choice)


def _add(said: Said, choice: dict[str, Any]) -> None:
    part = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
    said.text += part.get("content") or ""
    said.finish_reason = choice.get("finish_reason") or said.finish_reason
    logprobs = choice.get("logprobs") or {}
    said.tokens += logprobs.get("tokens") or [entry["token"] for entry in logprobs.get("content") or []]


def _json_object(data: bytes) -> dict[str, Any]:
    content = json.loads(data)
    if not isinstance(content, dict):
        raise ValueError(f"{data[:80]!r} is no JSON object")
    return content
