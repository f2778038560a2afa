"""vLLM's /metrics, as vLLM 0.32 writes them (shortened)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from pdproxy.admission.room import UNKNOWN_CACHE, KvCache
from pdproxy.engines.adapter import MalformedReply
from pdproxy.engines.vllm_metrics import VllmMetrics, read_metrics


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
    assert (metrics.num_gpu_blocks, metrics.block_size, metrics.usage) == (200, 32, 0.125)
    assert metrics.num_ranks == 2
    assert metrics.process_start == "1.79520153208e+09"
    assert metrics.labels["cache_dtype"] == "auto"


def test_each_rank_has_its_own_numbers() -> None:
    metrics = read_metrics(PAGE, 1)
    assert (metrics.num_gpu_blocks, metrics.usage, metrics.process_start) == (100, 0.125, "1.79520153208e+09")


def test_ranks_are_counted_among_those_behind_the_address() -> None:
    """A page of vLLM's hybrid load balancing has the ranks of one machine, by their numbers in the whole deployment."""
    page = "".join(f'{config(rank)}vllm:kv_cache_usage_perc{{engine="{rank}"}} 0.{rank}\n' for rank in (10, 8, 9, 11))
    assert [read_metrics(page.encode(), rank, 4).usage for rank in range(4)] == [0.8, 0.9, 0.10, 0.11]
    with pytest.raises(MalformedReply, match="4 data-parallel ranks, and data_parallel_rank is 4"):
        read_metrics(page.encode(), 4)
    with pytest.raises(MalformedReply, match="4 data-parallel ranks, and data_parallel_size is 8"):
        read_metrics(page.encode(), 1, 8)


def test_tokens_are_counted_where_the_start_is_not_told() -> None:
    counts = "".join(
        f'vllm:{what}_tokens_total{{engine="{rank}",model_name="tiny"}} {number}\n'
        for what, numbers in (("prompt", (100.0, 1.5e3)), ("generation", (7.0, 8.0)))
        for rank, number in enumerate(numbers)
    )
    page = config(0) + config(1) + counts
    assert read_metrics(page.encode(), 1).counts == (1600.0, 15.0)
    assert read_metrics(PAGE + counts.encode()).counts == ()


@pytest.mark.parametrize(
    ("blocks", "tokens", "usable"),
    [("400", "12800", 399), ("800", "12800", 399), ("400", "6400", 199), ("400", "99999", 399), ("400", "None", 399)],
    ids=["one rank", "two ranks, whose blocks are summed", "hybrid", "context parallel", "not told"],
)
def test_the_blocks_that_a_rank_can_use(blocks: str, tokens: str, usable: int) -> None:
    page = config(0, blocks).replace('engine="0"', f'engine="0",kv_cache_size_tokens="{tokens}"')
    assert read_metrics(page.encode()).num_usable_blocks == usable


def test_api_servers_tell_their_counts_together_and_no_start(tmp_path: Path) -> None:
    """Whichever of them is asked. The next vLLM has a folder of its own for its counts."""

    def ask(server: subprocess.Popen[str], num_tokens: int = 0) -> VllmMetrics:
        assert server.stdin is not None
        assert server.stdout is not None
        print(num_tokens, file=server.stdin, flush=True)
        return read_metrics(json.loads(server.stdout.readline()).encode())

    with ExitStack() as stack:
        first, second, restarted = (
            stack.enter_context(api_server(tmp_path / folder)) for folder in ("first", "first", "second")
        )
        counts = [
            ask(server, num_tokens).counts for server, num_tokens in ((first, 7), (second, 0), (second, 5), (first, 0))
        ]
        assert counts == [(7.0, 1.0), (7.0, 1.0), (12.0, 2.0), (12.0, 2.0)]
        metrics = ask(first)
        assert (metrics.process_start, metrics.num_gpu_blocks, metrics.usage) == (None, 65, 0.25)
        assert ask(restarted).counts == (0.0, 0.0)


@contextmanager
def api_server(folder: Path) -> Iterator[subprocess.Popen[str]]:
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "tests.helpers.api_servers"]
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(folder)}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        yield server


def test_a_decoders_kv_cache_in_tokens() -> None:
    page = config(0, "101") + "vllm:kv_cache_usage_perc 0.5\n"
    assert read_metrics(page.encode()).cache == KvCache(3200, 32, 1600, is_queueing=False)
    page += 'vllm:num_requests_waiting{engine="0"} 2.0\n'
    assert read_metrics(page.encode()).cache == KvCache(3200, 32, 1600, is_queueing=True)
    assert read_metrics(config(0, "101").encode()).cache == KvCache(3200, 32, None)
    assert read_metrics(f"{config(0)}vllm:num_requests_waiting NaN\n".encode()).num_waiting == 0


def test_the_kv_cache_of_one_rank_and_of_all_ranks_where_none_is_named() -> None:
    ranks = ((0, "0.25", 0), (1, "0.5", 3))
    page = "".join(config(n, "202").replace('engine="', 'kv_cache_size_tokens="3232",engine="') for n, *_ in ranks)
    page += "".join(f'vllm:kv_cache_usage_perc{{engine="{n}"}} {share}\n' for n, share, _ in ranks)
    page += "".join(f'vllm:num_requests_waiting{{engine="{n}"}} {num}.0\n' for n, _, num in ranks)
    assert read_metrics(page.encode(), 0).cache == KvCache(3200, 32, 800, is_queueing=False)
    assert read_metrics(page.encode(), 1).cache == KvCache(3200, 32, 1600, is_queueing=True)
    assert read_metrics(page.encode()).cache == KvCache(6400, 32, 2400, is_queueing=True)


def test_a_kv_cache_without_blocks_to_use_is_not_known() -> None:
    assert read_metrics(config(0, "1").encode()).cache == UNKNOWN_CACHE


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
    with pytest.raises(MalformedReply, match="2 data-parallel ranks, and data_parallel_rank is 2"):
        read_metrics(PAGE, 2)
