"""The routes ``/ui`` and ``/ui/events`` are open to everybody who may read ``/status``: they tell nothing that it does
not.

The admin API changes the fleet; the page calls it with a key that its reader has.
"""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from contextlib import suppress
from typing import Any

from fastapi import Request, Response
from starlette.routing import Route

from pdproxy.dashboard.feed import Feed, Viewer
from pdproxy.dashboard.page import page
from pdproxy.server.asgi import AsgiClient
from transfer.memory_budget import UNLIMITED

STALLED_S = 30.0
"""Seconds that a viewer has to take a message; then it is dropped, and its place is free."""
RETRY = b"retry: 1000\n\n"
"""The event that sets the time after which a page whose connection has ended tries again, in milliseconds."""

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
    (b"x-content-type-options", b"nosniff"),
]


def dashboard_routes(feed: Feed) -> list[Route]:
    return [Route("/ui", _page, methods=["GET"]), Route("/ui/events", Events(feed), methods=["GET"])]


async def _page(request: Request) -> Response:
    shown = page()
    return Response(shown.content, media_type="text/html", headers=shown.headers)


class Events:
    """Events sends what the page follows, until either side ends it. It is an ASGI application."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        client = AsgiClient(send, {}, {}, UNLIMITED.share())
        if scope["method"] == "HEAD":
            await client.start(200, _HEADERS)
            await client.end()
            return
        with self._feed.join() as viewer:
            await client.watch(receive, _show(viewer, client))


async def _show(viewer: Viewer, client: AsgiClient) -> None:
    await client.start(200, _HEADERS)
    with suppress(TimeoutError):
        message = RETRY
        while message:
            async with asyncio.timeout(STALLED_S):
                await client.send(message)
            message = await viewer.next()
        await client.end()
