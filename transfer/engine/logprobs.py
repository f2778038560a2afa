"""Log-probabilities as OpenAI's two APIs show them, and the form in which the first token's travel in a handoff."""

from __future__ import annotations

from typing import Any

import msgspec

from transfer.engine.api_error import ApiError
from transfer.engine.sampling import SampledToken
from transfer.engine.text import TokenTexts
from transfer.wire import Handoff

FLOOR = -9999.0
"""The number for minus infinity, which JSON does not have. OpenAI uses the same number."""


def completion_logprobs(tokens: list[SampledToken], offsets: list[int], texts: TokenTexts) -> dict[str, Any]:
    """Returns ``choices[].logprobs`` of ``/v1/completions``. `offsets` are characters from the answer's beginning."""
    return {
        "tokens": [_name(texts.token_bytes(token.token_id)) for token in tokens],
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "top_logprobs": [_named_logprobs(token, texts) for token in tokens],
        "text_offset": offsets,
    }


def chat_logprobs(tokens: list[SampledToken], texts: TokenTexts) -> dict[str, Any]:
    """Returns ``choices[].logprobs`` of ``/v1/chat/completions``."""
    return {"content": [_chat_entry(token, texts) for token in tokens], "refusal": None}


def _chat_entry(token: SampledToken, texts: TokenTexts) -> dict[str, Any]:
    top = [_scored(texts.token_bytes(token_id), logprob) for token_id, logprob in token.top_logprobs]
    return _scored(texts.token_bytes(token.token_id), token.logprob) | {"top_logprobs": top}


def _scored(spelling: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": spelling.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(spelling)}


def _named_logprobs(token: SampledToken, texts: TokenTexts) -> dict[str, float | None]:
    """Returns the most probable tokens, and the sampled one, which need not be among them."""
    named = {_name(texts.token_bytes(token_id)): _finite(logprob) for token_id, logprob in token.top_logprobs}
    named.setdefault(_name(texts.token_bytes(token.token_id)), _finite(token.logprob))
    return named


def _name(spelling: bytes) -> str:
    """Returns the token as text, or ``bytes:\\xe2\\x82`` where it is only a part of a character."""
    try:
        return spelling.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelling)


def _finite(logprob: float | None) -> float | None:
    """Returns a number that is never minus infinity. None (unknown) stays None."""
    return None if logprob is None else max(logprob, FLOOR)


class _FirstTokenLogprobs(msgspec.Struct):
    logprob: float
    top_logprobs: list[tuple[int, float]]


def for_handoff(token: SampledToken) -> dict[str, Any] | None:
    """Returns ``first_token_logprobs``: ``{"logprob": float, "top_logprobs": [[token id, float], …]}``; None where
    there are none."""
    if token.logprob is None:
        return None
    top = [[token_id, _finite(logprob)] for token_id, logprob in token.top_logprobs]
    return {"logprob": _finite(token.logprob), "top_logprobs": top}


def first_token(handoff: Handoff) -> SampledToken:
    """Returns the token a handoff begins with. Raises `ApiError` if its log-probabilities are not of the form above."""
    if handoff.first_token_logprobs is None:
        return SampledToken(handoff.first_token_id)
    try:
        scores = msgspec.convert(handoff.first_token_logprobs, _FirstTokenLogprobs)
    except msgspec.ValidationError as error:
        raise ApiError(f"first_token_logprobs: {error}", param="kv_transfer_params") from None
    return SampledToken(handoff.first_token_id, scores.logprob, scores.top_logprobs)
