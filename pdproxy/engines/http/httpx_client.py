"""The module implements `EngineClient` over httpx: one client per instance, its connections kept alive, nothing
limited and nothing repeated.

Admission limits concurrency, so the pool has no limits. The orchestrator repeats calls, since a repeated prefill needs
a fresh attempt id. There is one exception: the client repeats a call where the engine had closed a kept-alive
connection and that was found out before the request was on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import httpx

from pdproxy.engines.http.base import (
    REPLY,
    CheckSize,
    EngineBroken,
    EngineRefused,
    EngineUnreachable,
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
    """Implements `base.Leg`. Mutable state: the response's, and the task that closes it, once there is one.

    httpx awaits while it closes. A caller that is cancelled there would leave the connection in nobody's hands. So a
    task of its own closes it, and is in `closing` until it has ended.
    """

    def __init__(self, response: httpx.Response, closing: set[asyncio.Task[None]]) -> None:
        assert isinstance(response.stream, httpx.AsyncByteStream)
        self._response = response
        self._chunks = aiter(response.stream)  # `aiter_raw` would close the response within the caller's task
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

    async def read_chunk(self) -> bytes:
        """Returns the next piece, ``b""`` at the end. At the body's end the connection is free for others before the
        caller is told.
        """
        try:
            async for chunk in self._chunks:
                if chunk:
                    return chunk
        except httpx.HTTPError as error:
            raise EngineBroken(_describe(error)) from error
        await asyncio.shield(self._closed())
        return b""

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
            self._close_task.add_done_callback(self._closing.discard)
        return self._close_task


class HttpxClient:
    """Implements `base.EngineClient` for the instance at `url`, which gets `api_key` with every call.

    Mutable state: httpx's; the tasks that close legs.
    """

    def __init__(
        self,
        url: str,
        *,
        connect_timeout_s: float,
        api_key: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._timeout = httpx.Timeout(None, connect=connect_timeout_s)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEPALIVE_S)
        self._http = httpx.AsyncClient(
            base_url=url,
            timeout=self._timeout,
            limits=limits,
            transport=transport,
            trust_env=False,
            headers={"accept-encoding": "identity"} | ({"authorization": f"Bearer {api_key}"} if api_key else {}),
        )
        self._closing: set[asyncio.Task[None]] = set()

    async def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> HttpxLeg:
        if self._http.is_closed:
            raise EngineUnreachable("it was taken out of the fleet")
        progress = _Progress()
        try:
            return await self._send(path, body, headers, progress)
        except _NOTHING_SENT as error:
            raise _unreachable(error) from error
        except httpx.HTTPError as error:
            if not progress.was_stale:
                raise EngineBroken(_describe(error)) from error
        return await self._again(path, body, headers)

    async def _again(self, path: str, body: bytes, headers: Mapping[str, str]) -> HttpxLeg:
        try:
            return await self._send(path, body, headers, _Progress())
        except _NOTHING_SENT as error:
            raise _unreachable(error) from error
        except httpx.HTTPError as error:
            raise EngineBroken(_describe(error)) from error

    async def _send(self, path: str, body: bytes, headers: Mapping[str, str], progress: _Progress) -> HttpxLeg:
        request = self._http.build_request(
            "POST",
            path,
            content=body,
            headers={"content-type": "application/json", **headers},
            extensions={"timeout": self._timeout.as_dict(), "trace": progress.note},
        )
        return HttpxLeg(await self._http.send(request, stream=True), self._closing)

    async def get(self, path: str, *, timeout_s: float) -> tuple[int, bytes]:
        if self._http.is_closed:
            raise EngineUnreachable("it was taken out of the fleet")
        try:
            async with self._http.stream("GET", path, timeout=timeout_s) as response:
                pieces = response.aiter_bytes()
                return response.status_code, await read_whole(lambda: anext(pieces, b""), REPLY)
        except _NOTHING_SENT as error:
            raise _unreachable(error) from error
        except httpx.HTTPError as error:
            raise EngineBroken(_describe(error)) from error

    async def aclose(self) -> None:
        try:
            if self._closing:
                await asyncio.wait(self._closing)
        finally:
            await self._http.aclose()


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


def _unreachable(error: httpx.HTTPError) -> EngineUnreachable:
    return EngineRefused(_describe(error)) if _is_refused(error) else EngineUnreachable(_describe(error))


def _is_refused(error: BaseException | None) -> bool:
    """Tells whether every address of the host said that nobody listens. The reason lies below what httpx, httpcore and
    anyio say.
    """
    if isinstance(error, BaseExceptionGroup):
        return all(_is_refused(one) for one in error.exceptions)
    if error is None or isinstance(error, ConnectionRefusedError):
        return error is not None
    return _is_refused(error.__cause__ or error.__context__)


def _describe(error: httpx.HTTPError) -> str:
    """Returns the error's message, or its type: httpx leaves the message empty for some timeouts and resets."""
    return str(error) or type(error).__name__
