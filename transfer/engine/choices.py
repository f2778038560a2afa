"""One choice of a reply: the engine core lends a sequence, which is fed into its answer and handed on piece by
piece."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence

import anyio

from transfer.engine.answer import Answer, Delta
from transfer.engine.api import EngineCore, Generation, GenerationJob
from transfer.engine.api_error import ApiError
from transfer.engine.asgi import Reply, event
from transfer.engine.logprobs import first_token
from transfer.engine.replies import ReplyShape

Emit = Callable[[int, Delta], Awaitable[None]]


class Choice:
    """A `Choice` is one answer to a request. Mutable state: `answer`, which grows, and `num_cached_tokens`, known once
    the sequence has ended."""

    def __init__(self, index: int, job: GenerationJob, answer: Answer) -> None:
        self.index = index
        self.answer = answer
        self.num_cached_tokens = 0
        self._job = job

    async def run(self, core: EngineCore, emit: Emit) -> None:
        """Emits the answer's deltas. The finishing one goes out when the core has its memory back."""
        async with core.generate(self._job) as tokens:
            last = await self._relay(tokens, emit)
            self.num_cached_tokens = tokens.num_cached_tokens
        await emit(self.index, last)

    async def _relay(self, tokens: Generation, emit: Emit) -> Delta:
        """Emits all deltas but the finishing one, which is returned."""
        if self.answer.finish_reason is not None:
            return Delta(finish_reason=self.answer.finish_reason)  # all of the resumed answer has been shown before
        if self._job.handoff is not None:
            delta = self.answer.feed(first_token(self._job.handoff))
            if delta.finish_reason is not None:
                return delta
            await emit(self.index, delta)  # at once: the client need not wait for a decode step
        async for token in tokens:
            delta = self.answer.feed(token)
            if delta.finish_reason is not None:
                return delta
            await emit(self.index, delta)
        raise ApiError("The engine ended the answer too early.", status=500, type="server_error")


async def run_all(choices: Sequence[Choice], core: EngineCore, emit: Emit) -> None:
    """Runs the choices side by side. The first error cancels the others and is raised as it is."""
    if len(choices) == 1:
        await choices[0].run(core, emit)
        return
    errors: list[Exception] = []

    async def run(choice: Choice) -> None:
        try:
            await choice.run(core, emit)
        except Exception as error:
            errors.append(error)
            group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        for choice in choices:
            group.start_soon(run, choice)
    if errors:
        raise errors[0]


async def collect(index: int, delta: Delta) -> None:
    """Does nothing. It is the `Emit` of a reply that is sent whole: the answers keep everything."""


class EventStream:
    """An `EventStream` has the `Emit` of a streamed reply. The stream of a resumed answer has been opened elsewhere.

    Mutable state: `_opened`, the choices whose opening chunk has been sent, and `_unreported`, ids by choice that go
    out with the next chunk (an id alone makes none).
    """

    def __init__(self, shape: ReplyShape, reply: Reply, *, is_resumed: bool = False) -> None:
        self._shape = shape
        self._reply = reply
        self._opened = {0} if is_resumed else set()
        self._unreported: dict[int, list[int]] = {}

    async def emit(self, index: int, delta: Delta) -> None:
        data = b"".join(event(chunk) for chunk in self._chunks(index, delta))
        if data:
            await self._reply.events(data)

    def _chunks(self, index: int, delta: Delta) -> Iterator[dict[str, object]]:
        if index not in self._opened:
            self._opened.add(index)
            yield from self._shape.opening(index)
        has_content = bool(delta.text or delta.tokens)
        if self._shape.with_token_ids:
            yield from self._chunks_with_ids(index, delta, has_content)
            return
        if has_content:
            yield self._shape.delta(index, delta)
        if delta.finish_reason is not None:
            yield self._shape.closing(index, delta.finish_reason)

    def _chunks_with_ids(self, index: int, delta: Delta, has_content: bool) -> Iterator[dict[str, object]]:
        """Yields at most one chunk, with the answer's end in it, so that a stream cut between two events can be
        resumed.

        After each chunk, the ids reported so far are those whose reading led to exactly the text sent so far.
        """
        unreported = self._unreported.setdefault(index, [])
        unreported += delta.token_ids
        if has_content or delta.finish_reason is not None:
            yield self._shape.delta_with_ids(index, delta, self._unreported.pop(index))
