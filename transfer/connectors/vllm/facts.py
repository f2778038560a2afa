"""The routes at which a proxy asks an engine for its part of the transfer, as the built-in engine has them.

They are served within vLLM's worker. So whatever comes to them takes a bounded amount of memory and of descriptors, and
a request that is not whole after a while is cut.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import msgspec
import uvicorn
from fastapi import FastAPI, Request, Response

from transfer.bounded_connection import BoundedConnection
from transfer.descriptors import Descriptors
from transfer.engine.api_error import ApiError
from transfer.engine.asgi import ClientGoneError, decode, read_body
from transfer.engine.server import EngineServer
from transfer.memory_budget import MemoryBudget
from transfer.wire import BufferFacts, CancelBody, SenderEndedBody

MAX_BODY_BYTES = 1 << 16
"""The most bytes of a body. Each names one attempt or one process."""
MAX_CONNECTIONS = 64
"""The most connections at once. A proxy needs a few; those beyond are answered 503."""
REQUEST_LIMIT_S = 10.0
"""The seconds within which a request must be whole, counted from its first byte, or the connection's beginning."""
T = TypeVar("T")


class Informant(Protocol):
    """An `Informant` knows an engine's part of the transfer. It is called on the event loop."""

    def is_healthy(self) -> bool: ...

    def buffer_facts(self) -> BufferFacts: ...

    def cancel(self, attempt: str) -> bool: ...

    def sender_ended(self, epoch: str) -> bool: ...


def facts_app(informant: Informant) -> FastAPI:
    """Returns the ASGI application."""
    app = FastAPI(title="pdproxy's connector", openapi_url=None)
    memory = MemoryBudget(MAX_CONNECTIONS * MAX_BODY_BYTES)

    async def read(request: Request, type_: type[T]) -> T:
        with memory.share() as share:
            return decode(await read_body(request.scope, request.receive, MAX_BODY_BYTES, share), type_)

    @app.get("/kv_buffer")
    async def kv_buffer() -> Response:
        return _json(informant.buffer_facts(), 200 if informant.is_healthy() else 503)

    @app.post("/kv_transfer/cancel")
    async def cancel(request: Request) -> Response:
        body = await read(request, CancelBody)
        return _json({"released": informant.cancel(body.attempt)})

    @app.post("/kv_transfer/sender_ended")
    async def sender_ended(request: Request) -> Response:
        body = await read(request, SenderEndedBody)
        return _json({"released": informant.sender_ended(body.epoch)})

    app.add_exception_handler(ApiError, _on_error)
    app.add_exception_handler(ClientGoneError, _on_client_gone)
    return app


class FactsServer(EngineServer):
    """A `FactsServer` serves `facts_app`, and leaves the process's signals alone: they are vLLM's."""

    def __init__(self, app: FastAPI, host: str, port: int) -> None:
        config = uvicorn.Config(
            app,
            http=_PromptConnection,
            host=host,
            port=port,
            log_config=None,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=1,
            lifespan="off",
        )
        super().__init__(config, _FewClients())

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """Captures none."""
        return nullcontext()


class _FewClients(Descriptors):
    """`_FewClients` takes `MAX_CONNECTIONS`, and fewer where the process has no descriptors for them."""

    def has_room_for_client(self) -> bool:
        return self.num_clients < MAX_CONNECTIONS and super().has_room_for_client()


class _PromptConnection(BoundedConnection):
    """A `_PromptConnection` is cut where a request takes too long to come. uvicorn would wait for ever.

    Mutable state, besides its base's: `_limit`, the timer of the request that is awaited.
    """

    _limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._begin()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._end()
        self._begin()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._end()

    def _begin(self) -> None:
        self._limit = self.loop.call_later(REQUEST_LIMIT_S, self.transport.abort)

    def _end(self) -> None:
        if self._limit is not None:
            self._limit.cancel()


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _json(error.body(), error.status)


async def _on_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=400)  # nobody reads this
