"""vLLM's /metrics, as vLLM 0.32 writes them (shortened)."""

from __future__ import annotations

import pytest

from pdproxy.engines.adapter import MalformedReply
from pdproxy.engines.vllm_metrics import read_metrics


def config(engine: int, blocks: str = "400", block_size: str = "32") -> str:
    return (
        f'vllm:cache_config_info{{block_size="{block_size}",cache_dtype="auto",enable_prefix_caching="True",'
        f'engine="{engine}",num_gpu_blocks="{blocks}",num_gpu_blocks_override="7",mamba_block_size="None"}} 1.0\n'
    )


PAGE = (
    "# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.\n"
    "# TYPE process_start_time_seconds gauge\n"
    "process_start_time_seconds 1.79520153208e+09\n"
    "# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig\n"
    + config(0)
    + config(1, blocks="200")
    + 'vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.0\n'
    + 'vllm:kv_cache_usage_perc{engine="1",model_name="a, \\"}{ b"} 0.125\n'
).encode()


def test_the_first_rank_where_none_is_named_and_the_fullest_ones_usage() -> None:
    metrics = read_metrics(PAGE)
    assert (metrics.num_gpu_blocks, metrics.block_size, metrics.usage) == (400, 32, 0.125)
    assert metrics.process_start == "1.79520153208e+09"
    assert metrics.labels["cache_dtype"] == "auto"


def test_each_rank_has_its_own_numbers() -> None:
    metrics = read_metrics(PAGE, 1)
    assert (metrics.num_gpu_blocks, metrics.usage, metrics.process_start) == (200, 0.125, "1.79520153208e+09")


@pytest.mark.parametrize(
    ("blocks", "tokens", "usable"),
    [("400", "12800", 399), ("800", "12800", 399), ("400", "6400", 199), ("400", "99999", 399), ("400", "None", 399)],
    ids=["one rank", "two ranks, whose blocks are summed", "hybrid", "context parallel", "not told"],
)
def test_the_blocks_that_a_rank_can_use(blocks: str, tokens: str, usable: int) -> None:
    page = config(0, blocks).replace('engine="0"', f'engine="0",kv_cache_size_tokens="{tokens}"')
    assert read_metrics(page.encode()).num_usable_blocks == usable


def test_what_need_not_be_there() -> None:
    metrics = read_metrics(config(0).encode())
    assert (metrics.usage, metrics.process_start) == (None, None)
    assert metrics.num_used_blocks is None


@pytest.mark.parametrize("value", ["soon", "NaN", "+Inf", "-0.5", "1.5"])
def test_a_usage_that_is_no_share_is_none(value: str) -> None:
    assert read_metrics(f"{config(0)}vllm:kv_cache_usage_perc {value}\n".encode()).usage is None


@pytest.mark.parametrize(
    ("usage", "used"), [(0.0, 0), (1 / 399, 1), (1.0 - 396 / 399, 3), (1.9 / 399, 1), (398 / 399, 398), (1.0, 399)]
)
def test_blocks_in_use_are_rounded_down(usage: float, used: int) -> None:
    page = f'{config(0)}vllm:kv_cache_usage_perc{{engine="0"}} {usage}\n'
    assert read_metrics(page.encode()).num_used_blocks == used


def test_an_older_version_has_another_name_for_it() -> None:
    page = f"{config(0)}vllm:gpu_cache_usage_perc 0.5\n"
    assert read_metrics(page.encode()).num_used_blocks == 199
    both = f"{page}vllm:kv_cache_usage_perc 0.25\n"
    assert read_metrics(both.encode()).num_used_blocks == 99


@pytest.mark.parametrize(
    "page",
    [
        b"",
        b"\xff",
        b"# vllm:cache_config_info\n",
        config(0, blocks="None").encode(),
        config(0, blocks="0").encode(),
        config(0, block_size="-1").encode(),
    ],
)
def test_pages_without_a_capacity(page: bytes) -> None:
    with pytest.raises(MalformedReply, match="metrics"):
        read_metrics(page)


def test_a_rank_that_is_not_there() -> None:
    with pytest.raises(MalformedReply, match="of engine 2"):
        read_metrics(PAGE, 2)
