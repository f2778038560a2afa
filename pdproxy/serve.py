"""Server is the process around the app: sockets, uvicorn, signals, and an end in order.

The first signal that ends it finishes what runs, the second ends it now. Where the first comes from a process manager,
new requests are still served for a while, in which load balancers notice that the proxy leaves. SIGHUP reads the
fleet's file again, and SIGUSR1 tells in the log what runs.
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context
from functools import partial
from heapq import nsmallest
from ipaddress import ip_address
from operator import itemgetter
from types import FrameType
from typing import Any, Protocol

import anyio
import msgspec
import uvicorn

from pdproxy.aio.descriptors import MESSAGE, RETRY_AFTER_S, DescriptorBudget
from pdproxy.config.settings import Settings
from pdproxy.errors import ConfigError, OutOfDescriptors
from pdproxy.fleet.pool import Pool
from pdproxy.orchestrator.error_reply import JSON, error_headers
from pdproxy.orchestrator.orchestrator import Orchestrator
from pdproxy.server import process_memory as memory
from pdproxy.server.app import App
from pdproxy.server.connection import ClientConnection
from pdproxy.server.what_runs import what_runs
from transfer.descriptors import Acceptor, raise_limit, uvicorn_connections
from transfer.memory_budget import MemoryBudget

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 75
"""Seconds for which a client's connection without a request is kept."""
REPEATED_S = 1.0
"""Seconds in which a further SIGTERM is the first one again: process managers and containers' shells send two."""
HANDSHAKE_S = 10.0
"""Seconds in which a client must have ended the TLS handshake, who otherwise costs a descriptor."""
ABORT_S = 5.0
"""Seconds that aborted requests have to tell their clients and settle."""
REST_S = 1.0
"""Seconds without a request after which a client's connection may be closed, while descriptors are short."""
LOOK_AGAIN_S = 0.1
"""Seconds between two looks for such a connection where there was none."""


class Program(Protocol):
    """Program is what a server serves: a whole proxy, or a front of one."""

    @property
    def app(self) -> App: ...

    @property
    def settings(self) -> Settings: ...

    @property
    def pool(self) -> Pool: ...

    @property
    def orchestrator(self) -> Orchestrator: ...

    @property
    def descriptors(self) -> DescriptorBudget: ...

    @property
    def memory(self) -> MemoryBudget: ...

    @property
    def listen(self) -> Callable[[], None]: ...

    @property
    def hurry(self) -> Callable[[], None]: ...

    @property
    def reload(self) -> Callable[[], None] | None: ...


class Server(uvicorn.Server):
    """Server serves `proxy` until SIGTERM, SIGQUIT or SIGINT, then drains it. Raises `ConfigError` for a certificate
    that cannot be used.

    Mutable state, besides uvicorn's: `_loop`, once it runs; whether it has the process to itself; when it was first
    asked to end, and when it ends by that, on the monotonic clock (infinite while nobody has asked); whether it ends
    because of a failure; until when it waits for clients without a request, once it is retired; until when no client is
    looked for that could be given up.
    """

    def __init__(self, proxy: Program) -> None:
        settings = proxy.settings
        super().__init__(
            uvicorn.Config(
                proxy.app,
                host=settings.host,
                port=settings.port,
                http=partial(  # type: ignore[arg-type]
                    ClientConnection,
                    routes=proxy.app.direct,
                    memory=proxy.memory,
                    descriptors=proxy.descriptors,
                    is_leaving=lambda: proxy.orchestrator.is_leaving,
                ),
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=int(ABORT_S),
                ssl_certfile=settings.ssl_certfile,
                ssl_keyfile=settings.ssl_keyfile,
                ssl_keyfile_password=settings.ssl_keyfile_password or "",
            )
        )
        _load(self.config, settings)
        self._proxy = proxy
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_alone = False
        self._asked_at = math.inf
        self._ends_at = math.inf
        self._has_failed = False
        self._patient_until: float | None = None
        self._no_spare_until = 0.0
        proxy.descriptors.give_up_client = self._give_up_client

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Runs the server in a process that does nothing else: its memory is tuned for it, and it may have as many
        descriptors as the system allows. Raises `SystemExit` with status 1 where something failed that runs behind
        requests."""
        raise_limit()
        self._is_alone = True
        super().run(sockets)
        if self._has_failed:
            raise SystemExit(1)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serves until the end. Raises `ConfigError` where a port is taken, before anything is started."""
        settings = self._proxy.settings
        sockets = sockets or listeners(settings.host, settings.port)
        try:
            self._proxy.listen()
            self.tell_address(sockets)
            await super().serve(sockets)
        finally:
            for one in sockets:
                one.close()

    def tell_address(self, sockets: list[socket.socket]) -> None:
        """Writes to the log where clients are served."""
        self.tell_place("https" if self.config.is_ssl else "http", sockets)

    def tell_place(self, scheme: str, sockets: list[socket.socket]) -> None:
        """Writes to the log that clients are served on these sockets, and whether others than this machine's may ask
        without a key."""
        settings, port = self._proxy.settings, sockets[0].getsockname()[1]
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        log.info("serving on %s://%s:%d", scheme, host, port)
        is_open = not settings.api_keys and settings.api_keys_file is None
        if is_open and not all(ip_address(one.getsockname()[0].partition("%")[0]).is_loopback for one in sockets):
            log.warning(
                "api_keys: there are none, so everybody who reaches %s:%d may ask; give --api-keys or --api-keys-file, "
                "or see that nobody else reaches it",
                host,
                port,
            )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup([])  # with no listeners: uvicorn's would reset clients when descriptors are short
        self.started = False
        descriptors, config = self._proxy.descriptors, self.config
        refusal = b"" if config.is_ssl else _refusal()
        handshake_s = HANDSHAKE_S if config.is_ssl else None
        connect = uvicorn_connections(self, ssl=config.ssl, ssl_handshake_timeout=handshake_s)
        self.servers = [
            Acceptor(one, connect, descriptors, refusal=refusal, backlog=config.backlog)  # type: ignore[misc]
            for one in sockets or []
        ]
        self.started = True
        descriptors.measure()
        log.info("%d descriptors: enough for about %d requests at once", descriptors.limit, descriptors.most_requests)
        if self._is_alone:
            memory.settle()

    def _give_up_client(self) -> bool:
        """Closes the connection of the client that has wanted nothing for the longest time, and for `REST_S` at least.
        Where there are many, it closes a hundredth of them, because to look through all takes its time. Returns False
        where there is none."""
        assert self._loop is not None
        now = self._loop.time()
        if now < self._no_spare_until:
            return False
        clients = [one for one in self.server_state.connections if isinstance(one, ClientConnection)]
        rests = [(since, one) for one in clients if (since := one.rests_since()) is not None and now - since >= REST_S]
        for _, one in nsmallest(1 + len(rests) // 100, rests, key=itemgetter(0)):
            one.transport.close()
        if not rests:
            self._no_spare_until = now + LOOK_AGAIN_S
        return bool(rests)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Takes the signals while the block runs. uvicorn takes SIGINT and SIGTERM."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        ours = {signal.SIGQUIT: self.handle_exit, signal.SIGHUP: self._handle_asked, signal.SIGUSR1: self._handle_asked}
        before = {number: signal.signal(number, handle) for number, handle in ours.items()}
        try:
            with super().capture_signals():
                yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Takes a signal in the signal handler: it only sets flags, and tells the loop. An end in order is exit status
        0."""
        now = time.monotonic()
        if self._asked_at == math.inf:
            # A person who presses Ctrl-C waits for the end, and no load balancer has to be told.
            grace_s = 0.0 if sig == signal.SIGINT else self._proxy.settings.drain_grace_s
            self._asked_at, self._ends_at = now, now + grace_s
            if self._loop is None or not self.started or grace_s == 0.0:
                self.should_exit = True
            else:
                self._loop.call_soon_threadsafe(self._leave, grace_s, context=Context())
            return
        if sig != signal.SIGINT and now - self._asked_at < REPEATED_S:
            return  # the same wish once more; a person who presses Ctrl-C twice has another
        self.should_exit = True
        if self._loop is not None:
            self.force_exit = True
            self._loop.call_soon_threadsafe(self._abort)

    def _handle_asked(self, sig: int, frame: FrameType | None) -> None:
        if self._loop is not None:
            # With no context: a signal interrupts whatever runs, and its request has nothing to do with it.
            answer = self._reload if sig == signal.SIGHUP else self._tell_what_runs
            self._loop.call_soon_threadsafe(answer, context=Context())

    def _reload(self) -> None:
        if self._proxy.reload is None:
            log.info("SIGHUP changes nothing: all instances were given by flags, and there is no file to read again")
        else:
            self._proxy.reload()

    def _tell_what_runs(self) -> None:
        for line in what_runs(self._proxy.orchestrator, self._proxy.pool):
            log.warning("%s", line)

    def _leave(self, grace_s: float) -> None:
        self._proxy.orchestrator.leave()
        log.info("leaving: new requests are served for %g s more, while /ready says 503", grace_s)

    def retire(self) -> None:
        """Takes no more clients, and ends when those it has have gone; each is told with its next answer. Requests may
        take as long as they do. Clients without one are waited for as long as they could come back."""
        self._proxy.orchestrator.leave()
        for server in self.servers:
            server.close()
        self._patient_until = time.monotonic() + KEEP_ALIVE_S

    def _is_left(self, now: float) -> bool:
        """Tells whether the server was retired and has no clients any more that matter."""
        if self._patient_until is None:
            return False
        is_patient = now < self._patient_until or self._proxy.orchestrator.num_requests > 0
        return not (is_patient and self.server_state.connections)

    async def on_tick(self, counter: int) -> bool:
        """Looks, ten times a second, whether it is time to shut down. It is where nothing runs behind requests any
        more: a proxy that looks at no engine, or follows no leader, would serve worse and worse and for ever."""
        now = time.monotonic()
        if self.started and self.lifespan.error_occurred and not self._has_failed:
            log.critical("what runs behind requests has failed, see above: this process ends, to be started again")
            self._has_failed = self.should_exit = True
        if now >= self._ends_at or self._is_left(now):
            self.should_exit = True
        return await super().on_tick(counter)

    def _abort(self) -> None:
        self._proxy.orchestrator.stop_accepting()  # so that nobody who comes now is waited for after all
        self._proxy.orchestrator.abort_all()
        self._proxy.hurry()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stops accepting, lets requests finish, cuts short those that do not, then does uvicorn's own shutdown."""
        orchestrator, drain_s = self._proxy.orchestrator, self._proxy.settings.drain_timeout_s
        orchestrator.stop_accepting()
        for server in self.servers:
            server.close()
        log.info("shutting down: %d requests have %g s to finish", orchestrator.num_requests, drain_s)
        with anyio.move_on_after(drain_s):
            await orchestrator.idle()
        orchestrator.abort_all()
        with anyio.move_on_after(ABORT_S):
            await orchestrator.idle()
        await super().shutdown(sockets)
        if self.force_exit:  # then uvicorn does not end the app, whose tasks would be torn down with the loop
            await self.lifespan.shutdown()


def _refusal() -> bytes:
    """Returns the whole answer for a client whose connection is not taken."""
    error = OutOfDescriptors(MESSAGE, retry_after_s=RETRY_AFTER_S)
    body = msgspec.json.encode(error.body())
    headers = [(b"content-type", JSON), *error_headers(error, body), (b"connection", b"close")]
    return b"HTTP/1.1 503 Service Unavailable\r\n%b\r\n%b" % (
        b"".join(b"%b: %b\r\n" % header for header in headers),
        body,
    )


def listeners(host: str, port: int, *, is_shared: bool = False) -> list[socket.socket]:
    """Returns a bound socket for every address of `host`; port 0 takes a free one. With `is_shared` others may be bound
    to the same. Raises `ConfigError` where that fails."""
    bound: list[socket.socket] = []
    try:
        for family, _, _, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            place = (address[0], bound[0].getsockname()[1], *address[2:]) if bound else address
            bound.append(_bind(family, place, is_shared))
    except OSError as error:
        for one in bound:
            one.close()
        raise ConfigError(f"host, port: cannot listen on {host}:{port}: {error.strerror}") from None
    return bound


def _bind(family: int, address: tuple[Any, ...], is_shared: bool) -> socket.socket:
    one = socket.socket(family, socket.SOCK_STREAM)
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        one.bind(address)
    except BaseException:
        one.close()
        raise
    return one


def _load(config: uvicorn.Config, settings: Settings) -> None:
    """Loads what uvicorn would load at its start: there, a file that is missing or wrong would end in a traceback.
    Raises `ConfigError`."""
    if settings.ssl_keyfile is not None and settings.ssl_certfile is None:
        raise ConfigError("ssl_certfile: needed, because ssl_keyfile is given")
    try:
        config.load()
    except OSError as error:  # ssl's own errors are among them
        files = f"{settings.ssl_certfile}, {settings.ssl_keyfile or 'and no key file'}"
        raise ConfigError(f"ssl_certfile, ssl_keyfile: cannot be used ({files}): {error}") from None
