"""A data plane in a process of its own. The engine's process starts it, feeds it, and starts it again when it has died.

The engine's side is one thread, which reads reports and waits for the process. Commands go through a pair of connected
sockets: the kernel keeps their order, wakes the reader, and tells each side when the other has gone.

What must always hold: when a process has died, the futures of its pushes are done only after it is known to be dead.
The next process starts after that, with another epoch. A violation would be seen as two senders that write for one
engine at once. The kernel kills the data plane with its engine (`PR_SET_PDEATHSIG`), also while it is stopped. So a
process that knows that the engine is dead knows the same of the data plane. To the kernel the parent is not the engine
but the thread that started the process. So our own thread starts it, and that thread lives as long as its process does.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import select
import socket
import subprocess
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from operator import index
from typing import Any

import msgspec
import torch

from transfer.agents.base import Event
from transfer.agents.device import resolve
from transfer.agents.nixl import EXIT_OVERSLEPT
from transfer.agents.nixl_options import NixlOptions
from transfer.child_process import frame, start, take_frames
from transfer.dataplane.events import EventPool, SharedEvent
from transfer.dataplane.messages import (
    CannotStart,
    Close,
    Command,
    Failed,
    Finished,
    Open,
    Ready,
    Report,
    Setup,
)
from transfer.dataplane.plane import CLOSING, Listener
from transfer.errors import TransferError
from transfer.memory.buffer import PagedBuffer
from transfer.memory.shared import export_gpu_memory
from transfer.plan.tags import slab_bytes
from transfer.roles.epochs import epoch_of_life
from transfer.roles.handshake import Identity
from transfer.roles.sender import CLOSE_TIMEOUT_S
from transfer.trust import FleetKey

log = logging.getLogger(__name__)

MIN_LIFE_S = 5.0
"""The shortest life, in seconds, after which a process is started again at once. After a shorter life there is a pause,
which doubles each time."""
MAX_PAUSE_S = 30.0
"""The longest pause, in seconds, before another process is started."""
MANY_YOUNG = 2
"""The number of processes, dead one after the other after short lives, from which on the data plane is not well."""
END_TIMEOUT_S = CLOSE_TIMEOUT_S + 4.0
"""The time, in seconds, that the process has to end after `Close`. Then it is killed."""
START_TIMEOUT_S = 120.0
"""The time, in seconds, that the process has from its start until its slab is registered. Then it is killed."""
SILENCE_S = 10.0
"""The time, in seconds, after which a silent process is killed. A process gives a push up by itself when the push's
time is over. A process that has not said so after this many seconds more stands still."""
TICK_S = 1.0
"""The most seconds between two looks whether the process is silent."""
READ_BYTES = 1 << 18
_report: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)
# Called through `PyDLL`, which keeps the interpreter lock: `socket.send` gives it up, and beside a busy thread the
# caller of a push would wait for it as long as that thread likes.
_send = ctypes.PyDLL(None, use_errno=True).send
_send.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)
_send.restype = ctypes.c_ssize_t


@dataclass(frozen=True, slots=True)
class _Frame:
    """A `_Frame` is a command as it travels. For an `Open`, `opens` is the push's number and the moment when it should
    be over."""

    data: bytes
    opens: tuple[int, float] | None = None
    closes: bool = False


@dataclass(slots=True)
class _Child:
    """A `_Child` is a process that was started. `outbox` holds what its socket had no room for. `is_sending` is True
    while somebody sends. `due` tells, by number, when the pushes under way should be over."""

    process: subprocess.Popen[bytes]
    watched: int
    """A descriptor that can be read when the process has ended (``pidfd``). The socket alone would not tell: if another
    thread forks at the wrong moment, its child process has the socket's other end, too."""
    socket: socket.socket
    started_at: float
    outbox: deque[bytes] = field(default_factory=deque)
    is_sending: bool = False
    is_ready: bool = False
    due: dict[int, float] = field(default_factory=dict)


class OwnProcess:
    """`OwnProcess` is a backend for a data plane. `buffer` must be shared memory (`PagedBuffer(is_shared=True)`), or
    lie on a GPU.

    Mutable state, under `_lock`: `_child`, the process that is running (None between two processes), and what is in it;
    `_early`, commands for the next process. Besides: `num_lives`, how many processes were started; `_num_young`, how
    many died young, one after the other; `_thread`; `_closing`, set by `close`.
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
        """Does not start anything yet. `epoch` must be new for every engine process. Raises `TransferError` for a
        buffer that cannot be shared."""
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
        self._lock = threading.RLock()  # reentrant: `close` calls `send` under it, and see `_flush`
        self._child: _Child | None = None
        self._early: deque[_Frame] = deque()
        self._num_young = 0
        self._closing = threading.Event()
        self._epoll: select.epoll | None = None
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"in process {self.pid}"

    @property
    def pid(self) -> int | None:
        """The number of the process, or None while there is none."""
        child = self._child
        return None if child is None else child.process.pid

    @property
    def epoch(self) -> str:
        """The epoch of the process that runs now, or that ran last."""
        return epoch_of_life(self._epoch, max(0, self.num_lives - 1))

    @property
    def is_well(self) -> bool:
        """Tells whether commands are carried out. A process that has died once is replaced in seconds: until then
        nothing is wrong. See `Backend`."""
        return self._num_young < MANY_YOUNG

    def start(self, listener: Listener, started: Future[None]) -> None:
        """Starts the thread, which starts the process. See `Backend`."""
        thread = threading.Thread(target=self._run, args=(listener, started), name="data-plane", daemon=True)
        thread.start()
        self._thread = thread

    def prepare(self, command: Command) -> _Frame:
        """Returns the command as it travels. See `Backend`."""
        try:
            data = frame(command)
            if isinstance(command, Open):  # the caller hears of a command that cannot be read there
                msgspec.msgpack.decode(msgspec.msgpack.encode(command), type=Open)
        except (TypeError, ValueError, OverflowError) as error:
            raise TransferError(f"this cannot be told to the data plane's process: {error}") from error
        opens = (index(command.number), command.deadline) if isinstance(command, Open) else None
        return _Frame(data, opens, isinstance(command, Close))

    def send(self, prepared: _Frame) -> None:
        """Sends a command with one system call, in which the interpreter lock is kept. See `Backend`."""
        with self._lock:
            if self._closing.is_set() and not prepared.closes:
                return
            if self._child is None:
                self._early.append(prepared)
            else:
                self._hand_over(self._child, prepared)

    def forget(self) -> None:
        """Drops the commands that wait for the next process. See `Backend`."""
        with self._lock:
            self._early.clear()

    def event(self) -> SharedEvent:
        """Returns a new event in shared memory. Raises `TransferError` where too many are in use. See `Backend`."""
        return self._events.new()

    def mark(self, event: Event) -> dict[str, Any]:
        """Returns the field of `Filled` that names the event to another process. See `Backend`."""
        if isinstance(event, SharedEvent) and event.is_of(self._events):
            return {"flag": (event.slot, event.count)}
        if isinstance(event, torch.cuda.Event):
            try:
                return {"ipc_event": bytes(event.ipc_handle())}  # type: ignore[no-untyped-call]
            except RuntimeError as error:
                raise TransferError(
                    f"another process cannot ask this CUDA event, create it with interprocess=True: {error}"
                ) from None
        raise TransferError(
            f"`after` is asked by another process: give it an event of this plane's `DataPlane.event()`, or a "
            f"torch.cuda.Event(interprocess=True), not {event!r}"
        )

    def close(self) -> None:
        """Ends the process, and waits for it. A process that does not end in time is killed. See `Backend`."""
        with self._lock:
            self._closing.set()
            self.send(self.prepare(Close()))
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        thread.join(END_TIMEOUT_S)
        with self._lock:
            child = self._child
            if child is not None and child.process.poll() is None:
                log.warning("the data plane's process %d does not end, and is killed", child.process.pid)
                child.process.kill()
        thread.join()

    # ── sending, under the lock ─────────────────────────────────────────────────────────────────────────────────────

    def _hand_over(self, child: _Child, prepared: _Frame) -> None:
        if prepared.opens is not None:
            number, deadline = prepared.opens
            child.due[number] = deadline
        child.outbox.append(prepared.data)
        self._flush(child)

    def _flush(self, child: _Child) -> None:
        """Sends what there is room for. Our thread sends the rest when the socket has room again.

        A garbage collector may call this method again while it runs. Then the outer call sends what the inner one has
        added.
        """
        assert self._epoll is not None
        if child.is_sending:
            return
        child.is_sending = True
        try:
            while child.outbox:
                data = child.outbox[0]
                num_sent = _send(child.socket.fileno(), data, len(data), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                if num_sent == len(data):
                    child.outbox.popleft()
                    continue
                if num_sent > 0:
                    child.outbox[0] = data[num_sent:]
                elif ctypes.get_errno() not in (errno.EAGAIN, errno.EINTR):
                    child.outbox.clear()  # the process has gone: our thread notices, and tells every push
                break
        finally:
            child.is_sending = False
        self._epoll.modify(child.socket, select.EPOLLIN | (select.EPOLLOUT if child.outbox else 0))

    # ── our thread ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self, listener: Listener, started: Future[None]) -> None:
        """Serves one process after the other, until `close`, or until the first one cannot start.

        Whatever breaks in here, no process is left, and everybody is told.
        """
        reason = "the data plane's thread broke"
        try:
            with select.epoll() as self._epoll:
                reason = self._serve_lives(listener, started)
        except Exception as error:
            log.exception("the data plane's thread broke")
            reason = f"{type(error).__name__}: {error}"
        finally:
            with self._lock:
                self._closing.set()
                child, self._child = self._child, None
            if child is not None:
                child.process.kill()
                child.process.wait()
            listener.lost(reason, for_good=True)
            if not started.done():
                started.set_exception(TransferError(reason))

    def _serve_lives(self, listener: Listener, started: Future[None]) -> str:
        """Starts and serves the processes. Returns the reason why there is no other process."""
        pause_s = 0.0
        while True:
            try:
                child = self._start_child(self._setup())
            except (OSError, RuntimeError) as error:
                reason, life_s = f"the data plane's process cannot be started: {error}", 0.0
            else:
                reason = self._serve(child, listener, started)
                life_s = time.monotonic() - child.started_at if child.is_ready else 0.0
            if self._closing.is_set():
                return CLOSING
            if not started.done():
                return reason
            listener.lost(reason, for_good=False)
            self._num_young = self._num_young + 1 if life_s < MIN_LIFE_S else 0
            pause_s = min(MAX_PAUSE_S, 2 * pause_s or 1.0) if self._num_young else 0.0
            log.error("%s; another one is started%s", reason, f" in {pause_s:g} s" if pause_s else "")
            if self._closing.wait(pause_s):
                return CLOSING

    def _start_child(self, setup: Setup) -> _Child:
        """Starts a process and sends it `setup` and the early commands. Raises `OSError` where it cannot be started."""
        assert self._epoll is not None
        memory = self._buffer.memory
        inherited = [self._events.flags.memory.descriptor]
        inherited += [memory.descriptor] if memory is not None else []
        process, ours = start("transfer.dataplane", inherited)
        try:
            watched = os.pidfd_open(process.pid)
        except OSError:
            process.kill()
            process.wait()
            raise
        child = _Child(process, watched, ours, time.monotonic())
        ours.setblocking(False)
        self._epoll.register(ours, select.EPOLLIN)
        self._epoll.register(child.watched, select.EPOLLIN)
        with self._lock:
            self.num_lives += 1
            self._child = child
            child.outbox.append(frame(setup))
            early, self._early = self._early, deque()
            for prepared in early:
                self._hand_over(child, prepared)
            self._flush(child)
        return child

    def _setup(self) -> Setup:
        """Returns what the next process is told first. Raises `RuntimeError` where CUDA cannot export the slab."""
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

    def _serve(self, child: _Child, listener: Listener, started: Future[None]) -> str:
        """Passes the process's reports on until it is dead. Returns how it ended."""
        why: str | None = None
        try:
            why = self._read_reports(child, listener, started)
        except Exception as error:  # its reports make no sense; its writes end with it
            log.exception("a report of the data plane's process is not understood")
            why = f"the data plane's process was ended, because a report of it is not understood: {error}"
            child.process.kill()
        with self._lock:
            self._child = None
        assert self._epoll is not None
        self._epoll.unregister(child.socket)
        self._epoll.unregister(child.watched)
        child.socket.close()
        ending = self._bury(child)
        os.close(child.watched)
        return why or ending

    def _read_reports(self, child: _Child, listener: Listener, started: Future[None]) -> str | None:
        """Reads reports until the process is dead, or has closed its end. Returns the reason, or None where only the
        process's exit status tells it."""
        assert self._epoll is not None
        why: str | None = None
        unread = bytearray()
        while True:
            happened = dict(self._epoll.poll(TICK_S))
            if happened.get(child.socket.fileno(), 0) & select.EPOLLOUT:
                with self._lock:
                    self._flush(child)
            data = self._read(child)
            unread += data or b""
            for message in take_frames(unread):
                report = _report.decode(message)
                if isinstance(report, Ready):
                    child.is_ready = True
                    if not started.done():
                        started.set_result(None)
                elif isinstance(report, CannotStart):
                    why = report.reason
                else:
                    if isinstance(report, Failed | Finished):
                        with self._lock:
                            child.due.pop(report.number, None)
                    listener.reported(report)
            if data == b"" or (data is None and child.watched in happened):
                return why
            if (silence := self._silence(child)) is not None:
                child.process.kill()
                return silence

    @staticmethod
    def _read(child: _Child) -> bytes | None:
        """Returns what the socket has. Returns None where there is nothing yet, and no bytes where the process has
        closed its end."""
        try:
            return child.socket.recv(READ_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def _silence(self, child: _Child) -> str | None:
        """Returns why the process is taken to stand still, or None where it does not."""
        now = time.monotonic()
        if not child.is_ready:
            is_late = now > child.started_at + START_TIMEOUT_S
            return f"the data plane's process was not ready within {START_TIMEOUT_S:.0f} s" if is_late else None
        with self._lock:
            first = min(child.due.values(), default=now)
        # It may have had no chance to speak before it was ready.
        if now > max(first, child.started_at) + SILENCE_S:
            return (
                f"the data plane's process stands still: a push has been over for {SILENCE_S:.0f} s, and it is silent"
            )
        return None

    def _bury(self, child: _Child) -> str:
        """Waits until the process is dead: then nothing of it is under way. Returns how it ended."""
        try:
            status = child.process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            child.process.kill()  # it has closed its end, and does not exit
            status = child.process.wait()
        if status == EXIT_OVERSLEPT:
            return "the data plane's process had stood still in the middle of a write, and has ended itself"
        return f"the data plane's process has ended with status {status}"
