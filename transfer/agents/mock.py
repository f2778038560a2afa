"""Data movers that share one process, for testing an engine without NIXL. They move real bytes, and every write has a
fate.

    fabric = MockFabric()
    decoder, prefiller = MockAgent(fabric, "decoder"), MockAgent(fabric, "prefiller")
    # … hand them to a Receiver and a Sender, as you would a NixlAgent, and run your engine …

By default every write lands within the call that posts it. A *script* decides otherwise, write by write::

    prefiller.script = in_turn(Land(), Fail(PeerLost("gone"), landed=0.5))  # the second write breaks half way
    prefiller.script = lambda write: Hold()                                 # the test decides step by step:
    write = await asyncio.wrap_future(prefiller.next_held())
    write.land()                                                            # … or write.fail(error)
    prefiller.script = lambda write: Land(delay_s=0.5)
    fabric.advance(0.5)                                                     # time passes only when you say so

and whole processes fail::

    fabric.freeze("decoder"); fabric.thaw("decoder")                        # SIGSTOP, SIGCONT
    fabric.kill("decoder")                                                  # who writes to it gets PeerLost
    MockAgent(fabric, "decoder, started again")                             # a restart is another epoch

One difference: what NIXL writes to a frozen process lands all the same, and only its completion waits; here both wait.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from transfer.agents.base import TAG_BYTES, TAG_COPIES, Event, Region, Spans, Tag, WriteReceipt
from transfer.agents.fates import Drop, Duplicate, Fail, Fate, Hold, Land, Overtaken
from transfer.agents.mock_fabric import MockFabric
from transfer.agents.mock_write import Connection, MockWrite, Script, in_turn, land_at_once
from transfer.agents.spans import check_spans
from transfer.errors import PeerLost, TransferError

__all__ = [
    "Drop",
    "Duplicate",
    "Fail",
    "Fate",
    "Hold",
    "Land",
    "MockAgent",
    "MockFabric",
    "MockWrite",
    "Overtaken",
    "Script",
    "in_turn",
]

T = TypeVar("T")

ASK_AGAIN_S = 1e-3
"""The interval, in seconds, at which an `after` is asked again."""


class MockAgent:
    """A `MockAgent` is a `TransferAgent` on a `MockFabric`. Its region is host memory. `script` may be replaced at any
    time.

    Mutable state, under the fabric's lock: `_region`, `_connections`, `_jobs` (jobs that are asked for and not begun,
    because the process stands still), `_waiting` (threads that wait for an `after`, one each), `_held` and `_wanted`
    (held writes, and the futures of those who asked for one; one of the two is empty), `_is_closed`.
    """

    def __init__(self, fabric: MockFabric, epoch: str, script: Script = land_at_once) -> None:
        self._fabric = fabric
        self._epoch = epoch
        self.script = script
        self._region: Region | None = None
        self._connections: dict[str, Connection] = {}
        self._jobs: deque[tuple[Callable[[], None], Future[Any]]] = deque()
        self._waiting: set[threading.Thread] = set()
        self._held: deque[MockWrite] = deque()
        self._wanted: deque[Future[MockWrite]] = deque()
        self._is_closed = False
        fabric.join(self)

    def __repr__(self) -> str:
        return f"<MockAgent {self._epoch} peers={len(self._connections)} held={len(self._held)}>"

    @property
    def epoch(self) -> str:
        return self._epoch

    @property
    def region(self) -> Region | None:
        return self._region

    def num_users(self, peer: str) -> int:
        """Returns how many `connect`s to this peer are not undone yet."""
        connection = self._connections.get(peer)
        return 0 if connection is None else connection.num_users

    def next_held(self) -> Future[MockWrite]:
        """Returns a future of the next write that is held and that nobody was given yet. Each is handed over once, in
        order."""
        future: Future[MockWrite] = Future()
        with self._fabric.lock:
            if self._held:
                future.set_result(self._held.popleft())
            else:
                self._wanted.append(future)
        return future

    def register(self, region: Region) -> Future[None]:
        return self._submit(lambda: self._register(region))

    def metadata(self) -> Future[bytes]:
        return self._submit(lambda: self._epoch.encode())

    def connect(self, peer: str, metadata: bytes, region: Region) -> Future[None]:
        return self._submit(lambda: self._connect(peer, metadata, region))

    def disconnect(self, peer: str) -> Future[None]:
        return self._submit(lambda: self._disconnect(peer))

    def prepare(self, tag: bytes) -> None:
        """There is nothing to prepare."""

    def write(
        self,
        peer: str,
        spans: Spans,
        *,
        not_after: Callable[[], float],
        after: Event | None = None,
        tag: Tag | None = None,
    ) -> Future[WriteReceipt]:
        future: Future[WriteReceipt] = Future()

        def post() -> None:
            self._post(peer, spans, not_after, tag, future)

        def begin() -> None:
            known, _ = self._check(peer, spans)
            if tag is not None:
                check_spans(tag.spans, Region(0, TAG_BYTES * TAG_COPIES), known.region)
            if after is None:
                post()
            else:
                self._wait(after, post, future)

        return self._put(begin, future)

    def close(self) -> bool:
        with self._fabric.lock:
            waiting = list(self._waiting)
            self._is_closed = True
        for thread in waiting:
            thread.join()
        with self._fabric.lock:
            self.end("was closed")
        return True

    # ── for the fabric ──────────────────────────────────────────────────────────────────────────────────────────────

    def hold(self, write: MockWrite) -> None:
        while self._wanted:
            future = self._wanted.popleft()
            if future.set_running_or_notify_cancel():
                future.set_result(write)
                return
        self._held.append(write)

    def go_on(self) -> None:
        """Does the jobs that were asked for, as long as this process runs."""
        while self._jobs and self._epoch not in self._fabric.frozen:
            job, future = self._jobs.popleft()
            try:
                job()
            except TransferError as error:
                future.set_exception(error)

    def end(self, reason: str) -> None:
        """Fails the jobs that were not begun, and the writes that are under way."""
        self._is_closed = True
        jobs, self._jobs = self._jobs, deque()
        for _, future in jobs:
            future.set_exception(TransferError(f"the agent {reason}"))
        self._fabric.leave(self._epoch, reason)

    # ── from here on: under the fabric's lock ───────────────────────────────────────────────────────────────────────

    def _submit(self, job: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        return self._put(lambda: future.set_result(job()), future)

    def _put(self, job: Callable[[], None], future: Future[T]) -> Future[T]:
        future.set_running_or_notify_cancel()  # from here on nobody can cancel it
        with self._fabric.lock:
            if self._is_closed:
                future.set_exception(TransferError("the agent is closed"))
            else:
                self._jobs.append((job, future))
                self.go_on()
        return future

    def _register(self, region: Region) -> None:
        if self._region is not None:
            raise TransferError("this agent already has a registered region")
        if region.memory != "DRAM":
            raise TransferError(f"a mock agent copies host memory, not {region.memory}")
        self._region = region

    def _connect(self, peer: str, metadata: bytes, region: Region) -> None:
        known = self._connections.get(peer)
        if known is not None and not known.is_lost:
            if region != known.region:
                raise TransferError(f"{peer} is connected with another region: {known.region}, not {region}")
            known.num_users += 1
            return
        there = self._fabric.agents.get(peer)
        if metadata != peer.encode() or there is None:
            raise PeerLost(f"{peer} is not there, or the metadata is not its own")
        if there.region is None or not _is_within(region, there.region):
            raise PeerLost(f"{peer} has not registered {region}")
        self._connections[peer] = Connection(peer, region, num_users=1 if known is None else known.num_users + 1)

    def _disconnect(self, peer: str) -> None:
        known = self._connections.get(peer)
        if known is None:
            return
        known.num_users -= 1
        if known.num_users == 0:
            del self._connections[peer]

    def _check(self, peer: str, spans: Spans) -> tuple[Connection, Region]:
        known = self._connections.get(peer)
        if known is None or known.is_lost:
            raise PeerLost(f"not connected to {peer}")
        if self._region is None:
            raise TransferError("this agent has no registered region to write from")
        check_spans(spans, self._region, known.region)
        return known, self._region

    def _wait(self, after: Event, post: Callable[[], None], future: Future[Any]) -> None:
        """Asks `after` until it has happened, on a thread of its own: this agent does other things meanwhile."""

        def wait() -> None:
            failure: TransferError | None = None
            try:
                while not self._is_closed and not after.query():
                    time.sleep(ASK_AGAIN_S)
            except Exception as error:  # border: the caller's own code, whatever it raises
                failure = TransferError(f"what the write was to wait for failed: {error!r}")
                failure.__cause__ = error
            with self._fabric.lock:
                self._waiting.discard(threading.current_thread())
                if self._is_closed:
                    future.set_exception(TransferError("the agent is closed"))
                elif failure is not None:
                    future.set_exception(failure)
                else:
                    self._jobs.appendleft((post, future))
                    self.go_on()

        thread = threading.Thread(target=wait, name=f"mock-{self._epoch}", daemon=True)
        self._waiting.add(thread)
        thread.start()

    def _post(
        self, peer: str, spans: Spans, not_after: Callable[[], float], tag: Tag | None, future: Future[WriteReceipt]
    ) -> None:
        connection, local = self._check(peer, spans)
        now = self._fabric.now()
        if now > not_after():
            raise PeerLost(f"too long since {peer} was last heard; its pages may belong to someone else by now")
        if len(spans) == 0 and tag is None:
            future.set_result(WriteReceipt(0, now, now))
            return
        if peer not in self._fabric.agents:
            connection.is_lost = True
            raise PeerLost(f"{peer} has died")
        serial = self._fabric.next_serial()
        write = MockWrite(self._fabric, serial, self._epoch, connection, local, spans.copy(), not_after, future, tag)
        self._fabric.post(write, self.script(write))


def _is_within(part: Region, whole: Region) -> bool:
    end, whole_end = part.base_address + part.num_bytes, whole.base_address + whole.num_bytes
    return whole.base_address <= part.base_address and end <= whole_end and part.memory == whole.memory
