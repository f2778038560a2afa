"""The module stands between two ends of connections and does what networks do: it breaks them, or passes nothing on,
both ways or one way only, for everybody or for some."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from enum import StrEnum
from typing import NamedTuple

from pdproxy.launch.ports import HOST

PIECE = 1 << 16


class Trouble(StrEnum):
    CUT = "cut"
    """Connections are broken, and new ones are refused."""
    SILENT = "silent"
    """Connections stay, and new ones are taken, but nothing gets through in either direction."""
    SILENT_THERE = "silent there"
    """Nothing gets through to those who listen."""
    SILENT_BACK = "silent back"
    """Nothing comes back from those who listen."""


class Rule(NamedTuple):
    """Rule is a trouble for the connections whose first bytes have `word` in them; an empty one is in all of them."""

    trouble: Trouble
    word: bytes


_SILENT = {True: (Trouble.SILENT, Trouble.SILENT_THERE), False: (Trouble.SILENT, Trouble.SILENT_BACK)}


class _Passage:
    """_Passage is one connection. Mutable state: the first bytes that came from who made it."""

    def __init__(self) -> None:
        self.first = b""
        self.writers: list[asyncio.StreamWriter] = []

    def abort(self) -> None:
        for writer in self.writers:
            writer.transport.abort()


class Partition:
    """Partition listens on `port` and forwards to `target_port`. An async context manager. What it has kept back in a
    silence is passed on afterwards, as TCP does.

    Mutable state: the `rules` in force; the passages.
    """

    def __init__(self, port: int, target_port: int) -> None:
        self.rules: set[Rule] = set()
        self._port = port
        self._target_port = target_port
        self._passages: set[_Passage] = set()
        self._changed = asyncio.Condition()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Partition:
        self._server = await asyncio.start_server(self._serve, HOST, self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.rules.clear()
        for passage in list(self._passages):
            passage.abort()
        async with self._changed:
            self._changed.notify_all()
            # Each ends by itself: of a cancelled one asyncio would speak in the log.
            await self._changed.wait_for(lambda: not self._passages)

    async def begin(self, rule: Rule) -> None:
        self.rules.add(rule)
        for passage in [one for one in self._passages if self._is_cut(one)]:
            passage.abort()

    async def end(self, rule: Rule) -> None:
        self.rules.discard(rule)
        async with self._changed:
            self._changed.notify_all()

    @property
    def num_passages(self) -> int:
        return len(self._passages)

    def _is_cut(self, passage: _Passage) -> bool:
        return any(trouble is Trouble.CUT and word in passage.first for trouble, word in self.rules)

    def _flows(self, passage: _Passage, *, is_there: bool) -> bool:
        return not any(trouble in _SILENT[is_there] and word in passage.first for trouble, word in self.rules)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        passage = _Passage()
        self._passages.add(passage)
        passage.writers.append(writer)
        try:
            if self._is_cut(passage):
                return
            far_reader, far_writer = await asyncio.open_connection(HOST, self._target_port)
            passage.writers.append(far_writer)
            async with asyncio.TaskGroup() as ways:
                ways.create_task(self._pump(passage, reader, far_writer, is_there=True))
                ways.create_task(self._pump(passage, far_reader, writer, is_there=False))
        except (OSError, ExceptionGroup):
            pass
        finally:
            passage.abort()
            self._passages.discard(passage)
            async with self._changed:
                self._changed.notify_all()

    async def _pump(
        self, passage: _Passage, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_there: bool
    ) -> None:
        is_first = is_there
        while data := await reader.read(PIECE):
            if is_first:
                is_first, passage.first = False, data
                if self._is_cut(passage):
                    raise ConnectionResetError
            if self.rules:
                async with self._changed:
                    await self._changed.wait_for(lambda: self._flows(passage, is_there=is_there))
            writer.write(data)
            await writer.drain()
        if self.rules:  # nobody hears of an end either
            async with self._changed:
                await self._changed.wait_for(lambda: self._flows(passage, is_there=is_there))
        with suppress(OSError):
            writer.write_eof()
