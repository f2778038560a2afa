"""Somebody who looks at the status page's feed, as a browser would: what he was told, and what picture that makes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from pdproxy.dashboard.feed import Feed

Told = tuple[str, dict[str, Any]]


def told(stream: bytes) -> list[Told]:
    """The events of a stream: kind, content."""
    events = []
    for block in stream.decode().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines())
        if "event" in fields:
            events.append((fields["event"], json.loads(fields["data"])))
    return events


def merged(before: Any, patch: Any) -> Any:
    """RFC 7396, section 2."""
    if not isinstance(patch, dict):
        return patch
    after = dict(before) if isinstance(before, dict) else {}
    for name, value in patch.items():
        if value is None:
            after.pop(name, None)
        else:
            after[name] = merged(after.get(name), value)
    return after


def picture_of(events: list[Told]) -> dict[str, Any]:
    """What a page that was told `events` shows."""
    picture: dict[str, Any] = {}
    for kind, content in events:
        picture = content if kind == "snapshot" else merged(picture, content)
    return {name: value for name, value in picture.items() if name != "now"}


class Eyes:
    """A viewer within `loop`. Mutable state: what it was told; whether it takes anything now."""

    def __init__(self, loop: asyncio.AbstractEventLoop, feed: Feed) -> None:
        self.events: list[Told] = []
        self._can_take = asyncio.Event()
        self._can_take.set()
        self.task = loop.create_task(self._look(feed))

    async def _look(self, feed: Feed) -> None:
        with feed.join() as viewer:
            while stream := await viewer.next():
                self.events += told(stream)
                await self._can_take.wait()

    def block(self) -> None:
        self._can_take.clear()

    def unblock(self) -> None:
        self._can_take.set()

    def leave(self) -> None:
        self.task.cancel()

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events]

    @property
    def picture(self) -> dict[str, Any]:
        return picture_of(self.events)
