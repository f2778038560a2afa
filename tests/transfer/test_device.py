"""The device is said once: what is asked of torch and of the CUDA driver, and in which order. No GPU is needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.fakes.gpus import FakeGpus
from transfer.agents import device as device_module
from transfer.agents import nixl as nixl_module
from transfer.agents import nixl_setup
from transfer.agents.base import Region
from transfer.agents.device import check_region, current, make_current, resolve
from transfer.agents.nixl import NixlAgent
from transfer.errors import TransferError

LIMIT_S = 10.0
GPU = torch.device("cuda", 3)
IN_VRAM = Region(0x7F0000000000, 1 << 20, 3, "VRAM")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> FakeGpus:
    return FakeGpus(monkeypatch)


# ── which one is meant ──────────────────────────────────────────────────────────────────────────────────────────────


def test_cuda_without_an_index_is_the_current_one(gpus: FakeGpus) -> None:
    gpus.current = 2
    assert resolve("cuda") == resolve(torch.device("cuda")) == torch.device("cuda", 2)
    assert resolve("cuda:3") == GPU
    assert resolve("cpu") == resolve("cpu:0") == torch.device("cpu")


@pytest.mark.parametrize(
    ("device", "reason"),
    [("cuda:4", "torch sees 4 GPUs"), ("meta", "not on meta"), ("gpu7", "'gpu7' is no device")],
)
def test_a_device_that_is_not_there(gpus: FakeGpus, device: str, reason: str) -> None:
    with pytest.raises(TransferError, match=reason):
        resolve(device)


def test_a_gpu_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(TransferError, match=r"cuda:1, but torch .* sees no CUDA GPU here"):
        resolve("cuda:1")


# ── made current ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_its_context_is_created_and_the_caller_keeps_his_own(gpus: FakeGpus) -> None:
    with current(GPU):
        gpus.note("inside")
    make_current(GPU)
    assert [call for call, _, _ in gpus.calls] == [
        *("enter", "synchronize", "inside", "leave"),
        *("set_device", "synchronize"),
    ]
    assert {device for _, device, _ in gpus.calls} == {"cuda:3", ""}


def test_nothing_is_asked_of_cuda_for_memory_of_the_cpu(gpus: FakeGpus) -> None:
    with current(torch.device("cpu")):
        make_current(torch.device("cpu"))
    check_region(Region(4096, 1), torch.device("cpu"))
    assert not gpus.calls


@pytest.mark.engine
def test_it_is_set_before_nixl_is_created_and_first_on_the_agents_thread(
    gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("nixl", reason="the KV transfer needs NIXL (extra: engine)")
    create_backend = nixl_setup._create_backend

    def creating(*arguments: Any) -> None:
        gpus.note("create")
        create_backend(*arguments)

    def first_job(region: Region, device: torch.device, **_: object) -> None:
        gpus.note("first job", device)
        raise TransferError("this NIXL has no VRAM")

    monkeypatch.setattr(nixl_setup, "_create_backend", creating)
    monkeypatch.setattr(nixl_module, "check_region", first_job)
    gpus.current = 3
    agent = NixlAgent("told once", receives=False, device="cuda")
    gpus.current = 0
    assert isinstance(agent.register(IN_VRAM).exception(LIMIT_S), TransferError)
    agent.close()
    by_caller = [(call, device) for call, device, thread in gpus.calls if thread == "caller"]
    by_agent = [(call, device) for call, device, thread in gpus.calls if thread == "agent"]
    assert by_caller == [("enter", "cuda:3"), ("synchronize", "cuda:3"), ("create", ""), ("leave", "cuda:3")]
    assert by_agent == [("set_device", "cuda:3"), ("synchronize", "cuda:3"), ("first job", "cuda:3")]


# ── memory ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_memory_from_cuda_malloc_on_the_agents_device(gpus: FakeGpus) -> None:
    check_region(IN_VRAM, GPU)
    assert gpus.asked == [IN_VRAM.base_address], "all 64 bits of it"


def test_an_expandable_segment_names_the_setting_and_the_way_out(
    gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus.can_be_mapped = False
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(TransferError) as caught:
        check_region(IN_VRAM, GPU)
    assert "on cuda:3 was not allocated with cudaMalloc" in str(caught.value)
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; start without" in str(caught.value)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    with pytest.raises(TransferError, match="'native' with no setting in the environment"):
        check_region(IN_VRAM, GPU)


def test_a_driver_that_does_not_know_the_memory(gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus.status = 1
    with pytest.raises(TransferError, match="does not know the memory at 0x7f0000000000"):
        check_region(IN_VRAM, GPU)

    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(device_module.ctypes, "CDLL", missing)
    with pytest.raises(TransferError, match=r"cannot be asked .* libcuda\.so\.1"):
        check_region(IN_VRAM, GPU)


@pytest.mark.parametrize(
    ("region", "device", "there"),
    [
        (IN_VRAM, "cpu", "cuda:3"),
        (IN_VRAM, "cuda:1", "cuda:3"),
        (Region(4096, 1), "cuda:3", "cpu"),
    ],
)
def test_a_region_that_lies_elsewhere(gpus: FakeGpus, region: Region, device: str, there: str) -> None:
    with pytest.raises(TransferError, match=f"lies on {there}, its agent was told {device}: .* device='{there}'"):
        check_region(region, resolve(device))


@pytest.mark.engine
def test_the_agent_refuses_such_a_region_and_nixl_never_sees_it() -> None:
    pytest.importorskip("nixl", reason="the KV transfer needs NIXL (extra: engine)")
    agent = NixlAgent("on the cpu", receives=False)
    try:
        with pytest.raises(TransferError, match="the region lies on cuda:3"):
            agent.register(IN_VRAM).result(LIMIT_S)
    finally:
        agent.close()


def test_imported_memory_need_not_be_exported_again(gpus: FakeGpus) -> None:
    gpus.can_be_mapped = False
    with pytest.raises(TransferError, match="cudaMalloc"):
        check_region(IN_VRAM, GPU)
    check_region(IN_VRAM, GPU, is_imported=True)
