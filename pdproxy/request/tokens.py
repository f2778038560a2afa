"""How long a prompt is: exactly where the proxy has the model's tokenizer, else as a bound that is never too low.

Nobody waits for what is known at once, which is most: ids, a bound, a prompt seen before, a few words. Everything else
is counted in a small thread pool, while the event loop goes on.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

from pdproxy.config import Settings
from pdproxy.errors import BodyTooLarge, ConfigError, QueueFull
from pdproxy.request.chat_template import ChatTemplate
from pdproxy.request.lru import LruCache
from pdproxy.request.openai import GenerationRequest, PromptKind
from pdproxy.request.path import PromptSize
from pdproxy.request.tokenizer import FILE, FastTokenizer

log = logging.getLogger(__name__)

NUM_THREADS = 2
"""For long prompts, and as many for the others, which do not wait behind those."""
LONG_BYTES = 64 << 10
MAX_WAITING_BYTES = 64 << 20
"""Of prompts that wait for a thread. It takes the threads a few seconds to count them."""
FEW_BYTES = 512
"""Up to here counting takes about as long as handing it to a thread."""
FEW_TOKENS = 1024
"""A prompt that has no more for certain need not be counted, where ids are of no use: what is held too much for it is
little, and is given back with the prefiller's reply."""
KNOWN_BYTES = 16 << 10
"""Larger prompts are looked up in a thread."""
CACHE_BYTES = 16 << 20
TEMPLATE_TOKENS = 512
"""Room for what a chat template adds of its own: a default system prompt, the wording around tools."""
MESSAGE_TOKENS = 16
"""Room for what a chat template puts around one message."""
SWITCH_INTERVAL_S = 0.0005
"""For which Python lets a thread that counts keep others waiting."""

NICER = 10
"""Threads that count are so much nicer than the process: where there is one core for all, the event loop goes first."""
_BYTES_PER_ID = 40
"""In a list."""
_TEXT_MATTERS = ("prompt", "add_special_tokens")
_CHAT_MATTERS = ("messages", "tools", "add_generation_prompt", "chat_template_kwargs")
"""Fields that make a prompt what it is."""
_RENDERED_OTHERWISE = ("chat_template", "continue_final_message")


def _always() -> bool:
    return True


def _step_back() -> None:
    """Of the thread that runs this. (On Linux niceness is a thread's; elsewhere it would be the whole process's.)"""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + NICER))


class PromptSizer(Protocol):
    """Measures prompts. Both ways raise `BodyTooLarge` for one that nobody may send."""

    def size_now(self, request: GenerationRequest) -> PromptSize | None:
        """What is known without waiting; None where `size` has to be awaited."""

    async def size(self, request: GenerationRequest) -> PromptSize:
        """Raises `InvalidRequest` where the model's chat template refuses the messages; `QueueFull` where too much
        waits to be counted."""

    def close(self) -> None: ...


def size_without_tokenizer(request: GenerationRequest) -> PromptSize:
    """Ids are counted; text is bounded by its UTF-8 bytes, which no byte-level vocabulary exceeds.

    The raw JSON of the field is at least as long as the text it stands for.
    """
    if request.num_prompt_ids is not None:
        return PromptSize(tokens=request.num_prompt_ids, is_exact=True)
    bound = request.num_prompt_bytes
    if request.is_chat:
        num_tools_bytes = len(memoryview(request.fields.get("tools", b"")))
        bound += num_tools_bytes + TEMPLATE_TOKENS + MESSAGE_TOKENS * request.num_messages
    return PromptSize(tokens=bound, is_exact=False)


class ByteSizer:
    """Implements `PromptSizer` without a model. `max_bytes` of a prompt's JSON are taken."""

    def __init__(self, max_bytes: int = sys.maxsize) -> None:
        self._max_bytes = max_bytes

    def size_now(self, request: GenerationRequest) -> PromptSize:
        _check_bytes(request, self._max_bytes)
        return size_without_tokenizer(request)

    async def size(self, request: GenerationRequest) -> PromptSize:
        return self.size_now(request)

    def close(self) -> None:
        """Nothing is held."""


class TokenizerSizer:
    """Implements `PromptSizer` with the tokenizer in the model folder `path`. Raises `ConfigError` where there is none.

    `wants_ids`: engines there are now take ids, so that every prompt is counted and its ids are told. Else prompts that
    are clearly small are not counted, except where their length decides on their way (`min_prompt_tokens`).

    Mutable state: the prompts seen; bytes of those that wait for a thread. The tokenizer and the template have their
    own.
    """

    def __init__(
        self,
        path: Path,
        *,
        wants_ids: Callable[[], bool] = _always,
        min_prompt_tokens: int = 0,
        max_bytes: int = sys.maxsize,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
    ) -> None:
        self._tokenizer = FastTokenizer(path)
        self._template = ChatTemplate(path)
        self._wants_ids = wants_ids
        self._min_prompt_tokens = min_prompt_tokens
        self._max_bytes = max_bytes
        self._max_waiting_bytes = max_waiting_bytes
        self._seen: LruCache[PromptSize] = LruCache(CACHE_BYTES)
        self._num_waiting_bytes = 0
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokens", initializer=_step_back)
        self._threads_for_long = ThreadPoolExecutor(
            NUM_THREADS, thread_name_prefix="tokens-of-long", initializer=_step_back
        )
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))

    def size_now(self, request: GenerationRequest) -> PromptSize | None:
        _check_bytes(request, self._max_bytes)
        if not _is_countable(request):
            return size_without_tokenizer(request)
        wants_ids = self._wants_ids()
        if not wants_ids and self._is_clearly_small(bound := size_without_tokenizer(request)):
            return bound
        if (key := _key(request)) is None:
            return None
        size = self._seen.get(key)
        if size is not None and (size.ids is not None or not wants_ids):
            return size
        has_few = request.num_prompt_bytes <= FEW_BYTES and not request.is_chat
        return self._measure(request) if has_few else None

    async def size(self, request: GenerationRequest) -> PromptSize:
        size = self.size_now(request)
        if size is not None:
            return size
        num_bytes = request.num_prompt_bytes
        if self._num_waiting_bytes and self._num_waiting_bytes + num_bytes > self._max_waiting_bytes:
            raise QueueFull("too many prompts wait to be counted; try again", retry_after_s=1.0)
        threads = self._threads if num_bytes <= LONG_BYTES else self._threads_for_long
        self._num_waiting_bytes += num_bytes
        try:
            return await asyncio.get_running_loop().run_in_executor(threads, self._measure, request)
        finally:
            self._num_waiting_bytes -= num_bytes

    def close(self) -> None:
        for threads in (self._threads, self._threads_for_long):
            threads.shutdown(wait=False, cancel_futures=True)

    def _is_clearly_small(self, bound: PromptSize) -> bool:
        return bound.tokens <= FEW_TOKENS and not 0 < self._min_prompt_tokens <= bound.tokens

    def _measure(self, request: GenerationRequest) -> PromptSize:
        text, add_special_tokens = request.prompt_text, request.value("add_special_tokens") is not False
        if text is None:
            text, add_special_tokens = self._render(request), False  # the template writes them
        if self._wants_ids():
            ids = self._tokenizer.ids(text, add_special_tokens=add_special_tokens)
            size = PromptSize(tokens=len(ids), is_exact=True, ids=ids)
        else:
            size = PromptSize(tokens=self._tokenizer.count(text, add_special_tokens=add_special_tokens), is_exact=True)
        if (key := _key(request)) is not None and (not request.is_chat or self._template.is_timeless):
            self._seen.put(key, size, _BYTES_PER_ID * len(size.ids or ()))
        return size

    def _render(self, request: GenerationRequest) -> str:
        return self._template.render(
            request.value("messages"),
            tools=request.value("tools"),
            add_generation_prompt=request.value("add_generation_prompt"),
            kwargs=request.value("chat_template_kwargs") or {},
        )


class ModelSizers:
    """Implements `PromptSizer`: each model's prompts are measured as its own sizer does, the rest by `otherwise`."""

    def __init__(self, by_model: Mapping[str, PromptSizer], otherwise: PromptSizer) -> None:
        self._by_model = dict(by_model)
        self._otherwise = otherwise

    def size_now(self, request: GenerationRequest) -> PromptSize | None:
        return self._of(request).size_now(request)

    async def size(self, request: GenerationRequest) -> PromptSize:
        return await self._of(request).size(request)

    def close(self) -> None:
        for sizer in (*self._by_model.values(), self._otherwise):
            sizer.close()

    def _of(self, request: GenerationRequest) -> PromptSizer:
        return self._by_model.get(request.model or "", self._otherwise)


def make_sizer(settings: Settings, wants_ids: Callable[[], bool] = _always) -> PromptSizer:
    """Of the options ``model`` and ``models``. Raises `ConfigError` naming the one at fault."""
    otherwise: PromptSizer = ByteSizer(settings.max_prompt_bytes)
    if settings.model is not None:
        otherwise = _folder_sizer("model", settings.model, settings, wants_ids)
    if not settings.models:
        return otherwise
    by_model = {one.name: _folder_sizer("models.path", one.path, settings, wants_ids) for one in settings.models}
    return ModelSizers(by_model, otherwise)


def _folder_sizer(option: str, path: Path, settings: Settings, wants_ids: Callable[[], bool]) -> PromptSizer:
    """Exact where the folder has a tokenizer; one without may still tell the KV's size."""
    if not path.is_dir():
        raise ConfigError(f"{option}: there is no folder {path}, nor a model of that name in the Hugging Face cache")
    if not (path / FILE).exists():
        log.warning("%s: %s has no tokenizer; prompts are counted in bytes", option, path)
        return ByteSizer(settings.max_prompt_bytes)
    return TokenizerSizer(
        path,
        wants_ids=wants_ids,
        min_prompt_tokens=settings.min_prompt_tokens,
        max_bytes=settings.max_prompt_bytes,
    )


def _check_bytes(request: GenerationRequest, max_bytes: int) -> None:
    """Raises `BodyTooLarge`. What is not text is not counted, and may be large."""
    if request.num_prompt_bytes > max_bytes and not request.has_media:
        field = request.prompt_field
        raise BodyTooLarge(
            f"{field} has {request.num_prompt_bytes} bytes, and {max_bytes} are taken (max_prompt_bytes); shorten it",
            param=field,
            code="prompt_too_large",
        )


def _is_countable(request: GenerationRequest) -> bool:
    """False where the ids are known anyway, or the engine would render something that is not known here."""
    if request.prompt_kind in (PromptKind.IDS, PromptKind.BATCH) or request.has_media:
        return False
    return not any(name in request.fields and request.value(name) for name in _RENDERED_OTHERWISE)


def _key(request: GenerationRequest) -> bytes | None:
    """Equal for requests of the same prompt; None where that would take too long to work out."""
    if request.num_prompt_bytes > KNOWN_BYTES:
        return None
    names = _CHAT_MATTERS if request.is_chat else _TEXT_MATTERS
    matters = b"\0".join([request.fields.get(name, b"") for name in names])  # no zero byte is in JSON
    return blake2b(matters, digest_size=16).digest() if len(matters) <= KNOWN_BYTES else None
