"""The data plane without an event loop, as a thread and as a process of its own: real NIXL, and a decoder beside it."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import torch

from tests.fakes.transfer_world import CHUNK, IDENTITY, KV, PAGE_BYTES, until
from transfer import wire
from transfer.dataplane.events import NUM_SLOTS, EventPool
from transfer.errors import AttemptLost, PeerLost, ReservationRefused, TransferError
from transfer.memory.buffer import PagedBuffer
from transfer.memory.shared import SharedMemory, as_tensor
from transfer.roles.receiver import Receiver, ReceiverConfig

pytest.importorskip("nixl", reason="the KV transfer needs NIXL (extra: engine)")
from transfer.agents.nixl import NixlAgent
from transfer.dataplane.in_process import InProcess
from transfer.dataplane.own_process import OwnProcess, epoch_of_life
from transfer.dataplane.plane import DataPlane, PlanePush

pytestmark = pytest.mark.engine

LIMIT_S = 20.0
NUM_PAGES = 8
NUM_LAYERS = len(KV.layers)
CONFIG = ReceiverConfig(heartbeat_s=1.0, writer_timeout_s=10.0)


@pytest.fixture(autouse=True)
def on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    monkeypatch.setenv("UCX_TLS", "tcp,sm,self")


class House:
    """A decoder on this event loop, and a data plane whose local page i is filled with i + 1."""

    def __init__(self, kind: str, name: str) -> None:
        self._names = iter(range(1_000))
        self._name = name
        self.agent = NixlAgent(f"decoder of {name}", receives=True)
        self.received = PagedBuffer(NUM_PAGES, PAGE_BYTES)
        self.receiver = Receiver(self.agent, self.received, IDENTITY, CONFIG)
        self.slab = PagedBuffer(64, PAGE_BYTES, is_shared=True)
        for page in range(64):
            self.slab.pages[page] = page + 1
        self.home: Any
        if kind == "process":
            self.home = OwnProcess(f"prefiller of {name}", self.slab, IDENTITY)
        else:
            make = lambda: NixlAgent(f"prefiller of {name}", receives=False)  # noqa: E731
            self.home = InProcess(make, self.slab, IDENTITY)
        self.plane = DataPlane(self.home)

    async def start(self) -> None:
        await self.receiver.start()
        await done(self.plane.start())

    def open(self, num_pages: int = 2, timeout_s: float = 30.0) -> PlanePush:
        attempt = f"{self._name}-{next(self._names)}"
        params = wire.PushParams(attempt=attempt, receivers=[self.receiver.endpoint], timeout_s=timeout_s)
        return self.plane.open(params, num_tokens=num_pages * CHUNK)

    async def read(self, push: PlanePush) -> list[int]:
        """What the decoder finds in the push's pages, each of which has one value throughout."""
        async with asyncio.timeout(LIMIT_S):
            await self.receiver.wait_ready(push.attempt)
        pages = [self.received.pages[page] for page in self.receiver.take(push.attempt)]
        assert all(bool((page == page[0]).all()) for page in pages)
        found = [int(page[0]) for page in pages]
        self.receiver.consumed(push.attempt)
        return found

    async def send(self, first_page: int = 0) -> list[int]:
        """A whole push of two pages. Returns what has arrived."""
        push = self.open()
        await done(push.granted)
        push.pages_filled([0, 1], [first_page, first_page + 1])
        assert (await done(push.finish()))[0] == 2 * PAGE_BYTES
        await done(push.ended)
        return await self.read(push)

    async def all_free(self) -> None:
        await until(lambda: self.receiver.reservations.num_free == NUM_PAGES)
        self.receiver.reservations.check_integrity()

    async def aclose(self) -> None:
        await asyncio.to_thread(self.plane.close)
        await self.receiver.aclose()
        await asyncio.to_thread(self.agent.close)


async def done(future: Any) -> Any:
    async with asyncio.timeout(LIMIT_S):
        return await asyncio.wrap_future(future)


@asynccontextmanager
async def house_of(kind: str, name: str) -> AsyncIterator[House]:
    async with AsyncExitStack() as stack:
        house = House(kind, name)
        stack.push_async_callback(house.aclose)
        await house.start()
        yield house


@pytest.fixture(params=["thread", "process"])
async def house(request: pytest.FixtureRequest) -> AsyncIterator[House]:
    async with house_of(request.param, request.node.name) as made:
        yield made
        await made.all_free()


@pytest.fixture
async def process(request: pytest.FixtureRequest) -> AsyncIterator[House]:
    async with house_of("process", request.node.name) as made:
        yield made


# ── any home ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_many_threads_push_at_once(house: House) -> None:
    """Layer by layer, each with an event that happens later."""
    opened: list[tuple[PlanePush, int]] = []

    def work(first_page: int) -> None:
        push = house.open()
        push.granted.result(LIMIT_S)
        for layer in range(NUM_LAYERS):
            event = house.plane.event()
            push.pages_filled([0, 1], [first_page, first_page + 1], layer, layer + 1, after=event)
            event.set()
        push.finish().result(LIMIT_S)
        opened.append((push, first_page))

    threads = [threading.Thread(target=work, args=(first,)) for first in (0, 10, 20, 30)]
    for thread in threads:
        thread.start()
    await asyncio.to_thread(lambda: [thread.join() for thread in threads])
    assert len(opened) == len(threads)
    for push, first_page in opened:
        assert await house.read(push) == [first_page + 1, first_page + 2]


async def test_what_waits_for_its_event_delays_nothing_else(house: House) -> None:
    waiting, event = house.open(), house.plane.event()
    await done(waiting.granted)
    waiting.pages_filled([0, 1], [0, 1], after=event)
    finished = waiting.finish()
    for first_page in (4, 6):
        assert await house.send(first_page) == [first_page + 1, first_page + 2]
    assert not finished.done()
    house.slab.pages[0] = 77  # no byte has been read before the event
    event.set()
    assert await done(finished)
    assert await house.read(waiting) == [77, 2]


async def test_given_up_while_its_pages_are_asked_for(house: House) -> None:
    first = house.open(NUM_PAGES)
    await done(first.granted)
    second = house.open(NUM_PAGES)
    await until(lambda: house.receiver.reservations.num_queued == 1)
    second.abort("nobody wants it")
    with pytest.raises(AttemptLost):
        await done(second.granted)
    await done(second.ended)
    first.abort("nor this one")
    assert await done(first.failed) == "nor this one"
    with pytest.raises(AttemptLost, match="nor this one"):
        await done(first.finish())
    await done(first.ended)
    assert await house.send() == [1, 2]


async def test_given_up_before_anything_was_asked(house: House) -> None:
    push = house.open()
    push.abort("at once")
    await done(push.ended)
    assert push.failure is not None


async def test_errors_are_those_of_a_sender(house: House) -> None:
    with pytest.raises(ReservationRefused, match=r"larger|more|pages"):
        await done(house.open(NUM_PAGES * 100).granted)
    push = house.open()
    with pytest.raises(TransferError, match="granted"):
        push.page_filled(0, 0)
    await done(push.granted)
    push.layers_filled(0, 0, 0, NUM_LAYERS + 1)
    assert f"{NUM_LAYERS} layers" in await done(push.failed)
    await done(push.ended)


async def test_filled_twice(house: House) -> None:
    push = house.open()
    await done(push.granted)
    push.page_filled(0, 0)
    push.page_filled(0, 0)
    assert "filled twice" in await done(push.failed)
    await done(push.ended)


async def test_close_leaves_nobody_waiting(house: House) -> None:
    granted, queued = house.open(NUM_PAGES), None
    await done(granted.granted)
    queued = house.open(NUM_PAGES)
    await asyncio.to_thread(house.plane.close)
    await asyncio.to_thread(house.plane.close)
    late = house.open()
    for push in (granted, queued, late):
        assert await done(push.failed)
        await done(push.ended)
        with pytest.raises(TransferError):
            await done(push.finish())


# ── a process of its own ────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_process_that_dies_costs_its_pushes_and_nothing_else(process: House) -> None:
    """The next process serves the next push; the decoder learns that the first one is dead, and frees its pages."""
    assert await process.send() == [1, 2]
    push = process.open(NUM_PAGES)
    await done(push.granted)
    first = process.home.pid
    os.kill(first, signal.SIGKILL)
    assert "status -9" in await done(push.failed)
    await done(push.ended)
    with pytest.raises(AttemptLost, match="status -9"):
        await done(push.finish())
    assert await process.send(4) == [5, 6]
    assert process.home.pid not in (first, None)
    assert process.home.epoch == epoch_of_life("prefiller of " + process._name, 1)
    await process.all_free()


async def test_opened_while_the_process_dies(process: House) -> None:
    """Whatever is begun in that moment has an end, and no decoder keeps pages for it."""
    os.kill(process.home.pid, signal.SIGKILL)
    pushes = [process.open(1, timeout_s=15.0) for _ in range(4)]
    await until(lambda: process.home.num_lives == 2)
    pushes += [process.open(1, timeout_s=15.0) for _ in range(4)]
    for push in pushes:
        try:
            await done(push.granted)
        except PeerLost:
            continue
        push.page_filled(0, 0)
        await done(push.finish())
        assert await process.read(push) == [1]
    assert await process.send() == [1, 2]
    await process.all_free()


async def test_a_process_that_stands_still_delays_nobody_who_fills(process: House) -> None:
    """More is filled than the socket has room for; all of it arrives when the process goes on."""
    push = process.open()
    await done(push.granted)
    others = [process.open(1) for _ in range(2)]
    for other in others:
        await done(other.granted)
    pid = process.home.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        padding = list(range(1, 2_000))
        while not process.home._child.outbox:
            others[0].pages_filled(padding, padding)  # which cannot be: it has one page
        push.pages_filled([0, 1], [8, 9])
        finished = push.finish()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert await done(finished)
    assert await process.read(push) == [9, 10]
    assert await done(others[0].failed)
    others[1].abort("of no use")
    await process.all_free()


ENGINE = """
import sys, time
from tests.fakes.transfer_world import IDENTITY, PAGE_BYTES
from transfer.dataplane.own_process import OwnProcess
from transfer.dataplane.plane import DataPlane
from transfer.memory.buffer import PagedBuffer

home = OwnProcess("of an engine", PagedBuffer(4, PAGE_BYTES, is_shared=True), IDENTITY)
DataPlane(home).start().result(60)
print(home.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("is_stopped", [False, True])
async def test_the_process_dies_with_its_engine(is_stopped: bool) -> None:
    """Also while it is stopped: who knows that the engine is dead knows that nothing of it will be sent."""
    import sys

    engine = await asyncio.create_subprocess_exec(sys.executable, "-c", ENGINE, stdout=asyncio.subprocess.PIPE)
    assert engine.stdout is not None
    try:
        async with asyncio.timeout(60):
            pid = int(await engine.stdout.readline())
        watched = os.pidfd_open(pid)
        if is_stopped:
            os.kill(pid, signal.SIGSTOP)
    finally:
        engine.kill()
        await engine.wait()
    over = asyncio.Event()
    asyncio.get_running_loop().add_reader(watched, over.set)
    try:
        await asyncio.wait_for(over.wait(), LIMIT_S)
    finally:
        asyncio.get_running_loop().remove_reader(watched)
        os.close(watched)


async def test_a_process_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    plane = DataPlane(OwnProcess("nobody", PagedBuffer(4, PAGE_BYTES, is_shared=True), IDENTITY))
    with pytest.raises(TransferError, match="ended with status 1"):
        await done(plane.start())
    push = plane.open(wire.PushParams(attempt="a", receivers=[], timeout_s=1.0), num_tokens=4)
    assert "status 1" in await done(push.failed)
    plane.close()


def test_memory_that_cannot_be_shared_is_refused() -> None:
    with pytest.raises(TransferError, match="is_shared=True"):
        OwnProcess("nobody", PagedBuffer(4, PAGE_BYTES), IDENTITY)


async def test_an_event_that_another_process_cannot_ask(process: House) -> None:
    class Local:
        def query(self) -> bool:
            return True

    push = process.open()
    await done(push.granted)
    with pytest.raises(TransferError, match=r"DataPlane.event\(\)"):
        push.page_filled(0, 0, after=Local())
    push.pages_filled([0, 1], [2, 3])
    await done(push.finish())
    assert await process.read(push) == [3, 4]


# ── what both sides map ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_slot_that_is_used_again_tells_nothing_of_its_last_event() -> None:
    pool = EventPool()
    first = pool.new()
    slot, count = first.slot, first.count
    del first  # it was never set
    gc.collect()
    second = next(event for event in iter(pool.new, None) if event.slot == slot)
    assert pool.flags.read(slot) < count
    second.set()
    assert second.query()
    third_like = [pool.new() for _ in range(4)]
    assert not any(event.query() for event in third_like)


def test_more_events_than_there_are_slots() -> None:
    pool = EventPool()
    events = [pool.new() for _ in range(NUM_SLOTS)]
    with pytest.raises(TransferError, match=str(NUM_SLOTS)):
        pool.new()
    events.pop()
    assert not pool.new().query()


def test_shared_memory_is_the_same_bytes_wherever_it_is_mapped() -> None:
    memory = SharedMemory.create("test", 4096)
    one, other = as_tensor(memory), as_tensor(SharedMemory(os.dup(memory.descriptor), 4096))
    one[17] = 5
    assert int(other[17]) == 5
    assert one.data_ptr() != other.data_ptr()
    assert torch.equal(one, other)


def test_no_sender_is_kept_by_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Epochs of one engine's data planes are told apart, and from those of its ranks."""
    epochs = [epoch_of_life(engine, life) for engine in ("e", "e.1", "e-s") for life in range(3)]
    assert len(set(epochs)) == len(epochs)
    assert epochs[0] == "e"
