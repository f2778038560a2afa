"""The sockets between rank 0 and another rank of one engine, and the sums that go over the first of them.

One is for the engine threads, which block on it: steps and parts of sums, in an order that both sides know. One is for
the event loops. Both are pairs of connected sockets, so that the end of a process is the end of what the other reads.

This module uses tensor methods only: the processes are forked before torch is imported.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from transfer.child_process import LENGTH_BYTES, frame
from transfer.engine.api import RankLost
from transfer.engine.ranks.messages import Step

if TYPE_CHECKING:
    import torch

TIMEOUT_S = 60.0
"""The time, in seconds, that a rank may take in the middle of a step before it counts as lost."""
FLOAT_BYTES = 4
_step: msgspec.msgpack.Decoder[Step] = msgspec.msgpack.Decoder(Step)


@dataclass(frozen=True, slots=True)
class Link:
    """A `Link` is one process's ends of the sockets to the process of rank `peer`. `pid` is that process's number where
    it is a child."""

    peer: int
    steps: socket.socket
    asks: socket.socket
    pid: int = 0

    @classmethod
    def pair(cls, index: int) -> tuple[Link, Link]:
        """Returns rank 0's ends and those of rank `index`."""
        (steps, their_steps), (asks, their_asks) = socket.socketpair(), socket.socketpair()
        return cls(index, steps, asks), cls(0, their_steps, their_asks)

    def close(self) -> None:
        """Closes both sockets. A process that reads the other ends, or a thread that is blocked on these, learns of
        it."""
        for one in (self.steps, self.asks):
            _shut(one)
            one.close()

    def break_off(self) -> None:
        """Ends the engine threads' socket. A thread that is blocked on it, here or there, gets `RankLost` at once."""
        _shut(self.steps)

    # ── for the engine threads ──────────────────────────────────────────────────────────────────────────────────────

    def send_step(self, step: Step) -> None:
        """Sends a step. Raises `RankLost` where that is not possible."""
        self._send(frame(step))

    def next_step(self) -> Step | None:
        """Waits for rank 0's next step, for as long as it has none. Returns None when rank 0 is gone."""
        self.steps.settimeout(None)
        try:
            head = self.steps.recv(LENGTH_BYTES, socket.MSG_WAITALL)
        except OSError:
            return None
        if len(head) < LENGTH_BYTES:
            return None
        data = bytearray(int.from_bytes(head))
        self._receive(memoryview(data))
        return _step.decode(data)

    def send(self, part: torch.Tensor) -> None:
        """Sends a tensor. Raises `RankLost` where that is not possible."""
        self._send(_bytes_of(part))

    def receive_like(self, part: torch.Tensor) -> torch.Tensor:
        """Waits for a tensor of this shape and dtype, `TIMEOUT_S` at most, and returns it. Raises `RankLost` where none
        comes."""
        received = part.new_empty(part.shape)
        self._receive(_bytes_of(received))
        return received

    def _send(self, data: bytes | memoryview) -> None:
        self.steps.settimeout(TIMEOUT_S)
        try:
            self.steps.sendall(data)
        except OSError as error:
            raise self._lost(error) from error

    def _receive(self, data: memoryview) -> None:
        self.steps.settimeout(TIMEOUT_S)
        try:
            while data:
                count = self.steps.recv_into(data)
                if count == 0:
                    raise ConnectionResetError("its process has ended")
                data = data[count:]
        except OSError as error:
            raise self._lost(error) from error

    def _lost(self, error: OSError) -> RankLost:
        why = f"it was silent for {TIMEOUT_S:.0f} s" if isinstance(error, TimeoutError) else str(error)
        return RankLost(f"rank {self.peer} of this engine is lost in the middle of a step: {why}")


def sum_over(links: Sequence[Link], part: torch.Tensor) -> torch.Tensor:
    """Adds up what every rank computed, in order of their ranks, so that all have the same bits. Returns the sum.

    `part` is this rank's, on any device; the sum comes back like it. 16-bit floats are added in 32 bits. Rank 0 has a
    link to each other rank, the others one to rank 0. Raises `RankLost` where a rank is lost.
    """
    wide = (part.float() if part.dtype.itemsize < FLOAT_BYTES else part).cpu().contiguous()
    if links[0].peer == 0:
        links[0].send(wide)
        total = links[0].receive_like(wide)
    else:
        total = wide.clone()
        for link in links:
            total += link.receive_like(wide)
        for link in links:
            link.send(total)
    return total.to(part.device, part.dtype)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.numpy().data.cast("B")


def _shut(one: socket.socket) -> None:
    with contextlib.suppress(OSError):  # closed before, or the other side has gone
        one.shutdown(socket.SHUT_RDWR)
