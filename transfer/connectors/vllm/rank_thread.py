"""A decoder's rank 1, 2, …: its slab, to which prefillers write, and a thread that speaks with rank 0 about what lies
in it. Rank 0 alone has a receiver, which grants the same pages on all ranks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine

from transfer.agents.base import TransferAgent, close_agent
from transfer.child_process import read_message, write_message
from transfer.connectors.vllm.loop_thread import LoopThread, use_own_stream
from transfer.connectors.vllm.rank_messages import (
    AskToTake,
    Delivered,
    FromRank,
    Joined,
    Leaving,
    TakeEnded,
    Taken,
    WaitDelivered,
    from_rank_zero,
)
from transfer.errors import AttemptLost, TransferError
from transfer.memory.buffer import PagedBuffer
from transfer.roles.handshake import Identity
from transfer.roles.rank_slab import RankSlab

log = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
"""The longest time, in seconds, that each part of the start may take."""
TAKE_TIMEOUT_S = 10.0
"""The longest time, in seconds, for which a load waits for rank 0's word. vLLM's step waits with it."""


class RankThread(LoopThread):
    """A `RankThread` is the inbox of a rank that is not 0. Its methods are for vLLM's thread.

    Mutable state, which belongs to the loop: `_asked`, futures of asks by attempt; `_taken`, the pages of attempts that
    this rank may be reading, and `_wrong`, those of them whose pages are another's; `lost`, once rank 0 is gone.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(f"kv-rank-{rank}")
        self.lost: TransferError | None = None
        self._rank = rank
        self._slab: RankSlab | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._asked: dict[str, asyncio.Future[Taken]] = {}
        self._taken: dict[str, list[int]] = {}
        self._wrong: set[str] = set()
        self._close_agent: Callable[[], None] = lambda: None

    def __repr__(self) -> str:
        return f"<RankThread {self._rank}, {len(self._taken)} being read, {self.lost or 'alive'}>"

    def join(self, path: str, make: Callable[[], tuple[TransferAgent, PagedBuffer]], identity: Identity) -> PagedBuffer:
        """Offers prefillers the slab that `make` makes, by way of rank 0, which listens at `path`. Returns it.

        Where this fails, rank 0 knows it at once. Raises `TransferError` where rank 0 cannot be reached.
        """
        self._thread.start()
        try:
            reader = self._do(self._connect(path), START_TIMEOUT_S)
            agent, buffer = make()
            self._close_agent = lambda: close_agent(agent, buffer)
            self._do(self._offer(reader, RankSlab(agent, buffer, identity)), START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise
        return buffer

    def take(self, attempt: str, num_tokens: int) -> list[int]:
        """Returns the attempt's pages, which this rank may read until `consumed` or `release`.

        Raises `AttemptLost` where no rank can read it or this one's pages are wrong, and `TransferError` where rank 0
        is gone or says nothing within `TAKE_TIMEOUT_S`.
        """
        return self._do(self._take(attempt, num_tokens), None)

    def check_tags(self, attempt: str) -> None:
        """Looks once more at the pages that were taken. Raises `AttemptLost` where another attempt has written them."""

        async def check() -> None:
            try:
                self._own_slab.check_tags(attempt, self._taken.get(attempt, []))
            except AttemptLost:
                self._wrong.add(attempt)
                raise

        self._do(check(), None)

    def consumed(self, attempt: str) -> None:
        """Notes that the KV was copied. Rank 0 gives the pages back when all ranks have done so."""
        self.release(attempt)

    def release(self, attempt: str) -> None:
        """Notes that this rank does not read the attempt any more. What no rank has read rank 0 alone gives back."""
        self._loop.call_soon_threadsafe(self._end, attempt)

    def close(self) -> None:
        """Ends the connection and the thread. Rank 0 takes that for the end of this process."""
        if self._thread.is_alive():
            try:
                self._do(self._aclose(), 10.0)
            except TimeoutError:
                log.warning("rank %d was not closed in time", self._rank)
            self._stop()
        self._close_agent()

    # ── the thread ──────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _own_slab(self) -> RankSlab:
        assert self._slab is not None
        return self._slab

    async def _connect(self, path: str) -> asyncio.StreamReader:
        try:
            reader, self._writer = await asyncio.open_unix_connection(path)
        except OSError as error:
            text = f"rank 0 cannot be reached at {path} ({error}): all ranks have to be on one machine"
            raise TransferError(text) from None
        return reader

    async def _offer(self, reader: asyncio.StreamReader, slab: RankSlab) -> None:
        use_own_stream(slab.buffer.pages)
        self._slab = slab
        self._send(Joined(self._rank, await slab.start()))
        self._own(self._hear(reader))

    async def _hear(self, reader: asyncio.StreamReader) -> None:
        while (message := await read_message(reader, from_rank_zero)) is not None:
            match message:
                case Taken():
                    future = self._asked.get(message.attempt)
                    if future is not None and not future.done():
                        future.set_result(message)
                case WaitDelivered():
                    self._own(self._tell_delivered(message.number))
        self.lost = TransferError("rank 0 of this engine is gone")
        for future in self._asked.values():
            if not future.done():
                future.set_exception(self.lost)

    async def _take(self, attempt: str, num_tokens: int) -> list[int]:
        if self.lost is not None:
            raise self.lost
        future = self._asked[attempt] = asyncio.get_running_loop().create_future()
        self._taken[attempt] = []
        self._send(AskToTake(attempt, num_tokens))
        try:
            async with asyncio.timeout(TAKE_TIMEOUT_S):
                taken = await future
        except TimeoutError:
            raise TransferError(f"rank 0 has said nothing for {TAKE_TIMEOUT_S:g} s") from None
        finally:
            del self._asked[attempt]
        if taken.error is not None:
            raise AttemptLost(taken.error)
        try:
            pages = self._taken[attempt] = self._own_slab.take(attempt, taken.written)
        except AttemptLost:
            self._wrong.add(attempt)
            raise
        return pages

    def _end(self, attempt: str) -> None:
        if self._taken.pop(attempt, None) is not None:
            self._send(TakeEnded(attempt, is_wrong=attempt in self._wrong))
            self._wrong.discard(attempt)

    async def _tell_delivered(self, number: int) -> None:
        await self._own_slab.delivered()
        self._send(Delivered(number))

    def _send(self, message: FromRank) -> None:
        assert self._writer is not None
        write_message(self._writer, message)

    def _own(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _aclose(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._writer is not None:
            self._send(Leaving())
            self._writer.close()
