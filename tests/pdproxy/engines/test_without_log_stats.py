"""vLLM that was started with --disable-log-stats, and engines behind certificates of one's own."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from pdproxy.assemble import http_client
from pdproxy.config.instances import InstanceSettings
from pdproxy.config.settings import Settings
from pdproxy.engines.adapter import MalformedReply
from pdproxy.engines.http.base import EngineUnreachable
from pdproxy.engines.vllm_metrics import UNKNOWN_BLOCKS, CacheReader, GivenCache
from pdproxy.errors import ConfigError
from pdproxy.inspection.fleet_check import _is_of_tls
from tests.fakes.fake_vllm import FakeNixl
from tests.fakes.proxy_harness import Harness, proxy_in_front_of
from tests.pdproxy.server.test_server import make_certificate, running

CARDS = b'{"data": [{"id": "tiny", "owned_by": "vllm"}]}'


def engines() -> tuple[FakeNixl, FakeNixl]:
    prefiller, decoder = FakeNixl("prefill"), FakeNixl("decode")
    prefiller.tells_cache = decoder.tells_cache = False
    return prefiller, decoder


async def served(house: Harness) -> None:
    answer = await house.post(prompt="a b c")
    assert answer.status == 200
    assert answer.headers["x-pdproxy-path"] == "disaggregated"


async def test_it_is_ready_without_a_number_and_the_log_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    prefiller, decoder = engines()
    async with proxy_in_front_of([prefiller], [decoder]) as house:
        await served(house)
        for _ in range(3):
            await house.proxy.probe.look(house.proxy.pool.instances[0])
        assert house.proxy.pool.instances[0].capacity == UNKNOWN_BLOCKS - 1
    assert caplog.text.count("prefill-0 does not tell the size of its KV cache") == 1


async def test_a_number_from_the_configuration_counts(caplog: pytest.LogCaptureFixture) -> None:
    prefiller, decoder = engines()
    instances = tuple(
        InstanceSettings(name=f"{role}-0", role=role, url=f"http://{role[0]}0:1", engine="vllm_nixl", **more)
        for role, more in (("prefill", {"num_blocks": 10, "chunk_size": 16}), ("decode", {}))
    )
    async with proxy_in_front_of([prefiller], [decoder], instances=instances) as house:
        await served(house)
        assert house.proxy.pool.instances[0].capacity == 10
        assert house.proxy.pool.instances[0].known_facts.chunk_size == 16
    assert "prefill-0 does not tell" not in caplog.text


def test_what_vllm_tells_counts_more() -> None:
    page = b'vllm:cache_config_info{block_size="16",num_gpu_blocks="65"} 1\n'
    assert CacheReader(GivenCache("x", 10, 32), None).read(page, CARDS).num_usable_blocks == 64


@pytest.mark.parametrize("cards", [b"", b'{"data": [{"id": "tiny", "owned_by": "sglang"}]}'])
def test_an_engine_of_another_kind_is_not_taken_for_it(cards: bytes) -> None:
    with pytest.raises(MalformedReply, match="cache_config_info"):
        CacheReader(GivenCache("x", 10, 32), None).read(b"", cards)


def test_a_rank_that_others_have_is_missed() -> None:
    page = b'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="65"} 1\n'
    with pytest.raises(MalformedReply, match="it has 1 data-parallel rank, and data_parallel_rank is 3"):
        CacheReader(GivenCache("x"), 3).read(page, CARDS)


def test_blocks_need_their_size() -> None:
    with pytest.raises(ValidationError, match="num_blocks needs chunk_size"):
        InstanceSettings(name="a", role="prefill", url="http://a:1", engine="vllm_nixl", num_blocks=3)
    with pytest.raises(ValidationError, match="num_blocks is for mooncake and vllm_nixl"):
        InstanceSettings(name="a", role="prefill", url="http://a:1", num_blocks=3, chunk_size=16)


async def test_an_engine_with_a_certificate_of_its_own(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    async with running(ssl_certfile=certificate, ssl_keyfile=key) as house:
        url = f"https://127.0.0.1:{house.client.base_url.port}"
        engine = InstanceSettings(name="a", role="prefill", url=url)
        trusting = http_client(Settings(engine_cafile=certificate))(engine)
        assert (await trusting.get("/health", timeout_s=5))[0] == 200
        await trusting.aclose()
        other = http_client(Settings())(engine)
        with pytest.raises(EngineUnreachable) as caught:
            await other.get("/health", timeout_s=5)
        await other.aclose()
        assert _is_of_tls(caught.value)


def test_certificates_that_cannot_be_read(tmp_path: Path) -> None:
    for file in (tmp_path / "none", Path(__file__)):
        with pytest.raises(ConfigError, match="engine_cafile"):
            http_client(Settings(engine_cafile=file))
