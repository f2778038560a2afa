"""Feed makes pictures for all viewers: there is one producer for all of them, and it rests while there are none.

A viewer gets a whole picture first and then what has changed. A viewer which is too slow for that is not waited for:
the messages that wait for it are thrown away, and it gets a whole picture again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextlib import suppress
from types import TracebackType
from typing import Any, Protocol

import msgspec

from pdproxy.dashboard.patch import difference
from pdproxy.errors import ProxyError

log = logging.getLogger(__name__)

EVERY_S = 1.0
"""Seconds between two looks, while nothing happens that viewers should see at once."""
GAP_S = 0.5
"""Least seconds between two looks, whatever happens."""
BEAT_S = 3.0
"""Seconds without a change after which viewers are told that there was none; they may take a longer silence for an
end."""
MAX_VIEWERS = 32
MAX_PENDING = 8
"""Number of messages that may wait for one viewer."""


class TooManyViewers(ProxyError):
    """TooManyViewers refuses another viewer, because each one is a connection that stays open."""

    status = 503
    type = "service_unavailable"
    code = "too_many_viewers"


class Subject(Protocol):
    """Subject is what is looked at. The `Snapshotter` implements it."""

    @property
    def now(self) -> float: ...

    @property
    def is_over(self) -> bool:
        """Tells whether the subject will not change any more, so that viewers need not stay."""

    def take(self) -> dict[str, Any]:
        """Returns a picture: JSON without any null."""


class Feed:
    """Feed tells its viewers what changes. `run` must be running for them to see more than their first picture.

    Mutable state: the viewers; the last picture, as JSON as well once somebody has asked for all of it, and when it was
    taken and anybody last told (on `subject`'s clock); two events, that there are viewers and that
    something should be seen at once.
    """

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._viewers: set[Viewer] = set()
        self._picture: dict[str, Any] = {}
        self._rendered = b""
        self._taken_at = float("-inf")
        self._told_at = 0.0
        self._watched = asyncio.Event()
        self._hurried = asyncio.Event()

    @property
    def num_viewers(self) -> int:
        return len(self._viewers)

    def hurry(self) -> None:
        """Asks for a look soon, because something has happened that should be seen at once. Costs nothing while nobody
        looks."""
        if self._viewers:
            self._hurried.set()

    async def run(self) -> None:
        """Looks and tells the viewers, until cancelled. Rests while nobody looks."""
        try:
            while True:
                await self._watched.wait()
                await asyncio.sleep(GAP_S)
                with suppress(TimeoutError):
                    async with asyncio.timeout(EVERY_S - GAP_S):
                        await self._hurried.wait()
                self._hurried.clear()
                self._tick()
        finally:
            self._end()

    def join(self) -> Viewer:
        """Returns a viewer, which begins to look when it is entered. Raises `TooManyViewers`."""
        if len(self._viewers) >= MAX_VIEWERS:
            raise TooManyViewers(f"{MAX_VIEWERS} others look already; close one of them", retry_after_s=5.0)
        return Viewer(self)

    # ── for viewers ─────────────────────────────────────────────────────────────────────────────────────────────────

    def add(self, viewer: Viewer) -> None:
        """Adds a viewer. The first one causes a look, unless one was just done."""
        if not self._viewers and self._subject.now - self._taken_at >= GAP_S:
            self._look()
        self._viewers.add(viewer)
        self._watched.set()
        if self._subject.is_over:
            viewer.end()

    def remove(self, viewer: Viewer) -> None:
        """Removes a viewer. Idempotent."""
        self._viewers.discard(viewer)
        if not self._viewers:
            self._watched.clear()

    def snapshot(self) -> bytes:
        """Returns all of the last picture, as an event. It is rendered once for all who ask for it."""
        if not self._rendered:
            self._rendered = msgspec.json.encode(self._picture)
        return b'event: snapshot\ndata: {"now":%.3f,%b\n\n' % (self._subject.now, self._rendered[1:])

    # ── inside ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _tick(self) -> None:
        """Looks once and tells the viewers. An error in the look is only logged: it must not harm the proxy."""
        if not self._viewers:
            return
        try:
            self._tell(self._look())
        except Exception:
            log.exception("a look for the status page met a bug")
        if self._subject.is_over:
            self._end()

    def _look(self) -> dict[str, Any]:
        """Takes a picture. Returns what has changed since the last one."""
        picture = self._subject.take()
        change = difference(self._picture, picture)
        self._picture, self._taken_at, self._rendered = picture, self._subject.now, b""
        return change

    def _tell(self, change: dict[str, Any]) -> None:
        now = self._subject.now
        if not change and now - self._told_at < BEAT_S:
            return
        self._told_at = now
        message = _event("change" if change else "beat", {"now": now, **change})
        for viewer in self._viewers:
            viewer.tell(message)

    def _end(self) -> None:
        for viewer in self._viewers:
            viewer.end()

    def __repr__(self) -> str:
        return f"<Feed for {len(self._viewers)} viewers>"


class Viewer:
    """Viewer is somebody who looks, from entering it to leaving it.

    Mutable state: messages that were not taken yet; whether a whole picture is due instead of them; whether there will
    be no more, and what it is told at the end; an event that one of these has changed.
    """

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._pending: deque[bytes] = deque()
        self._is_behind = True
        self._is_over = False
        self.farewell = b""
        self._woken = asyncio.Event()

    def __enter__(self) -> Viewer:
        self._feed.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._feed.remove(self)

    def tell(self, message: bytes) -> None:
        if len(self._pending) >= MAX_PENDING:
            self._is_behind = True
        if not self._is_behind:
            self._pending.append(message)
        self._woken.set()

    def end(self, farewell: bytes = b"") -> None:
        """Ends the viewer: nothing but `farewell` comes after the messages that wait for it. Only the first call
        counts."""
        if not self._is_over:
            self._is_over, self.farewell = True, farewell
        self._woken.set()

    async def next(self) -> bytes:
        """Waits for something new, and returns all that is new since the last call; ``b""`` at the end."""
        while not (self._is_behind or self._pending or self._is_over):
            self._woken.clear()
            await self._woken.wait()
        pending = b"".join(self._pending)
        self._pending.clear()
        if self._is_behind:
            self._is_behind = False
            return self._feed.snapshot()
        return pending

    def __repr__(self) -> str:
        state = "over" if self._is_over else "behind" if self._is_behind else f"{len(self._pending)} pending"
        return f"<Viewer {state}>"


def _event(kind: str, content: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode(content))
