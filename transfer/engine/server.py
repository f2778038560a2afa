"""The engine's HTTP address. It serves OpenAI's routes, and those the proxy needs to hand KV over.

FastAPI serves the small routes; the two that generate are plain ASGI endpoints on the same app (see `asgi`).
"""

from __future__ import annotations

import signal
import socket
import time
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeVar

import msgspec
import uvicorn
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import Route

from transfer.descriptors import Acceptor, Descriptors, uvicorn_connections
from transfer.engine.api import EngineCore
from transfer.engine.api_error import ApiError, from_core, out_of_descriptors, refuse_if
from transfer.engine.asgi import ClientGoneError, decode, parse_term, read_body
from transfer.engine.generation import GenerationEndpoint
from transfer.engine.prompts import ConversationBody, Prompt, PromptEncoder, conversation_of
from transfer.errors import TransferError
from transfer.memory_budget import MemoryBudget
from transfer.wire import CancelBody, SenderEndedBody

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    max_body_bytes: int = 64 * 2**20
    memory_budget: int = 256 * 2**20
    """The most bytes of request bodies that are held at once."""


class TokenizeBody(ConversationBody, kw_only=True):
    """`TokenizeBody` is the body of ``POST /tokenize``: a prompt or a chat, never both. Either is read as its own
    endpoint reads it."""

    prompt: str | None = None


class EngineServer(uvicorn.Server):
    """EngineServer serves an app of `build_app`. It takes connections only while `descriptors` has room for them."""

    def __init__(self, config: uvicorn.Config, descriptors: Descriptors) -> None:
        super().__init__(config)
        self._descriptors = descriptors

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        error = out_of_descriptors()
        body = msgspec.json.encode(error.body())
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *error.headers()]
        lines = b"".join(b"%b: %b\r\n" % header for header in headers)
        refusal = b"HTTP/1.1 503 Service Unavailable\r\n%b\r\n%b" % (lines, body)
        listeners = [one.dup() for server in self.servers for one in server.sockets]
        for server in self.servers:  # what they accept, they accept whatever it takes
            server.close()
        self._descriptors.measure()
        connect = uvicorn_connections(self)
        self.servers = [
            Acceptor(one, connect, self._descriptors, refusal=refusal, backlog=self.config.backlog)  # type: ignore[misc]
            for one in listeners
        ]

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Takes a signal. The first one ends the server, and is not raised again as by uvicorn: that would end the
        process before its engine is closed. A second Ctrl-C ends the process where it is."""
        if self.should_exit and sig == signal.SIGINT:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
        self.should_exit = True


class Bodies:
    """`Bodies` reads the bodies of small routes, of at most `limit_bytes` each, out of the budget of all bodies."""

    def __init__(self, limit_bytes: int, memory: MemoryBudget) -> None:
        self._limit_bytes = limit_bytes
        self._memory = memory

    async def read(self, request: Request, type_: type[T]) -> T:
        """Returns the body as the given struct. Raises `ApiError`, `ClientGoneError`."""
        with self._memory.share() as memory:
            return decode(await read_body(request.scope, request.receive, self._limit_bytes, memory), type_)


def build_app(
    core: EngineCore, tokenizer: Any, settings: ServerSettings | None = None, descriptors: Descriptors | None = None
) -> FastAPI:
    """Returns the ASGI application. `tokenizer` is a ``PreTrainedTokenizerFast``; the caller starts and stops
    `core`. With `descriptors`, nothing is generated while the process has only its reserve of them left."""
    settings = settings or ServerSettings()
    limit, memory = settings.max_body_bytes, MemoryBudget(settings.memory_budget)
    prompts = PromptEncoder(tokenizer)
    app = FastAPI(title="built-in engine", openapi_url=None)
    for path, is_chat in (("/v1/completions", False), ("/v1/chat/completions", True)):
        endpoint = GenerationEndpoint(
            core, tokenizer, prompts, is_chat=is_chat, max_body_bytes=limit, memory=memory, descriptors=descriptors
        )
        app.router.routes.append(Route(path, endpoint, methods=["POST"]))
    bodies = Bodies(limit, memory)
    _add_model_routes(app, core, prompts, bodies)
    _add_transfer_routes(app, core, bodies)
    for kind in (ApiError, TransferError, Exception):
        app.add_exception_handler(kind, _on_error)
    app.add_exception_handler(ClientGoneError, _on_client_gone)
    app.add_exception_handler(HTTPException, _on_http_exception)
    return app


def _add_model_routes(app: FastAPI, core: EngineCore, prompts: PromptEncoder, bodies: Bodies) -> None:
    started = int(time.time())

    @app.get("/v1/models")
    async def models() -> Response:
        card = {"id": core.model.name, "object": "model", "created": started, "owned_by": "transfer"}
        card["max_model_len"] = core.model.max_model_len
        return _json({"object": "list", "data": [card]})

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = await bodies.read(request, TokenizeBody)
        ids = await prompts.encode(_prompt_of(body), add_special_tokens=body.add_special_tokens is not False)
        return _json({"tokens": ids, "count": len(ids), "max_model_len": core.model.max_model_len})

    @app.get("/health")
    async def health() -> Response:
        fault = core.fault()
        return _json({"status": "ok"}) if fault is None else _json({"status": "failed", "reason": fault}, 503)


def _add_transfer_routes(app: FastAPI, core: EngineCore, bodies: Bodies) -> None:
    @app.get("/kv_buffer")
    async def kv_buffer(request: Request) -> Response:
        term = parse_term(request.query_params.getlist("term"), "term")
        if term is not None:
            core.hear_term(term)  # first: what is in use is told without anything older that might still begin
        await core.refresh()
        return _json(core.buffer_facts())

    @app.post("/kv_transfer/cancel")
    async def cancel(request: Request) -> Response:
        body = await bodies.read(request, CancelBody)
        return _json({"released": await core.cancel(body.attempt)})

    @app.post("/kv_transfer/sender_ended")
    async def sender_ended(request: Request) -> Response:
        body = await bodies.read(request, SenderEndedBody)
        return _json({"released": await core.sender_ended(body.epoch)})

    @app.get("/statistics")
    async def statistics() -> Response:
        return _json(core.statistics())


def _prompt_of(body: TokenizeBody) -> Prompt:
    refuse_if((body.prompt is None) == (body.messages is None), "prompt", "Give either prompt or messages")
    if body.messages is None:
        assert body.prompt is not None
        return body.prompt
    return conversation_of(body)


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


async def _on_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=400)  # nobody reads this


async def _on_error(request: Request, error: Exception) -> Response:
    answer = from_core(error)
    response = _json(answer.body(), answer.status)
    response.raw_headers.extend(answer.headers())
    return response


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Answers requests for a route or a method that does not exist, with the same error object as everywhere."""
    assert isinstance(error, HTTPException)
    answer = ApiError(f"{request.method} {request.url.path}: {error.detail}", status=error.status_code)
    return _json(answer.body(), answer.status)
