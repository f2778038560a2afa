"""A NIXL agent behind `TransferAgent`: one agent, one thread, one queue.

Why a thread: NIXL has no blocking wait (completion is polled) and `transfer()` copies in the calling thread, so an
event loop must never call it. The thread sleeps on its queue while nothing is under way: an idle agent costs no CPU.

A *receiving* agent needs NIXL's progress thread (without it a sender's write never completes). A *sending* agent is
better off without one. Descriptors are made per write: that costs 8 µs for one span and 75 µs for 256 more than
preparing them once, and spares tables of every page that could ever be written. Measured on NIXL 1.5.1.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch

from transfer import logs
from transfer.agents.base import TAG_BYTES, TAG_COPIES, Event, Region, Spans, Tag, WriteReceipt, never_free
from transfer.agents.device import check_region, make_current, resolve
from transfer.agents.nixl_options import NixlOptions
from transfer.agents.nixl_setup import create_agent
from transfer.agents.spans import check_spans, merge, pieces, total_bytes
from transfer.errors import PeerLost, TransferError

SPIN_S = 200e-6
"""The time, in seconds, for which writes are looked at without a pause when something was posted or has ended."""
POLL_MAX_S = 1e-3
"""The longest pause, in seconds, between two looks, as long as `PATIENCE_S` is not over."""
PATIENCE_S = 2.0
"""The time, in seconds, with nothing posted or ended, after which writes are looked at rarely."""
POLL_STALLED_S = 10e-3
"""The pause, in seconds, between two of those rare looks."""
PIECE_BYTES = 32 << 20
"""The size of the pieces, in bytes, in which a write is posted. Pieces take turns with other writes, so that a small
one need not wait long."""
MAX_POSTED_BYTES = 2 * PIECE_BYTES
"""The most bytes, for each peer, which NIXL has been handed and has not finished. They may land after the fence."""
NAP_S = 2.0
"""The pause, in seconds, after which the thread is taken to have been stopped. A busy machine causes shorter ones."""
READ_FENCES_S = 50e-3
"""The interval, in seconds, at which the fences of writes under way are read and kept."""
CLOSE_TIMEOUT_S = 10.0
"""The longest time, in seconds, that `NixlAgent.close` waits for the thread. A call of NIXL may never return."""
EXIT_OVERSLEPT = os.EX_TEMPFAIL
"""The exit status of a process that ends itself because it stood still in the middle of a write."""
LAST_WORDS_S = 0.1
"""The most seconds for which a process that must send nothing more waits until its log says why."""

NUM_STRIPS = 1024
"""The most attempts whose tags can be on their way at once. Each takes `TAG_COPIES` copies of memory."""
STRIP_BYTES = TAG_BYTES * TAG_COPIES

log = logging.getLogger(__name__)
T = TypeVar("T")
_Rows = np.ndarray[Any, np.dtype[np.uint64]] | list[tuple[int, int, int]]


class _Strips:
    """`_Strips` is the registered memory that tags are sent from. A strip holds copies of one tag as long as a write is
    sending it, and afterwards until another tag needs the strip: the next write is often one of the same attempt, and
    on a GPU filling a strip takes a copy that is waited for. That is why a strip is filled there when its attempt is
    granted pages (`NixlAgent.prepare`), and not when a write needs it.

    Mutable state: `_memory`; `_in_use` (tag → its strip and how many writes have it), `_idle` (tag → its strip, which
    no write has; the one that was used longest ago first), `_free` (strips without a tag).
    """

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.zeros((NUM_STRIPS, TAG_COPIES, TAG_BYTES), dtype=torch.uint8, device=device)
        self._host = self._memory.numpy() if device.type == "cpu" else None
        # A copy on the current stream would wait for all that an engine has queued there.
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._in_use: dict[bytes, tuple[int, int]] = {}
        self._idle: dict[bytes, int] = {}
        self._free = list(range(NUM_STRIPS))

    @property
    def address(self) -> int:
        return self._memory.data_ptr()

    def take(self, value: bytes) -> int:
        """Returns the address of copies of this tag. Raises `TransferError` where too many others are on their way."""
        index, num_users = self._in_use.get(value, (-1, 0))
        if not num_users and (index := self._idle.pop(value, -1)) < 0:
            index = self._unused()
            copies = np.frombuffer(value * TAG_COPIES, dtype=np.uint8).reshape(TAG_COPIES, TAG_BYTES)
            if self._host is not None:
                self._host[index] = copies  # a tenth of the time that torch needs: a small push waits for it
            else:
                with torch.cuda.stream(self._stream):
                    self._memory[index] = torch.from_numpy(copies.copy())
                self._stream.synchronize()
        self._in_use[value] = index, num_users + 1
        return self.address + index * STRIP_BYTES

    def give_back(self, value: bytes) -> None:
        """Notes that one write less uses the tag's strip."""
        index, num_users = self._in_use.pop(value)
        if num_users > 1:
            self._in_use[value] = index, num_users - 1
        else:
            self._idle[value] = index

    def _unused(self) -> int:
        if self._free:
            return self._free.pop()
        if not self._idle:
            raise TransferError(f"{NUM_STRIPS} attempts are being written at once, which is this agent's limit")
        return self._idle.pop(next(iter(self._idle)))


@dataclass(slots=True)
class _Job:
    """A job that another thread has asked for. `act` sets the result of `future`. An error of `act` is set there,
    too."""

    act: Callable[[], None]
    future: Future[Any]


@dataclass(slots=True)
class _Peer:
    """A connected peer: where it may be written to, how often it was connected, and what it has been handed.

    NIXL is told to forget it only when nothing is under way to it: otherwise NIXL would report an end that has not
    happened.
    """

    name: str
    region: Region
    num_users: int
    is_lost: bool = False
    num_posted: int = 0
    """Counts the pieces which NIXL has been handed and has not finished."""
    posted_bytes: int = 0
    """The bytes of those pieces."""
    when_quiet: list[_Job] = field(default_factory=list)
    """Holds the jobs that wait until NIXL has finished all of those pieces."""


_IDLE = _Job(lambda: None, Future())
"""The job of a turn in which nobody has asked for anything."""


class _NotQuiet(Exception):
    """A job has to wait until nothing is under way to `peer`."""

    def __init__(self, peer: _Peer) -> None:
        super().__init__(peer)
        self.peer = peer


@dataclass(slots=True)
class _Write:
    """A `_Write` is a write that is not over. Each of its handles is released exactly once, when NIXL has said that it
    has ended."""

    peer: _Peer
    num_bytes: int
    not_after: Callable[[], float]
    future: Future[WriteReceipt]
    pieces: deque[Spans]
    """The parts of the write that were not posted yet."""
    after: Event | None
    """The event that must happen before anything is posted. None once it has."""
    tag: Tag | None
    """The tag that is written together with the last piece."""
    started: float | None = None
    handles: list[tuple[Any, int]] = field(default_factory=list)
    """The pieces under way: NIXL's handle and the number of bytes of each."""
    has_strip: bool = False
    error: TransferError | None = None
    fence: float = -math.inf
    """The fence as it was read last."""

    def read_fence(self) -> None:
        """Reads the fence anew. A fence whose function raises counts as passed."""
        try:
            self.fence = self.not_after()
        except Exception:  # border: the caller's own code, and the agent's thread must go on
            log.exception("the fence of a write to %s broke", self.peer.name)
            self.fence = -math.inf

    def check_in_time(self) -> None:
        """Raises `PeerLost` when the fence has passed."""
        self.read_fence()
        if time.monotonic() > self.fence:
            reason = "too long since it was last heard; its pages may belong to someone else by now"
            raise PeerLost(f"{self.peer.name}: {reason}")


class NixlAgent:
    """A `NixlAgent` is a NIXL agent with one registered region. `epoch` must be new for every process start.

    `device` says where that region lies: ``cpu``, ``cuda`` (the GPU that is current now) or ``cuda:N``. A region that
    lies elsewhere, or in GPU memory that other processes cannot map, is refused when it is registered; with
    `is_imported` the region is memory of another process, which is only sent from.

    Raises `TransferError` where NIXL, the device, or what `options` ask of NIXL, is not to be had.

    A process that was stopped in mid-write and goes on when the fence of that write has passed ends itself at once,
    with exit status `EXIT_OVERSLEPT`: what NIXL would go on to send may land in pages of another request by then.

    Mutable state, all of it owned by the agent's thread: `_region`, `_registered` (NIXL's word for it), `_peers`,
    `_under_way` (writes that are not over), `_waiting` (those with pieces to be posted, in turn), `_can_post` (perhaps
    another one, at once), `_strips` (once there is a region), `_quiet_since` (when something was last asked, posted or
    finished), `_awake_at` (when this thread was last seen to run), `_fences_read_at`. Other threads only put jobs on
    `_jobs`, until `_is_closed`.
    """

    def __init__(
        self,
        epoch: str,
        *,
        receives: bool,
        options: NixlOptions | None = None,
        device: torch.device | str = "cpu",
        is_imported: bool = False,
    ) -> None:
        self._is_imported = is_imported
        self._epoch = epoch
        self._receives = receives
        self._device = resolve(device)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._peers: dict[str, _Peer] = {}
        self._under_way: list[_Write] = []
        self._waiting: deque[_Write] = deque()
        self._can_post = False
        self._quiet_since = self._awake_at = self._fences_read_at = 0.0
        self._region: Region | None = None
        self._strips: _Strips | None = None
        self._registered: Any = None
        self._nixl = create_agent(epoch, receives=receives, options=options or NixlOptions(), device=self._device)
        self._thread = threading.Thread(target=self._run, name=f"nixl-{epoch[:8]}", daemon=True)
        self._is_closed = False
        self._closing = threading.Lock()
        self._thread.start()

    def __repr__(self) -> str:
        return f"<NixlAgent {self._epoch[:8]} peers={len(self._peers)} under_way={len(self._under_way)}>"

    @property
    def epoch(self) -> str:
        return self._epoch

    def register(self, region: Region) -> Future[None]:
        return self._submit(lambda: self._register(region))

    def metadata(self) -> Future[bytes]:
        return self._submit(lambda: bytes(self._nixl.get_agent_metadata()))

    def connect(self, peer: str, metadata: bytes, region: Region) -> Future[None]:
        return self._submit(lambda: self._connect(peer, metadata, region))

    def disconnect(self, peer: str) -> Future[None]:
        return self._submit(lambda: self._disconnect(peer))

    def prepare(self, tag: bytes) -> None:
        if self._device.type == "cuda":  # on a CPU a strip is filled in less time than it takes to ask for it
            self._put(lambda: self._prepare(tag), Future())

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
        self._put(lambda: self._write(peer, spans, not_after, after, tag, future), future)
        return future

    def close(self) -> bool:
        """Stops the thread, and waits `CLOSE_TIMEOUT_S` for it. See `TransferAgent.close`."""
        with self._closing:
            if not self._is_closed:
                self._is_closed = True
                self._jobs.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        has_ended = not self._thread.is_alive()
        if not has_ended:
            log.error(
                "%r does not end: its thread has been in one call for %g s or more. Its memory stays registered, and "
                "is kept until this process ends: it may still be read, and peers may still write to it",
                self,
                CLOSE_TIMEOUT_S,
            )
        return has_ended

    def _submit(self, job: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._put(lambda: future.set_result(job()), future)
        return future

    def _put(self, act: Callable[[], None], future: Future[Any]) -> None:
        """Queues `act`. An exception of it goes to `future`."""
        future.set_running_or_notify_cancel()  # from here on nobody can cancel it
        with self._closing:
            if not self._is_closed:
                self._jobs.put(_Job(act, future))
                return
        future.set_exception(TransferError("the NIXL agent is closed"))

    # ── from here on: the agent's thread ────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        make_current(self._device)
        while True:
            try:
                job = self._jobs.get(timeout=self._pause_s())
            except queue.Empty:
                job = _IDLE
            self._check_awake()
            if job is None:
                break
            self._do(job)
            self._post_next()
            self._poll()
        self._tear_down()

    def _do(self, job: _Job) -> None:
        try:
            job.act()
        except _NotQuiet as waits:
            waits.peer.when_quiet.append(job)
        except Exception as error:  # border to NIXL: everything it raises is the caller's to see
            job.future.set_exception(error if isinstance(error, TransferError) else _translate(error))

    def _pause_s(self) -> float | None:
        if self._can_post:
            return 0.0
        return poll_pause_s(time.monotonic() - self._quiet_since) if self._under_way else None

    def _check_awake(self) -> None:
        """Ends the process, if it stood still and NIXL has bytes whose fence has passed.

        This is called before every call that lets NIXL go on. Nothing else may set `_awake_at`, because a nap would go
        unseen. The fence that was read before the nap is the one that counts: another thread, awake a moment earlier,
        may have heard again from a peer that has given the pages away meanwhile.
        """
        slept_from, self._awake_at = self._awake_at, time.monotonic()
        slept_s = self._awake_at - slept_from
        if slept_s >= NAP_S:
            for write in self._under_way:
                if write.handles and self._awake_at > write.fence:
                    end_process(f"it stood still for {slept_s:.1f} s while writing to {write.peer.name}")
        if self._awake_at > self._fences_read_at + READ_FENCES_S:
            self._fences_read_at = self._awake_at
            for write in self._under_way:
                write.read_fence()

    def _poll(self) -> None:
        """Looks at every write under way."""
        self._check_awake()
        if not self._under_way:
            return
        before = len(self._under_way)
        self._under_way = [write for write in self._under_way if not self._settle(write)]
        if len(self._under_way) < before:
            self._quiet_since = time.monotonic()

    def _settle(self, write: _Write) -> bool:
        """Returns True when the write is over, one way or the other. Its future has then been told.

        A write that fails is over when none of its pieces is under way any more.
        """
        while write.handles and self._look_at(write):
            self._release(write)
        if write.handles or write.pieces:
            return False
        if write.has_strip and write.tag is not None and self._strips is not None:
            self._strips.give_back(write.tag.value)
        if write.error is not None:
            write.future.set_exception(write.error)
        else:
            finished = time.monotonic()
            write.future.set_result(WriteReceipt(write.num_bytes, write.started or finished, finished))
        return True

    def _look_at(self, write: _Write) -> bool:
        """Returns whether the first piece under way has ended. NIXL reports a dead peer by raising."""
        try:
            state = self._nixl.check_xfer_state(write.handles[0][0])
        except Exception as error:
            self._lose(write, _translate(error))
            return True
        if state not in ("PROC", "DONE"):
            self._lose(write, PeerLost(f"NIXL reports {state} for a write to {write.peer.name}"))
        return bool(state != "PROC")

    def _fail(self, write: _Write, error: TransferError) -> None:
        """Posts no more of the write. Its future fails when the pieces under way have ended."""
        write.pieces.clear()
        write.error = write.error or error

    def _lose(self, write: _Write, error: TransferError) -> None:
        """Does the same as `_fail`. Besides, nothing more is written to that peer before it is connected anew."""
        write.peer.is_lost = True
        self._fail(write, error)

    def _release(self, write: _Write) -> None:
        """Notes that the first piece under way has ended."""
        (handle, num_bytes), peer = write.handles.pop(0), write.peer
        self._release_handle(handle)
        peer.num_posted -= 1
        peer.posted_bytes -= num_bytes
        self._can_post = True
        if peer.num_posted == 0:
            self._forget_if_unused(peer)
            jobs, peer.when_quiet = peer.when_quiet, []
            for job in jobs:
                self._do(job)

    def _release_handle(self, handle: Any) -> None:
        with contextlib.suppress(Exception):  # a failure here changes nothing, and the thread must go on
            self._nixl.release_xfer_handle(handle)

    def _register(self, region: Region) -> None:
        if self._region is not None:
            raise TransferError("this agent already has a registered region")
        check_region(region, self._device, is_imported=self._is_imported)
        strips = _Strips(self._device)
        whole = [
            (region.base_address, region.num_bytes, region.device_id, ""),
            (strips.address, NUM_STRIPS * STRIP_BYTES, region.device_id, ""),
        ]
        self._registered = self._nixl.register_memory(whole, mem_type=region.memory)
        self._region, self._strips = region, strips

    def _connect(self, peer: str, metadata: bytes, region: Region) -> None:
        known = self._peers.get(peer)
        if known is not None and not known.is_lost:
            if region != known.region:
                raise TransferError(f"{peer} is connected with another region: {known.region}, not {region}")
            known.num_users += 1
            return
        if known is not None:
            if known.num_posted:
                raise _NotQuiet(known)
            self._remove(known)
        name = self._nixl.add_remote_agent(metadata)
        name = name.decode() if isinstance(name, bytes) else name
        try:
            if name != peer:
                raise PeerLost(f"the metadata of {peer} belongs to agent {name}")
            whole = [(region.base_address, region.num_bytes, region.device_id)]
            if not self._nixl.check_remote_metadata(name, self._nixl.get_xfer_descs(whole, region.memory)):
                raise PeerLost(f"{peer} has not registered {region}")
        except Exception:
            if name == peer or name not in self._peers:  # the metadata may be that of another peer, which is alive
                self._nixl.remove_remote_agent(name)
            raise
        self._peers[peer] = _Peer(name, region, num_users=1 if known is None else known.num_users + 1)

    def _disconnect(self, peer: str) -> None:
        known = self._peers.get(peer)
        if known is None or known.num_users == 0:
            return
        known.num_users -= 1
        self._forget_if_unused(known)

    def _forget_if_unused(self, known: _Peer) -> None:
        if known.num_users == 0 and known.num_posted == 0:
            del self._peers[known.name]
            self._remove(known)

    def _remove(self, known: _Peer) -> None:
        known.is_lost = True
        with contextlib.suppress(Exception):
            self._nixl.remove_remote_agent(known.name)

    def _write(
        self,
        peer: str,
        spans: Spans,
        not_after: Callable[[], float],
        after: Event | None,
        tag: Tag | None,
        future: Future[WriteReceipt],
    ) -> None:
        known = self._peers.get(peer)
        if known is None or known.is_lost or known.num_users == 0:
            raise PeerLost(f"not connected to {peer}")
        if self._region is None:
            raise TransferError("this agent has no registered region to write from")
        check_spans(spans, self._region, known.region)
        if tag is not None:
            check_spans(tag.spans, Region(0, STRIP_BYTES), known.region)
        cut = deque(pieces(merge(spans), PIECE_BYTES))
        write = _Write(known, total_bytes(spans), not_after, future, cut, after, tag)
        self._under_way.append(write)
        self._waiting.append(write)
        self._quiet_since = time.monotonic()

    def _post_next(self) -> None:
        """Posts one piece of the first write, in turn, that may go on."""
        skipped: list[_Write] = []
        self._can_post = False
        while self._waiting and not self._can_post:
            write = self._waiting.popleft()
            self._can_post = self._may_post(write)
            if self._can_post:
                self._post(write)
                if write.pieces:
                    self._waiting.append(write)
            elif write.pieces:
                skipped.append(write)
        self._waiting.extendleft(reversed(skipped))  # to the front again: the writes behind them have had their turn
        self._can_post = self._can_post and bool(self._waiting)

    def _may_post(self, write: _Write) -> bool:
        """Says whether the bytes of a write are there, its fence has not passed, and its peer has room for more.

        Fails a write that is not to go on at all.
        """
        if not write.pieces:
            return False  # it has failed meanwhile
        if write.peer.is_lost:
            self._fail(write, PeerLost(f"{write.peer.name} was lost in another write, or disconnected"))
            return False
        if write.after is not None:
            try:
                if write.after.query():
                    write.after = None
            except Exception as error:  # border: the caller's own code, whatever it raises
                failure = TransferError(f"what the write was to wait for failed: {error!r}")
                failure.__cause__ = error
                self._fail(write, failure)
                return False
        try:
            write.check_in_time()
        except PeerLost as error:
            self._fail(write, error)
            return False
        has_room = write.peer.num_posted == 0 or write.peer.posted_bytes + PIECE_BYTES <= MAX_POSTED_BYTES
        return has_room and write.after is None

    def _post(self, write: _Write) -> None:
        """Hands over the next piece."""
        write.started = write.started or time.monotonic()
        try:
            self._hand_over(write, write.pieces.popleft())
        except TransferError as error:
            self._fail(write, error)
        except Exception as error:  # border to NIXL
            self._lose(write, _translate(error))

    def _prepare(self, tag: bytes) -> None:
        if self._strips is not None:
            self._strips.take(tag)
            self._strips.give_back(tag)

    def _hand_over(self, write: _Write, spans: Spans) -> None:
        local, remote, strips = self._region, write.peer.region, self._strips
        assert local is not None
        assert strips is not None
        here, there = (
            [(local.base_address, spans[:, 0], spans[:, 2])],
            [(remote.base_address, spans[:, 1], spans[:, 2])],
        )
        if write.tag is not None and not write.pieces:
            rows = write.tag.spans
            here.append((strips.take(write.tag.value), rows[:, 0], rows[:, 2]))
            there.append((remote.base_address, rows[:, 1], rows[:, 2]))
            write.has_strip = True
        elif not len(spans):
            return
        ours = self._nixl.get_xfer_descs(_descriptors(here, local.device_id), local.memory)
        theirs = self._nixl.get_xfer_descs(_descriptors(there, remote.device_id), remote.memory)
        handle = self._nixl.initialize_xfer("WRITE", ours, theirs, write.peer.name)
        try:
            self._check_awake()
            write.check_in_time()  # the calls before may have taken long
            self._nixl.transfer(handle)
        except Exception:
            self._release_handle(handle)  # it was never posted, so it has no state
            raise
        num_bytes = total_bytes(spans)
        write.handles.append((handle, num_bytes))
        write.peer.num_posted += 1
        write.peer.posted_bytes += num_bytes
        self._quiet_since = time.monotonic()

    def _tear_down(self) -> None:
        """Lets go of the region, so that its memory may be freed. Until then peers may write to a receiver's region."""
        under_way = [handle for write in self._under_way for handle, _ in write.handles]
        for write in self._under_way:
            write.future.set_exception(PeerLost("the local agent was closed during the write"))
        for peer in self._peers.values():
            for job in peer.when_quiet:
                job.future.set_exception(TransferError("the NIXL agent is closed"))
        if under_way and not self._receives:
            # A NIXL agent with a write under way is not destroyed: UCX may have the write in a queue still, goes
            # through it when its worker is destroyed, and finds what was freed with the handle (segmentation fault in
            # ``ucp_proto_request_zcopy_completion``, seen with NIXL 1.5.1 where a connection had not come about).
            # Nothing progresses such an agent any more.
            never_free(self._nixl, *under_way)
        else:
            for handle in under_way:
                self._release_handle(handle)
            for peer in self._peers.values():
                self._remove(peer)
            if self._registered is not None:
                with contextlib.suppress(Exception):
                    self._nixl.deregister_memory(self._registered)
        self._under_way.clear()
        self._peers.clear()
        self._nixl = None  # this ends its progress thread, too


def end_process(reason: str) -> None:
    """Ends the process at once, with `EXIT_OVERSLEPT`, so that no thread of it sends another byte."""
    log.critical("this process ends itself: %s", reason)
    logs.flush(LAST_WORDS_S)
    os._exit(EXIT_OVERSLEPT)


def poll_pause_s(quiet_s: float) -> float:
    """Returns the seconds to wait before the writes under way are looked at again, when nothing was posted or ended for
    `quiet_s`.

    The pause is an eighth of `quiet_s`. So a write's end is noticed late by that share of its time, and a write that
    takes long costs little. Writes to a frozen peer are looked at a hundred times per second.
    """
    if quiet_s < SPIN_S:
        return 0.0
    return min(quiet_s / 8, POLL_MAX_S) if quiet_s < PATIENCE_S else POLL_STALLED_S


_Integers = np.ndarray[Any, np.dtype[np.int64]]


def _descriptors(parts: list[tuple[int, _Integers, _Integers]], device_id: int) -> _Rows:
    """Returns N×3 rows of (address, length, device), 64 bit throughout: 32-bit products overflow beyond 4 GiB. `parts`
    are base address, offsets and lengths.

    Where no part has more than one row, they are tuples. That takes half the time, and a small push waits for it.
    """
    if all(len(offsets) <= 1 for _, offsets, _ in parts):
        return [(base + int(offsets[0]), int(sizes[0]), device_id) for base, offsets, sizes in parts if len(offsets)]
    rows, at = np.empty((sum(len(offsets) for _, offsets, _ in parts), 3), dtype=np.uint64), 0
    for base, offsets, sizes in parts:
        part = rows[at : at + len(offsets)]
        part[:, 0] = offsets
        part[:, 0] += np.uint64(base)
        part[:, 1] = sizes
        at += len(offsets)
    rows[:, 2] = device_id
    return rows


def _translate(error: Exception) -> TransferError:
    """Returns NIXL's exception as one of ours. Whatever NIXL says about a transfer, that peer is not to be trusted any
    further."""
    return PeerLost(f"{type(error).__name__}: {error}")
