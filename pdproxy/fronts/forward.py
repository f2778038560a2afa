"""The module passes on to the leader what a front does not answer: the pages for operators, and the admin API."""

from __future__ import annotations

import logging
from contextlib import aclosing

import anyio
import httpx
import msgspec
from starlette.types import Receive, Scope, Send

from pdproxy.errors import BodyTooLarge, NotReady, ProxyError
from pdproxy.orchestrator.error_reply import JSON, error_headers

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 1 << 20
"""The most bytes of a body that goes to the leader."""
FIRST_BYTE_S = 10.0
"""The longest time in seconds that the leader may take until its answer begins."""
_KEPT_BACK = {b"connection", b"keep-alive", b"transfer-encoding", b"te", b"upgrade", b"x-request-id", b"date"}
"""The headers that belong to one connection, or that a front writes itself."""


class Forward:
    """Forward is an ASGI application. It passes every request on to the leader, at the Unix socket `path`.

    Mutable state: the client, once there is one.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._client: httpx.AsyncClient | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            if len(body) > MAX_BODY_BYTES:
                await _refuse(send, BodyTooLarge(f"the body is larger than {MAX_BODY_BYTES} bytes"))
                return
            if not message.get("more_body"):
                break
        async with anyio.create_task_group() as tasks:

            async def pass_on() -> None:
                await self._pass_on(scope, bytes(body), send)
                tasks.cancel_scope.cancel()

            tasks.start_soon(pass_on)
            while (await receive())["type"] != "http.disconnect":
                pass
            tasks.cancel_scope.cancel()

    async def _pass_on(self, scope: Scope, body: bytes, send: Send) -> None:
        if self._client is None:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=8)
            transport = httpx.AsyncHTTPTransport(uds=self._path, limits=limits)
            self._client = httpx.AsyncClient(transport=transport, timeout=httpx.Timeout(10.0, read=None))
        query = scope["query_string"].decode("latin-1")
        url = f"http://leader{scope['raw_path'].decode('latin-1').partition('?')[0]}{query and '?' + query}"
        headers = [(name, value) for name, value in scope["headers"] if name not in _KEPT_BACK - {b"x-request-id"}]
        has_begun = False
        try:
            request = self._client.build_request(scope["method"], url, headers=headers, content=body)
            with anyio.fail_after(FIRST_BYTE_S):
                answer = await self._client.send(request, stream=True)
            async with aclosing(answer):
                told = [(name.lower(), value) for name, value in answer.headers.raw]
                kept = [(name, value) for name, value in told if name not in _KEPT_BACK]
                has_begun = True
                await send({"type": "http.response.start", "status": answer.status_code, "headers": kept})
                async for piece in answer.aiter_raw():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
        except (httpx.HTTPError, TimeoutError) as error:
            if has_begun:
                log.warning("the leader's answer to %s broke off: %r", scope["path"], error)
        if not has_begun:
            await _refuse(send, NotReady("the process that knows this does not answer; try again", retry_after_s=1.0))


async def _refuse(send: Send, error: ProxyError) -> None:
    body = msgspec.json.encode(error.body())
    headers = [(b"content-type", JSON), *error_headers(error, body)]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
