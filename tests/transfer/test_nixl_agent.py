"""The NIXL mover with two real agents in this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from transfer.errors import PeerLost, TransferError
from transfer.memory.buffer import PagedBuffer

pytest.importorskip("nixl", reason="the KV transfer needs NIXL (extra: engine)")
from transfer.agents.nixl import NixlAgent

pytestmark = pytest.mark.engine

PAGE_BYTES = 4096
NUM_PAGES = 16
LIMIT_S = 10.0


@pytest.fixture(autouse=True)
def on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    monkeypatch.setenv("UCX_TLS", "tcp,sm,self")


class Side:
    """An agent with its slab, registered."""

    def __init__(self, name: str, *, receives: bool) -> None:
        self.agent = NixlAgent(name, receives=receives)
        self.buffer = PagedBuffer(NUM_PAGES, PAGE_BYTES)
        self.agent.register(self.buffer.region).result(LIMIT_S)


class Pair:
    def __init__(self, sender: Side, receiver: Side) -> None:
        self.sender = sender
        self.receiver = receiver
        for page in range(NUM_PAGES):
            sender.buffer.pages[page] = page + 1

    @property
    def peer(self) -> str:
        return self.receiver.agent.epoch

    def connect(self) -> None:
        metadata = self.receiver.agent.metadata().result(LIMIT_S)
        self.sender.agent.connect(self.peer, metadata, self.receiver.buffer.region).result(LIMIT_S)

    def write(self, local: list[int], remote: list[int], *, not_after: float = float("inf")) -> Future[Any]:
        return self.sender.agent.write(self.peer, local, remote, not_after=not_after)

    def received(self, pages: list[int]) -> list[int]:
        slab = self.receiver.buffer.pages
        assert all((slab[page] == slab[page][0]).all() for page in pages)
        return [int(slab[page][0]) for page in pages]


@pytest.fixture
def pair(on_loopback: None, request: pytest.FixtureRequest) -> Iterator[Pair]:
    name = request.node.name
    pair = Pair(Side(f"sender of {name}", receives=False), Side(f"receiver of {name}", receives=True))
    yield pair
    pair.sender.agent.close()
    pair.receiver.agent.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("nixl-")]


def test_pages_arrive_in_the_order_given(pair: Pair) -> None:
    pair.connect()
    receipt = pair.write([3, 1, 2, 9], [0, 5, 6, 15]).result(LIMIT_S)
    assert pair.received([0, 5, 6, 15]) == [4, 2, 3, 10]
    assert pair.received([1, 4, 7, 14]) == [0, 0, 0, 0], "no other page was touched"
    assert receipt.num_bytes == 4 * PAGE_BYTES
    assert receipt.started <= receipt.finished <= time.monotonic()


def test_writes_to_a_peer_overlap(pair: Pair) -> None:
    pair.connect()
    writes = [pair.write([page], [NUM_PAGES - 1 - page]) for page in range(NUM_PAGES)]
    for write in writes:
        write.result(LIMIT_S)
    assert pair.received(list(range(NUM_PAGES))) == list(range(NUM_PAGES, 0, -1))


def test_a_write_cannot_be_cancelled(pair: Pair) -> None:
    pair.connect()
    write = pair.write([0], [0])
    assert not write.cancel()
    write.result(LIMIT_S)


def test_a_job_cannot_be_cancelled_and_does_not_harm_the_thread(pair: Pair) -> None:
    """A caller that is cancelled must not leave the agent in doubt, nor dead."""
    release = threading.Event()
    pair.sender.agent._submit(lambda: release.wait(LIMIT_S))
    metadata = pair.sender.agent.metadata()
    assert not metadata.cancel()
    release.set()
    assert metadata.result(LIMIT_S)


@pytest.mark.parametrize(("local", "remote"), [([], []), ([0, 1], [0]), ([0], [NUM_PAGES]), ([-1], [0])])
def test_a_write_that_makes_no_sense_fails_alone(pair: Pair, local: list[int], remote: list[int]) -> None:
    pair.connect()
    with pytest.raises(TransferError):
        pair.write(local, remote).result(LIMIT_S)
    pair.write([1], [1]).result(LIMIT_S)
    assert pair.received([1]) == [2]


def test_nothing_is_written_after_the_fence(pair: Pair) -> None:
    pair.connect()
    with pytest.raises(PeerLost, match="too long"):
        pair.write([0], [0], not_after=time.monotonic() - 0.001).result(LIMIT_S)
    assert pair.received([0]) == [0]


def test_without_a_connection(pair: Pair) -> None:
    with pytest.raises(PeerLost, match="not connected"):
        pair.write([0], [0]).result(LIMIT_S)


def test_every_connect_is_undone_by_one_disconnect(pair: Pair) -> None:
    """An old session that is closed late must not take the connection of its successor along."""
    pair.connect()
    pair.connect()
    pair.sender.agent.disconnect(pair.peer).result(LIMIT_S)
    pair.write([0], [0]).result(LIMIT_S)
    pair.sender.agent.disconnect(pair.peer).result(LIMIT_S)
    with pytest.raises(PeerLost):
        pair.write([0], [0]).result(LIMIT_S)
    pair.sender.agent.disconnect(pair.peer).result(LIMIT_S)
    pair.connect()
    pair.write([1], [1]).result(LIMIT_S)
    assert pair.received([0, 1]) == [1, 2]


def test_metadata_of_somebody_else(pair: Pair) -> None:
    metadata = pair.receiver.agent.metadata().result(LIMIT_S)
    region = pair.receiver.buffer.region
    with pytest.raises(PeerLost, match="belongs to agent"):
        pair.sender.agent.connect("another", metadata, region).result(LIMIT_S)
    with pytest.raises(PeerLost):
        pair.sender.agent.connect(pair.peer, b"nonsense", region).result(LIMIT_S)
    pair.connect()
    pair.write([0], [0]).result(LIMIT_S)


def test_a_second_region_is_refused(pair: Pair) -> None:
    with pytest.raises(TransferError, match="already"):
        pair.sender.agent.register(PagedBuffer(1, 64).region).result(LIMIT_S)


def test_a_closed_agent_refuses_everything(pair: Pair) -> None:
    pair.connect()
    pair.sender.agent.close()
    pair.sender.agent.close()
    for future in (pair.write([0], [0]), pair.sender.agent.metadata(), pair.sender.agent.disconnect(pair.peer)):
        with pytest.raises(TransferError, match="closed"):
            future.result(LIMIT_S)


def test_an_idle_pair_uses_no_cpu(pair: Pair) -> None:
    pair.connect()
    pair.write([0], [0]).result(LIMIT_S)
    used = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - used < 0.02
