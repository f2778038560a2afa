"""The proxy's HTTP face: the generation routes, and what operators look at."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import ASGIApp

from pdproxy.errors import MethodNotAllowed, NoSuchRoute, NotReady, ProxyError
from pdproxy.fleet.pool import Pool
from pdproxy.orchestrator import Orchestrator
from pdproxy.reaper import Reaper
from pdproxy.telemetry.metrics import Metrics
from pdproxy.telemetry.record import Recent

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


def build_app(
    *,
    generation_routes: Mapping[str, ASGIApp],
    pool: Pool,
    orchestrator: Orchestrator,
    reaper: Reaper,
    metrics: Metrics,
    recent: Recent,
    lifespan: Lifespan,
) -> FastAPI:
    """The ASGI application; `lifespan` starts and stops what runs behind it."""
    app = FastAPI(title="pdproxy", openapi_url=None, lifespan=lifespan)
    for path, endpoint in generation_routes.items():
        app.router.routes.append(Route(path, endpoint, methods=["POST"]))
    _add_model_routes(app, pool)
    _add_health_routes(app, pool, orchestrator)
    _add_operator_routes(app, pool, orchestrator, reaper, metrics, recent)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ProxyError, _on_proxy_error)
    app.add_exception_handler(Exception, _on_bug)
    return app


def _add_model_routes(app: FastAPI, pool: Pool) -> None:
    started = int(time.time())

    @app.get("/v1/models")
    async def models() -> Response:
        cards = [{"id": name, "object": "model", "created": started, "owned_by": "pdproxy"} for name in pool.models()]
        return _json({"object": "list", "data": cards})


def _add_health_routes(app: FastAPI, pool: Pool, orchestrator: Orchestrator) -> None:
    @app.get("/health")
    async def health() -> Response:
        """The process lives."""
        return _json({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        """A request would be served."""
        if orchestrator.is_draining:
            return _error(NotReady("the proxy is shutting down"))
        if not pool.is_ready:
            return _error(NotReady("there is no ready prefiller, or no ready decoder"))
        return _json({"status": "ready"})


def _add_operator_routes(
    app: FastAPI, pool: Pool, orchestrator: Orchestrator, reaper: Reaper, metrics: Metrics, recent: Recent
) -> None:
    @app.get("/metrics")
    async def metrics_page() -> Response:
        return Response(metrics.render(), media_type=metrics.content_type)

    @app.get("/status")
    async def status() -> Response:
        return _json(
            {
                "ready": pool.is_ready,
                "draining": orchestrator.is_draining,
                "fleet": pool.status(),
                "ledger": _ledger(pool),
                "in_flight": orchestrator.in_flight(),
                "reaper": reaper.statistics(),
                "totals": recent.totals,
                "recent": recent.facts(),
                "tasks": len(asyncio.all_tasks()),
            }
        )


def _ledger(pool: Pool) -> dict[str, dict[str, int]]:
    """By decoder; ``granted - returned = held``, always."""
    books = [instance.admission.statistics() for instance in pool.instances if instance.has_admission]
    return {
        book.name: {"granted": book.granted_total, "returned": book.returned_total, "held": book.held} for book in books
    }


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def _error(error: ProxyError) -> Response:
    return _json(error.body(), error.status)


async def _on_http_exception(request: Request, raised: Exception) -> Response:
    """No such route, or not this method: the same error object as everywhere."""
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
    """Starlette logs it; the client is told nothing of the inside."""
    return _error(ProxyError("the proxy met an unexpected error"))
