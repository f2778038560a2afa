"""The module learns how long answers are, from those that are complete, for each model by itself.

Nobody knows beforehand how long an answer will be. An engine needs room for it all the same: what is promised to too
many is taken from somebody half-way, and what is kept for the longest possible answer lies idle. So the length that all
but a few of the latest answers have kept to is taken for the next one, and never more than its `max_tokens`.
"""

from __future__ import annotations

from math import inf
from typing import Final

from pdproxy.admission.room import Room
from pdproxy.openai.request import GenerationRequest
from pdproxy.tokens.prompt_size import PromptSize

SHARE: Final = 0.9
"""The share of answers which are no longer than what is thought."""
MIN_ANSWERS: Final = 16
"""The number of answers of a model from which on its lengths count as known. After so many more it is found anew what
they keep to."""
UNKNOWN_TOKENS: Final = 512
"""The length, in tokens, that is assumed of an answer without `max_tokens` while nothing is known of its model."""
BYTES_PER_TOKEN: Final = 3
"""The bytes per token where a prompt was counted in bytes. Fewer than most tokenizers have, so that no prompt seems too
short."""
MEDIA_TOKENS: Final = 4096
"""The most tokens that are assumed of a prompt with images or sounds, whose bytes say nothing of its length."""
HALF_LIFE: Final = 256
"""The number of answers after which an answer counts half as much as the latest."""
MAX_MODELS = 256
_PER_DOUBLING: Final = 4
_GROWTH: Final = 2.0 ** (1.0 / HALF_LIFE)


class _Lengths:
    """_Lengths counts answers by length, in classes of which four double it. Mutable state: the weights, by class; the
    weight of the next answer; the number of answers."""

    __slots__ = ("num_answers", "quantile", "total", "weight", "weights")

    def __init__(self) -> None:
        self.weights: dict[int, float] = {}
        self.weight = 1.0
        self.total = 0.0
        self.num_answers = 0
        self.quantile = UNKNOWN_TOKENS

    def note(self, num_tokens: int) -> None:
        each = _class_of(num_tokens)
        self.weights[each] = self.weights.get(each, 0.0) + self.weight
        self.total += self.weight
        self.num_answers += 1
        self.weight *= _GROWTH
        if self.weight > 2.0**40:
            self.weights = {each: weight / self.weight for each, weight in self.weights.items()}
            self.total, self.weight = self.total / self.weight, 1.0
        if self.num_answers % MIN_ANSWERS == 0:
            self.quantile = self._find()

    def _find(self) -> int:
        rest = self.total * (1.0 - SHARE)
        longest = 1
        for each in sorted(self.weights, reverse=True):
            longest = each
            rest -= self.weights[each]
            if rest < 0.0:
                break
        return _longest_of(longest)


class AnswerLengths:
    """`AnswerLengths` tells the room that a request takes where its answer is written.

    Mutable state: what is known of the models' answers, those forgotten first that have had none for longest.
    """

    def __init__(self) -> None:
        self._models: dict[str | None, _Lengths] = {}

    def note(self, model: str | None, num_tokens: int) -> None:
        """Notes the length, in tokens, of an answer that is complete."""
        lengths = self._models.pop(model, None) or _Lengths()
        self._models[model] = lengths
        if len(self._models) > MAX_MODELS:
            del self._models[next(iter(self._models))]
        lengths.note(max(1, num_tokens))

    def growth(self, model: str | None, max_tokens: int | None) -> int:
        """Returns the length, in tokens, that an answer is thought to have: as long as all is new, it is the longest
        that it may have."""
        lengths = self._models.get(model)
        if lengths is None or lengths.num_answers < MIN_ANSWERS:
            return UNKNOWN_TOKENS if max_tokens is None else max_tokens
        return lengths.quantile if max_tokens is None else min(lengths.quantile, max_tokens)

    def room(self, request: GenerationRequest, size: PromptSize) -> Room:
        """Returns the room for a request whose prompt has this size. Answers side by side share their prompt."""
        num, most = request.num_sequences, request.max_tokens
        prompt = size.tokens if size.is_exact else size.tokens // BYTES_PER_TOKEN
        if request.has_media and not size.is_exact:
            prompt = min(prompt, MEDIA_TOKENS)
        growth = self.growth(request.model, most)
        return Room(prompt, num * growth, inf if most is None else num * most, max(1, num))


def _class_of(num_tokens: int) -> int:
    """Returns the class of a length, which is above 0."""
    doublings = num_tokens.bit_length() - 1
    return doublings * _PER_DOUBLING + (num_tokens * _PER_DOUBLING >> doublings) - _PER_DOUBLING


def _longest_of(each: int) -> int:
    """Returns the longest length of a class."""
    doublings, quarter = divmod(each, _PER_DOUBLING)
    return max(1, -(-(_PER_DOUBLING + quarter + 1 << doublings) // _PER_DOUBLING) - 1)
