"""The bodies of ``/v1/completions`` and ``/v1/chat/completions``: read strictly, refused by field name.

Both become one `GenerationRequest`, which is free of wire names. A field that OpenAI defines and this engine
does not know is ignored; a field that asks for what this engine cannot do (a forced tool call, a JSON schema,
several prompts in one body) is refused, because an answer that silently lacks it would be wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from transfer.engine.api import ModelFacts
from transfer.engine.api_error import ApiError, model_not_found, refuse_if, too_long
from transfer.engine.asgi import decode
from transfer.engine.prompts import Conversation, Prompt, check_ids, plain_messages, single_prompt
from transfer.engine.sampling import MAX_TOP_LOGPROBS, SamplingError, SamplingParams, fresh_seed
from transfer.wire import Handoff, PushParams

MAX_STOP_STRINGS = 16
MAX_SEQUENCES = 64
DEFAULT_COMPLETION_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A body that has been validated, but for the prompt's ids and length.

    `num_sequences` answers to one prompt are wanted; a leg of an attempt has exactly one.
    """

    prompt: Prompt
    prompt_param: str
    """The field in which the client sent the prompt."""
    sampling: SamplingParams
    max_tokens: int | None
    """None: as many as the context leaves room for."""
    min_tokens: int
    ignore_eos: bool
    stop: tuple[str, ...]
    num_sequences: int
    stream: bool
    include_usage: bool
    push: PushParams | None
    handoff: Handoff | None


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Body(msgspec.Struct, kw_only=True):
    """The fields that both routes have."""

    model: str
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


class _CompletionBody(_Body, kw_only=True):
    prompt: str | list[int | str | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


class _ChatBody(_Body, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    function_call: Any = None
    chat_template_kwargs: dict[str, Any] | None = None


def parse_completion(body: bytes, model: ModelFacts, role: str) -> GenerationRequest:
    """`role` (``prefill``, ``decode`` or ``both``) says what ``kv_transfer_params`` must be. Raises `ApiError`."""
    fields = decode(body, _CompletionBody)
    _check_model(fields.model, model)
    refuse_if(bool(fields.echo), "echo", "echo is not supported")
    refuse_if(bool(fields.suffix), "suffix", "suffix is not supported")
    n = 1 if fields.n is None else fields.n
    refuse_if(fields.best_of not in (None, n), "best_of", "best_of must equal n")
    max_tokens = fields.max_tokens
    return _request(
        fields,
        model,
        role,
        prompt=single_prompt(fields.prompt),
        num_logprobs=fields.logprobs,
        max_tokens=DEFAULT_COMPLETION_TOKENS if max_tokens is None else max_tokens,
    )


def parse_chat(body: bytes, model: ModelFacts, role: str) -> GenerationRequest:
    """`role` (``prefill``, ``decode`` or ``both``) says what ``kv_transfer_params`` must be. Raises `ApiError`."""
    fields = decode(body, _ChatBody)
    _check_model(fields.model, model)
    _refuse_forced_tools(fields)
    wants_logprobs = bool(fields.logprobs)
    refuse_if(bool(fields.top_logprobs) and not wants_logprobs, "top_logprobs", "top_logprobs needs logprobs: true")
    top_logprobs = _within("top_logprobs", fields.top_logprobs, 0, MAX_TOP_LOGPROBS) or 0
    max_tokens = fields.max_completion_tokens
    return _request(
        fields,
        model,
        role,
        prompt=Conversation(plain_messages(fields.messages), fields.tools or None, fields.chat_template_kwargs),
        num_logprobs=top_logprobs if wants_logprobs else None,
        max_tokens=fields.max_tokens if max_tokens is None else max_tokens,
    )


def _request(
    fields: _CompletionBody | _ChatBody,
    model: ModelFacts,
    role: str,
    *,
    prompt: Prompt,
    num_logprobs: int | None,
    max_tokens: int | None,
) -> GenerationRequest:
    """The part of the reading that both routes share."""
    _refuse_formats(fields)
    push, handoff = _transfer_params(fields.kv_transfer_params, role)
    num_sequences = _within("n", fields.n, 1, MAX_SEQUENCES) or 1
    _check_leg(push, handoff, num_sequences, bool(fields.stream))
    leg_ids = _ids_of(push, handoff)
    if handoff is not None:
        check_ids([handoff.first_token_id], model, "kv_transfer_params")
    if push is None:
        _check_budget(max_tokens, fields.min_tokens)
    return GenerationRequest(
        prompt=prompt if leg_ids is None else leg_ids,
        prompt_param=_prompt_param(fields) if leg_ids is None else "kv_transfer_params",
        sampling=_sampling(fields, num_logprobs, model),
        max_tokens=1 if push else max_tokens,
        min_tokens=_within("min_tokens", fields.min_tokens, 0) or 0,
        ignore_eos=bool(fields.ignore_eos),
        stop=_stop_strings(fields.stop),
        num_sequences=num_sequences,
        stream=bool(fields.stream),
        include_usage=bool(fields.stream_options and fields.stream_options.include_usage),
        push=push,
        handoff=handoff,
    )


def num_answer_tokens(request: GenerationRequest, num_prompt_tokens: int, model: ModelFacts) -> int:
    """Tokens the answer may have. Raises `ApiError` if prompt and answer do not fit into the context."""
    room = model.max_model_len - num_prompt_tokens
    wanted = room if request.max_tokens is None else request.max_tokens
    if room >= 1 and wanted <= room:
        return wanted
    limit = f"This model's maximum context length is {model.max_model_len} tokens"
    if room < 1:
        raise too_long(f"{limit}, the prompt has {num_prompt_tokens}.", request.prompt_param)
    raise too_long(
        f"{limit}, but {num_prompt_tokens + wanted} were requested "
        f"({num_prompt_tokens} in the prompt, {wanted} for the answer).",
        "max_tokens",
    )


def _transfer_params(raw: msgspec.Raw, role: str) -> tuple[PushParams | None, Handoff | None]:
    if bytes(raw) == b"null":
        return None, None
    try:
        names = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        if role == "prefill" or (role == "both" and "receivers" in names):
            return msgspec.json.decode(raw, type=PushParams), None
        return None, msgspec.json.decode(raw, type=Handoff)
    except msgspec.MsgspecError as error:
        raise ApiError(f"kv_transfer_params of a {role} leg: {error}", param="kv_transfer_params") from None


def _prompt_param(fields: _CompletionBody | _ChatBody) -> str:
    return "messages" if isinstance(fields, _ChatBody) else "prompt"


def _ids_of(push: PushParams | None, handoff: Handoff | None) -> list[int] | None:
    if handoff is not None:
        return handoff.prompt_token_ids
    return push.prompt_token_ids if push is not None else None


def _check_leg(push: PushParams | None, handoff: Handoff | None, num_sequences: int, is_streaming: bool) -> None:
    """A leg is one sequence; the prefill leg's reply carries the handoff and is therefore whole."""
    is_leg = push is not None or handoff is not None
    refuse_if(is_leg and num_sequences != 1, "n", "n must be 1 with kv_transfer_params")
    refuse_if(push is not None and is_streaming, "stream", "A prefill leg does not stream")


def _sampling(fields: _Body, num_logprobs: int | None, model: ModelFacts) -> SamplingParams:
    given = {name: getattr(fields, name) for name in _SAMPLING_FIELDS if getattr(fields, name) is not None}
    seed = fresh_seed() if fields.seed is None else fields.seed
    try:
        sampling = SamplingParams(seed=seed, logprobs=num_logprobs, **given)
        sampling.check_vocabulary(model.vocab_size)
    except SamplingError as error:
        raise ApiError(str(error), param=error.field) from None
    return sampling


_SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "logit_bias")


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    refuse_if(len(strings) > MAX_STOP_STRINGS, "stop", f"At most {MAX_STOP_STRINGS} stop strings are allowed")
    refuse_if("" in strings, "stop", "A stop string must not be empty")
    return strings


def _check_budget(max_tokens: int | None, min_tokens: int | None) -> None:
    _within("max_tokens", max_tokens, 1)
    if max_tokens is not None and min_tokens is not None:
        refuse_if(min_tokens > max_tokens, "min_tokens", "min_tokens must not exceed max_tokens")


def _check_model(name: str, model: ModelFacts) -> None:
    if name != model.name:
        raise model_not_found(name)


def _refuse_formats(fields: _Body) -> None:
    kind = (fields.response_format or {"type": "text"}).get("type")
    refuse_if(kind != "text", "response_format", f"response_format of type {kind!r} is not supported")


def _refuse_forced_tools(fields: _ChatBody) -> None:
    for name, choice in (("tool_choice", fields.tool_choice), ("function_call", fields.function_call)):
        refuse_if(choice not in (None, "none", "auto"), name, f"{name} must be 'none' or 'auto'")


def _within(param: str, value: int | None, low: int, high: int | None = None) -> int | None:
    """`value` itself. Raises `ApiError` outside of `low … high`, both included."""
    if value is not None and (value < low or (high is not None and value > high)):
        limits = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ApiError(f"{param} must be {limits}, not {value}", param=param)
    return value
