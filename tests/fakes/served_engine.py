"""A scripted engine behind a real HTTP server, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import uvicorn

from tests.fakes.fake_engine import FakeEngine, as_asgi


class Listening(uvicorn.Server):
    """A uvicorn that leaves signals alone and says which port it got."""

    async def serve_until_cancelled(self, started: asyncio.Event) -> None:
        self.config.load()
        self.lifespan = self.config.lifespan_class(self.config)
        await self.startup()
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.force_exit = True
            await self.shutdown()


def port_of(server: uvicorn.Server) -> int:
    port: int = server.servers[0].sockets[0].getsockname()[1]
    return port


@asynccontextmanager
async def served(engine: FakeEngine) -> AsyncIterator[str]:
    config = uvicorn.Config(partial(as_asgi, engine), port=0, log_config=None, lifespan="off", interface="asgi3")
    server, started = Listening(config), asyncio.Event()
    task = asyncio.create_task(server.serve_until_cancelled(started))
    await started.wait()
    yield f"http://127.0.0.1:{port_of(server)}"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
