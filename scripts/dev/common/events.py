"""The module reads a stream of server-sent events as a client does, with the proxy's own reader."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx

from pdproxy.openai.sse import EventBuffer, data_of, split

DONE = b"[DONE]"
"""The data of the event that ends a stream."""


async def data_in(response: httpx.Response) -> AsyncIterator[bytes]:
    """Yields the data of each event, as soon as the event is there."""
    events = EventBuffer()
    async for chunk in response.aiter_bytes():
        for raw in split(events.feed(chunk)):
            if (data := data_of(raw)) is not None:
                yield data
