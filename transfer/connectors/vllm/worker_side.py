"""The connector's half in a worker of vLLM: one rank. It carries the scheduler's orders out.

What must hold: of a block nothing is sent before vLLM has computed it, and everything after that, layer by layer; what
vLLM reads from a block that was loaded was written there by the attempt it asked for; and every request that vLLM waits
for is reported, whatever has become of its transfer. A violation would be seen as a wrong text, or as blocks that vLLM
counts as taken while nothing runs.

Called by vLLM's worker thread alone, and imports nothing of vLLM.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from transfer.agents.base import Event
from transfer.connectors.vllm.messages import Fill, Load, OpenPush, StepOrders, StepReport
from transfer.connectors.vllm.transfer_statistics import Pushed, push_failure
from transfer.dataplane.plane import DataPlane, PlanePush
from transfer.errors import AttemptLost, IllegalTransition, ReceiverLost, TransferError
from transfer.memory.engine_memory import EngineMemory
from transfer.memory.views import LayerViews
from transfer.plan.blocks import PageTable, page_table
from transfer.plan.layout import RankLayout

log = logging.getLogger(__name__)

PIECE_BYTES = 64 << 20
"""The most bytes, but for one page's, that a load takes of the device's memory beside vLLM's own while it copies."""

_LOST = AttemptLost, IllegalTransition
"""The errors that are raised for KV that is not there (any more)."""
DRAIN_S = 0.5
"""The longest time, in seconds, that a step waits for what is being read of blocks that vLLM has taken away."""


class Inbox(Protocol):
    """An `Inbox` is the PD buffer, as the worker sees it. See `ReceiverThread`."""

    def take(self, attempt: str, num_tokens: int) -> list[int]: ...

    def check_tags(self, attempt: str) -> None: ...

    def consumed(self, attempt: str) -> None: ...

    def release(self, attempt: str) -> None: ...


@dataclass(slots=True)
class _Sending:
    """A request whose KV goes out. `push` is None where it could not even be begun."""

    push: PlanePush | None
    was_granted: bool = False
    was_failed: bool = False
    is_awaited: bool = False
    """True once vLLM keeps its blocks until it is reported."""
    was_preempted: bool = False
    """True where it was given up because vLLM has taken its blocks away."""
    fault: TransferError | None = None
    """The reason why it could not be begun."""
    opened_at: float = field(default_factory=time.monotonic)
    granted_at: float | None = None
    computed_at: float | None = None
    """The time when all of the prompt's layers were given to the device, on `time.monotonic` as the others."""
    ended_at: float | None = None

    def __post_init__(self) -> None:
        if self.push is not None:
            self.push.granted.add_done_callback(self._granted)  # on the data plane's thread
            self.push.ended.add_done_callback(self._ended)

    @property
    def is_over(self) -> bool:
        """Tells whether no write can read its blocks any more."""
        return self.push is None or self.push.ended.done()

    def outcome(self) -> Pushed:
        """Returns how a push that is over has gone."""
        if self.push is None or self.push.failure is not None:
            error = self.fault if self.push is None else self.push.error
            failure = "preempted" if self.was_preempted else push_failure(error)
            return Pushed(wait_s=_span_s(self.opened_at, self.granted_at), failure=failure)
        return Pushed(
            self.push.finished.result(0)[0],
            len(self.push.table) - self.push.num_sent,
            _span_s(self.opened_at, self.granted_at),
            _span_s(self.computed_at, self.ended_at),
        )

    def _granted(self, granted: Future[None]) -> None:
        if granted.exception() is None:
            self.granted_at = time.monotonic()

    def _ended(self, ended: Future[None]) -> None:
        self.ended_at = time.monotonic()


@dataclass(slots=True)
class _Filling:
    """The pages of one request that become complete in the step under way: per page group, their ordinals, and where
    they are in vLLM's memory."""

    sending: _Sending
    push: PlanePush
    pages: list[tuple[list[int], list[int]]]
    is_last: bool


@dataclass(slots=True)
class _Copying:
    """A load whose copies may still be under way on the device."""

    load: Load
    done: Event | None


class WorkerSide:
    """A `WorkerSide` sends from and loads into `memory`, vLLM's own KV cache.

    `plane` carries out pushes, `inbox` has what was received, with its pages seen by layer as `received`; each is None
    where this engine does not do that. `layer_names` are vLLM's, in the order of the layout's layers.

    Mutable state: `_sending`, by request; `_filling`, those of the step under way, with `_told`, the layers that were
    told of; `_copying`; `_report`, for the end of the step; `_failed_loads`; `_was_broken`, whether the end of `plane`
    was reported; `is_broken`.
    """

    def __init__(
        self,
        layout: RankLayout,
        layer_names: Sequence[str],
        memory: EngineMemory,
        *,
        plane: DataPlane | None,
        inbox: Inbox | None,
        received: Sequence[LayerViews | None] = (),
    ) -> None:
        self._layout = layout
        self._memory = memory
        self._plane = plane
        self._inbox = inbox
        self._received = list(received)
        self._place_of = {
            layer_names[index]: (number, position)
            for number, group in enumerate(layout.groups)
            for position, index in enumerate(group.layers)
        }
        self._is_cuda = memory.whole.is_cuda
        self._stream: Any = torch.cuda.Stream(memory.whole.device) if self._is_cuda else None  # type: ignore[no-untyped-call]
        self._sending: dict[str, _Sending] = {}
        self._filling: list[_Filling] = []
        self._told: set[tuple[int, int]] = set()
        self._copying: list[_Copying] = []
        self._report = StepReport()
        self._failed_loads: set[str] = set()
        self._was_broken = False
        self.is_broken = False
        """True once the data plane of some worker of this engine is over. Only one of them is asked for its health."""

    def __repr__(self) -> str:
        return f"<WorkerSide {len(self._sending)} sending, {len(self._copying)} copying>"

    # ── a step ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, orders: StepOrders) -> None:
        """Takes a step's orders, before anything of it is computed."""
        self.is_broken = self.is_broken or orders.is_broken
        for opened in orders.opens:
            self._open(opened)
        self._drain(orders.preempted)
        for request_id, reason in orders.aborts.items():
            if (sending := self._sending.get(request_id)) is not None and sending.push is not None:
                sending.push.abort(reason)
        self._told = set()
        self._filling = [filling for fill in orders.fills if (filling := self._prepare(fill)) is not None]
        for attempt in orders.releases:
            if self._inbox is not None:
                self._inbox.release(attempt)

    def layer_computed(self, name: str) -> None:
        """Sends what the layer of this name has put into the blocks of this step."""
        place = self._place_of.get(name)
        if self._filling and place is not None and place not in self._told:
            self._told.add(place)
            self._send(*place, self._now())

    def load(self, orders: StepOrders) -> None:
        """Begins to copy what is to be loaded."""
        for load in orders.loads:
            self._load(load)

    def end(self) -> None:
        """Sends the layers of this step that nobody has told of, and says which prompts are complete."""
        if not self._filling:
            return
        rest = [place for place in self._place_of.values() if place not in self._told]
        if rest:
            after = self._now()
            for group, position in rest:
                self._send(group, position, after)
        for filling in self._filling:
            if filling.is_last and filling.push.failure is None:
                filling.sending.computed_at = time.monotonic()
                filling.push.finish()
        self._filling = []

    def results(self, finished: Sequence[str]) -> tuple[set[str], set[str], set[str]]:
        """Returns the requests that are sent, those that are loaded, and those of the latter that have failed.

        `finished` are requests that vLLM has ended. Their blocks stay until they were returned as sent.
        """
        for request_id in finished:
            if (sending := self._sending.get(request_id)) is not None:
                sending.is_awaited = True
        sent = {request_id for request_id, one in self._sending.items() if one.is_awaited and one.is_over}
        for request_id in sent:
            self._report.pushed[request_id] = self._sending.pop(request_id).outcome()
        loaded, self._failed_loads = set(self._failed_loads), set()
        failed = set(loaded)
        still_copying = []
        for copying in self._copying:
            if copying.done is not None and not copying.done.query():
                still_copying.append(copying)
            else:
                loaded.add(copying.load.request_id)
                if (failure := self._copied(copying.load)) is not None:
                    failed.add(copying.load.request_id)
                    self._report.failed_loads[copying.load.request_id] = failure
        self._copying = still_copying
        return sent, loaded, failed

    def take_report(self) -> StepReport | None:
        """Returns what the scheduler's half is to hear, or None."""
        for request_id, one in self._sending.items():
            if one.push is None:
                continue
            if not one.was_failed and (reason := one.push.failure) is not None:
                one.was_failed = True
                self._report.failed[request_id] = reason
                if isinstance(one.push.error, ReceiverLost):
                    self._report.unanswered.add(request_id)
            elif not one.was_granted and one.push.granted.done():
                one.was_granted = True
                self._report.granted[request_id] += 1
                if one.push.num_cached:
                    self._report.num_cached[request_id] = one.push.num_cached
        if not self._was_broken and self._plane is not None and self._plane.over is not None:
            self._was_broken = self._report.is_broken = True
        report, self._report = self._report, StepReport()
        return report or None

    # ── below ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _open(self, order: OpenPush) -> None:
        push = fault = None
        try:
            if self._plane is None:
                raise TransferError("this engine is a decoder: its kv_role has to be kv_producer or kv_both")
            push = self._plane.open(order.params, num_tokens=order.num_tokens, keys=order.keys)
        except TransferError as error:
            fault = error
            self._report.failed[order.request_id] = str(error)
        self._sending[order.request_id] = _Sending(push, fault=fault)

    def _drain(self, request_ids: Sequence[str]) -> None:
        """Waits until nothing is read any more of blocks that this step may write over. A push of which something is
        read for too long is given up: what it carries then may not be this request's."""
        known = (self._sending.get(request_id) for request_id in request_ids)
        drains = [
            (one, one.push, one.push.drain()) for one in known if one is not None and one.push and not one.is_over
        ]
        wait([drained for _, _, drained in drains], DRAIN_S)
        for sending, push, drained in drains:
            if not drained.done():
                sending.was_preempted = True
                push.abort("vLLM has preempted the request, and the decoder takes its time to receive what was sent")

    def _prepare(self, fill: Fill) -> _Filling | None:
        sending = self._sending.get(fill.request_id)
        push = None if sending is None else sending.push
        if sending is None or push is None or push.failure is not None:
            return None
        pages = []
        for group, blocks in enumerate(fill.block_ids):
            kept = self._pages_of(push.table, group, fill.first_block, blocks)
            pages.append(([ordinal for ordinal, _ in kept], [page for _, page in kept]))
        return _Filling(sending, push, pages, fill.is_last)

    def _pages_of(self, table: PageTable, group: int, first: int, blocks: Sequence[int]) -> list[tuple[int, int]]:
        """Returns the pages that a prompt has in these blocks, the first of which is its block `first`: ordinals, and
        where they are in vLLM's memory."""
        count, num_pages, kept = self._memory.pages_per_block, table.num_blocks, []
        for at, block in enumerate(blocks, first):
            end = min((at + 1) * count, num_pages)  # the last block may be longer than the prompt
            for page in range(at * count, max(end, at * count + 1)):
                if (ordinal := table.ordinal(group, page)) is not None:
                    kept.append((ordinal, block * count + page % count))
        return kept

    def _send(self, group: int, position: int, after: Event | None) -> None:
        for filling in self._filling:
            ordinals, pages = filling.pages[group]
            if ordinals and filling.push.failure is None:
                filling.push.pages_filled(ordinals, pages, position, position + 1, after=after)

    def _now(self) -> Event | None:
        """Returns an event behind all that the device was given so far; None where nothing is under way on return."""
        if not self._is_cuda:
            return None
        event: Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()  # type: ignore[attr-defined]
        return event

    def _load(self, load: Load) -> None:
        """Begins one load. A failure is reported with the results: vLLM computes the prompt, or fails the request."""
        try:
            if self._inbox is None:
                raise TransferError("this engine is a prefiller: its kv_role has to be kv_consumer or kv_both")
            if load.failure is not None:
                raise AttemptLost(load.failure)
            self._copying.append(_Copying(load, self._copy(load, self._inbox.take(load.attempt, load.num_tokens))))
        except TransferError as error:
            log.warning("request %s: attempt %s cannot be loaded: %s", load.request_id, load.attempt, error)
            kind = "other_prompt" if load.failure is not None else "lost" if isinstance(error, _LOST) else "error"
            self._failed_loads.add(load.request_id)
            self._report.failed_loads[load.request_id] = kind
            if self._inbox is not None:
                self._inbox.release(load.attempt)  # nobody else will ask for it

    def _copy(self, load: Load, pages: list[int]) -> Event | None:
        """Copies an attempt's pages into vLLM's blocks. Returns an event behind the copies, or None."""
        table = page_table(self._layout.kv.groups, load.num_tokens, self._layout.chunk_size)
        if len(pages) != len(table) - load.num_cached:  # else each page would go to another page's place
            raise AttemptLost(
                f"{len(pages)} pages are here, and the request says {load.num_cached} of {len(table)} were not sent"
            )
        if self._is_cuda:
            self._stream.wait_stream(torch.cuda.current_stream())  # which may still be reading what was in the blocks
        with torch.cuda.stream(self._stream) if self._is_cuda else torch.no_grad():
            for group, blocks in enumerate(load.block_ids):
                found = self._pages_of(table, group, load.first_block, blocks)
                first = self._memory.pages_per_block  # those before are the null block's
                pairs = [(pages[o - load.num_cached], page) for o, page in found if page >= first]
                if not pairs:
                    continue
                theirs, ours = self._on_device(pairs)
                for index in self._layout.groups[group].layers:
                    views = self._received[index]
                    assert views is not None
                    source = views.keys.view(torch.uint8).flatten(2)
                    step = max(1, PIECE_BYTES // source[0].numel())
                    for some, here in zip(torch.split(theirs, step), torch.split(ours, step), strict=True):
                        self._memory.put(index, here, source.index_select(0, some))
            return self._now()

    def _on_device(self, pairs: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, ...]:
        """Returns the firsts and the seconds of these pairs where the KV is. Waits for nothing that the device does."""
        numbers = torch.tensor(pairs).T.contiguous()
        if self._is_cuda:  # out of pinned memory: else this waits for the whole step
            numbers = numbers.pin_memory().to(self._memory.whole.device, non_blocking=True)
        return numbers.unbind(0)

    def _copied(self, load: Load) -> str | None:
        """Gives the attempt's pages back, now that they were copied. Returns None, or why what was copied is not
        right."""
        assert self._inbox is not None
        failure = None
        try:
            self._inbox.check_tags(load.attempt)
        except TransferError as error:
            log.error("request %s: %s", load.request_id, error)
            failure = "wrong_pages"
        try:
            self._inbox.consumed(load.attempt)
        except TransferError as error:
            log.warning("request %s: attempt %s was lost while it was copied: %s", load.request_id, load.attempt, error)
            failure = failure or "lost"
        return failure


def _span_s(since: float | None, until: float | None) -> float | None:
    """Returns the seconds between two times; None where one of them did not come."""
    return None if since is None or until is None else until - since
