"""RequestContext is one client request under way, over all its attempts, and Client is the client at its other end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final, Protocol

from pdproxy.aio.deadline import Deadline
from pdproxy.engines.adapter import Adapter, PrefillReply
from pdproxy.errors import DeadlineExceeded, Draining, MemoryBudgetSpent, ProxyError
from pdproxy.openai.assembled import AssembledAnswer, WholeShape
from pdproxy.openai.client_stream import StreamedAnswer
from pdproxy.openai.dialect import dialect_of
from pdproxy.openai.request import GenerationRequest
from pdproxy.openai.usage import PromptUsage
from pdproxy.telemetry.attempt_record import AttemptRecord
from pdproxy.telemetry.record import RequestRecord
from pdproxy.tokens.prompt_size import PromptSize
from transfer.memory_budget import MemoryShare

Headers = list[tuple[bytes, bytes]]

STEP_BYTES: Final = 16 * 1024
"""The bytes by which memory is taken for an answer that is put together event by event."""


class ClientStalledError(Exception):
    """ClientStalledError says that the client does not take what it asked for."""


class Client(Protocol):
    """Client takes the answer. Sending waits while the client's side is full, and does nothing once the client has
    gone."""

    __slots__ = ()

    @property
    def headers(self) -> Mapping[str, str]:
        """The client's own headers, names in lower case."""

    @property
    def forwarded(self) -> Mapping[str, str]:
        """Headers of the client's that go with every leg, its request id among them."""

    @property
    def memory(self) -> MemoryShare:
        """The share of the memory budget for all that is kept for this client. Its owner releases it when the request
        is over."""

    @property
    def is_started(self) -> bool:
        """Tells whether a status line was sent, so that no other can be."""

    def start(self, status: int, headers: Headers) -> Coroutine[Any, Any, None]: ...

    async def send(self, chunk: bytes) -> None: ...

    async def end(self) -> None: ...

    def answer(self, status: int, headers: Headers, body: bytes) -> Coroutine[Any, Any, None]:
        """Sends all of an answer: `start`, `send` and `end` in one. `headers` do not tell its length yet."""

    def answer_now(self, status: int, headers: Headers, body: bytes) -> bool:
        """Does the same as `answer` where nothing has to be waited for; else does nothing and returns False."""

    @property
    def outlet(self) -> Outlet | None:
        """The connection to write to without waiting, between `start` and `end`; None where there is none."""


class Outlet(Protocol):
    """Outlet is a client's own connection, to which callbacks write the pieces of a body that has been started."""

    __slots__ = ()

    def write(self, piece: bytes) -> None:
        """Writes `piece`. Never waits, and does nothing once the client has gone. Must not be called while the outlet
        `is_full`, or memory has no bound."""

    @property
    def is_full(self) -> bool:
        """Tells whether more was written than the client has taken and the operating system will keep."""

    def on_room(self, callback: Callable[[], None] | None) -> None:
        """Sets the `callback` that is called whenever the outlet is no longer full; None: nothing is called any
        more."""


class RequestContext:
    """RequestContext holds what all attempts at one request share.

    Mutable state: which instances failed so far, what is known of the prompt and was shown of the answer, whether
    shutdown has caught up with the request, the bytes that the client's share of the memory budget has for what is put
    together of the answer, and the record.
    """

    __slots__ = (
        "_clock",
        "_handed_ids",
        "_num_kept_bytes",
        "_prompt_ids",
        "as_stream",
        "assembled",
        "avoid",
        "client",
        "dialect",
        "is_aborted",
        "limit",
        "limit_s",
        "max_answer_bytes",
        "prompt_usage",
        "record",
        "request",
        "shape",
        "stream",
        "text_terms",
        "tokenize_s",
        "turn",
    )

    def __init__(
        self,
        request: GenerationRequest,
        client: Client,
        record: RequestRecord,
        stream: StreamedAnswer,
        limit_s: float,
        clock: Callable[[], float],
        *,
        max_answer_bytes: int,
        as_stream: GenerationRequest | None = None,
        turn: asyncio.Lock | None = None,
    ) -> None:
        """Takes `limit_s`, the seconds for everything, all attempts together. `max_answer_bytes` is the most bytes of a
        whole answer. `as_stream` is the request as engines may
        be asked it, where the client wants a whole answer that can be put together from a stream. `turn` is held by
        those who stand in line for pages, where only one of several prompts may."""
        self._clock = clock
        self.turn = turn
        self.request = request
        self.as_stream = as_stream
        self.assembled: AssembledAnswer | None = None
        """The part of the whole answer that has come so far; None where no answer is put together from a stream."""
        self.shape: WholeShape | None = None
        """The form of the whole answer, once an engine was asked for its stream."""
        if as_stream is not None:
            self.assembled = AssembledAnswer(
                is_chat=request.is_chat, num_choices=request.n, limit_bytes=max_answer_bytes
            )
        self.max_answer_bytes = max_answer_bytes
        self._num_kept_bytes = 0
        self.client = client
        self.dialect = dialect_of(request.endpoint)
        """The form of the answers that the client reads."""
        self.record = record
        self.stream = stream
        self.limit_s = limit_s
        self.limit = Deadline(limit_s, self.why_cut_short)
        """The time limit of the whole request."""
        self.is_aborted = False
        self.avoid: frozenset[str] = frozenset()
        """Names of the instances that have failed this request."""
        self.text_terms: tuple[tuple[str, str], ...] | None = None
        """The terms of the revision that the latest attempt is bound to, which go for an answer that has begun."""
        self.tokenize_s: float | None = None
        self.prompt_usage: PromptUsage | None = None
        """The prompt's usage, as the prefiller whose token the client sees first told it."""
        self._prompt_ids: list[int] | None = None
        self._handed_ids: Callable[[], list[int] | None] | None = None
        """Reads the prompt's ids from the reply of the same prefiller."""

    def abort(self) -> None:
        """Cuts the request short: the proxy is shutting down and its patience is over."""
        self.is_aborted = True
        self.limit.cut()

    def why_cut_short(self) -> ProxyError:
        """Returns the error of a request whose limit was cut."""
        if self.is_aborted:
            return Draining("the proxy is shutting down", retry_after_s=5.0)
        return DeadlineExceeded(f"the request took longer than {self.limit_s:g} s")

    def begin_attempt(self, num_prompt_tokens: int | None) -> AttemptRecord:
        """Returns the record of a new attempt, with a fresh id; no instance is bound to it yet."""
        attempt = AttemptRecord(
            self.record.request_id,
            num_prompt_tokens=num_prompt_tokens,
            tokenize_s=self.tokenize_s,
            clock=self._clock,
        )
        self.tokenize_s = None
        self.record.attempt = attempt
        self.record.num_attempts += 1
        return attempt

    @property
    def last_attempt(self) -> AttemptRecord:
        """The record of the attempt under way, or of the latest one. Raises `RuntimeError` before the first."""
        if self.record.attempt is None:
            raise RuntimeError("nothing was tried yet")
        return self.record.attempt

    @property
    def has_begun(self) -> bool:
        """Tells whether the client has a part of the answer, or one is kept for it: another attempt would have to go on
        with that."""
        return self.client.is_started or (self.assembled is not None and self.assembled.has_begun)

    def start_over(self) -> None:
        """Drops what is kept of a whole answer, of which the client has seen nothing."""
        self.stream.start_over()
        if self.assembled is not None:
            self.assembled.clear()
        self.client.memory.give_back(self._num_kept_bytes)
        self._num_kept_bytes = 0

    def keep(self, events: bytes) -> None:
        """Adds whole events to the answer that is put together. Raises as `AssembledAnswer.add` does, and
        `MemoryBudgetSpent`."""
        assembled = self.assembled
        assert assembled is not None
        if assembled.num_bytes + len(events) > self._num_kept_bytes:
            self._take_memory(assembled.num_bytes + len(events) - self._num_kept_bytes)
        assembled.add(events)

    def _take_memory(self, num_bytes: int) -> None:
        step_bytes = -(-num_bytes // STEP_BYTES) * STEP_BYTES
        if not self.client.memory.take_on(step_bytes):
            raise MemoryBudgetSpent(self.client.memory.limit_bytes)
        self._num_kept_bytes += step_bytes

    def ask_for_whole(self) -> None:
        """Drops what is kept, and from now on has engines asked for a whole answer, as the client asked."""
        self.start_over()
        self.as_stream = self.assembled = None

    def prefilled(self, reply: PrefillReply, adapter: Adapter) -> None:
        """Notes what the reply tells of the prompt. Replies to later attempts, which go on with the answer, tell
        nothing new."""
        if not self.has_begun:
            self.prompt_usage = reply.usage
            if reply.usage is not None:
                self.record.tokens.tell_prompt(reply.usage.tokens)
            self._handed_ids = lambda: adapter.prompt_ids(reply)

    def prompt_ids(self, size: PromptSize) -> list[int] | None:
        """Returns the prompt's ids as its first prefiller read them; None where nobody told. `size` must be the
        prompt's own until the ids are known."""
        if self._prompt_ids is None:
            handed = self._handed_ids() if self._handed_ids is not None else None
            self._prompt_ids = handed or size.ids or self.request.prompt_ids
        return self._prompt_ids

    def seconds_left(self) -> float:
        return self.limit.seconds_left

    def start(self, status: int, content_type: bytes, *more: tuple[bytes, bytes]) -> Coroutine[Any, Any, None]:
        """Returns a coroutine that sends status and headers to the client."""
        self.record.status = status
        return self.client.start(status, self._headers(content_type, more))

    def answer(
        self, status: int, content_type: bytes, body: bytes, *more: tuple[bytes, bytes]
    ) -> Coroutine[Any, Any, None]:
        """Returns a coroutine that sends all of an answer to the client."""
        self.record.status = status
        return self.client.answer(status, self._headers(content_type, more), body)

    def answer_now(self, status: int, content_type: bytes, body: bytes) -> bool:
        """Sends all of an answer to the client where that need not wait; else returns False."""
        self.record.status = status
        return self.client.answer_now(status, self._headers(content_type, ()), body)

    def _headers(self, content_type: bytes, more: tuple[tuple[bytes, bytes], ...]) -> Headers:
        """Returns the headers that tell the content type, which way the request went, and where its time went until
        now."""
        headers = [
            (b"content-type", content_type),
            *more,
            (b"x-request-id", self.record.request_id.encode("latin-1")),
        ]
        if self.record.charge is not None:
            headers += self.record.charge.headers()
        attempt = self.record.attempt
        if attempt is not None:
            _add_attempt(headers, attempt)
        return headers


def _add_attempt(headers: Headers, attempt: AttemptRecord) -> None:
    headers.append((b"x-pdproxy-path", attempt.path.encode()))
    headers.append((b"x-pdproxy-attempt", attempt.id.encode()))
    if attempt.prefiller is not None:
        headers.append((b"x-pdproxy-prefiller", attempt.prefiller.encode()))
    if attempt.decoder is not None:
        headers.append((b"x-pdproxy-decoder", attempt.decoder.encode()))
    if attempt.num_kv_bytes is not None:
        transfer_ms = (attempt.transfer_s or 0.0) * 1000
        told = f"pages={attempt.num_pages};bytes={attempt.num_kv_bytes};transfer_ms={transfer_ms:.3f}"
        headers.append((b"x-pdproxy-kv", told.encode()))
    headers.append((b"server-timing", attempt.timing_header()))
