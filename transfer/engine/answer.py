"""One answer as it grows. This is the only place that decides when an answer is finished, and what of it may be
shown."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from transfer.engine.sampling import SampledToken
from transfer.engine.text import IncrementalDetokenizer, token_texts


@dataclass(slots=True)
class Delta:
    """A `Delta` holds what one more token made certain. `tokens` is empty unless log-probabilities were asked for."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    """Holds the ids that were fed, whether or not their text is shown yet. Those of end-of-sequence and of a stop
    string are included."""
    tokens: list[SampledToken] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    """Tells, in characters, where in the answer each of `tokens` begins."""
    finish_reason: str | None = None


class Answer:
    """An `Answer` is fed with sampled tokens. It is finished by end-of-sequence, by a stop string or by length, in this
    order.

    Mutable state: what has been shown (`shown`, by this process; `_num_characters`, by all), `num_tokens`, and
    `_waiting`, which are the tokens of whose text nothing has been shown yet. End-of-sequence and stop strings are
    counted in `num_tokens`, but never shown.
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
        self._num_characters = 0
        self._max_tokens = max_tokens
        self._eos_token_ids = eos_token_ids
        self._detokenizer = IncrementalDetokenizer(tokenizer, stop)
        self._with_logprobs = with_logprobs
        self._offsets = _Offsets(tokenizer)
        self._waiting: list[tuple[int, SampledToken]] = []

    @property
    def finish_reason(self) -> str | None:
        """The reason why the answer is finished, ``stop`` or ``length``; None while more tokens are wanted."""
        return self.shown.finish_reason

    def feed(self, token: SampledToken) -> Delta:
        """Takes one more token. Returns what it adds. Raises `ValueError`, and changes nothing, if the answer is
        finished."""
        if self.finish_reason is not None:
            raise ValueError(f"the answer is finished ({self.finish_reason}), yet another token came")
        self.num_tokens += 1
        text, finish_reason = self._read(token)
        return self._show([token.token_id], text, finish_reason)

    def hand_off(self) -> None:
        """Finishes the answer by length, because another process goes on with it. Text that waited is shown. It can be
        no stop string yet."""
        self._show([], self._detokenizer.finish(), "length")

    def resume(self, token_ids: Iterable[int]) -> None:
        """Goes on where another process stopped: what these tokens, the answer's first, make certain has been shown.

        Text of these tokens that had to wait comes out with the tokens that follow. The log-probabilities of tokens
        that waited with it are unknown (None). These tokens may finish the answer. Raises `ValueError` if the
        answer was finished before the last of them.
        """
        for token_id in token_ids:
            self.feed(SampledToken(token_id))
        self.shown = Delta(finish_reason=self.finish_reason)

    def _read(self, token: SampledToken) -> tuple[str, str | None]:
        """Returns the text that the token makes certain, and why the answer ends with it; None where it goes on."""
        detokenizer = self._detokenizer
        if token.token_id in self._eos_token_ids:
            return detokenizer.finish(), "stop"
        if self._with_logprobs:
            self._waiting.append((self._offsets.next(token.token_id), token))
        text = detokenizer.feed(token.token_id)
        is_last = self.num_tokens == self._max_tokens
        if is_last and detokenizer.stopped is None:
            text += detokenizer.finish()
        if detokenizer.stopped is not None:
            return text, "stop"
        return text, "length" if is_last else None

    def _show(self, token_ids: list[int], text: str, finish_reason: str | None) -> Delta:
        self._num_characters += len(text)
        shows_all = finish_reason is not None and self._detokenizer.stopped is None
        end = None if shows_all else self._num_characters
        ready = [(offset, token) for offset, token in self._waiting if end is None or offset < end]
        del self._waiting[: len(ready)]
        delta = Delta(text, token_ids, [token for _, token in ready], [offset for offset, _ in ready], finish_reason)
        self._add(delta)
        return delta

    def _add(self, delta: Delta) -> None:
        shown = self.shown
        shown.text += delta.text
        shown.token_ids += delta.token_ids
        shown.tokens += delta.tokens
        shown.offsets += delta.offsets
        shown.finish_reason = delta.finish_reason


class _Offsets:
    """`_Offsets` tells where in the text the next token begins. A character belongs to the token that completes it."""

    def __init__(self, tokenizer: Any) -> None:
        self._texts = token_texts(tokenizer)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_characters = 0

    def next(self, token_id: int) -> int:
        offset = self._num_characters
        if token_id not in self._texts.special_ids:
            self._num_characters += len(self._utf8.decode(self._texts.token_bytes(token_id)))
        return offset
