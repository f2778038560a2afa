"""What the connector for vLLM says of an engine that it cannot serve, or not beside another one."""

from __future__ import annotations

import socket
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.e2e.cluster import free_ports
from tests.transfer.connectors.mini_vllm import HYBRID, no_facts
from transfer.agents.mock import MockAgent, MockFabric
from transfer.connectors.vllm.kv_caches import KvCaches
from transfer.connectors.vllm.receiver_thread import ReceiverThread
from transfer.errors import TransferError
from transfer.memory.buffer import PagedBuffer
from transfer.memory.views import layer_views
from transfer.roles.handshake import Identity
from transfer.roles.receiver import ReceiverConfig


class FullAttentionSpec(SimpleNamespace):
    """A specification with the name of vLLM's own."""


def kv_caches(
    cache_dtype: str = "auto", dtype: torch.dtype = torch.bfloat16, *, sleeps: bool = False, **more: Any
) -> KvCaches:
    sizes = {"block_size": 16, "num_heads": 2, "state_content_size_bytes": 256}
    sizes |= {"head_size": 128 // dtype.itemsize, "head_size_v": 128 // dtype.itemsize}
    chunk_size = more.pop("chunk_size", None)
    spec = FullAttentionSpec(dtype=dtype, extra_retained_tokens=more.pop("extra_retained_tokens", 0), **sizes)
    model = SimpleNamespace(get_total_num_kv_heads=lambda: 2, enable_sleep_mode=sleeps)
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(**{"tensor_parallel_size": 1} | more),
        model_config=model,
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
    )
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=["layers.0"])
    return KvCaches(config, SimpleNamespace(kv_cache_groups=[group]), 0, chunk_size)


def test_quantized_kv_is_told_by_what_its_bytes_mean() -> None:
    """vLLM keeps all of these as uint8."""
    quantized = [kv_caches(kind, torch.uint8).packed("CPU") for kind in ("fp8", "fp8_e4m3", "fp8_e5m2")]
    assert len({layout.kv.describe() for layout in quantized}) == 2
    plain = {kv_caches(kind, torch.bfloat16).packed("CPU").kv.describe() for kind in ("auto", "bfloat16")}
    assert len(plain) == 1


def test_a_buffer_of_quantized_kv_is_seen_as_vllm_sees_it() -> None:
    layout = kv_caches("fp8", torch.uint8).packed("CPU")
    (views,) = layer_views(PagedBuffer(2, layout.page_bytes).pages, layout)
    assert views is not None
    assert views.keys.shape == (2, 2, 16, 256)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"use_ubatching": True}, "enable_dbo"),
        ({"sleeps": True}, "enable_sleep_mode"),
        ({"extra_retained_tokens": 1}, "in front of its window"),
        ({"chunk_size": 12}, "chunk_size is 12, and vLLM's blocks have 16 tokens: give a divisor"),
        ({"chunk_size": 32}, "chunk_size is 32, and vLLM's blocks have 16 tokens: give a divisor"),
    ],
)
def test_what_cannot_be_sent_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(TransferError, match=message):
        kv_caches(**config)


@pytest.mark.parametrize(
    ("packing", "rows"),
    [
        ("FLASH_ATTN", [(1, 256)]),
        ("TRITON_ATTN", [(1, 256)]),
        ("CPU_ATTN+AVX512+vec", [(64, 2), (1, 128)]),
        ("CPU_ATTN+AVX2+vec+vec16", [(64, 2), (1, 128)]),
    ],
)
def test_blocks_are_cut_where_it_is_known_how_their_tokens_lie(packing: str, rows: list[tuple[int, int]]) -> None:
    (found,) = kv_caches(chunk_size=4).rows(packing)
    assert list(found) == rows
    assert sum(num * token_bytes for num, token_bytes in found) == 256


@pytest.mark.parametrize(
    ("packing", "cache_dtype", "dtype"),
    [
        ("CPU_ATTN+AVX512+amx", "auto", torch.bfloat16),
        ("CPU_ATTN+AVX512+amx+vec", "auto", torch.bfloat16),
        ("CPU_ATTN+AVX512", "auto", torch.bfloat16),
        ("FLASH_ATTN+TRITON_ATTN", "auto", torch.bfloat16),
        ("FLASHMLA", "auto", torch.bfloat16),
        ("FLASH_ATTN", "fp8", torch.uint8),
        ("unknown", "auto", torch.bfloat16),
    ],
)
def test_blocks_whose_order_is_not_known_are_not_cut(packing: str, cache_dtype: str, dtype: torch.dtype) -> None:
    whole, cut = kv_caches(cache_dtype, dtype), kv_caches(cache_dtype, dtype, chunk_size=4)
    assert whole.rows(packing) == []
    with pytest.raises(TransferError, match=r"are cut into such pages: leave it out, and give all engines the same"):
        cut.rows(packing)


def test_a_port_that_is_taken_is_said_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        thread = ReceiverThread(no_facts, lambda: True, "127.0.0.1", other.getsockname()[1])
        began = time.monotonic()
        with pytest.raises(TransferError, match="choose another kv_port"):
            thread.start()
        assert time.monotonic() - began < 10
        thread.close()


def test_a_receiver_port_that_is_taken_is_named() -> None:
    layout = HYBRID.of_rank()
    with socket.create_server(("127.0.0.1", 0)) as other:
        thread = ReceiverThread(no_facts, lambda: True, "127.0.0.1", free_ports(1)[0])
        thread.start()
        agent, buffer = MockAgent(MockFabric(), "decoder"), PagedBuffer(4, layout.page_bytes)
        with pytest.raises(TransferError, match="choose another receiver_port"):
            thread.receive(agent, buffer, Identity("m", layout), ReceiverConfig(port=other.getsockname()[1]))
        thread.close()
