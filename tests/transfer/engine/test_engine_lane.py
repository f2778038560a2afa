"""An engine measures its KV lane before it serves, and says what it found."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("nixl", reason="the KV transfer needs NIXL (extra: engine)")
from transfer.agents.lane import Lane
from transfer.engine import engine as engine_module
from transfer.engine.config import EngineSettings
from transfer.engine.engine import Engine
from transfer.errors import TransferError

pytestmark = pytest.mark.engine


@pytest.fixture(autouse=True)
def lane_is_measured_once() -> None:
    """Here it is measured at every start, as it is outside the tests."""


def new_engine(folder: Path, device: str = "cpu") -> Engine:
    sizes = {"pd_buffer_size": 1 << 20, "kv_cache_size": 1 << 20}
    return Engine(EngineSettings(role="both", model=folder, chunk_size=4, threads=1, device=device, **sizes))


async def test_it_is_in_the_statistics(tiny_model: Callable[..., Path]) -> None:
    engine = new_engine(tiny_model("llama"))
    assert engine.statistics()["lane"] is None
    await engine.start()
    try:
        found = msgspec.json.decode(msgspec.json.encode(engine.statistics()))["lane"]
    finally:
        await engine.aclose()
    assert (found["backends"], found["device"], found["num_bytes"]) == (["UCX"], "cpu", 4 << 20)
    assert found["gb_s"] > 0.05
    assert found["copy_gb_s"] > 0.05


async def test_a_slow_gpu_lane_keeps_it_from_starting(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Lane("cuda:0", 32 << 20, gb_s=0.3, copy_gb_s=1500.0)
    monkeypatch.setattr(engine_module, "measure_lane", lambda new_agent, device, options: slow)
    engine = new_engine(tiny_model("llama"))
    with pytest.raises(TransferError, match=r"the KV lane is slow: .* 0\.30 GB/s"):
        await engine.start()
    assert not [thread for thread in threading.enumerate() if thread.name == "engine" or thread.name[:5] == "nixl-"]


def test_a_device_that_is_not_there(tiny_model: Callable[..., Path]) -> None:
    with pytest.raises(TransferError, match="'gpu7' is no device"):
        new_engine(tiny_model("llama"), "gpu7")
