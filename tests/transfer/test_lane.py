"""The write that every engine does before it serves: what it finds out, and what it makes of it."""

from __future__ import annotations

import gc
import logging
import os
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from transfer.agents import lane as lane_module
from transfer.agents import lane_end, lane_process
from transfer.agents.fates import Drop, Fail, Fate, Land
from transfer.agents.lane import NUM_BYTES, Lane, check_lane, measure_lane, measure_lane_to
from transfer.agents.lane_end import pattern
from transfer.agents.lane_process import EndProcess
from transfer.agents.mock import MockAgent, MockFabric
from transfer.agents.mock_write import MockWrite
from transfer.agents.nixl_options import NixlOptions
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
def test_over_nixl() -> None:
    pytest.importorskip("nixl", reason="the KV transfer needs NIXL (extra: engine)")
    from transfer.agents.nixl import NixlAgent

    lane = measure_lane(lambda epoch, receives: NixlAgent(epoch, receives=receives), CPU)
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
    monkeypatch.setattr(lane_end, "PagedBuffer", WatchedBuffer)
    measure_lane(lambda epoch, receives: MockAgent(fabric, epoch), CPU)
    measure_lane(lambda epoch, receives: StuckAgent(fabric, epoch), CPU)
    gc.collect()
    assert [slab() is None for slab in slabs] == [True, True, False, False]


def test_a_slow_lane_is_not_measured_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(lane_module.ENOUGH_S, "cpu", 0.05)
    writes = []

    def slowly(write: MockWrite) -> Fate:
        writes.append(write)
        time.sleep(0.1)
        return Land()

    lane = over_mocks(slowly)
    assert len(writes) == 2, "one to open it, one that counts"
    assert lane.gb_s < 0.1
    assert lane.is_slow


def test_a_lane_that_seems_slow_is_given_time_to_be_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else may have had the GPU for the first writes."""
    monkeypatch.setitem(lane_module.ENOUGH_S, "cpu", 30.0)
    writes = []

    def slowly_at_first(write: MockWrite) -> Fate:
        writes.append(write)
        if len(writes) <= 6:
            time.sleep(0.1)
        return Land()

    assert not over_mocks(slowly_at_first).is_slow
    assert len(writes) == 7


# ── a receiving end in a process of its own, as on a GPU ────────────────────────────────────────────────────────────

needs_nixl = pytest.mark.skipif(find_spec("nixl") is None, reason="the KV transfer needs NIXL (extra: engine)")


@needs_nixl
@pytest.mark.engine
def test_the_receiving_end_is_a_process() -> None:
    from transfer.agents.nixl import NixlAgent

    num_bytes = NUM_BYTES["cpu"]
    with EndProcess(num_bytes, CPU, NixlOptions()) as end:
        lane = measure_lane_to(end, lambda epoch, receives: NixlAgent(epoch, receives=receives), CPU)
        assert end.num_wrong() == 0, "the last write is still there"
        end.clear()
        assert end.num_wrong() == int(torch.count_nonzero(pattern(torch.empty(1, num_bytes, dtype=torch.uint8))))
    assert (lane.device, lane.num_bytes) == ("cpu", num_bytes)
    assert lane.gb_s > 0.05


def test_it_is_one_where_the_device_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Started(Exception):
        pass

    def start(*arguments: object) -> None:
        asked.append(arguments)
        raise Started

    monkeypatch.setattr(lane_module, "EndProcess", start)
    options = NixlOptions(progress_delay_us=7)
    with pytest.raises(Started):
        measure_lane(lambda epoch, receives: MockAgent(MockFabric(), epoch), torch.device("cuda:1"), options)
    assert asked == [(32 << 20, torch.device("cuda:1"), options)]


@needs_nixl
@pytest.mark.engine
def test_it_cannot_start() -> None:
    with (
        EndProcess(1 << 20, torch.device("cuda:9"), NixlOptions()) as end,
        pytest.raises(TransferError, match=r"a process on cuda:9, could not start: the device is cuda:9, but"),
    ):
        end.offer()


@needs_nixl
@pytest.mark.engine
def test_it_stands_still_and_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_process, "ANSWER_LIMIT_S", 0.1)
    monkeypatch.setattr(lane_process, "END_LIMIT_S", 0.1)
    with EndProcess(1 << 20, CPU, NixlOptions()) as end:
        end.offer()
        pid = end._process.pid
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(TransferError, match=r"a process on cpu, did not answer within 0\.1 s"):
            end.clear()
    assert end._process.returncode == -signal.SIGKILL


@needs_nixl
@pytest.mark.engine
def test_it_dies() -> None:
    with EndProcess(1 << 20, CPU, NixlOptions()) as end:
        end.offer()
        end._process.kill()
        with pytest.raises(TransferError, match="ended with status -9"):
            end.num_wrong()


@needs_nixl
@pytest.mark.engine
def test_it_does_not_outlive_whoever_started_it() -> None:
    starts_one = (
        "import time, torch\n"
        "from transfer.agents.lane_process import EndProcess\n"
        "from transfer.agents.nixl_options import NixlOptions\n"
        "end = EndProcess(1 << 20, torch.device('cpu'), NixlOptions())\n"
        "end.offer()\n"
        "print(end._process.pid, flush=True)\n"
        "time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", starts_one], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
    try:
        assert select.select([child], [], [], 10)[0], "it is still there"
    finally:
        os.close(child)


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
