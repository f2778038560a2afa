"""The prefiller's end: reserves pages at a decoder, writes what is filled as it comes, and says when all is there.

push = await sender.open(...)                        pages granted at the decoder, all of the request's or none
push.page_filled(ordinal, page)                      … once per page of `push.table`; returns at once
push.layers_filled(ordinal, page, first, end)        … or layer by layer, as they are computed
await push.finish()                                  every byte is at the decoder, and the decoder has been told
push.abort(reason)                                   or: no more; returns at once
await push.wait_ended()                              no write of ours is under way any more

A write cannot be called back. So a push that fails is over for its caller at once, and by its deadline at the latest,
but goes on existing until its writes have ended: only then is the decoder told that it may use its pages again.

A decoder of several tensor-parallel ranks has one receiver each. A sender is one rank of the prefiller and writes to
those that need its heads. Pages are acquired in ascending order of the decoder's ranks, through every rank up to the
highest that is written to: so every attempt holds ranks in the same order, whoever pushes it, and no two attempts can
each hold what the other one waits for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import zmq.asyncio

from transfer import wire
from transfer.agents.base import TransferAgent, WriteReceipt
from transfer.errors import AttemptLost, IllegalTransition, PeerLost, ReservationRefused, TransferError
from transfer.plan.blocks import PageTable, page_table
from transfer.roles.handshake import Identity
from transfer.roles.notifier import Notifier
from transfer.roles.rank_push import Filled, RankPush, num_units
from transfer.roles.session import Session

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 1.0
"""How long `Sender.aclose` lets writes end and last words be said."""


class Sender:
    """All pushes of one rank of a prefiller.

    Mutable state: `_sessions`, the live one per receiver address; `_pushes`, those not ended; `_tasks`, closers of lost
    sessions and askers for more pages; `_is_closed`.
    """

    def __init__(self, agent: TransferAgent, identity: Identity) -> None:
        self._agent = agent
        self._identity = identity
        self._notifier = Notifier()
        self._context = zmq.asyncio.Context()
        self._sessions: dict[str, Session] = {}
        self._pushes: set[Push] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def __repr__(self) -> str:
        rank = self._identity.layout.rank.index
        return f"<Sender rank={rank} {len(self._sessions)} receivers, {len(self._pushes)} pushes>"

    async def open(self, params: wire.PushParams, *, num_tokens: int, keys: Sequence[bytes] = ()) -> Push:
        """Reserve the pages of a prompt of `num_tokens` tokens; waits `params.timeout_s` at most.

        `params.receivers` are all ranks of one decoder. `keys` name the pages' contents (`transfer.plan.keys`); without
        them nothing is shared. Raises `ReservationRefused`, `HandshakeRefused` or `PeerLost`; nothing is held then. A
        receiver that was restarted since the last push is shaken hands with anew.
        """
        endpoints = sorted(params.receivers, key=lambda endpoint: endpoint.rank)
        if [endpoint.rank for endpoint in endpoints] != list(range(len(endpoints))) or not endpoints:
            raise TransferError(f"receivers must be ranks 0, 1, … of one decoder, got {endpoints}")
        layout = self._identity.layout
        table = page_table(layout.kv.groups, num_tokens, layout.chunk_size)
        if keys and len(keys) != len(table):
            raise TransferError(f"{len(keys)} keys for {len(table)} pages")
        deadline = asyncio.get_running_loop().time() + params.timeout_s
        is_known = any(endpoint.address in self._sessions for endpoint in endpoints)
        try:
            return await self._open(endpoints, params, table, list(keys), deadline)
        except PeerLost:
            if not is_known or self._is_closed:
                raise
            return await self._open(endpoints, params, table, list(keys), deadline)

    async def aclose(self) -> None:
        """Fail what is still open, and let writes under way end for `CLOSE_TIMEOUT_S`. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        for session in list(self._sessions.values()):
            session.lose(PeerLost("the prefiller is shutting down"))
        for push in list(self._pushes):
            push.abort("the prefiller is shutting down")
        ends = [asyncio.ensure_future(push.wait_ended()) for push in self._pushes]
        if waiting := {*ends, *self._tasks}:
            await asyncio.wait(waiting, timeout=CLOSE_TIMEOUT_S)
        for task in (leftover := [*ends, *self._tasks]):
            task.cancel()
        await asyncio.gather(*leftover, return_exceptions=True)
        for push in list(self._pushes):
            push.end()
        await self._notifier.aclose()
        await asyncio.to_thread(self._context.term)

    async def _open(
        self,
        endpoints: Sequence[wire.Endpoint],
        params: wire.PushParams,
        table: PageTable,
        keys: list[bytes],
        deadline: float,
    ) -> Push:
        sessions = [self._session(endpoint) for endpoint in endpoints]
        try:
            async with asyncio.timeout_at(deadline):
                for session in sessions:
                    await session.ready()
        except TimeoutError:
            raise PeerLost(f"{endpoints[0].address} did not answer within {params.timeout_s:.1f} s") from None
        _check_ranks(endpoints, sessions)
        push = Push(self._agent, sessions, self._notifier, self._own, params, table, keys, deadline, self._identity)
        self._pushes.add(push)
        push.when_ended(self._pushes.discard)
        await push.acquire()
        return push

    def _session(self, endpoint: wire.Endpoint) -> Session:
        """The live session to `endpoint`, made by whoever comes first; everyone else waits for the same handshake."""
        if self._is_closed:
            raise PeerLost("the prefiller is shutting down")
        session = self._sessions.get(endpoint.address)
        if session is None:
            session = Session(self._context, self._agent, endpoint, self._identity, on_lost=self._retire)
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
    """One attempt on its way to the ranks of one decoder that this sender writes to.

    Mutable state: `_ranks` (what has been acquired, in order), `_asking` (where pages are asked for now), `_filled`
    (per page, the layers that were filled: one bit each), `_is_wanted` (`finish` was called), `_failure` (why this push
    is over), `_result` (what `finish` returns or raises), `_ended`. Event loop's thread only.
    """

    def __init__(
        self,
        agent: TransferAgent,
        sessions: Sequence[Session],
        notifier: Notifier,
        own: Callable[[asyncio.Task[None]], None],
        params: wire.PushParams,
        table: PageTable,
        keys: list[bytes],
        deadline: float,
        identity: Identity,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.table = table
        """Which page of the attempt is which block of which layer group."""
        self.failed = asyncio.Event()
        """Set when this push is over without having succeeded; whoever computes the KV may stop."""
        self._agent = agent
        self._sessions = sessions
        self._notifier = notifier
        self._own = own
        self._params = params
        self._keys = keys
        self._deadline = deadline
        self._identity = identity
        self._ranks: list[RankPush] = []
        self._asking: Session | None = None
        self._filled = [0] * len(table)
        self._is_granted = False
        self._is_wanted = False
        self._failure: str | None = None
        self._result: asyncio.Future[tuple[int, float]] = loop.create_future()
        self._ended: asyncio.Future[None] = loop.create_future()
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        state = self._failure or ", ".join(map(repr, self._ranks))
        return f"<Push {self._params.attempt[:8]} {state}>"

    @property
    def failure(self) -> str | None:
        """Why it failed, None while it has not."""
        return self._failure

    def is_present(self, ordinal: int) -> bool:
        """Whether the decoder has this page's bytes already, on every rank: filling it changes nothing."""
        return all(rank.is_present(ordinal) for rank in self._ranks)

    # ── the caller's side ───────────────────────────────────────────────────────────────────────────────────────────

    def page_filled(self, ordinal: int, local_page: int, *, after: Callable[[], object] | None = None) -> None:
        """All layers of a page are complete in local memory, which stays as it is until this push is over.

        `after` is called on the agent's thread before the bytes are read (a CUDA event's ``synchronize``). Raises
        `IllegalTransition` for layers that were filled before.
        """
        self.pages_filled([ordinal], [local_page], after=after)

    def pages_filled(
        self, ordinals: Sequence[int], local_pages: Sequence[int], *, after: Callable[[], object] | None = None
    ) -> None:
        """As `page_filled`, for many pages of one layer group."""
        if ordinals:
            self._fill(ordinals, local_pages, 0, self._num_layers(ordinals[0]), after)

    def layers_filled(
        self,
        ordinal: int,
        local_page: int,
        first_layer: int,
        end_layer: int,
        *,
        after: Callable[[], object] | None = None,
    ) -> None:
        """As `page_filled`, for layers `first_layer` to `end_layer` of the page's group, counted from 0."""
        self._fill([ordinal], [local_page], first_layer, end_layer, after)

    async def finish(self) -> tuple[int, float]:
        """Wait until all pages are at the decoder and it was told. Returns (bytes, seconds with a write under way).

        The decoder is told only if this is called: until then the push can be aborted, though every byte be there.
        Raises `AttemptLost` as soon as that cannot be any more. Either way the local pages may be reused then: what a
        late write carries lands in pages that nobody will read.
        """
        self._is_wanted = True
        self._settle()
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
        for rank in self._ranks:
            rank.stop()
            rank.session.give_up(self._params.attempt, reason)
            if self._is_granted:
                epoch = rank.session.welcome.epoch
                signal = wire.KvFailed(attempt=self._params.attempt, rank=rank.rank, epoch=epoch, reason=reason)
                self._notifier.tell(self._params.notify, signal)
        if self._asking is not None:
            self._asking.give_up(self._params.attempt, reason)
        self._settle()

    async def wait_ended(self) -> None:
        """Wait until no write of ours can land any more and the decoder has been told, or the sender is closed.

        A decoder that is frozen keeps this waiting for as long as it likes.
        """
        await asyncio.shield(self._ended)

    # ── the sender's side ───────────────────────────────────────────────────────────────────────────────────────────

    async def acquire(self) -> None:
        """Get pages at every rank this sender writes to, in ascending order. Raises like `Sender.open`."""
        try:
            last = max(index for index, session in enumerate(self._sessions) if not session.span_map.is_empty)
            for session in self._sessions[: last + 1]:
                await self._acquire(session)
                if self._failure is not None:
                    raise ReservationRefused(self._failure)
        except BaseException as error:
            self._asking = None
            self.abort(f"not granted: {error}")
            raise
        self._is_granted = True
        self._timer = asyncio.get_running_loop().call_at(self._deadline, self.abort, "out of time")

    def when_ended(self, callback: Callable[[Push], object]) -> None:
        self._ended.add_done_callback(lambda _: callback(self))

    def end(self) -> None:
        """It has ended, or the sender is closed: whoever waits for the end waits no longer."""
        if self._timer is not None:
            self._timer.cancel()
        if not self._ended.done():
            self._ended.set_result(None)

    def cancelled(self, reason: str) -> None:
        """A receiver withdraws the attempt, or its session is lost."""
        self.abort(reason)

    def taken(self, count: int) -> None:
        """Of interest only to those who write."""

    def changed(self, rank: RankPush, error: TransferError | None) -> None:
        """A write has landed, or failed: then the next attempt shakes hands anew."""
        if error is not None:
            self.abort(str(error))
            if isinstance(error, PeerLost):
                rank.session.lose(error)
        self._settle()

    def wants_pages(self, rank: RankPush) -> None:
        """Where pages are granted one by one: this rank has something to write and nowhere to write it."""
        self._own(asyncio.create_task(self._ask_for_one(rank), name="ask-for-a-page"))

    # ── below ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _acquire(self, session: Session) -> None:
        """One rank's pages; where nothing will be written, only the turn is waited for."""
        attempt = self._params.attempt
        if session.is_open(attempt):
            raise ReservationRefused(f"attempt {attempt} is being pushed already")
        self._asking = session
        if session.span_map.is_empty:
            try:
                await session.reserve(self._message(session, len(self.table)), self)
            finally:
                session.leave(attempt)
            return
        rank = RankPush(self._agent, session, self.table, attempt, self)
        self._ranks.append(rank)
        num_now = len(self.table) if session.welcome.whole_requests else 1
        rank.granted(await session.reserve(self._message(session, num_now), rank))
        self._asking = None

    async def _ask_for_one(self, rank: RankPush) -> None:
        try:
            rank.granted(await rank.session.reserve(self._message(rank.session, 1), rank))
        except TransferError as error:
            self.abort(str(error))

    def _message(self, session: Session, num_now: int) -> wire.Reserve:
        return wire.Reserve(
            attempt=self._params.attempt,
            epoch=session.welcome.epoch,
            num_pages=len(self.table),
            num_now=num_now,
            num_tokens=self.table.num_tokens,
            timeout_s=max(0.0, self._deadline - asyncio.get_running_loop().time()),
            notify=self._params.notify,
            keys=self._keys,
        )

    def _num_layers(self, ordinal: int) -> int:
        return num_units(self._identity.layout, self.table.pages[ordinal].group)

    def _fill(
        self,
        ordinals: Sequence[int],
        local_pages: Sequence[int],
        first_layer: int,
        end_layer: int,
        after: Callable[[], object] | None,
    ) -> None:
        layers = (1 << end_layer) - (1 << first_layer)
        for ordinal in ordinals:
            if self._filled[ordinal] & layers:
                raise IllegalTransition(f"{self!r}: layers of page {ordinal} were filled twice")
            self._filled[ordinal] |= layers
        if self._failure is not None:
            return
        group = self.table.pages[ordinals[0]].group
        for rank in self._ranks:
            rank.filled(Filled(group, first_layer, end_layer, list(ordinals), list(local_pages), after))

    def _settle(self) -> None:
        """Say the last word wherever it is due; the push has ended when all ranks have heard it."""
        if self._failure is not None:
            for rank in self._ranks:
                if rank.is_quiet:
                    rank.session.release(wire.WritesEnded(attempt=self._params.attempt, reason=self._failure))
            if all(rank.is_quiet for rank in self._ranks):
                self.end()
        elif self._is_wanted and not self._result.done() and all(rank.is_complete for rank in self._ranks):
            self._conclude()

    def _conclude(self) -> None:
        """All is there: the decoder may read the pages."""
        receipts = [receipt for rank in self._ranks for receipt in rank.receipts]
        for rank in self._ranks:
            num_bytes, seconds = sum(r.num_bytes for r in rank.receipts), busy_seconds(rank.receipts)
            done = wire.WritesDone(attempt=self._params.attempt, num_bytes=num_bytes, transfer_s=seconds)
            rank.session.release(done)
        self._result.set_result((sum(r.num_bytes for r in receipts), busy_seconds(receipts)))
        self.end()


def _check_ranks(endpoints: Sequence[wire.Endpoint], sessions: Sequence[Session]) -> None:
    """Whoever answers at an address must be the rank that is expected there, of as many as there are addresses."""
    for endpoint, session in zip(endpoints, sessions, strict=True):
        theirs = session.welcome.layout
        if (theirs.tp_rank, theirs.tp_size) != (endpoint.rank, len(endpoints)):
            raise TransferError(
                f"{endpoint.address} is rank {theirs.tp_rank} of {theirs.tp_size}, "
                f"not {endpoint.rank} of {len(endpoints)} as the receivers' list says"
            )


def busy_seconds(receipts: Sequence[WriteReceipt]) -> float:
    """Seconds during which at least one of the writes was under way: the union of their intervals."""
    total, end = 0.0, float("-inf")
    for receipt in sorted(receipts, key=lambda r: r.started):
        total += max(0.0, receipt.finished - max(receipt.started, end))
        end = max(end, receipt.finished)
    return total
