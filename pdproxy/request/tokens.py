"""How long a prompt is: exactly where the proxy has the model's tokenizer, else as a bound that is never too low.

`Tokenizer.encode` holds the GIL for as long as it runs, in a thread as well; ``encode_batch_fast`` releases it. So long
prompts are counted in a small thread pool through that call, and the event loop goes on.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import jinja2
from tokenizers import Tokenizer

from pdproxy.config import Settings
from pdproxy.errors import ConfigError, InvalidRequest
from pdproxy.request.openai import GenerationRequest, PromptKind
from pdproxy.request.path import PromptSize

log = logging.getLogger(__name__)

NUM_THREADS = 2
SHORT_PROMPT_CHARS = 2_000
"""Up to here counting takes about as long as handing it to a thread."""
TEMPLATE_TOKENS = 512
"""Room for what a chat template adds of its own: a default system prompt, the wording around tools."""
MESSAGE_TOKENS = 16
"""Room for what a chat template puts around one message."""


_FILE = "tokenizer.json"


class PromptSizer(Protocol):
    """Measures prompts."""

    async def size(self, request: GenerationRequest) -> PromptSize:
        """Raises `InvalidRequest` where the model's chat template refuses the messages."""

    def close(self) -> None: ...


def size_without_tokenizer(request: GenerationRequest) -> PromptSize:
    """Ids are counted; text is bounded by its UTF-8 bytes, which no byte-level vocabulary exceeds.

    The raw JSON of the field is at least as long as the text it stands for.
    """
    ids = request.prompt_ids
    if ids is not None:
        return PromptSize(tokens=len(ids), is_exact=True)
    num_bytes = len(bytes(request.fields[request.prompt_field]))
    if not request.is_chat:
        return PromptSize(tokens=num_bytes, is_exact=False)
    num_bytes += len(bytes(request.fields.get("tools", b"")))
    num_messages = len(request.value("messages"))
    bound = num_bytes + TEMPLATE_TOKENS + MESSAGE_TOKENS * num_messages
    return PromptSize(tokens=bound, is_exact=False)


class ByteSizer:
    """Implements `PromptSizer` without a model."""

    async def size(self, request: GenerationRequest) -> PromptSize:
        return size_without_tokenizer(request)

    def close(self) -> None:
        """Nothing is held."""


class TokenizerSizer:
    """Implements `PromptSizer` with the tokenizer in the model folder `path`. Raises `ConfigError` where there is none.

    Mutable state: `_template`, transformers' tokenizer, loaded by the first chat request (its import takes seconds);
    `_loading` keeps the second from importing it as well, which transformers' lazy modules do not survive.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tokenizer = _load_tokenizer(path)
        self._template: Any = None
        self._loading = threading.Lock()
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokens")

    async def size(self, request: GenerationRequest) -> PromptSize:
        if not _is_countable(request):
            return size_without_tokenizer(request)
        text = request.prompt_text
        if text is not None and len(text) <= SHORT_PROMPT_CHARS:
            return self._measure(request)
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._measure, request)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _measure(self, request: GenerationRequest) -> PromptSize:
        text, add_special_tokens = request.prompt_text, request.value("add_special_tokens") is not False
        if text is None:
            text, add_special_tokens = self._render(request), False  # the template writes them
        ids = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return PromptSize(tokens=len(ids), is_exact=True, ids=ids)

    def _render(self, request: GenerationRequest) -> str:
        messages = [_plain(message) for message in request.value("messages")]
        generation_prompt = request.value("add_generation_prompt")
        try:
            text: str = self._chat_template().apply_chat_template(
                messages,
                tools=request.value("tools"),
                add_generation_prompt=True if generation_prompt is None else generation_prompt,
                tokenize=False,
                **(request.value("chat_template_kwargs") or {}),
            )
        except (jinja2.TemplateError, ValueError, TypeError) as error:
            raise InvalidRequest(f"the model's chat template refuses the messages: {error}", param="messages") from None
        return text

    def _chat_template(self) -> Any:
        with self._loading:
            if self._template is None:
                self._template = _load_template(self._path)
            return self._template


class ModelSizers:
    """Implements `PromptSizer`: each model's prompts are measured as its own sizer does, the rest by `otherwise`."""

    def __init__(self, by_model: Mapping[str, PromptSizer], otherwise: PromptSizer) -> None:
        self._by_model = dict(by_model)
        self._otherwise = otherwise

    async def size(self, request: GenerationRequest) -> PromptSize:
        return await self._by_model.get(request.model or "", self._otherwise).size(request)

    def close(self) -> None:
        for sizer in (*self._by_model.values(), self._otherwise):
            sizer.close()


def make_sizer(settings: Settings) -> PromptSizer:
    """Of the options ``model`` and ``models``. Raises `ConfigError` naming the one at fault."""
    otherwise = ByteSizer() if settings.model is None else _folder_sizer("model", settings.model)
    if not settings.models:
        return otherwise
    return ModelSizers({one.name: _folder_sizer("models.path", one.path) for one in settings.models}, otherwise)


def _folder_sizer(option: str, path: Path) -> PromptSizer:
    """Exact where the folder has a tokenizer; one without may still tell the KV's size."""
    if not path.is_dir():
        raise ConfigError(f"{option}: there is no folder {path}, nor a model of that name in the Hugging Face cache")
    if not (path / _FILE).exists():
        log.warning("%s: %s has no tokenizer; prompts are counted in bytes", option, path)
        return ByteSizer()
    return TokenizerSizer(path)


def _is_countable(request: GenerationRequest) -> bool:
    """False where the ids are known anyway, or the engine would render something that is not known here."""
    if request.prompt_kind in (PromptKind.IDS, PromptKind.BATCH) or request.has_media:
        return False
    return not any(request.value(name) for name in ("chat_template", "continue_final_message"))


def _load_tokenizer(path: Path) -> Tokenizer:
    file = path / _FILE
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the Rust side raises nothing narrower
        raise ConfigError(f"model: {file} cannot be read as a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _load_template(path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(path))


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """Text parts joined, as the engines do."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts = [part if isinstance(part, str) else str(part.get("text", "")) for part in content]
    return message | {"content": "\n".join(texts)}
