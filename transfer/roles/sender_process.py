"""The module finds out for certain that a sender's process on this machine has ended, and that nothing of it is still
on its way.

What must always hold: a process is reported as ended only after it has, and what it had handed to the kernel counts as
under way until this process's own threads have read it. A violation would be seen as bytes of a dead sender in pages
that somebody else has been given.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from transfer.wire import Process

_TCP_STATE = struct.Struct("B")
_GONE_BY_PEER = frozenset({7, 8, 9})
"""The states CLOSE (after a reset), CLOSE_WAIT and LAST_ACK of a socket whose other end will send nothing more."""
_ORPHAN_STATES = frozenset({"04", "0B"})
"""The states FIN_WAIT1 and CLOSING, in which the owner has ended and the kernel still delivers what it wrote."""


def own_process() -> Process | None:
    """Returns a description of this process, or None where the system does not have what it takes."""
    return _describe(os.getpid())


def is_on_this_machine(process: Process) -> bool:
    """Returns whether `process` is on this machine and has its number in the same namespace as we do."""
    ours = own_process()
    return ours is not None and (ours.boot_id, ours.pid_namespace) == (process.boot_id, process.pid_namespace)


def open_process(process: Process) -> int | None:
    """Returns a descriptor that becomes readable when the process ends, or None where it has ended. The caller closes
    it.

    Ask only for a process on this machine. Raises `OSError` where the system cannot tell.
    """
    try:
        descriptor = os.pidfd_open(process.pid)
    except OSError as error:
        if error.errno == errno.ESRCH:
            return None
        raise
    # The descriptor keeps the number: no other process can get it before this look.
    if _started(process.pid) == process.started:
        return descriptor
    os.close(descriptor)
    return None


def has_undelivered_bytes() -> bool:
    """Returns whether a connection that this process accepted has lost its other end, and may still bring something.

    A transport thread closes such a connection as soon as it looks and has read all of it.
    """
    ports, is_any_gone = set(), False
    for one in _stream_sockets():
        with contextlib.suppress(OSError):
            if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                ports.add(one.getsockname()[1])
    for one in _stream_sockets():
        with contextlib.suppress(OSError):
            (state,) = _TCP_STATE.unpack(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1))
            is_any_gone = is_any_gone or (state in _GONE_BY_PEER and one.getsockname()[1] in ports)
    return is_any_gone or _has_orphans(ports)


def _has_orphans(ports: set[int]) -> bool:
    """Returns whether the kernel still delivers, to one of these ports, what an ended process of this machine wrote."""
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] in _ORPHAN_STATES and int(fields[2].rpartition(":")[2], 16) in ports:
                    return True
    return False


def _stream_sockets() -> Iterator[socket.socket]:
    """Yields this process's TCP sockets, to look at only. Each stays its owner's, who may close it at any moment."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            one = socket.socket(fileno=int(name))
            try:
                if one.type == socket.SOCK_STREAM and one.family in (socket.AF_INET, socket.AF_INET6):
                    yield one
            finally:
                one.detach()


@lru_cache(maxsize=1)
def _describe(pid: int) -> Process | None:
    """Returns the description of the process `pid`, which is this one. It is kept for one number, because a forked
    child asks with another."""
    try:
        started = _started(pid)
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return None
    if started is None or not hasattr(os, "pidfd_open"):
        return None
    return Process(pid=pid, started=started, boot_id=boot_id, pid_namespace=namespace)


def _started(pid: int) -> int | None:
    """Returns when the process was started, in clock ticks since boot (proc(5), field 22 of ``stat``); None where there
    is no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except FileNotFoundError:
        return None
