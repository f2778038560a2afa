"""One attempt on its way to one rank of the decoder. This decides which spans are written when, and when that is over.

It is driven by calls and callbacks on the event loop's thread; nothing here waits. Pages (or some layers of them) are
*filled* by the engine that computes them, *posted* once the decoder's rank has given pages for them, and *landed* when
the agent's future is done. A write cannot be called back. So whatever happens, this is not over before every posted
write has landed or failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import compress, islice
from operator import not_
from typing import Any, Protocol

import numpy as np

from transfer import wire
from transfer.agents.base import Event, Spans, Tag, TransferAgent, WriteReceipt
from transfer.agents.spans import merge
from transfer.errors import AttemptLost, TransferError
from transfer.plan.blocks import PageTable
from transfer.plan.layout import RankLayout
from transfer.plan.tags import tag_of, tag_spans
from transfer.roles.session import GrantedPages, Session, Target

log = logging.getLogger(__name__)

MAX_WRITE_BYTES = 32 << 20
"""The most bytes of one write. Pages that are filled already travel together, with their tags. It is as much as an
agent posts as one piece, so that the tags follow their pages closely and other attempts get in between."""
FIRST_WRITE_PAGES = 192
"""The most pages of a first write. Preparing thousands of pages takes as long as copying some, so a small first write
gives the agent something to do meanwhile."""
MAX_WINDOW_WRITE_BYTES = 16 << 20
"""The most bytes of one write where the decoder waits for every part. It takes the place of `MAX_WRITE_BYTES` there."""
MAX_WRITE_PAGES = 16_384
"""The most pages of one write. Preparing more keeps the event loop for longer than its other work should wait."""
HEAD_START_S = 1e-3
"""The time, in seconds, for which the agent has the interpreter to itself to begin with a first write. Event loops know
nothing shorter. Where the GPU copies there is none: the write would be over by then."""
MAX_LOOKED_AT = 64
"""The most entries of the queue that are asked about their events before each write. The entries behind them wait a
little longer."""
MAX_UNDER_WAY = 2
"""The most writes that are posted at once. The next one is being prepared and queued while the agent is copying."""
MAX_UNDER_WAY_ON_GPU = 4
"""The same where the GPU copies. It moves `MAX_WRITE_BYTES` in a tenth of a millisecond, which is less than it takes to
prepare them, to hand them over, and to hear that they have landed."""


@dataclass(slots=True)
class FilledLayers:
    """`FilledLayers` names layers `first_layer` to `end_layer` of some pages of one group, which are complete in local
    memory."""

    group: int
    first_layer: int
    end_layer: int
    ordinals: list[int]
    local_pages: list[int]
    after: Event | None = None
    """The event that tells when the bytes are there. Pages with equal events may travel in the same write."""

    @property
    def num_layers(self) -> int:
        return self.end_layer - self.first_layer

    @property
    def layers(self) -> tuple[int, int, int]:
        return self.group, self.first_layer, self.end_layer

    def continues(self, other: FilledLayers) -> bool:
        """Returns whether `other` has the same layers of more pages, and may go on behind these."""
        return self.layers == other.layers and self.after == other.after

    def deepens(self, other: FilledLayers) -> bool:
        """Returns whether these are the next layers of the same pages as in `other`."""
        return (
            (self.group, self.first_layer) == (other.group, other.end_layer)
            and (self.ordinals, self.local_pages) == (other.ordinals, other.local_pages)
            and self.after == other.after
        )

    def only(self, wanted: Iterable[bool]) -> FilledLayers:
        """Returns the same for those pages only for which `wanted`, a bool for each, is True."""
        kept = list(wanted)
        ordinals, local_pages = list(compress(self.ordinals, kept)), list(compress(self.local_pages, kept))
        return replace(self, ordinals=ordinals, local_pages=local_pages)

    def head(self, count: int) -> FilledLayers:
        """Returns the same for the first `count` pages, which are taken out of this one."""
        first = replace(self, ordinals=self.ordinals[:count], local_pages=self.local_pages[:count])
        del self.ordinals[:count], self.local_pages[:count]
        return first


class WholePush(Protocol):
    """A `WholePush` pushes the attempt to all its ranks."""

    def cancelled(self, error: TransferError) -> None:
        """Gives the attempt up, because the decoder has said something that cannot be true."""

    def changed(self, rank: RankPush, error: TransferError | None) -> None:
        """Hears that a write has landed, or failed with `error`."""

    def wants_pages(self, rank: RankPush) -> None:
        """Hears that there is something to write and no page for it. This occurs only where pages are granted one by
        one."""


class RankPush:
    """A `RankPush` holds the pages of one attempt, on their way to one rank.

    Mutable state: `_remote` (pages granted there, by ordinal from `_num_cached` on; those before are in the decoder's
    own cache, and count as `_present`), `_taken` (how many the decoder has read: the window's credit), `_limit`
    (ordinals below it have a page there now), `_queue` (filled, may be posted), `_held` (filled, but without a page
    there so far, by ordinal), `_num_left` (layers of pages that have not been posted, and `_units_left` by ordinal),
    `_under_way`, `_receipts`, `_window` (windowed attempts: the pages that have landed), `has_broken` (a write
    failed), `_is_stopped`.
    """

    def __init__(
        self,
        agent: TransferAgent,
        session: Session,
        target: Target,
        table: PageTable,
        attempt: str,
        push: WholePush,
    ) -> None:
        self.session = session
        self._agent = agent
        self._table = table
        self._attempt = attempt
        self._push = push
        self._loop = asyncio.get_running_loop()
        self._slab = target.slab
        self._map = target.span_map
        self._remote: list[int] = []
        self._remote_array = np.empty(0, dtype=np.int64)
        self._present: frozenset[int] = frozenset()
        self._num_cached = 0
        self._taken = 0
        self._limit = 0
        self._queue: deque[FilledLayers] = deque()
        self._held: dict[int, list[FilledLayers]] = {}
        self._units_of = np.array([self._units(group) for group in range(len(table.groups))], dtype=np.int64)
        units: np.ndarray[Any, np.dtype[np.int64]] = self._units_of[table.group_of]
        self._num_left = int(units.sum())
        self._units_left = units
        self._tag = tag_of(attempt)
        self._under_way = 0
        self._receipts: list[WriteReceipt] = []
        self._window: _Window | None = None
        self.has_broken = False
        self._scheduled: asyncio.Handle | None = None
        self._is_stopped = False
        agent.prepare(self._tag)

    def __repr__(self) -> str:
        return f"<RankPush {self._attempt[:8]} → {self.rank}: {self._num_left} left, {self._under_way} under way>"

    @property
    def rank(self) -> int:
        return self._slab.layout.tp_rank

    @property
    def _is_on_gpu(self) -> bool:
        return self._slab.memory == "VRAM"

    @property
    def _max_under_way(self) -> int:
        return MAX_UNDER_WAY_ON_GPU if self._is_on_gpu else MAX_UNDER_WAY

    @property
    def receipts(self) -> Sequence[WriteReceipt]:
        return self._receipts

    @property
    def is_quiet(self) -> bool:
        """Returns whether no write of ours can land any more, unless more is posted."""
        return self._under_way == 0

    @property
    def is_drained(self) -> bool:
        """Returns whether all that was filled so far has landed, or never will."""
        return self._under_way == 0 and not self._queue and not self._held

    @property
    def is_stopped(self) -> bool:
        """Returns whether this has been stopped. Nothing more is posted then."""
        return self._is_stopped

    @property
    def is_complete(self) -> bool:
        """Returns whether everything has landed."""
        return self._num_left == 0 and self._under_way == 0

    @property
    def num_cached(self) -> int:
        """Counts the ordinals at the front that are in the decoder's own cache. They take no page of its buffer."""
        return self._num_cached

    @property
    def present(self) -> frozenset[int]:
        return self._present

    def granted(self, grant: GrantedPages) -> None:
        """Takes pages to write into: all of them, or a window, or some more."""
        self._remote += grant.pages
        if grant.present or grant.num_cached:
            self._num_cached = grant.num_cached
            self._present = frozenset((*range(grant.num_cached), *grant.present))
            present = np.fromiter(self._present, dtype=np.int64, count=len(self._present))
            self._num_left -= int(self._units_of[self._table.group_of[present]].sum())
        if grant.is_window:
            self._window = _Window(self._units_of[self._table.group_of].tolist())
        self._raise_limit()

    def taken(self, count: int) -> None:
        """Notes that the decoder has read the first `count` pages. Theirs may be written again."""
        if self._window is not None and count > self._window.count:
            taken = f"the decoder has taken {count} pages of the {self._window.count} that were written"
            self._push.cancelled(AttemptLost(taken))
            return
        self._taken = max(self._taken, count)
        self._raise_limit()

    def filled(self, filled: FilledLayers) -> None:
        """Takes more to write. It is posted at the end of this turn of the loop, together with everything else that is
        filled in it."""
        if self._present:
            filled = filled.only(map(not_, map(self._present.__contains__, filled.ordinals)))
        if self._limit < len(self._table):
            self._hold(filled.only(ordinal >= self._limit for ordinal in filled.ordinals))
            filled = filled.only(ordinal < self._limit for ordinal in filled.ordinals)
        self._enqueue(filled)
        self.schedule()

    def post(self) -> None:
        """Posts now what waits for the end of this turn, if the agent has nothing to do until then."""
        if self._scheduled is not None and self._under_way == 0:
            self._post()

    def stop(self) -> None:
        """Posts nothing more."""
        self._is_stopped = True
        self._queue.clear()
        self._held.clear()

    def schedule(self) -> None:
        """Posts soon: everything that is filled until then goes together."""
        if self._scheduled is None:
            self._scheduled = self._loop.call_soon(self._post)

    # ── below ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _units(self, group: int) -> int:
        return num_units(self._map.ours, group)

    def _enqueue(self, filled: FilledLayers) -> None:
        if self._queue and self._queue[-1].continues(filled):
            self._queue[-1].ordinals += filled.ordinals
            self._queue[-1].local_pages += filled.local_pages
        elif filled.ordinals:
            self._queue.append(filled)

    def _hold(self, filled: FilledLayers) -> None:
        for ordinal, page in zip(filled.ordinals, filled.local_pages, strict=True):
            one = replace(filled, ordinals=[ordinal], local_pages=[page])
            waiting = self._held.setdefault(ordinal, [])
            if waiting and one.deepens(waiting[-1]):
                waiting[-1].end_layer = one.end_layer
            else:
                waiting.append(one)
        self._ask()

    def _ask(self) -> None:
        if self._held and self._window is None and self._remote:
            self._push.wants_pages(self)

    def _raise_limit(self) -> None:
        """Notes that there is a page, or credit, for more ordinals than before."""
        credit = self._taken if self._window is not None else 0
        first, self._limit = self._limit, min(self._num_cached + len(self._remote) + credit, len(self._table))
        for ordinal in sorted(ordinal for ordinal in self._held if first <= ordinal < self._limit):
            for filled in self._held.pop(ordinal):
                self._enqueue(filled)
        self._ask()
        self.schedule()

    def _post(self) -> None:
        if self._scheduled is not None:
            self._scheduled.cancel()
            self._scheduled = None
        if self._queue and not self._is_stopped and self._under_way < self._max_under_way:
            after = self._next_event()
            batch = self._next_batch(after)
            spans = self._spans(batch)
            self._under_way += 1
            self._num_left -= sum(len(filled.ordinals) * filled.num_layers for filled in batch)
            write = self._agent.write(
                self._slab.epoch,
                spans,
                not_after=lambda: self.session.may_write_until,
                after=None if after is None else _UnlessStopped(self, after),
                tag=self._tag_for(batch),
            )
            if self._queue:
                self._schedule_behind()
            write.add_done_callback(lambda future, batch=batch: self._hand_over(future, batch))  # type: ignore[misc]

    def _schedule_behind(self) -> None:
        """Posts the next write when the agent has begun with this one: while this thread computes, the agent stands."""
        if self._is_on_gpu:
            self.schedule()
        elif self._scheduled is None:
            self._scheduled = self._loop.call_later(HEAD_START_S, self._post)

    def _next_event(self) -> Event | None:
        """Returns the event that the next write has to wait for, or None. Entries that need not wait any more are put
        first: they go in one write, however many events they had. So a sender that lags behind its engine makes fewer
        and larger writes."""
        first = enumerate(islice(self._queue, MAX_LOOKED_AT))
        index = next((index for index, filled in first if _has_happened(filled.after)), None)
        if index is None:
            return self._queue[0].after
        if index:
            due = self._queue[index]
            del self._queue[index]
            self._queue.appendleft(due)
        return None

    def _next_batch(self, after: Event | None) -> list[FilledLayers]:
        """Returns the entries of the next write, up to `MAX_WRITE_BYTES`: they wait for this event, or for none any
        more. It is at least one page."""

        def belongs(filled: FilledLayers) -> bool:
            return _has_happened(filled.after) if after is None else filled.after == after

        batch: list[FilledLayers] = []
        room = MAX_WRITE_BYTES if self._window is None else MAX_WINDOW_WRITE_BYTES
        pages = FIRST_WRITE_PAGES if not self._receipts and self._under_way == 0 else MAX_WRITE_PAGES
        while self._queue and (not batch or belongs(self._queue[0])):
            head = self._queue[0]
            page_bytes = max(1, self._map.page_bytes[head.group] * head.num_layers // self._units(head.group))
            count = min(len(head.ordinals), pages, max(room // page_bytes, 0 if batch else 1))
            if count == 0:
                break
            batch.append(head.head(count) if count < len(head.ordinals) else self._queue.popleft())
            room -= count * page_bytes
            pages -= count
        return batch

    def _tag_for(self, batch: Sequence[FilledLayers]) -> Tag | None:
        """Returns the tag for those pages that this write completes, or None where it completes none."""
        completed: list[int] = []
        for filled in batch:
            if len(filled.ordinals) == 1:  # a small push waits for it
                (ordinal,) = filled.ordinals
                self._units_left[ordinal] -= filled.num_layers
                completed += filled.ordinals if self._units_left[ordinal] == 0 else ()
                continue
            which = np.array(filled.ordinals)
            self._units_left[which] -= filled.num_layers
            completed += which[self._units_left[which] == 0].tolist()
        if not completed:
            return None
        slab, pages = self._slab, self._remote_pages(completed)
        spans = tag_spans(self._map.tag_slot, pages, slab.num_pages, slab.layout.page_bytes)
        return Tag(self._tag, spans)

    def _spans(self, batch: Sequence[FilledLayers]) -> Spans:
        """Returns the spans of the batch, joined. They are joined here, while the agent copies what was posted before:
        it would join them itself, and stand meanwhile."""
        parts = [self._spans_of(filled) for filled in batch]
        return merge(parts[0] if len(parts) == 1 else np.concatenate(parts))

    def _spans_of(self, filled: FilledLayers) -> Spans:
        blocks = None
        if self._map.ours.groups[filled.group].group.kind == "linear":
            blocks = self._table.block_of[filled.ordinals].tolist()
        return self._map.spans(
            filled.group,
            filled.local_pages,
            self._remote_pages(filled.ordinals),
            filled.first_layer,
            filled.end_layer,
            blocks=blocks,
        )

    def _remote_pages(self, ordinals: Sequence[int]) -> Sequence[int]:
        """Returns the pages there for these ordinals. The agent waits while this thread works here, so lists of
        thousands are not walked through in Python."""
        if len(ordinals) == 1:
            return [self._remote[(ordinals[0] - self._num_cached) % len(self._remote)]]
        if len(self._remote_array) != len(self._remote):
            self._remote_array = np.array(self._remote, dtype=np.int64)
        pages: Sequence[int] = self._remote_array[(np.array(ordinals) - self._num_cached) % len(self._remote)]
        return pages

    def _hand_over(self, future: Future[WriteReceipt], batch: Sequence[FilledLayers]) -> None:
        """Passes on, from the agent's thread, that a write is over. Where the loop is closed, nobody is left who would
        want to know."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._landed, future, batch)

    def _landed(self, future: Future[WriteReceipt], batch: Sequence[FilledLayers]) -> None:
        self._under_way -= 1
        error = future.exception()
        if error is None:
            self._receipts.append(future.result())
            self._tell_written(batch)
            if self._under_way:
                self._schedule_behind()
            else:
                self._post()
        else:
            self.has_broken = True
        self._push.changed(self, error if error is None or isinstance(error, TransferError) else _as_ours(error))

    def _tell_written(self, batch: Sequence[FilledLayers]) -> None:
        if self._window is None or self._is_stopped:
            return
        before = self._window.count
        for filled in batch:
            self._window.add(filled.ordinals, filled.num_layers)
        if self._window.count > before:
            self.session.send(wire.PagesWritten(attempt=self._attempt, count=self._window.count))


def num_units(layout: RankLayout, group: int) -> int:
    """Returns in how many units, or pieces, a page of `group` can be filled: its layers, or one where it is part of a
    state.

    A unit is filled once and posted once, on each rank that it goes to. The write with a page's last unit carries its
    tag. What is filled is *held* where its ordinal is not below the *limit*: the pages that are there now (cached,
    granted), and the *credit* of those that were read out of a window and may be written anew.
    """
    return 1 if layout.groups[group].group.kind == "linear" else len(layout.groups[group].layers)


class _UnlessStopped:
    """`_UnlessStopped` is the event of a write. Once its push has stopped, nobody wants the write any more: it fails
    then, and has sent nothing. Otherwise a push whose event never happens would never end."""

    def __init__(self, push: RankPush, event: Event) -> None:
        self._push = push
        self._event = event

    def query(self) -> bool:
        if self._push.is_stopped:
            raise AttemptLost("it was given up before its event had happened")
        return self._event.query()


def _has_happened(event: Event | None) -> bool:
    """Returns whether nothing is to be waited for. An exception of the event counts as "not yet": the agent asks it
    next, and sees the exception."""
    if event is None:
        return True
    with contextlib.suppress(Exception):
        return event.query()
    return False


def _as_ours(error: BaseException) -> TransferError:
    log.error("a write broke", exc_info=error)
    return TransferError(f"{type(error).__name__}: {error}")


class _Window:
    """A `_Window` counts, for windowed attempts, how many pages from the first on have landed completely."""

    def __init__(self, units: list[int]) -> None:
        self._left = units
        self.count = 0

    def add(self, ordinals: Sequence[int], units: int) -> None:
        for ordinal in ordinals:
            self._left[ordinal] -= units
        while self.count < len(self._left) and self._left[self.count] == 0:
            self.count += 1
