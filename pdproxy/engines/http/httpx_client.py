"""The module implements `EngineClient` over httpx: one client per instance, its connections kept alive, nothing
limited and nothing repeated.

Admission limits concurrency, so the pool has no limits. The orchestrator repeats calls, since a repeated prefill needs
a fresh attempt id. There is one exception: the client repeats a call where the engine had closed a kept-alive
connection and that was found out before the request was on it.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

import httpcore
import httpx

from pdproxy.aio.descriptors import DescriptorBudget
from pdproxy.engines.http.base import (
    REPLY,
    SLICE_BYTES,
    TURN_S,
    CheckSize,
    EngineBroken,
    EngineRefused,
    EngineUnreachable,
    LocalFault,
    local_fault,
    read_whole,
)

KEEPALIVE_S = 4.0
"""The seconds for which an idle connection is kept. uvicorn, and so most engines, close an idle connection after five
seconds.
"""

CLOSE_S = 2.0
"""The seconds that the closing of one connection may take. After that the socket is left to the operating system."""

_NOTHING_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol)


class HttpxLeg:
    """Implements `base.Leg`. Mutable state: the response's; what has come and was not read; when it is the turn of
    others, on the monotonic clock; the task that closes the response, once there is one.

    httpx awaits while it closes. A caller that is cancelled there would leave the connection in nobody's hands. So a
    task of its own closes it, and is in `closing` until it has ended.
    """

    def __init__(
        self, response: httpx.Response, closing: set[asyncio.Task[None]], on_closed: Callable[[], None]
    ) -> None:
        """Takes `on_closed`, which is called once, when the response is closed."""
        assert isinstance(response.stream, httpx.AsyncByteStream)
        self._on_closed = on_closed
        self._response = response
        self._chunks = aiter(response.stream)  # `aiter_raw` would close the response within the caller's task
        self._unread = b""
        self._turn_until = 0.0
        self._closing = closing
        self._close_task: asyncio.Task[None] | None = None

    @property
    def status(self) -> int:
        return self._response.status_code

    def header(self, name: str) -> str | None:
        value: str | None = self._response.headers.get(name)
        return value

    async def read(self, check: CheckSize = REPLY) -> bytes:
        return await read_whole(self.read_chunk, check)

    def read_now(self, check: CheckSize = REPLY) -> bytes | None:
        """Returns None: httpx says nothing without being awaited."""
        return None

    async def read_chunk(self) -> bytes:
        """Returns the next piece, ``b""`` at the end. At the body's end the connection is free for others before the
        caller is told.
        """
        await self._go_round()
        unread = self._unread or await self._next()
        self._unread = unread[SLICE_BYTES:]
        return unread[:SLICE_BYTES]

    async def _next(self) -> bytes:
        """Returns what httpx has next, ``b""`` at the end. Raises `EngineBroken`."""
        await self._go_round()
        try:
            async for chunk in self._chunks:
                if chunk:
                    return chunk
        except httpx.HTTPError as error:
            raise EngineBroken(_describe(error)) from error
        await asyncio.shield(self._closed())
        return b""

    async def _go_round(self) -> None:
        """Lets the event loop go round from time to time: httpx does not wait while something is there."""
        if monotonic() >= self._turn_until:
            await asyncio.sleep(0)
            self._turn_until = monotonic() + TURN_S

    @property
    def source(self) -> None:
        """Returns None, because httpx has to be awaited."""

    def close(self) -> None:
        self._closed()

    def _closed(self) -> asyncio.Task[None]:
        """Returns the task that closes the response. It ends when the response is closed."""
        if self._close_task is None:
            self._close_task = asyncio.create_task(_close(self._response))
            self._closing.add(self._close_task)
            self._close_task.add_done_callback(self._has_closed)
        return self._close_task

    def _has_closed(self, task: asyncio.Task[None]) -> None:
        self._closing.discard(task)
        self._on_closed()


class HttpxClient:
    """Implements `base.EngineClient` for the instance at `url`, which gets `api_key` with every call. Other places,
    which `get` may be given, never get it: they have not asked for it. `tls` says whose certificates are trusted;
    default: those of certifi.

    Mutable state: httpx's; the tasks that close legs, and connections that are given up; those that this closed and
    httpx lists still; how many of its connections the `descriptors` count.
    """

    def __init__(
        self,
        url: str,
        *,
        connect_timeout_s: float,
        api_key: str | None = None,
        tls: ssl.SSLContext | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        descriptors: DescriptorBudget | None = None,
    ) -> None:
        self._descriptors = descriptors or DescriptorBudget()
        self._timeout = httpx.Timeout(None, connect=connect_timeout_s)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEPALIVE_S)
        transport = transport or httpx.AsyncHTTPTransport(verify=tls or True, limits=limits, trust_env=False)
        self._pool: httpcore.AsyncConnectionPool | None = getattr(transport, "_pool", None)
        self._http = httpx.AsyncClient(
            base_url=url,
            timeout=self._timeout,
            transport=transport,
            trust_env=False,
            headers={"accept-encoding": "identity"},
        )
        self._netloc = urlsplit(url).netloc
        self._key = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._closing: set[asyncio.Task[None]] = set()
        self._given_up: set[httpcore.AsyncConnectionInterface] = set()
        self._gone: set[httpcore.AsyncConnectionInterface] = set()
        self._num_counted = 0
        self._descriptors.spares[self] = None

    async def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> HttpxLeg:
        if self._http.is_closed:
            raise EngineUnreachable("it was taken out of the fleet")
        progress = _Progress()
        try:
            return await self._send(path, body, headers, progress)
        except _NOTHING_SENT as error:
            raise self._unreachable(error) from error
        except httpx.HTTPError as error:
            if not progress.was_stale:
                raise EngineBroken(_describe(error)) from error
        return await self._again(path, body, headers)

    async def _again(self, path: str, body: bytes, headers: Mapping[str, str]) -> HttpxLeg:
        try:
            return await self._send(path, body, headers, _Progress())
        except _NOTHING_SENT as error:
            raise self._unreachable(error) from error
        except httpx.HTTPError as error:
            raise EngineBroken(_describe(error)) from error

    async def _send(self, path: str, body: bytes, headers: Mapping[str, str], progress: _Progress) -> HttpxLeg:
        request = self._http.build_request(
            "POST",
            path,
            content=body,
            headers={"content-type": "application/json", **self._key, **headers},
            extensions={"timeout": self._timeout.as_dict(), "trace": progress.note},
        )
        await self._descriptors.room()
        self._check_open()  # it may have been closed while it waited
        self._begin()
        try:
            response = await self._http.send(request, stream=True)
        finally:
            self._end()
        return HttpxLeg(response, self._closing, self._leg_closed)

    def _check_open(self) -> None:
        if self._http.is_closed:
            raise EngineUnreachable("it was taken out of the fleet")

    def _leg_closed(self) -> None:
        self._count()
        if self._descriptors.is_tight:
            self.give_up_one()

    def _begin(self) -> None:
        """Counts a connection for a call, which may take one that is there."""
        self._descriptors.num_pending += 1
        self._count(1)

    def _end(self) -> None:
        self._descriptors.num_pending -= 1
        self._count()

    def _count(self, num_more: int = 0) -> None:
        """Counts the connections that there are, and `num_more`. httpx tells nobody when it opens or closes one, and
        finds out with the next call that some are closed."""
        listed = [] if self._pool is None else self._pool.connections
        if self._gone:
            self._gone.intersection_update(listed)
        num = num_more + len(listed) - len(self._gone)
        self._descriptors.num_opened += num - self._num_counted
        self._num_counted = num

    def give_up_one(self) -> bool:
        """Closes a connection that httpx keeps alive. Returns False where there is none."""
        kept = () if self._pool is None else self._pool.connections
        spare = next((one for one in kept if one.is_idle() and one not in self._given_up), None)
        if spare is None or self._http.is_closed:
            return False
        self._given_up.add(spare)
        task = asyncio.get_running_loop().create_task(self._give_up(spare))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        return True

    async def _give_up(self, spare: httpcore.AsyncConnectionInterface) -> None:
        try:
            if spare.is_idle():  # a call that httpx has given it meanwhile, and that has not begun, takes another one
                self._gone.add(spare)
                async with asyncio.timeout(CLOSE_S):
                    await spare.aclose()
        except (TimeoutError, OSError, httpcore.NetworkError):
            pass  # it has gone by itself
        finally:
            self._given_up.discard(spare)
            self._count()

    async def get(self, path: str, *, timeout_s: float, headers: Mapping[str, str] | None = None) -> tuple[int, bytes]:
        await self._descriptors.room()
        self._check_open()
        self._begin()
        key = self._key if path.startswith("/") or urlsplit(path).netloc == self._netloc else {}
        try:
            async with (  # httpx's limit is for connecting and for each read: whoever sends byte by byte keeps to it
                asyncio.timeout(2 * timeout_s),
                self._http.stream("GET", path, timeout=timeout_s, headers={**key, **(headers or {})}) as response,
            ):
                pieces = response.aiter_bytes()
                return response.status_code, await read_whole(lambda: anext(pieces, b""), REPLY)
        except TimeoutError:
            raise EngineBroken(f"no whole answer within {2 * timeout_s:g} s") from None
        except _NOTHING_SENT as error:
            raise self._unreachable(error) from error
        except httpx.HTTPError as error:
            raise EngineBroken(_describe(error)) from error
        finally:
            self._end()

    def _unreachable(self, error: httpx.HTTPError) -> EngineUnreachable:
        reasons = _reasons(error)
        if reasons and all(isinstance(reason, ConnectionRefusedError) for reason in reasons):
            return EngineRefused(_describe(error))
        fault = local_fault(reasons)
        if fault is None:
            return EngineUnreachable(_describe(error))
        self._descriptors.failed(fault)
        return LocalFault(str(fault))

    async def aclose(self) -> None:
        self._descriptors.spares.pop(self, None)
        try:
            if self._closing:
                await asyncio.wait(self._closing)
        finally:
            await self._http.aclose()
            self._descriptors.num_opened -= self._num_counted
            self._num_counted = 0


class _Progress:
    """A `_Progress` tells how far one request got: a write that failed on a connection used before has reached nobody.

    Mutable state: `_connected` (a fresh connection was made), `_write_failed`.
    """

    def __init__(self) -> None:
        self._connected = False
        self._write_failed = False

    async def note(self, step: str, info: dict[str, Any]) -> None:
        """Takes note of a step. It is httpcore's trace hook."""
        if step == "connection.connect_tcp.complete":
            self._connected = True
        elif step == "http11.send_request_headers.failed":
            self._write_failed = True

    @property
    def was_stale(self) -> bool:
        return self._write_failed and not self._connected


async def _close(response: httpx.Response) -> None:
    with suppress(TimeoutError, httpx.HTTPError):
        async with asyncio.timeout(CLOSE_S):
            await response.aclose()


def _reasons(error: BaseException | None) -> list[OSError]:
    """Returns what the system said of each address of the host. It lies below what httpx, httpcore and anyio say."""
    if isinstance(error, BaseExceptionGroup):
        return [reason for one in error.exceptions for reason in _reasons(one)]
    if isinstance(error, OSError) and error.errno is not None:
        return [error]
    return [] if error is None else _reasons(error.__cause__ or error.__context__)


def _describe(error: httpx.HTTPError) -> str:
    """Returns the error's message, or its type: httpx leaves the message empty for some timeouts and resets."""
    return str(error) or type(error).__name__
