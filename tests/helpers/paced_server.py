"""A process that answers completions after delays that it draws, and tells when it really wrote: `GET /truth`.

    python tests/helpers/paced_server.py --seed 1 --first-ms 20,80 --gap-ms 5,15 [--stall-at 1.5 --stall-s 2]

Its times are the machine's monotonic clock's, which all of its processes share. Each answer has a number in its head,
under which the truth of it is told: on a busy machine a delay is longer than it was drawn, and only then is it known.

It prints its port. With a stall it does nothing at all for so long, from so many seconds after the first request on, as
a process does that collects garbage, or whose machine swaps. Ends with its input.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Callable

STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
    b"x-pdproxy-path: paced\r\nx-pdproxy-attempt: %d\r\n\r\n"
)


def event(content: object) -> bytes:
    data = b"data: " + (content if isinstance(content, bytes) else json.dumps(content).encode()) + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


PIECE = event({"choices": [{"index": 0, "text": "w ", "finish_reason": None}]})
LAST = event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
DONE = event(b"[DONE]") + b"0\r\n\r\n"


class Paces:
    """What is drawn, and what came of it. Mutable state: the dice; when each stream's request came and its pieces were
    written, by number; whether there was a request yet."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._dice = random.Random(options.seed)
        self._first_ms = tuple(float(part) for part in options.first_ms.split(","))
        self._gap_ms = tuple(float(part) for part in options.gap_ms.split(","))
        self._stall_at = options.stall_at
        self._stall_s = options.stall_s
        self.came: list[float] = []
        self.wrote: list[list[float]] = []

    def first_s(self) -> float:
        return self._dice.uniform(*self._first_ms) / 1000

    def gap_s(self) -> float:
        return self._dice.uniform(*self._gap_ms) / 1000

    def note(self) -> int:
        """A request has come; returns its number."""
        if not self.came and self._stall_s:
            asyncio.get_running_loop().call_later(self._stall_at, time.sleep, self._stall_s)
        self.came.append(time.monotonic())
        self.wrote.append([])
        return len(self.came) - 1


class Exchange(asyncio.Protocol):
    """One connection; one request at a time."""

    def __init__(self, paces: Paces) -> None:
        self._paces = paces
        self._unread = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._unread += data
        head, blank, rest = self._unread.partition(b"\r\n\r\n")
        if not blank:
            return
        lines = head.lower().split(b"\r\n")
        length = next((int(line[15:]) for line in lines if line.startswith(b"content-length:")), 0)
        if len(rest) < length:
            return
        self._unread = rest[length:]
        if head.startswith(b"GET /truth"):
            self._whole({"came": self._paces.came, "wrote": self._paces.wrote})
        elif head.startswith(b"GET"):
            self._write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
        else:
            self._answer(json.loads(rest[:length]))

    def _answer(self, asked: dict[str, object]) -> None:
        num = asked["max_tokens"]
        assert isinstance(num, int)
        if not asked["stream"]:
            tokens = {"prompt_tokens": len(str(asked["prompt"]).split()), "completion_tokens": num}
            self._whole({"choices": [{"index": 0, "text": "w", "finish_reason": "length"}], "usage": tokens})
            return
        self._pace(self._paces.note(), num)

    def _pace(self, number: int, num: int) -> None:
        loop = asyncio.get_running_loop()
        wrote = self._paces.wrote[number]

        def say() -> None:
            head = b"" if wrote else STREAM_HEAD % number
            wrote.append(time.monotonic())
            is_last = len(wrote) == num
            self._write(head + PIECE + (LAST + DONE if is_last else b""))
            if not is_last:
                loop.call_later(self._paces.gap_s(), say)

        loop.call_later(self._paces.first_s(), say)

    def _whole(self, content: object) -> None:
        data = json.dumps(content).encode()
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        self._write(head % len(data) + data)

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)


async def until_input_ends() -> None:
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def look() -> None:
        if not sys.stdin.buffer.read1() and not ended.done():
            ended.set_result(None)

    asyncio.get_running_loop().add_reader(sys.stdin, look)
    await ended


async def serve(options: argparse.Namespace, tell: Callable[..., object] = print) -> None:
    paces = Paces(options)
    server = await asyncio.get_running_loop().create_server(lambda: Exchange(paces), "127.0.0.1", 0, backlog=4096)
    tell(server.sockets[0].getsockname()[1], flush=True)
    await until_input_ends()
    server.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first-ms", default="20,80")
    parser.add_argument("--gap-ms", default="5,15")
    parser.add_argument("--stall-at", type=float, default=0.0)
    parser.add_argument("--stall-s", type=float, default=0.0)
    asyncio.run(serve(parser.parse_args()))
