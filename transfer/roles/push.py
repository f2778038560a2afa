"""One attempt on its way to a decoder: it has pages on all of the decoder's ranks, granted by rank 0, or none.

A write cannot be called back. So a push that fails is over for its caller at once, and by its deadline at the latest.
It goes on existing until its writes have ended, to all ranks. Only then is the decoder told, in one word, that it may
use its pages again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from transfer import wire
from transfer.agents.base import Event, TransferAgent, WriteReceipt
from transfer.errors import AttemptLost, IllegalTransition, PeerLost, ReceiverLost, ReservationRefused, TransferError
from transfer.plan.blocks import PageTable
from transfer.plan.layout import RankLayout
from transfer.roles.notifier import Notifier
from transfer.roles.rank_push import FilledLayers, RankPush, num_units
from transfer.roles.route import Route
from transfer.roles.session import Session
from transfer.roles.standing import LastWord

WORD_BITS = 64


@dataclass(frozen=True)
class PushRequest:
    """A `PushRequest` tells what is to be pushed. `deadline` is on the loop's clock."""

    attempt: str
    table: PageTable
    keys: list[bytes]
    notify: str | None
    capability: str | None
    term: int | None
    receiver_epoch: str | None
    """The only process that may grant pages; with None it is the one that the sender has shaken hands with."""
    deadline: float


class Push:
    """A `Push` is one attempt on its way to the ranks of one decoder that this sender writes to: perhaps to none of
    them.

    Mutable state: `_session` (where pages were asked for), `_ranks` (the ranks that are written to, once granted),
    `_is_owing` (the decoder waits for our last word), `_is_asking` (for one more page), `_filled` (per page the layers
    that were filled, one bit each), `_is_granted`, `_is_wanted` (`finish` was called), `_failure` (why this push is
    over), `_result` (what `finish` returns or raises), `_waiters` (those who wait in `finish`), `_drainers` (those who
    wait until nothing that was filled is left to read), `_ended`, `_timer` (for the deadline). Use it on the event
    loop's thread only. Implements `session.PushListener` and `rank_push.WholePush`.
    """

    def __init__(
        self,
        agent: TransferAgent,
        layout: RankLayout,
        route: Route,
        request: PushRequest,
        notifier: Notifier,
        own: Callable[[asyncio.Task[None]], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.table = request.table
        """Tells which page of the attempt is which block of which layer group."""
        self.failed = asyncio.Event()
        """Is set when this push is over without having succeeded. The engine that computes the KV may stop."""
        self.is_receiver_lost = False
        """Is True where this push is over because the decoder's receiver has fallen silent."""
        self._agent = agent
        self._layout = layout
        self._route = route
        self._request = request
        self._notifier = notifier
        self._own = own
        self._ranks: list[RankPush] = []
        self._session: Session | None = None
        self._is_owing = False
        self._is_asking = False
        most_layers = max((num_units(self._layout, group) for group in range(len(self.table.groups))), default=1)
        self._filled = np.zeros((len(self.table), -(-most_layers // WORD_BITS)), dtype=np.uint64)
        self._is_granted = False
        self._is_wanted = False
        self._failure: str | None = None
        self._result: asyncio.Future[tuple[int, float]] = loop.create_future()
        self._waiters: list[asyncio.Future[None]] = []
        self._drainers: list[Callable[[], object]] = []
        self._ended: asyncio.Future[None] = loop.create_future()
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        state = self._failure or ", ".join(map(repr, self._ranks))
        return f"<Push {self._request.attempt[:8]} {state}>"

    @property
    def failure(self) -> str | None:
        """Returns why the push failed, or None while it has not."""
        return self._failure

    @property
    def result(self) -> tuple[int, float] | None:
        """Returns what `finish` returns, or None while the push has not succeeded."""
        return self._result.result() if self._failure is None and self._result.done() else None

    @property
    def present(self) -> frozenset[int]:
        """Returns the ordinals of the pages whose bytes the decoder has already, on every rank.

        A push that writes to no rank has all its pages there.
        """
        ranks = [rank.present for rank in self._ranks]
        return frozenset.intersection(*ranks) if ranks else frozenset(range(len(self.table)))

    def is_present(self, ordinal: int) -> bool:
        """Returns whether the decoder has this page's bytes already, on every rank. Then filling it changes nothing."""
        return all(ordinal in rank.present for rank in self._ranks)

    @property
    def is_quiet(self) -> bool:
        """Returns whether no write of ours can land any more, unless more is posted."""
        return all(rank.is_quiet for rank in self._ranks)

    @property
    def num_cached(self) -> int:
        """Counts the pages at the front which take none of the decoder's buffer, on any rank: its own KV cache has
        them."""
        return min((rank.num_cached for rank in self._ranks), default=0)

    @property
    def num_sent(self) -> int:
        """Counts the pages whose bytes travel to some rank once they are filled."""
        return len(self.table) - len(self.present)

    # ── the caller's side ───────────────────────────────────────────────────────────────────────────────────────────

    def page_filled(self, ordinal: int, local_page: int, *, after: Event | None = None) -> None:
        """Says that all layers of a page are complete in local memory. The memory must stay as it is until this push is
        over.

        The layers may also be about to be complete: no byte is read before ``after.query()`` returns true (`after` is a
        `torch.cuda.Event` that was recorded behind the work, for example). It is asked on the agent's thread, and
        delays no other push. Raises `IllegalTransition` for layers that were filled before, and `TransferError` for a
        page or layers that do not exist, or an `after` that has no ``query``; nothing changes then.
        """
        self.pages_filled([ordinal], [local_page], after=after)

    def pages_filled(
        self,
        ordinals: Sequence[int],
        local_pages: Sequence[int],
        first_layer: int = 0,
        end_layer: int | None = None,
        *,
        after: Event | None = None,
    ) -> None:
        """Does the same as `page_filled` or `layers_filled` for many pages of one layer group."""
        if len(ordinals):
            self._fill(ordinals, local_pages, first_layer, end_layer, after)

    def layers_filled(
        self,
        ordinal: int,
        local_page: int,
        first_layer: int,
        end_layer: int,
        *,
        after: Event | None = None,
    ) -> None:
        """Does the same as `page_filled` for layers `first_layer` to `end_layer` of the page's group, counted from
        0."""
        self._fill([ordinal], [local_page], first_layer, end_layer, after)

    async def finish(self) -> tuple[int, float]:
        """Waits until all pages are at the decoder and it was told. Returns (bytes, seconds with a write under way).

        The decoder is told only if this is called: until then the push can be aborted, even if every byte is there.
        Raises `AttemptLost` as soon as success is not possible any more. After either outcome the local pages may be
        reused: what a late write carries lands in pages that nobody will read.
        """
        self._is_wanted = True
        self._settle()
        for rank in self._ranks:
            rank.post()
        if not self._result.done():
            # Like `asyncio.shield`, but a turn of the loop sooner: waiters may be cancelled without any effect on it.
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
        return self._result.result()

    def abort(self, reason: str) -> None:
        """Posts no more writes from here on. Idempotent, and without effect on a push that is over.

        Tells the proxy at once, since the decoder may be the one that died. It does not tell the proxy while pages are
        still asked for, because `Sender.open` may yet succeed with another session.
        """
        if self._failure is not None or self._result.done():
            return
        self._failure = reason
        self._result.set_exception(AttemptLost(f"attempt {self._request.attempt}: {reason}"))
        self._result.exception()  # marked as seen: nobody may be waiting
        self._wake()
        self.failed.set()
        for rank in self._ranks:
            rank.stop()
        if self._session is not None:
            self._session.give_up(self._request.attempt, reason)
            if self._is_granted:
                self._tell_failed(self._session, reason)
        self._settle()

    def when_drained(self, callback: Callable[[], object]) -> None:
        """Calls back when nothing that was filled so far is read any more, perhaps at once. Then its local pages may be
        used again although the push goes on."""
        self._drainers.append(callback)
        self._tell_drained()

    async def wait_ended(self) -> None:
        """Waits until no write of ours can land any more and the decoder has been told, or until the sender is closed.

        With a decoder that is frozen this waits for as long as the decoder stays so.
        """
        await asyncio.shield(self._ended)

    # ── the sender's side ───────────────────────────────────────────────────────────────────────────────────────────

    async def acquire(self) -> None:
        """Gets pages, if there is a rank that this sender writes to. Raises what `Sender.open` raises.

        Where the receiver turns out to have been restarted, the pages are the new one's.
        """
        try:
            await self._route.revive()
            try:
                await self._join(self._route.session)
            except PeerLost as error:
                await self._route.renew(error)
                await self._join(self._route.session)
        except BaseException as error:
            self.abort(f"not granted: {error}")
            raise
        self._is_granted = True
        self._timer = asyncio.get_running_loop().call_at(self._request.deadline, self.abort, "out of time")

    def when_ended(self, callback: Callable[[Push], object]) -> None:
        self._ended.add_done_callback(lambda _: callback(self))

    def end(self) -> None:
        """Notes that the push has ended, or that the sender is closed. Nobody waits for its end any more."""
        if self._timer is not None:
            self._timer.cancel()
        if not self._ended.done():
            self._ended.set_result(None)

    def cancelled(self, error: TransferError) -> None:
        """Ends the push, because a receiver withdraws the attempt, or its session is lost."""
        self.is_receiver_lost = self.is_receiver_lost or isinstance(error, ReceiverLost)
        self.abort(str(error))

    def taken(self, count: int) -> None:
        """Notes that the decoder has read the first `count` pages of a windowed attempt, which has one rank."""
        for rank in self._ranks:
            rank.taken(count)

    def changed(self, rank: RankPush, error: TransferError | None) -> None:
        """Notes that a write has landed, or failed. After a `PeerLost` the next attempt shakes hands anew."""
        if error is not None:
            self.abort(str(error))
            if isinstance(error, PeerLost):
                rank.session.lose(error)
        self._tell_drained()
        self._settle()

    def wants_pages(self, rank: RankPush) -> None:
        """Asks for one more page, because this rank has something to write and nowhere to write it. This occurs only
        where pages are granted one by one."""
        if not self._is_asking:
            self._is_asking = True
            self._own(asyncio.create_task(self._ask_for_one(rank.session), name="ask-for-a-page"))

    # ── below ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _join(self, session: Session) -> None:
        """Asks for pages there, for writes to each rank that our heads go to. Where they go to none, does nothing."""
        attempt = self._request.attempt
        if self._failure is not None:
            raise ReservationRefused(self._failure)
        if not session.targets:
            return
        if session.is_open(attempt):
            raise ReservationRefused(f"attempt {attempt} is being pushed already")
        self._session = session
        num_now = len(self.table) if session.welcome.whole_requests else 1
        try:
            grant = await session.reserve(self._message(session, num_now), self)
            if self._failure is not None:  # it failed in the instant of the grant
                raise ReservationRefused(self._failure)
        except BaseException as error:
            session.release(wire.WritesEnded(attempt=attempt, reason=f"not granted: {error}"))
            raise
        self._ranks = [RankPush(self._agent, session, to, self.table, attempt, self) for to in session.targets]
        self._is_owing = True
        for rank in self._ranks:
            rank.granted(grant)

    async def _ask_for_one(self, session: Session) -> None:
        if self._failure is not None:
            return
        try:
            grant = await session.reserve(self._message(session, 1), self)
        except TransferError as error:
            self.abort(str(error))
            return
        self._is_asking = False
        for rank in self._ranks:
            rank.granted(grant)

    def _message(self, session: Session, num_now: int) -> wire.Reserve:
        receiver_epoch = self._request.receiver_epoch
        return wire.Reserve(
            attempt=self._request.attempt,
            epoch=session.welcome.epoch if receiver_epoch is None else receiver_epoch,
            num_pages=len(self.table),
            num_now=num_now,
            num_tokens=self.table.num_tokens,
            timeout_s=max(0.0, self._request.deadline - asyncio.get_running_loop().time()),
            notify=self._request.notify,
            keys=self._request.keys,
            capability=self._request.capability,
            term=self._request.term,
        )

    def _fill(
        self,
        ordinals: Sequence[int],
        local_pages: Sequence[int],
        first_layer: int,
        end_layer: int | None,
        after: Event | None,
    ) -> None:
        if len(ordinals) != len(local_pages):
            raise TransferError(f"{len(local_pages)} local pages for {len(ordinals)} ordinals")
        if after is not None and not hasattr(after, "query"):
            raise TransferError(
                f"`after` is asked whether it has happened (a torch.cuda.Event, say), and {after!r} is not"
            )
        which = int(ordinals[0]) if len(ordinals) == 1 else np.asarray(ordinals, dtype=np.int64)
        group = self._group_of_one(which) if isinstance(which, int) else self._group_of(which)
        num_layers = num_units(self._layout, group)
        end_layer = num_layers if end_layer is None else end_layer
        if not 0 <= first_layer < end_layer <= num_layers:
            raise TransferError(f"group {group} has {num_layers} layers to fill, not {first_layer} to {end_layer}")
        layers = _bits(first_layer, end_layer, self._filled.shape[1])
        if (self._filled[which] & layers).any():
            raise IllegalTransition(
                f"{self!r}: layers {first_layer} to {end_layer} of pages {_some(ordinals)} were filled twice"
            )
        self._filled[which] |= layers
        if self._failure is None:
            for rank in self._ranks:
                rank.filled(FilledLayers(group, first_layer, end_layer, list(ordinals), list(local_pages), after))

    def _group_of_one(self, ordinal: int) -> int:
        """Does the same as `_group_of` for one page, in a tenth of the time: a small push waits for it."""
        if not 0 <= ordinal < len(self.table):
            raise TransferError(f"{self.table!r} has no ordinals {ordinal}")
        return int(self.table.group_of[ordinal])

    def _group_of(self, which: np.ndarray[Any, np.dtype[np.int64]]) -> int:
        """Returns the one group of these pages, each of which is named once. Raises `TransferError` where that is not
        so.

        It uses whole-array operations: where there are thousands of pages, nothing travels before they have been looked
        at.
        """
        if which.min() < 0 or which.max() >= len(self.table):
            raise TransferError(f"{self.table!r} has no ordinals {_some(which.tolist())}")
        is_named = np.zeros(len(self.table), dtype=np.bool_)
        is_named[which] = True
        if np.count_nonzero(is_named) != len(which):
            raise TransferError(f"{len(which)} ordinals, of which {np.count_nonzero(is_named)} are different")
        groups = self.table.group_of[which]
        if (groups != groups[0]).any():
            raise TransferError(f"ordinals of groups {sorted(set(groups.tolist()))}: one group at a time")
        return int(groups[0])

    def _tell_failed(self, session: Session, reason: str) -> None:
        """Tells the proxy that the attempt has failed. It speaks for one rank only: one that lacks its KV is enough for
        the proxy."""
        rank, epoch = self._ranks[0].rank, session.welcome.epoch
        signal = wire.KvFailed(attempt=self._request.attempt, rank=rank, epoch=epoch, reason=reason)
        self._notifier.tell(self._request.notify, signal)

    def _settle(self) -> None:
        """Says the last word, once, when no write to any rank is under way. The push has ended then."""
        if self._failure is not None:
            if all(rank.is_quiet for rank in self._ranks):
                has_broken = any(rank.has_broken for rank in self._ranks)
                self._release(
                    wire.WritesEnded(attempt=self._request.attempt, reason=self._failure, has_broken=has_broken)
                )
        elif self._is_wanted and not self._result.done() and all(rank.is_complete for rank in self._ranks):
            self._conclude()

    def _tell_drained(self) -> None:
        if self._drainers and all(rank.is_drained for rank in self._ranks):
            drainers, self._drainers = self._drainers, []
            for callback in drainers:
                callback()

    def _wake(self) -> None:
        """Wakes everybody who waits in `finish`."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    def _conclude(self) -> None:
        """Ends the push with success, because all bytes are there. The decoder may read the pages."""
        receipts = [receipt for rank in self._ranks for receipt in rank.receipts]
        num_bytes, seconds = sum(r.num_bytes for r in receipts), busy_seconds(receipts)
        self._result.set_result((num_bytes, seconds))
        self._release(wire.WritesDone(attempt=self._request.attempt, num_bytes=num_bytes, transfer_s=seconds))
        self._wake()

    def _release(self, word: LastWord) -> None:
        """Says the last word to the decoder, if one is owed and was not said, and ends the push."""
        if self._session is not None and self._is_owing:
            self._is_owing = False
            self._session.release(word)
        self.end()


def busy_seconds(receipts: Sequence[WriteReceipt]) -> float:
    """Returns the seconds during which at least one of the writes was under way: the union of their intervals."""
    total, end = 0.0, float("-inf")
    for receipt in sorted(receipts, key=lambda r: r.started):
        total += max(0.0, receipt.finished - max(receipt.started, end))
        end = max(end, receipt.finished)
    return total


def _bits(first: int, end: int, num_words: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Returns bits `first` to `end` of `num_words` words, the lowest first."""
    bits = (1 << end) - (1 << first)
    return np.array([bits >> WORD_BITS * word & (1 << WORD_BITS) - 1 for word in range(num_words)], dtype=np.uint64)


def _some(numbers: Sequence[int]) -> str:
    """Returns the first few numbers as text, for an error's message."""
    return ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")
