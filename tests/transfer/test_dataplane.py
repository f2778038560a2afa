"""The data plane without an event loop, as a thread and as a process of its own: real NIXL, and a decoder beside it."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from tests.fakes.transfer_world import CHUNK, IDENTITY, KV, PAGE_BYTES, until
from transfer import wire
from transfer.agents import base
from transfer.agents.mock import MockAgent, MockFabric
from transfer.child_process import frame
from transfer.dataplane.events import NUM_SLOTS, EventPool
from transfer.errors import AttemptLost, ReservationRefused, TransferError
from transfer.memory.buffer import PagedBuffer
from transfer.memory.shared import SharedMemory, as_tensor
from transfer.roles.epochs import (
    engine_of,
    engine_part,
    engines_of,
    epoch_of_life,
    epoch_of_rank,
    is_successor,
    sender_epoch,
)
from transfer.roles.receiver import Receiver, ReceiverConfig

pytest.importorskip("nixl", reason="the KV transfer needs NIXL (extra: engine)")
from transfer.agents.nixl import NixlAgent
from transfer.dataplane.in_process import InProcess
from transfer.dataplane.own_process import OwnProcess
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


class Pair:
    """A decoder on this event loop, and a data plane whose local page i is filled with i + 1.

    The data plane of `other`, and its slab, are used where there is one that nobody has closed.
    """

    def __init__(self, kind: str, name: str, other: Pair | None = None) -> None:
        self._names = iter(range(1_000))
        self._name = name
        self.agent = NixlAgent(f"decoder of {name}", receives=True)
        self.received = PagedBuffer(NUM_PAGES, PAGE_BYTES)
        self.receiver = Receiver(self.agent, self.received, IDENTITY, CONFIG)
        self.is_started = other is not None and other.plane.over is None
        self.keeps_plane = False
        self.slab = other.slab if other and self.is_started else PagedBuffer(64, PAGE_BYTES, is_shared=True)
        for page in range(64):
            self.slab.pages[page] = page + 1
        self.home: Any
        if other and self.is_started:
            self.home, self.plane = other.home, other.plane
            return
        if kind == "process":
            self.home = OwnProcess(f"prefiller of {name}", self.slab, IDENTITY)
        else:
            make = lambda: NixlAgent(f"prefiller of {name}", receives=False)  # noqa: E731
            self.home = InProcess(make, self.slab, IDENTITY)
        self.plane = DataPlane(self.home)

    async def start(self) -> None:
        await self.receiver.start()
        if not self.is_started:
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
        if not self.keeps_plane:
            await asyncio.to_thread(self.plane.close)
        await self.receiver.aclose()
        await asyncio.to_thread(self.agent.close)


async def done(future: Any) -> Any:
    async with asyncio.timeout(LIMIT_S):
        return await asyncio.wrap_future(future)


@asynccontextmanager
async def pair_of(kind: str, name: str, other: Pair | None = None) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        pair = Pair(kind, name, other)
        stack.push_async_callback(pair.aclose)
        await pair.start()
        yield pair


@pytest.fixture(scope="module")
def before() -> Iterator[list[Pair]]:
    """The last pair whose data plane is a process, which takes seconds to start: the next test goes on with it."""
    before: list[Pair] = []
    yield before
    for pair in before:
        pair.plane.close()


@pytest.fixture(params=["thread", "process"])
async def pair(request: pytest.FixtureRequest, before: list[Pair]) -> AsyncIterator[Pair]:
    is_process = request.param == "process"
    other = before[-1] if before and is_process else None
    async with pair_of(request.param, request.node.name, other) as made:
        made.keeps_plane = is_process
        if is_process:
            before[:] = [made]
        yield made
        await made.all_free()


@pytest.fixture
async def process(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    async with pair_of("process", request.node.name) as made:
        yield made


# ── any home ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_many_threads_push_at_once(pair: Pair) -> None:
    """Layer by layer, each with an event that happens later."""
    opened: list[tuple[PlanePush, int]] = []

    def work(first_page: int) -> None:
        push = pair.open()
        push.granted.result(LIMIT_S)
        for layer in range(NUM_LAYERS):
            event = pair.plane.event()
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
        assert await pair.read(push) == [first_page + 1, first_page + 2]


async def test_the_slab_is_kept_where_the_agents_thread_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    class StuckAgent(MockAgent):
        def close(self) -> bool:
            super().close()
            return False

    kept: list[object] = []
    monkeypatch.setattr(base, "never_free", kept.append)
    slabs = {kind: PagedBuffer(NUM_PAGES, PAGE_BYTES) for kind in (MockAgent, StuckAgent)}
    for kind, slab in slabs.items():
        plane = DataPlane(InProcess(partial(kind, MockFabric(), "an agent"), slab, IDENTITY))
        await done(plane.start())
        await asyncio.to_thread(plane.close)
    assert kept == [slabs[StuckAgent]]


async def test_what_waits_for_its_event_delays_nothing_else(pair: Pair) -> None:
    waiting, event = pair.open(), pair.plane.event()
    await done(waiting.granted)
    waiting.pages_filled([0, 1], [0, 1], after=event)
    finished = waiting.finish()
    for first_page in (4, 6):
        assert await pair.send(first_page) == [first_page + 1, first_page + 2]
    assert not finished.done()
    pair.slab.pages[0] = 77  # no byte has been read before the event
    event.set()
    assert await done(finished)
    assert await pair.read(waiting) == [77, 2]


async def test_memory_is_used_again_while_the_push_goes_on(pair: Pair) -> None:
    """Behind a drain, which takes as long as something filled waits to be read, and not for what is filled later."""
    push, event = pair.open(), pair.plane.event()
    await done(push.granted)
    await done(push.drain())
    push.page_filled(0, 5, after=event)
    drained = push.drain()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await asyncio.wrap_future(drained)
    event.set()
    await done(drained)
    pair.slab.pages[5] = 99
    push.page_filled(1, 5)
    await done(push.finish())
    pair.slab.pages[5] = 6
    await done(push.ended)
    await done(push.drain())
    assert await pair.read(push) == [6, 99]
    given_up, never = pair.open(), pair.plane.event()
    await done(given_up.granted)
    given_up.page_filled(0, 0, after=never)
    drained = given_up.drain()
    given_up.abort("not wanted")
    await done(drained)


async def test_given_up_while_its_pages_are_asked_for(pair: Pair) -> None:
    first = pair.open(NUM_PAGES)
    await done(first.granted)
    second = pair.open(NUM_PAGES)
    await until(lambda: pair.receiver.reservations.num_queued == 1)
    second.abort("nobody wants it")
    with pytest.raises(AttemptLost):
        await done(second.granted)
    await done(second.ended)
    first.abort("nor this one")
    assert await done(first.failed) == "nor this one"
    with pytest.raises(AttemptLost, match="nor this one"):
        await done(first.finish())
    await done(first.ended)
    assert await pair.send() == [1, 2]


async def test_given_up_before_anything_was_asked(pair: Pair) -> None:
    push = pair.open()
    push.abort("at once")
    await done(push.ended)
    assert push.failure is not None


async def test_errors_are_those_of_a_sender(pair: Pair) -> None:
    with pytest.raises(ReservationRefused, match=r"larger|more|pages"):
        await done(pair.open(NUM_PAGES * 100).granted)
    push = pair.open()
    with pytest.raises(TransferError, match="granted"):
        push.page_filled(0, 0)
    await done(push.granted)
    push.layers_filled(0, 0, 0, NUM_LAYERS + 1)
    assert f"{NUM_LAYERS} layers" in await done(push.failed)
    await done(push.ended)


async def test_filled_twice(pair: Pair) -> None:
    push = pair.open()
    await done(push.granted)
    push.page_filled(0, 0)
    push.page_filled(0, 0)
    assert "filled twice" in await done(push.failed)
    await done(push.ended)


async def test_close_leaves_nobody_waiting(pair: Pair) -> None:
    granted, queued = pair.open(NUM_PAGES), None
    await done(granted.granted)
    queued = pair.open(NUM_PAGES)
    await asyncio.to_thread(pair.plane.close)
    await asyncio.to_thread(pair.plane.close)
    late = pair.open()
    for push in (granted, queued, late):
        assert await done(push.failed)
        await done(push.ended)
        with pytest.raises(TransferError):
            await done(push.finish())


async def test_finished_twice_is_finished_once(pair: Pair) -> None:
    push = pair.open()
    await done(push.granted)
    first, second = push.finish(), push.finish()
    push.pages_filled([0, 1], [0, 1])
    assert await done(first) == await done(second)
    await done(push.ended)
    assert await pair.read(push) == [1, 2]
    assert await pair.send(4) == [5, 6]


async def test_nothing_is_finished_before_it_is_granted(pair: Pair) -> None:
    first = pair.open(NUM_PAGES)
    await done(first.granted)
    second = pair.open(NUM_PAGES)
    with pytest.raises(TransferError, match="granted"):
        second.finish()
    for push in (second, first):
        push.abort("of no use")
        await done(push.ended)


async def test_a_push_whose_event_never_happens_ends_when_it_is_given_up(pair: Pair) -> None:
    push, event = pair.open(), pair.plane.event()
    await done(push.granted)
    push.pages_filled([0, 1], [0, 1], after=event)
    push.abort("its layer could not be computed")
    assert await done(push.failed) == "its layer could not be computed"
    await done(push.ended)
    await pair.all_free()


async def test_the_attempts_time_begins_with_the_call(pair: Pair) -> None:
    push = pair.open(timeout_s=-1.0)
    with pytest.raises(ReservationRefused, match="time was over"):
        await done(push.granted)


async def test_what_cannot_be_told_is_the_callers_to_hear_of(process: Pair) -> None:
    """And costs nobody else anything."""
    bystander = process.open()
    await done(bystander.granted)
    with pytest.raises(TransferError, match="cannot be told"):
        process.plane.open(wire.PushParams(attempt="a", receivers=[], timeout_s=2e9), num_tokens=4)
    with pytest.raises(TypeError):
        bystander.layers_filled(0, 0, 0.5, 1)  # type: ignore[arg-type]
    bystander.pages_filled(np.array([0, 1]), np.array([4, 5]))  # type: ignore[arg-type]
    await done(bystander.finish())
    assert await process.read(bystander) == [5, 6]


async def test_a_data_plane_is_started_once(pair: Pair) -> None:
    with pytest.raises(TransferError, match="started once"):
        await done(pair.plane.start())
    assert await pair.send() == [1, 2]
    await asyncio.to_thread(pair.plane.close)
    with pytest.raises(TransferError, match="started once"):
        await done(pair.plane.start())


@pytest.mark.parametrize("kind", ["thread", "process"])
async def test_closed_before_it_was_started(kind: str) -> None:
    slab = PagedBuffer(4, PAGE_BYTES, is_shared=True)
    backend: Any = OwnProcess("nobody", slab, IDENTITY)
    if kind == "thread":
        backend = InProcess(lambda: NixlAgent("nobody", receives=False), slab, IDENTITY)
    plane = DataPlane(backend)
    endpoint = wire.Endpoint(rank=0, host="127.0.0.1", port=1)
    push = plane.open(wire.PushParams(attempt="a", receivers=[endpoint], timeout_s=1.0), num_tokens=4)
    plane.close()
    assert await done(push.failed)
    await done(push.ended)
    with pytest.raises(TransferError, match="started once"):
        await done(plane.start())


async def test_close_from_a_callback(pair: Pair) -> None:
    push, closed = pair.open(), threading.Event()

    def close(_: object) -> None:
        pair.plane.close()
        closed.set()

    push.granted.add_done_callback(close)
    await done(push.ended)
    assert closed.is_set()
    await asyncio.to_thread(pair.plane.close)


async def test_opened_in_a_finalizer(pair: Pair) -> None:
    """The garbage collector calls it at any moment, perhaps in the middle of another call."""

    class Owner:
        def __init__(self, push: PlanePush) -> None:
            self.push = push

        def __del__(self) -> None:
            self.push.abort("its owner has gone")
            pushes.append(pair.open())

    pushes: list[PlanePush] = []
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(5):
            owner: Any = Owner(pair.open(1))
            owner.circle = owner
            del owner
            pair.open(1).abort("of no use")
    finally:
        gc.set_threshold(*threshold)
    # While another thread is in the middle of a collection, this one's do nothing: it may be the one to call the rest.
    await until(lambda: gc.collect() >= 0 and len(pushes) == 5)
    for push in pushes:
        push.abort("of no use")
        await done(push.ended)
    assert len(pushes) == 5


# ── a process of its own ────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_process_that_dies_costs_its_pushes_and_nothing_else(process: Pair) -> None:
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


async def test_opened_while_the_process_dies(process: Pair) -> None:
    """Whatever is begun in that moment has an end, and no decoder keeps pages for it."""
    os.kill(process.home.pid, signal.SIGKILL)
    pushes = [process.open(1, timeout_s=15.0) for _ in range(4)]
    await until(lambda: process.home.num_lives == 2)
    pushes += [process.open(1, timeout_s=15.0) for _ in range(4)]
    for push in pushes:
        try:
            await done(push.granted)
        except TransferError:
            continue
        push.page_filled(0, 0)
        await done(push.finish())
        assert await process.read(push) == [1]
    assert await process.send() == [1, 2]
    await process.all_free()


async def test_a_process_that_stands_still_delays_nobody_who_fills(process: Pair) -> None:
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


async def test_elsewhere_a_successor_tells_of_its_predecessors_death(
    process: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decoder on another machine sees no process end: it learns of it when the next one shakes hands."""
    monkeypatch.setattr("transfer.roles.receiver.is_on_this_machine", lambda _: False)
    push = process.open(4)
    await done(push.granted)
    os.kill(process.home.pid, signal.SIGKILL)
    await done(push.ended)
    assert process.receiver.reservations.num_free == NUM_PAGES - 4
    assert await process.send() == [1, 2]
    await process.all_free()


async def test_the_word_that_an_engine_is_dead_holds_for_every_life(
    process: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transfer.roles.receiver.is_on_this_machine", lambda _: False)
    os.kill(process.home.pid, signal.SIGKILL)
    await until(lambda: process.home.num_lives == 2)
    push = process.open(4)
    await done(push.granted)
    process.receiver.sender_ended(process.home._epoch)
    await process.all_free()
    with pytest.raises(ReservationRefused, match="process has ended"):
        await done(process.open().granted)
    push.abort("of no use")
    await done(push.ended)


async def test_a_process_that_talks_nonsense_is_replaced(process: Pair) -> None:
    push = process.open()
    await done(push.granted)
    read = process.home._read
    process.home._read = lambda child: frame({"type": "nonsense"})
    push.abort("whatever")  # which makes it speak
    assert "not understood" in await done(push.failed)
    process.home._read = read
    await done(push.ended)
    assert await process.send() == [1, 2]


async def test_a_process_that_stands_still_for_too_long_is_replaced(
    process: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transfer.dataplane.own_process.SILENCE_S", 0.5)
    push = process.open(timeout_s=1.0)
    await done(push.granted)
    os.kill(process.home.pid, signal.SIGSTOP)
    assert "stands still" in await done(push.failed)
    await done(push.ended)
    assert await process.send() == [1, 2]


async def test_a_fork_in_the_wrong_moment_hides_no_death(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else's child has the other end of the socket, so that it never closes."""
    strangers: list[socket.socket] = []
    make_sockets = socket.socketpair

    def kept() -> tuple[socket.socket, socket.socket]:
        ours, theirs = make_sockets()
        strangers.append(theirs.dup())
        return ours, theirs

    monkeypatch.setattr("transfer.dataplane.own_process.socket.socketpair", kept)
    async with pair_of("process", "fork") as pair:
        push = pair.open()
        await done(push.granted)
        os.kill(pair.home.pid, signal.SIGKILL)
        assert "status -9" in await done(push.failed)
        assert await pair.send() == [1, 2]
    for stranger in strangers:
        stranger.close()


async def test_an_event_of_another_plane(process: Pair) -> None:
    other = OwnProcess("other", PagedBuffer(4, PAGE_BYTES, is_shared=True), IDENTITY)
    push = process.open()
    await done(push.granted)
    with pytest.raises(TransferError, match="of this plane"):
        push.page_filled(0, 0, after=other.event())
    push.abort("of no use")
    await done(push.ended)


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


async def test_an_event_that_another_process_cannot_ask(process: Pair) -> None:
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


def test_lives_of_one_sender_are_told_apart_and_from_those_of_others() -> None:
    epochs = [
        epoch_of_life(engine, life) for engine in ("e", epoch_of_rank("e", 1), sender_epoch("e")) for life in range(11)
    ]
    assert len(set(epochs)) == len(epochs)
    for earlier in epochs:
        for later in epochs:
            is_one = engine_part(earlier) == engine_part(later)
            assert is_successor(later, earlier) == (is_one and epochs.index(later) > epochs.index(earlier))
    assert [engine_of(one) for one in ("e", "e~3", "e.1", "e.1~3")] == ["", "", "e", "e"]
    assert [engines_of(one) for one in ("e~3", "e-s", "e.1~3", "~3")] == [["e"], ["e-s"], ["e.1", "e"], []]
    assert not any(is_successor(strange, "e~1") for strange in ("e~", "e~x", "e~²", "e~99999999999", "e", "f~2"))


def test_memory_goes_with_who_refers_to_it() -> None:
    before = len(os.listdir("/proc/self/fd"))
    buffers = [PagedBuffer(4, PAGE_BYTES, is_shared=True) for _ in range(8)]
    assert len(os.listdir("/proc/self/fd")) > before
    del buffers
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before
