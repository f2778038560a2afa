"""The module computes what a decoder's PD buffer holds, from the options and from LMCache's own YAML.

The engines were started with that YAML. No endpoint of vLLM or LMCache tells it. What an operator says twice must be
the same both times.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml  # type: ignore[import-untyped]

from pdproxy.engines.lmcache import LMCacheBuffer
from pdproxy.errors import ConfigError
from transfer.errors import GeometryError
from transfer.geometry import KvGeometry, LayerGroup, capacity

log = logging.getLogger(__name__)

USUAL_CHUNK_SIZE = 256
"""LMCache's own default, in tokens."""
REFERENCE_BUFFER_BYTES = 2 * 2**30
REFERENCE_BYTES_PER_TOKEN = 131_072
"""The KV bytes per token of Llama-3.1-8B. LMCache's example proxy assumes this and the buffer above where it is told
neither.
"""
_RECEIVES, _SENDS = "receiver", "sender"
_OLDER_NAMES = {
    "enable_xpyd": "enable_pd",
    "nixl_role": "pd_role",
    "nixl_peer_host": "pd_peer_host",
    "nixl_peer_init_port": "pd_peer_init_port",
    "nixl_peer_alloc_port": "pd_peer_alloc_port",
    "nixl_proxy_host": "pd_proxy_host",
    "nixl_proxy_port": "pd_proxy_port",
    "nixl_buffer_size": "pd_buffer_size",
}
_BUILTIN_HASH = "builtin"
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class LMCacheConfig:
    """An `LMCacheConfig` is one engine's YAML, as far as a proxy needs it. None or an empty tuple means that the file
    does not say.
    """

    path: Path
    role: str
    """The engine's role: ``sender``, ``receiver`` or ``both``."""
    chunk_size: int = USUAL_CHUNK_SIZE
    buffer_bytes: int | None = None
    peer_host: str | None = None
    init_ports: tuple[int, ...] = ()
    alloc_ports: tuple[int, ...] = ()
    proxy_host: str | None = None
    proxy_port: int | None = None
    hash_algorithm: str = _BUILTIN_HASH
    notifies: bool = True
    """Tells that the engine tells the proxy when KV is ready."""


def read_lmcache_config(path: Path) -> LMCacheConfig:
    """Reads an engine's YAML. Raises `ConfigError` naming the file and the key."""
    values = _load(path)
    if values.get("enable_pd") is not True:
        raise ConfigError(f"lmcache_config: {path}: enable_pd is not true, so that this engine hands no KV over")
    take = _Taker(path, values)
    role = take("pd_role", str, None)
    if role not in (_RECEIVES, _SENDS, "both"):
        raise ConfigError(f"lmcache_config: {path}: pd_role is {role!r}; it is sender, receiver or both")
    return LMCacheConfig(
        path=path,
        role=role,
        chunk_size=take.positive("chunk_size") or USUAL_CHUNK_SIZE,
        buffer_bytes=take.positive("pd_buffer_size"),
        peer_host=take("pd_peer_host", str, None),
        init_ports=take.ports("pd_peer_init_port"),
        alloc_ports=take.ports("pd_peer_alloc_port"),
        proxy_host=take("pd_proxy_host", str, None),
        proxy_port=take.positive("pd_proxy_port"),
        hash_algorithm=take("pre_caching_hash_algorithm", str, _BUILTIN_HASH),
        notifies=not take("pd_skip_proxy_notification", bool, False),
    )


def lmcache_buffer(
    *,
    name: str,
    host: str,
    init_ports: Sequence[int] = (),
    alloc_ports: Sequence[int] = (),
    buffer_bytes: int | None = None,
    chunk_size: int | None = None,
    lmcache_config: Path | None = None,
    geometry: KvGeometry | None = None,
    is_reference: bool = False,
) -> LMCacheBuffer:
    """Returns a decoder's PD buffer from what is given. What is not given (None) comes from its YAML. Raises
    `ConfigError`.

    `name` is the instance's, for messages. `host` is where prefillers reach it. There is one port per rank.
    `buffer_bytes` are per rank, and `geometry` is that of one rank. `is_reference` says that the decoder is given by
    the flags of LMCache's example proxy. Then what is still missing is assumed as that proxy assumes it, and a warning
    says so.
    """
    config = None if lmcache_config is None else _receiver(lmcache_config)
    merged = _Merged(name, config)
    chunk = merged("chunk_size", chunk_size, "chunk_size") or USUAL_CHUNK_SIZE
    inits, allocs = _ports(merged, name, tuple(init_ports), tuple(alloc_ports))
    size = merged("pd_buffer_size", buffer_bytes, "buffer_bytes")
    if is_reference and size is None:
        size = _taken_for_granted(name, "--pd-buffer-size", REFERENCE_BUFFER_BYTES, "bytes of PD buffer")
    page_bytes, pages = _pages(name, size, chunk, geometry, is_reference)
    return LMCacheBuffer(
        host=host, init_ports=inits, alloc_ports=allocs, num_pages=pages, page_bytes=page_bytes, chunk_size=chunk
    )


def check_lmcache_configs(
    configs: Mapping[str, LMCacheConfig], *, chunk_sizes: Mapping[str, int], proxy_port: int, first_token: str
) -> list[str]:
    """Returns warnings, a sentence each, about engines of one model that are to work together.

    `configs` are by instance name, as far as they were given. `chunk_sizes` are those which are known by other means,
    by instance name. `proxy_port` is where this proxy takes notifications. Raises `ConfigError` where KV of one engine
    would never be found by another, and where a prefiller would not notify this proxy.
    """
    _check_same({**chunk_sizes, **{name: one.chunk_size for name, one in configs.items()}}, "chunk_size")
    hashes = {name: one.hash_algorithm for name, one in configs.items()}
    _check_same(hashes, "pre_caching_hash_algorithm")
    senders = {name: one for name, one in configs.items() if one.role != _RECEIVES}
    for name, one in senders.items():
        _check_sender(name, one, proxy_port)
    return [_about_the_seed(), _about_the_last_token(first_token)]


def _about_the_seed() -> str:
    return (
        "lmcache: prefillers and decoders must run with the same PYTHONHASHSEED (LMCache's examples: 0), which a proxy "
        "cannot see; with another one, or none, decoders find no KV and read every prompt again"
    )


def _about_the_last_token(first_token: str) -> str:
    expected = "without skip_last_n_tokens" if first_token == "decoder" else 'with "skip_last_n_tokens": 1'
    return (
        f"lmcache: with first_token {first_token}, decoders must run {expected} (in kv_connector_extra_config), which "
        "a proxy cannot see; otherwise a page of each prompt stays in their PD buffers for ever"
    )


def _check_same(values: Mapping[str, object], key: str) -> None:
    for name, value in values.items():
        first, expected = next(iter(values.items()))
        if value != expected:
            raise ConfigError(
                f"{key}: {first!r} has {expected} and {name!r} has {value}; give all engines of a model the same, for "
                "LMCache finds KV by it"
            )


def _check_sender(name: str, one: LMCacheConfig, proxy_port: int) -> None:
    if not one.notifies:
        raise ConfigError(
            f"lmcache_config: {one.path}: pd_skip_proxy_notification is true, so that {name!r} never says that KV is "
            "ready; leave it out"
        )
    if one.proxy_port is not None and proxy_port and one.proxy_port != proxy_port:
        raise ConfigError(
            f"proxy_port: {name!r} notifies port {one.proxy_port} ({one.path}: pd_proxy_port), and this proxy listens "
            f"on {proxy_port}; make them equal"
        )


# ── pages ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _pages(name: str, size: int | None, chunk: int, geometry: KvGeometry | None, is_reference: bool) -> tuple[int, int]:
    """Returns the bytes of a page, and the number of pages. Raises `ConfigError`."""
    if size is None:
        raise ConfigError(
            f"pd_buffer_size: how large the PD buffer of decoder {name!r} is, its engine does not tell; give "
            "--pd-buffer-size, or lmcache_config, the YAML it was started with"
        )
    if geometry is None and not is_reference:
        raise ConfigError(
            f"model: how many pages the {size:,} bytes of decoder {name!r} hold depends on its model; give --model, a "
            "folder with the model's config.json"
        )
    if geometry is None:
        per_token = _taken_for_granted(name, "--model", REFERENCE_BYTES_PER_TOKEN, "bytes of KV per token")
        geometry = KvGeometry((LayerGroup("full", 0, per_token),))
    try:
        cut = capacity(geometry, size, chunk)
    except GeometryError as error:
        raise ConfigError(f"pd_buffer_size: decoder {name!r}: {error}") from None
    return cut.page_bytes, cut.pages


def _taken_for_granted(name: str, option: str, value: int, what: str) -> int:
    """Returns `value` and logs a warning. LMCache's example proxy assumes it for its own example; elsewhere the buffer
    may be overfilled.
    """
    log.warning("lmcache: no %s: taking %s %s for granted for decoder %r", option, f"{value:,}", what, name)
    return value


def _ports(
    merged: _Merged, name: str, init_ports: tuple[int, ...], alloc_ports: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    inits = merged("receiver_ports", init_ports or None, "init_ports") or ()
    allocs = merged("alloc_ports", alloc_ports or None, "alloc_ports") or ()
    for option, ports, flag in (
        ("receiver_ports", inits, "--decoder-init-port"),
        ("alloc_ports", allocs, "--decoder-alloc-port"),
    ):
        if not ports:
            raise ConfigError(
                f"{option}: where decoder {name!r} takes KV in is not known; give {flag}, one port per rank, or "
                "lmcache_config, the YAML it was started with"
            )
    if len(inits) != len(allocs):
        raise ConfigError(
            f"alloc_ports: decoder {name!r} has {len(inits)} init ports and {len(allocs)} alloc ports; it has one of "
            "each per rank"
        )
    return inits, allocs


class _Merged:
    """A `_Merged` takes an option as it is given, else as the YAML has it. Raises `ConfigError` where the two
    differ.
    """

    def __init__(self, name: str, config: LMCacheConfig | None) -> None:
        self._name = name
        self._config = config

    def __call__(self, option: str, given: T | None, field: str) -> T | None:
        found: T | None = None if self._config is None else getattr(self._config, field) or None
        if given is not None and found is not None and given != found:
            assert self._config is not None
            raise ConfigError(
                f"{option}: decoder {self._name!r} is given {given}, and its own {self._config.path} says {found}; "
                "leave the option out, or make them equal"
            )
        return found if given is None else given


# ── the file ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _receiver(path: Path) -> LMCacheConfig:
    config = read_lmcache_config(path)
    if config.role != _RECEIVES:
        raise ConfigError(f"lmcache_config: {path}: pd_role is {config.role!r}; a decoder's is receiver")
    return config


def _load(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"lmcache_config: {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"lmcache_config: {path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"lmcache_config: {path} has no keys")
    return {_OLDER_NAMES.get(str(key), str(key)): value for key, value in values.items()}


class _Taker:
    """A `_Taker` takes values of the right type out of one file."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self._path = path
        self._values = values

    def __call__(self, key: str, type_: type[T], otherwise: T | None) -> Any:
        value = self._values.get(key)
        if value is None:
            return otherwise
        if not isinstance(value, type_):
            raise self._wrong(key, value, {str: "a text", bool: "true or false"}.get(type_, "a number"))
        return value

    def positive(self, key: str) -> int | None:
        """Returns a number of at least 1, or None where there is no value. Raises `ConfigError`.

        It also takes ``2147483648`` in quotes, as LMCache takes it from the environment.
        """
        value = self._values.get(key)
        if value is None:
            return None
        number = _int(value)
        if number is None or number < 1:
            raise self._wrong(key, value, "a number of at least 1")
        return number

    def ports(self, key: str) -> tuple[int, ...]:
        """Reads a number, a list of numbers, or ``"7300,7301"``. Raises `ConfigError`."""
        value = self._values.get(key)
        if value is None:
            return ()
        ports = tuple(_int(one) for one in _parts(value))
        if not ports or any(port is None or not 1 <= port <= 65_535 for port in ports):
            raise self._wrong(key, value, "a port or a list of ports")
        return tuple(port for port in ports if port is not None)

    def _wrong(self, key: str, value: object, expected: str) -> ConfigError:
        return ConfigError(f"lmcache_config: {self._path}: {key} is {value!r}; it is {expected}")


def _parts(value: object) -> Iterable[object]:
    if isinstance(value, str):
        return value.strip("[]").split(",")
    return value if isinstance(value, list) else [value]


def _int(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    try:
        return int(str(value).strip().replace("_", ""))
    except ValueError:
        return None
