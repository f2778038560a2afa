"""The routes ``/ui`` and ``/ui/events`` are open to everybody who may read ``/status``: they tell nothing that it does
not.

The admin API changes the fleet; the page calls it with a key that its reader has.
"""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

from fastapi import Request, Response
from starlette.routing import Route

from pdproxy.dashboard.feed import Feed, Viewer
from pdproxy.dashboard.page import page
from pdproxy.server.asgi import AsgiClient
from transfer.memory_budget import UNLIMITED

STALLED_S = 30.0
"""Seconds that a viewer has to take a message; then it is dropped, and its place is free."""
LIFE_S = 240.0
"""Seconds after which a stream ends, and whoever still looks opens the next one. As long as little happens, nothing
else shows that a viewer has stopped reading: the operating systems at both ends take a megabyte for it."""
AGAIN = b"event: again\ndata: {}\n\n"
"""The event that ends such a stream: the page needs not think that it has lost the proxy."""
RETRY = b"retry: 1000\n\n"
"""The event that sets the time after which a page whose connection has ended tries again, in milliseconds."""

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
    (b"x-content-type-options", b"nosniff"),
    (b"connection", b"close"),  # else the connection of a viewer that does not read would be kept for its next request
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
    """Sends what `viewer` gets, for `LIFE_S` seconds at the most. A client that takes nothing is given up, and its
    server sees to the connection."""
    loop = asyncio.get_running_loop()
    life = loop.call_later(LIFE_S, viewer.end, AGAIN)
    try:
        async with asyncio.timeout(STALLED_S) as limit:
            await client.start(200, _HEADERS)
            message = RETRY
            while message:
                await client.send(message)
                limit.reschedule(None)
                message = await viewer.next()
                limit.reschedule(loop.time() + STALLED_S)
            if viewer.farewell:
                await client.send(viewer.farewell)
            await client.end()
    except TimeoutError:
        return
    finally:
        life.cancel()
