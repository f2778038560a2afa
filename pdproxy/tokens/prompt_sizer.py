"""The module tells how long a prompt is: exactly where the proxy has the model's tokenizer, else as an engine tells,
else by an upper bound.

No request waits for what is known at once, which is most: ids, a bound that costs little, a prompt seen before, a few
words. A longer text is counted in a small thread pool, while the event loop goes on. The proxy renders no chat itself:
a chat's template is a program, and engines differ in what they hand it. So an engine is asked where a bound is not
enough.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Final, Protocol

from pdproxy.config.settings import Settings
from pdproxy.errors import BodyTooLarge, ConfigError, EngineReply, NotCounted, QueueFull
from pdproxy.openai.request import GenerationRequest, PromptKind
from pdproxy.tokens.bounds import UNSEEN, ChatFrame, is_plain, size_without_tokenizer
from pdproxy.tokens.lru import LruCache
from pdproxy.tokens.prompt_size import PromptSize
from pdproxy.tokens.tokenizer import FILE, FastTokenizer

log = logging.getLogger(__name__)

NUM_TOKENIZERS: Final = 8
"""The most tokenizers that are kept, for sizers that are made anew."""
NUM_THREADS: Final = 2
"""The number of threads that count long prompts. The other prompts have as many threads of their own, so that they do
not wait behind long ones.
"""
LONG_BYTES: Final = 64 << 10
MAX_WAITING_BYTES: Final = 64 << 20
"""The most bytes of prompts that wait for threads, unless one prompt alone has more. The threads count this many in a
few seconds.
"""
FEW_BYTES: Final = 512
"""The prompt length in bytes up to which counting takes no longer than handing the prompt to a thread."""
FEW_TOKENS: Final = 1024
"""The number of tokens up to which a prompt need not be counted where ids are of no use. The pages held too much for it
are few, and are given back with the prefiller's reply.
"""
KNOWN_BYTES: Final = 16 << 10
"""The prompt length in bytes up to which a size that is known is used at once. A longer prompt goes to a thread."""
CACHE_BYTES: Final = 16 << 20
COUNT_S: Final = 2.0
"""The seconds that a request waits for a thread to count it. A thread cannot be interrupted: after this time the prompt
is sized in another way, and the thread is left to end by itself.
"""
SWITCH_INTERVAL_S: Final = 0.0005
"""The seconds for which Python lets a thread that counts keep other threads waiting."""

NICER: Final = 10
"""The number by which threads that count are nicer than the process. Where there is one core for all, the event loop
goes first.
"""
_BYTES_PER_ID: Final = 40
"""The number of bytes that one id in a list takes."""
_TEXT_MATTERS: Final = ("prompt", "add_special_tokens")
"""The fields which decide which tokens a text has."""
_NO_HEADERS: Final[Mapping[str, str]] = {}
_TEXT: Final = PromptKind.TEXT
_CHAT: Final = PromptKind.CHAT


def _step_back() -> None:
    """Makes the thread that runs this nicer by `NICER`, on Linux only. (Elsewhere niceness belongs to the whole
    process.)
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + NICER))


class Engines(Protocol):
    """`Engines` is what sizers need of the engines that serve a model."""

    def agree(self, model: str | None) -> bool:
        """Tells whether the engines tokenize as the proxy does, as far as was seen."""

    def take_ids(self, model: str | None) -> bool:
        """Tells whether the engines are given ids where the proxy has them."""

    def frame(self, model: str | None) -> ChatFrame: ...

    def have_pages(self, model: str | None) -> bool:
        """Tells whether pages of some engine have a size in tokens, so that it matters how long a prompt is."""

    def need_length(self, request: GenerationRequest) -> bool:
        """Tells whether pages are counted for the request."""

    def have_plenty(self, model: str | None, num_tokens: int) -> bool:
        """Tells whether pages for so many more tokens can be spared for a while."""

    def need_ids(self, request: GenerationRequest) -> bool:
        """Tells whether no pair can serve the request unless its ids are known. False wherever `need_length` is
        False.
        """

    def wants_ids(self, request: GenerationRequest) -> bool:
        """Tells whether the prompt's ids are worth a call to an engine: by them it is known who has the prompt in a
        cache.
        """

    async def count(self, request: GenerationRequest, headers: Mapping[str, str]) -> PromptSize | None:
        """Returns the prompt's size as an engine tells it; None where no engine does.

        Raises `EngineReply` where an engine refuses the prompt.
        """


class NoEngines:
    """Implements `Engines` where there is no engine to ask. The proxy then goes by its own measurement alone."""

    def agree(self, model: str | None) -> bool:
        return True

    def take_ids(self, model: str | None) -> bool:
        return True

    def frame(self, model: str | None) -> ChatFrame:
        return UNSEEN

    def have_pages(self, model: str | None) -> bool:
        return True

    def need_length(self, request: GenerationRequest) -> bool:
        return False

    def have_plenty(self, model: str | None, num_tokens: int) -> bool:
        return True

    def need_ids(self, request: GenerationRequest) -> bool:
        return False

    def wants_ids(self, request: GenerationRequest) -> bool:
        return False

    async def count(self, request: GenerationRequest, headers: Mapping[str, str]) -> PromptSize | None:
        return None


class PromptSizer(Protocol):
    """A `PromptSizer` measures prompts. `size_now` and `size` raise `BodyTooLarge` for a prompt that is too large to be
    taken.
    """

    def size_now(self, request: GenerationRequest) -> PromptSize | None:
        """Returns the size that is known without waiting; None where the caller has to await `size`."""

    async def size(self, request: GenerationRequest, headers: Mapping[str, str] = _NO_HEADERS) -> PromptSize:
        """Returns the prompt's size. `headers` go with a call to an engine.

        Raises `EngineReply` where an engine refuses the prompt, `NotCounted` where nobody can tell its length and it
        has no bound, and `QueueFull` where too much waits to be counted.
        """

    async def ids(self, request: GenerationRequest, headers: Mapping[str, str] = _NO_HEADERS) -> list[int] | None:
        """Returns the prompt's ids; None where nobody tells them. Raises nothing."""

    def tokenizer(self, model: str | None) -> FastTokenizer | None:
        """Returns the tokenizer by which texts for `model` are counted here; None where there is none."""

    def close(self) -> None: ...


class ByteSizer:
    """Implements `PromptSizer` without a model: by a bound, or by asking `engines`.

    The engines are asked in five cases: where the bound would hold many more pages than the prompt needs while pages
    are few, where the bound does not tell whether the prompt is shorter than `min_prompt_tokens`, where there is no
    bound, and where ids are needed or tell who has the prompt in a cache. A prompt's JSON may have at most `max_bytes`.
    """

    def __init__(
        self, max_bytes: int = sys.maxsize, *, engines: Engines | None = None, min_prompt_tokens: int = 0
    ) -> None:
        self._max_bytes = max_bytes
        self._engines = engines or NoEngines()
        self._min_prompt_tokens = min_prompt_tokens

    def size_now(self, request: GenerationRequest) -> PromptSize | None:
        _check_bytes(request, self._max_bytes)
        if not _has_one_text(request):
            return self._bound(request)
        if self._engines.wants_ids(request):
            return None
        if not self._engines.have_pages(request.model):
            return _any_size(request)
        bound = self._bound(request)
        is_cheap = self.is_clearly_small(bound) or self._is_cheap_now(request.model, bound)
        is_asked = self._engines.need_ids if is_cheap and is_plain(request) else self._engines.need_length
        return None if is_asked(request) else bound

    async def size(self, request: GenerationRequest, headers: Mapping[str, str] = _NO_HEADERS) -> PromptSize:
        size = self.size_now(request) or await self._engines.count(request, headers)
        if size is not None:
            return size
        if not self._engines.have_pages(request.model):
            return _any_size(request)
        # Without its ids no pair serves it, so that no pages are counted: any size will do.
        if is_plain(request) or self._engines.need_ids(request):
            return self._bound(request)
        raise NotCounted("no engine told how long the messages are; try again", retry_after_s=1.0)

    async def ids(self, request: GenerationRequest, headers: Mapping[str, str] = _NO_HEADERS) -> list[int] | None:
        if not _has_one_text(request):
            return None
        with suppress(EngineReply):
            size = await self._engines.count(request, headers)
            return None if size is None else size.ids
        return None

    def tokenizer(self, model: str | None) -> None:
        """Returns None: there is no tokenizer here."""

    def close(self) -> None:
        """Does nothing, because nothing is held here."""

    def _bound(self, request: GenerationRequest) -> PromptSize:
        return size_without_tokenizer(request, self._engines.frame(request.model) if request.is_rendered else UNSEEN)

    def is_clearly_small(self, bound: PromptSize) -> bool:
        return bound.tokens <= FEW_TOKENS and not self._decides(bound)

    def _is_cheap_now(self, model: str | None, bound: PromptSize) -> bool:
        """Tells whether pages that are held too much can be spared until the prefiller's reply gives them back."""
        return not self._decides(bound) and self._engines.have_plenty(model, bound.tokens)

    def _decides(self, bound: PromptSize) -> bool:
        """Tells whether the exact length may decide if the prompt goes to a pair."""
        return 0 < self._min_prompt_tokens <= bound.tokens


class TokenizerSizer:
    """Implements `PromptSizer` with the tokenizer in the model folder `path`. Raises `ConfigError` where there is none.

    It counts texts, as long as the engines agree with it. A `ByteSizer` does everything else. Where `engines` take ids,
    every text is counted and its ids are told. Elsewhere texts that are clearly small are not counted, unless their
    length decides on their way (`min_prompt_tokens`).

    Mutable state: the texts seen; the bytes of the texts that wait for a thread. The tokenizer has its own state.
    """

    def __init__(
        self,
        path: Path,
        *,
        engines: Engines | None = None,
        min_prompt_tokens: int = 0,
        max_bytes: int = sys.maxsize,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
        count_s: float = COUNT_S,
    ) -> None:
        self._tokenizer = _tokenizer(path, _changed_at(path))
        self._engines = engines or NoEngines()
        self._otherwise = ByteSizer(max_bytes, engines=self._engines, min_prompt_tokens=min_prompt_tokens)
        self._max_bytes = max_bytes
        self._max_waiting_bytes = max_waiting_bytes
        self._count_s = count_s
        self._seen: LruCache[PromptSize] = LruCache(CACHE_BYTES)
        self._num_waiting_bytes = 0
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokens", initializer=_step_back)
        self._threads_for_long = ThreadPoolExecutor(
            NUM_THREADS, thread_name_prefix="tokens-of-long", initializer=_step_back
        )
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))

    def size_now(self, request: GenerationRequest) -> PromptSize | None:
        _check_bytes(request, self._max_bytes)
        if not self._counts(request):
            return self._otherwise.size_now(request)
        takes_ids = self._engines.take_ids(request.model)
        if not takes_ids and self._otherwise.is_clearly_small(bound := size_without_tokenizer(request)):
            return bound
        if (key := _key(request)) is None:
            return None
        size = self._seen.get(key)
        if size is not None and (size.ids is not None or not takes_ids):
            return size
        return self._measure(request) if request.num_prompt_bytes <= FEW_BYTES else None

    async def size(self, request: GenerationRequest, headers: Mapping[str, str] = _NO_HEADERS) -> PromptSize:
        size = self.size_now(request)
        if size is None and self._counts(request):
            size = await self._size_in_thread(request)
        return size or await self._otherwise.size(request, headers)

    async def ids(self, request: GenerationRequest, headers: Mapping[str, str] = _NO_HEADERS) -> list[int] | None:
        size = None
        if self._counts(request):
            with suppress(QueueFull):
                size = await self._size_in_thread(request)
        return size.ids if size is not None else await self._otherwise.ids(request, headers)

    def tokenizer(self, model: str | None) -> FastTokenizer:
        return self._tokenizer

    def close(self) -> None:
        for threads in (self._threads, self._threads_for_long):
            threads.shutdown(wait=False, cancel_futures=True)

    def _counts(self, request: GenerationRequest) -> bool:
        return _has_one_text(request) and not request.is_chat and self._engines.agree(request.model)

    async def _size_in_thread(self, request: GenerationRequest) -> PromptSize | None:
        """Returns the size that a thread counts; None where that took too long and another way must do. Raises
        `QueueFull`.
        """
        num_bytes = request.num_prompt_bytes
        if self._num_waiting_bytes and self._num_waiting_bytes + num_bytes > self._max_waiting_bytes:
            raise QueueFull("too many prompts wait to be counted; try again", retry_after_s=1.0)
        threads = self._threads if num_bytes <= LONG_BYTES else self._threads_for_long
        self._num_waiting_bytes += num_bytes
        try:
            async with asyncio.timeout(self._count_s):
                return await asyncio.get_running_loop().run_in_executor(threads, self._measure, request)
        except TimeoutError:
            return None
        finally:
            self._num_waiting_bytes -= num_bytes

    def _measure(self, request: GenerationRequest) -> PromptSize:
        text, add_special_tokens = request.prompt_text, request.value("add_special_tokens") is not False
        assert text is not None
        if self._engines.take_ids(request.model):
            ids = self._tokenizer.ids(text, add_special_tokens=add_special_tokens)
            size = PromptSize(tokens=len(ids), is_exact=True, ids=ids)
        else:
            size = PromptSize(tokens=self._tokenizer.count(text, add_special_tokens=add_special_tokens), is_exact=True)
        if (key := _key(request)) is not None:
            self._seen.put(key, size, _BYTES_PER_ID * len(size.ids or ()))
        return size


class ModelSizers:
    """Implements `PromptSizer`: each model's own sizer measures that model's prompts, and `otherwise` measures the
    rest.
    """

    def __init__(self, by_model: Mapping[str, PromptSizer], otherwise: PromptSizer) -> None:
        self._by_model = dict(by_model)
        self._otherwise = otherwise

    def size_now(self, request: GenerationRequest) -> PromptSize | None:
        return self._of(request.model).size_now(request)

    async def size(self, request: GenerationRequest, headers: Mapping[str, str] = _NO_HEADERS) -> PromptSize:
        return await self._of(request.model).size(request, headers)

    async def ids(self, request: GenerationRequest, headers: Mapping[str, str] = _NO_HEADERS) -> list[int] | None:
        return await self._of(request.model).ids(request, headers)

    def tokenizer(self, model: str | None) -> FastTokenizer | None:
        return self._of(model).tokenizer(model)

    def close(self) -> None:
        for sizer in (*self._by_model.values(), self._otherwise):
            sizer.close()

    def _of(self, model: str | None) -> PromptSizer:
        return self._by_model.get(model or "", self._otherwise)


@lru_cache(maxsize=NUM_TOKENIZERS)
def _tokenizer(path: Path, changed_at: int) -> FastTokenizer:
    """Returns the tokenizer of a folder, which all sizers of this process share: large ones take a second to read."""
    return FastTokenizer(path)


def _changed_at(path: Path) -> int:
    """Returns a number that is another one when the folder's tokenizer is another one; 0 where there is none."""
    try:
        return (path / FILE).stat().st_mtime_ns
    except OSError:
        return 0


def make_sizer(settings: Settings, engines: Engines | None = None) -> PromptSizer:
    """Returns the sizer for the options ``model`` and ``models``. Raises `ConfigError` naming the option at fault."""
    engines = engines or NoEngines()
    otherwise: PromptSizer = _byte_sizer(settings, engines)
    if settings.model is not None:
        otherwise = _folder_sizer("model", settings.model, settings, engines)
    if not settings.models:
        return otherwise
    by_model = {one.name: _folder_sizer("models.path", one.path, settings, engines) for one in settings.models}
    return ModelSizers(by_model, otherwise)


def _byte_sizer(settings: Settings, engines: Engines) -> PromptSizer:
    return ByteSizer(settings.max_prompt_bytes, engines=engines, min_prompt_tokens=settings.min_prompt_tokens)


def _folder_sizer(option: str, path: Path, settings: Settings, engines: Engines) -> PromptSizer:
    """Returns an exact sizer where the folder has a tokenizer, else a `ByteSizer`. Raises `ConfigError` where there is
    no folder.

    A folder without a tokenizer may still tell the KV's size.
    """
    if not path.is_dir():
        raise ConfigError(f"{option}: there is no folder {path}, nor a model of that name in the Hugging Face cache")
    if not (path / FILE).exists():
        log.warning("%s: %s has no tokenizer; engines are asked for the length of long prompts", option, path)
        return _byte_sizer(settings, engines)
    return TokenizerSizer(
        path,
        engines=engines,
        min_prompt_tokens=settings.min_prompt_tokens,
        max_bytes=settings.max_prompt_bytes,
    )


def _check_bytes(request: GenerationRequest, max_bytes: int) -> None:
    """Raises `BodyTooLarge`, except for a prompt with content that is not text: its tokens are not counted, and it may
    be large.
    """
    if request.num_prompt_bytes > max_bytes and not request.has_media:
        field = request.prompt_field
        raise BodyTooLarge(
            f"{field} has {request.num_prompt_bytes} bytes, and {max_bytes} are taken (max_prompt_bytes); shorten it",
            param=field,
            code="prompt_too_large",
        )


def _any_size(request: GenerationRequest) -> PromptSize:
    """Returns a size where no pages have one."""
    return PromptSize(tokens=request.num_prompt_bytes, is_exact=False)


def _has_one_text(request: GenerationRequest) -> bool:
    """Tells whether the prompt is one text or one chat whose tokens somebody can tell."""
    return (request.prompt_kind is _TEXT or request.prompt_kind is _CHAT) and not request.has_media


def _key(request: GenerationRequest) -> bytes | None:
    """Returns a digest that is equal for requests of the same text; None where it would take too long to compute."""
    if request.num_prompt_bytes > KNOWN_BYTES:
        return None
    matters = b"\0".join([request.fields.get(name, b"") for name in _TEXT_MATTERS])  # no zero byte is in JSON
    return blake2b(matters, digest_size=16).digest()
