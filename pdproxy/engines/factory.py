"""The module makes the adapter of an instance from what the options say about it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from pdproxy.config.instances import InstanceSettings, ends_in_v1
from pdproxy.config.settings import Settings
from pdproxy.engines.adapter import Adapter
from pdproxy.engines.builtin import BuiltinAdapter
from pdproxy.engines.lmcache import LMCacheAdapter, LMCacheBuffer
from pdproxy.engines.lmcache_config import check_lmcache_configs, lmcache_buffer, read_lmcache_config
from pdproxy.engines.mooncake import MooncakeAdapter
from pdproxy.engines.sglang import SglangAdapter
from pdproxy.engines.vllm_metrics import GivenCache
from pdproxy.engines.vllm_nixl import VllmNixlAdapter
from pdproxy.engines.vllm_transfer import VllmTransferAdapter
from pdproxy.errors import ConfigError
from transfer.errors import GeometryError, TransferError
from transfer.geometry import KvGeometry, kv_geometry, load_config
from transfer.trust import AttemptKey

log = logging.getLogger(__name__)

TAKE_IDS: frozenset[str] = frozenset({"builtin", "lmcache"})
"""The kinds which are given a prompt's ids where this proxy knows them. LMCache's pairs cannot serve every prompt
without ids.
"""


def make_adapter(one: InstanceSettings, settings: Settings) -> Adapter:
    """Returns the adapter of an instance. Raises `ConfigError` naming the option at fault."""
    lease = {} if settings.engine_lease_s is None else {"lease_s": settings.engine_lease_s}
    match one.engine:
        case "builtin":
            return BuiltinAdapter(attempt_key=_attempt_key(settings), **lease)
        case "vllm_nixl":
            return VllmNixlAdapter(
                one.role,
                data_parallel_rank=one.data_parallel_rank,
                data_parallel_size=one.data_parallel_size,
                given=_given_cache(one),
                **lease,
            )
        case "vllm_transfer":
            return VllmTransferAdapter(kv_url=_kv_url(one, settings), attempt_key=_attempt_key(settings), **lease)
        case "lmcache":
            return LMCacheAdapter(
                one.role, buffer=_lmcache_buffer(one, settings), first_token=settings.first_token, **lease
            )
        case "sglang":
            return SglangAdapter(
                one.role,
                bootstrap=_bootstrap(one, settings),
                max_rooms=one.max_rooms,
                data_parallel_rank=one.data_parallel_rank,
                data_parallel_size=one.data_parallel_size,
                **lease,
            )
        case "mooncake":
            bootstrap = _bootstrap(one, settings)
            return MooncakeAdapter(
                one.role,
                bootstrap=bootstrap,
                data_parallel_rank=one.data_parallel_rank,
                data_parallel_size=one.data_parallel_size,
                given=_given_cache(one),
                **lease,
            )


def warn_of_mistakes(fleet: Sequence[InstanceSettings], settings: Settings) -> None:
    """Logs what cannot be seen from here and is often wrong. Raises `ConfigError` for what cannot work."""
    for one in [*fleet, *settings.services()]:
        if ends_in_v1(one.url):
            log.warning("instances.url: that of %r is %s; leave out /v1, the proxy adds it itself", one.name, one.url)
    given = settings.chunk_size if "chunk_size" in settings.model_fields_set else None
    for model in {one.model for one in fleet if one.engine == "lmcache"}:
        of_model = [one for one in fleet if one.engine == "lmcache" and one.model == model]
        configs = {one.name: read_lmcache_config(one.lmcache_config) for one in of_model if one.lmcache_config}
        chunk_sizes = {one.name: size for one in of_model if (size := one.chunk_size or given) is not None}
        warnings = check_lmcache_configs(
            configs,
            chunk_sizes=chunk_sizes,
            proxy_port=settings.notify_port or settings.signal_port(fleet),
            first_token=settings.first_token,
        )
        for warning in warnings:
            log.warning("%s", warning)


def _attempt_key(settings: Settings) -> AttemptKey | None:
    """Returns the key that signs attempts; None where there is none. Raises `ConfigError`."""
    try:
        return AttemptKey.find(settings.attempt_key, settings.attempt_key_file)
    except TransferError as error:
        raise ConfigError(f"attempt_key{'_file' if settings.attempt_key_file else ''}: {error}") from None


def _folder(model: str | None, settings: Settings) -> Path | None:
    """Returns the folder of the model that is served under this name; None where no folder is given."""
    return {one.name: one.path for one in settings.models}.get(model or "", settings.model)


def _bootstrap(one: InstanceSettings, settings: Settings) -> str | None:
    """Returns ``host:port`` of a prefiller's bootstrap server, None for a decoder.

    For SGLang it is the host alone where no option gives the port: SGLang tells the port itself.
    """
    if one.role != "prefill":
        return None
    name = urlsplit(one.url).hostname or ""
    host = f"[{name}]" if ":" in name else name
    if one.engine == "sglang" and one.bootstrap_port is None and "bootstrap_port" not in settings.model_fields_set:
        return host
    return f"{host}:{one.bootstrap_port or settings.bootstrap_port}"


def _given_cache(one: InstanceSettings) -> GivenCache:
    return GivenCache(one.name, one.num_blocks, one.chunk_size)


def _kv_url(one: InstanceSettings, settings: Settings) -> str:
    """Returns the URL at which an instance's connector tells of its part of the transfer."""
    name = urlsplit(one.url).hostname or ""
    host = f"[{name}]" if ":" in name else name
    return f"http://{host}:{one.kv_port or settings.kv_port}"


def _lmcache_buffer(one: InstanceSettings, settings: Settings) -> LMCacheBuffer | None:
    if one.role != "decode":
        return None
    given = settings.model_fields_set
    return lmcache_buffer(
        name=one.name,
        host=one.receiver_host or urlsplit(one.url).hostname or "",
        init_ports=one.receiver_ports,
        alloc_ports=one.alloc_ports,
        buffer_bytes=one.pd_buffer_size or settings.pd_buffer_size,
        chunk_size=one.chunk_size or (settings.chunk_size if "chunk_size" in given else None),
        lmcache_config=one.lmcache_config,
        geometry=_geometry(one, settings),
        is_reference=one not in settings.instances and settings.is_reference,
    )


def _geometry(one: InstanceSettings, settings: Settings) -> KvGeometry | None:
    """Returns the geometry of the KV on one of a decoder's ranks; None where its model's folder is not known. Raises
    `ConfigError`.
    """
    folder = _folder(one.model, settings)
    if folder is None:
        return None
    try:
        tp_size = max(settings.tp_size, _num_ranks(one))
        return kv_geometry(load_config(folder), tp_size=tp_size, kv_cache_dtype=settings.kv_cache_dtype)
    except GeometryError as error:
        raise ConfigError(f"model: {error}") from None


def _num_ranks(one: InstanceSettings) -> int:
    """Returns the number of a decoder's ranks, which is the number of its ports, from the option or the YAML. Raises
    `ConfigError`.
    """
    if one.receiver_ports or one.lmcache_config is None:
        return len(one.receiver_ports)
    return len(read_lmcache_config(one.lmcache_config).init_ports)
