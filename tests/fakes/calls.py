"""A client and its request, whichever way that goes in: what it is told, and how it leaves or takes nothing."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

LIMIT_S = 5.0

Serving = Coroutine[Any, Any, None]
Watch = Callable[[Serving], Serving]
"""Makes of a coroutine that serves a request one that is looked at meanwhile."""


async def until(condition: Callable[[], bool]) -> None:
    """For conditions that nobody announces: looked at after every turn of the loop."""
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error

    def events(self) -> list[Any]:
        """The data of every event, ``[DONE]`` as text."""
        blocks = [block for block in self.body.decode().split("\n\n") if block]
        data = [block.removeprefix("data: ") for block in blocks]
        return [text if text == "[DONE]" else json.loads(text) for text in data]

    def text(self) -> str:
        """What a streaming client has read of the first answer."""
        chunks = [event["choices"][0] for event in self.events() if event != "[DONE]" and event.get("choices")]
        choices = [choice for choice in chunks if not choice.get("index")]
        return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


@dataclass
class Sent:
    """What a client sends. `body` None: it never comes."""

    path: str
    body: bytes | None
    headers: dict[str, str] = field(default_factory=dict)
    method: str = "POST"


def as_it_is(serving: Serving) -> Serving:
    return serving


class Call(ABC):
    """One client. `pieces` are the body's as they were put on its line, taken or not."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.pieces: list[bytes] = []
        self.is_whole = False
        """The answer's end was said."""
        self.first_byte = asyncio.Event()

    @property
    @abstractmethod
    def task(self) -> asyncio.Task[None]:
        """That serves the request."""

    @abstractmethod
    def leave(self) -> None:
        """A closed connection."""

    @abstractmethod
    def block(self) -> None:
        """The client takes nothing any more."""

    @abstractmethod
    def unblock(self) -> None: ...

    @abstractmethod
    async def ended(self) -> None:
        """Until nobody serves it any more."""

    async def done(self) -> None:
        """Raises what became of its task."""
        await self.ended()
        await self.task

    async def answer(self) -> Answer:
        await self.done()
        return self.so_far()

    @property
    def is_started(self) -> bool:
        """Something was said."""
        return self.status != 0

    def so_far(self) -> Answer:
        assert self.is_started, "nothing was said"
        return Answer(self.status, self.headers, b"".join(self.pieces))


class AsgiCall(Call):
    """At the other end of ASGI messages, each of which has to be awaited.

    On a slow line receiving takes a turn of the loop, and so does sending a piece of a body; a head always fits in.
    """

    def __init__(self, app: Any, sent: Sent, *, watch: Watch = as_it_is, is_slow: bool = False) -> None:
        super().__init__()
        self._body = [] if sent.body is None else [sent.body]
        self._is_slow = is_slow
        self._gone = asyncio.Event()
        self._unblocked = asyncio.Event()
        self._unblocked.set()
        self._task = asyncio.create_task(watch(app(_scope(sent), self._receive, self._send)))

    @property
    def task(self) -> asyncio.Task[None]:
        return self._task

    def leave(self) -> None:
        self._gone.set()

    def block(self) -> None:
        self._unblocked.clear()

    def unblock(self) -> None:
        self._unblocked.set()

    async def ended(self) -> None:
        async with asyncio.timeout(LIMIT_S):
            await asyncio.wait([self._task])

    async def _receive(self) -> dict[str, Any]:
        if self._is_slow:
            await asyncio.sleep(0)
        if self._body:
            return {"type": "http.request", "body": self._body.pop(), "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            assert not self.is_started
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            return
        if self._is_slow:
            await asyncio.sleep(0)
        assert self.is_started
        assert not self.is_whole
        self.pieces += [message["body"]] if message.get("body") else []
        self.is_whole = not message.get("more_body", False)
        self.first_byte.set()
        await self._unblocked.wait()


def _scope(sent: Sent) -> dict[str, Any]:
    path, _, query = sent.path.partition("?")
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": sent.method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "scheme": "http",
        "headers": [(name.encode(), value.encode()) for name, value in sent.headers.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }
