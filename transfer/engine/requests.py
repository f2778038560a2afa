"""The bodies of ``/v1/completions`` and ``/v1/chat/completions``. They are read strictly, and refused by field name.

Both become one `GenerationRequest`, which is free of wire names. A field that OpenAI defines and this engine does not
know is ignored; a field that asks for what this engine cannot do (a forced tool call, a JSON schema) is refused,
because an answer that silently lacks it would be wrong.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from transfer.engine.api import ModelFacts
from transfer.engine.api_error import ApiError, model_not_found, refuse_if, too_long
from transfer.engine.asgi import decode
from transfer.engine.prompts import ConversationBody, Prompt, check_ids, conversation_of, prompts_of
from transfer.engine.sampling import MAX_TOP_LOGPROBS, SamplingError, SamplingParams, fresh_seed
from transfer.wire import Handoff, PushParams, ResumeParams

MAX_STOP_STRINGS = 16
"""The most stop strings of one body."""
MAX_SEQUENCES = 128
"""The most answers to one body: its prompts, times `n`."""
DEFAULT_COMPLETION_TOKENS = 16
"""The most tokens of a completion whose body has no ``max_tokens``: the default of the OpenAI API."""

Transfer = PushParams | Handoff | ResumeParams
"""The kinds of ``kv_transfer_params``: of a prefill leg, of a decode leg, of an answer resumed without a transfer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A `GenerationRequest` is a body that has been validated, except the prompts' ids and lengths.

    `num_sequences` answers to each of `prompts` are wanted; a leg of an attempt has one prompt and one answer.
    """

    prompts: tuple[Prompt, ...]
    prompt_param: str
    """The field in which the client sent the prompt."""
    adds_special_tokens: bool
    """Tells whether a text gets the tokenizer's special tokens. A conversation says so itself."""
    sampling: SamplingParams
    """The parameters of the first answer to the first prompt; see `has_own_seed`."""
    has_own_seed: bool
    """Tells whether the client chose the seed. Then every prompt is answered as if it were asked alone. Otherwise each
    gets a seed of its own, because equal prompts in one body ask for different answers."""
    max_tokens: int | None
    """The most tokens of the answer. None means as many as the context leaves room for."""
    min_tokens: int
    ignore_eos: bool
    stop: tuple[str, ...]
    num_sequences: int
    stream: bool
    include_usage: bool
    return_token_ids: bool
    """Tells whether every choice, and every choice of a chunk, carries ``token_ids``, which is vLLM's field: the ids of
    the answer's tokens since the last chunk. All of them are there, end-of-sequence and those of a stop string too, so
    their number is the usage's ``completion_tokens`` (less those shown before, where an answer is resumed). An id whose
    text has to wait comes with the next chunk, and the finish reason with the last text: however a stream is cut
    between two events, its ids so far are just what is needed to resume it."""
    num_answer_tokens: int
    """Counts the ids at the end of the prompt that are the answer's first tokens. Above 0 the prompt is a list of
    ids."""
    push: PushParams | None
    handoff: Handoff | None
    term: int | None = None
    """The term of the leader for whom this is asked, which comes in a header; None where none was told."""

    def of_term(self, term: int) -> GenerationRequest:
        """Returns this request with its term, which goes on to the decoder with the KV."""
        push = None if self.push is None else msgspec.structs.replace(self.push, term=term)
        return replace(self, term=term, push=push)


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Body(msgspec.Struct, kw_only=True):
    """`_Body` holds the fields that both routes have."""

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
    return_token_ids: bool | None = None
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


class _CompletionBody(_Body, kw_only=True):
    prompt: str | list[int | str | list[int]]
    logprobs: int | None = None
    add_special_tokens: bool | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


class _ChatBody(_Body, kw_only=True):
    """`_ChatBody` holds a chat's fields except those that decide about its prompt."""

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: Any = None
    function_call: Any = None


def parse_completion(body: bytes, model: ModelFacts, role: str) -> GenerationRequest:
    """Reads the body of a completion. `role` (``prefill``, ``decode`` or ``both``) says what ``kv_transfer_params``
    must be. Raises `ApiError`."""
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
        prompts=prompts_of(fields.prompt),
        adds_special_tokens=fields.add_special_tokens is not False,
        num_logprobs=fields.logprobs,
        max_tokens=DEFAULT_COMPLETION_TOKENS if max_tokens is None else max_tokens,
    )


def parse_chat(body: bytes, model: ModelFacts, role: str) -> GenerationRequest:
    """Reads the body of a chat. `role` (``prefill``, ``decode`` or ``both``) says what ``kv_transfer_params`` must be.
    Raises `ApiError`."""
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
        prompts=(conversation_of(decode(body, ConversationBody)),),
        num_logprobs=top_logprobs if wants_logprobs else None,
        max_tokens=fields.max_tokens if max_tokens is None else max_tokens,
    )


def _request(
    fields: _CompletionBody | _ChatBody,
    model: ModelFacts,
    role: str,
    *,
    prompts: tuple[Prompt, ...],
    num_logprobs: int | None,
    max_tokens: int | None,
    adds_special_tokens: bool = True,
) -> GenerationRequest:
    """Does the part of the reading that both routes share."""
    _refuse_formats(fields)
    transfer = _transfer_params(fields.kv_transfer_params, role)
    push = transfer if isinstance(transfer, PushParams) else None
    handoff = transfer if isinstance(transfer, Handoff) else None
    num_sequences = _within("n", fields.n, 1, MAX_SEQUENCES) or 1
    too_many = f"n times the number of prompts must be at most {MAX_SEQUENCES}; send the prompts in several requests"
    refuse_if(len(prompts) * num_sequences > MAX_SEQUENCES, "prompt", too_many)
    refuse_if(transfer is not None and num_sequences != 1, "n", "n must be 1 with kv_transfer_params")
    refuse_if(transfer is not None and len(prompts) != 1, "prompt", "There must be one prompt with kv_transfer_params")
    refuse_if(push is not None and bool(fields.stream), "stream", "A prefill leg does not stream")
    leg_ids = transfer.prompt_token_ids if transfer is not None else None
    num_shown = _num_shown_before(transfer)
    if handoff is not None:
        check_ids([handoff.first_token_id], model, "kv_transfer_params")
    if push is None:
        _check_budget(max_tokens, fields.min_tokens)
    return GenerationRequest(
        prompts=prompts if leg_ids is None else (leg_ids,),
        prompt_param=_prompt_param(fields) if leg_ids is None else "kv_transfer_params",
        adds_special_tokens=adds_special_tokens,
        sampling=_sampling(fields, num_logprobs, model),
        has_own_seed=fields.seed is not None,
        max_tokens=num_shown + 1 if push else max_tokens,
        min_tokens=_within("min_tokens", fields.min_tokens, 0) or 0,
        ignore_eos=bool(fields.ignore_eos),
        stop=_stop_strings(fields.stop),
        num_sequences=num_sequences,
        stream=bool(fields.stream),
        include_usage=bool(fields.stream_options and fields.stream_options.include_usage),
        return_token_ids=bool(fields.return_token_ids),
        num_answer_tokens=num_shown,
        push=push,
        handoff=handoff,
    )


def prompt_params(request: GenerationRequest) -> list[str]:
    """Returns for each prompt the field that an error about it names: with its index where there are several."""
    name, count = request.prompt_param, len(request.prompts)
    return [name] if count == 1 else [f"{name}[{index}]" for index in range(count)]


def max_answer_tokens(request: GenerationRequest, num_prompt_tokens: int, model: ModelFacts, param: str) -> int:
    """Returns the tokens that a whole answer to a prompt of `num_prompt_tokens` may have.

    Raises `ApiError` if prompt and answer do not fit into the context; `param` is the prompt's field.
    """
    room = model.max_model_len - num_prompt_tokens
    wanted = room if request.max_tokens is None else request.max_tokens
    if room >= 1 and wanted <= room:
        return wanted
    limit = f"This model's maximum context length is {model.max_model_len} tokens"
    if room < 1:
        raise too_long(f"{limit}, the prompt has {num_prompt_tokens}.", param)
    raise too_long(
        f"{limit}, but {num_prompt_tokens + wanted} were requested "
        f"({num_prompt_tokens} in the prompt, {wanted} for the answer).",
        "max_tokens",
    )


def _transfer_params(raw: msgspec.Raw, role: str) -> Transfer | None:
    if bytes(raw) == b"null":
        return None
    try:
        names = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        return msgspec.json.decode(raw, type=_kind_of(names.keys(), role))
    except msgspec.MsgspecError as error:
        raise ApiError(f"kv_transfer_params of a {role} leg: {error}", param="kv_transfer_params") from None


def _kind_of(names: Collection[str], role: str) -> type[Transfer]:
    """Returns the kind of params, by the names that are there. A resumption belongs to no attempt."""
    if "attempt" not in names and "num_answer_tokens" in names:
        return ResumeParams
    return PushParams if role == "prefill" or (role == "both" and "receivers" in names) else Handoff


def _num_shown_before(transfer: Transfer | None) -> int:
    """Returns how many of the ids are the answer's tokens. Raises `ApiError` unless at least one id is the prompt's."""
    if transfer is None or transfer.num_answer_tokens == 0:
        return 0
    num_shown, num_ids = transfer.num_answer_tokens, len(transfer.prompt_token_ids or [])
    message = f"num_answer_tokens is {num_shown}, and there are {num_ids} prompt_token_ids"
    refuse_if(not 0 < num_shown < num_ids, "kv_transfer_params", message)
    return num_shown


def _prompt_param(fields: _CompletionBody | _ChatBody) -> str:
    return "messages" if isinstance(fields, _ChatBody) else "prompt"


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
    """Returns `value`. Raises `ApiError` where it is outside of `low … high`, both included."""
    if value is not None and (value < low or (high is not None and value > high)):
        limits = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ApiError(f"{param} must be {limits}, not {value}", param=param)
    return value
