"""What is NIXL's alone: its handles, its settings, and what it costs to wait for it. See `test_agent_contract` too."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from transfer.agents.base import Region, WriteReceipt
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
        return self.sender.write(self.receiver.epoch, as_spans(list(rows)), not_after=float("inf"))

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
        agent._nixl = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._nixl, name)

    def initialize_xfer(self, *arguments: Any) -> Any:
        self.handles.append(self._nixl.initialize_xfer(*arguments))
        return self.handles[-1]

    def transfer(self, handle: Any) -> str:
        assert not self.released[id(handle)]
        return str(self._nixl.transfer(handle))

    def check_xfer_state(self, handle: Any) -> str:
        assert not self.released[id(handle)]
        return self.state or str(self._nixl.check_xfer_state(handle))

    def release_xfer_handle(self, handle: Any) -> None:
        self.released[id(handle)] += 1
        self._nixl.release_xfer_handle(handle)

    def check_all_released_once(self, expected: int) -> None:
        assert [self.released[id(handle)] for handle in self.handles] == [1] * expected


# ── handles ─────────────────────────────────────────────────────────────────────────────────────────────────────────


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
    spy.check_all_released_once(1)


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
