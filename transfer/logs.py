"""A process writes its log to stderr from a thread of its own, so that whoever reads stderr never holds the process up.

A pipe that nobody reads, or a full disk, blocks or fails the write. The event loop must notice neither. Lines wait in a
bounded queue, in order. What does not fit into it is dropped and counted, and a line of the log says how much.
"""

from __future__ import annotations

import atexit
import errno
import logging
import os
import select
import sys
import threading
import time
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import NoReturn

log = logging.getLogger(__name__)

MAX_QUEUED_LINES = 20_000
MAX_QUEUED_BYTES = 8 * 2**20
"""The most bytes that wait to be written. That is some ten thousand requests."""
MAX_LINE_BYTES = 8 * 1024
MAX_RECORD_BYTES = 8 * MAX_LINE_BYTES
"""The most bytes of all lines of one record: a traceback has many."""
WRITE_BYTES = 64 * 1024
"""The least bytes after which no more lines are put into one write. A write gives up the interpreter's lock, and
getting it back takes 5 ms beside a busy event loop: one write per line would not keep up."""
RETRY_S = 0.5
FLUSH_S = 1.0
"""The most seconds that the end of a process waits for its log."""
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def configure(level: str | int, formatter: logging.Formatter | None = None) -> LogWriter:
    """Sends the log of this process to stderr, from `level` upwards. Python's warnings, and the traceback of an
    exception that ends the process, go the same way."""
    writer = LogWriter()
    writer.setFormatter(formatter or LineFormatter())
    logging.basicConfig(level=level.upper() if isinstance(level, str) else level, handlers=[writer], force=True)
    logging.captureWarnings(True)
    sys.excepthook = _tell_last_words
    atexit.register(writer.flush)  # `logging` has its own, and forgets its handlers in `logging.config.dictConfig`
    return writer


def writers() -> list[LogWriter]:
    """Returns those writers to which this process logs: one after `configure`, none before."""
    return [one for one in logging.getLogger().handlers if isinstance(one, LogWriter)]


def flush(timeout_s: float = FLUSH_S) -> None:
    """Waits until all that was logged so far is written, but no longer than `timeout_s` seconds. A process that ends in
    order need not call this; one that kills itself must."""
    for writer in writers():
        writer.flush(timeout_s)


def end_with(error: Exception) -> NoReturn:
    """Ends the process with status 1 and one line about `error`, behind all that was logged. As `sys.exit`, but without
    waiting for whoever reads stderr."""
    for writer in writers():
        writer.tell(f"error: {error}")
    sys.exit(1)


def _tell_last_words(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Does what Python does with an exception that ends the process, but without waiting for whoever reads stderr."""
    log.critical("the process ends with an exception", exc_info=(kind, error, trace))


class LineFormatter(logging.Formatter):
    """LineFormatter writes one line, whatever the message contains, and then the traceback where there is one."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        return printable(super().formatMessage(record).rstrip("\n"), MAX_LINE_BYTES)


class LogWriter(logging.Handler):
    """LogWriter is a log handler that never blocks. One daemon thread writes to the descriptor, by default stderr's.

    State: the queue, whose bytes are those put in less those taken out; whether it takes nothing until it is empty; the
    thread, once there was a line; how many bytes had been taken out when `flush` was given up last; how many records
    were dropped by the queue and by failed writes, and of how many the log tells. Each number is changed by one side
    only: by `emit`, which has the handler's lock, or by the thread.
    """

    def __init__(
        self,
        descriptor: int | None = None,
        *,
        max_lines: int = MAX_QUEUED_LINES,
        max_bytes: int = MAX_QUEUED_BYTES,
    ) -> None:
        super().__init__()
        # Where a process has no stderr, its number may be another file's or a socket's.
        self._descriptor = descriptor if descriptor is not None else (2 if sys.__stderr__ is not None else -1)
        self._max_lines = max_lines
        self._max_bytes = max_bytes
        self._queue: SimpleQueue[bytes | threading.Event] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._num_bytes_in = 0
        self._num_bytes_out = 0
        self._is_full = False
        self._is_failing = False
        self._stuck_at = -1
        self._num_refused = 0
        self._num_lost = 0
        self._num_told = 0

    @property
    def num_dropped(self) -> int:
        """Returns the number of records that nobody will read."""
        return self._num_refused + self._num_lost

    def emit(self, record: logging.LogRecord) -> None:
        """Puts the record into the queue. It is formatted here, where the context is the one in which it was made."""
        try:
            text = self.format(record)
        except Exception as error:  # the border to whatever is logged: a log call raises nothing
            where = f"{record.pathname}:{record.lineno}"
            text = f"a log record of {where} cannot be formatted: {type(error).__name__}: {error}"
        self._put(text)

    def flush(self, timeout_s: float = FLUSH_S) -> None:
        """Waits until all that was logged so far is written, but no longer than `timeout_s` seconds."""
        if self._thread is None or self._stuck_at == self._num_bytes_out:
            return  # the last one waited for nothing, and nothing has got on since
        done = threading.Event()
        self._queue.put(done)
        if not done.wait(timeout_s):
            self._stuck_at = self._num_bytes_out

    def tell(self, text: str) -> None:
        """Writes `text` as it is, behind all that was logged before."""
        self.acquire()
        try:
            self._put(text)
        finally:
            self.release()

    def _put(self, text: str) -> None:
        data = _bounded(text.encode("utf-8", "backslashreplace") + b"\n")
        num_bytes = self._num_bytes_in - self._num_bytes_out + len(data)
        if self._is_full or num_bytes > self._max_bytes or self._queue.qsize() >= self._max_lines:
            self._is_full = True
            self._num_refused += 1
            return
        self._num_bytes_in += len(data)
        self._queue.put(data)
        if self._thread is None:  # not earlier: the ranks of an engine are forked before there is any thread
            self._thread = threading.Thread(target=self._run, name="log", daemon=True)
            self._thread.start()

    # ── the thread ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        while True:
            lines, done = self._take()
            if self._is_failing:
                self._tell_drops()
            self._write(lines)
            self._num_bytes_out += sum(map(len, lines))
            if self._queue.empty():
                # In this order: a record that is refused from now on finds `_is_full` set anew, and is told next time.
                self._is_full = False
                self._tell_drops()
            if done is not None:
                done.set()

    def _take(self) -> tuple[list[bytes], threading.Event | None]:
        """Waits for a line, and returns those that are written together; and who waits until that is done."""
        lines: list[bytes] = []
        size = 0
        item = self._queue.get()
        while not isinstance(item, threading.Event):
            lines.append(item)
            size += len(item)
            if size >= WRITE_BYTES:
                return lines, None
            try:
                item = self._queue.get_nowait()
            except Empty:
                return lines, None
        return lines, item

    def _tell_drops(self) -> None:
        num = self.num_dropped - self._num_told
        if num:
            where, text = (__name__, logging.WARNING, __file__, 0), "%d log records were dropped: stderr took no more"
            line = self.format(logging.LogRecord(*where, text, (num,), None))
            if self._is_written(line.encode() + b"\n"):
                self._num_told += num

    def _write(self, lines: list[bytes]) -> None:
        if lines and not self._is_written(b"".join(lines)):
            self._num_lost += len(lines)

    def _is_written(self, data: bytes) -> bool:
        """Writes all of `data`, and waits as long as that takes: for a reader, or for room on the disk. Returns False
        where it can be written no more, as to a pipe without a reader."""
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError:  # whoever shares the descriptor has made it so
                room = select.poll()
                room.register(self._descriptor, select.POLLOUT)
                room.poll(RETRY_S * 1000)
            except OSError as error:
                if error.errno not in _FULL:
                    self._is_failing = True
                    return False
                time.sleep(RETRY_S)
        self._is_failing = False
        return True


def printable(text: str, max_bytes: int) -> str:
    """Returns `text` as it may be shown: `shortened`, and with escapes (as ``\\n``) for what cannot be printed, so that
    a text from outside never looks like another line."""
    if len(text) * 4 > max_bytes:
        text = shortened(text, max_bytes)
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def shortened(text: str, max_bytes: int) -> str:
    """Returns `text`, or where it has more than `max_bytes` bytes (UTF-8) its two ends, and between them how many bytes
    are missing."""
    return _shortened(text.encode("utf-8", "backslashreplace"), max_bytes).decode()


def _bounded(data: bytes) -> bytes:
    """Returns the lines of a record, none of which is too long, nor are all of them together."""
    if len(data) <= MAX_LINE_BYTES:
        return data
    lines = (_shortened(line, MAX_LINE_BYTES - 1) for line in data[:-1].split(b"\n"))
    return _shortened(b"\n".join(lines), MAX_RECORD_BYTES - 1, around=b"\n") + b"\n"


def _shortened(data: bytes, max_bytes: int, around: bytes = b"") -> bytes:
    if len(data) <= max_bytes:
        return data
    room = max(0, max_bytes - 64) // 2  # the mark has less than 64 bytes
    head, tail = (part.decode(errors="ignore").encode() for part in (data[:room], data[len(data) - room :]))
    return head + around + f"[… {len(data) - len(head) - len(tail)} bytes missing …]".encode() + around + tail
