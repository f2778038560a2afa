"""Something in between two ends of a connection that breaks it at any byte, holds bytes back, and passes on little."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress


class UnsteadyRelay:
    """Listens on `port` and forwards to `target`, in pieces of up to `max_piece` bytes. An async context manager.

    `lives` has the number of bytes after which connections end, for one connection after the other; the last one counts
    for all that follow.
    """

    def __init__(self, target: int, *, max_piece: int = 1 << 16, rng: random.Random | None = None) -> None:
        self.port = 0
        self.num_connections = 0
        self.num_cut = 0
        self.lives = [1 << 62]
        self.is_refusing = False
        self._target = target
        self._max_piece = max_piece
        self._rng = rng or random.Random(0)
        self._flows = asyncio.Event()
        self._flows.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> UnsteadyRelay:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        self.thaw()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def freeze(self) -> None:
        """Passes nothing on, and leaves all connections as they are."""
        self._flows.clear()

    def thaw(self) -> None:
        self._flows.set()

    def cut(self) -> None:
        """Ends all connections."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.num_connections += 1
        if self.is_refusing:
            writer.transport.abort()
            self._tasks.discard(task)
            return
        left = [self.lives.pop(0) if len(self.lives) > 1 else self.lives[0]]
        ends = {writer}
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
            ends.add(far_writer)
            self._writers |= ends
            ways = [
                asyncio.ensure_future(self._pump(*way, left)) for way in ((reader, far_writer), (far_reader, writer))
            ]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_EXCEPTION)
            finally:
                for one in ways:
                    one.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        except OSError:
            pass
        finally:
            for one in ends:
                one.transport.abort()
            self._writers -= ends
            self._tasks.discard(task)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, left: list[int]) -> None:
        while data := await reader.read(self._rng.randint(1, self._max_piece)):
            await self._flows.wait()
            writer.write(data[: left[0]])
            left[0] -= len(data)
            await writer.drain()
            if left[0] <= 0:
                self.num_cut += 1
                await asyncio.sleep(0)
                raise ConnectionResetError
        with suppress(OSError):
            writer.write_eof()
