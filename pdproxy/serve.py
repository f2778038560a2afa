"""Server is the process around the app: sockets, uvicorn, and an end in order.

The first signal finishes what runs, the second ends it now.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from functools import partial
from types import FrameType
from typing import Any

import anyio
import uvicorn

from pdproxy.assemble import Proxy
from pdproxy.config.settings import Settings
from pdproxy.errors import ConfigError
from pdproxy.server import process_memory as memory
from pdproxy.server.connection import ClientConnection

log = logging.getLogger(__name__)

ABORT_S = 5.0
"""Seconds that aborted requests have to tell their clients and settle."""


class Server(uvicorn.Server):
    """Server serves `proxy` until SIGTERM or SIGINT, then drains it. Raises `ConfigError` for a certificate that cannot
    be used.

    Mutable state, besides uvicorn's: `_loop`, once it runs; whether it has the process to itself.
    """

    def __init__(self, proxy: Proxy) -> None:
        settings = proxy.settings
        super().__init__(
            uvicorn.Config(
                proxy.app,
                host=settings.host,
                port=settings.port,
                http=partial(ClientConnection, routes=proxy.app.direct),  # type: ignore[arg-type]
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=75,
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

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Runs the server in a process that does nothing else, whose memory is tuned for it."""
        self._is_alone = True
        super().run(sockets)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serves until the end. Raises `ConfigError` where a port is taken, before anything is started."""
        settings = self._proxy.settings
        sockets = sockets or listeners(settings.host, settings.port)
        try:
            self._proxy.listen()
            scheme, port = "https" if self.config.is_ssl else "http", sockets[0].getsockname()[1]
            host = f"[{settings.host}]" if ":" in settings.host else settings.host
            log.info("serving on %s://%s:%d", scheme, host, port)
            await super().serve(sockets)
        finally:
            for one in sockets:
                one.close()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self._is_alone:
            memory.settle()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Takes a signal in the signal handler: it only sets flags, and tells the loop. An end in order is exit status
        0."""
        if self.should_exit and self._loop is not None:
            self.force_exit = True
            self._loop.call_soon_threadsafe(self._abort)
        self.should_exit = True

    def _abort(self) -> None:
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


def listeners(host: str, port: int) -> list[socket.socket]:
    """Returns a bound socket for every address of `host`; port 0 takes a free one. Raises `ConfigError` where that
    fails."""
    bound: list[socket.socket] = []
    try:
        for family, _, _, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            place = (address[0], bound[0].getsockname()[1], *address[2:]) if bound else address
            bound.append(_bind(family, place))
    except OSError as error:
        for one in bound:
            one.close()
        raise ConfigError(f"host, port: cannot listen on {host}:{port}: {error.strerror}") from None
    return bound


def _bind(family: int, address: tuple[Any, ...]) -> socket.socket:
    one = socket.socket(family, socket.SOCK_STREAM)
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
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
