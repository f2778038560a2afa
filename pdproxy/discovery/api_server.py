"""The API server of a Kubernetes cluster: how it is reached, one call to it, and what goes wrong with that.

lightkube finds the configuration, reads tokens again and speaks TLS.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from pdproxy.errors import ConfigError

if TYPE_CHECKING:
    import httpx2

CALL_S = 10.0
"""Seconds without a byte after which a call has failed, but for a watch."""
MAX_RETRY_AFTER_S = 60.0
"""The longest pause that a server may ask for."""
MAX_LINE = 16 * 2**20
"""The most bytes of an event. A cluster keeps no object of a tenth of it."""
MAX_PAGE_BYTES = 128 * 2**20
"""The most bytes of one page of a list, or of an error's body. Some servers give a whole list as one page."""
WHOLE_S = 60.0
"""Seconds for one answer to be whole, however steadily it drips."""
CLOSE_S = 5.0
"""Seconds for closing what belongs to a server that may not answer any more."""
WAY_OUT = "run the proxy in a pod with a service account, or name a kubeconfig in KUBECONFIG"
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The errors of msgspec for JSON that is none, or not of the kind."""
UNAUTHORIZED = 401
NOT_FOUND = 404
CONFLICT = 409
GONE = 410

Connect = Callable[[], "httpx2.AsyncClient"]
"""A function that returns a client for the API server, with the configuration and token that are valid now. Raises
`ConfigError`."""


class ClusterFault(Exception):
    """The API server did not do what it was asked for. `status` is what it said, if it said anything."""

    def __init__(self, what: str, *, status: int | None = None, retry_after_s: float = 0.0) -> None:
        super().__init__(what)
        self.status = status
        self.retry_after_s = retry_after_s


class Status(msgspec.Struct):
    """Status is what the server says of a call that it has not carried out."""

    message: str = ""
    reason: str = ""
    code: int = 0
    metadata: Any = None


def kubernetes_client(option: str = "discover") -> httpx2.AsyncClient:
    """Returns a client for the cluster of this pod, or of the kubeconfig. Raises `ConfigError` for `option`."""
    try:
        from lightkube.config.client_adapter import AsyncClient, ConnectionParams
    except ModuleNotFoundError as error:
        if error.name != "lightkube":
            raise
        raise ConfigError(f"{option}: kubernetes needs lightkube; pip install 'pdproxy[kubernetes]'") from None
    return AsyncClient(_configuration(option), ConnectionParams())


def own_namespace(option: str = "discover") -> str:
    """Returns the namespace of this pod, or of the kubeconfig's context. Raises `ConfigError` for `option`."""
    return str(_configuration(option).namespace)


def server_url(option: str) -> str:
    """Returns the URL of the API server. Raises `ConfigError` for `option`."""
    return str(_configuration(option).cluster.server)


def _configuration(option: str) -> Any:
    try:
        from lightkube.config.kubeconfig import KubeConfig
        from lightkube.core.exceptions import ConfigError as LightkubeError
    except ModuleNotFoundError as error:
        if error.name != "lightkube":
            raise
        raise ConfigError(f"{option}: kubernetes needs lightkube; pip install 'pdproxy[kubernetes]'") from None
    try:
        found = KubeConfig.from_env()
    except LightkubeError as error:
        raise ConfigError(f"{option}: no cluster is configured ({error}); {WAY_OUT}") from None
    except Exception as error:  # a file that is somebody else's, read by somebody else's code: anything may come
        raise ConfigError(
            f"{option}: the configuration of the cluster cannot be read ({_why(error)}); {WAY_OUT}"
        ) from None
    try:
        return found.get()
    except Exception as error:  # a context that is not there, or a cluster or user that it names
        raise ConfigError(
            f"{option}: the current-context {found.current_context!r} of {found.fname} cannot be used ({_why(error)}); "
            "correct it (kubectl config use-context NAME), or name another kubeconfig in KUBECONFIG"
        ) from None


def _why(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


class ApiServer:
    """ApiServer is the server, by way of a client that is made when it is first needed, or by `open`.

    Mutable state: the client.
    """

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._client: httpx2.AsyncClient | None = None

    def open(self) -> httpx2.AsyncClient:
        """Returns the client. To make one takes some time, for it reads certificates. Raises `ConfigError`."""
        if self._client is None:
            try:
                self._client = self._connect()
            except (OSError, ValueError) as error:
                raise ConfigError(f"the cluster's configuration cannot be used: {error}") from None
        return self._client

    def call(
        self,
        path: str,
        query: Mapping[str, str] | None = None,
        silent_s: float = CALL_S,
        *,
        method: str = "GET",
        content: bytes | None = None,
    ) -> Call:
        """Returns a call, which is made by ``async with``. `content` is JSON; `silent_s` is the longest time in seconds
        without a byte. Raises `ClusterFault`.
        """
        try:
            client = self.open()
        except ConfigError as error:
            raise ClusterFault(str(error)) from None
        return Call(client, method, path, query or {}, content, silent_s)

    async def recover(self, fault: ClusterFault) -> bool:
        """Returns whether the client was dropped: the address, the certificates or the token may be others by now."""
        if fault.status in (None, UNAUTHORIZED):
            await self.aclose()
            return True
        return False

    async def aclose(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with anyio.move_on_after(CLOSE_S):
                await client.aclose()


class Call:
    """Call is one request and its answer, which may come over a long time. What goes wrong is a `ClusterFault`."""

    def __init__(
        self,
        client: httpx2.AsyncClient,
        method: str,
        path: str,
        query: Mapping[str, str],
        content: bytes | None,
        silent_s: float,
    ) -> None:
        self._client = client
        self._request = client.build_request(
            method,
            path,
            params=dict(query),
            content=content,
            headers={} if content is None else {"Content-Type": "application/json"},
            timeout=(CALL_S, silent_s, CALL_S, CALL_S),
        )
        self._answer: httpx2.Response | None = None

    async def __aenter__(self) -> Call:
        try:
            self._answer = await self._client.send(self._request, stream=True)
            if self._answer.status_code not in (200, 201):
                raise _refusal(self._answer, await self.whole())
        except BaseException as error:
            await self._close()
            raise _fault(error) from None
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        await self._close()

    async def _close(self) -> None:
        if self._answer is not None:
            with anyio.move_on_after(CLOSE_S, shield=True):
                await self._answer.aclose()

    async def whole(self) -> bytes:
        """Returns the whole body, within `MAX_PAGE_BYTES` and `WHOLE_S`."""
        assert self._answer is not None
        body = bytearray()
        try:
            with anyio.fail_after(WHOLE_S):
                async for piece in self._answer.aiter_bytes():
                    body += piece
                    if len(body) > MAX_PAGE_BYTES:
                        raise ClusterFault(f"an answer has more than {MAX_PAGE_BYTES} bytes")
        except TimeoutError:
            raise ClusterFault(f"an answer did not end within {WHOLE_S:g} s") from None
        except Exception as error:
            raise _fault(error) from None
        return bytes(body)

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
        status = msgspec.json.decode(body, type=Status)
    except UNREADABLE:
        status = Status()
    after = answer.headers.get("retry-after", "")
    after_s = min(float(after), MAX_RETRY_AFTER_S) if after.isdecimal() else 0.0
    status.code = answer.status_code
    return ClusterFault(told(status), status=answer.status_code, retry_after_s=after_s)


def told(status: Status) -> str:
    """Returns what messages say of it."""
    return f"HTTP {status.code}: {status.message or status.reason or 'no word of why'}"


def decoded(content: bytes | msgspec.Raw, kind: Any) -> Any:
    """Returns what the server has sent, as a msgspec type. Raises `ClusterFault`."""
    try:
        return msgspec.json.decode(content, type=kind)
    except UNREADABLE as error:
        raise ClusterFault(f"it does not answer as Kubernetes does: {error}") from None
