"""The two generation routes, as plain ASGI endpoints: no request model, no response object, no generator to hand on to.

The endpoint's own coroutine serves the request, inside a scope that ends when the client goes away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, MutableMapping
from typing import Any

import msgspec

from pdproxy.auth import KeyRing
from pdproxy.errors import BodyTooLarge, BodyTooSlow, ProxyError, Unauthorized
from pdproxy.limits import Limit
from pdproxy.orchestrator import Orchestrator
from pdproxy.reply.refusal import error_headers
from pdproxy.request.openai import parse
from pdproxy.request.priority import PriorityLimits
from pdproxy.telemetry import request_id
from pdproxy.telemetry.record import Observer, Outcome, RequestRecord
from pdproxy.telemetry.trace import Tracing
from pdproxy.trip import Headers

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]

CHALLENGE = (b"www-authenticate", b"Bearer")
"""Goes with every 401."""


class ClientGoneError(Exception):
    """The client went away before its body was complete."""


class AsgiClient:
    """Implements `trip.Client` on an ASGI `send`. Mutable state: whether the head was sent, and whether everything was.

    `headers` are the client's own, names in lower case; `forwarded` go with every leg.
    """

    def __init__(self, send: Any, headers: Mapping[str, str], forwarded: Mapping[str, str]) -> None:
        self._send = send
        self.headers = headers
        self.forwarded = forwarded
        self.is_started = False
        self.is_served = False

    async def start(self, status: int, headers: Headers) -> None:
        self.is_started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def send(self, chunk: bytes) -> None:
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        self.is_served = True

    async def answer(self, status: int, headers: Headers, body: bytes) -> None:
        await self.start(status, headers)
        await self.send(body)
        await self.end()

    @property
    def outlet(self) -> None:
        return None


class GenerationRoute:
    """``POST`` on one of OpenAI's generation routes. An ASGI application for that path.

    `passes_authorization`: the client's ``Authorization`` header is meant for the engines, and goes to them as it is.
    """

    def __init__(
        self,
        endpoint: str,
        orchestrator: Orchestrator,
        observer: Observer,
        *,
        max_body_bytes: int,
        body_timeout_s: float,
        priorities: PriorityLimits,
        keys: KeyRing,
        passes_authorization: bool,
        tracing: Tracing,
    ) -> None:
        self._endpoint = endpoint
        self._orchestrator = orchestrator
        self._observer = observer
        self._max_body_bytes = max_body_bytes
        self._body_timeout_s = body_timeout_s
        self._priorities = priorities
        self._keys = keys
        self._forwarded_names = ("authorization",) if passes_authorization else ()
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        record = RequestRecord(request_id.accept(headers.get(request_id.HEADER)), self._endpoint)
        request_id.current.set(record.request_id)
        client = AsgiClient(send, headers, self._forwarded(headers, record))
        try:
            self._keys.check(headers)
            body = await self._read_body(receive, headers)
            request = parse(self._endpoint, body, headers, self._priorities)
            record.received()
        except ProxyError as error:
            await self._refuse(client, record, error)
        except ClientGoneError:
            record.end(Outcome.CLIENT_GONE)
            self._observer.request_finished(record)
        else:
            task = asyncio.current_task()
            assert task is not None
            gone: list[bool] = []
            watcher = asyncio.create_task(_cancel_when_gone(receive, client, task, gone))
            try:
                await self._orchestrator.serve(request, client, record)
            except asyncio.CancelledError:
                if not gone or task.uncancel():
                    raise
            finally:
                watcher.cancel()

    async def _read_body(self, receive: Any, headers: Mapping[str, str]) -> bytes:
        """Raises `BodyTooLarge` as soon as that is clear, `BodyTooSlow`, `ClientGoneError`."""
        too_large = BodyTooLarge(f"the request body is larger than {self._max_body_bytes} bytes")
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._max_body_bytes:
            raise too_large
        chunks: list[bytes] = []
        num_bytes = 0
        try:
            with Limit(self._body_timeout_s, self._too_slow):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGoneError
                    chunks.append(message.get("body", b""))
                    num_bytes += len(chunks[-1])
                    if num_bytes > self._max_body_bytes:
                        raise too_large
                    if not message.get("more_body", False):
                        return b"".join(chunks)
        finally:
            pass

    def _too_slow(self) -> BodyTooSlow:
        return BodyTooSlow(f"the request body took longer than {self._body_timeout_s:g} s")

    def _forwarded(self, headers: Mapping[str, str], record: RequestRecord) -> dict[str, str]:
        passed = {name: headers[name] for name in self._forwarded_names if name in headers}
        return passed | self._tracing.begin(record, headers) | {request_id.HEADER: record.request_id}

    async def _refuse(self, client: AsgiClient, record: RequestRecord, error: ProxyError) -> None:
        record.status, record.error = error.status, error.code or error.type
        record.end(Outcome.REFUSED)
        self._observer.request_finished(record)
        body = msgspec.json.encode(error.body())
        headers = [(b"content-type", b"application/json"), (b"x-request-id", record.request_id.encode("latin-1"))]
        if isinstance(error, Unauthorized):
            headers.append(CHALLENGE)
        await client.start(error.status, headers + error_headers(error, body))
        await client.send(body)
        await client.end()


async def _cancel_when_gone(receive: Any, client: AsgiClient, task: asyncio.Task[Any], gone: list[bool]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    if not client.is_served:
        gone.append(True)
        task.cancel()
