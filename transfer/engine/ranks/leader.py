"""The side of rank 0. It tells the other ranks each step, asks them about attempts, and ends when one of them ends."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from transfer.child_process import read_message, write_message
from transfer.engine.api import RankLost
from transfer.engine.ranks.link import Link, sum_over
from transfer.engine.ranks.messages import Answer, Ask, Request, Step
from transfer.errors import TransferError

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0
"""The time, in seconds, within which the other ranks must end when they are told to. Then they are killed."""
_answer: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


class OtherRanks:
    """`OtherRanks` is the other ranks of this engine, as rank 0 sees them. There may be none, and then nothing here
    does anything.

    `tell` and `add_up` are for the engine's thread, all else for the event loop. Any failure here, or there, is the end
    of all: `lost` says why.

    Mutable state: `lost`; `_asked`, answers that are waited for, by rank and number; `_writers` and `_tasks`, one each
    per rank once started; `_exited`, the ranks whose process has ended.
    """

    def __init__(self, links: Sequence[Link] = ()) -> None:
        self.lost: RankLost | None = None
        self._links = links
        self._asked: dict[tuple[int, int], asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._exited: dict[int, asyncio.Event] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_lost: Callable[[RankLost], None] = lambda _: None

    def __repr__(self) -> str:
        return f"<OtherRanks {[link.peer for link in self._links]} {self.lost or 'alive'}>"

    @property
    def size(self) -> int:
        """The number of ranks of the engine, this one included."""
        return 1 + len(self._links)

    # ── the engine's thread ─────────────────────────────────────────────────────────────────────────────────────────

    def do(self, step: Step, work: Callable[[], Any]) -> Any:
        """Makes the other ranks take `step` while this one does `work`, which is the same. Returns what `work` returns.

        Where there are other ranks, an exception of `work` is the end of all: they may be in the middle of a sum.
        Raises `RankLost` then.
        """
        self.tell(step)
        try:
            return work()
        except RankLost:
            raise
        except Exception as error:
            if not self._links:
                raise
            log.exception("a step failed")
            raise self._fail(RankLost(f"rank 0 of this engine failed in a step: {error!r}")) from error

    def tell(self, step: Step) -> None:
        """Queues a step for the other ranks. Raises `RankLost` where one of them is lost."""
        try:
            for link in self._links:
                link.send_step(step)
        except RankLost as error:
            raise self._fail(error) from error.__cause__

    def add_up(self, part: torch.Tensor) -> torch.Tensor:
        """Returns the sum of `part` over all ranks: see `sum_over`. Raises `RankLost` where one of them is lost."""
        try:
            return sum_over(self._links, part)
        except RankLost as error:
            raise self._fail(error) from error.__cause__

    def _fail(self, error: RankLost) -> RankLost:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._lose, error)
        return error

    # ── the event loop ──────────────────────────────────────────────────────────────────────────────────────────────

    async def start(self, on_lost: Callable[[RankLost], None]) -> None:
        """Opens the event loops' sockets. `on_lost` is called once, on the event loop, when a rank is lost."""
        self._loop, self._on_lost = asyncio.get_running_loop(), on_lost
        for link in self._links:
            reader, writer = await asyncio.open_connection(sock=link.asks)
            self._writers.append(writer)
            self._tasks.append(asyncio.create_task(self._read(link.peer, reader), name=f"rank-{link.peer}"))
            self._exited[link.peer] = asyncio.Event()
            pidfd = os.pidfd_open(link.pid)
            self._loop.add_reader(pidfd, self._reap, link, pidfd)

    async def ask(self, question: Ask) -> list[Any]:
        """Asks all other ranks at once and returns their answers, in order. Raises the first `TransferError`."""
        if not self._links:
            return []
        return await asyncio.gather(*self._send(question))

    def post(self, question: Ask) -> None:
        """Does the same as `ask`, but nobody waits for the answers."""
        for future in self._send(question):
            future.add_done_callback(lambda done: done.cancelled() or done.exception())  # marks the exception as seen

    def _send(self, question: Ask) -> list[asyncio.Future[Any]]:
        futures = []
        for link, writer in zip(self._links, self._writers, strict=True):
            number = next(self._numbers)
            future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            futures.append(future)
            if self.lost is not None:
                future.set_exception(self.lost)
                continue
            self._asked[link.peer, number] = future
            write_message(writer, Request(number, question))
        return futures

    async def _read(self, peer: int, reader: asyncio.StreamReader) -> None:
        while (answer := await read_message(reader, _answer)) is not None:
            future = self._asked.pop((peer, answer.number), None)
            if future is None or future.done():
                continue  # nobody waits for this answer any more
            if answer.error is None:
                future.set_result(answer.value)
            else:
                future.set_exception(TransferError(f"rank {peer}: {answer.error}"))

    def _reap(self, link: Link, pidfd: int) -> None:
        """Notes that the process of another rank has ended."""
        assert self._loop is not None
        self._loop.remove_reader(pidfd)
        os.close(pidfd)
        code = os.waitstatus_to_exitcode(os.waitpid(link.pid, 0)[1])
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"it ended with {code}"
        self._exited[link.peer].set()
        error = RankLost(f"rank {link.peer} of this engine (process {link.pid}) is gone: {how}")
        if self.lost is not None and isinstance(self.lost.__cause__, ConnectionError):
            self.lost = error  # a thread has seen the end of the socket without its reason
        self._lose(error)

    def _lose(self, error: RankLost) -> None:
        if self.lost is not None:
            return
        self.lost = error
        for link in self._links:
            link.break_off()  # wakes threads that wait for a sum
        asked, self._asked = self._asked, {}
        for future in asked.values():
            if not future.done():
                future.set_exception(error)
        self._on_lost(error)

    async def aclose(self) -> None:
        """Lets the other ranks end, and kills those that have not ended within `CLOSE_TIMEOUT_S`. The engine's thread
        must be over."""
        if self.lost is None:
            self.lost = RankLost("the engine is shutting down")
        for link in self._links:
            link.break_off()
        for writer in self._writers:
            writer.close()  # this closes the socket, too
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                for exited in self._exited.values():
                    await exited.wait()
        except TimeoutError:
            for link in self._links:
                if not self._exited[link.peer].is_set():
                    log.warning("rank %d does not end and is killed", link.peer)
                    os.kill(link.pid, signal.SIGKILL)  # the id stays the process's own until `_reap`
                    await self._exited[link.peer].wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
