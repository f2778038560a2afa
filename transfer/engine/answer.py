"""One answer as it grows: the only place that decides when it is finished, and what of it may be shown."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transfer.engine.sampling import SampledToken
from transfer.engine.text import IncrementalDetokenizer, token_texts


@dataclass(slots=True)
class Delta:
    """What one more token made certain. `tokens` is empty unless log-probabilities were asked for."""

    text: str = ""
    tokens: list[SampledToken] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    """Where in the answer, in characters, each of `tokens` begins."""
    finish_reason: str | None = None


class Answer:
    """Fed with sampled tokens; finished by end-of-sequence, by a stop string or by length, in this order.

    Mutable state: what has been shown (`shown`), `num_tokens`, and `_waiting`: tokens none of whose text has
    been shown yet. End-of-sequence and stop strings are counted in `num_tokens`, but never shown.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        max_tokens: int,
        eos_token_ids: frozenset[int] = frozenset(),
        stop: Sequence[str] = (),
        with_logprobs: bool = False,
    ) -> None:
        self.shown = Delta()
        self.num_tokens = 0
        self._max_tokens = max_tokens
        self._eos_token_ids = eos_token_ids
        self._detokenizer = IncrementalDetokenizer(tokenizer, stop)
        self._with_logprobs = with_logprobs
        self._offsets = _Offsets(tokenizer)
        self._waiting: list[tuple[int, SampledToken]] = []

    @property
    def finish_reason(self) -> str | None:
        """``stop`` or ``length``; None while more tokens are wanted."""
        return self.shown.finish_reason

    def feed(self, token: SampledToken) -> Delta:
        """What the token adds. Raises `ValueError`, and changes nothing, if the answer is finished."""
        if self.finish_reason is not None:
            raise ValueError(f"the answer is finished ({self.finish_reason}), yet another token came")
        self.num_tokens += 1
        if token.token_id in self._eos_token_ids:
            return self._show(self._detokenizer.finish(), "stop")
        if self._with_logprobs:
            self._waiting.append((self._offsets.next(token.token_id), token))
        text = self._detokenizer.feed(token.token_id)
        if self._detokenizer.stopped is None and self.num_tokens == self._max_tokens:
            text += self._detokenizer.finish()
            return self._show(text, "length" if self._detokenizer.stopped is None else "stop")
        return self._show(text, None if self._detokenizer.stopped is None else "stop")

    def _show(self, text: str, finish_reason: str | None) -> Delta:
        shown = self.shown
        shown.text += text
        shown.finish_reason = finish_reason
        shows_all = finish_reason is not None and self._detokenizer.stopped is None
        end = None if shows_all else len(shown.text)
        ready = [(offset, token) for offset, token in self._waiting if end is None or offset < end]
        del self._waiting[: len(ready)]
        delta = Delta(text, [token for _, token in ready], [offset for offset, _ in ready], finish_reason)
        shown.tokens += delta.tokens
        shown.offsets += delta.offsets
        return delta


class _Offsets:
    """Where in the text the next token begins. A character belongs to the token that completes it."""

    def __init__(self, tokenizer: Any) -> None:
        self._texts = token_texts(tokenizer)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_characters = 0

    def next(self, token_id: int) -> int:
        offset = self._num_characters
        if token_id not in self._texts.special_ids:
            self._num_characters += len(self._utf8.decode(self._texts.token_bytes(token_id)))
        return offset
