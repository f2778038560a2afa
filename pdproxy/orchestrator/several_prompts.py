"""SeveralPrompts is a body of several prompts whose prompts are served one by one, each as a request of its own.

An engine pair takes one prompt per attempt. So every prompt has its own attempts, pages and legs, and only the client,
the deadline and the answer are one. No prompt waits for another while it holds anything: of one body, at most one
stands in line for pages at a time (`turn`), and at most `MOST_AT_ONCE` are served at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import msgspec

from pdproxy.aio.race import end_all
from pdproxy.errors import EngineReply, EngineSaidError, InvalidRequest, LegFailed, ProxyError
from pdproxy.openai.body import Fields
from pdproxy.openai.request import GenerationRequest
from pdproxy.openai.response import CorruptAnswer
from pdproxy.openai.several_prompts import JoinedAnswer, JoinedStream, prompts_of, with_prompt
from pdproxy.openai.sse import event
from pdproxy.orchestrator.context import Headers, Outlet, RequestContext
from pdproxy.telemetry.record import RequestRecord
from transfer.memory_budget import MemoryShare

MOST_AT_ONCE = 32
"""The most prompts of one body that are served at the same time: each takes connections, and a share of the engines."""


class SeveralPrompts:
    """SeveralPrompts serves the prompts of the request in `context`, and makes one answer of theirs.

    Mutable state: the prompts that nobody has begun with; how many tasks serve some; an event for the end of all of
    them, or the first failure; that failure; the whole answers and their size in bytes, or the stream that is made of
    theirs; the lock of whoever sends its headers.
    """

    def __init__(self, context: RequestContext) -> None:
        self.context = context
        self.turn = asyncio.Lock()
        """Held by the prompt that stands in line for pages."""
        self._prompts = prompts_of(context.request)
        self._left = iter(enumerate(self._prompts))
        self._num_serving = 0
        self._over = asyncio.Event()
        self._whole = JoinedAnswer()
        self._num_bytes = 0
        self._stream = JoinedStream()
        self._starting = asyncio.Lock()
        self.failure: Exception | None = None

    @property
    def num_at_once(self) -> int:
        return min(MOST_AT_ONCE, len(self._prompts))

    @property
    def num_further_bytes(self) -> int:
        """The bytes that the bodies of prompts served at once take beyond what one body with all prompts does."""
        rest = sum([len(memoryview(raw)) for name, raw in self.context.request.fields.items() if name != "prompt"])
        return rest * (self.num_at_once - 1)

    async def serve(self, serve_one: Callable[[GenerationRequest, PromptClient], Coroutine[Any, Any, None]]) -> None:
        """Has `serve_one` serve each prompt. Raises the error of the first that fails, after all others have ended.
        After that, the end of the stream or the whole answer is left to be sent."""
        tasks = [asyncio.create_task(self._serve_some(serve_one)) for _ in range(self.num_at_once)]
        # No task group: one that ends its tasks because of a failure swallows a cancellation of its own.
        try:
            await self._over.wait()
        finally:
            await end_all(tasks)
        if self.failure is not None:
            raise self._as_told(self.failure)

    async def _serve_some(
        self, serve_one: Callable[[GenerationRequest, PromptClient], Coroutine[Any, Any, None]]
    ) -> None:
        """Serves prompts until none is left that nobody has begun with."""
        self._num_serving += 1
        try:
            for index, raw in self._left:
                await serve_one(with_prompt(self.context.request, raw), PromptClient(self, index))
        except Exception as error:
            if self.failure is None:
                self.failure = error
                if isinstance(error, ProxyError) and error.param == "prompt":
                    error.param = f"prompt[{index}]"
        finally:
            self._num_serving -= 1
            if not self._num_serving or self.failure is not None:
                self._over.set()

    def _as_told(self, error: Exception) -> Exception:
        """Returns the error as the client can get it now: after the failure, another prompt may have begun a stream."""
        if isinstance(error, EngineReply) and self.context.client.is_started:
            return _in_stream(error)
        return error

    # ── for its prompts' clients ────────────────────────────────────────────────────────────────────────────────────

    async def start(self, status: int, headers: Headers) -> None:
        """Sends the headers, unless an earlier prompt has. They tell nothing of a single attempt."""
        async with self._starting:
            if not self.context.client.is_started:
                told = [header for header in headers if not header[0].startswith((b"x-pdproxy-", b"server-timing"))]
                self.context.record.status = status
                await self.context.client.start(status, told)

    async def send(self, events: bytes, index: int) -> None:
        """Sends whole events of one prompt's stream. Raises `CorruptAnswer`."""
        shown = self._stream.take(events, index)
        if shown:
            await self.context.client.send(shown)

    def keep(self, body: bytes, index: int) -> None:
        """Keeps one prompt's whole answer. Raises `CorruptAnswer`, and `InvalidRequest` where all answers together are
        too large."""
        self._num_bytes += len(body)
        if self._num_bytes > self.context.max_answer_bytes:
            raise InvalidRequest(
                f"the answers are larger together than the {self.context.max_answer_bytes} bytes of "
                "--max-answer-bytes; send fewer prompts in one body",
                param="prompt",
            )
        self._whole.add(body, index)

    # ── when all have been served ───────────────────────────────────────────────────────────────────────────────────

    def end_of_stream(self) -> bytes:
        return self._stream.end()

    def whole_answer(self) -> Fields:
        return self._whole.fields()


def _in_stream(reply: EngineReply) -> ProxyError:
    """Returns the error whose event tells in a stream what an engine's own answer would have told."""
    try:
        told = msgspec.json.decode(reply.content)
    except (msgspec.DecodeError, UnicodeDecodeError):
        told = None
    if isinstance(told, dict) and "error" in told:
        return EngineSaidError("decode", "", event({"error": told["error"]}), is_ours=False)
    return ProxyError(f"an engine refused one of the prompts with HTTP {reply.status}", param="prompt")


class PromptClient:
    """PromptClient stands for the client at the end of one prompt. Implements `context.Client`."""

    def __init__(self, prompts: SeveralPrompts, index: int) -> None:
        self._prompts = prompts
        self._client = prompts.context.client
        self.index = index
        self.record: RequestRecord | None = None
        # State: whether something of this prompt's answer was sent.
        self.is_started = False

    @property
    def headers(self) -> Mapping[str, str]:
        return self._client.headers

    @property
    def forwarded(self) -> Mapping[str, str]:
        return self._client.forwarded

    @property
    def memory(self) -> MemoryShare:
        return self._client.memory

    async def start(self, status: int, headers: Headers) -> None:
        self.is_started = True
        await self._prompts.start(status, headers)

    async def send(self, chunk: bytes) -> None:
        try:
            await self._prompts.send(chunk, self.index)
        except CorruptAnswer as error:
            raise self._failed(error) from error

    async def end(self) -> None:
        """Does nothing: the stream ends when all prompts have been answered."""

    async def answer(self, status: int, headers: Headers, body: bytes) -> None:
        self.answer_now(status, headers, body)

    def answer_now(self, status: int, headers: Headers, body: bytes) -> bool:
        try:
            self._prompts.keep(body, self.index)
        except CorruptAnswer as error:
            raise self._failed(error) from error
        self.is_started = True
        return True

    @property
    def outlet(self) -> Outlet | None:
        """None: several write to the client's connection, and each event is looked at."""
        return None

    def _failed(self, error: CorruptAnswer) -> LegFailed:
        attempt = None if self.record is None else self.record.attempt
        return LegFailed("decode", (attempt and attempt.decoder) or "", str(error))
