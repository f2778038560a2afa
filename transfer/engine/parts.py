"""The module makes the parts that every rank of an engine consists of, from the options that all ranks share."""

from __future__ import annotations

from transfer.agents.nixl import NixlAgent
from transfer.dataplane.in_process import InProcess
from transfer.dataplane.own_process import OwnProcess
from transfer.dataplane.plane import Backend, DataPlane
from transfer.engine.config import EngineSettings
from transfer.engine.model import ModelRunner
from transfer.engine.paged_cache import PagedStore
from transfer.engine.ranks.split import AddUp
from transfer.errors import GeometryError
from transfer.memory.buffer import PagedBuffer
from transfer.plan.ranks import Rank
from transfer.roles.receiver import ReceiverConfig


def new_runner(settings: EngineSettings, index: int, add_up: AddUp) -> ModelRunner:
    """Returns the model, or what rank `index` has of it. Raises as `ModelRunner` does."""
    return ModelRunner(
        settings.model,
        device=settings.device,
        dtype=settings.dtype,
        chunk_size=settings.chunk_size,
        layers_per_write=settings.layers_per_write,
        rank=Rank(settings.tensor_parallel_size, index),
        add_up=add_up,
    )


def new_store(settings: EngineSettings, runner: ModelRunner) -> PagedStore:
    """Returns the KV cache. Raises `GeometryError` where it has no room for a page."""
    num_pages = _pages_in(settings.kv_cache_size, runner.layout.page_bytes, "kv_cache_size")
    is_shared = settings.role != "decode" and settings.data_plane == "process"
    return PagedStore(runner.layout, num_pages, runner.device, is_shared=is_shared)


def new_pd_buffer(settings: EngineSettings, runner: ModelRunner) -> PagedBuffer | None:
    """Returns the PD buffer, or None for a prefiller. Raises `GeometryError` where it has no room for a page."""
    if settings.role == "prefill":
        return None
    page_bytes = runner.layout.page_bytes
    return PagedBuffer(_pages_in(settings.pd_buffer_size, page_bytes, "pd_buffer_size"), page_bytes, runner.device)


def new_agent(settings: EngineSettings, runner: ModelRunner, epoch: str, receives: bool) -> NixlAgent:
    return NixlAgent(epoch, receives=receives, options=settings.nixl_options, device=runner.device)


def new_plane(settings: EngineSettings, runner: ModelRunner, epoch: str, store: PagedStore) -> DataPlane:
    """Returns the data plane that carries out a prefiller's pushes, under the name `epoch`. Start it, and close it in
    the end."""
    backend: Backend
    if settings.data_plane == "process":
        backend = OwnProcess(
            epoch,
            store.buffer,
            runner.identity(),
            options=settings.nixl_options,
            fleet_key=settings.fleet,
        )
    else:
        backend = InProcess(
            lambda: new_agent(settings, runner, epoch, receives=False),
            store.buffer,
            runner.identity(),
            fleet_key=settings.fleet,
        )
    return DataPlane(backend)


def receiver_config(settings: EngineSettings) -> ReceiverConfig:
    return ReceiverConfig(
        host=settings.receiver_host or settings.host,
        port=settings.receiver_port,
        whole_requests=settings.reservation == "whole",
        heartbeat_s=settings.heartbeat_s,
        writer_timeout_s=settings.writer_timeout_s,
        fleet_key=settings.fleet,
        attempt_key=settings.attempts,
        notify_hosts=settings.proxies,
    )


def _pages_in(num_bytes: int, page_bytes: int, option: str) -> int:
    if num_bytes < page_bytes:
        raise GeometryError(
            f"{option} is {num_bytes} bytes, less than one page ({page_bytes} bytes); enlarge it or lower chunk_size"
        )
    return num_bytes // page_bytes
