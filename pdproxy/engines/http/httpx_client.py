"""EngineClient over httpx: one per instance, its connections kept alive, nothing limited and nothing repeated.

Concurrency is admission's business, so the pool has no limits; repeating is the orchestrator's, since a repeated
prefill needs a fresh attempt id. The one exception: a kept-alive connection that the engine had closed, found out
before the request was on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import httpx

from pdproxy.engines.base import EngineBroken, EngineRefused, EngineUnreachable

KEEPALIVE_S = 4.0
"""Below the five seconds after which uvicorn, and so most engines, close an idle connection."""

CLOSE_S = 2.0
"""For closing one connection; after that the socket is left to the operating system."""

_NOTHING_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol)


class HttpxLeg:
    """Implements `base.Leg`. Mutable state: the response's, and the task that closes it, once there is one.

    httpx awaits while it closes, and what is cancelled there has lost the connection to nobody. So that is done by a
    task of its own, which is in `closing` until it has ended.
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

    async def read(self) -> bytes:
        chunks = []
        while chunk := await self.read_chunk():
            chunks.append(chunk)
        return b"".join(chunks)

    async def read_chunk(self) -> bytes:
        """At the body's end the connection is free for others before anybody is told."""
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
        """httpx has to be awaited."""

    def close(self) -> None:
        self._closed()

    def _closed(self) -> asyncio.Task[None]:
        """Ends when it is."""
        if self._close_task is None:
            self._close_task = asyncio.create_task(_close(self._response))
            self._closing.add(self._close_task)
            self._close_task.add_done_callback(self._closing.discard)
        return self._close_task


class HttpxClient:
    """Implements `base.EngineClient` for the instance at `url`, which is shown `api_key` with every call.

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
            response = await self._http.get(path, timeout=timeout_s)
        except _NOTHING_SENT as error:
            raise _unreachable(error) from error
        except httpx.HTTPError as error:
            raise EngineBroken(_describe(error)) from error
        return response.status_code, response.content

    async def aclose(self) -> None:
        try:
            if self._closing:
                await asyncio.wait(self._closing)
        finally:
            await self._http.aclose()


class _Progress:
    """How far one request got: a write that failed on a connection used before has reached nobody.

    Mutable state: `_connected` (a fresh connection was made), `_write_failed`.
    """

    def __init__(self) -> None:
        self._connected = False
        self._write_failed = False

    async def note(self, step: str, info: dict[str, Any]) -> None:
        """httpcore's trace hook."""
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
    """Every address of the host said that nobody listens; the reason lies below what httpx, httpcore and anyio say."""
    if isinstance(error, BaseExceptionGroup):
        return all(_is_refused(one) for one in error.exceptions)
    if error is None or isinstance(error, ConnectionRefusedError):
        return error is not None
    return _is_refused(error.__cause__ or error.__context__)


def _describe(error: httpx.HTTPError) -> str:
    """httpx leaves the message empty for some timeouts and resets."""
    return str(error) or type(error).__name__
