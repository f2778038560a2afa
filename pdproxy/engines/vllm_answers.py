"""The module holds the shapes of what vLLM answers, whichever connector it has.

Source of `VLLM_SHAPE`: vLLM 0.32, ``CompletionResponse`` and ``ChatCompletionResponse``, which are written with all of
their fields.
"""

from __future__ import annotations

import msgspec

from pdproxy.openai.assembled import WholeShape


class Version(msgspec.Struct):
    """A `Version` is the answer at ``/version``."""

    version: str


class Handoff(msgspec.Struct):
    """A `Handoff` is what the ``kv_transfer_params`` of pdproxy's own connector say, which go to the decoder as they
    are."""

    failure: str | None = None
    is_receiver_lost: bool = False


read_version = msgspec.json.Decoder(Version)
read_handoff = msgspec.json.Decoder(Handoff)

_HEAD = ("id", "object", "created", "model", "choices", "service_tier", "system_fingerprint", "usage")
_TAIL = ("kv_transfer_params", "ec_transfer_params", "metrics")
_END = ("logprobs", "finish_reason", "stop_reason", "token_ids")

VLLM_SHAPE = WholeShape(
    completion=(*_HEAD, *_TAIL),
    completion_choice=("index", "text", *_END, "prompt_logprobs", "prompt_token_ids", "routed_experts"),
    chat=(*_HEAD, "prompt_logprobs", "prompt_token_ids", "prompt_text", *_TAIL),
    chat_choice=("index", "message", *_END, "routed_experts"),
    message=("role", "content", "refusal", "annotations", "audio", "function_call", "reasoning"),
    usage=(
        "prompt_tokens",
        "total_tokens",
        "completion_tokens",
        "prompt_tokens_details",
        "completion_tokens_details",
    ),
)
