"""The choice of the next token. It is drawn so that a request moved to another machine continues as if it had stayed.

The draw depends on the logits, the request's `SamplingParams` and the position of the token in the answer, and on
nothing else: no generator carries state from one token, or one request, to the next. This module uses tensor methods
only, so that `SamplingParams` can be imported where torch is not.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from transfer.errors import TransferError

if TYPE_CHECKING:
    import torch

MAX_TOP_LOGPROBS = 20
_NOTHING_GENERATED: Mapping[int, int] = {}


class SamplingError(TransferError):
    """A sampling parameter is out of range. `field` is its name as in the OpenAI API."""

    def __init__(self, field: str, must: str, value: object) -> None:
        super().__init__(f"{field} must {must}, not {value!r}")
        self.field = field


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """`SamplingParams` holds one request's wishes. Fields, defaults and ranges are those of the OpenAI API. Raises
    `SamplingError`."""

    temperature: float = 1.0
    """The temperature. 0 is greedy: the first of the largest logits, as transformers' ``generate`` takes it."""
    top_p: float = 1.0
    top_k: int = 0
    """The number of best tokens to draw among. 0 or -1 means all."""
    seed: int | None = None
    """The seed. It is None only until the request is accepted; then a `fresh_seed` is put here."""
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Holds numbers that are added to the logits of these token ids; see `check_vocabulary`."""
    logprobs: int | None = None
    """The number of most likely tokens to report beside the sampled one. None reports nothing."""

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, 0, 2)
        if not 0 < self.top_p <= 1:
            raise SamplingError("top_p", "be above 0 and at most 1", self.top_p)
        if self.top_k < -1:
            raise SamplingError("top_k", "be -1, 0 or the number of tokens to draw among", self.top_k)
        _check("frequency_penalty", self.frequency_penalty, -2, 2)
        _check("presence_penalty", self.presence_penalty, -2, 2)
        for bias in self.logit_bias.values():
            _check("logit_bias", bias, -100, 100)
        if self.logprobs is not None:
            _check("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises `SamplingError` if a token id is named that the model does not have."""
        for token_id in self.logit_bias:
            if not 0 <= token_id < vocab_size:
                raise SamplingError("logit_bias", f"name token ids below {vocab_size}", token_id)


def _check(field: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # false for NaN as well
        raise SamplingError(field, f"be between {low} and {high}", value)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A `SampledToken` is a token and, where `SamplingParams.logprobs` asks for it, natural-log probabilities."""

    token_id: int
    logprob: float | None = None
    top_logprobs: list[tuple[int, float]] = field(default_factory=list)
    """Holds (id, logprob) of the most likely tokens, best first. The sampled one need not be among them."""


def fresh_seed() -> int:
    """Returns a random seed for a request that brought none. It is drawn once, so that prefiller and decoder share
    it."""
    return secrets.randbits(63)


def sample(
    logits: torch.Tensor,
    params: SamplingParams,
    *,
    position: int,
    counts: Mapping[int, int] = _NOTHING_GENERATED,
    forbidden: Collection[int] = (),
) -> SampledToken:
    """Chooses one token from `logits`, a vector over the vocabulary, which is left as it is.

    `position` is the token's index in the answer (0 for the first). `counts` tells how often each token is in the
    answer so far (the prompt does not count). `forbidden` are the ids that must not be chosen, whatever their bias.
    Log-probabilities are those of the model: before bias, penalties, temperature and `forbidden`. Raises
    ArithmeticError if no token is left or the logits are not numbers, and ValueError if `params.seed` is missing where
    it is needed.
    """
    raw = logits.float()
    scores = _adjusted(raw, params, counts, forbidden)
    if not math.isfinite(scores.max()):  # NaN if any score is
        raise ArithmeticError("no token can be sampled: the best score is not a finite number")
    if params.temperature == 0:
        token_id = int(scores.argmax())
    else:
        token_id = _draw(_candidates(scores, params), _uniform(params.seed, position))
    if params.logprobs is None:
        return SampledToken(token_id)
    return _with_logprobs(token_id, raw.log_softmax(-1), params.logprobs)


def _adjusted(
    raw: torch.Tensor, params: SamplingParams, counts: Mapping[int, int], forbidden: Collection[int]
) -> torch.Tensor:
    scores = raw.clone()
    for token_id, bias in params.logit_bias.items():
        scores[token_id] += bias
    if counts and (params.frequency_penalty or params.presence_penalty):
        ids = scores.new_tensor(list(counts)).long()
        times = scores.new_tensor(list(counts.values()))
        scores[ids] -= params.frequency_penalty * times + params.presence_penalty * (times > 0)
    for token_id in forbidden:
        scores[token_id] = -math.inf
    return scores


def _candidates(scores: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Returns probabilities over the vocabulary in float64, 0 for the tokens that top_k and then top_p leave out."""
    probabilities = ((scores.double() - scores.max()) / params.temperature).softmax(-1)
    if params.top_k <= 0 and params.top_p == 1:
        return probabilities
    best, ids = probabilities.sort(descending=True, stable=True)
    if params.top_k > 0:
        best[params.top_k :] = 0
    before = best.cumsum(-1) - best
    best[before >= params.top_p * best.sum()] = 0
    return probabilities.scatter(0, ids, best)


def _draw(probabilities: torch.Tensor, uniform: float) -> int:
    """Returns the token at `uniform` in the cumulative distribution. With this method a little noise in the logits
    seldom changes the outcome."""
    cumulative = probabilities.cumsum(-1)
    return int((cumulative <= uniform * cumulative[-1]).sum())


def _uniform(seed: int | None, position: int) -> float:
    """Returns a number in [0, 1) for this position. It has 52 bits, so that times a total it stays below the total."""
    if seed is None:
        raise ValueError("sampling at a temperature above 0 needs a seed; give the request a fresh_seed()")
    digest = hashlib.blake2b(f"{seed}/{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest) >> 12) / 2**52


def _with_logprobs(token_id: int, logprobs: torch.Tensor, num_top: int) -> SampledToken:
    values, ids = logprobs.topk(min(num_top, logprobs.shape[-1]))
    top = list(zip(ids.tolist(), values.tolist(), strict=True))
    return SampledToken(token_id, float(logprobs[token_id]), top)
