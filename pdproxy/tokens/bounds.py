"""The module computes how many tokens a prompt has at most, without a tokenizer. It does no I/O.

A vocabulary that falls back to bytes makes at most one token of each byte of a text. But tokenizers normalise first,
and Unicode's normal forms make text longer: up to threefold where accents are taken apart, elevenfold in the worst
case. ASCII stays as it is. So the other characters are weighed, each kind of them once.

A chat is more than its text: its template adds words of its own. The engine showed how many (`ChatFrame`). What a
template makes of tools, documents and the like has no useful bound: those chats are not `is_plain`.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache
from typing import Final, Literal, NamedTuple

from pdproxy.openai.request import GenerationRequest, PromptKind
from pdproxy.tokens.prompt_size import PromptSize

_ESCAPE: Final = re.compile(rb"\\u([0-9a-fA-F]{4})")
_ESCAPE_BYTES: Final = 6
_FORMS: Final[tuple[Literal["NFC", "NFD", "NFKC", "NFKD"], ...]] = ("NFC", "NFD", "NFKC", "NFKD")
_UNSET: Final = (b"null", b"[]", b"{}", b'""', b"false")
_FOR_TEMPLATES: Final = frozenset({
    "tools", "functions", "documents", "reasoning_effort", "chat_template", "chat_template_kwargs", "response_format",
    "mm_processor_kwargs", "media_io_kwargs",
})  # fmt: skip
"""The fields of which a template, or what an engine has in its place, may write something, besides the messages."""


class ChatFrame(NamedTuple):
    """A `ChatFrame` counts the tokens which a model's chat template adds to the text of the messages.

    The defaults are for a template that nobody has seen. The longest default system prompts in use have some 1,000
    tokens.
    """

    tokens: int = 2048
    """The number of tokens added to any chat: a default system prompt, and the words after which the answer begins."""
    message_tokens: int = 16
    """The number of tokens added to each message."""


UNSEEN: Final = ChatFrame()


def size_without_tokenizer(request: GenerationRequest, frame: ChatFrame = UNSEEN) -> PromptSize:
    """Returns the number of ids where the client sent ids, else an upper bound. For a chat that is not `is_plain` the
    bound is only a guess.

    The prompt's JSON is at least as long as the text it stands for. Its quotes have room for special tokens.
    """
    if request.num_prompt_ids is not None:
        return PromptSize(tokens=request.num_prompt_ids, is_exact=True)
    bound = request.num_prompt_bytes
    if request.prompt_kind is PromptKind.API:
        return PromptSize(tokens=bound + frame.tokens + frame.message_tokens * request.num_messages, is_exact=False)
    if not request.is_ascii:
        bound = most_bytes(bytes(request.fields[request.prompt_field]))
    if request.is_chat:
        bound += frame.tokens + frame.message_tokens * request.num_messages
        if not _FOR_TEMPLATES.isdisjoint(request.fields):
            written = _FOR_TEMPLATES.intersection(request.fields)
            bound += sum(most_bytes(bytes(request.fields[name])) for name in written)
    return PromptSize(tokens=bound, is_exact=False)


def is_plain(request: GenerationRequest) -> bool:
    """Tells whether `size_without_tokenizer` is a bound. It is one for a text, and for a chat whose template gets
    nothing but text.
    """
    if not request.is_chat:
        return True
    if not request.has_text_only:
        return False
    if _FOR_TEMPLATES.isdisjoint(request.fields):
        return True
    written = _FOR_TEMPLATES.intersection(request.fields)
    return all(bytes(request.fields[name]) in _UNSET for name in written)


def most_bytes(raw: bytes) -> int:
    """Returns how many UTF-8 bytes the text in `raw`, which is JSON, may have at most once it is normalised."""
    bound = len(raw)
    if raw.find(b"\\") >= 0:  # one byte is found fifty times sooner than two
        escapes = _ESCAPE.findall(raw)
        bound += len(escapes) * max((_growth_of_escape(digits) for digits in {e.lower() for e in escapes}), default=0)
    if not raw.isascii():
        text = raw.decode()
        num_others = len(text) - len(text.encode("ascii", "ignore"))
        bound += num_others * max(map(_growth, set(text)))
    return bound


def _growth_of_escape(digits: bytes) -> int:
    """Returns by how many bytes a character may be longer than its escape. The two escapes of a surrogate pair always
    have room for their character.
    """
    code = int(digits, 16)
    return 0 if 0xD800 <= code < 0xE000 else max(0, _most_bytes_of(chr(code)) - _ESCAPE_BYTES)


@lru_cache(maxsize=1 << 16)
def _growth(character: str) -> int:
    return _most_bytes_of(character) - len(character.encode("utf-8", "surrogatepass"))


def _most_bytes_of(character: str) -> int:
    """Returns the most UTF-8 bytes that `character` has in any normal form, in lower case or as it is."""
    return max(
        len(unicodedata.normalize(form, letter).encode("utf-8", "surrogatepass"))
        for form in _FORMS
        for letter in (character, character.lower())
    )
