"""A model's chat template: what its messages are as one text."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2

from pdproxy.errors import InvalidRequest

_CLOCK = "strftime_now"
"""By this name a template asks what day it is."""


class ChatTemplate:
    """The one in the model folder `path`. For several threads.

    Mutable state: `_tokenizer`, transformers' own, which has it; loaded by the first chat request (its import takes
    seconds). `_loading` keeps the second from importing it as well, which transformers' lazy modules do not survive.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tokenizer: Any = None
        self._loading = threading.Lock()

    def render(
        self, messages: list[dict[str, Any]], *, tools: Any, add_generation_prompt: Any, kwargs: Mapping[str, Any]
    ) -> str:
        """Raises `InvalidRequest` where it refuses the messages."""
        try:
            text: str = self._loaded().apply_chat_template(
                [_plain(message) for message in messages],
                tools=tools,
                add_generation_prompt=True if add_generation_prompt is None else add_generation_prompt,
                tokenize=False,
                **kwargs,
            )
        except (jinja2.TemplateError, ValueError, TypeError) as error:
            raise InvalidRequest(f"the model's chat template refuses the messages: {error}", param="messages") from None
        return text

    @property
    def is_timeless(self) -> bool:
        """The same messages are the same text tomorrow."""
        return _CLOCK not in str(self._loaded().chat_template)

    def _loaded(self) -> Any:
        with self._loading:
            if self._tokenizer is None:
                self._tokenizer = _load(self._path)
            return self._tokenizer


def _load(path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(path))


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """Text parts joined, as the engines do."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts = [part if isinstance(part, str) else str(part.get("text", "")) for part in content]
    return message | {"content": "\n".join(texts)}
