"""From what a client sends as a prompt to token ids: strictly read, rendered and tokenized once, off the event loop.

`Tokenizer.encode` holds the GIL for as long as it runs, in a thread as well; `encode_batch_fast` releases it. Long
prompts therefore go through that call in a worker thread, and short ones, for which the hop costs more than the
work, through the same call in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import anyio.to_thread
import msgspec

from transfer.engine.api import ModelFacts
from transfer.engine.api_error import ApiError, refuse_if

SHORT_PROMPT_CHARS = 2_000
"""Up to here tokenizing takes about as long as handing it to a thread (some 0.2 ms)."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a chat template renders; the contents of `messages` are plain strings, or None."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True


Prompt = str | list[int] | Conversation
"""Text, token ids, or a conversation still to be rendered."""


class ChatTokenizer(Protocol):
    """What is used of transformers' ``PreTrainedTokenizerFast``."""

    @property
    def backend_tokenizer(self) -> Any: ...

    def apply_chat_template(self, conversation: list[dict[str, Any]], **kwargs: Any) -> Any: ...


class PromptEncoder:
    """Turns prompts into token ids. Takes the tokenizer's truncation and padding away: a prompt is never changed."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()

    async def encode(self, prompt: Prompt, *, add_special_tokens: bool = True) -> list[int]:
        """The ids; ids are returned as they are. Raises `ApiError` where the chat template refuses."""
        if isinstance(prompt, list):
            return prompt
        if isinstance(prompt, str) and len(prompt) <= SHORT_PROMPT_CHARS:
            return self._encode(prompt, add_special_tokens)
        return await anyio.to_thread.run_sync(self._encode, prompt, add_special_tokens, abandon_on_cancel=True)

    def _encode(self, prompt: str | Conversation, add_special_tokens: bool) -> list[int]:
        if isinstance(prompt, Conversation):
            prompt, add_special_tokens = self._render(prompt), False  # the template writes them
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


def plain_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with text parts joined to one string each. Raises `ApiError` for anything but text."""
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
    """Chat templates want a call's arguments as an object; OpenAI sends them as JSON text."""
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


def single_prompt(prompt: str | list[int | str | list[int]]) -> str | list[int]:
    """Text or ids, also as the only element of a list."""
    refuse_if(not prompt, "prompt", "The prompt is empty")
    if isinstance(prompt, str):
        return prompt
    ids = [item for item in prompt if isinstance(item, int)]
    if len(ids) == len(prompt):
        return ids
    refuse_if(len(prompt) != 1, "prompt", "Several prompts in one request are not supported")
    only = prompt[0]
    assert not isinstance(only, int)
    refuse_if(not only, "prompt", "The prompt is empty")
    return only
