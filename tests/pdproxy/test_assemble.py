"""What the options make of a proxy, and which of them cannot work."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from pdproxy.assemble import assemble, expected_buffer
from pdproxy.config import Settings
from pdproxy.errors import ConfigError

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


def test_expected_buffer(model: Path) -> None:
    settings = Settings(model=model, pd_buffer_size=1 << 20, chunk_size=64)
    expected = expected_buffer(settings)
    assert expected is not None
    assert (expected.pages, expected.page_bytes, expected.chunk_size) == (16, 65536, 64)
    halves = expected_buffer(settings.model_copy(update={"tp_size": 2}))
    assert halves is not None
    assert halves.page_bytes == 32768
    assert expected_buffer(Settings(model=model)) is None


def test_expected_buffer_of_layers_unlike(model: Path) -> None:
    """256 bytes per token and layer: a page is 64 tokens of one layer, for there is only one that keeps everything."""
    unlike = CONFIG | {"model_type": "unheard_of", "sliding_window": 100}
    unlike["layer_types"] = [*["sliding_attention"] * 3, "full_attention"]
    (model / "config.json").write_text(json.dumps(unlike))
    expected = expected_buffer(Settings(model=model, pd_buffer_size=1 << 20, chunk_size=64))
    assert expected is not None
    assert (expected.pages, expected.page_bytes, expected.chunk_size) == (64, 16384, 64)


def test_buffer_smaller_than_a_page(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"pd_buffer_size: .*smaller than one page"):
        assemble(Settings(**PAIR, model=model, pd_buffer_size=1000))


def test_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model: there is no folder"):
        assemble(Settings(**PAIR, model=tmp_path / "nothing"))


def test_model_without_tokenizer_is_told(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assemble(Settings(**PAIR, model=model))
    assert "prompts are counted in bytes" in caplog.text


def test_nothing_runs_before_it_is_started() -> None:
    proxy = assemble(Settings(**PAIR))
    assert not proxy.pool.is_ready
    proxy.check_integrity()
