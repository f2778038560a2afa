"""What is NIXL's alone: its handles, its settings, and what it costs to wait for it. See `test_agent_contract` too."""

from __future__ import annotations

import gc
import math
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.events import Happening
from transfer.agents.base import TAG_BYTES, TAG_COPIES, Region, WriteReceipt, close_agent
from transfer.agents.nixl_options import NixlOptions
from transfer.agents.spans import as_spans
from transfer.errors import PeerLost, TransferError

pytest.importorskip("nixl", reason="the KV transfer needs NIXL (extra: engine)")
from transfer.agents import nixl as nixl_module
from transfer.agents.nixl import NixlAgent, poll_pause_s

pytestmark = pytest.mark.engine

SIZE = 1 << 20
LIMIT_S = 10.0


@pytest.fixture(autouse=True)
def on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    monkeypatch.setenv("UCX_TLS", "tcp,sm,self")


def for_ever() -> float:
    return math.inf


class Pair:
    """A connected sender and receiver; `silent` receivers let no write end."""

    def __init__(self, name: str, options: NixlOptions | None, silent: bool) -> None:
        self.sender = NixlAgent(f"sender of {name}", receives=False, options=options)
        self.receiver = NixlAgent(f"receiver of {name}", receives=not silent, options=options)
        self.sent = np.random.default_rng(0).integers(1, 256, SIZE, dtype=np.uint8)
        self.received = np.zeros(SIZE, dtype=np.uint8)
        self.sender.register(Region(self.sent.ctypes.data, SIZE)).result(LIMIT_S)
        region = Region(self.received.ctypes.data, SIZE)
        self.receiver.register(region).result(LIMIT_S)
        metadata = self.receiver.metadata().result(LIMIT_S)
        self.sender.connect(self.receiver.epoch, metadata, region).result(LIMIT_S)

    def write(self, *rows: tuple[int, int, int]) -> Future[WriteReceipt]:
        return self.sender.write(self.receiver.epoch, as_spans(list(rows)), not_after=for_ever)

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


@pytest.fixture
def new_pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Pair]]:
    pairs: list[Pair] = []

    def make(options: NixlOptions | None = None, *, silent: bool = False) -> Pair:
        if silent:
            monkeypatch.setenv("UCX_TLS", "tcp")  # shared memory needs no answer
        pairs.append(Pair(request.node.name, options, silent))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("nixl-")]


class Spy:
    """Stands between an agent and NIXL: counts releases, and sees whether a released handle is touched again."""

    def __init__(self, agent: NixlAgent) -> None:
        self._nixl = agent._nixl
        self.released: Counter[int] = Counter()
        self.handles: list[Any] = []  # kept, so that no two have the same id
        self.state: str | None = None
        self.holds = False
        """Whether writes are said to go on for as long as that is so."""
        self.pause_s = 0.0
        """The thread stands still for so long when it has posted."""
        self.then: Callable[[], object] = lambda: None
        self.preparing_s = 0.0
        self.num_posted = 0
        self.num_removed = 0
        agent._nixl = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._nixl, name)

    def initialize_xfer(self, *arguments: Any) -> Any:
        self.handles.append(self._nixl.initialize_xfer(*arguments))
        time.sleep(self.preparing_s)
        return self.handles[-1]

    def transfer(self, handle: Any) -> str:
        assert not self.released[id(handle)]
        state = str(self._nixl.transfer(handle))
        self.num_posted += 1
        time.sleep(self.pause_s)
        self.then()
        return state

    def remove_remote_agent(self, name: str) -> None:
        self.num_removed += 1
        self._nixl.remove_remote_agent(name)

    def check_xfer_state(self, handle: Any) -> str:
        assert not self.released[id(handle)]
        state = "PROC" if self.holds else str(self._nixl.check_xfer_state(handle))
        return self.state if self.state is not None and state == "DONE" else state

    def release_xfer_handle(self, handle: Any) -> None:
        self.released[id(handle)] += 1
        self._nixl.release_xfer_handle(handle)

    def check_all_released_once(self, expected: int) -> None:
        assert [self.released[id(handle)] for handle in self.handles] == [1] * expected


# ── handles ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_tags_copies_stay_until_another_tag_needs_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_module, "NUM_STRIPS", 2)
    strips = nixl_module._Strips(torch.device("cpu"))
    tags = [bytes([number] * TAG_BYTES) for number in range(4)]
    first, second = strips.take(tags[1]), strips.take(tags[2])
    strips.give_back(tags[2])
    strips.give_back(tags[1])
    strips._memory.zero_()
    assert strips.take(tags[1]) == first, "it was the last that was used"
    assert not strips._memory.any(), "and nothing is copied anew"
    assert strips.take(tags[3]) == second
    assert bytes(strips._memory[(second - strips.address) // nixl_module.STRIP_BYTES].flatten()) == tags[3] * TAG_COPIES
    with pytest.raises(TransferError, match="2 attempts are being written at once"):
        strips.take(tags[2])


def test_on_a_gpu_a_tags_copies_are_there_before_its_first_write(
    new_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, tag = new_pair().sender, bytes(range(1, 1 + TAG_BYTES))
    monkeypatch.setattr(agent, "_device", torch.device("cuda", 0))
    agent.prepare(tag)
    agent.metadata().result(LIMIT_S)  # the agent's thread has done what was asked before
    strips = agent._strips
    assert strips is not None
    assert tag * TAG_COPIES in bytes(strips._memory.flatten())
    strips._memory.zero_()
    strips.take(tag)
    assert not strips._memory.any(), "the write copies nothing"


def test_the_handle_of_a_write_that_ended(new_pair: Callable[..., Pair]) -> None:
    pair = new_pair()
    spy = Spy(pair.sender)
    for write in [pair.write((0, 0, 64)), pair.write((64, 64, 64))]:
        write.result(LIMIT_S)
    assert isinstance(pair.write((0, SIZE, 1)).exception(LIMIT_S), TransferError)
    pair.sender.close()
    spy.check_all_released_once(2)


def test_the_handle_of_a_write_that_nixl_gave_up(new_pair: Callable[..., Pair]) -> None:
    pair = new_pair()
    spy = Spy(pair.sender)
    spy.state = "ERR"
    with pytest.raises(PeerLost, match="ERR"):
        pair.write((0, 0, 64)).result(LIMIT_S)
    with pytest.raises(PeerLost, match="not connected"):
        pair.write((0, 0, 64)).result(LIMIT_S)
    pair.sender.close()
    spy.check_all_released_once(1)


def test_the_handle_of_a_write_that_is_under_way_when_the_agent_is_closed(new_pair: Callable[..., Pair]) -> None:
    pair = new_pair(silent=True)
    spy = Spy(pair.sender)
    write = pair.write((0, 0, 64))
    pair.sender.close()
    with pytest.raises(PeerLost, match="closed during the write"):
        write.result(LIMIT_S)
    assert not spy.released, "UCX still has it in a queue, which it goes through when its worker is destroyed"


def test_memory_is_kept_where_the_agents_thread_does_not_end(
    new_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A call of NIXL that does not return leaves the region registered, and in use."""
    pair = new_pair()
    monkeypatch.setattr(nixl_module, "CLOSE_TIMEOUT_S", 0.05)
    spy, goes_on, posted = Spy(pair.sender), threading.Event(), threading.Event()
    spy.then = lambda: (posted.set(), goes_on.wait(LIMIT_S))
    try:
        write = pair.write((0, 0, 64))
        assert posted.wait(LIMIT_S)
        slab = np.zeros(8)
        kept = weakref.ref(slab)
        close_agent(pair.sender, slab)
        del slab
        gc.collect()
        assert kept() is not None, "the thread could still be reading it"
        (record,) = caplog.records
        assert record.levelname == "ERROR"
        assert "does not end" in record.message
    finally:
        goes_on.set()
    monkeypatch.setattr(nixl_module, "CLOSE_TIMEOUT_S", LIMIT_S)
    assert pair.sender.close(), "asked again, it has ended"
    write.exception(LIMIT_S)


def test_memory_is_freed_where_the_agents_thread_has_ended(new_pair: Callable[..., Pair]) -> None:
    pair, slab = new_pair(), np.zeros(8)
    kept = weakref.ref(slab)
    close_agent(pair.sender, slab)
    del slab
    gc.collect()
    assert kept() is None


# ── how much is handed over, and when a peer is forgotten ──────────────────────────────────────────────────────────


def test_so_much_is_handed_over_and_not_done(new_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    """However large a write is, what may land behind its fence is two pieces of it; another write waits behind them."""
    monkeypatch.setattr(nixl_module, "PIECE_BYTES", SIZE // 8)
    monkeypatch.setattr(nixl_module, "MAX_POSTED_BYTES", SIZE // 4)
    pair = new_pair()
    spy = Spy(pair.sender)
    spy.holds = True
    fence = [math.inf]
    whole = pair.sender.write(pair.receiver.epoch, as_spans([(0, 0, SIZE)]), not_after=lambda: fence[0])
    other = pair.sender.write(pair.receiver.epoch, as_spans([(0, 0, 64)]), not_after=for_ever)
    time.sleep(0.1)  # what is tested is that nothing more is posted
    assert len(spy.handles) == 2
    fence[0] = time.monotonic()
    spy.holds = False
    with pytest.raises(PeerLost, match="too long"):
        whole.result(LIMIT_S)
    other.result(LIMIT_S)
    assert len(spy.handles) == 3
    assert not pair.received[SIZE // 4 :].any()


def test_the_fence_passes_while_a_write_is_prepared(new_pair: Callable[..., Pair]) -> None:
    pair = new_pair()
    spy = Spy(pair.sender)
    spy.preparing_s = 0.2
    fence = time.monotonic() + 0.1
    with pytest.raises(PeerLost, match="too long"):
        pair.sender.write(pair.receiver.epoch, as_spans([(0, 0, 64)]), not_after=lambda: fence).result(LIMIT_S)
    assert spy.num_posted == 0
    spy.check_all_released_once(1)
    pair.write((0, 0, 64)).result(LIMIT_S)


def test_a_fence_that_breaks_has_passed(new_pair: Callable[..., Pair]) -> None:
    def broken() -> float:
        raise RuntimeError("nobody knows")

    pair = new_pair()
    with pytest.raises(PeerLost, match="too long"):
        pair.sender.write(pair.receiver.epoch, as_spans([(0, 0, 64)]), not_after=broken).result(LIMIT_S)
    pair.write((0, 0, 64)).result(LIMIT_S)


def test_writes_take_turns_though_their_peers_have_room_in_turns() -> None:
    """One that cannot go on keeps its place: else those for two peers pass one another for ever."""
    agent: Any = NixlAgent.__new__(NixlAgent)
    writes = [
        SimpleNamespace(peer=peer, name=name, pieces=deque(range(50)))
        for peer, name in zip("PPQQ", "ACBD", strict=True)
    ]
    agent._waiting = deque(writes[i] for i in (0, 1, 2, 3))
    has_room = ""
    posted: list[str] = []

    def post(write: Any) -> None:
        write.pieces.popleft()
        posted.append(write.name)

    agent._may_post = lambda write: bool(write.pieces) and write.peer == has_room
    agent._post = post
    for turn in range(80):
        has_room = "PQ"[turn % 2]
        agent._post_next()
    assert Counter(posted) == dict.fromkeys("ABCD", 20)


def test_metadata_of_another_peer_does_not_harm_that_one(new_pair: Callable[..., Pair]) -> None:
    pair = new_pair()
    region, metadata = pair.receiver._region, pair.receiver.metadata().result(LIMIT_S)
    assert region is not None
    with pytest.raises(PeerLost, match="belongs to agent"):
        pair.sender.connect("another", metadata, region).result(LIMIT_S)
    pair.write((0, 0, 64)).result(LIMIT_S)


def test_a_large_write_lands_whatever_its_fence_was_at_first(
    new_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer is heard meanwhile: what counts is the fence when a piece is posted."""
    monkeypatch.setattr(nixl_module, "PIECE_BYTES", SIZE // 8)
    monkeypatch.setattr(nixl_module, "MAX_POSTED_BYTES", SIZE // 4)
    pair = new_pair()
    spy = Spy(pair.sender)
    spy.holds = True
    fence = [time.monotonic() + 0.1]
    write = pair.sender.write(pair.receiver.epoch, as_spans([(0, 0, SIZE)]), not_after=lambda: fence[0])
    fence[0] += 1000
    time.sleep(0.15)
    spy.holds = False
    assert write.result(LIMIT_S).num_bytes == SIZE
    assert np.array_equal(pair.received, pair.sent)


@pytest.mark.parametrize("how", ["lost and connected again", "disconnected"])
def test_a_peer_is_not_forgotten_while_a_write_to_it_is_under_way(new_pair: Callable[..., Pair], how: str) -> None:
    """NIXL would report an end that is none, and the bytes land later."""
    pair = new_pair()
    spy = Spy(pair.sender)
    spy.holds = True
    first, second = (pair.write((place, place, 64)) for place in (0, 64))
    while len(spy.handles) < 2:
        time.sleep(0.001)
    region, metadata = pair.receiver._region, pair.receiver.metadata().result(LIMIT_S)
    assert region is not None
    if how == "disconnected":
        pair.sender.disconnect(pair.receiver.epoch).result(LIMIT_S)
        with pytest.raises(PeerLost, match="not connected"):
            pair.write((0, 0, 64)).result(LIMIT_S)
    else:
        pair.sender._peers[pair.receiver.epoch].is_lost = True
    again = pair.sender.connect(pair.receiver.epoch, metadata, region)
    time.sleep(0.05)  # what is tested is that nothing is removed
    assert spy.num_removed == 0
    assert again.done() == (how == "disconnected"), "the connection is there still"
    assert not first.done()
    assert not second.done()
    spy.holds = False
    for future in (first, second, again):
        future.result(LIMIT_S)
    assert spy.num_removed == (how != "disconnected")
    pair.write((128, 128, 64)).result(LIMIT_S)
    assert np.array_equal(pair.received[:192], pair.sent[:192])
    if how == "disconnected":
        pair.sender.disconnect(pair.receiver.epoch).result(LIMIT_S)
        assert spy.num_removed == 1


def test_a_peer_that_is_waited_for_when_the_agent_is_closed(new_pair: Callable[..., Pair]) -> None:
    pair = new_pair()
    spy = Spy(pair.sender)
    spy.holds = True
    write = pair.write((0, 0, 64))
    while not spy.handles:
        time.sleep(0.001)
    region, metadata = pair.receiver._region, pair.receiver.metadata().result(LIMIT_S)
    assert region is not None
    pair.sender._peers[pair.receiver.epoch].is_lost = True
    again = pair.sender.connect(pair.receiver.epoch, metadata, region)
    pair.sender.close()
    for future in (write, again):
        with pytest.raises(TransferError, match="closed"):
            future.result(LIMIT_S)


# ── a process that stood still ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("slept_s", "fence_s", "ends"),
    [(0.5, 0.2, True), (0.5, 0.9, False), (0.05, 0.02, False)],
    ids=["beyond the fence", "before the fence", "from a short nap"],
)
def test_a_thread_that_wakes(
    new_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch, slept_s: float, fence_s: float, ends: bool
) -> None:
    """It ends the process where bytes were handed over that should have been there before it woke."""
    reasons: list[str] = []
    monkeypatch.setattr(nixl_module, "end_process", reasons.append)
    monkeypatch.setattr(nixl_module, "NAP_S", 0.1)
    pair = new_pair()
    spy = Spy(pair.sender)
    spy.pause_s = slept_s
    fence = time.monotonic() + fence_s
    pair.sender.write(pair.receiver.epoch, as_spans([(0, 0, 64)]), not_after=lambda: fence).result(LIMIT_S)
    assert bool(reasons) == ends


@pytest.mark.parametrize("when", ["while it asks an event", "when the fence had passed already"])
def test_a_nap_that_is_noticed_later(new_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    reasons: list[str] = []
    monkeypatch.setattr(nixl_module, "end_process", reasons.append)
    monkeypatch.setattr(nixl_module, "NAP_S", 0.2)
    pair = new_pair()
    spy = Spy(pair.sender)
    spy.holds = True
    fence = time.monotonic() + (0.2 if when == "while it asks an event" else 0.0)
    began = math.inf
    written = pair.sender.write(pair.receiver.epoch, as_spans([(0, 0, 64)]), not_after=lambda: max(fence, began))
    while not spy.num_posted:
        time.sleep(0.001)
    began = 0.0
    time.sleep(3 * nixl_module.READ_FENCES_S)
    asleep = Happening(then=lambda: time.sleep(0.4))
    asleep.set()
    other = pair.sender.write(pair.receiver.epoch, as_spans([(64, 64, 64)]), not_after=for_ever, after=asleep)
    while spy.num_posted < 2:
        time.sleep(0.001)
    assert reasons
    spy.holds = False
    for write in (written, other):
        write.result(LIMIT_S)


def test_a_fence_that_moves_on_when_it_wakes_is_not_believed(
    new_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread woke first and was heard again, by a peer that may have given the pages away meanwhile."""
    reasons: list[str] = []
    monkeypatch.setattr(nixl_module, "end_process", reasons.append)
    monkeypatch.setattr(nixl_module, "NAP_S", 0.2)
    pair = new_pair()
    spy = Spy(pair.sender)
    fence = [time.monotonic() + 0.1]

    def wake_late() -> None:
        time.sleep(0.4)
        fence[0] = math.inf

    spy.then = wake_late
    pair.sender.write(pair.receiver.epoch, as_spans([(0, 0, 64)]), not_after=lambda: fence[0]).result(LIMIT_S)
    assert reasons


# ── settings ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_option_that_the_backend_cannot_read() -> None:
    options = NixlOptions(backend_options={"UCX": {"num_threads": "many"}})
    with pytest.raises(TransferError, match=r"could not create its backend UCX with .*many"):
        NixlAgent("a", receives=False, options=options)


def test_several_threads_move_the_same_bytes(new_pair: Callable[..., Pair]) -> None:
    pair = new_pair(NixlOptions(backend_options={"UCX": {"num_threads": "2"}}))
    assert pair.sender._nixl.get_backend_params("UCX")["split_batch_size"] == "16"
    rows = [(place * 8192, (127 - place) * 8192, 8192) for place in range(128)]
    pair.write(*rows).result(LIMIT_S)
    assert np.array_equal(pair.received.reshape(128, -1)[::-1].ravel(), pair.sent)


# ── what waiting costs ──────────────────────────────────────────────────────────────────────────────────────────────


def test_an_idle_pair_uses_no_cpu(new_pair: Callable[..., Pair]) -> None:
    new_pair().write((0, 0, 64)).result(LIMIT_S)
    used = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - used < 0.02


def test_a_write_that_never_ends_uses_hardly_any_cpu(
    new_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receiver's process is frozen, say."""
    monkeypatch.setattr(nixl_module, "PATIENCE_S", 0.1)
    pair = new_pair(silent=True)
    write = pair.write((0, 0, 64))
    time.sleep(0.2)
    used = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - used < 0.03
    assert not write.done()


def test_the_longer_nothing_happens_the_less_often_it_looks() -> None:
    quiet = [0.0, 1e-4, 3e-4, 1e-3, 1e-2, 0.1, 1.9, 2.0, 1e4]
    pauses = [poll_pause_s(seconds) for seconds in quiet]
    assert pauses == sorted(pauses)
    assert pauses[:2] == [0.0, 0.0], "a small write's end is seen at once"
    assert all(pause <= seconds / 8 for pause, seconds in zip(pauses, quiet, strict=True))
    assert max(pauses[:7]) == 1e-3
    assert pauses[7:] == [0.01, 0.01]
