"""The module decides which whole answers the proxy can ask of an engine as streams, without losing anything of them.

It lets through only fields that are known to mean the same in both forms. With any other field, such as a new one of
some engine, the proxy asks for the answer as a whole. It does no I/O.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from pdproxy.openai.body import Fields
from pdproxy.openai.request import TRUE, GenerationRequest, PromptKind

_AS_A_STREAM: Fields = {"stream": TRUE, "stream_options": msgspec.Raw(b'{"include_usage":true}')}

_SAME_IN_BOTH = frozenset(
    {
        # what is asked
        "model", "prompt", "messages", "suffix", "add_special_tokens", "truncate_prompt_tokens", "truncation_side",
        "add_generation_prompt", "continue_final_message", "documents",
        # how much, and in which form
        "max_tokens", "max_completion_tokens", "min_tokens", "n", "stream", "stream_options", "ignore_eos", "stop",
        "stop_token_ids", "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens",
        "logprobs", "top_logprobs", "return_token_ids", "return_tokens_as_token_ids", "response_format",
        "structured_outputs",
        # which token comes next
        "temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty",
        "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words",
        # what says nothing of the answer
        "user", "priority", "request_id", "session_id", "cache_salt", "metadata", "store", "service_tier",
        "safety_identifier", "prompt_cache_key",
    }
)  # fmt: skip
"""The fields which mean the same in a stream and in a whole answer.

Some are left out on purpose. `tools` and what belongs to them, and everything about reasoning (chat templates have
their own switches for it), are missing because engines read streams and whole answers with different parsers. ``echo``,
``prompt_logprobs``, ``best_of`` and beam search are missing because streams do not have them, or not in the same form.
"""
_NO_EFFECT = (b"null", b"false", b"[]", b'""', b"{}")
"""The values with which any other field asks for nothing."""


def is_streamable(request: GenerationRequest) -> bool:
    """Tells whether the whole answer to `request` can be put together from a stream without a loss."""
    if request.prompt_kind is PromptKind.BATCH or request.has_media or request.reads_prompt:
        return False
    others = request.fields.keys() - _SAME_IN_BOTH
    return not others or all(bytes(request.fields[name]) in _NO_EFFECT for name in others)


def as_stream(request: GenerationRequest) -> GenerationRequest:
    """Returns the same request, but for a stream with its usage."""
    return replace(request, fields=request.fields | _AS_A_STREAM, stream=True, include_usage=True)
