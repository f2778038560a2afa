"""The class that vLLM loads. It passes vLLM's calls on to the half that this process has."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import RequestStatus

from transfer import wire
from transfer.agents.nixl import NixlAgent
from transfer.connectors.vllm.block_cache import BlockAnswers, BlockCache, is_published, publish
from transfer.connectors.vllm.compat import check_version, hash_block_size, release_of, transfer_results
from transfer.connectors.vllm.kv_caches import KvCaches, packing_of
from transfer.connectors.vllm.messages import StepOrders, StepReport
from transfer.connectors.vllm.metrics import PdproxyMetrics, PdproxyStats
from transfer.connectors.vllm.other_ranks import OtherRanks
from transfer.connectors.vllm.private_socket import listen_privately
from transfer.connectors.vllm.rank_thread import RankThread
from transfer.connectors.vllm.receiver_thread import ReceiverThread
from transfer.connectors.vllm.scheduler_side import SchedulerSide
from transfer.connectors.vllm.settings import ConnectorSettings
from transfer.connectors.vllm.transfer_statistics import TransferStatistics
from transfer.connectors.vllm.worker_side import Inbox, WorkerSide
from transfer.dataplane.in_process import InProcess
from transfer.dataplane.plane import DataPlane
from transfer.errors import TransferError
from transfer.memory.buffer import PagedBuffer
from transfer.memory.engine_memory import EngineMemory
from transfer.memory.views import layer_views
from transfer.plan.tags import slab_bytes
from transfer.roles.epochs import epoch_of_rank, sender_epoch
from transfer.roles.handshake import Identity
from transfer.roles.receiver import Receiver

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

_IGNORED_IN_CONFIG = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")
"""The members of a model's config that equal weights may have with unlike values."""


@dataclass
class _Metadata(KVConnectorMetadata):  # type: ignore[misc]
    orders: StepOrders


@dataclass
class _WorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    report: StepReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        self.report.add(other.report)
        return self


@dataclass
class _Meeting(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """A `_Meeting` is where rank 0's receiver waits for the scheduler's half."""

    path: str


class _Pool:
    """vLLM's pool of blocks, by their numbers."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def hold(self, blocks: Sequence[int]) -> None:
        self._pool.touch([self._pool.blocks[block] for block in blocks])

    def give_up(self, blocks: Sequence[int]) -> None:
        self._pool.free_blocks([self._pool.blocks[block] for block in blocks])


class PdproxyConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """A `PdproxyConnector` is one half of the connector: in vLLM's scheduler or in one of its workers.

    Raises `TransferError` for options, releases of vLLM and models that it cannot serve.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        check_version(vllm.__version__)
        super().__init__(vllm_config, role, kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config
        self._settings = ConnectorSettings.read(extra)
        self._sends, self._receives = self._kv_transfer_config.is_kv_producer, self._kv_transfer_config.is_kv_consumer
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._plane: DataPlane | None = None
        self._thread: ReceiverThread | None = None
        self._rank_thread: RankThread | None = None
        self._blocks: BlockCache | None = None
        self._answers: BlockAnswers | None = None
        self._orders = StepOrders()
        self._pages_told: dict[str, int] = {}
        self._epoch = uuid.uuid4().hex
        parallel = vllm_config.parallel_config
        if role == KVConnectorRole.SCHEDULER:
            caches = KvCaches(vllm_config, kv_cache_config, 0, self._settings.chunk_size)
            self._scheduler = SchedulerSide(
                caches.block_size,
                parallel.tensor_parallel_size,
                caches.layout.kv.groups,
                names_pages=self._names_pages(kv_cache_config, caches.block_size),
                pages_per_block=caches.pages_per_block,
                names=self._names,
                input_namer=self._input_namer(),
            )

    # ── in the worker ───────────────────────────────────────────────────────────────────────────────────────────────

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Opens this worker's ends of the transfer, over vLLM's own blocks."""
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")  # NIXL's Python package reads it when it is imported
        ranks = get_tp_group()
        rank = ranks.rank_in_group
        if ranks.world_size > 1:
            self._epoch = ranks.broadcast_object(self._epoch, src=0)
        caches = KvCaches(self._vllm_config, self._kv_cache_config, rank, self._settings.chunk_size)
        device = next(iter(kv_caches.values())).device
        packing = packing_of(self._vllm_config, caches.layer_names, device)
        layout, rows = caches.packed(packing), caches.rows(packing)
        layers = [kv_caches[name] for name in caches.layer_names]
        memory = EngineMemory(layers, layout, caches.pages_per_block, rows)
        identity = Identity(self._model_text(), layout)
        settings, received = self._settings, []
        if self._sends:
            epoch = sender_epoch(self._epoch) if self._receives else self._epoch
            epoch = epoch_of_rank(epoch, rank) if rank else epoch

            def make_agent() -> NixlAgent:
                return NixlAgent(epoch, receives=False, device=device)

            self._plane = DataPlane(InProcess(make_agent, memory, identity, fleet_key=settings.fleet_key))
            self._plane.start().result()
        if rank == 0:
            self._thread = ReceiverThread(self._facts(identity), self._is_well, settings.host, self._kv_port())
            self._thread.start()
        inbox: Inbox | None = None
        if self._receives:
            inbox, buffer = self._open_inbox(ranks, identity, device, has_cache=caches.pages_per_block == 1)
            received = layer_views(buffer.pages, layout)
        self._worker = WorkerSide(layout, caches.layer_names, memory, plane=self._plane, inbox=inbox, received=received)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._orders = connector_metadata.orders
        if self._worker is not None:
            self._worker.begin(self._orders)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.load(self._orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: vLLM does not schedule a request before its load is over."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.layer_computed(layer_name)

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.end()

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        assert self._worker is not None
        return transfer_results(*self._worker.results(sorted(finished_req_ids)))

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        report = None if self._worker is None else self._worker.take_report()
        return None if report is None else _WorkerMetadata(report)

    def get_kv_connector_stats(self) -> PdproxyStats | None:
        """Returns what was counted since the last step. A worker returns the buffer's pages, where they have
        changed."""
        if self._scheduler is not None:
            statistics = self._scheduler.take_statistics()
            return None if statistics is None else PdproxyStats.of(statistics)
        pages = {} if self._thread is None else self._thread.pages
        if pages == self._pages_told:
            return None
        self._pages_told = pages
        return PdproxyStats.of(TransferStatistics(pages=pages))

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> PdproxyStats:
        return PdproxyStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> PdproxyMetrics:
        return PdproxyMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Returns True where layers are sent while vLLM computes, which it tells of between the pieces of a graph."""
        return ConnectorSettings.read(extra_config).layer_by_layer

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Returns where the scheduler's half is to come, where that is in another process."""
        if self._blocks is None or is_published(self._kv_transfer_config.engine_id):
            return None
        return _Meeting(self._blocks.listen())

    def shutdown(self) -> None:
        if self._plane is not None:
            self._plane.close()
        for thread in (self._rank_thread, self._thread):
            if thread is not None:
                thread.close()
        for end in (self._blocks, self._answers):
            if end is not None:
                end.close()

    # ── in the scheduler ────────────────────────────────────────────────────────────────────────────────────────────

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._scheduling.pool = _Pool(gpu_block_pool)
        publish(self._kv_transfer_config.engine_id, gpu_block_pool)

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        for meeting in metadata.values():
            try:
                self._answers = BlockAnswers(self._kv_transfer_config.engine_id, meeting.path)
            except OSError as error:
                log.warning("rank 0's receiver cannot be told what is cached (%s): all KV will be sent", error)

    def on_new_request(self, request: Any) -> None:
        self._scheduling.add(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduling.num_matched(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduling.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return _Metadata(self._scheduling.take_orders(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        metadata = connector_output.kv_connector_worker_meta
        report = None if metadata is None else metadata.report
        output = connector_output
        self._scheduling.heard(report, sorted(output.finished_recving or ()), sorted(output.finished_sending or ()))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        ends = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
        return self._scheduling.finished(request, is_whole=request.status in ends)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def has_pending_push_work(self) -> bool:
        return self._scheduling.has_orders

    # ── below ───────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _scheduling(self) -> SchedulerSide:
        assert self._scheduler is not None
        return self._scheduler

    def _names_pages(self, kv_cache_config: Any, block_size: int) -> bool:
        """Tells whether vLLM's block hashes name pages: it has them, one for each block, and there is one group."""
        has_hashes = bool(self._vllm_config.cache_config.enable_prefix_caching)
        hash_size = hash_block_size(kv_cache_config, self._vllm_config)
        return has_hashes and hash_size == block_size and len(kv_cache_config.kv_cache_groups) == 1

    def _names(self) -> str:
        """Returns a fingerprint of how this vLLM names blocks: by a hash that begins with a value of its own."""
        first = f"{self._vllm_config.cache_config.prefix_caching_hash_algo} ".encode() + kv_cache_utils.NONE_HASH
        return hashlib.sha256(first).hexdigest()[:16]

    def _open_inbox(
        self, ranks: Any, identity: Identity, device: torch.device, *, has_cache: bool
    ) -> tuple[Inbox, PagedBuffer]:
        """Opens this rank's part of the PD buffer. On rank 0 it is over when all ranks have joined. `has_cache`: pages
        have the names of vLLM's blocks, so that its prefix cache can be asked for them."""
        rank, size, others = ranks.rank_in_group, ranks.world_size, None

        def make() -> tuple[NixlAgent, PagedBuffer]:
            page_bytes, num_bytes = identity.layout.page_bytes, self._settings.pd_buffer_size
            num_pages = num_bytes // slab_bytes(1, page_bytes)
            if not num_pages:
                raise TransferError(f"pd_buffer_size is {num_bytes} bytes, and a page has {page_bytes}: enlarge it")
            name = uuid.uuid4().hex if rank else self._epoch
            buffer = PagedBuffer(num_pages, page_bytes, device)
            return NixlAgent(name, receives=True, device=device), buffer

        if self._thread is None:
            self._rank_thread = RankThread(rank)
            return self._rank_thread, self._rank_thread.join(ranks.broadcast_object(src=0), make, identity)
        agent, buffer = make()
        if size > 1:
            listener, path = listen_privately(socket.SOCK_STREAM, size)
            others = OtherRanks(listener, path, size)
            ranks.broadcast_object(path, src=0)
        if has_cache:  # vLLM knows whole blocks, and pages that are parts of one have other names
            self._blocks = BlockCache(self._kv_transfer_config.engine_id)
        self._thread.receive(agent, buffer, identity, self._settings.receiver, self._blocks, others)
        return self._thread, buffer

    def _input_namer(self) -> str:
        """Returns what vLLM puts into the names of images and other inputs besides what they are. It is empty where
        vLLM numbers them by request, because it caches nothing by name."""
        model = self._vllm_config.model_config
        inputs = model.multimodal_config
        if inputs is None or not (inputs.mm_processor_cache_gb or self._vllm_config.cache_config.enable_prefix_caching):
            return ""
        return f"{vllm.__version__} {getattr(inputs, 'mm_hasher_algorithm', '')} {model.model}"

    def _is_well(self) -> bool:
        is_broken = self._worker is not None and self._worker.is_broken
        return not is_broken and (self._plane is None or self._plane.is_well)

    def _kv_port(self) -> int:
        parallel = self._vllm_config.parallel_config
        return self._settings.kv_port + int(getattr(parallel, "data_parallel_index", 0) or 0)

    def _model_text(self) -> str:
        """Returns the text by which two engines know that they have the same weights, and the same release of vLLM:
        which bytes a block has is vLLM's own affair, and may change with it."""
        config = self._vllm_config.model_config
        members = {k: v for k, v in config.hf_config.to_dict().items() if k not in _IGNORED_IN_CONFIG}
        shape = hashlib.sha256(json.dumps(members, sort_keys=True, default=str).encode()).hexdigest()[:16]
        name = self._settings.model_name or Path(config.model).name
        return f"{name} {config.quantization or 'plain'} {shape} vLLM {release_of(vllm.__version__)}"

    def _facts(self, identity: Identity) -> Any:
        """Returns a function that makes the facts for the proxy."""
        kv, role = identity.layout.kv, "both"
        if not (self._sends and self._receives):
            role = "prefill" if self._sends else "decode"
        key = self._settings.fleet_key

        def facts(receiver: Receiver | None) -> wire.BufferFacts:
            pages = None if receiver is None else receiver.reservations
            return wire.BufferFacts(
                epoch=self._epoch,
                role=role,
                model=identity.model,
                dtype=kv.dtype,
                chunk_size=kv.chunk_size,
                bytes_per_token=kv.bytes_per_token,
                page_bytes=identity.layout.page_bytes,
                num_pages=pages.num_pages if pages else 0,
                num_free=pages.num_free if pages else 0,
                num_quarantined=pages.num_quarantined if pages else 0,
                max_model_len=self._vllm_config.model_config.max_model_len,
                receivers=[] if receiver is None else receiver.endpoints,
                groups=[
                    wire.PageGroupFacts(kind=g.kind, num_layers=g.num_layers, window=g.window, state_pages=0)
                    for g in kv.groups
                ],
                num_reserved=pages.num_reserved if pages else 0,
                num_queued=pages.num_queued if pages else 0,
                num_cached=pages.num_cached if pages else 0,
                num_reservations_waited=pages.num_waited if pages else 0,
                num_wrong_tags=0 if receiver is None else receiver.num_wrong_tags,
                fleet_key="none" if key is None else key.fingerprint,
            )

        return facts
