"""What every `TransferAgent` owes its callers: the same tests for the mock and for NIXL, two agents in one process."""

from __future__ import annotations

import math
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.helpers.device_slab import Slab
from tests.helpers.events import Broken, Happening
from tests.helpers.on_device import DEVICE, IS_GPU, ucx_tls
from transfer.agents.base import Event, Spans, TransferAgent, WriteReceipt
from transfer.agents.mock import MockAgent, MockFabric
from transfer.agents.spans import as_spans, total_bytes
from transfer.errors import PeerLost, TransferError

SIZE = 1 << 20
LIMIT_S = 10.0
FOR_EVER = math.inf
Rows = list[tuple[int, int, int]]


class Side:
    """An agent with its slab, registered."""

    def __init__(self, agent: TransferAgent) -> None:
        self.agent = agent
        self.slab = Slab(SIZE)
        self.region = self.slab.region
        agent.register(self.region).result(LIMIT_S)


class MockRig:
    """Makes mock agents."""

    def __init__(self) -> None:
        self.fabric = MockFabric()

    def agent(self, name: str, *, receives: bool) -> TransferAgent:
        return MockAgent(self.fabric, name)

    def silent_peer(self, name: str) -> Side:
        """A peer that lets no write end, from `fall_silent` on at the latest."""
        return Side(self.agent(name, receives=True))

    def fall_silent(self, name: str) -> None:
        self.fabric.freeze(name)


class NixlRig:
    """Makes NIXL agents on loopback."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        monkeypatch.setenv("UCX_NET_DEVICES", "lo")
        monkeypatch.setenv("UCX_TLS", ucx_tls("tcp,sm,self"))

    def agent(self, name: str, *, receives: bool) -> TransferAgent:
        from transfer.agents.nixl import NixlAgent

        return NixlAgent(name, receives=receives, device=DEVICE)

    def silent_peer(self, name: str) -> Side:
        self._monkeypatch.setenv("UCX_TLS", ucx_tls("tcp"))  # shared memory needs no answer
        return Side(self.agent(name, receives=False))

    def fall_silent(self, name: str) -> None:
        """It was from the start."""


@pytest.fixture(params=["mock", pytest.param("nixl", marks=pytest.mark.engine)])
def rig(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> MockRig | NixlRig:
    if request.param == "mock":
        if IS_GPU:
            pytest.skip("a mock agent copies host memory")
        return MockRig()
    pytest.importorskip("nixl", reason="the KV transfer needs NIXL (extra: engine)")
    return NixlRig(monkeypatch)


class Pair:
    """A sender full of bytes and a receiver full of zeros."""

    def __init__(self, rig: MockRig | NixlRig, receiver: Side) -> None:
        self.receiver = receiver
        self.sender = Side(rig.agent(f"sender to {receiver.agent.epoch}", receives=False))
        self.sender.slab[:] = np.random.default_rng(1).integers(1, 256, SIZE, dtype=np.uint8)

    @property
    def peer(self) -> str:
        return self.receiver.agent.epoch

    def connect(self) -> None:
        metadata = self.receiver.agent.metadata().result(LIMIT_S)
        self.sender.agent.connect(self.peer, metadata, self.receiver.region).result(LIMIT_S)

    def post(
        self, rows: Rows | Spans, *, not_after: float | Callable[[], float] = FOR_EVER, after: Event | None = None
    ) -> Future[WriteReceipt]:
        spans = rows if isinstance(rows, np.ndarray) else as_spans(rows)
        fence = not_after if callable(not_after) else lambda: not_after
        return self.sender.agent.write(self.peer, spans, not_after=fence, after=after)

    def write(self, rows: Rows | Spans, **options: Any) -> WriteReceipt:
        return self.post(rows, **options).result(LIMIT_S)

    def expected(self, rows: Rows) -> np.ndarray[Any, Any]:
        """The receiver's slab after `rows` were written into zeros; none of them may overlap another there."""
        slab = np.zeros(SIZE, dtype=np.uint8)
        for ours, theirs, size in rows:
            slab[theirs : theirs + size] = self.sender.slab[ours : ours + size]
        return slab

    def check_holds(self, rows: Rows) -> None:
        assert np.array_equal(self.receiver.slab, self.expected(rows))

    def close(self) -> None:
        self.sender.agent.close()
        self.receiver.agent.close()


@pytest.fixture
def pair(rig: MockRig | NixlRig, request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(rig, Side(rig.agent(f"receiver of {request.node.name}", receives=True)))
    yield pair
    pair.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(("nixl-", "mock-"))]


def fails(future: Future[Any], kind: type[TransferError] = TransferError, match: str | None = None) -> TransferError:
    with pytest.raises(kind, match=match) as caught:
        future.result(LIMIT_S)
    return caught.value


def first_failure(futures: Iterator[Future[Any]]) -> BaseException | None:
    """A peer's end may be noticed a write late, where both share memory."""
    return next((error for future in futures if (error := future.exception(LIMIT_S)) is not None), None)


# ── bytes ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_spans_land_where_they_belong_and_nowhere_else(pair: Pair) -> None:
    pair.connect()
    rows = [(4096, 0, 4096), (3, 70_001, 17), (SIZE - 1, 65_536, 1), (0, SIZE - 9, 9)]
    receipt = pair.write(rows)
    pair.check_holds(rows)
    assert receipt.num_bytes == 4096 + 17 + 1 + 9
    assert receipt.started <= receipt.finished <= time.monotonic()


def random_rows(rng: random.Random) -> Rows:
    """Runs of neighbours with gaps between them at the peer; some touch there and not here, or are read twice here."""
    rows: Rows = []
    theirs = rng.randrange(100)
    while theirs < SIZE - 10_000 and len(rows) < 200:
        ours = rng.randrange(SIZE - 10_000)
        for _ in range(rng.choice([1, 1, 2, 5])):
            size = rng.choice([1, 3, 64, 500, 1024])
            rows.append((ours, theirs, size))
            ours, theirs = ours + size, theirs + size
        theirs += rng.choice([0, 0, 1, 4096])
    return rows


def test_random_spans_byte_by_byte(pair: Pair) -> None:
    seed = int(os.environ.get("SEED", random.randrange(1 << 32)))
    print(f"SEED={seed}")
    rng = random.Random(seed)
    pair.connect()
    for _ in range(10):
        pair.receiver.slab[:] = 0
        rows = random_rows(rng)
        assert pair.write(rows).num_bytes == sum(size for _, _, size in rows)
        pair.check_holds(rows)


def test_ten_thousand_small_spans(pair: Pair) -> None:
    pair.connect()
    order = np.random.default_rng(2).permutation(10_000)
    spans = np.empty((10_000, 3), dtype=np.int64)
    spans[:, 0], spans[:, 1], spans[:, 2] = np.arange(10_000) * 64, order * 64, 64
    assert pair.write(spans).num_bytes == 640_000 == total_bytes(spans)
    ours = pair.sender.slab[:640_000].reshape(-1, 64)
    assert np.array_equal(pair.receiver.slab[:640_000].reshape(-1, 64)[order], ours)
    assert not pair.receiver.slab[640_000:].any()


def test_no_spans_are_a_write_of_nothing(pair: Pair) -> None:
    fails(pair.post([]), PeerLost)
    pair.connect()
    assert pair.write([]).num_bytes == 0
    fails(pair.post([], not_after=time.monotonic() - 1), PeerLost)
    pair.check_holds([])


def test_writes_to_a_peer_overlap(pair: Pair) -> None:
    pair.connect()
    rows = [(page * 4096, (15 - page) * 4096, 4096) for page in range(16)]
    for write in [pair.post([row]) for row in rows]:
        write.result(LIMIT_S)
    pair.check_holds(rows)


@pytest.mark.parametrize("row", [(0, SIZE, 1), (SIZE - 1, 0, 2), (0, -1, 1), (-8, 0, 8), (0, 0, 0), (0, 0, 1 << 62)])
def test_spans_outside_a_region_harm_nothing(pair: Pair, row: tuple[int, int, int]) -> None:
    pair.connect()
    under_way = pair.post([(0, 0, 4096)])
    error = fails(pair.post([(9, 9000, 9), row]), match="outside")
    assert not isinstance(error, PeerLost)
    under_way.result(LIMIT_S)
    pair.write([(4096, 4096, 4096)])
    pair.check_holds([(0, 0, 8192)])


def test_what_is_no_array_of_spans_harms_nothing(pair: Pair) -> None:
    pair.connect()
    fails(pair.post(np.zeros((2, 2), dtype=np.int64)), match="int64")
    pair.write([(0, 0, 1)])


# ── fence and event ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_nothing_is_written_after_the_fence(pair: Pair) -> None:
    pair.connect()
    fails(pair.post([(0, 0, 64)], not_after=time.monotonic() - 0.001), PeerLost, "too long")
    pair.check_holds([])
    pair.write([(0, 0, 64)])


def test_the_fence_is_looked_at_when_the_event_has_come(pair: Pair) -> None:
    pair.connect()
    fence = [math.inf]
    comes = Happening(then=lambda: fence.__setitem__(0, time.monotonic() - 0.01))
    late = pair.post([(0, 0, 64)], not_after=lambda: fence[0], after=comes)
    comes.set()
    fails(late, PeerLost, "too long")
    pair.check_holds([])


def test_a_fence_that_moves_on_is_no_fence(pair: Pair) -> None:
    """The peer is heard while the event is waited for."""
    pair.connect()
    fence, comes = [time.monotonic() + 0.2], Happening()
    write = pair.post([(0, 0, 64)], not_after=lambda: fence[0], after=comes)
    fence[0] += 1000
    time.sleep(0.25)  # what is tested is that it does not matter
    comes.set()
    assert write.result(LIMIT_S).num_bytes == 64


def test_the_event_is_asked_elsewhere_and_before_the_bytes_are_read(pair: Pair) -> None:
    pair.connect()

    def compute() -> None:
        pair.sender.slab[:64] = 7  # what a kernel on a GPU would still be doing

    comes = Happening(then=compute)
    write = pair.post([(0, 0, 64)], after=comes)
    assert not write.done(), "the caller does not wait for it"
    comes.set()
    write.result(LIMIT_S)
    assert comes.threads
    assert threading.current_thread() not in comes.threads
    assert (pair.receiver.slab[:64] == 7).all()


def test_a_write_that_waits_for_its_event_delays_no_other(pair: Pair) -> None:
    """Nor does it keep a connection from being made: the agent's thread asks, and never stands still."""
    pair.connect()
    never, late = Happening(), Happening()
    waiting = [pair.post([(0, 0, 64)], after=never), pair.post([(64, 64, 64)], after=late)]
    for place in range(2, 10):
        pair.write([(place * 64, place * 64, 64)])
    pair.connect()
    assert not any(write.done() for write in waiting)
    late.set()
    waiting[1].result(LIMIT_S)
    assert not waiting[0].done()
    pair.check_holds([(64, 64, 9 * 64)])
    never.set()
    waiting[0].result(LIMIT_S)


def test_an_event_that_fails_fails_its_write_alone(pair: Pair) -> None:
    pair.connect()
    error = fails(pair.post([(0, 0, 64)], after=Broken()), match="device lost")
    assert not isinstance(error, PeerLost)
    assert isinstance(error.__cause__, RuntimeError)
    pair.write([(64, 64, 64)])
    pair.check_holds([(64, 64, 64)])


def test_the_event_of_a_write_that_is_refused_is_not_asked(pair: Pair) -> None:
    pair.connect()
    event = Happening()
    fails(pair.post([(0, SIZE, 1)], after=event), match="outside")
    assert event.num_asked == 0


# ── futures ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_nothing_can_be_cancelled(pair: Pair) -> None:
    pair.connect()
    may_go = Happening()
    first = pair.post([(0, 0, 64)], after=may_go)
    agent = pair.sender.agent
    queued: list[Future[Any]] = [pair.post([(64, 64, 64)]), agent.metadata(), agent.disconnect("nobody")]
    assert not first.cancel()
    assert not any(future.cancel() for future in queued)
    may_go.set()
    for future in [first, *queued]:
        future.result(LIMIT_S)
    pair.check_holds([(0, 0, 128)])


# ── connections ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_second_region_is_refused(pair: Pair) -> None:
    fails(pair.sender.agent.register(pair.sender.region), match="already")


def test_without_a_connection(pair: Pair) -> None:
    fails(pair.post([(0, 0, 1)]), PeerLost, "not connected")


def test_without_a_region_to_write_from(pair: Pair, rig: MockRig | NixlRig) -> None:
    bare = rig.agent("a sender without a slab", receives=False)
    metadata = pair.receiver.agent.metadata().result(LIMIT_S)
    bare.connect(pair.peer, metadata, pair.receiver.region).result(LIMIT_S)
    fails(bare.write(pair.peer, as_spans([(0, 0, 1)]), not_after=lambda: FOR_EVER), match="no registered region")
    bare.close()


def test_every_connect_is_undone_by_one_disconnect(pair: Pair) -> None:
    """An old session that is closed late must not take the connection of its successor along."""
    pair.connect()
    pair.connect()
    pair.sender.agent.disconnect(pair.peer).result(LIMIT_S)
    pair.write([(0, 0, 64)])
    pair.sender.agent.disconnect(pair.peer).result(LIMIT_S)
    fails(pair.post([(0, 0, 64)]), PeerLost, "not connected")
    pair.sender.agent.disconnect(pair.peer).result(LIMIT_S)
    pair.connect()
    pair.write([(64, 64, 64)])
    pair.check_holds([(0, 0, 128)])


def test_metadata_that_is_wrong(pair: Pair) -> None:
    metadata = pair.receiver.agent.metadata().result(LIMIT_S)
    fails(pair.sender.agent.connect("another", metadata, pair.receiver.region), PeerLost)
    fails(pair.sender.agent.connect(pair.peer, b"nonsense", pair.receiver.region), PeerLost)
    larger = replace(pair.receiver.region, num_bytes=SIZE + 1)
    fails(pair.sender.agent.connect(pair.peer, metadata, larger), PeerLost, "not registered")
    fails(pair.post([(0, 0, 1)]), PeerLost, "not connected")
    pair.connect()
    smaller = replace(pair.receiver.region, num_bytes=SIZE - 1)
    fails(pair.sender.agent.connect(pair.peer, metadata, smaller), match="another region")
    pair.write([(0, 0, 1)])


def test_a_peer_that_is_gone(pair: Pair, rig: MockRig | NixlRig) -> None:
    pair.connect()
    pair.write([(0, 0, 64)])
    pair.receiver.agent.close()
    error = first_failure(pair.post([(64, 64, 64)]) for _ in range(1000))
    assert isinstance(error, PeerLost)
    fails(pair.post([(64, 64, 64)]), PeerLost, "not connected")
    successor = Pair(rig, Side(rig.agent("its successor", receives=True)))
    successor.connect()
    successor.write([(0, 0, 64)])
    successor.close()


def test_a_peer_that_is_gone_does_not_disturb_the_others(pair: Pair, rig: MockRig | NixlRig) -> None:
    other = Side(rig.agent("another receiver", receives=True))
    metadata = other.agent.metadata().result(LIMIT_S)
    pair.sender.agent.connect(other.agent.epoch, metadata, other.region).result(LIMIT_S)
    pair.connect()
    pair.receiver.agent.close()
    assert isinstance(first_failure(pair.post([(0, 0, 64)]) for _ in range(1000)), PeerLost)
    pair.sender.agent.write(other.agent.epoch, as_spans([(0, 0, 64)]), not_after=lambda: FOR_EVER).result(LIMIT_S)
    assert np.array_equal(other.slab[:64], pair.sender.slab[:64])
    other.agent.close()


# ── closing ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_closed_agent_refuses_everything(pair: Pair) -> None:
    pair.connect()
    agent = pair.sender.agent
    agent.close()
    agent.close()
    refused: list[Future[Any]] = [
        pair.post([(0, 0, 1)]),
        agent.metadata(),
        agent.register(pair.sender.region),
        agent.connect(pair.peer, b"", pair.receiver.region),
        agent.disconnect(pair.peer),
    ]
    for future in refused:
        fails(future, match="closed")


def test_closing_ends_what_is_under_way(rig: MockRig | NixlRig) -> None:
    pair = Pair(rig, rig.silent_peer("a silent receiver"))
    pair.connect()
    rig.fall_silent(pair.peer)
    writes = [pair.post([(0, 0, 4096)]), pair.post([(4096, 4096, 4096)])]
    pair.sender.agent.disconnect("nobody").result(LIMIT_S)  # both have been posted by now
    time.sleep(0.01)
    assert not any(write.done() for write in writes)
    pair.sender.agent.close()
    for write in writes:
        fails(write, PeerLost, "closed during the write")
    pair.receiver.agent.close()
