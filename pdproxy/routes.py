"""The two generation routes, as plain ASGI endpoints: no request model, no response object, no generator to hand on to.

The endpoint's own coroutine serves the request, inside a scope that ends when the client goes away.
"""

from __future__ import annotations

import hmac
import uuid
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import anyio
import msgspec

from pdproxy.errors import BodyTooLarge, BodyTooSlow, ProxyError, Unauthorized
from pdproxy.legs import time_limit
from pdproxy.openai import parse
from pdproxy.orchestrator import Orchestrator
from pdproxy.refusal import error_headers
from pdproxy.telemetry.record import Observer, Outcome, RequestRecord
from pdproxy.trip import Headers

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]

MAX_REQUEST_ID = 128
_FORWARDED = ("traceparent", "tracestate", "x-data-parallel-rank")


class ClientGoneError(Exception):
    """The client went away before its body was complete."""


class AsgiClient:
    """Implements `trip.Client` on an ASGI `send`. Mutable state: whether the head was sent, and the end."""

    def __init__(self, send: Any, forwarded: Mapping[str, str]) -> None:
        self._send = send
        self.forwarded = forwarded
        self.is_started = False

    async def start(self, status: int, headers: Headers) -> None:
        self.is_started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def send(self, chunk: bytes) -> None:
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


class GenerationRoute:
    """``POST`` on one of OpenAI's generation routes. An ASGI application for that path."""

    def __init__(
        self,
        endpoint: str,
        orchestrator: Orchestrator,
        observer: Observer,
        *,
        max_body_bytes: int,
        body_timeout_s: float,
        api_keys: Sequence[str],
    ) -> None:
        self._endpoint = endpoint
        self._orchestrator = orchestrator
        self._observer = observer
        self._max_body_bytes = max_body_bytes
        self._body_timeout_s = body_timeout_s
        self._api_keys = [key.encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        record = RequestRecord(_request_id(headers), self._endpoint)
        client = AsgiClient(send, self._forwarded(headers, record.request_id))
        try:
            self._check_key(headers)
            body = await self._read_body(receive, headers)
            request = parse(self._endpoint, body)
        except ProxyError as error:
            await self._refuse(client, record, error)
        except ClientGoneError:
            record.end(Outcome.CLIENT_GONE)
            self._observer.request_finished(record)
        else:
            async with anyio.create_task_group() as watchers:
                watchers.start_soon(_cancel_when_gone, receive, watchers.cancel_scope)
                await self._orchestrator.serve(request, client, record)
                watchers.cancel_scope.cancel()

    async def _read_body(self, receive: Any, headers: Mapping[str, str]) -> bytes:
        """Raises `BodyTooLarge` as soon as that is clear, `BodyTooSlow`, `ClientGoneError`."""
        too_large = BodyTooLarge(f"the request body is larger than {self._max_body_bytes} bytes")
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._max_body_bytes:
            raise too_large
        chunks: list[bytes] = []
        num_bytes = 0
        try:
            with time_limit(self._body_timeout_s, ""):
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
        except ProxyError as error:
            if isinstance(error, BodyTooLarge):
                raise
            raise BodyTooSlow(f"the request body took longer than {self._body_timeout_s:g} s") from None

    def _check_key(self, headers: Mapping[str, str]) -> None:
        if not self._api_keys:
            return
        scheme, _, shown = headers.get("authorization", "").partition(" ")
        is_known = [hmac.compare_digest(shown.strip().encode(), key) for key in self._api_keys]
        if scheme.lower() != "bearer" or not any(is_known):
            raise Unauthorized("this proxy asks for an API key: Authorization: Bearer …")

    def _forwarded(self, headers: Mapping[str, str], request_id: str) -> dict[str, str]:
        """The client's own key goes to the engines, unless it was for this proxy."""
        names = _FORWARDED if self._api_keys else (*_FORWARDED, "authorization")
        passed = {name: headers[name] for name in names if name in headers}
        return passed | {"x-request-id": request_id}

    async def _refuse(self, client: AsgiClient, record: RequestRecord, error: ProxyError) -> None:
        record.status, record.error = error.status, error.code or error.type
        record.end(Outcome.REFUSED)
        self._observer.request_finished(record)
        body = msgspec.json.encode(error.body())
        headers = [(b"content-type", b"application/json"), (b"x-request-id", record.request_id.encode("latin-1"))]
        await client.start(error.status, headers + error_headers(error, body))
        await client.send(body)
        await client.end()


async def _cancel_when_gone(receive: Any, scope: anyio.CancelScope) -> None:
    """After the body, the next message of a client is that it has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


def _request_id(headers: Mapping[str, str]) -> str:
    """The client's, where it is harmless in headers and log lines; else a fresh one."""
    given = headers.get("x-request-id", "")
    is_fit = 0 < len(given) <= MAX_REQUEST_ID and given.isascii() and given.isprintable()
    return given if is_fit else f"req-{uuid.uuid4().hex}"
