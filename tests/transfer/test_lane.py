"""The write that every engine does before it serves: what it finds out, and what it makes of it."""

from __future__ import annotations

import gc
import logging
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from transfer.agents import lane as lane_module
from transfer.agents.fates import Drop, Fail, Fate, Land
from transfer.agents.lane import Lane, check_lane, measure_lane
from transfer.agents.mock import MockAgent, MockFabric
from transfer.agents.mock_write import MockWrite
from transfer.errors import PeerLost, TransferError
from transfer.memory.buffer import PagedBuffer

CPU = torch.device("cpu")
ON_CPU = Lane("cpu", 4 << 20, gb_s=4.0, copy_gb_s=8.0)
ON_GPU = Lane("cuda:0", 32 << 20, gb_s=150.0, copy_gb_s=1500.0)


def over_mocks(script: Callable[[MockWrite], Fate]) -> Lane:
    fabric = MockFabric()
    return measure_lane(lambda epoch, receives: MockAgent(fabric, epoch, script), CPU)


def test_what_is_measured() -> None:
    lane = over_mocks(lambda write: Land())
    assert (lane.device, lane.num_bytes) == ("cpu", 4 << 20)
    assert lane.gb_s > 0
    assert lane.copy_gb_s > 0


@pytest.mark.engine
def test_over_nixl_within_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nixl", reason="the KV transfer needs NIXL (extra: engine)")
    from transfer.agents.nixl import NixlAgent

    started = time.monotonic()
    lane = measure_lane(lambda epoch, receives: NixlAgent(epoch, receives=receives), CPU)
    assert time.monotonic() - started < 2.0, "half a second of it is loading NIXL, once"
    assert lane.gb_s > 0.05


def test_a_byte_that_is_not_written_is_found() -> None:
    """Done, says the agent; and the last byte has not come."""

    def all_but_one(write: MockWrite) -> Fate:
        write.spans[0, 2] -= 1
        return Land()

    with pytest.raises(TransferError, match=f"of {4 << 20} bytes was reported as done, and 1 of them are wrong"):
        over_mocks(all_but_one)


def test_a_write_that_fails() -> None:
    with pytest.raises(PeerLost, match="no lane"):
        over_mocks(lambda write: Fail(PeerLost("no lane"), landed=0.5))


def test_a_write_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_module, "LIMIT_S", 0.05)
    monkeypatch.setenv("UCX_TLS", "shm")
    with pytest.raises(TransferError, match=r"did not end within 0.05 s; .*UCX_TLS=shm"):
        over_mocks(lambda write: Drop())


def test_the_slabs_are_kept_where_the_agents_do_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane that hangs ends the engine's start. An agent that hangs with it goes on with memory that nobody frees."""
    slabs: list[weakref.ref[PagedBuffer]] = []

    class WatchedBuffer(PagedBuffer):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            slabs.append(weakref.ref(self))

    class StuckAgent(MockAgent):
        def close(self) -> bool:
            super().close()
            return False

    fabric = MockFabric()
    monkeypatch.setattr(lane_module, "PagedBuffer", WatchedBuffer)
    measure_lane(lambda epoch, receives: MockAgent(fabric, epoch), CPU)
    measure_lane(lambda epoch, receives: StuckAgent(fabric, epoch), CPU)
    gc.collect()
    assert [slab() is None for slab in slabs] == [True, True, False, False]


def test_a_slow_lane_is_not_measured_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_module, "ENOUGH_S", 0.05)
    writes = []

    def slowly(write: MockWrite) -> Fate:
        writes.append(write)
        time.sleep(0.1)
        return Land()

    lane = over_mocks(slowly)
    assert len(writes) == 2, "one to open it, one that counts"
    assert lane.gb_s < 0.1
    assert lane.is_slow


# ── what is made of it ──────────────────────────────────────────────────────────────────────────────────────────────


def test_usual_is_what_a_copy_does_and_no_more_than_the_hardware_class() -> None:
    assert not ON_CPU.is_slow
    assert replace(ON_CPU, gb_s=0.79).is_slow
    assert not replace(ON_CPU, gb_s=1.1, copy_gb_s=22.0).is_slow, "a copy within the processor's cache"
    assert not ON_GPU.is_slow, "a tenth of the memory's own speed, and still what NVLink carries"
    assert not replace(ON_GPU, gb_s=20.1).is_slow
    assert replace(ON_GPU, gb_s=19.9).is_slow


def test_a_slow_gpu_is_an_error_that_says_where_to_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    check_lane(ON_GPU)
    with pytest.raises(TransferError) as caught:
        check_lane(replace(ON_GPU, gb_s=0.3))
    for word in ("32 MiB on cuda:0 moves 0.30 GB/s", "UCX_TLS=tcp", "cuda_copy and cuda_ipc", "UCX_PROTO_INFO=y"):
        assert word in str(caught.value)


def test_a_slow_cpu_is_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        check_lane(ON_CPU)
        assert "a write on cpu: 4.0 GB/s, a plain copy 8.0" in caplog.text
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
        check_lane(replace(ON_CPU, gb_s=0.5))
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    assert "tcp,sm,self" in caplog.text
