"""The app is the proxy's HTTP face: the generation routes, and what operators look at."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict
from typing import Any, get_args

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdproxy import __version__
from pdproxy.aio.descriptors import DescriptorBudget
from pdproxy.config.values import Role
from pdproxy.discovery.discovery import Discovery
from pdproxy.errors import (
    InvalidRequest,
    MethodNotAllowed,
    ModelNotFound,
    NoSuchRoute,
    NotReady,
    ProxyError,
    Unauthorized,
)
from pdproxy.fleet.pool import Pool
from pdproxy.kv_signals.board import KvBoard
from pdproxy.openai.apis import keeper_in
from pdproxy.openai.request import RESPONSES
from pdproxy.orchestrator.error_reply import error_headers
from pdproxy.orchestrator.orchestrator import Orchestrator
from pdproxy.orchestrator.reaper import Reaper
from pdproxy.server.api_keys import ApiKeys
from pdproxy.server.direct import DirectRoutes
from pdproxy.server.routes import CHALLENGE, GenerationRoute
from pdproxy.telemetry import request_id
from pdproxy.telemetry.figures import Elsewhere
from pdproxy.telemetry.metrics import Metrics
from pdproxy.telemetry.observer import MAX_RECENT, Recent
from transfer.memory_budget import MemoryBudget

Lifespan = Callable[["App"], AbstractAsyncContextManager[None]]

MAX_COMPLAINTS = 10
"""The most sentences of discovery that ``/ready`` tells; the status page has all."""

_READABLE = (
    "x-request-id",
    "x-pdproxy-path",
    "x-pdproxy-prefiller",
    "x-pdproxy-decoder",
    "x-pdproxy-attempt",
    "x-pdproxy-kv",
    "server-timing",
    "retry-after",
    *(f"x-ratelimit-{what}-{kind}" for kind in ("requests", "tokens") for what in ("limit", "remaining", "reset")),
)
"""Response headers that a page from elsewhere may read."""


class App(FastAPI):
    """App is a FastAPI app, past which generation requests go straight to their routes."""

    def __init__(self, direct: DirectRoutes, *, lifespan: Lifespan) -> None:
        super().__init__(title="pdproxy", openapi_url=None, lifespan=lifespan)
        self.direct = direct

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._direct_route(scope)
        await (super().__call__ if route is None else route)(scope, receive, send)

    def _direct_route(self, scope: Scope) -> GenerationRoute | None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return None
        return self.direct.find(scope["path"].encode(), scope["headers"])


def build_app(
    *,
    generation_routes: Mapping[str, GenerationRoute],
    pool: Pool,
    orchestrator: Orchestrator,
    keys: ApiKeys,
    cors_origins: Sequence[str],
    lifespan: Lifespan,
    discovery: Discovery | None = None,
    elsewhere: ASGIApp | None = None,
) -> App:
    """Returns the ASGI application; `lifespan` starts and stops what runs behind it. `discovery` is what finds
    instances, where this process knows it. Requests for which it has no route go `elsewhere`, where that is given."""
    app = App(DirectRoutes(generation_routes, may_be_asked_from_elsewhere=bool(cors_origins)), lifespan=lifespan)
    for path, endpoint in generation_routes.items():
        app.router.routes.append(Route(path, endpoint, methods=["POST"]))
    _add_model_routes(app, pool, keys)
    _add_passed_routes(app, orchestrator, keys, generation_routes[RESPONSES])
    _add_health_routes(app, pool, orchestrator, discovery)
    if elsewhere is not None:
        app.router.default = elsewhere
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ProxyError, _on_proxy_error)
    app.add_exception_handler(Exception, _on_bug)
    app.add_middleware(_WithRequestId, generation_paths=generation_routes.keys())
    if cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=_READABLE,
        )
    return app


PART = "status"
"""The name of the status page's part of the figures of other processes."""
_ON_BOARD = ("num_open", "num_waiting")
"""The numbers of the board that are no counters."""


class Status:
    """Status makes the status page. Its members are documented in ``docs/metrics.md``."""

    def __init__(
        self,
        pool: Pool,
        board: KvBoard,
        orchestrator: Orchestrator,
        reaper: Reaper,
        recent: Recent,
        descriptors: DescriptorBudget,
        memory: MemoryBudget,
        elsewhere: Elsewhere | None = None,
        discovery: Discovery | None = None,
    ) -> None:
        """Takes the figures of the proxy's other processes, where there are any, and what finds instances."""
        self._elsewhere = elsewhere or Elsewhere()
        self._discovery = discovery
        self._pool = pool
        self._board = board
        self._orchestrator = orchestrator
        self._reaper = reaper
        self._recent = recent
        self._descriptors = descriptors
        self._memory = memory
        self._started_at = time.time()
        # State: the most tokens that were told so far.
        self._most_output_tokens = 0

    async def look(self) -> dict[str, Any]:
        """Returns what the page shows, with figures of other processes that are up to date."""
        await self._elsewhere.look()
        return self.facts()

    def facts(self) -> dict[str, Any]:
        """Returns what the page shows."""
        books = [pages for instance in self._pool.instances if (pages := instance.pages) is not None]
        counted = self._elsewhere.counted(PART, self.counted())
        present = self._elsewhere.present(PART, self.present())
        return {
            "version": __version__,
            "started_at": round(self._started_at, 3),
            "ready": self._pool.is_ready,
            "leaving": self._orchestrator.is_leaving,
            "draining": self._orchestrator.is_draining,
            "fleet": self._pool.status(),
            "ledger": {
                book.name: {"granted": book.granted_total, "returned": book.returned_total, "held": book.held}
                for book in books
            },
            "admission": {book.name: asdict(book) for book in books},
            "reaper": self._reaper.statistics(),
            "totals": counted["totals"],
            "tokens": counted["tokens"],
            "board": counted["board"] | present["board"],
            "memory": present["memory"] | counted["memory"],
            "in_flight": present["in_flight"],
            "recent": sorted(present["recent"], key=lambda one: -float(one["started_at"]))[:MAX_RECENT],
            "descriptors": present["descriptors"],
            "tasks": present["tasks"],
            "workers": self._elsewhere.workers(),
            "replica": self._elsewhere.replica(),
            "discovery": None if self._discovery is None else self._discovery.status(),
        }

    def counted(self) -> dict[str, Any]:
        """Returns what this process has counted: figures that only grow."""
        board = {name: value for name, value in asdict(self._board.statistics()).items() if name not in _ON_BOARD}
        return {
            "totals": dict(self._recent.totals),
            "tokens": {"prompt": self._recent.num_prompt_tokens, "output": self._num_output_tokens()},
            "board": board,
            "memory": {"refused": self._memory.num_refused},
        }

    def present(self) -> dict[str, Any]:
        """Returns what is so in this process now."""
        board = {name: value for name, value in asdict(self._board.statistics()).items() if name in _ON_BOARD}
        return {
            "board": board,
            "memory": {"budget_bytes": self._memory.limit_bytes, "used_bytes": self._memory.num_bytes},
            "in_flight": self._orchestrator.in_flight(),
            "recent": self._recent.facts(),
            "descriptors": self._descriptors.status(),
            "tasks": len(asyncio.all_tasks()),
        }

    def _num_output_tokens(self) -> int:
        """Returns the tokens of all answers so far, those under way included. It never decreases, though an engine's
        usage may be less than what was counted of its events."""
        under_way = sum(record.num_output_tokens for record in self._orchestrator.records())
        self._most_output_tokens = max(self._most_output_tokens, self._recent.num_output_tokens + under_way)
        return self._most_output_tokens


def _add_model_routes(app: FastAPI, pool: Pool, keys: ApiKeys) -> None:
    started = int(time.time())

    def card(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": started, "owned_by": "pdproxy"} | pool.card(name)

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        keys.check(request.headers)
        return _json({"object": "list", "data": [card(name) for name in pool.models()]})

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        keys.check(request.headers)
        if name not in pool.models():
            raise ModelNotFound(f"the model {name!r} does not exist", param="model")
        return _json(card(name))


def _add_health_routes(app: FastAPI, pool: Pool, orchestrator: Orchestrator, discovery: Discovery | None) -> None:
    @app.get("/health")
    async def health() -> Response:
        """Answers 200 as long as the process lives."""
        return _json({"status": "ok"})

    @app.api_route("/ping", methods=["GET", "POST"])
    async def ping() -> Response:
        """Answers with an empty body: 200 if a request would be served, else 503. Hosts ask this before they send
        anything."""
        return Response(status_code=(await ready()).status_code)

    @app.get("/ready")
    async def ready() -> Response:
        """Answers 200 if a request would be served, else 503."""
        if orchestrator.is_draining:
            return _error(NotReady("the proxy is shutting down"))
        if orchestrator.is_leaving:  # before the fleet is looked at: a balancer is to know it however that fares
            return _error(NotReady("the proxy is leaving: it still serves requests, and will soon shut down"))
        if not pool.admission.has_leader:
            return _error(NotReady("nobody admits requests at this moment: no leader answers"))
        if not pool.is_ready:
            who = _who_is_not(pool, [] if discovery is None else discovery.complaints)
            return _error(NotReady(f"there is no ready prefiller, or no ready decoder: {who}"))
        return _json({"status": "ready"})


def _add_passed_routes(app: FastAPI, orchestrator: Orchestrator, keys: ApiKeys, responses: GenerationRoute) -> None:
    """Adds what scripts for vLLM ask without a body. `responses` is the route that makes responses."""
    passing = orchestrator.passing

    @app.get("/version")
    async def version(request: Request) -> Response:
        """Tells the version of an engine, as it tells it itself: scripts look there for what it can do."""
        keys.check(request.headers)
        status, body = await passing.get("/version")
        return Response(body, status, media_type="application/json")

    @app.get(RESPONSES + "/{response_id}")
    async def response(request: Request, response_id: str) -> Response:
        """Returns a response that a decoder keeps."""
        owner = keys.check(request.headers)
        if request.query_params.get("stream", "false").lower() in ("true", "1"):
            raise InvalidRequest("stream: a kept response can be asked for as a whole only", param="stream")
        keeper = passing.keeper(keeper_in(response_id), owner, param="response_id")
        status, body = await passing.get(f"{RESPONSES}/{response_id}", keeper, responses.shown(request.headers))
        return Response(body, status, media_type="application/json")

    @app.post(RESPONSES + "/{response_id}/cancel")
    async def cancel(request: Request, response_id: str) -> Response:
        """Has the decoder end a response that it writes in the background."""
        owner = keys.check(request.headers)
        keeper = passing.keeper(keeper_in(response_id), owner, param="response_id")
        path = f"{RESPONSES}/{response_id}/cancel"
        status, body = await passing.post(path, keeper, responses.shown(request.headers))
        return Response(body, status, media_type="application/json")


def _who_is_not(pool: Pool, complaints: Sequence[str]) -> str:
    """Returns of which role there is nobody, what keeps instances from being found, and who is not ready and why, in
    the order of the fleet."""
    roles = {one.role for one in pool.instances}
    absent = [f"no {role} instance is known; see the log" for role in get_args(Role) if role not in roles]
    waiting = [one for one in pool.instances if not one.is_routable]
    return "; ".join(
        [
            *absent,
            *complaints[:MAX_COMPLAINTS],
            *(f"{one.name} ({one.role}) is {one.health}{one.why and f': {one.why}'}" for one in waiting),
        ]
    )


def add_operator_routes(app: FastAPI, status: Status, metrics: Metrics) -> None:
    """Adds the pages for operators."""

    @app.get("/")
    async def front_page() -> Response:
        """Says whom one has reached, and what else there is to ask."""
        routes = [
            f"{method} {one.path_format}"
            for one in app.routes
            if isinstance(one, Route)
            for method in one.methods or ()
        ]
        routes = [route for route in routes if not route.startswith("HEAD")]  # Starlette adds it to some
        return _json({"name": "pdproxy", "version": __version__, "status_page": "/ui", "routes": sorted(routes)})

    @app.get("/metrics")
    async def metrics_page() -> Response:
        return Response(await metrics.look(), media_type=metrics.content_type)

    @app.get("/status")
    async def status_page() -> Response:
        return _json(await status.look())


class _WithRequestId:
    """_WithRequestId is middleware: it does for all other requests and answers what generation routes do for
    themselves."""

    def __init__(self, app: ASGIApp, generation_paths: Container[str]) -> None:
        self._app = app
        self._generation_paths = generation_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (scope["method"] == "POST" and scope["path"] in self._generation_paths):
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(request_id.HEADER.encode())
        accepted = request_id.accept(None if given is None else given.decode("latin-1"))
        request_id.current.set(accepted)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (request_id.HEADER.encode(), accepted.encode())]
            await send(message)

        await self._app(scope, receive, send_with_id)


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def _error(error: ProxyError) -> Response:
    response = _json(error.body(), error.status)
    more = [CHALLENGE] if isinstance(error, Unauthorized) else []
    for name, value in [*error_headers(error, bytes(response.body)), *more]:
        response.headers[name.decode()] = value.decode()
    return response


async def _on_http_exception(request: Request, raised: Exception) -> Response:
    """Answers with the same error object as everywhere: there is no such route, or it does not take this method."""
    assert isinstance(raised, HTTPException)
    where = f"{request.method} {request.url.path}"
    if raised.status_code == 404:
        return _error(NoSuchRoute(f"there is no {where}"))
    error: ProxyError = MethodNotAllowed(f"{where}: {raised.detail}")
    response = _json(error.body(), raised.status_code)
    response.headers.update(raised.headers or {})
    return response


async def _on_proxy_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ProxyError)
    return _error(error)


async def _on_bug(request: Request, error: Exception) -> Response:
    """Answers 500 without any detail of the inside; Starlette logs the error."""
    return _error(ProxyError("the proxy met an unexpected error"))
