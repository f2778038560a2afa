"""The prefiller's end: reserves pages at a decoder, writes filled pages as they come, and says when all are there.

push = await sender.open(...)      pages granted at the decoder, all of the request's or none
push.page_filled(page)             … once per page, in order of the prompt; returns at once
await push.finish()                every byte is at the decoder, and the decoder has been told
await push.abort(reason)           or: no more; returns when no write of ours is under way
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import Future

from transfer import wire
from transfer.agents.base import TransferAgent, WriteReceipt
from transfer.errors import AttemptLost, PeerLost, TransferError
from transfer.roles.notifier import Notifier
from transfer.roles.session import Session

log = logging.getLogger(__name__)

MAX_WRITE_BYTES = 16 << 20
"""Pages that are filled already travel together, up to this many bytes, so that other attempts get in between."""


class Sender:
    """All pushes of one prefiller. Mutable state: `_sessions`, one per receiver address, and closers of lost ones."""

    def __init__(self, agent: TransferAgent, layout: wire.Layout) -> None:
        self._agent = agent
        self._layout = layout
        self._notifier = Notifier()
        self._sessions: dict[str, asyncio.Task[Session]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<Sender {len(self._sessions)} receivers>"

    async def open(self, params: wire.PushParams, *, num_pages: int, num_tokens: int) -> Push:
        """Reserve `num_pages` at the one receiver of `params`; waits `params.timeout_s` at most.

        Raises `ReservationRefused`, `HandshakeRefused` or `PeerLost`; nothing is held then. A receiver that was
        restarted since the last push is shaken hands with anew.
        """
        if len(params.receivers) != 1:
            raise TransferError(f"this sender writes to exactly one rank, got {len(params.receivers)} receivers")
        endpoint = params.receivers[0]
        try:
            return await self._open(endpoint, params, num_pages, num_tokens)
        except PeerLost:
            return await self._open(endpoint, params, num_pages, num_tokens)

    async def aclose(self) -> None:
        for task in list(self._sessions.values()):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if not task.cancelled() and task.exception() is None:
                await task.result().aclose()
        await asyncio.gather(*self._closing, return_exceptions=True)
        self._notifier.close()

    async def _open(self, endpoint: wire.Endpoint, params: wire.PushParams, num_pages: int, num_tokens: int) -> Push:
        session = await self._session(endpoint)
        push = Push(self._agent, session, self._notifier, params, num_pages, num_tokens, self._layout.page_bytes)
        await push.reserve()
        return push

    async def _session(self, endpoint: wire.Endpoint) -> Session:
        """The live session to `endpoint`, made by whoever comes first; everyone else waits for the same handshake."""
        task = self._sessions.get(endpoint.address)
        if task is None:
            task = asyncio.create_task(self._connect(endpoint), name=f"connect-{endpoint.address}")
            self._sessions[endpoint.address] = task
        try:
            return await asyncio.shield(task)
        except TransferError:
            if self._sessions.get(endpoint.address) is task:
                del self._sessions[endpoint.address]
            raise

    async def _connect(self, endpoint: wire.Endpoint) -> Session:
        session = Session(self._agent, endpoint, self._layout, on_lost=lambda s: self._forget(endpoint, s))
        await session.start()
        return session

    def _forget(self, endpoint: wire.Endpoint, session: Session) -> None:
        """A session that is over makes room for the next one; its sockets are closed off the caller's path."""
        self._sessions.pop(endpoint.address, None)
        closer = asyncio.create_task(session.aclose(), name="close-session")
        self._closing.add(closer)
        closer.add_done_callback(self._closing.discard)


class Push:
    """One attempt on its way to one receiver.

    Mutable state: `_filled` (local pages not posted yet), `_remote` (granted pages not written yet), `_writes`
    (posted), `_failure` (why this push is over). Owned by the event loop's thread; `_worker` posts, one batch after the other.
    """

    def __init__(
        self,
        agent: TransferAgent,
        session: Session,
        notifier: Notifier,
        params: wire.PushParams,
        num_pages: int,
        num_tokens: int,
        page_bytes: int,
    ) -> None:
        self._agent = agent
        self._session = session
        self._notifier = notifier
        self._params = params
        self._num_pages = num_pages
        self._num_tokens = num_tokens
        self._pages_per_write = max(1, MAX_WRITE_BYTES // page_bytes)
        self._filled: list[int] = []
        self._remote: list[int] = []
        self._writes: list[Future[WriteReceipt]] = []
        self._num_posted = 0
        self._work = asyncio.Event()
        self._failure: str | None = None
        self.failed = asyncio.Event()
        """Set when this push is over without having succeeded; whoever computes the KV may stop."""
        self._worker: asyncio.Task[None] | None = None

    @property
    def failure(self) -> str | None:
        """Why it failed, None while it has not."""
        return self._failure

    def __repr__(self) -> str:
        state = self._failure or f"{self._num_posted}/{self._num_pages} posted"
        return f"<Push {self._params.attempt[:8]} {state}>"

    async def reserve(self) -> None:
        """Get the first pages: all of them where the receiver grants whole requests. Raises like `Sender.open`."""
        whole = self._session.welcome.whole_requests
        try:
            self._remote += await self._ask_for(self._num_pages if whole else 1)
        except BaseException as error:
            self._session.release(self._ended(f"not granted: {error}"))
            raise
        self._worker = asyncio.create_task(self._post_all(), name=f"push-{self._params.attempt[:8]}")

    def page_filled(self, local_page: int) -> None:
        """The next page of the prompt is complete in local memory and stays as it is until this push is over."""
        self._filled.append(local_page)
        self._work.set()

    async def finish(self) -> tuple[int, float]:
        """Wait until all pages are at the decoder and say so there. Returns (bytes, seconds with a write under way).

        Raises `AttemptLost` when it failed; the decoder (and the proxy) have been told then, and no write is under way.
        """
        assert self._worker is not None
        await asyncio.gather(self._worker, return_exceptions=True)
        receipts = await self._settle()
        if self._failure is not None or self._num_posted != self._num_pages:
            await self.abort(self._failure or f"{self._num_posted} of {self._num_pages} pages were written")
            raise AttemptLost(f"attempt {self._params.attempt}: {self._failure}")
        num_bytes, seconds = sum(r.num_bytes for r in receipts), busy_seconds(receipts)
        self._session.release(wire.WritesDone(attempt=self._params.attempt, num_bytes=num_bytes, transfer_s=seconds))
        return num_bytes, seconds

    async def abort(self, reason: str) -> None:
        """Give up, and return when no write of ours can land any more. Idempotent.

        A decoder that is frozen keeps this waiting: the writes under way cannot be called back, so the local pages they
        read from must stay as they are.
        """
        self._fail(reason)
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
        await self._settle()
        self._session.release(self._ended(reason))

    def _ended(self, reason: str) -> wire.WritesEnded:
        return wire.WritesEnded(attempt=self._params.attempt, reason=reason)

    def _fail(self, reason: str) -> None:
        """No more writes from here on; tells the proxy at once, since the decoder may be the one that died."""
        if self._failure is not None:
            return
        self._failure = reason
        self.failed.set()
        self._work.set()
        endpoint = self._params.receivers[0]
        epoch = self._session.welcome.epoch
        self._notifier.tell(
            self._params.notify,
            wire.KvFailed(attempt=self._params.attempt, rank=endpoint.rank, epoch=epoch, reason=reason),
        )

    async def _ask_for(self, num_now: int) -> list[int]:
        message = wire.Reserve(
            attempt=self._params.attempt,
            epoch=self._session.welcome.epoch,
            num_pages=self._num_pages,
            num_now=num_now,
            num_tokens=self._num_tokens,
            timeout_s=self._params.timeout_s,
            notify=self._params.notify,
        )
        return await self._session.reserve(message, self._fail)

    async def _post_all(self) -> None:
        try:
            while self._num_posted < self._num_pages and self._failure is None:
                await self._work.wait()
                self._work.clear()
                while self._filled and self._failure is None:
                    await self._post_batch()
        except TransferError as error:
            self._fail(str(error))

    async def _post_batch(self) -> None:
        """Write what is filled, as far as pages are granted; asks for one more where they are granted one by one."""
        if not self._remote:
            self._remote += await self._ask_for(1)
        count = min(len(self._filled), len(self._remote), self._pages_per_write)
        local, self._filled = self._filled[:count], self._filled[count:]
        remote, self._remote = self._remote[:count], self._remote[count:]
        session = self._session
        write = self._agent.write(session.welcome.epoch, local, remote, not_after=session.may_write_until)
        self._writes.append(write)
        self._num_posted += count
        await _watch(write)

    async def _settle(self) -> list[WriteReceipt]:
        """Wait until no posted write is under way; the receipts of those that succeeded."""
        results = await asyncio.gather(*(_watch(w) for w in self._writes), return_exceptions=True)
        for result in results:
            if isinstance(result, TransferError):
                self._fail(str(result))
        return [r for r in results if isinstance(r, WriteReceipt)]


async def _watch(write: Future[WriteReceipt]) -> WriteReceipt:
    """Wait for a write without being able to cancel it: it cannot be."""
    return await asyncio.shield(asyncio.wrap_future(write))


def busy_seconds(receipts: Sequence[WriteReceipt]) -> float:
    """Seconds during which at least one of the writes was under way: the union of their intervals."""
    total, end = 0.0, float("-inf")
    for receipt in sorted(receipts, key=lambda r: r.started):
        total += max(0.0, receipt.finished - max(receipt.started, end))
        end = max(end, receipt.finished)
    return total
