"""Cluster reads lists of objects from a Kubernetes API server, and then each change of them.

lightkube finds the configuration, reads tokens again and speaks TLS. The watch is here, because it has to survive more
than a library's does: versions that are gone, in both shapes in which servers say so, connections that die without a
word, and servers that ask for a pause.

What must hold: the objects that were told are those of the server's last word, and after any fault they are all listed
again; while there is no word, they stay as they were. A violation would be seen as a pod that is gone for the server
and not here, or the other way round.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import anyio
import msgspec

from pdproxy.errors import ConfigError

if TYPE_CHECKING:
    import httpx2

log = logging.getLogger(__name__)

PAGE = 500
"""Objects of one page of a list."""
WATCH_S = 30
"""Seconds after which the server ends a watch, in order, by what it is told. The next one goes on from there."""
SILENT_S = 5.0
"""Seconds beyond `WATCH_S` after which a watch without any end is a connection that has died."""
CALL_S = 10.0
"""Seconds without a byte after which another call has failed."""
FIRST_PAUSE_S = 0.2
MAX_PAUSE_S = 10.0
"""The pause before another try: it doubles with each fault in a row."""
MAX_RETRY_AFTER_S = 60.0
"""The longest pause that a server may ask for."""
BRIEF_S = 1.0
"""Seconds below which a watch without an event was none."""
MAX_LINE = 16 * 2**20
"""The most bytes of an event. A cluster keeps no object of a tenth of it."""
GONE = 410
UNAUTHORIZED = 401

T = TypeVar("T")
Connect = Callable[[], "httpx2.AsyncClient"]
"""A function that returns a client for the API server, with the configuration and token that are valid now. Raises
`ConfigError`."""


class ClusterFault(Exception):
    """The API server did not do what it was asked for. `status` is what it said, if it said anything."""

    def __init__(self, what: str, *, status: int | None = None, retry_after_s: float = 0.0) -> None:
        super().__init__(what)
        self.status = status
        self.retry_after_s = retry_after_s


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


class _Status(msgspec.Struct):
    message: str = ""
    reason: str = ""
    code: int = 0
    metadata: Any = None


class Sink(Protocol[T]):
    """Sink takes what a reflector reads."""

    def replace(self, objects: list[T]) -> None:
        """Takes all objects that there are."""
        ...

    def change(self, what: str, one: T) -> None:
        """Takes one event: ADDED, MODIFIED or DELETED."""
        ...


def kubernetes_client() -> httpx2.AsyncClient:
    """Returns a client for the cluster of this pod, or of the kubeconfig. Raises `ConfigError`."""
    try:
        from lightkube.config.client_adapter import AsyncClient, ConnectionParams
    except ModuleNotFoundError as error:
        if error.name != "lightkube":
            raise
        raise ConfigError("discover: kubernetes needs lightkube; pip install 'pdproxy[kubernetes]'") from None
    return AsyncClient(_configuration(), ConnectionParams())


def own_namespace() -> str:
    """Returns the namespace of this pod, or of the kubeconfig's context. Raises `ConfigError`."""
    return str(_configuration().namespace)


def _configuration() -> Any:
    try:
        from lightkube.config.kubeconfig import KubeConfig
        from lightkube.core.exceptions import ConfigError as LightkubeError
    except ModuleNotFoundError as error:
        if error.name != "lightkube":
            raise
        raise ConfigError("discover: kubernetes needs lightkube; pip install 'pdproxy[kubernetes]'") from None
    try:
        return KubeConfig.from_env().get()
    except (LightkubeError, KeyError, OSError, ValueError) as error:
        raise ConfigError(
            f"discover: no cluster is configured ({error}); run the proxy in a pod with a service account, or name a "
            "kubeconfig in KUBECONFIG"
        ) from None


class Reflector(Generic[T]):
    """Reflector tells `sink` all objects of one kind, and each change of them.

    Mutable state: the client; the present pause; what was last complained of; whether it has listed once.
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
        self._connect = connect
        self._path = path
        self._kind = kind
        self._sink = sink
        selectors = {"labelSelector": labels, "fieldSelector": fields}
        self._selectors = {name: value for name, value in selectors.items() if value}
        self._watch_s = watch_s
        self._silent_s = silent_s
        self._client: httpx2.AsyncClient | None = None
        self._pause_s = FIRST_PAUSE_S / 2
        self._complaint = ""
        self._was_gone = False

    async def run(self) -> None:
        """Lists and watches, until cancelled."""
        try:
            while True:
                try:
                    version = await self._list()
                    while True:
                        version = await self._watch(version)
                except ClusterFault as fault:
                    await self._recover(fault)
        finally:
            with anyio.CancelScope(shield=True):
                await self._drop_client()

    async def _recover(self, fault: ClusterFault) -> None:
        """Waits as long as this fault asks for. A version that is gone needs no wait, unless the next one is, too."""
        if fault.status == GONE and not self._was_gone:
            self._was_gone = True
            return
        if fault.status in (None, UNAUTHORIZED):  # the address, the certificates or the token may be others by now
            await self._drop_client()
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

    async def _list(self) -> str:
        """Tells all objects. Returns their version, from which on changes are asked for."""
        objects: list[T] = []
        query = {**self._selectors, "limit": str(PAGE)}
        while True:
            async with _Call(self._opened(), self._path, query, CALL_S) as call:
                page = _decoded(await call.whole(), _List)
            objects += _decoded(page.items, list[self._kind] | None) or []  # type: ignore[name-defined]
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
        since, num_events = time.monotonic(), 0
        async with _Call(self._opened(), self._path, query, self._watch_s + self._silent_s) as call:
            async for line in call.lines():
                version = self._take(_decoded(line, _Event)) or version
                num_events += 1
                self._succeeded()
        if time.monotonic() - since >= BRIEF_S:
            self._succeeded()
        elif not num_events:
            await self._pause()
        return version

    def _take(self, event: _Event) -> str:
        """Takes one event. Returns its version. Raises `ClusterFault` for one that says that something is wrong."""
        if event.type == "ERROR":
            status = _decoded(event.object, _Status)
            raise ClusterFault(_told(status), status=status.code or None)
        version = str(_decoded(event.object, _Bookmark).metadata.version)
        if event.type != "BOOKMARK":
            self._sink.change(event.type, _decoded(event.object, self._kind))
        return version

    # ── the client ──────────────────────────────────────────────────────────────────────────────────────────────

    def _opened(self) -> httpx2.AsyncClient:
        if self._client is None:
            try:
                self._client = self._connect()
            except (ConfigError, OSError, ValueError) as error:
                raise ClusterFault(str(error)) from None
        return self._client

    async def _drop_client(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    def __str__(self) -> str:
        return ", ".join([self._path, *self._selectors.values()])

    def __repr__(self) -> str:
        return f"<Reflector {self}>"


class _Call:
    """_Call is one request and its answer, which may come over a long time. What goes wrong is a `ClusterFault`."""

    def __init__(self, client: httpx2.AsyncClient, path: str, query: Mapping[str, str], silent_s: float) -> None:
        """`silent_s` is the longest time in seconds without a byte."""
        self._client = client
        self._request = client.build_request(
            "GET", path, params=dict(query), timeout=(CALL_S, silent_s, CALL_S, CALL_S)
        )
        self._answer: httpx2.Response | None = None

    async def __aenter__(self) -> _Call:
        try:
            self._answer = await self._client.send(self._request, stream=True)
            if self._answer.status_code != 200:
                raise _refusal(self._answer, await self._answer.aread())
        except BaseException as error:
            await self._close()
            raise _fault(error) from None
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        await self._close()

    async def _close(self) -> None:
        if self._answer is not None:
            with anyio.CancelScope(shield=True):
                await self._answer.aclose()

    async def whole(self) -> bytes:
        """Returns the whole body."""
        assert self._answer is not None
        try:
            return await self._answer.aread()
        except Exception as error:
            raise _fault(error) from None

    async def lines(self) -> AsyncIterator[bytes]:
        """Yields each line of the body, wherever the pieces are cut in which it comes."""
        assert self._answer is not None
        rest = b""
        pieces = self._answer.aiter_bytes()
        while True:
            try:
                piece = await anext(pieces, None)
            except Exception as error:
                raise _fault(error) from None
            if piece is None:
                break
            *lines, rest = (rest + piece).split(b"\n")
            if len(rest) > MAX_LINE:
                raise ClusterFault(f"an event has more than {MAX_LINE} bytes")
            for line in lines:
                if line.strip():
                    yield line
        # A rest without its end is no event: the next watch goes on from the one before.


def _fault(error: BaseException) -> BaseException:
    """Returns what a failed call raises. Anything but a cancellation or a mistake of ours is a fault of the cluster's:
    the transport's errors, and those of what gets a token."""
    if isinstance(error, ClusterFault) or not isinstance(error, Exception):
        return error
    return ClusterFault(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)


def _refusal(answer: httpx2.Response, body: bytes) -> ClusterFault:
    try:
        status = msgspec.json.decode(body, type=_Status)
    except msgspec.DecodeError:
        status = _Status()
    after = answer.headers.get("retry-after", "")
    after_s = min(float(after), MAX_RETRY_AFTER_S) if after.isdecimal() else 0.0
    status.code = answer.status_code
    return ClusterFault(_told(status), status=answer.status_code, retry_after_s=after_s)


def _told(status: _Status) -> str:
    return f"HTTP {status.code}: {status.message or status.reason or 'no word of why'}"


def _decoded(content: bytes | msgspec.Raw, kind: Any) -> Any:
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.DecodeError as error:
        raise ClusterFault(f"it does not answer as Kubernetes does: {error}") from None
