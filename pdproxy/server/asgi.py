"""AsgiClient is a client at the other end of ASGI messages. The app may run in any server, or in none, in tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from pdproxy.errors import ProxyError
from pdproxy.orchestrator.context import Headers
from transfer.memory_budget import MemoryShare


class ClientGoneError(Exception):
    """ClientGoneError says that the client went away before its body was complete."""


class AsgiClient:
    """AsgiClient answers a client by ASGI messages. Implements `context.Client`.

    Mutable state: whether the head was sent, and whether everything was; whether the client has gone before that.
    """

    def __init__(
        self, send: Any, headers: Mapping[str, str], forwarded: Mapping[str, str], memory: MemoryShare
    ) -> None:
        self._send = send
        self.memory = memory
        self.headers = headers
        self.forwarded = forwarded
        self.is_started = False
        self.is_served = False
        self.is_gone = False

    async def start(self, status: int, headers: Headers) -> None:
        self.is_started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def send(self, chunk: bytes) -> None:
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        self.is_served = True

    async def answer(self, status: int, headers: Headers, body: bytes) -> None:
        await self.start(status, [*headers, (b"content-length", b"%d" % len(body))])
        await self.send(body)
        await self.end()

    def answer_now(self, status: int, headers: Headers, body: bytes) -> bool:
        """Returns False, because messages have to be awaited."""
        return False

    @property
    def outlet(self) -> None:
        """None, because messages have to be awaited."""
        return None

    async def watch(self, receive: Any, serving: Coroutine[Any, Any, None]) -> None:
        """Awaits `serving`, which is cancelled when the client goes away before it has everything."""
        task = asyncio.current_task()
        assert task is not None
        num_cancels = task.cancelling()
        try:
            async with asyncio.TaskGroup() as watchers:
                watcher = watchers.create_task(self._cancel_when_gone(receive, task))
                await serving
                watcher.cancel()
        except asyncio.CancelledError:
            if not self.is_gone or task.uncancel() > num_cancels:
                raise
        else:
            if self.is_gone:
                task.uncancel()

    async def _cancel_when_gone(self, receive: Any, task: asyncio.Task[Any]) -> None:
        """Cancels `task` when the client has gone. After the body, the next message of a client says so. From some
        servers it may also say that the client has the whole answer, which ends nothing."""
        while (await receive())["type"] != "http.disconnect":
            pass
        if not self.is_served:
            self.is_gone = True
            task.cancel()


async def read_body(receive: Any, objection: Callable[[int], ProxyError | None]) -> bytes:
    """Returns the body. `objection` is asked about every number of bytes that there are; what it returns is raised.
    Raises `ClientGoneError` as well."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        piece: bytes = message.get("body", b"")
        error = objection(len(body) + len(piece))
        if error is not None:
            raise error
        if not message.get("more_body", False):
            return bytes(body + piece) if body else piece
        body += piece
