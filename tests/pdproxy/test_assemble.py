"""What the options make of a proxy, and which of them cannot work."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from pdproxy.assemble import assemble, expected_buffers
from pdproxy.config.settings import Settings, load
from pdproxy.engines.http.http1.client import Http1Client
from pdproxy.engines.http.httpx_client import HttpxClient
from pdproxy.errors import ConfigError
from pdproxy.serve import Server

PAIR: dict[str, Any] = {"prefill": ("http://p:1",), "decode": ("http://d:1",), "proxy_port": 0}
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "head_dim": 16,
    "torch_dtype": "float32",
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with nothing but a config: 4 layers × 2 heads × 16 × 2 × 4 bytes = 1024 bytes per token."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def expected(model: Path, size: int = 1 << 20, **options: Any) -> list[tuple[int, int, int]]:
    """Pages, their bytes and their tokens."""
    settings = Settings(model=model, pd_buffer_size=size, chunk_size=64, **options)
    return [(one.pages, one.page_bytes, one.chunk_size) for one in expected_buffers(settings)]


def test_expected_buffer(model: Path) -> None:
    assert expected(model) == [(16, 65536, 64)]
    assert expected(model, tp_size=2) == [(32, 32768, 64)]
    assert expected_buffers(Settings(model=model)) == ()


def test_expected_buffer_of_layers_unlike(model: Path) -> None:
    """256 bytes per token and layer: a page is 64 tokens of one layer, for there is only one that keeps everything."""
    unlike = CONFIG | {"model_type": "unheard_of", "sliding_window": 100}
    unlike["layer_types"] = [*["sliding_attention"] * 3, "full_attention"]
    (model / "config.json").write_text(json.dumps(unlike))
    assert expected(model) == [(64, 16384, 64)]


def test_expected_buffer_of_latent_attention(model: Path) -> None:
    """A latent of 16 + 8 elements in 4 layers, or 4 heads of 8 + 8 and 16; a small buffer has room for the former."""
    latent = CONFIG | {"model_type": "deepseek_v3", "kv_lora_rank": 16, "qk_rope_head_dim": 8, "num_key_value_heads": 4}
    (model / "config.json").write_text(json.dumps(latent | {"qk_nope_head_dim": 8, "v_head_dim": 16}))
    assert expected(model) == [(42, 4 * 24 * 4 * 64, 64), (8, 4 * 4 * 32 * 4 * 64, 64)]
    assert expected(model, size=30_000) == [(1, 24_576, 64)]


def test_buffer_smaller_than_a_page(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"pd_buffer_size: .*smaller than one page"):
        assemble(Settings(**PAIR, model=model, pd_buffer_size=1000))


def test_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model: there is no folder"):
        assemble(Settings(**PAIR, model=tmp_path / "nothing"))


def test_model_without_tokenizer_is_told(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assemble(Settings(**PAIR, model=model))
    assert "engines are asked for the length of long prompts" in caplog.text


def test_nothing_runs_before_it_is_started() -> None:
    proxy = assemble(Settings(**PAIR))
    assert not proxy.pool.is_ready
    proxy.check_integrity()


@pytest.mark.parametrize(
    ("kind", "url", "client"),
    [
        ("auto", "http://p:1", Http1Client),
        ("auto", "https://p:1", HttpxClient),
        ("relay", "http://p:1", Http1Client),
        ("httpx", "http://p:1", HttpxClient),
    ],
)
async def test_the_client_of_an_engine(kind: str, url: str, client: type) -> None:
    proxy = assemble(load(["--prefill", url, "--decode", "http://d:1", "--engine-client", kind, "--proxy-port", "0"]))
    assert type(proxy.pool.instances[0].client) is client


async def test_the_light_client_is_refused_where_it_cannot_reach() -> None:
    with pytest.raises(ConfigError, match="engine_client: relay speaks no HTTPS, which 'prefill-0' has"):
        assemble(load(["--prefill", "https://p:1", "--decode", "http://d:1", "--engine-client", "relay"]))


def test_a_memory_budget_has_room_for_the_largest_body() -> None:
    with pytest.raises(ConfigError, match=r"memory_budget: 33554432 bytes .* max_body_bytes .* at least 38347923"):
        assemble(Settings(**PAIR, memory_budget=32 << 20))
    assert assemble(Settings(**PAIR, memory_budget=38_347_923)).memory.share().take(2 * (16 << 20))


def test_the_memory_budget_is_a_share_of_what_the_process_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdproxy.assemble.allowed_bytes", lambda: 1 << 30)
    assert assemble(Settings(**PAIR)).memory.limit_bytes == 256 << 20
    assert assemble(Settings(**PAIR, max_body_bytes=1 << 30)).memory.share().take(2 << 30), "or more for a large body"


@pytest.mark.parametrize(
    ("url", "is_told"),
    [
        ("http://p:1/v1", True),
        ("http://p:1/v1/", True),
        ("http://p:1/engine/v1", True),
        ("dns+http://prefill:1/v1", True),
        ("http://p:1", False),
        ("http://p:1/v10", False),
        ("http://v1:1/engine", False),
    ],
)
def test_a_url_with_v1_is_told(url: str, is_told: bool, caplog: pytest.LogCaptureFixture) -> None:
    assemble(Settings(**PAIR | {"prefill": (url,)}))
    assert (f"instances.url: that of 'prefill-0' is {url}; leave out /v1" in caplog.text) == is_told


class Listener:
    def __init__(self, host: str) -> None:
        self._host = host

    def getsockname(self) -> tuple[str, int]:
        return self._host, 9100


@pytest.mark.parametrize(
    ("hosts", "options", "is_told"),
    [
        (["0.0.0.0"], {}, True),
        (["::1", "10.0.0.7"], {}, True),
        (["fe80::1%eth0"], {}, True),
        (["127.0.0.1"], {}, False),
        (["::1", "127.0.0.2"], {}, False),
        (["0.0.0.0"], {"api_keys": ("a",)}, False),
        (["0.0.0.0"], {"api_keys_file": "keys"}, False),
    ],
)
def test_a_place_that_others_reach_without_a_key_is_told(
    tmp_path: Path, hosts: list[str], options: dict[str, Any], is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    if "api_keys_file" in options:
        options = {"api_keys_file": tmp_path / "keys"}
        options["api_keys_file"].write_text("a\n")
    server = Server(assemble(Settings(**PAIR, **options)))
    server.tell_place("http", [Listener(host) for host in hosts])  # type: ignore[misc]
    assert ("api_keys: there are none, so everybody who reaches 127.0.0.1:9100 may ask" in caplog.text) == is_told
