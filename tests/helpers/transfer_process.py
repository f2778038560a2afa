"""One end of a transfer as a process of its own, so that a test can kill it, freeze it and measure it.

Forked by `tests.helpers.zygote`; the methods of the two ends are the commands that a test can give.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import signal
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import torch

import tests.helpers.preload_nixl  # noqa: F401 (once for all that are forked)
from tests.helpers.device_slab import synchronize
from tests.helpers.events import Happening
from tests.helpers.on_device import DEVICE
from tests.helpers.sockets import listening
from transfer import wire
from transfer.agents import nixl as nixl_module
from transfer.agents.nixl import NixlAgent
from transfer.errors import AttemptLost, TransferError
from transfer.memory.buffer import PagedBuffer
from transfer.memory.reservations import Grant, Reservations
from transfer.plan.layout import KvLayout
from transfer.roles.handshake import Identity
from transfer.roles.receiver import Receiver, ReceiverConfig
from transfer.roles.sender import Push, Sender
from transfer.roles.session import Session

PAGE_BYTES = 1 << 20
NUM_PAGES = 32
NUM_LAYERS = 4
HEARTBEAT_S = 0.2
WRITER_TIMEOUT_S = 1.5
CANARY = 0xC5
KV = KvLayout.uniform(
    num_layers=NUM_LAYERS,
    num_kv_heads=1,
    head_dim=PAGE_BYTES // NUM_LAYERS // 2,
    chunk_size=1,
    dtype="uint8",
    element_bytes=1,
)
IDENTITY = Identity("m", KV.of_rank())


def fill(slab: PagedBuffer, salt: int) -> None:
    """Page i: bytes that tell pages, places in a page and senders apart."""
    places = (torch.arange(PAGE_BYTES) // 7).to(torch.uint8)
    for page in range(slab.num_pages):
        slab.pages[page] = places * (2 * page + 1) + salt
    synchronize()


def checksum(slab: PagedBuffer, pages: list[int]) -> str:
    digest = hashlib.sha256()
    for page in pages:
        digest.update(slab.pages[page].cpu().numpy().tobytes())
    return digest.hexdigest()


async def until(condition: Callable[[], bool]) -> None:
    """For what no message tells; whoever asks has a limit of its own."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.005)


class Canaries(Reservations):
    """Fills every page with `CANARY` when it is granted, before its writer is told: from then on only that writer may
    change it, and in an attempt that nobody has written yet, nobody at all.
    """

    def __init__(self, slab: PagedBuffer) -> None:
        super().__init__(slab.num_pages)
        self._slab = slab
        self.num_grants: Counter[int] = Counter()
        """How often each page has been granted."""

    def pump(self) -> list[Grant]:
        grants = super().pump()
        for grant in grants:
            self._slab.pages[grant.pages] = CANARY
            synchronize()
            self.num_grants.update(grant.pages)
        return grants

    def num_changed(self, attempt: str) -> int:
        """Bytes of this attempt's pages that are no canaries any more."""
        reservation = self.get(attempt)
        assert reservation is not None
        return sum(int((self._slab.pages[page] != CANARY).sum()) for page in reservation.pages)


class End:
    """What both ends can be asked: `idle` tells the CPU seconds used while nothing happens."""

    def __init__(self, *, receives: bool) -> None:
        self.agent = NixlAgent(uuid.uuid4().hex, receives=receives, device=DEVICE)
        self.slab = PagedBuffer(NUM_PAGES, PAGE_BYTES, DEVICE)

    async def idle(self, seconds: float) -> float:
        used = time.process_time()
        await asyncio.sleep(seconds)
        return time.process_time() - used

    async def close(self) -> None:
        await asyncio.to_thread(self.agent.close)


class ReceivingEnd(End):
    """Listens on `port`; 0: any."""

    def __init__(self, port: int = 0, writer_timeout_s: float = WRITER_TIMEOUT_S) -> None:
        super().__init__(receives=True)
        config = ReceiverConfig(port=port, heartbeat_s=HEARTBEAT_S, writer_timeout_s=writer_timeout_s)
        self.receiver = Receiver(self.agent, self.slab, IDENTITY, config)
        self.receiver._reservations = self.pages = Canaries(self.slab)
        self.is_taken, self.may_go_on = asyncio.Event(), asyncio.Event()

    async def start(self) -> list[Any]:
        await self.receiver.start()
        return [self.receiver.endpoint.host, self.receiver.endpoint.port]

    async def ready(self, attempt: str) -> None:
        await self.receiver.wait_ready(attempt)

    async def lost(self, attempt: str) -> list[Any]:
        """(why the KV of this attempt will never be here, seconds until that was known)"""
        started = time.monotonic()
        try:
            await self.receiver.wait_ready(attempt)
        except AttemptLost as error:
            return [str(error), time.monotonic() - started]
        raise AssertionError(f"{attempt} is ready")

    async def read(self, attempt: str) -> str:
        """The checksum of what was received, in order of the prompt."""
        await self.receiver.wait_ready(attempt)
        value = checksum(self.slab, self.receiver.take(attempt))
        self.receiver.consumed(attempt)
        return value

    async def num_wrong_tags(self) -> int:
        return self.receiver.num_wrong_tags

    async def copy_slowly(self, attempt: str) -> str:
        """As an engine that reads the pages, waits for `go_on`, and looks at their tags once more."""
        await self.receiver.wait_ready(attempt)
        value = checksum(self.slab, self.receiver.take(attempt))
        self.is_taken.set()
        await self.may_go_on.wait()
        try:
            self.receiver.check_tags(attempt)
        finally:
            self.receiver.consumed(attempt)
        return value

    async def taken(self, attempt: str) -> None:
        await self.is_taken.wait()

    async def go_on(self) -> None:
        self.may_go_on.set()

    async def free_pages(self, expected: int) -> float:
        """Seconds until so many pages are free."""
        started = time.monotonic()
        await until(lambda: self.pages.num_free == expected)
        self.pages.check_integrity()
        return time.monotonic() - started

    async def num_free(self) -> int:
        return self.pages.num_free

    async def num_quarantined(self) -> int:
        return self.pages.num_quarantined

    async def quarantined(self, count: int) -> None:
        """Wait until so many pages are kept from everybody, because a write may still come."""
        await until(lambda: self.pages.num_quarantined == count)

    async def queued(self, count: int) -> None:
        """Wait until so many attempts wait for pages."""
        await until(lambda: self.pages.num_queued == count)

    async def num_changed(self, attempt: str) -> int:
        return self.pages.num_changed(attempt)

    async def changed(self, attempt: str) -> None:
        """Wait for the first byte that arrives in pages of this attempt."""
        await until(lambda: self.pages.num_changed(attempt) > 0)

    async def num_reused(self) -> int:
        """Pages that were granted more than once."""
        return sum(count > 1 for count in self.pages.num_grants.values())

    async def be_elsewhere(self) -> None:
        """As on another machine: processes are not to be seen from here."""
        for epoch in list(self.receiver._watched):
            self.receiver._unwatch(epoch)
        self.receiver._watch = lambda peer: None

    async def writers(self) -> list[str]:
        """Epochs of those who may be writing."""
        return [self.receiver._peers[writer].epoch for writer in self.pages.writers]

    async def was_silent(self, epoch: str) -> None:
        """As if a sender that has an attempt had not been heard for just as long as it may be silent."""
        receiver = self.receiver
        for writer, peer in receiver._peers.items():
            if peer.epoch == epoch and writer in receiver._last_heard:
                receiver._last_heard[writer] = receiver._clock() - receiver._config.writer_timeout_s
        receiver._reset_timer()
        receiver._on_time()

    async def sender_ended(self, epoch: str) -> bool:
        return self.receiver.sender_ended(epoch)

    async def forget_writers(self, attempt: str) -> None:
        """The mistake that a receiver must never make: to use pages again while a write into them is under way."""
        reservation = self.pages.get(attempt)
        assert reservation is not None
        for writer in reservation.joined:
            for change in self.pages.writer_gone(writer, "forgotten"):
                self.receiver._follow(change)

    async def close(self) -> None:
        await self.receiver.aclose()
        await super().close()


class SendingEnd(End):
    """`salt` tells its bytes from another sender's."""

    def __init__(self, salt: int = 0) -> None:
        super().__init__(receives=False)
        fill(self.slab, salt)
        self.sender = Sender(self.agent, IDENTITY)
        self.pushes: dict[str, Push] = {}
        self.num_filled: Counter[str] = Counter()
        self.held = Happening()

    async def start(self) -> None:
        await asyncio.wrap_future(self.agent.register(self.slab.region))

    async def checksum(self, pages: list[int]) -> str:
        return checksum(self.slab, pages)

    async def open(self, host: str, port: int, attempt: str, num_pages: int, timeout_s: float) -> float:
        """The time at which the pages were granted."""
        endpoint = wire.Endpoint(rank=0, host=host, port=port)
        params = wire.PushParams(attempt=attempt, receivers=[endpoint], timeout_s=timeout_s)
        self.pushes[attempt] = await self.sender.open(params, num_tokens=num_pages)
        return time.monotonic()

    async def fill(self, attempt: str, pages: list[int]) -> None:
        """The next pages of the prompt are these local ones."""
        first = self.num_filled[attempt]
        self.num_filled[attempt] += len(pages)
        self.pushes[attempt].pages_filled(range(first, first + len(pages)), pages)

    async def fill_and_stop(self, attempt: str, pages: list[int], fence_s: float) -> None:
        """As `fill`, and stand still in the middle of the write, whose fence passes in `fence_s` seconds at the latest.
        Returns where the write was over before it was seen.

        The fence is drawn in when the write is under way: on a busy machine it would often pass before. What a GPU
        was handed goes on while the process stands still, and is over in a moment: there the write is handed over when
        the process goes on.
        """
        welcomes: list[tuple[Session, asyncio.Future[wire.Welcome]]] = []
        for rank in self.pushes[attempt]._ranks:
            welcomes.append((rank.session, asyncio.get_running_loop().create_future()))
            welcomes[-1][1].set_result(msgspec.structs.replace(rank.session.welcome, writer_timeout_s=2 * fence_s))
        nixl = self.agent._nixl
        post, is_posted, may_post = nixl.transfer, threading.Event(), threading.Event()
        if "cuda_ipc" not in os.environ["UCX_TLS"]:
            may_post.set()

        def tell_and_post(handle: Any) -> Any:
            is_posted.set()
            nixl.transfer = post
            may_post.wait()
            return post(handle)

        nixl.transfer = tell_and_post
        await self.fill(attempt, pages)
        # Without a pause: a write over shared memory takes milliseconds.
        while not is_posted.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0)
        if under_way := list(self.agent._under_way):
            for session, welcome in welcomes:
                session._welcome = welcome
            for write in under_way:
                write.read_fence()
            os.kill(os.getpid(), signal.SIGSTOP)
        may_post.set()

    async def fill_and_break(self, attempt: str, pages: list[int]) -> None:
        """As `fill`; in the middle of the write NIXL says that it has failed, and the peer is given up."""

        def fail(handle: Any) -> str:
            raise RuntimeError("a test says so")

        self.agent._nixl.check_xfer_state = fail
        await self.fill(attempt, pages)
        await self.pushes[attempt].wait_ended()

    async def go_on_whatever(self) -> None:
        """Not even end itself when it wakes in the middle of a write whose fence has passed."""
        nixl_module.NAP_S = math.inf

    async def fill_half_and_hold(self, attempt: str, page: int) -> None:
        """Half the layers of the attempt's first page; the write of the others waits on the agent's thread for `go_on`.

        Returns when half of the page has been posted and the other half is about to be.
        """
        push, half = self.pushes[attempt], NUM_LAYERS // 2
        push.layers_filled(0, page, 0, half)
        push.layers_filled(0, page, half, NUM_LAYERS, after=self.held)
        await until(lambda: self.held.num_asked > 0)

    async def go_on(self) -> None:
        self.held.set()

    async def under_way(self, count: int) -> None:
        """Wait until so many writes have been posted and none has ended."""
        await until(lambda: len(self.agent._under_way) == count)

    async def written(self, attempt: str) -> None:
        """Wait until every byte is at the receiver, which has not been told."""
        await until(lambda: all(rank.is_complete for rank in self.pushes[attempt]._ranks))

    async def finish(self, attempt: str) -> list[Any]:
        """(what came of it, seconds it took)"""
        started = time.monotonic()
        try:
            num_bytes, _ = await self.pushes[attempt].finish()
            return [num_bytes, time.monotonic() - started]
        except TransferError as error:
            return [str(error), time.monotonic() - started]

    async def failed(self, attempt: str) -> str | None:
        """Wait until the push fails, of which nobody else asks."""
        await self.pushes[attempt].failed.wait()
        return self.pushes[attempt].failure

    async def abort(self, attempt: str) -> None:
        self.pushes[attempt].abort("the test has seen enough")

    async def ended(self, attempt: str) -> None:
        await self.pushes[attempt].wait_ended()

    async def close(self) -> None:
        await self.sender.aclose()
        await super().close()


class BothEnds:
    """In one process."""

    def __init__(self) -> None:
        self._receiver, self._sender = ReceivingEnd(), SendingEnd()

    async def listeners(self) -> list[Any]:
        """(the receiver's port, all that this process listens on) when something has been transferred."""
        host, port = await self._receiver.start()
        await self._sender.start()
        await self._sender.open(host, port, "a", 2, 20.0)
        await self._sender.fill("a", [0, 1])
        await self._sender.finish("a")
        assert await self._receiver.read("a") == await self._sender.checksum([0, 1])
        return [port, listening(os.getpid())]

    async def close(self) -> None:
        await self._sender.close()
        await self._receiver.close()


ROLES = {"receiver": ReceivingEnd, "sender": SendingEnd, "both": BothEnds}
