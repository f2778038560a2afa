"""What the connector for vLLM says of an engine that it cannot serve, or not beside another one."""

from __future__ import annotations

import socket
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.transfer.connectors.mini_vllm import no_facts
from transfer.connectors.vllm.kv_caches import KvCaches
from transfer.connectors.vllm.receiver_thread import ReceiverThread
from transfer.errors import TransferError


class FullAttentionSpec(SimpleNamespace):
    """A specification with the name of vLLM's own."""


def kv_caches(
    cache_dtype: str = "auto", dtype: torch.dtype = torch.bfloat16, *, sleeps: bool = False, **parallel: Any
) -> KvCaches:
    spec = FullAttentionSpec(block_size=16, dtype=dtype, num_kv_heads=2, num_heads=2, state_content_size_bytes=256)
    model = SimpleNamespace(get_total_num_kv_heads=lambda: 2, enable_sleep_mode=sleeps)
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(**{"tensor_parallel_size": 1} | parallel),
        model_config=model,
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
    )
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=["layers.0"])
    return KvCaches(config, SimpleNamespace(kv_cache_groups=[group]), 0)


def test_quantized_kv_is_told_by_what_its_bytes_mean() -> None:
    """vLLM keeps all of these as uint8."""
    names = {kv_caches(kind, torch.uint8).layout.kv.dtype for kind in ("fp8", "fp8_e4m3", "fp8_e5m2")}
    assert len(names) == 2
    plain = {kv_caches(kind, torch.bfloat16).layout.kv.dtype for kind in ("auto", "bfloat16")}
    assert plain == {"bfloat16"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"use_ubatching": True}, "enable_dbo"),
        ({"sleeps": True}, "enable_sleep_mode"),
    ],
)
def test_what_cannot_be_sent_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(TransferError, match=message):
        kv_caches(**config)


def test_a_port_that_is_taken_is_said_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        thread = ReceiverThread(no_facts, lambda: True, "127.0.0.1", other.getsockname()[1])
        began = time.monotonic()
        with pytest.raises(TransferError, match="choose another kv_port"):
            thread.start()
        assert time.monotonic() - began < 10
        thread.close()
