"""The module asks a running proxy for its status page and its models, within a time limit and a size."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

import httpx
import msgspec

from pdproxy.config.instances import InstanceSettings, is_place
from pdproxy.config.values import Engine, Role
from pdproxy.engines.http.base import ReplyTooLarge, at_most, read_whole
from pdproxy.errors import ConfigError
from transfer.logs import printable

DEFAULT_URL = "http://127.0.0.1:9100"
TIMEOUT_S = 10.0
MAX_BYTES = 64 << 20
MAX_SAID_BYTES = 300


class AskFailed(Exception):
    """`AskFailed` says that a proxy could not be asked, or that it is none. The message names the way out."""


class BreakerStatus(msgspec.Struct):
    state: str = ""


class InstanceStatus(msgspec.Struct):
    """InstanceStatus is what is read of one instance in ``fleet``. Other members are left alone."""

    name: str
    role: Role
    url: str
    engine: Engine
    state: str
    data_parallel_rank: int | None = None
    why: str = ""
    draining: bool = False
    leaving: bool = False
    routable: bool = True
    models: list[str] = []
    legs: int = 0
    queued_tokens: int = 0
    breaker: BreakerStatus = msgspec.field(default_factory=BreakerStatus)
    capacity: int | None = None
    held: int | None = None
    queue: int | None = None
    foreign: int = 0


class RequestStatus(msgspec.Struct):
    """RequestStatus is what is read of one request in ``in_flight``."""

    request_id: str = ""
    model: str | None = None
    phase: str = ""
    path: str = ""
    prefiller: str | None = None
    decoder: str | None = None
    total_s: float | None = None
    num_output_tokens: int | None = None
    num_pages: int | None = None
    orphan: bool = False
    orphaned_s: float | None = None


class FrontStatus(msgspec.Struct):
    replica: str = ""
    pid: int | None = None
    connected: bool = True
    silent_s: float | None = None


class ReplicaStatus(msgspec.Struct):
    name: str = ""
    address: str = ""
    leads: bool = False
    term: int | None = None
    leader: str | None = None
    store_error: str | None = None
    fronts: list[FrontStatus] = []


class WorkerStatus(msgspec.Struct):
    worker: int | None = None
    pid: int | None = None
    state: str = ""
    attempts: int | None = None


class ProxyStatus(msgspec.Struct):
    """ProxyStatus is what is read of a proxy's status page. Members that older proxies do not have may be missing."""

    version: str
    ready: bool
    fleet: list[InstanceStatus]
    started_at: float = 0.0
    leaving: bool = False
    draining: bool = False
    in_flight: list[RequestStatus] = []
    totals: dict[str, int] = {}
    workers: list[WorkerStatus] | None = None
    replica: ReplicaStatus | None = None


_decoder = msgspec.json.Decoder(ProxyStatus)


class RunningProxy:
    """RunningProxy is a proxy at a URL. Use it in ``async with``. Raises `AskFailed` for what is no URL."""

    def __init__(self, url: str, *, timeout_s: float = TIMEOUT_S, key: str | None = None) -> None:
        if not is_place(url):
            raise AskFailed(f"--url: {url!r} is no address of a proxy; give http://HOST:PORT")
        self._url = url.rstrip("/")
        self._timeout_s = timeout_s
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._client = httpx.AsyncClient(trust_env=False, timeout=timeout_s, headers=headers)

    async def __aenter__(self) -> RunningProxy:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def page(self) -> bytes:
        """Returns the status page as it came. Raises `AskFailed`."""
        status, body = await self._get("/status")
        if status != 200:
            raise AskFailed(
                f"{self._url}/status is HTTP {status}: this is no pdproxy, or something in front of it keeps the page "
                "back; give --url the address of pdproxy serve itself"
            )
        return body

    async def models(self) -> list[str] | None:
        """Returns the names of the models that it serves; None where it asks for a key that it was not shown. Raises
        `AskFailed`."""
        status, body = await self._get("/v1/models")
        if status in (401, 403):
            return None
        try:
            cards: list[dict[str, Any]] = msgspec.json.decode(body)["data"]
            return [str(card["id"]) for card in cards]
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError):
            raise AskFailed(f"{self._url}/v1/models is HTTP {status} and no list of models") from None

    async def _get(self, path: str) -> tuple[int, bytes]:
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._client.stream("GET", f"{self._url}{path}") as response,
            ):
                pieces = response.aiter_bytes()
                return response.status_code, await read_whole(lambda: anext(pieces, b""), at_most(MAX_BYTES))
        except (httpx.TimeoutException, TimeoutError):
            raise AskFailed(
                f"{self._url}{path} did not answer within {self._timeout_s:g} s; see whether its process stands still"
            ) from None
        except ReplyTooLarge as error:
            raise AskFailed(f"{self._url}{path}: {error}; this is no pdproxy") from None
        except (httpx.HTTPError, httpx.InvalidURL, ssl.SSLError) as error:
            said = printable(str(error) or type(error).__name__, MAX_SAID_BYTES)
            raise AskFailed(
                f"{self._url}{path} cannot be asked: {said}; is the proxy there? name it by --url"
            ) from None


def read_page(url: str, body: bytes) -> ProxyStatus:
    """Returns what a status page says. Raises `AskFailed` where it is not one of pdproxy, or of a release whose page
    is another."""
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        said = printable(str(error), MAX_SAID_BYTES)
        raise AskFailed(
            f"{url}/status is not a page that this release of pdproxy knows ({said}): it is another server, or "
            "another release; use the pdproxy that serves it"
        ) from None


def fleet_of(status: ProxyStatus, known: tuple[InstanceSettings, ...]) -> tuple[InstanceSettings, ...]:
    """Returns the instances of a running proxy. For what its page does not tell, the settings of the same name and
    address in `known` count. Raises `ConfigError` for what is no instance."""
    told = {(one.name, one.url.rstrip("/")): one for one in known}
    fleet = []
    for one in status.fleet:
        if one.leaving:
            continue
        try:
            fresh = InstanceSettings(
                name=one.name,
                role=one.role,
                url=one.url,
                engine=one.engine,
                data_parallel_rank=one.data_parallel_rank,
            )
        except ValueError as error:
            raise ConfigError(f"the proxy tells of an instance that cannot be: {error}") from None
        fleet.append(told.get((one.name, one.url.rstrip("/")), fresh))
    return tuple(fleet)
