"""The routes at which a proxy asks an engine for its part of the transfer, as the built-in engine has them."""

from __future__ import annotations

from typing import Protocol, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response

from transfer.wire import BufferFacts, CancelBody, SenderEndedBody

MAX_BODY_BYTES = 1 << 16
"""The most bytes of a body. Each names one attempt or one process."""
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

    @app.get("/kv_buffer")
    async def kv_buffer() -> Response:
        return _json(informant.buffer_facts(), 200 if informant.is_healthy() else 503)

    @app.post("/kv_transfer/cancel")
    async def cancel(request: Request) -> Response:
        body = await _read(request, CancelBody)
        return body if isinstance(body, Response) else _json({"released": informant.cancel(body.attempt)})

    @app.post("/kv_transfer/sender_ended")
    async def sender_ended(request: Request) -> Response:
        body = await _read(request, SenderEndedBody)
        return body if isinstance(body, Response) else _json({"released": informant.sender_ended(body.epoch)})

    return app


async def _read(request: Request, type_: type[T]) -> T | Response:
    """Returns the body, or the answer that says what is wrong with it."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            return _json({"error": {"message": f"The body is larger than {MAX_BODY_BYTES} bytes"}}, 413)
    try:
        return msgspec.json.decode(bytes(body), type=type_)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return _json({"error": {"message": str(error)}}, 400)


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")
