"""The shapes of OpenAI's replies, whole and streamed. There is one class per route, with the same methods each.

Everything here is plain dicts, in the order in which OpenAI writes the keys.
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from transfer.engine.answer import Answer, Delta
from transfer.engine.logprobs import chat_logprobs, completion_logprobs
from transfer.engine.text import TokenTexts

Object = dict[str, Any]


def usage(num_prompt_tokens: int, num_answer_tokens: int, num_cached_tokens: int) -> Object:
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_answer_tokens,
        "total_tokens": num_prompt_tokens + num_answer_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }


class ReplyShape(ABC):
    """A `ReplyShape` builds the reply to one request. All chunks of a stream share its id, creation time and model."""

    id_prefix: ClassVar[str]
    whole: ClassVar[str]
    chunk: ClassVar[str]

    def __init__(
        self, model: str, texts: TokenTexts, *, with_logprobs: bool, include_usage: bool, with_token_ids: bool = False
    ) -> None:
        self.id = f"{self.id_prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self._texts = texts
        self.with_logprobs = with_logprobs
        self.with_token_ids = with_token_ids
        self._include_usage = include_usage

    def reply(self, answers: list[Answer], usage: Object) -> Object:
        """Returns the whole reply. Every answer must be finished."""
        choices = [self._whole_choice(index, answer) for index, answer in enumerate(answers)]
        return self._head(self.whole) | {"choices": choices, "usage": usage}

    def usage_chunk(self, usage: Object) -> Object:
        return self._head(self.chunk) | {"choices": [], "usage": usage}

    @abstractmethod
    def opening(self, index: int) -> list[Object]:
        """Returns the chunks before a choice's first text."""

    def delta(self, index: int, delta: Delta) -> Object:
        """Returns a chunk with text."""
        return self._chunk(index, self._part(delta.text), self._logprobs_of(delta), None)

    def delta_with_ids(self, index: int, delta: Delta, token_ids: list[int]) -> Object:
        """Returns a chunk with the ids read since the last one, their text, and the finish reason if there is one."""
        return self._chunk(index, self._part(delta.text), self._logprobs_of(delta), delta.finish_reason, token_ids)

    def closing(self, index: int, finish_reason: str) -> Object:
        """Returns a choice's last chunk."""
        return self._chunk(index, self._part(None), None, finish_reason)

    def _chunk(
        self,
        index: int,
        part: Object,
        logprobs: Object | None,
        finish_reason: str | None,
        token_ids: Sequence[int] = (),
    ) -> Object:
        choice = {"index": index} | part | self._end_of_choice(logprobs, finish_reason, token_ids)
        head = self._head(self.chunk) | {"choices": [choice]}
        return head | {"usage": None} if self._include_usage else head

    def _whole_choice(self, index: int, answer: Answer) -> Object:
        part = self._whole_part(answer.shown.text)
        logprobs = self._logprobs_of(answer.shown)
        end = self._end_of_choice(logprobs, answer.finish_reason, answer.shown.token_ids)
        return {"index": index} | part | end

    def _end_of_choice(self, logprobs: Object | None, finish_reason: str | None, token_ids: Sequence[int]) -> Object:
        end: Object = {"logprobs": logprobs, "finish_reason": finish_reason}
        return end | {"token_ids": token_ids} if self.with_token_ids else end

    def _head(self, kind: str) -> Object:
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model}

    def _logprobs_of(self, delta: Delta) -> Object | None:
        return self._logprobs(delta) if self.with_logprobs else None

    @abstractmethod
    def _logprobs(self, delta: Delta) -> Object: ...

    @abstractmethod
    def _part(self, text: str | None) -> Object:
        """Returns the key of a chunk's choice that carries its text. A `text` of None means no text any more."""

    @abstractmethod
    def _whole_part(self, text: str) -> Object: ...


class CompletionShape(ReplyShape):
    """`CompletionShape` is the shape of ``/v1/completions``."""

    id_prefix = "cmpl"
    whole = chunk = "text_completion"

    def opening(self, index: int) -> list[Object]:
        return []

    def _logprobs(self, delta: Delta) -> Object:
        return completion_logprobs(delta.tokens, delta.offsets, self._texts)

    def _part(self, text: str | None) -> Object:
        return {"text": text or ""}

    def _whole_part(self, text: str) -> Object:
        return {"text": text}


class ChatShape(ReplyShape):
    """`ChatShape` is the shape of ``/v1/chat/completions``."""

    id_prefix = "chatcmpl"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def opening(self, index: int) -> list[Object]:
        return [self._chunk(index, {"delta": {"role": "assistant", "content": ""}}, None, None)]

    def _logprobs(self, delta: Delta) -> Object:
        return chat_logprobs(delta.tokens, self._texts)

    def _part(self, text: str | None) -> Object:
        return {"delta": {} if text is None else {"content": text}}

    def _whole_part(self, text: str) -> Object:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}
