"""Data movers that share one process: pages are copied with memmove, and a test decides when, or whether, they land."""

from __future__ import annotations

import asyncio
import ctypes
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TypeVar

from transfer.agents.base import Region, WriteReceipt
from transfer.errors import PeerLost, TransferError

T = TypeVar("T")


class Fabric:
    """What connects the agents of a test: every living agent by its epoch."""

    def __init__(self) -> None:
        self.agents: dict[str, MemoryAgent] = {}


class HeldWrite:
    """A write under way: it lands, or fails, when the test says so."""

    def __init__(self, agent: MemoryAgent, peer: str, local: list[int], remote: list[int]) -> None:
        self.agent = agent
        self.peer = peer
        self.local_pages = local
        self.remote_pages = remote
        self.started = time.monotonic()
        self.future: Future[WriteReceipt] = _running()

    def land(self) -> None:
        """Copy what the local pages hold *now*, as a real write would."""
        self.agent.copy(self.peer, self.local_pages, self.remote_pages)
        num_bytes = len(self.local_pages) * self.agent.region.page_bytes
        self.future.set_result(WriteReceipt(num_bytes, self.started, time.monotonic()))

    def fail(self, error: TransferError) -> None:
        self.future.set_exception(error)


class MemoryAgent:
    """Implements `TransferAgent`. With `holds`, each write waits in `held` until it is landed or failed by the test.

    State: `region`, `users` (how often each peer is connected), `fail_next` (raised by the next write instead of it),
    `fences` (the `not_after` of each write).
    """

    def __init__(self, fabric: Fabric, epoch: str) -> None:
        self._fabric = fabric
        self.epoch = epoch
        self.users: Counter[str] = Counter()
        self.holds = False
        self.held: asyncio.Queue[HeldWrite] = asyncio.Queue()
        self.fail_next: TransferError | None = None
        self.fences: list[float] = []
        fabric.agents[epoch] = self

    @property
    def region(self) -> Region:
        return self._region

    def register(self, region: Region) -> Future[None]:
        self._region = region
        return _done(None)

    def metadata(self) -> Future[bytes]:
        return _done(self.epoch.encode())

    def connect(self, peer: str, metadata: bytes, region: Region) -> Future[None]:
        if metadata.decode() != peer or peer not in self._fabric.agents:
            return _failed(PeerLost(f"{peer} is not there"))
        assert region == self._fabric.agents[peer].region
        self.users[peer] += 1
        return _done(None)

    def write(
        self, peer: str, local_pages: Sequence[int], remote_pages: Sequence[int], *, not_after: float
    ) -> Future[WriteReceipt]:
        self.fences.append(not_after)
        error, self.fail_next = self.fail_next, None
        if error is None and time.monotonic() > not_after:
            error = PeerLost("too late")
        if error is None and (self.users[peer] < 1 or peer not in self._fabric.agents):
            error = PeerLost(f"not connected to {peer}")
        if error is not None:
            return _failed(error)
        write = HeldWrite(self, peer, list(local_pages), list(remote_pages))
        if self.holds:
            self.held.put_nowait(write)
        else:
            write.land()
        return write.future

    def disconnect(self, peer: str) -> Future[None]:
        self.users[peer] -= 1
        return _done(None)

    def close(self) -> None:
        """Also what a test calls to have this agent's process die."""
        self._fabric.agents.pop(self.epoch, None)

    def copy(self, peer: str, local_pages: Sequence[int], remote_pages: Sequence[int]) -> None:
        remote = self._fabric.agents[peer].region
        for ours, theirs in zip(local_pages, remote_pages, strict=True):
            assert 0 <= theirs < remote.num_pages
            size = self.region.page_bytes
            source = self.region.base_address + ours * size
            ctypes.memmove(remote.base_address + theirs * remote.page_bytes, source, size)


def _running() -> Future[T]:
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()
    return future


def _done(value: T) -> Future[T]:
    future: Future[T] = _running()
    future.set_result(value)
    return future


def _failed(error: Exception) -> Future[T]:
    future: Future[T] = _running()
    future.set_exception(error)
    return future
