"""The view that callers of the engine have of its work: a sequence's tokens on the event loop, and a prefill's first
one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from transfer.engine.on_loop import on_loop
from transfer.engine.ranks.pushes import RanksPush
from transfer.engine.sampling import SampledToken
from transfer.engine.sequence import Sequence
from transfer.errors import AttemptLost, ReceiverLost


class Running:
    """A `Running` is a sequence in the worker, as a stream of tokens on the event loop."""

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self._items: asyncio.Queue[SampledToken | Exception] = asyncio.Queue()
        put = on_loop(self._items.put_nowait)
        sequence.on_token = put
        sequence.on_error = put

    @property
    def num_cached_tokens(self) -> int:
        return self.sequence.num_cached_tokens

    async def next(self) -> SampledToken:
        item = await self._items.get()
        if isinstance(item, Exception):
            raise item
        return item

    async def __aiter__(self) -> AsyncIterator[SampledToken]:
        job = self.sequence.job
        handoff = job.handoff
        count, last = job.num_answer_tokens, -1
        if handoff is not None:
            count, last = count + 1, handoff.first_token_id
        while count < job.max_tokens and last not in job.eos_token_ids:
            token = await self.next()
            count, last = count + 1, token.token_id
            yield token


class Prefilled:
    """A `Prefilled` is a prefill as its caller sees it."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_cached_tokens = 0
        self.token: SampledToken | None = None
        self.is_kept = False

    @property
    def first_token(self) -> SampledToken:
        assert self.token is not None
        return self.token

    def keep(self) -> None:
        self.is_kept = True


async def first_token(running: Running, push: RanksPush) -> SampledToken:
    """Returns the first token. Raises `AttemptLost` as soon as the push has failed (nobody needs the token then):
    `ReceiverLost` where that is because the decoder's receiver does not answer."""
    token = asyncio.ensure_future(running.next())
    failed = asyncio.wrap_future(push.failed)
    try:
        await asyncio.wait((token, failed), return_when=asyncio.FIRST_COMPLETED)
        if not token.done():
            kind = ReceiverLost if isinstance(push.error, ReceiverLost) else AttemptLost
            raise kind(f"the KV cannot be sent: {push.failure}")
        return token.result()
    finally:
        for waiting in (token, failed):
            waiting.cancel()
