"""The module puts the proxy together. It is the only one that knows every concrete class, and it starts and stops the
parts."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import ssl
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
from fastapi import FastAPI

from pdproxy.admission.admission import Admission
from pdproxy.admission.kernel import Kernel
from pdproxy.admission.retry_budget import RetryBudget
from pdproxy.aio.descriptors import DescriptorBudget
from pdproxy.aio.loop_lag import LoopLag
from pdproxy.config.instances import InstanceSettings, is_link_local
from pdproxy.config.settings import Settings
from pdproxy.dashboard.feed import Feed
from pdproxy.dashboard.routes import dashboard_routes
from pdproxy.dashboard.snapshotter import Snapshotter
from pdproxy.dashboard.traffic import Traffic
from pdproxy.discovery.discovery import Discovery
from pdproxy.discovery.factory import make_discovery
from pdproxy.engines.adapter import Adapter
from pdproxy.engines.factory import TAKE_IDS, make_adapter, warn_of_mistakes
from pdproxy.engines.http.base import EngineClient
from pdproxy.engines.http.http1.client import Http1Client, can_reach
from pdproxy.engines.http.httpx_client import HttpxClient
from pdproxy.engines.traits import KvReady
from pdproxy.errors import ConfigError
from pdproxy.fleet.breaker import BreakerLimits
from pdproxy.fleet.cache_followers import Addresses, CacheFollowers
from pdproxy.fleet.ended import EndedPeers
from pdproxy.fleet.file_watch import FileWatch
from pdproxy.fleet.instance import HealthPolicy, Instance, OnEnded
from pdproxy.fleet.membership import Membership
from pdproxy.fleet.pace import Pace
from pdproxy.fleet.page_count import Shapes
from pdproxy.fleet.pool import Pool
from pdproxy.fleet.probe import ExpectedBuffer, Probe
from pdproxy.fleet.role_changes import RoleChanges
from pdproxy.fleet.role_controller import RoleFollower
from pdproxy.fleet.roster import Entry, Roster
from pdproxy.fleet.routing.path_by_load import PathByLoad
from pdproxy.fleet.routing.policies import PolicyOptions, make_policy
from pdproxy.fleet.routing.router import Router
from pdproxy.fleet.slow_start import SlowStart
from pdproxy.fleet.token_counts import TokenCounts
from pdproxy.fleet.tokenizer_check import TokenizerCheck
from pdproxy.kv_signals.board import KvBoard
from pdproxy.kv_signals.zmq import SignalSocket
from pdproxy.openai.apis import PASSED
from pdproxy.openai.priority import PriorityLimits
from pdproxy.openai.request import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from pdproxy.orchestrator.disaggregated import Disaggregated
from pdproxy.orchestrator.leg_runner import LegRunner
from pdproxy.orchestrator.orchestrator import Orchestrator, RequestOptions
from pdproxy.orchestrator.passing import Passing, PassingLimits
from pdproxy.orchestrator.path import PathChooser
from pdproxy.orchestrator.reaper import Reaper
from pdproxy.server.admin import admin_router
from pdproxy.server.api_keys import ApiKeys
from pdproxy.server.app import App, Status, add_operator_routes, build_app
from pdproxy.server.process_memory import allowed_bytes
from pdproxy.server.routes import BODY_COPIES, GenerationRoute
from pdproxy.telemetry.collectors import Sources
from pdproxy.telemetry.figures import Elsewhere
from pdproxy.telemetry.key_usage import KeyUsage
from pdproxy.telemetry.log import RequestLog, leg_logs
from pdproxy.telemetry.metrics import Metrics
from pdproxy.telemetry.observer import LegObserver, Observer, Observers, Recent, RequestObserver
from pdproxy.telemetry.trace import Tracing, make_tracing
from pdproxy.tokens.prompt_sizer import PromptSizer, make_sizer
from transfer.errors import GeometryError
from transfer.geometry import capacity, group_page_bytes, kv_geometry, load_config
from transfer.memory_budget import MemoryBudget, least_budget

log = logging.getLogger(__name__)

SETTLE_S = 5.0
"""Seconds that decoders have at shutdown to confirm that they have dropped what was left."""
HURRIED_SETTLE_S = 0.5
"""Seconds that decoders have at shutdown, instead of `SETTLE_S`, where the operator has lost patience; the rest is left
to the engines' lease time.
"""

MEMORY_SHARE = 4
"""The part of the memory which this process may have that requests and answers get, as a divisor. The rest is for the
program, for copies that last a moment, and for whoever else is on the machine."""

MakeClient = Callable[[InstanceSettings], EngineClient]
MakeAdapter = Callable[[InstanceSettings, Settings], Adapter]
Clock = Callable[[], float]
"""A function that returns seconds; the event loop's own clock runs at the same pace."""
MakeInstance = Callable[[InstanceSettings, bool], Instance]
"""A function that makes an instance. The flag says that it joins others that are at work."""
Runner = Callable[[], Coroutine[Any, Any, None]]
"""A function that runs until cancelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proxy:
    """Proxy holds a proxy's parts. `app` runs them; the rest is there for the server, and for tests to look at."""

    app: App
    settings: Settings
    pool: Pool
    board: KvBoard
    orchestrator: Orchestrator
    reaper: Reaper
    probe: Probe
    tokenizers: TokenizerCheck
    membership: Membership
    roles: RoleChanges
    recent: Recent
    descriptors: DescriptorBudget
    memory: MemoryBudget
    listen: Callable[[], None]
    """Binds the signal socket, where one is needed, ahead of `app`'s start, which binds it otherwise. Raises
    `ConfigError`."""
    signal_address: Callable[[], str]
    """Returns the ZMQ address to which engines send their KV signals; empty while none of them does."""
    hurry: Callable[[], None]
    """Makes the end of `app` a quick one, which waits for no request any more."""
    reload: Callable[[], None] | None
    """Has the fleet's file read again; None where there is none."""
    counts: TokenCounts
    elsewhere: Elsewhere

    def check_integrity(self) -> None:
        """Raises `IntegrityError` when pages or expectations do not add up."""
        self.pool.check_integrity()
        self.board.check_integrity()


def assemble(
    settings: Settings,
    *,
    make_client: MakeClient | None = None,
    fleet: Sequence[InstanceSettings] | None = None,
    discovery: Discovery | None = None,
    elsewhere: Elsewhere | None = None,
    notify: Callable[[], str] | None = None,
    term: int | None = None,
    claims_until: float = -math.inf,
    looks: bool = True,
) -> Proxy:
    """Builds everything and starts nothing. Raises `ConfigError` that names the option at fault.

    `make_client` replaces HTTP, for tests. `fleet` replaces the one that the options name, and then `discovery`, which
    runs already, what they say of discovery. `elsewhere` has the figures
    of the proxy's other processes. `notify` tells where canaries' KV signals go to, where that is not this proxy's own
    socket. A proxy that admits in a `term` grants nothing before the time `claims_until` on the
    monotonic clock. Without `looks`, nothing looks at the fleet by itself, at the file or at the engines: whoever has
    made the proxy does that.
    """
    # Some parts need each other. A lambda stands for a part that is made further down, and is called after that only.
    descriptors = DescriptorBudget()
    make_client = make_client or http_client(settings, descriptors)
    board = KvBoard()
    elsewhere = elsewhere or Elsewhere()
    own_discovery = make_discovery(settings) if fleet is None else None
    fleet = settings.fleet() if fleet is None else fleet
    found = [] if discovery is None else unlike(fleet, discovery.found)
    warn_of_mistakes(fleet, settings)
    router = make_router(settings, random.Random())
    admission = make_admission(settings, router, claims_until=claims_until)
    admission.term = term
    ended_peers = EndedPeers(lambda: pool, timeout_s=settings.probe_timeout_s)

    def on_ended(epoch: str, why: str) -> None:
        board.fail_epoch(epoch, why)
        ended_peers.ended(epoch)

    make_instance = instance_maker(settings, admission, on_ended, make_client)

    def make_one(one: InstanceSettings, is_newcomer: bool) -> Instance:
        instance = make_instance(one, is_newcomer)
        if instance.adapter.traits.ready is KvReady.ENGINES:  # then both legs are sent at once
            descriptors.legs_per_request = 2
        return instance

    pool = Pool(admission, (make_one(one, False) for one in (*fleet, *(entry.settings for entry in found))))
    signals = Signals(board, settings, pool)

    def make_newcomer(one: InstanceSettings) -> Instance:
        newcomer = make_one(one, True)
        signals.hear(newcomer)
        return newcomer

    membership = Membership(pool, make_instance=make_newcomer, check=settings.check_instances)
    roles = make_role_changes(settings, pool, membership)
    reaper = Reaper(admission, call_timeout_s=settings.probe_timeout_s, look=lambda instance: probe.look(instance))
    retries, memory = make_retries(settings), MemoryBudget(memory_budget(settings))
    sources = Sources(
        pool=pool,
        board=board,
        reaper=reaper.statistics,
        num_in_flight=lambda: len(orchestrator.records()),
        retries=retries.statistics,
        num_continued=lambda: orchestrator.num_continued,
        num_malformed=lambda: signals.num_malformed,
        descriptors=descriptors,
        memory=memory,
        role_changes=lambda: roles.ended,
    )
    keys, usage = make_keys(settings)
    metrics, recent = Metrics(sources, usage=usage, elsewhere=elsewhere), Recent()
    lag = LoopLag(metrics.loop_lagged)
    tracing = make_tracing(settings.otlp_endpoint)
    of_requests = [*observers_of(keys, usage, settings), metrics, RequestLog(), recent, tracing]
    observer = Observers([metrics, *leg_logs()], of_requests)
    counts = TokenCounts(pool, take_ids=TAKE_IDS)
    sizer = make_sizer(settings, counts)
    check = TokenizerCheck(counts, sizer.tokenizer, timeout_s=settings.probe_timeout_s)
    orchestrator = make_orchestrator(
        settings,
        admission=admission,
        pool=pool,
        board=board,
        router=router,
        sizer=sizer,
        reaper=reaper,
        retries=retries,
        observer=observer,
        descriptors=descriptors,
        notify=notify or signals.address,
    )
    probe, admin_keys = _probe(settings, pool, orchestrator, check, lag), _admin_keys(settings)
    feed = Feed(
        Snapshotter(
            pool=pool,
            orchestrator=orchestrator,
            reaper=reaper,
            traffic=Traffic(orchestrator, metrics, recent),
            elsewhere=elsewhere,
            can_change=not admin_keys.is_open,
        )
    )
    pool.on_change = feed.hurry
    watch = _file_watch(settings, pool, membership, fleet)
    caches = CacheFollowers(pool, events_addresses(settings))
    followers: list[Runner] = [
        probe.run,
        membership.run,
        feed.run,
        ended_peers.run,
        lag.run,
        descriptors.run,
        caches.run,
        roles.run,
    ]
    if settings.role_controller:
        followers.append(RoleFollower(pool, roles, time.monotonic).run)
    if watch is not None:
        followers.append(watch.run)
    if own_discovery is not None:
        followers.append(own_discovery.run)
    if (leading := discovery or own_discovery) is not None:
        followers.append(partial(leading.lead, Roster("discovery", membership, pool, present=found)))
    running = Running(signals, reaper, orchestrator, pool, sizer, tracing, followers if looks else [descriptors.run])
    app = build_app(
        generation_routes=generation_routes(settings, orchestrator, observer, keys, tracing, memory),
        pool=pool,
        orchestrator=orchestrator,
        keys=keys,
        cors_origins=cors_origins(settings),
        lifespan=running.lifespan,
        discovery=leading,
    )
    status = Status(pool, board, orchestrator, reaper, recent, descriptors, memory, elsewhere, leading)
    add_operator_routes(app, status, metrics)
    app.include_router(admin_router(pool, membership, roles, admin_keys, allow_link_local=settings.allow_link_local))
    app.router.routes.extend(dashboard_routes(feed))
    return Proxy(
        app=app,
        settings=settings,
        pool=pool,
        board=board,
        orchestrator=orchestrator,
        reaper=reaper,
        probe=probe,
        tokenizers=check,
        membership=membership,
        roles=roles,
        recent=recent,
        descriptors=descriptors,
        memory=memory,
        listen=signals.open,
        signal_address=signals.address,
        hurry=running.hurry,
        reload=None if watch is None else watch.reload,
        counts=counts,
        elsewhere=elsewhere,
    )


def unlike(fleet: Sequence[InstanceSettings], found: Iterable[Entry]) -> list[Entry]:
    """Returns those that were found which have neither name nor place of an instance that is given."""
    names, places = {one.name for one in fleet}, {one.place for one in fleet}
    return [one for one in found if one.name not in names and one.settings.place not in places]


def make_orchestrator(
    settings: Settings,
    *,
    admission: Admission,
    pool: Pool,
    board: KvBoard,
    router: Router,
    sizer: PromptSizer,
    reaper: Reaper,
    retries: RetryBudget,
    observer: Observer,
    notify: Callable[[], str],
    descriptors: DescriptorBudget | None = None,
    clock: Clock = time.monotonic,
) -> Orchestrator:
    """Returns the orchestrator, made of parts that all go by `clock`. `notify` tells where KV signals go to."""
    legs = LegRunner(
        observer,
        prefill_timeout_s=settings.prefill_timeout_s,
        first_byte_timeout_s=settings.first_byte_timeout_s,
        idle_timeout_s=settings.idle_timeout_s,
        whole_timeout_s=settings.whole_timeout_s,
        max_event_bytes=settings.max_event_bytes,
    )
    disaggregated = Disaggregated(
        legs,
        board=board,
        notify=notify,
        kv_timeout_s=settings.kv_timeout_s,
        probe_timeout_s=settings.probe_timeout_s,
        clock=clock,
    )
    options = RequestOptions(
        request_timeout_s=settings.request_timeout_s,
        slot_timeout_s=settings.slot_timeout_s,
        affinity_wait_s=settings.affinity_wait_s,
        retries=settings.retries,
        continue_limit=settings.continue_limit if settings.continue_streams else 0,
        max_answer_bytes=settings.max_answer_bytes,
        max_prompts=settings.max_prompts,
        assemble=settings.assemble,
        assemble_min_tokens=settings.assemble_min_tokens,
    )
    return Orchestrator(
        options,
        paths=PathChooser(min_prompt_tokens=settings.min_prompt_tokens, oversized=settings.oversized),
        admission=admission,
        pool=pool,
        router=router,
        sizer=sizer,
        disaggregated=disaggregated,
        legs=legs,
        reaper=reaper,
        retries=retries,
        observer=observer,
        passing=make_passing(settings, pool, retries, observer),
        descriptors=descriptors,
        clock=clock,
    )


def make_passing(settings: Settings, pool: Pool, retries: RetryBudget, observer: LegObserver) -> Passing:
    """Returns what has one instance answer a body as it is."""
    limits = PassingLimits(
        answer_s=settings.prefill_timeout_s + settings.first_byte_timeout_s,
        whole_s=settings.whole_timeout_s,
        idle_s=settings.idle_timeout_s,
        retries=settings.retries,
        max_answer_bytes=settings.max_answer_bytes,
        max_event_bytes=settings.max_event_bytes,
    )
    return Passing(pool, retries, observer, limits)


def signal_address(settings: Settings, port: int) -> str:
    """Returns the address that engines send KV signals to, which are taken on `port`. Raises `ConfigError` where that
    is no address to send to."""
    host = settings.notify_address
    host = f"[{host}]" if ":" in host else host
    return f"tcp://{host}:{settings.notify_port or port}"


class Running:
    """Running starts what runs behind the app, and stops it in order. One task group owns all of it."""

    def __init__(
        self,
        signals: Signals,
        reaper: Reaper,
        orchestrator: Orchestrator,
        pool: Pool,
        sizer: PromptSizer,
        tracing: Tracing,
        followers: Sequence[Runner],
    ) -> None:
        self._followers = followers
        self._signals = signals
        self._reaper = reaper
        self._orchestrator = orchestrator
        self._pool = pool
        self._sizer = sizer
        self._tracing = tracing
        # State: whether the end is to be a quick one; the wait for decoders, while there is one.
        self._is_hurried = False
        self._settling: anyio.CancelScope | None = None

    def hurry(self) -> None:
        """Makes the end a quick one. It may be called before the end has begun, or while it waits for decoders."""
        self._is_hurried = True
        if self._settling is not None:
            self._settling.cancel()

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        self._signals.open()
        try:
            async with anyio.create_task_group() as tasks:
                for runner in (self._signals.run, self._reaper.run, *self._followers):
                    tasks.start_soon(runner)
                yield
                await self._settle()
                tasks.cancel_scope.cancel()
        finally:
            self._signals.close()
            self._sizer.close()
            for instance in (*self._pool.instances, *self._pool.leaving):
                await instance.client.aclose()
            if not self._is_hurried:
                await self._tracing.aclose()

    async def _settle(self) -> None:
        """Stops new requests, and gives the decoders a last chance to confirm what they dropped."""
        self._orchestrator.stop_accepting()
        with anyio.move_on_after(HURRIED_SETTLE_S if self._is_hurried else SETTLE_S) as self._settling:
            await self._reaper.idle()


class Signals:
    """Signals keeps the signal socket. It is opened when the proxy starts, because it belongs to a loop, or when the
    first engine joins that signals over it. A proxy in front of other engines listens on no port but its own.

    Mutable state: the socket, its address for engines, and an event that it is open.
    """

    def __init__(self, board: KvBoard, settings: Settings, pool: Pool, port: int | None = None) -> None:
        """Takes the `port`, where the socket is opened whoever signals. Raises `ConfigError` where engines are to
        signal and have no address to send to."""
        self._board = board
        self._settings = settings
        self._pool = pool
        self._port = port
        self._address = ""
        if any(map(_signals, pool.instances)):
            signal_address(settings, 0)  # so that a mistake shows before anything is started
        self._socket: SignalSocket | None = None
        self._opened = asyncio.Event()

    def open(self) -> None:
        """Listens where an instance signals; once. Raises `ConfigError` where it cannot."""
        if self._socket is None and self._port is not None:
            self._listen(self._port)
        elif self._socket is None and any(map(_signals, self._pool.instances)):
            self._listen(self._settings.signal_port([one.settings for one in self._pool.instances]))

    def hear(self, newcomer: Instance) -> None:
        """Listens for an instance that is about to join. Raises `ConfigError` where it cannot."""
        if not _signals(newcomer):
            return
        port = self._settings.signal_port([newcomer.settings])
        if self._socket is None:
            self._listen(port)
        elif port and port != self._socket.port and self._settings.proxy_port is None:
            raise ConfigError(
                f"proxy_port: {newcomer.name!r} sends KV signals to the port that its own configuration names, and "
                f"this proxy took a free one ({self._socket.port}); start it with that port"
            )

    def _listen(self, port: int) -> None:
        settings = self._settings
        signal_address(settings, port)  # before a socket is there
        self._socket = SignalSocket(self._board, settings.proxy_host, port)
        self._address = signal_address(settings, self._socket.port)
        self._opened.set()
        log.info("KV signals are taken on port %d of %s", self._socket.port, settings.proxy_host)

    @property
    def num_malformed(self) -> int:
        return 0 if self._socket is None else self._socket.num_malformed

    def address(self) -> str:
        """Returns the address that engines send to; empty where none of them does."""
        return self._address

    async def run(self) -> None:
        await self._opened.wait()
        assert self._socket is not None
        await self._socket.run()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()


def _signals(instance: Instance) -> bool:
    """Tells whether the instance, or one of the same kind that it is paired with, sends signals to the socket."""
    return instance.adapter.traits.ready is KvReady.SIGNALS


def expected_buffers(settings: Settings) -> tuple[ExpectedBuffer, ...]:
    """Returns what a decoder's PD buffer may be by the options; empty where they do not say. Raises `ConfigError`.

    There may be two for MLA: transformers' releases cache either the latent or what is made of it.
    """
    if settings.model is None or settings.pd_buffer_size is None:
        return ()
    try:
        expected = [_expected_buffer(settings, settings.model, settings.pd_buffer_size, "latent")]
    except GeometryError as error:
        raise ConfigError(f"model, pd_buffer_size: {error}") from None
    with suppress(GeometryError):
        expected.append(_expected_buffer(settings, settings.model, settings.pd_buffer_size, "expanded"))
    return tuple(dict.fromkeys(expected))


def _expected_buffer(settings: Settings, model: Path, buffer_bytes: int, cache: str) -> ExpectedBuffer:
    """Returns what a decoder's PD buffer should be. Raises `GeometryError`, also where not even a chunk of all layers
    fits."""
    geometry = kv_geometry(
        load_config(model), tp_size=settings.tp_size, kv_cache_dtype=settings.kv_cache_dtype, cache=cache
    )
    capacity(geometry, buffer_bytes, settings.chunk_size)
    page_bytes = group_page_bytes(geometry.groups, settings.chunk_size)
    pages = buffer_bytes // page_bytes
    return ExpectedBuffer(pages=pages, page_bytes=page_bytes, chunk_size=settings.chunk_size)


def events_addresses(settings: Settings) -> Addresses:
    """Returns what tells where an instance publishes its KV events. Raises `ConfigError`."""
    port, replay_port = settings.kv_events_port, settings.kv_events_replay_port
    if replay_port is not None and port is None:
        raise ConfigError("kv_events_replay_port: needs kv_events_port, the port at which the events are published")
    return lambda one: one.events_addresses(port, replay_port)


def _probe(settings: Settings, pool: Pool, orchestrator: Orchestrator, check: TokenizerCheck, lag: LoopLag) -> Probe:
    return Probe(
        pool,
        interval_s=settings.probe_interval_s,
        timeout_s=settings.probe_timeout_s,
        compare=check.look,
        prove=orchestrator.prove if settings.canary else None,
        canary_timeout_s=settings.canary_timeout_s,
        expected=expected_buffers(settings),
        stalled_s=lag.stalled_s,
    )


def generation_routes(
    settings: Settings,
    orchestrator: Orchestrator,
    observer: RequestObserver,
    keys: ApiKeys,
    tracing: Tracing,
    memory: MemoryBudget,
) -> dict[str, GenerationRoute]:
    """Returns the generation routes by path. The engines see a client's own key where this proxy neither asks for keys
    nor has one to show them."""
    priorities = _priorities(settings)
    return {
        path: GenerationRoute(
            path,
            orchestrator,
            observer,
            max_body_bytes=settings.max_body_bytes,
            body_timeout_s=settings.body_timeout_s,
            memory=memory,
            priorities=priorities,
            keys=keys,
            passes_authorization=keys.is_open and settings.engine_api_key is None,
            tracing=tracing,
        )
        for path in (COMPLETIONS, CHAT, RESPONSES, MESSAGES, *PASSED)
    }


def make_keys(settings: Settings, num_parts: int = 1) -> tuple[ApiKeys, KeyUsage]:
    """Returns the keys of clients, and what counts their use. This process enforces one of `num_parts` equal parts of
    their limits. Raises `ConfigError`."""
    keys = ApiKeys(settings.api_keys, settings.api_keys_file, num_parts=num_parts, names_all=settings.usage_log)
    return keys, KeyUsage(logs=settings.usage_log)


def observers_of(keys: ApiKeys, usage: KeyUsage, settings: Settings) -> list[RequestObserver]:
    """Returns `usage` where anything can be charged or is to be logged: else it costs nothing."""
    return [usage] if keys.may_have_names or settings.usage_log else []


def memory_budget(settings: Settings, num_processes: int = 1) -> int:
    """Returns the bytes of one process's part of the memory budget. Raises `ConfigError` where no body of the largest
    size would fit in."""
    least = least_budget(BODY_COPIES * settings.max_body_bytes)
    if settings.memory_budget is None:
        return max(allowed_bytes() // MEMORY_SHARE // num_processes, least)
    if settings.memory_budget < least:
        raise ConfigError(
            f"memory_budget: {settings.memory_budget} bytes are too few for one body of max_body_bytes "
            f"({settings.max_body_bytes}), which counts twice, and small ones beside it; give at least {least}, or "
            "allow smaller bodies"
        )
    return max(settings.memory_budget // num_processes, least)


def cors_origins(settings: Settings) -> tuple[str, ...]:
    """Returns the origins that may ask. Raises `ConfigError` for what a browser would never call an origin."""
    for origin in settings.cors_origins:
        url = urlsplit(origin)
        if origin != "*" and f"{url.scheme}://{url.netloc}" != origin:
            raise ConfigError(f"cors_origins: {origin!r} is no origin; give scheme://host[:port], without a path, or *")
    return settings.cors_origins


def _priorities(settings: Settings) -> PriorityLimits:
    try:
        return PriorityLimits(least=settings.min_priority, most=settings.max_priority)
    except ValueError as error:
        raise ConfigError(f"min_priority, max_priority: {error}") from None


def make_role_changes(settings: Settings, pool: Pool, membership: Membership) -> RoleChanges:
    return RoleChanges(
        pool, membership, timeout_s=settings.role_change_timeout_s, canary_timeout_s=settings.canary_timeout_s
    )


def make_retries(settings: Settings, clock: Clock = time.monotonic) -> RetryBudget:
    """Returns the retry budget by the options. Raises `ConfigError`."""
    try:
        return RetryBudget(share=settings.retry_share, min_per_s=settings.retry_min_per_s, clock=clock)
    except ValueError as error:
        raise ConfigError(f"retry_share, retry_min_per_s: {error}") from None


def http_client(settings: Settings, descriptors: DescriptorBudget | None = None) -> MakeClient:
    tls = _engine_tls(settings)

    def make(one: InstanceSettings) -> EngineClient:
        kind = settings.engine_client
        if kind == "relay" and not can_reach(one.url):
            raise ConfigError(f"engine_client: relay speaks no HTTPS, which {one.name!r} has; use auto or httpx")
        if kind == "httpx" or not can_reach(one.url):
            return HttpxClient(
                one.url,
                connect_timeout_s=settings.connect_timeout_s,
                api_key=settings.engine_api_key,
                tls=tls,
                descriptors=descriptors,
            )
        return Http1Client(
            one.url,
            connect_timeout_s=settings.connect_timeout_s,
            api_key=settings.engine_api_key,
            descriptors=descriptors,
        )

    return make


def _engine_tls(settings: Settings) -> ssl.SSLContext | None:
    """Returns whose certificates are trusted of engines; None for those that are trusted anyway. Raises
    `ConfigError`."""
    if settings.engine_cafile is None:
        return None
    try:
        return ssl.create_default_context(cafile=settings.engine_cafile)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"engine_cafile: {settings.engine_cafile} cannot be used: {error}") from None


def make_admission(
    settings: Settings, router: Router, clock: Clock = time.monotonic, *, claims_until: float = -math.inf
) -> Admission:
    """Returns the admission, made by the options that say which requests may wait and which may go first."""
    kernel = Kernel(
        router,
        max_overtakes=settings.max_overtakes,
        max_queue=settings.max_queue,
        concurrent_pages=settings.concurrent_pages,
        is_limited=settings.admission,
        oversubscribe=settings.oversubscribe,
        claims_until=claims_until,
        forecaster=PathByLoad() if settings.path_by_load else None,
    )
    return Admission(kernel, clock=clock)


def instance_maker(
    settings: Settings,
    admission: Admission,
    on_ended: OnEnded,
    make_client: MakeClient,
    *,
    make_adapter: MakeAdapter = make_adapter,
    clock: Clock = time.monotonic,
    kind: type[Instance] = Instance,
) -> MakeInstance:
    """Returns a function that makes instances of this `kind` as the options want them; `on_ended` is told of processes
    that have ended."""
    shapes = Shapes()
    care = HealthPolicy(
        misses=settings.probe_misses,
        successes=settings.probe_successes,
        breaker=BreakerLimits(
            consecutive_faults=settings.breaker_faults,
            cool_off_s=settings.breaker_cool_off_s,
        ),
        slow_start=SlowStart(ramp_s=settings.slow_start_s),
    )

    def make(one: InstanceSettings, is_newcomer: bool) -> Instance:
        if not settings.allow_link_local and is_link_local(urlsplit(one.url).hostname or ""):
            log.warning("%s is at %s, which is a link-local address or a cloud's metadata service", one.name, one.url)
        client, adapter = make_client(one), make_adapter(one, settings)
        traits = adapter.traits
        is_able = traits.serves_alone and (one.role == "decode" or traits.prefiller_answers)
        others = settings.when_no_prefiller if one.role == "decode" else settings.when_no_decoder
        instance = kind(
            one,
            client=client,
            adapter=adapter,
            admission=admission,
            shapes=shapes,
            care=care,
            on_ended=on_ended,
            is_newcomer=is_newcomer,
            serves_alone=is_able and others == "local",
            clock=clock,
        )
        if settings.path_by_load:
            instance.pace = Pace()
        if isinstance(client, Http1Client):
            # An engine that ends an idle connection may have gone: it is looked at now, not only at the next probe.
            client.on_lost(instance.look_soon)
        return instance

    return make


def make_router(settings: Settings, rng: random.Random) -> Router:
    """Returns a router with the policies that the options name; `rng` is for what they leave to chance."""
    options = PolicyOptions(
        rng=rng,
        chunk_size=settings.chunk_size,
        prefix_chunks=settings.prefix_chunks,
        load_factor=settings.prefix_load_factor,
    )
    return Router(
        prefill_policy=make_policy(settings.prefill_policy, options),
        decode_policy=make_policy(settings.decode_policy, replace(options, fallback="least_resident", is_decode=True)),
        session_header=settings.session_header,
    )


def _file_watch(
    settings: Settings, pool: Pool, membership: Membership, fleet: Sequence[InstanceSettings]
) -> FileWatch | None:
    """Returns what keeps the fleet as the file wants it, where there is a file."""
    if settings.config is None:
        return None
    return FileWatch(
        settings.config,
        _reader(settings),
        Roster(str(settings.config), membership, pool, present=map(Entry, fleet)),
        interval_s=settings.watch_interval_s if settings.watch_config else None,
    )


def _reader(settings: Settings) -> Callable[[], tuple[InstanceSettings, ...]]:
    """Returns what reads the fleet from the file, and tells of options that have changed there too: they are not
    followed."""
    told: list[str] = []

    def read() -> tuple[InstanceSettings, ...]:
        fresh = settings.reread()
        fleet = fresh.fleet()
        names = Settings.model_fields.keys() - {"instances"}
        changed = sorted(name for name in names if getattr(fresh, name) != getattr(settings, name))
        changed += ["instances (dns+http://)"] * (fresh.services() != settings.services())
        if changed and changed != told:
            log.warning(
                "%s: %s changed; that needs a start, only [[instances]] are followed",
                settings.config,
                _as_subject(changed),
            )
        told[:] = changed
        return fleet

    return read


def _as_subject(names: Sequence[str]) -> str:
    return f"{', '.join(names)} {'has' if len(names) == 1 else 'have'}"


def _admin_keys(settings: Settings) -> ApiKeys:
    """Returns the keys of the admin API. Raises `ConfigError`."""
    keys = () if settings.admin_key is None else (settings.admin_key,)
    return ApiKeys(keys, settings.admin_key_file, option="admin_key_file")
