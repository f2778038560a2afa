"""Plain ASGI, for the routes that generate: a body is read once, a client is watched until it leaves, a reply is sent.

A framework's streaming response keeps what it streams from in a generator, and a generator parked in `yield` does not
run its `finally` when the client goes. Here one coroutine owns a request to its last byte. A client that leaves cancels
it, in whatever phase it is.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any, TypeVar

import anyio
import msgspec

from transfer.engine.api_error import ApiError, body_too_large, memory_spent
from transfer.memory_budget import MemoryShare
from transfer.wire import MAX_TERM, TERM_HEADER

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]
T = TypeVar("T")

_TERM_HEADER = TERM_HEADER.encode()


class ClientGoneError(Exception):
    """The client left while its body was being read. There is nobody to answer."""


async def read_body(scope: Scope, receive: Receive, limit_bytes: int, memory: MemoryShare) -> bytes:
    """Returns the whole body, for which it takes as many bytes of `memory`. Raises `ApiError` as soon as the body is
    known to be too large (413) or there is no memory for it (503), and `ClientGoneError`."""
    announced = dict(scope["headers"]).get(b"content-length", b"0")
    if announced.isdigit():
        _make_room(int(announced), limit_bytes, memory)
    body, more = bytearray(), True  # one block: tiny pieces, each an object of its own, would take far more
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        piece: bytes = message.get("body", b"")
        _make_room(len(body) + len(piece), limit_bytes, memory)
        more = message.get("more_body", False)
        if not body and not more:
            return piece
        body += piece
    return bytes(body)


def read_term(scope: Scope) -> int | None:
    """Returns the term of the leader for whom a leg is sent, as its header says; None where there is no such header.
    Raises `ApiError` for one that is no term."""
    told: list[bytes] = [value for name, value in scope["headers"] if name == _TERM_HEADER]
    return parse_term([value.decode("latin-1") for value in told], TERM_HEADER)


def parse_term(told: Sequence[str], name: str) -> int | None:
    """Returns the term that is `told` by the name `name`; None where none is. Raises `ApiError` for one that is no
    term, or for several."""
    if not told:
        return None
    digits = told[0] if len(told) == 1 and told[0].isascii() else ""
    # The length first: Python refuses to read thousands of digits.
    term = int(digits) if digits.isdigit() and len(digits) <= len(str(MAX_TERM)) else 0
    if not 0 < term <= MAX_TERM:
        raise ApiError(f"{name} must be one whole number from 1 to {MAX_TERM}", param=name)
    return term


def _make_room(num_bytes: int, limit_bytes: int, memory: MemoryShare) -> None:
    """Takes what `memory` lacks for a body of `num_bytes`. Raises `ApiError`."""
    if num_bytes > limit_bytes:
        raise body_too_large(limit_bytes)
    missing_bytes = num_bytes - memory.num_bytes
    if missing_bytes > 0 and not memory.take(missing_bytes):
        raise memory_spent(memory.limit_bytes)


async def while_connected(receive: Receive, work: Callable[[], Awaitable[None]]) -> None:
    """Runs `work`, which raises nothing, and cancels it if the client leaves. The body has been read before."""
    async with anyio.create_task_group() as group:
        group.start_soon(_cancel_when_gone, receive, group.cancel_scope)
        await work()
        group.cancel_scope.cancel()


async def _cancel_when_gone(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


def decode(body: bytes, type_: type[T]) -> T:
    """Returns the JSON object in `body` as the given struct. Raises `ApiError`, which names the field that is missing
    or of a wrong type."""
    try:
        if not body.isascii():
            body.decode()  # msgspec does not look into the fields that it skips, and JSON is UTF-8 as a whole
        return msgspec.json.decode(body, type=type_)
    except msgspec.ValidationError as error:
        field = _field_of(error)
        message = f"{field} is missing" if str(error) == f"Object missing required field `{field}`" else str(error)
        raise ApiError(message, param=field) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(f"The body is not valid JSON: {error}") from None


def _field_of(error: msgspec.ValidationError) -> str | None:
    """Returns the body's field at fault, from msgspec's ``at `$.field[0]` `` or ``missing required field `field` ``."""
    found = re.search(r"`\$\.(\w+)", str(error)) or re.search(r"required field `(\w+)`", str(error))
    return found.group(1) if found else None


class Reply:
    """A `Reply` is one HTTP reply: JSON at once, or server-sent events whose head goes out with the first of them.

    Mutable state: `is_started` (the head is out, errors can only be events) and `is_ended` (nothing may follow).
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._sending = anyio.Lock(fast_acquire=True)  # several sequences may share one stream
        self.is_started = False
        self.is_ended = False

    async def json(self, status: int, content: object, headers: Headers | None = None) -> None:
        body = msgspec.json.encode(content)
        head = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        self.is_started = self.is_ended = True
        await self._send({"type": "http.response.start", "status": status, "headers": head + (headers or [])})
        await self._send({"type": "http.response.body", "body": body})

    async def events(self, data: bytes) -> None:
        """Sends events (made by `event`), after the head if these are the first."""
        await self._write(data, more=True)

    async def end(self, data: bytes) -> None:
        """Sends the last events."""
        await self._write(data, more=False)

    async def fail(self, error: ApiError) -> None:
        """Sends an error: a real status while that is possible, else an event ``{"error": …}`` and the end, without
        ``[DONE]``."""
        if self.is_ended:
            return
        if self.is_started:
            await self.end(event(error.body()))
        else:
            await self.json(error.status, error.body(), error.headers())

    async def _write(self, data: bytes, *, more: bool) -> None:
        async with self._sending:
            if not self.is_started:
                await self._send({"type": "http.response.start", "status": 200, "headers": _EVENT_HEADERS})
                self.is_started = True
            self.is_ended = not more
            await self._send({"type": "http.response.body", "body": data, "more_body": more})


_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

DONE = b"data: [DONE]\n\n"


def event(content: object) -> bytes:
    """Returns one server-sent event with JSON data."""
    return b"data: %b\n\n" % msgspec.json.encode(content)
