"""The prefiller's end: reserves pages at a decoder, writes filled pages as they come, and says when all are there.

push = await sender.open(...)      pages granted at the decoder, all of the request's or none
push.page_filled(page)             … once per page, in order of the prompt; returns at once
await push.finish()                every byte is at the decoder, and the decoder has been told
push.abort(reason)                 or: no more; returns at once
await push.wait_ended()            no write of ours is under way any more

A write cannot be called back. So a push that fails is over for its caller at once, and by its deadline at the latest,
but goes on existing until its write has ended: only then is the decoder told that it may use its pages again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import zmq.asyncio

from transfer import wire
from transfer.agents.base import TransferAgent, WriteReceipt
from transfer.agents.spans import as_spans
from transfer.errors import AttemptLost, PeerLost, ReservationRefused, TransferError
from transfer.roles.notifier import Notifier
from transfer.roles.session import Session

log = logging.getLogger(__name__)

MAX_WRITE_BYTES = 16 << 20
"""Pages that are filled already travel together, up to this many bytes, so that other attempts get in between."""
CLOSE_TIMEOUT_S = 1.0
"""How long `Sender.aclose` lets writes end and last words be said."""


class Sender:
    """All pushes of one prefiller.

    Mutable state: `_sessions`, the live one per receiver address; `_tasks`, pushes and closers of lost sessions;
    `_is_closed`.
    """

    def __init__(self, agent: TransferAgent, layout: wire.Layout) -> None:
        self._agent = agent
        self._layout = layout
        self._notifier = Notifier()
        self._context = zmq.asyncio.Context()
        self._sessions: dict[str, Session] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

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
        deadline = asyncio.get_running_loop().time() + params.timeout_s
        is_known = endpoint.address in self._sessions
        try:
            return await self._open(endpoint, params, num_pages, num_tokens, deadline)
        except PeerLost:
            if not is_known or self._is_closed:
                raise
            return await self._open(endpoint, params, num_pages, num_tokens, deadline)

    async def aclose(self) -> None:
        """Fail what is still open, and let writes under way end for `CLOSE_TIMEOUT_S`. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        for session in list(self._sessions.values()):
            session.lose(PeerLost("the prefiller is shutting down"))
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_TIMEOUT_S)
        leftover = list(self._tasks)
        for task in leftover:
            task.cancel()
        await asyncio.gather(*leftover, return_exceptions=True)
        await self._notifier.aclose()
        await asyncio.to_thread(self._context.term)

    async def _open(
        self, endpoint: wire.Endpoint, params: wire.PushParams, num_pages: int, num_tokens: int, deadline: float
    ) -> Push:
        session = self._session(endpoint)
        try:
            async with asyncio.timeout_at(deadline):
                await session.ready()
        except TimeoutError:
            raise PeerLost(f"{endpoint.address} did not answer within {params.timeout_s:.1f} s") from None
        push = Push(self._agent, session, self._notifier, params, num_pages, num_tokens, deadline)
        await push.reserve()
        self._own(asyncio.create_task(push.run(), name=f"push-{params.attempt[:8]}"))
        return push

    def _session(self, endpoint: wire.Endpoint) -> Session:
        """The live session to `endpoint`, made by whoever comes first; everyone else waits for the same handshake."""
        if self._is_closed:
            raise PeerLost("the prefiller is shutting down")
        session = self._sessions.get(endpoint.address)
        if session is None:
            session = Session(self._context, self._agent, endpoint, self._layout, on_lost=self._retire)
            self._sessions[endpoint.address] = session
            session.start()
        return session

    def _retire(self, session: Session) -> None:
        """A session that is over makes room for the next one, and is closed when its last write has ended."""
        del self._sessions[session.address]
        self._own(asyncio.create_task(session.drain(), name="close-session"))

    def _own(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class Push:
    """One attempt on its way to one receiver.

    Mutable state: `_filled` (local pages not posted yet), `_remote` (granted pages not written yet), `_receipts` (of
    finished writes), `_num_posted`, `_is_wanted` (`finish` was called), `_failure` (why this push is over), `_result`
    (what `finish` returns or raises). Owned by the event loop's thread; `run` posts, one batch after the other, and
    says the last word.
    """

    def __init__(
        self,
        agent: TransferAgent,
        session: Session,
        notifier: Notifier,
        params: wire.PushParams,
        num_pages: int,
        num_tokens: int,
        deadline: float,
    ) -> None:
        loop = asyncio.get_running_loop()
        self._agent = agent
        self._session = session
        self._notifier = notifier
        self._params = params
        self._num_pages = num_pages
        self._num_tokens = num_tokens
        self._deadline = deadline
        self._filled: list[int] = []
        self._remote: list[int] = []
        self._receipts: list[WriteReceipt] = []
        self._num_posted = 0
        self._is_granted = False
        self._is_wanted = False
        self._work = asyncio.Event()
        self._failure: str | None = None
        self._result: asyncio.Future[tuple[int, float]] = loop.create_future()
        self._ended = asyncio.Event()
        self.failed = asyncio.Event()
        """Set when this push is over without having succeeded; whoever computes the KV may stop."""

    def __repr__(self) -> str:
        state = self._failure or f"{self._num_posted}/{self._num_pages} posted"
        return f"<Push {self._params.attempt[:8]} {state}>"

    @property
    def failure(self) -> str | None:
        """Why it failed, None while it has not."""
        return self._failure

    @property
    def _is_complete(self) -> bool:
        return self._is_wanted and self._num_posted == self._num_pages

    async def reserve(self) -> None:
        """Get the first pages: all of them where the receiver grants whole requests. Raises like `Sender.open`."""
        if self._session.is_open(self._params.attempt):
            raise ReservationRefused(f"attempt {self._params.attempt} is being pushed already")
        whole = self._session.welcome.whole_requests
        try:
            self._remote += await self._ask_for(self._num_pages if whole else 1)
            if self._failure is not None:
                raise ReservationRefused(self._failure)
        except BaseException as error:
            self._session.release(self._last_word(f"not granted: {error}"))
            raise
        self._is_granted = True

    def page_filled(self, local_page: int) -> None:
        """The next page of the prompt is complete in local memory and stays as it is until this push is over."""
        self._filled.append(local_page)
        self._work.set()

    async def finish(self) -> tuple[int, float]:
        """Wait until all pages are at the decoder and it was told. Returns (bytes, seconds with a write under way).

        The decoder is told only if this is called: until then the push can be aborted, though every byte be there.
        Raises `AttemptLost` as soon as that cannot be any more. Either way the local pages may be reused then: what a
        late write carries lands in pages that nobody will read.
        """
        self._is_wanted = True
        self._work.set()
        return await asyncio.shield(self._result)

    def abort(self, reason: str) -> None:
        """No more writes from here on. Idempotent, and without effect on a push that is over.

        Tells the proxy at once, since the decoder may be the one that died; but not while pages are still asked for,
        because `Sender.open` may yet succeed with another session.
        """
        if self._failure is not None or self._result.done():
            return
        self._failure = reason
        self._result.set_exception(AttemptLost(f"attempt {self._params.attempt}: {reason}"))
        self._result.exception()  # marked as seen: nobody may be waiting
        self.failed.set()
        self._work.set()
        self._session.give_up(self._params.attempt, reason)
        if self._is_granted:
            epoch, rank = self._session.welcome.epoch, self._params.receivers[0].rank
            signal = wire.KvFailed(attempt=self._params.attempt, rank=rank, epoch=epoch, reason=reason)
            self._notifier.tell(self._params.notify, signal)

    async def wait_ended(self) -> None:
        """Wait until no write of ours can land any more and the decoder has been told, or the sender is closed.

        A decoder that is frozen keeps this waiting for as long as it likes.
        """
        await self._ended.wait()

    async def run(self) -> None:
        """Write what is filled until all is written and wanted, or the push has failed; then say the last word."""
        timer = asyncio.get_running_loop().call_at(self._deadline, self.abort, "out of time")
        try:
            await self._write_all()
            self._conclude()
        finally:
            timer.cancel()
            self._ended.set()

    async def _write_all(self) -> None:
        try:
            while self._failure is None and not self._is_complete:
                await self._work.wait()
                self._work.clear()
                while self._filled and self._failure is None:
                    await self._write_batch()
        except PeerLost as error:
            self.abort(str(error))
            self._session.lose(error)  # the next attempt shakes hands anew
        except TransferError as error:
            self.abort(str(error))
        except Exception as error:  # border: whoever waits for this push must be told, whatever broke it
            log.exception("%r broke", self)
            self.abort(f"{type(error).__name__}: {error}")

    def _conclude(self) -> None:
        """No write is under way any more: the decoder may read the pages, or use them again."""
        if self._failure is not None:
            self._session.release(self._last_word(self._failure))
            return
        num_bytes, seconds = sum(r.num_bytes for r in self._receipts), busy_seconds(self._receipts)
        done = wire.WritesDone(attempt=self._params.attempt, num_bytes=num_bytes, transfer_s=seconds)
        self._session.release(done)
        self._result.set_result((num_bytes, seconds))

    async def _write_batch(self) -> None:
        """Write what is filled, as far as pages are granted; asks for one more where they are granted one by one."""
        if not self._remote:
            self._remote += await self._ask_for(1)
        if self._failure is not None:
            return
        session = self._session
        pages_per_write = max(1, MAX_WRITE_BYTES // session.welcome.layout.page_bytes)
        count = min(len(self._filled), len(self._remote), pages_per_write)
        local, self._filled = self._filled[:count], self._filled[count:]
        remote, self._remote = self._remote[:count], self._remote[count:]
        self._num_posted += count
        size = session.welcome.layout.page_bytes
        spans = as_spans([(ours * size, theirs * size, size) for ours, theirs in zip(local, remote, strict=True)])
        write = self._agent.write(session.welcome.epoch, spans, not_after=session.may_write_until)
        self._receipts.append(await asyncio.wrap_future(write))

    async def _ask_for(self, num_now: int) -> list[int]:
        message = wire.Reserve(
            attempt=self._params.attempt,
            epoch=self._session.welcome.epoch,
            num_pages=self._num_pages,
            num_now=num_now,
            num_tokens=self._num_tokens,
            timeout_s=max(0.0, self._deadline - asyncio.get_running_loop().time()),
            notify=self._params.notify,
        )
        return await self._session.reserve(message, self.abort)

    def _last_word(self, reason: str) -> wire.WritesEnded:
        return wire.WritesEnded(attempt=self._params.attempt, reason=reason)


def busy_seconds(receipts: Sequence[WriteReceipt]) -> float:
    """Seconds during which at least one of the writes was under way: the union of their intervals."""
    total, end = 0.0, float("-inf")
    for receipt in sorted(receipts, key=lambda r: r.started):
        total += max(0.0, receipt.finished - max(receipt.started, end))
        end = max(end, receipt.finished)
    return total
