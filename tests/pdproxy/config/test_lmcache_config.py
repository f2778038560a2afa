"""What a decoder's PD buffer holds, by options and by LMCache's own YAML."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from pdproxy.engines.lmcache import LMCacheBuffer
from pdproxy.engines.lmcache_config import (
    LMCacheConfig,
    check_lmcache_configs,
    lmcache_buffer,
    read_lmcache_config,
)
from pdproxy.errors import ConfigError
from transfer.geometry import KvGeometry, LayerGroup

LLAMA_8B = KvGeometry((LayerGroup("full", 32, 131_072),))
DECODER = """\
local_cpu: False
max_local_cpu_size: 0
enable_pd: True
transfer_channel: "nixl"
pd_role: "receiver"
pd_peer_host: "localhost"
pd_peer_init_port: [7300, 7301]
pd_peer_alloc_port: [7400, 7401]
pd_buffer_size: 2147483648 # 2GB
pd_buffer_device: "cuda"
"""
PREFILLER = """\
enable_pd: True
pd_role: "sender"
pd_proxy_host: "localhost"
pd_proxy_port: 7500
pd_buffer_size: 1073741824
pd_buffer_device: "cuda"
"""


@pytest.fixture
def decoder(tmp_path: Path) -> Path:
    path = tmp_path / "decoder.yaml"
    path.write_text(DECODER)
    return path


def buffer(**options: Any) -> LMCacheBuffer:
    given: dict[str, Any] = {
        "name": "d",
        "host": "h",
        "init_ports": (7300,),
        "alloc_ports": (7400,),
        "geometry": LLAMA_8B,
    }
    return lmcache_buffer(**(given | options))


def test_two_gibibytes_of_llama_are_64_pages() -> None:
    assert buffer(buffer_bytes=2 * 2**30) == LMCacheBuffer(
        host="h", init_ports=(7300,), alloc_ports=(7400,), num_pages=64, page_bytes=32 * 2**20, chunk_size=256
    )


def test_everything_from_the_decoders_own_file(decoder: Path) -> None:
    decoder.write_text(DECODER + "chunk_size: 128\n")
    found = lmcache_buffer(name="d", host="h", lmcache_config=decoder, geometry=LLAMA_8B)
    assert (found.init_ports, found.alloc_ports) == ((7300, 7301), (7400, 7401))
    assert (found.num_pages, found.chunk_size) == (128, 128)


def test_what_is_said_twice_is_the_same(decoder: Path) -> None:
    same: dict[str, Any] = {"buffer_bytes": 2**31, "init_ports": [7300, 7301], "chunk_size": 256}
    assert lmcache_buffer(name="d", host="h", lmcache_config=decoder, geometry=LLAMA_8B, **same).num_pages == 64


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("buffer_bytes", 2**30, "pd_buffer_size: decoder 'd' is given 1073741824"),
        ("init_ports", (1, 2), "receiver_ports"),
        ("alloc_ports", (1, 2), "alloc_ports"),
        ("chunk_size", 512, "chunk_size: .* says 256"),
    ],
)
def test_what_is_said_twice_and_differs(decoder: Path, option: str, value: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        lmcache_buffer(name="d", host="h", lmcache_config=decoder, geometry=LLAMA_8B, **{option: value})


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "pd_buffer_size: .* --pd-buffer-size, or lmcache_config"),
        ({"buffer_bytes": 2**31, "geometry": None}, "model: .* --model"),
        ({"buffer_bytes": 1000}, "pd_buffer_size: decoder 'd': .* smaller than one page"),
        ({"buffer_bytes": 2**31, "init_ports": ()}, "receiver_ports: .* --decoder-init-port"),
        ({"buffer_bytes": 2**31, "alloc_ports": ()}, "alloc_ports: .* --decoder-alloc-port"),
        ({"buffer_bytes": 2**31, "alloc_ports": (1, 2)}, "alloc_ports: .* 1 init ports and 2 alloc ports"),
    ],
)
def test_what_is_missing(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        buffer(**options)


def test_what_the_reference_proxy_takes_for_granted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = buffer(geometry=None, is_reference=True)
    assert (found.num_pages, found.page_bytes) == (64, 32 * 2**20)
    assert "no --pd-buffer-size: taking 2,147,483,648" in caplog.text
    assert "no --model: taking 131,072" in caplog.text


def test_nothing_is_taken_for_granted_that_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        buffer(buffer_bytes=2**31, is_reference=True)
    assert not caplog.records


# ── the file ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("ports", ["7300", "[7300]", '"7300"'])
def test_one_port_is_a_list_of_one(decoder: Path, ports: str) -> None:
    decoder.write_text(DECODER.replace("[7300, 7301]", ports))
    assert read_lmcache_config(decoder).init_ports == (7300,)


def test_older_names(decoder: Path) -> None:
    older = DECODER.replace("enable_pd", "enable_xpyd").replace("pd_role", "nixl_role")
    decoder.write_text(older.replace("pd_peer", "nixl_peer").replace("pd_buffer_size", "nixl_buffer_size"))
    config = read_lmcache_config(decoder)
    assert (config.role, config.alloc_ports, config.buffer_bytes) == ("receiver", (7400, 7401), 2**31)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "has no keys"),
        ("- 1\n", "has no keys"),
        ("a: [\n", "is not valid YAML"),
        ("pd_role: receiver\n", "enable_pd is not true"),
        ("enable_pd: true\n", "pd_role is None"),
        (DECODER.replace("[7300, 7301]", "[7300, x]"), r"pd_peer_init_port is \[7300, 'x'\]; it is a port"),
        (DECODER.replace("2147483648", "2GB"), "pd_buffer_size is '2GB'; it is a number"),
        (DECODER + "chunk_size: 0\n", "chunk_size is 0"),
        (DECODER + "chunk_size: true\n", "chunk_size is True"),
        (DECODER.replace('"localhost"', "7"), "pd_peer_host is 7; it is a text"),
    ],
)
def test_files_that_are_none(decoder: Path, text: str, named: str) -> None:
    decoder.write_text(text)
    with pytest.raises(ConfigError, match=named) as raised:
        read_lmcache_config(decoder)
    assert str(decoder) in str(raised.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_lmcache_config(tmp_path / "decoder.yaml")


def test_a_prefillers_file_is_no_decoders(decoder: Path) -> None:
    decoder.write_text(PREFILLER)
    with pytest.raises(ConfigError, match="pd_role is 'sender'; a decoder's is receiver"):
        buffer(lmcache_config=decoder)


# ── together ────────────────────────────────────────────────────────────────────────────────────────────────────────


def config(role: str, **fields: Any) -> LMCacheConfig:
    return LMCacheConfig(path=Path(f"{role}.yaml"), role=role, **fields)


def check(first_token: str = "auto", **configs: LMCacheConfig) -> list[str]:
    return check_lmcache_configs(configs, chunk_sizes={}, proxy_port=7500, first_token=first_token)


def test_the_hash_seed_is_beyond_a_proxys_sight() -> None:
    seed, last_token = check(p=config("sender", proxy_port=7500), d=config("receiver"))
    assert "PYTHONHASHSEED" in seed
    assert '"skip_last_n_tokens": 1' in last_token
    assert "without skip_last_n_tokens" in check("decoder")[1]


@pytest.mark.parametrize(
    ("prefiller", "named"),
    [
        ({"chunk_size": 512}, "chunk_size: 'p' has 512 and 'd' has 256"),
        ({"hash_algorithm": "sha256_cbor"}, "pre_caching_hash_algorithm: 'p' has sha256_cbor"),
        ({"notifies": False}, "pd_skip_proxy_notification"),
        ({"proxy_port": 7501}, "proxy_port: 'p' notifies port 7501 .* listens on 7500"),
    ],
)
def test_engines_that_would_not_find_each_other(prefiller: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        check(p=config("sender", **prefiller), d=config("receiver"))


def test_chunk_sizes_known_by_other_means() -> None:
    with pytest.raises(ConfigError, match="chunk_size: 'd' has 128 and 'p' has 256"):
        check_lmcache_configs({"p": config("sender")}, chunk_sizes={"d": 128}, proxy_port=0, first_token="auto")
