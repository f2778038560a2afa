"""Cluster reads lists of objects from a Kubernetes API server, and then each change of them.

The watch is here, because it has to survive more than a library's does: versions that are gone, in both shapes in which
servers say so, connections that die without a word, and servers that ask for a pause.

What must hold: the objects that were told are those of the server's last word, and after any fault they are all listed
again; while there is no word, they stay as they were. A violation would be seen as a pod that is gone for the server
and not here, or the other way round.
"""

from __future__ import annotations

import logging
import random
import time
from typing import Generic, Protocol, TypeVar

import anyio
import msgspec

from pdproxy.discovery.api_server import GONE, ApiServer, ClusterFault, Connect, Status, decoded, told

log = logging.getLogger(__name__)

PAGE = 500
"""Objects of one page of a list."""
WATCH_S = 30
"""Seconds after which the server ends a watch, in order, by what it is told. The next one goes on from there."""
SILENT_S = 5.0
"""Seconds beyond `WATCH_S` after which a watch without any end is a connection that has died."""
FIRST_PAUSE_S = 0.2
MAX_PAUSE_S = 10.0
"""The pause before another try: it doubles with each fault in a row."""
BRIEF_S = 1.0
"""Seconds below which a watch without an event was none."""
MAX_OBJECTS = 100_000
"""The most objects of a list: a server whose pages never end is none to follow."""
LIST_S = 180.0
"""Seconds for all pages of a list. No server keeps a version longer than five minutes."""

T = TypeVar("T")


class _ListMeta(msgspec.Struct):
    version: str = msgspec.field(name="resourceVersion", default="")
    continue_: str | None = msgspec.field(name="continue", default=None)


class _List(msgspec.Struct):
    metadata: _ListMeta
    items: msgspec.Raw = msgspec.Raw(b"null")


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw = msgspec.Raw(b"null")


class _Bookmark(msgspec.Struct):
    metadata: _ListMeta


class Sink(Protocol[T]):
    """Sink takes what a reflector reads."""

    def replace(self, objects: list[T]) -> None:
        """Takes all objects that there are."""
        ...

    def change(self, what: str, one: T) -> None:
        """Takes one event: ADDED, MODIFIED or DELETED."""
        ...


class Reflector(Generic[T]):
    """Reflector tells `sink` all objects of one kind, and each change of them.

    Mutable state: the server's client; the present pause; what was last complained of; whether the last list came
    whole and nothing went wrong since; whether the last version was gone.
    """

    def __init__(
        self,
        connect: Connect,
        path: str,
        kind: type[T],
        sink: Sink[T],
        *,
        labels: str = "",
        fields: str = "",
        watch_s: int = WATCH_S,
        silent_s: float = SILENT_S,
    ) -> None:
        """Takes the collection's path without a leading slash, and what is read of each object as a msgspec struct.
        `labels` and `fields` are selectors as the API takes them."""
        self._server = ApiServer(connect)
        self._path = path
        self._kind = kind
        self._sink = sink
        selectors = {"labelSelector": labels, "fieldSelector": fields}
        self._selectors = {name: value for name, value in selectors.items() if value}
        self._watch_s = watch_s
        self._silent_s = silent_s
        self._pause_s = FIRST_PAUSE_S / 2
        self._complaint = ""
        self._sees = False
        self._was_gone = False

    @property
    def complaint(self) -> str:
        """The sentence that says why the cluster cannot be read now; empty while it can."""
        return "" if self._sees or not self._complaint else f"the cluster cannot be read ({self}): {self._complaint}"

    async def run(self) -> None:
        """Lists and watches, until cancelled."""
        try:
            while True:
                try:
                    version = await self._list_in_time()
                    self._sees = True
                    while True:
                        version = await self._watch(version)
                except ClusterFault as fault:
                    await self._recover(fault)
        finally:
            with anyio.CancelScope(shield=True):
                await self._server.aclose()

    async def _recover(self, fault: ClusterFault) -> None:
        """Waits as long as this fault asks for. A version that is gone needs no wait, unless the next one is, too."""
        if fault.status == GONE and not self._was_gone:
            self._was_gone = True
            return
        self._sees = False
        await self._server.recover(fault)
        if str(fault) != self._complaint:
            self._complaint = str(fault)
            log.warning("the instances stay as they are, for the cluster cannot be read (%s): %s", self, fault)
        await self._pause(fault.retry_after_s)

    async def _pause(self, least_s: float = 0.0) -> None:
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        await anyio.sleep(max(least_s, self._pause_s * random.uniform(0.5, 1.0)))

    def _succeeded(self) -> None:
        if self._complaint:
            log.info("the cluster can be read again (%s)", self)
        self._pause_s, self._complaint, self._was_gone = FIRST_PAUSE_S / 2, "", False

    # ── list and watch ──────────────────────────────────────────────────────────────────────────────────────────

    async def _list_in_time(self) -> str:
        try:
            with anyio.fail_after(LIST_S):
                return await self._list()
        except TimeoutError:
            raise ClusterFault(f"the list did not end within {LIST_S:g} s") from None

    async def _list(self) -> str:
        """Tells all objects. Returns their version, from which on changes are asked for."""
        objects: list[T] = []
        query = {**self._selectors, "limit": str(PAGE)}
        while True:
            async with self._server.call(self._path, query) as call:
                page = decoded(await call.whole(), _List)
            objects += decoded(page.items, list[self._kind] | None) or []  # type: ignore[name-defined]
            if len(objects) > MAX_OBJECTS:
                raise ClusterFault(f"the list has more than {MAX_OBJECTS} objects")
            if not page.metadata.continue_:
                break
            query["continue"] = page.metadata.continue_
        self._sink.replace(objects)
        return str(page.metadata.version)

    async def _watch(self, version: str) -> str:
        """Tells each change after `version`, until the server ends that in order. Returns the last version."""
        query = {
            **self._selectors,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(self._watch_s),
            "resourceVersion": version,
        }
        since = time.monotonic()
        async with self._server.call(self._path, query, self._watch_s + self._silent_s) as call:
            async for line in call.lines():
                version = self._take(decoded(line, _Event)) or version
                self._succeeded()
        if time.monotonic() - since >= BRIEF_S:
            self._succeeded()
        else:  # whatever it told: a server that ends each watch at once would be asked without a pause
            await self._pause()
        return version

    def _take(self, event: _Event) -> str:
        """Takes one event. Returns its version. Raises `ClusterFault` for one that says that something is wrong."""
        if event.type == "ERROR":
            status = decoded(event.object, Status)
            raise ClusterFault(told(status), status=status.code or None)
        version = str(decoded(event.object, _Bookmark).metadata.version)
        if event.type != "BOOKMARK":
            self._sink.change(event.type, decoded(event.object, self._kind))
        return version

    def __str__(self) -> str:
        return ", ".join([self._path, *self._selectors.values()])

    def __repr__(self) -> str:
        return f"<Reflector {self}>"
