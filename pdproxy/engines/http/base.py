"""The module says what carries calls to an engine: a client, the answers that it gets, and what can go wrong on the
way. It knows nothing of what is carried."""

from __future__ import annotations

import errno
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from transfer.descriptors import LOCAL_ERRNOS, can_open

# Not `Final`, because tests set them: compiled code would not look them up.
SLICE_BYTES = 4 * 1024
"""The most bytes of an answer that are dealt with at a time. Where each of them makes work, as with chunks or events of
a byte or two, that takes a millisecond or two. A read of a socket can be 64 times as large.
"""
TURN_S = 0.001
"""The seconds after which no further slice of what was read is dealt with before the event loop has gone round."""


class EngineUnreachable(Exception):
    """`EngineUnreachable` says that there is no connection: the engine has not seen the request."""


class EngineRefused(EngineUnreachable):
    """`EngineRefused` says that nobody listens at the address. The process has probably gone, but that is no proof of
    it: a process may have closed its listening socket and still write KV.
    """


class LocalFault(EngineUnreachable):
    """`LocalFault` says that this machine had no descriptor, port or memory left to make a connection with. It says
    nothing of the engine, which is neither suspected nor counted against for it.
    """


class EngineBroken(Exception):
    """`EngineBroken` says that the connection failed after the request was on its way. Nobody knows what the engine did
    with it.
    """


class ReplyTooLarge(EngineBroken):
    """`ReplyTooLarge` says that an answer was given up, because it is larger than whoever reads it can use."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"its answer is larger than {limit_bytes} bytes")


MAX_REPLY_BYTES = 64 << 20
"""The most bytes of an answer that tells the proxy something: a prefill reply, metrics, a prompt's ids. No engine has
so much to tell, and one that never ends must not take all memory."""

CheckSize = Callable[[int], None]
"""A function that is called with the number of bytes that have come so far. It raises where they are too many."""


def at_most(limit_bytes: int) -> CheckSize:
    """Returns a check that raises `ReplyTooLarge` for more than `limit_bytes`."""

    def check(num_bytes: int) -> None:
        if num_bytes > limit_bytes:
            raise ReplyTooLarge(limit_bytes)

    return check


REPLY = at_most(MAX_REPLY_BYTES)


async def read_whole(read_chunk: Callable[[], Awaitable[bytes]], check: CheckSize) -> bytes:
    """Returns all that `read_chunk` gives until its end, ``b""``. Raises what it and `check` raise.

    The pieces are put together as they come: many tiny ones, each an object of its own, would take twenty times the
    memory.
    """
    body = await read_chunk()
    if not body:
        return b""
    check(len(body))
    more = await read_chunk()
    if not more:
        return body
    parts = bytearray(body)
    body = b""
    try:
        while more:
            parts += more
            check(len(parts))
            more = await read_chunk()
    except BaseException:
        parts.clear()  # an error keeps this frame alive as long as somebody has it, which may be a whole attempt
        raise
    return bytes(parts)


class Leg(Protocol):
    """A `Leg` is an HTTP answer whose head is there."""

    __slots__ = ()

    @property
    def status(self) -> int: ...

    def header(self, name: str) -> str | None: ...

    async def read(self, check: CheckSize = REPLY) -> bytes:
        """Returns the whole body. Raises `EngineBroken`, and what `check` raises."""

    def read_now(self, check: CheckSize = REPLY) -> bytes | None:
        """Returns the whole body where all of it has come; else None, and nothing was read. Raises as `read` does."""

    async def read_chunk(self) -> bytes:
        """Returns the next piece of the body as it comes, ``b""`` at its end. Raises `EngineBroken`."""

    @property
    def source(self) -> Source | None:
        """Returns the body as a source, which can be poured without waiting for its pieces; None where there is no such
        way.
        """

    def close(self) -> None:
        """Gives the answer up. Idempotent. An answer that was not read to its end costs the connection.

        The connection is gone a little later. The client sees to that, whatever becomes of the caller.
        """


class Sink(Protocol):
    """A `Sink` is where a body can be poured. The event loop calls `feed` any number of times, then one of `end` and
    `fail`.

    From within, it may call the source's `pause` and `resume`, and the leg's `close`. After `close` it hears nothing
    more. It must not raise: that costs the connection, and comes back as `fail`.
    """

    __slots__ = ()

    def feed(self, data: bytes) -> None:
        """Takes the next bytes, never none. It can call the source's `pause` to get no more for now."""

    def end(self) -> None:
        """Is called when the body was fed to its end."""

    def fail(self, error: EngineBroken) -> None:
        """Is called when the body broke off."""


class Source(Protocol):
    """A `Source` is a leg whose body goes from the socket's callback to a sink, without a task in between that awaits
    it.
    """

    __slots__ = ()

    def pour(self, sink: Sink) -> None:
        """Sends the body to `sink` from here on. What has come and was not read goes first, and at once."""

    def pause(self) -> None:
        """Stops for now. Bytes that were read from the socket already may still come. Idempotent, like `resume`."""

    def resume(self) -> None: ...


class EngineClient(Protocol):
    """An `EngineClient` carries calls to one instance. It has no deadlines of its own beyond connecting: the caller has
    them.
    """

    __slots__ = ()

    async def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> Leg:
        """Sends a POST and returns its answer when the answer's head is there. `path` may be a whole URL.

        Raises `EngineUnreachable` (`EngineRefused`), `EngineBroken`.
        """

    async def get(self, path: str, *, timeout_s: float, headers: Mapping[str, str] | None = None) -> tuple[int, bytes]:
        """Returns status and body. `path` may be a whole URL. Raises `EngineUnreachable` (`EngineRefused`),
        `EngineBroken`.
        """

    async def aclose(self) -> None:
        """Takes no new calls from now on, and ends when the connections of calls that are over are
        closed. Idempotent.
        """


def local_fault(errors: Sequence[OSError]) -> OSError | None:
    """Returns the error which shows that a connection failed for this machine's own reasons; None where there is none.
    `errors` has one for each address that was tried.

    An address that cannot be assigned shows nothing where another address of the engine gave an answer: a machine
    without IPv6 says so of ``::1``. A resolver that cannot open its files says the same as one that finds no name.
    """
    for error in errors:
        if error.errno in LOCAL_ERRNOS and error.errno != errno.EADDRNOTAVAIL:
            return error
        if isinstance(error, socket.gaierror) and (error.errno == socket.EAI_MEMORY or not can_open()):
            return OSError(errno.EMFILE, str(error))
    is_unassignable = bool(errors) and all(error.errno == errno.EADDRNOTAVAIL for error in errors)
    return errors[0] if is_unassignable else None
