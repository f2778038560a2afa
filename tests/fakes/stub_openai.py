"""A server of completions whose every answer a test writes by hand: when it begins, what is in it, where it stops."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

STREAM = {"content-type": "text/event-stream", "transfer-encoding": "chunked"}


class Visit:
    """One POST. Mutable state: whether a stream has begun."""

    def __init__(
        self, path: str, body: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.path = path
        self.body = body
        self._reader = reader
        self._writer = writer

    async def json(self, content: Any, status: int = 200, **headers: str) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        await self._head(status, {"content-type": "application/json", "content-length": str(len(data)), **named})
        await self._write(data)

    async def stream(self, *texts: str, **headers: str) -> None:
        """Its head, and a piece for each of these."""
        await self._head(200, STREAM | {name.replace("_", "-"): value for name, value in headers.items()})
        for text in texts:
            await self.say(text)

    async def say(self, text: str, finish: str | None = None) -> None:
        await self.event({"choices": [{"index": 0, "text": text, "delta": {"content": text}, "finish_reason": finish}]})

    async def event(self, content: Any) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        await self._chunk(b"data: " + data + b"\n\n")

    async def end(self, *, num_tokens: int | None = None) -> None:
        """As a whole stream ends."""
        num = self.body["max_tokens"] if num_tokens is None else num_tokens
        await self.event({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": num}})
        await self.event(b"[DONE]")
        await self._write(b"0\r\n\r\n")

    async def answer(self) -> None:
        """All of what was asked for, at once."""
        num = self.body["max_tokens"]
        if not self.body["stream"]:
            usage = {"prompt_tokens": 1, "completion_tokens": num}
            choice = {"index": 0, "text": "w " * num, "message": {"content": "w " * num}, "finish_reason": "length"}
            await self.json({"choices": [choice], "usage": usage})
            return
        await self.stream(*["w "] * num)
        await self.say("", "length")
        await self.end()

    async def cut(self) -> None:
        """The body ends here."""
        await self._write(b"0\r\n\r\n")

    async def gone(self) -> None:
        """Until the client has closed the connection."""
        with suppress(OSError):
            while await self._reader.read(1024):
                pass

    async def _chunk(self, data: bytes) -> None:
        await self._write(b"%x\r\n%b\r\n" % (len(data), data))

    async def _head(self, status: int, headers: dict[str, str]) -> None:
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        await self._write(f"HTTP/1.1 {status} X\r\n{lines}\r\n".encode())

    async def _write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()


class StubOpenAI:
    """Mutable state: what was asked, by POST and by GET; connections that are open."""

    def __init__(self, script: Callable[[Visit], Awaitable[None]], pages: dict[str, Any]) -> None:
        self.url = ""
        self.visits: list[Visit] = []
        self.looked_at: list[str] = []
        self._script = script
        self._pages = pages
        self._tasks: set[asyncio.Task[Any]] = set()

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await server.wait_closed()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            with suppress(asyncio.IncompleteReadError, OSError, asyncio.CancelledError):
                while True:
                    await self._request(reader, writer)
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, path, _ = head.split(" ", 2)
        lengths = [line for line in head.lower().split("\r\n") if line.startswith("content-length:")]
        body = await reader.readexactly(int(lengths[0].partition(":")[2])) if lengths else b""
        visit = Visit(path, json.loads(body) if body else {}, reader, writer)
        if method == "GET":
            self.looked_at.append(path)
            page = self._pages.get(path)
            if callable(page):
                await page(visit)
            else:
                await visit.json({"detail": "Not Found"} if page is None else page, 404 if page is None else 200)
            return
        self.visits.append(visit)
        await self._script(visit)


@asynccontextmanager
async def stub_openai(
    script: Callable[[Visit], Awaitable[None]] = Visit.answer, **pages: Any
) -> AsyncIterator[StubOpenAI]:
    """`pages`: what is at ``/name``, as JSON, or a script that answers it."""
    stub = StubOpenAI(script, {f"/{name}": page for name, page in pages.items()})
    async with stub.serve():
        yield stub
