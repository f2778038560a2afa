"""The routes that take a body decide what becomes of a request, whichever way it reaches them.

On a connection of the proxy's own an `Exchange` takes these steps one by one. Elsewhere a route is a plain ASGI
endpoint: no request model, no response object, no generator to hand on to. Either way the coroutine that serves a
request is cancelled when its client goes away.
"""

from __future__ import annotations

import logging
from collections.abc import Coroutine, Mapping, MutableMapping
from typing import Any, Final, Protocol

import msgspec

from pdproxy.aio.deadline import Deadline
from pdproxy.errors import BodyTooLarge, BodyTooSlow, MemoryBudgetSpent, ProxyError, RateLimited, Unauthorized
from pdproxy.openai.apis import parser_of
from pdproxy.openai.dialect import dialect_of
from pdproxy.openai.priority import PriorityLimits
from pdproxy.openai.request import MESSAGES, GenerationRequest
from pdproxy.orchestrator.context import Client
from pdproxy.orchestrator.error_reply import JSON, outcome_of, retry_header
from pdproxy.server.api_keys import ApiKeys
from pdproxy.server.asgi import AsgiClient, ClientGoneError, read_body
from pdproxy.server.headers import ClientHeaders
from pdproxy.telemetry import request_id
from pdproxy.telemetry.observer import RequestObserver
from pdproxy.telemetry.record import Outcome, RequestRecord
from pdproxy.telemetry.trace import Tracing
from transfer.memory_budget import MemoryBudget, MemoryShare

log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]

CHALLENGE: Final = (b"www-authenticate", b"Bearer")
"""The header that goes with every 401."""
BODY_COPIES: Final = 2
"""The number of times that a body counts: as it came, which every attempt is made of, and as it goes to an engine."""


class Service(Protocol):
    """Service is what a route needs of the `Orchestrator`."""

    def serve(self, request: GenerationRequest, client: Client, record: RequestRecord) -> Coroutine[Any, Any, None]: ...


class GenerationRoute:
    """GenerationRoute takes ``POST`` on one of OpenAI's generation routes. It is an ASGI application for that path.

    `passes_authorization`: the client's ``Authorization`` header is meant for the engines, and goes to them as it is.
    """

    def __init__(
        self,
        endpoint: str,
        orchestrator: Service,
        observer: RequestObserver,
        *,
        max_body_bytes: int,
        body_timeout_s: float,
        memory: MemoryBudget,
        priorities: PriorityLimits,
        keys: ApiKeys,
        passes_authorization: bool,
        tracing: Tracing,
    ) -> None:
        self._endpoint = endpoint
        self._parse = parser_of(endpoint)
        self._dialect = dialect_of(endpoint)
        self._orchestrator = orchestrator
        self._observer = observer
        self.max_body_bytes = max_body_bytes
        self.body_timeout_s = body_timeout_s
        self.memory = memory
        self._priorities = priorities
        self._keys = keys
        self._passes_authorization = passes_authorization
        self._passes_key = passes_authorization and endpoint.startswith(MESSAGES)  # as Anthropic's clients show it
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        headers = ClientHeaders(scope["headers"])
        record, forwarded = self.begin(headers)
        with self.memory.share() as memory:
            client = AsgiClient(send, headers, forwarded, memory)
            try:
                self.check(record, headers, memory)
                with Deadline(self.body_timeout_s, self.too_slow):
                    body = await read_body(receive, lambda num_bytes: self.objection(num_bytes, memory))
            except ProxyError as error:
                answer = self.refuse(client, record, error)
            except ClientGoneError:
                self.gone(record)
                return
            else:
                answer = client.watch(receive, self.serve(client, record, body))
            await answer  # out here: compiled code must not wait where it handles an exception

    # ── step by step ────────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, headers: Mapping[str, str]) -> tuple[RequestRecord, dict[str, str]]:
        """Begins a request whose head is there (names in lower case). Returns its record, and the headers that go with
        every leg. The caller ends it by `serve`, `refuse` or `gone`."""
        record = RequestRecord(request_id.accept(headers.get(request_id.HEADER)), self._endpoint)
        forwarded = {**self._tracing.begin(record, headers), request_id.HEADER: record.request_id}
        if self._passes_authorization:
            forwarded |= self.shown(headers)
        return record, forwarded

    def shown(self, headers: Mapping[str, str]) -> dict[str, str]:
        """Returns those of the client's headers that show the engines its key, where that is meant for them."""
        shown: dict[str, str] = {}
        if self._passes_authorization and (key := headers.get("authorization")) is not None:
            shown["authorization"] = key
        if self._passes_key and (key := headers.get("x-api-key")) is not None:
            shown["x-api-key"] = key
        return shown

    def check(self, record: RequestRecord, headers: Mapping[str, str], memory: MemoryShare) -> None:
        """Takes the memory for a body whose length is known, and charges a request to whoever has the key that was
        shown. Raises the `ProxyError` that makes it needless to read the body."""
        owner = self._keys.owner(headers)
        if owner is not None:
            record.key_name = owner.name
            record.charge = owner.begin()
        length = headers.get("content-length")
        if length is not None and length.isdecimal():
            error = self.objection(int(length), memory)
            if error is not None:
                raise error

    def objection(self, num_bytes: int, memory: MemoryShare) -> ProxyError | None:
        """Takes as much more memory as it needs for a body of which `num_bytes` are there. Returns the reason for which
        it cannot be taken; else None."""
        if num_bytes > self.max_body_bytes:
            return BodyTooLarge(f"the request body is larger than {self.max_body_bytes} bytes")
        missing_bytes = BODY_COPIES * num_bytes - memory.num_bytes
        if missing_bytes > 0 and not memory.take(missing_bytes):
            return MemoryBudgetSpent(self.memory.limit_bytes)
        return None

    def serve(self, client: Client, record: RequestRecord, body: bytes) -> Coroutine[Any, Any, None]:
        """Returns a coroutine that answers the client, whatever happens. Only a cancellation passes through it."""
        request_id.current.set(record.request_id)
        try:
            request = self._parse(self._endpoint, body, client.headers, self._priorities)
        except ProxyError as error:
            return self.refuse(client, record, error)
        except Exception:
            log.exception("the body of request %s met a bug", record.request_id)
            return self.refuse(client, record, ProxyError("the proxy met an unexpected error"))
        record.received()
        return self._orchestrator.serve(request, client, record)

    async def refuse(self, client: Client, record: RequestRecord, error: ProxyError) -> None:
        """Answers the client that it will not be served."""
        request_id.current.set(record.request_id)
        record.status, record.error = error.status, error.code or error.type
        record.end(outcome_of(error))
        self._observer.request_finished(record)
        headers = [(b"content-type", JSON), (b"x-request-id", record.request_id.encode("latin-1"))]
        if isinstance(error, RateLimited):
            headers += self._keys.limit_headers(record.key_name)
        elif record.charge is not None:
            headers += record.charge.headers()
        if isinstance(error, Unauthorized):
            headers.append(CHALLENGE)
        await client.answer(
            error.status, headers + retry_header(error), msgspec.json.encode(self._dialect.error_body(error))
        )

    def gone(self, record: RequestRecord) -> None:
        """Ends the record of a client that went away before anything could be done for it."""
        record.end(Outcome.CLIENT_GONE)
        self._observer.request_finished(record)

    def too_slow(self) -> BodyTooSlow:
        return BodyTooSlow(f"the request body took longer than {self.body_timeout_s:g} s")
