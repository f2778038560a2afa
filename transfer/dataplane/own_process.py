"""A data plane in a process of its own, which this one starts, feeds, and starts again where it has died.

The engine's side is one thread, which reads reports and waits for the process. Commands go through a pair of connected
sockets: the kernel keeps their order, wakes the reader, and tells each side at once when the other has gone.

What must always hold: of a push whose process has died the futures are done after the process is known to be dead, and
the next process starts after that, with another epoch. A violation would be seen as two senders that write for one
engine at once. The kernel kills the data plane with its engine (`PR_SET_PDEATHSIG`), also while it is stopped, so
whoever knows that the engine is dead knows it of the data plane as well.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from transfer.agents.base import Event
from transfer.agents.device import resolve
from transfer.agents.nixl import EXIT_OVERSLEPT
from transfer.agents.nixl_options import NixlOptions
from transfer.dataplane.events import EventPool, SharedEvent
from transfer.dataplane.messages import CannotStart, Close, Command, Ready, Report, Setup, frame, take_frames
from transfer.dataplane.plane import Face
from transfer.errors import TransferError
from transfer.memory.buffer import PagedBuffer
from transfer.memory.shared import export_gpu_memory
from transfer.plan.tags import slab_bytes
from transfer.roles.handshake import Identity
from transfer.roles.sender import CLOSE_TIMEOUT_S
from transfer.trust import FleetKey

log = logging.getLogger(__name__)

MIN_LIFE_S = 5.0
"""A process that dies sooner, in seconds, is not started again before a pause, which doubles each time."""
MAX_PAUSE_S = 30.0
END_TIMEOUT_S = CLOSE_TIMEOUT_S + 4.0
"""The time, in seconds, that the process has to end after `Close`. Then it is killed."""
READ_BYTES = 1 << 18
_report: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)
# Called through `PyDLL`, which keeps the interpreter lock: `socket.send` gives it up, and beside a busy thread the
# caller of a push would wait for it as long as that thread likes.
_send = ctypes.PyDLL(None, use_errno=True).send
_send.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)
_send.restype = ctypes.c_ssize_t


def epoch_of_life(epoch: str, life: int) -> str:
    """Returns the epoch of the process that was started after `life` others have died."""
    return f"{epoch}~{life}" if life else epoch


@dataclass(slots=True)
class _Child:
    """A process that was started. `outbox` holds what its socket had no room for."""

    process: subprocess.Popen[bytes]
    socket: socket.socket
    started_at: float
    outbox: deque[bytes] = field(default_factory=deque)
    is_ready: bool = False


class OwnProcess:
    """A home for a data plane. `buffer` must be shared memory (`PagedBuffer(is_shared=True)`), or lie on a GPU.

    Mutable state: `_child`, the process that is running, None between two; `num_lives`, how many were started. Under
    `_lock`: `_child`'s outbox, and `_early`, commands for the next process. `_closing` is set by `close`.
    """

    def __init__(
        self,
        epoch: str,
        buffer: PagedBuffer,
        identity: Identity,
        *,
        options: NixlOptions | None = None,
        fleet_key: FleetKey | None = None,
    ) -> None:
        """`epoch` must be new for every engine process. Raises `TransferError` for a buffer that cannot be shared."""
        self.layout = identity.layout
        device = buffer.pages.device
        if device.type == "cpu" and buffer.memory is None:
            raise TransferError("the data plane's process cannot map this buffer: create it with is_shared=True")
        self.num_lives = 0
        self._epoch = epoch
        self._buffer = buffer
        self._identity = identity
        self._options = options or NixlOptions()
        self._fleet_key = fleet_key
        self._device = resolve(device)
        self._events = EventPool()
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._early: deque[bytes] = deque()
        self._closing = threading.Event()
        self._epoll = select.epoll()
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"in process {self.pid}"

    @property
    def pid(self) -> int | None:
        """The number of the process, None while there is none."""
        child = self._child
        return None if child is None else child.process.pid

    @property
    def epoch(self) -> str:
        """The epoch of the process that runs now, or ran last."""
        return epoch_of_life(self._epoch, max(0, self.num_lives - 1))

    def start(self, face: Face) -> Future[None]:
        """See `Home`."""
        started: Future[None] = Future()
        started.set_running_or_notify_cancel()
        self._thread = threading.Thread(target=self._run, args=(face, started), name="data-plane", daemon=True)
        self._thread.start()
        return started

    def send(self, command: Command) -> None:
        """See `Home`. One system call, in which the interpreter lock is kept."""
        data = frame(command)
        with self._lock:
            child = self._child
            if child is None:
                self._early.append(data)
            elif child.outbox:
                child.outbox.append(data)
            else:
                self._send(child, data)

    def forget(self) -> None:
        """See `Home`."""
        with self._lock:
            self._early.clear()

    def event(self) -> SharedEvent:
        """See `Home`. Raises `TransferError` where too many are in use."""
        return self._events.new()

    def mark(self, event: Event) -> dict[str, Any]:
        """See `Home`."""
        if isinstance(event, SharedEvent):
            return {"flag": (event.slot, event.count)}
        if isinstance(event, torch.cuda.Event):
            try:
                return {"ipc_event": bytes(event.ipc_handle())}  # type: ignore[no-untyped-call]
            except RuntimeError as error:
                raise TransferError(
                    f"another process cannot ask this CUDA event, create it with interprocess=True: {error}"
                ) from None
        raise TransferError(
            f"`after` is asked by another process: give it an event of `DataPlane.event()`, or a "
            f"torch.cuda.Event(interprocess=True), not {event!r}"
        )

    def close(self) -> None:
        """See `Home`."""
        self._closing.set()
        self.send(Close())
        if self._thread is None:
            return
        self._thread.join(END_TIMEOUT_S)
        if self._thread.is_alive():
            child = self._child
            if child is not None:
                log.warning("the data plane's process %d does not end, and is killed", child.process.pid)
                child.process.kill()
            self._thread.join()

    # ── sending ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _send(self, child: _Child, data: bytes) -> None:
        """Send as much as there is room for; the rest is sent by our thread. Under the lock."""
        num_sent = _send(child.socket.fileno(), data, len(data), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        if num_sent == len(data):
            return
        if num_sent < 0:
            if ctypes.get_errno() not in (errno.EAGAIN, errno.EINTR):
                return  # it has gone: our thread hears of it, and every push is told
            num_sent = 0
        child.outbox.append(data[num_sent:])
        self._epoll.modify(child.socket, select.EPOLLIN | select.EPOLLOUT)

    def _flush(self, child: _Child) -> None:
        with self._lock:
            outbox, child.outbox = child.outbox, deque()
            while outbox and not child.outbox:
                self._send(child, outbox.popleft())
            child.outbox += outbox
            if not child.outbox:
                self._epoll.modify(child.socket, select.EPOLLIN)

    # ── our thread ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self, face: Face, started: Future[None]) -> None:
        """Process after process, until `close`, or until the first one cannot start."""
        pause_s = 0.0
        while True:
            try:
                child = self._start_child()
            except OSError as error:
                reason, was_ready, life_s = f"the data plane's process cannot be started: {error}", False, 0.0
            else:
                reason = self._serve(child, face, started)
                was_ready, life_s = child.is_ready, time.monotonic() - child.started_at
            if not started.done():
                face.lost(reason, for_good=True)
                started.set_exception(TransferError(reason))
                break
            face.lost(reason, for_good=self._closing.is_set())
            if self._closing.is_set():
                break
            pause_s = 0.0 if was_ready and life_s > MIN_LIFE_S else min(MAX_PAUSE_S, 2 * pause_s or 1.0)
            log.error("%s; another one is started%s", reason, f" in {pause_s:g} s" if pause_s else "")
            if self._closing.wait(pause_s):
                break
        self._epoll.close()

    def _start_child(self) -> _Child:
        """Raises `OSError`."""
        ours, theirs = socket.socketpair()
        with theirs:
            memory = self._buffer.memory
            inherited = [theirs.fileno(), self._events.flags.memory.descriptor]
            inherited += [memory.descriptor] if memory is not None else []
            process = subprocess.Popen(
                [sys.executable, "-m", "transfer.dataplane", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=inherited,
            )
        child = _Child(process, ours, time.monotonic())
        ours.setblocking(False)
        self._epoll.register(ours, select.EPOLLIN)
        setup = frame(self._setup())
        with self._lock:
            self.num_lives += 1
            self._send(child, setup)
            for data in self._early:
                if child.outbox:
                    child.outbox.append(data)
                else:
                    self._send(child, data)
            self._early.clear()
            self._child = child
        return child

    def _setup(self) -> Setup:
        kv, rank, memory = self.layout.kv, self.layout.rank, self._buffer.memory
        return Setup(
            parent=os.getpid(),
            epoch=epoch_of_life(self._epoch, self.num_lives),
            model=self._identity.model,
            layers=list(kv.layers),
            chunk_size=kv.chunk_size,
            element_bytes=kv.element_bytes,
            dtype=kv.dtype,
            num_ranks=rank.size,
            rank=rank.index,
            device=str(self._device),
            slab_bytes=slab_bytes(self._buffer.num_pages, self._buffer.page_bytes),
            slab_descriptor=None if memory is None else memory.descriptor,
            gpu_slab=None if memory is not None else tuple(export_gpu_memory(self._buffer.pages)),
            flags_descriptor=self._events.flags.memory.descriptor,
            backends=list(self._options.backends),
            backend_options={name: dict(options) for name, options in self._options.backend_options.items()},
            progress_delay_us=self._options.progress_delay_us,
            fleet_key=None if self._fleet_key is None else self._fleet_key.digits,
            log_level=logging.getLogger().getEffectiveLevel(),
        )

    def _serve(self, child: _Child, face: Face, started: Future[None]) -> str:
        """Pass its reports on until it is dead. Returns how it ended."""
        refusal = ""
        unread = bytearray()
        while True:
            ((_, events),) = self._epoll.poll() or ((0, 0),)
            if events & select.EPOLLOUT:
                self._flush(child)
            if not events & ~select.EPOLLOUT:
                continue
            try:
                data = child.socket.recv(READ_BYTES)
            except BlockingIOError:
                continue
            except OSError:
                data = b""
            if not data:
                break
            unread += data
            for message in take_frames(unread):
                report = _report.decode(message)
                if isinstance(report, Ready):
                    child.is_ready = True
                    if not started.done():
                        started.set_result(None)
                elif isinstance(report, CannotStart):
                    refusal = report.reason
                else:
                    face.reported(report)
        with self._lock:
            self._child = None
        self._epoll.unregister(child.socket)
        child.socket.close()
        return refusal or self._bury(child)

    def _bury(self, child: _Child) -> str:
        """Wait until the process is dead: nothing of it is under way then. Returns how it ended."""
        try:
            status = child.process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            child.process.kill()  # it has closed its end, and does not go
            status = child.process.wait()
        if status == EXIT_OVERSLEPT:
            return "the data plane's process had stood still in the middle of a write, and has ended itself"
        return f"the data plane's process has ended with status {status}"
