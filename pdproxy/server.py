"""The process around the app: uvicorn, and an end in order. First signal: finish what runs; second: now."""

from __future__ import annotations

import asyncio
import logging
import socket
from types import FrameType

import anyio
import uvicorn

from pdproxy.assemble import Proxy

log = logging.getLogger(__name__)

ABORT_S = 5.0
"""For aborted requests to tell their clients and settle."""


class Server(uvicorn.Server):
    """Serves `proxy` until SIGTERM or SIGINT, then drains it.

    Mutable state, besides uvicorn's: `_loop`, once it runs.
    """

    def __init__(self, proxy: Proxy) -> None:
        settings = proxy.settings
        super().__init__(
            uvicorn.Config(
                proxy.app,
                host=settings.host,
                port=settings.port,
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=int(ABORT_S),
            )
        )
        self._proxy = proxy
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Runs in the signal handler: only flags, and a word to the loop. An end in order is exit status 0."""
        if self.should_exit and self._loop is not None:
            self.force_exit = True
            self._loop.call_soon_threadsafe(self._proxy.orchestrator.abort_all)
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting, let requests finish, cut short those that do not, then uvicorn's own end."""
        orchestrator, drain_s = self._proxy.orchestrator, self._proxy.settings.drain_timeout_s
        orchestrator.stop_accepting()
        for server in self.servers:
            server.close()
        log.info("shutting down: %d requests have %g s to finish", orchestrator.num_trips, drain_s)
        with anyio.move_on_after(drain_s):
            await orchestrator.idle()
        orchestrator.abort_all()
        with anyio.move_on_after(ABORT_S):
            await orchestrator.idle()
        await super().shutdown(sockets)
