"""The step from what a client sends as a prompt to token ids: it is read strictly, rendered and tokenized once, off the
event loop.

`Tokenizer.encode` holds the GIL for as long as it runs, in a thread as well; `encode_batch_fast` releases it. Long
prompts therefore go through that call in a worker thread, and short ones, for which the hop costs more than the work,
through the same call in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import anyio.to_thread
import msgspec

from transfer.engine.api import ModelFacts
from transfer.engine.api_error import ApiError, refuse_if

SHORT_PROMPT_CHARS = 2_000
"""The length, in characters, up to which tokenizing takes about as long as handing it to a thread (some 0.2 ms)."""


_NOT_FOR_TEMPLATES = frozenset(
    {
        "conversation", "padding", "truncation", "max_length", "return_tensors", "return_dict",
        "return_assistant_tokens_mask", "tokenizer_kwargs", "processor_kwargs",
    }
)  # fmt: skip
"""The arguments of ``apply_chat_template`` that decide what it returns. No template sees them, so no client sets
them."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A `Conversation` is what a chat template renders. The contents of `messages` are plain strings, or None."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] | None = None
    """Holds the variables that the template sees besides those named here."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    """Tells whether the tokenizer adds its special tokens to those that the template has written."""


class ConversationBody(msgspec.Struct, kw_only=True):
    """`ConversationBody` holds the fields of a chat that decide about its prompt, under vLLM's names.

    The chat endpoint and ``/tokenize`` share them, so that both make the same ids of the same fields. A client's own
    ``chat_template`` is not among them: it would be the client's code, run here.
    """

    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None


Prompt = str | list[int] | Conversation
"""A prompt is text, token ids, or a conversation still to be rendered."""


class ChatTokenizer(Protocol):
    """A `ChatTokenizer` is the part of transformers' ``PreTrainedTokenizerFast`` that is used here."""

    @property
    def backend_tokenizer(self) -> Any: ...

    def apply_chat_template(self, conversation: list[dict[str, Any]], **kwargs: Any) -> Any: ...


class PromptEncoder:
    """A `PromptEncoder` turns prompts into token ids. It takes the tokenizer's truncation and padding away: a prompt is
    never changed."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()

    async def encode(self, prompt: Prompt, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the prompt's ids. A prompt of ids is returned as it is. Raises `ApiError` where the chat template
        refuses."""
        if isinstance(prompt, list):
            return prompt
        if isinstance(prompt, str) and len(prompt) <= SHORT_PROMPT_CHARS:
            return self._encode(prompt, add_special_tokens)
        return await anyio.to_thread.run_sync(self._encode, prompt, add_special_tokens, abandon_on_cancel=True)

    def _encode(self, prompt: str | Conversation, add_special_tokens: bool) -> list[int]:
        if isinstance(prompt, Conversation):
            add_special_tokens = prompt.add_special_tokens
            prompt = self._render(prompt)
        ids: list[int] = self._backend.encode_batch_fast([prompt], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def _render(self, conversation: Conversation) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                conversation.messages,
                **(conversation.template_kwargs or {})
                | {
                    "tools": conversation.tools,
                    "add_generation_prompt": conversation.add_generation_prompt,
                    "continue_final_message": conversation.continue_final_message,
                    "chat_template": None,  # the model's own: a client's would be its code run here
                    "tokenize": False,
                },
            )
        except Exception as error:  # foreign code, run on what the client sent
            raise ApiError(f"The chat template refuses the messages: {error}", param="messages") from None
        return text


def check_ids(ids: list[int], model: ModelFacts, param: str) -> None:
    """Raises `ApiError` unless there is an id and each is in the vocabulary."""
    refuse_if(not ids, param, "The prompt is empty")
    if min(ids) < 0 or max(ids) >= model.vocab_size:
        raise ApiError(f"Token ids must be from 0 to {model.vocab_size - 1}.", param=param)


def conversation_of(body: ConversationBody) -> Conversation:
    """Returns the conversation that `body` asks to have rendered. Raises `ApiError`, which names the field at fault."""
    refuse_if(body.messages is None, "messages", "messages is missing")
    continues = bool(body.continue_final_message)
    both = "continue_final_message and add_generation_prompt cannot both be true"
    adds_generation_prompt = body.add_generation_prompt is not False
    refuse_if(continues and adds_generation_prompt, "continue_final_message", both)
    return Conversation(
        plain_messages(body.messages or []),
        body.tools or None,
        _template_kwargs(body),
        add_generation_prompt=adds_generation_prompt,
        continue_final_message=continues,
        add_special_tokens=bool(body.add_special_tokens),
    )


def _template_kwargs(body: ConversationBody) -> dict[str, Any]:
    """Returns the template's variables. As in vLLM, the body's own fields take precedence over
    ``chat_template_kwargs``, and an effort turns thinking on or off unless the client has said so itself."""
    kwargs = {
        name: value for name, value in (body.chat_template_kwargs or {}).items() if name not in _NOT_FOR_TEMPLATES
    }
    if body.documents is not None:
        kwargs["documents"] = body.documents
    if body.reasoning_effort is not None:
        kwargs = {"enable_thinking": body.reasoning_effort != "none"} | kwargs
        kwargs["reasoning_effort"] = body.reasoning_effort
    return kwargs


def plain_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages with text parts joined to one string each. Raises `ApiError` for anything but text."""
    refuse_if(not messages, "messages", "messages is empty")
    return [_plain_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _plain_message(message: dict[str, Any], where: str) -> dict[str, Any]:
    refuse_if(not isinstance(message.get("role"), str), "messages", f"{where}.role must be a string")
    plain = message | {"content": _plain_content(message.get("content"), where)}
    if message.get("tool_calls"):
        plain["tool_calls"] = _calls_with_arguments(message["tool_calls"], where)
    return plain


def _plain_content(content: object, where: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, list) and all(_is_text(part) for part in content):
        return "\n".join(part["text"] for part in content)
    raise ApiError(f"{where}.content must be a string or a list of text parts", param="messages")


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _calls_with_arguments(calls: object, where: str) -> list[dict[str, Any]]:
    """Returns the calls with their arguments as objects, as chat templates want them. OpenAI sends arguments as JSON
    text."""
    try:
        return [
            call | {"function": call["function"] | {"arguments": _arguments_of(call["function"])}}
            for call in msgspec.convert(calls, list[dict[str, Any]])
        ]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ApiError(f"{where}.tool_calls must be a list of function calls", param="messages") from None


def _arguments_of(function: dict[str, Any]) -> Any:
    arguments = function["arguments"]
    return msgspec.json.decode(arguments or "{}") if isinstance(arguments, str) else arguments


def prompts_of(prompt: str | list[int | str | list[int]]) -> tuple[str | list[int], ...]:
    """Returns the prompts of a completion's body: one text or list of ids, or a list of either.

    Raises `ApiError` for an empty prompt, and for a list that mixes kinds.
    """
    refuse_if(not prompt, "prompt", "The prompt is empty")
    if isinstance(prompt, str):
        return (prompt,)
    ids = [item for item in prompt if isinstance(item, int)]
    if len(ids) == len(prompt):
        return (ids,)
    prompts = [item for item in prompt if not isinstance(item, int)]
    is_mixed = bool(ids) or len({type(item) for item in prompts}) > 1
    refuse_if(is_mixed, "prompt", "prompt mixes texts, ids and lists of ids; send prompts of one kind")
    empty = next((index for index, item in enumerate(prompts) if not item), None)
    refuse_if(empty is not None, "prompt", f"prompt[{empty}] is empty")
    return tuple(prompts)
