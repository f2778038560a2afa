"""The other ranks of a decoder's vLLM, as rank 0's event loop sees them. Each has a `RankThread` in a process of its
own, and one connection to here."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket

from transfer import wire
from transfer.child_process import read_message, write_message
from transfer.connectors.vllm.private_socket import remove
from transfer.connectors.vllm.rank_messages import (
    AskToTake,
    Delivered,
    Joined,
    Leaving,
    TakeEnded,
    Taken,
    WaitDelivered,
    from_rank,
)
from transfer.connectors.vllm.shared_takes import SharedTakes
from transfer.errors import TransferError

log = logging.getLogger(__name__)


class OtherRanks:
    """An `OtherRanks` hears ranks 1, 2, … up to `size`, which join at `listener`.

    A connection ends with its process. So a rank that is gone is known at once, and nobody waits for it.

    Mutable state: `takes`, set once there is a receiver; `lost`, why no rank may be waited for any more; `_slabs` and
    `_writers` of those that have joined; `_waiting`, futures of questions by rank and number.
    """

    def __init__(self, listener: socket.socket, path: str, size: int) -> None:
        self.takes: SharedTakes | None = None
        self.lost: TransferError | None = None
        self._listener = listener
        self._path = path
        self._size = size
        self._slabs: dict[int, wire.Slab] = {}
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._waiting: dict[tuple[int, int], asyncio.Future[None]] = {}
        self._numbers = itertools.count()
        self._server: asyncio.Server | None = None
        self._all_joined: asyncio.Future[None] | None = None
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<OtherRanks {sorted(self._writers)} of {self._size}, {self.lost or 'alive'}>"

    async def joined(self) -> list[wire.Slab]:
        """Waits until all have joined, and returns their slabs in order. Raises `TransferError` where one ends before
        that."""
        self._all_joined = asyncio.get_running_loop().create_future()
        self._server = await asyncio.start_unix_server(self._serve, sock=self._listener)
        try:
            await self._all_joined
        finally:
            self._server.close()
            remove(self._path)
        return [self._slabs[rank] for rank in range(1, self._size)]

    async def delivered(self) -> None:
        """Waits until `RankSlab.delivered` has returned on each of them. Raises `TransferError` where one is gone."""
        if self.lost is not None:
            raise self.lost
        number, waiting = next(self._numbers), []
        for rank, writer in self._writers.items():
            future = self._waiting[rank, number] = asyncio.get_running_loop().create_future()
            waiting.append(future)
            write_message(writer, WaitDelivered(number))
        await asyncio.gather(*waiting)

    def close(self) -> None:
        """Ends the connections. The other ranks take that for the end of this process."""
        self._is_closed = True
        if self._server is not None:
            self._server.close()
        remove(self._path)
        for writer in self._writers.values():
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rank, is_expected = None, False
        try:
            while (message := await read_message(reader, from_rank)) is not None:
                match message:
                    case Joined():
                        rank = self._join(message, writer)
                    case _ if rank is None:
                        break
                    case Leaving():
                        is_expected = True
                    case AskToTake():
                        write_message(writer, self._take(rank, message))
                    case TakeEnded():
                        self._take_ended(rank, message)
                    case Delivered():
                        future = self._waiting.pop((rank, message.number), None)
                        if future is not None and not future.done():
                            future.set_result(None)
        finally:
            self._left(rank, is_expected=is_expected)
            writer.close()

    def _join(self, message: Joined, writer: asyncio.StreamWriter) -> int:
        self._slabs[message.rank], self._writers[message.rank] = message.slab, writer
        if len(self._slabs) == self._size - 1 and self._all_joined is not None and not self._all_joined.done():
            self._all_joined.set_result(None)
        return message.rank

    def _take(self, rank: int, message: AskToTake) -> Taken:
        try:
            if self.takes is None:
                raise TransferError("rank 0 of this engine has no receiver yet")
            return Taken(message.attempt, list(self.takes.take(rank, message.attempt, message.num_tokens).written))
        except TransferError as error:
            return Taken(message.attempt, error=str(error))

    def _take_ended(self, rank: int, message: TakeEnded) -> None:
        try:
            if self.takes is not None and self.takes.is_reading(rank, message.attempt):
                self.takes.end(rank, message.attempt, is_wrong=message.is_wrong)
        except TransferError as error:
            log.warning("attempt %s was lost while rank %d read it: %s", message.attempt, rank, error)

    def _left(self, rank: int | None, *, is_expected: bool) -> None:
        """Notes that a connection is over, and with it a process."""
        if self._all_joined is not None and not self._all_joined.done():
            self._all_joined.set_exception(TransferError("another rank of this engine ended before it had joined"))
        if rank is None or self._is_closed:
            return
        self.lost = self.lost or TransferError(f"rank {rank} of this engine is gone")
        log.log(logging.INFO if is_expected else logging.ERROR, "%s: nothing can be received any more", self.lost)
        del self._writers[rank]
        for key in [key for key in self._waiting if key[0] == rank]:
            future = self._waiting.pop(key)
            if not future.done():
                future.set_exception(self.lost)
        if self.takes is not None:
            self.takes.rank_lost(rank)
