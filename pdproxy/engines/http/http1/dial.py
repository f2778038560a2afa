"""The module opens TCP connections, and measures their time limit by what the kernel did, not by when the loop saw it.

A loop that was busy for seconds, with many large requests in one turn, runs its timers before it looks at its sockets.
It would give up connections that have long been there, and engines would be blamed for it. A timer that was set in such
a turn also goes off early, because the loop's clock stood still.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from typing import Any, Final

_NUM_LAST_LOOKS: Final = 3
"""The turns of the loop, once the time is up, in which it finds what has come by then: in the first one it may look at
its sockets after its tasks.
"""


async def dial(address: str, port: int, limit_s: float) -> socket.socket:
    """Returns a socket that is connected to an IP address. The caller closes it.

    Raises `TimeoutError` where that takes longer than `limit_s` seconds, and `OSError`. Where nobody listens on this
    machine, that is known at once, without a turn of the loop.
    """
    sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        failure = sock.connect_ex((address, port))
        if failure == errno.EINPROGRESS:
            failure = _failure(sock) or await _outcome(sock, limit_s)
        if failure:
            raise OSError(failure, f"Connect call failed {(address, port)}")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
    except BaseException:
        sock.close()
        raise
    return sock


async def is_done_in_time(future: asyncio.Future[Any], limit_s: float) -> bool:
    """Waits for `future`, `limit_s` seconds at most. Returns whether it is done; does not cancel it."""
    due_at = time.monotonic() + limit_s
    while not future.done() and (left_s := due_at - time.monotonic()) > 0.0:
        await asyncio.wait((future,), timeout=left_s)
    for _ in range(_NUM_LAST_LOOKS):
        if future.done():
            break
        await asyncio.sleep(0)
    return future.done()


async def _outcome(sock: socket.socket, limit_s: float) -> int:
    """Waits for the end of an attempt to connect. Returns its error number, 0 where there is a connection. Raises
    `TimeoutError`.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    loop.add_writer(sock, _settle, ended)
    try:
        if not await is_done_in_time(ended, limit_s):
            raise TimeoutError(f"no connection within {limit_s:g} s")
    finally:
        loop.remove_writer(sock)
    return _failure(sock)


def _failure(sock: socket.socket) -> int:
    """Returns the error number of a connect that has failed, and forgets it; 0 where it goes on or has succeeded."""
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
