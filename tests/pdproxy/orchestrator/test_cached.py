"""Requests in front of engines that tell what they have cached: who gets them, and which leg is spared."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from pdproxy.admission.custody import Evidence
from pdproxy.fleet import cache_followers, token_counts
from pdproxy.kv_events import subscriber
from pdproxy.openai.request import CHAT
from tests.fakes.fake_vllm import FakeNixl, ids_of
from tests.fakes.kv_publisher import KvPublisher, block
from tests.fakes.proxy_harness import WAYS, Harness, Way, proxy_in_front_of, until

WORDS = "a b c d e f g h i j"
SIZE = 4
CACHED = "cached"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_followers, "LOOK_S", 0.02)
    monkeypatch.setattr(subscriber, "QUIET_S", 0.1)
    monkeypatch.setattr(token_counts, "TRAITS_S", 0.0)


class Fleet:
    """Two prefillers and two decoders, each of which publishes."""

    def __init__(self, house: Harness, publishers: dict[str, KvPublisher]) -> None:
        self.house = house
        self.publishers = publishers

    async def store(self, name: str, text: str, *, num_blocks: int | None = None) -> None:
        """Until the proxy knows that the instance has the first blocks of the text."""
        ids = ids_of({"prompt": text})
        parent = None
        for number in range(len(ids) // SIZE if num_blocks is None else num_blocks):
            key = hash((name, text, number)) & (2**63 - 1)
            self.publishers[name].publish(block(key, ids[number * SIZE : (number + 1) * SIZE], parent))
            parent = key
        await self.knows(name, self.publishers[name].number)

    async def knows(self, name: str, num_events: int) -> None:
        instance = self.house.proxy.pool.find(name)
        assert instance is not None
        await until(
            lambda: (
                instance.kv_events is not None
                and instance.kv_events.index.is_exact
                and instance.kv_events.index.num_events == num_events
            )
        )


@asynccontextmanager
async def fleet(**options: Any) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        engines = {f"{role}-{i}": FakeNixl(role) for role in ("prefill", "decode") for i in (0, 1)}
        publishers = {}
        for name, engine in engines.items():
            publisher = publishers[name] = await stack.enter_async_context(KvPublisher())
            engine.kv_events = publisher.address, publisher.replay_address
        groups = [[engines[f"{role}-{i}"] for i in (0, 1)] for role in ("prefill", "decode")]
        policies = {"prefill_policy": "cache_aware", "decode_policy": "cache_aware"}
        house = await stack.enter_async_context(proxy_in_front_of(*groups, by_front=False, **(policies | options)))
        found = Fleet(house, publishers)
        for name in engines:
            await found.knows(name, 0)
        yield found


def way(answer: Any) -> tuple[str, str | None, str]:
    headers = answer.headers
    return headers["x-pdproxy-path"], headers.get("x-pdproxy-prefiller"), headers["x-pdproxy-decoder"]


@pytest.mark.parametrize("way_in", WAYS)
async def test_who_has_the_prompt_gets_it(way_in: Way) -> None:
    async with fleet(way=way_in) as found:
        await found.store("prefill-1", WORDS)
        await found.store("decode-0", WORDS, num_blocks=1)
        for stream in (False, True):
            answer = await found.house.post(prompt=WORDS, stream=stream)
            assert way(answer) == ("disaggregated", "prefill-1", "decode-0")
        messages = [{"role": "user", "content": WORDS}]
        assert way(await found.house.post(CHAT, messages=messages)) == ("disaggregated", "prefill-1", "decode-0")


@pytest.mark.parametrize("way_in", WAYS)
async def test_the_prefill_leg_is_spared_where_the_decoder_has_the_prompt(way_in: Way) -> None:
    async with fleet(way=way_in) as found:
        await found.store("decode-1", WORDS)
        house = found.house
        prefillers = house.proxy.pool.of_role("prefill")
        house.decoders[1].hang_at.add("middle")
        call = house.call(prompt=WORDS, stream=True)
        await house.decoders[1].reached("middle")
        assert sum(one.held for one in prefillers) == 0, "its pages came back before the answer is over"
        house.decoders[1].let_go("middle")
        assert way(await call.answer()) == ("local", None, "decode-1")
        assert not any(engine.calls for engine in house.prefillers if engine.bodies("/v1/completions"))
        assert house.proxy.pool.admission.kernel.freed[Evidence.NEVER_SENT] >= 1
        page = (await house.get("/metrics")).body.decode()
        assert f'path="local",reason="{CACHED}"' in page
        # One block less, and the pair serves it.
        assert way(await house.post(prompt=f"{WORDS} k l m"))[0] == "disaggregated"


async def test_what_is_not_exact_is_not_used() -> None:
    async with fleet() as found:
        await found.store("decode-1", WORDS)
        decoder = found.house.proxy.pool.find("decode-1")
        assert decoder is not None
        assert decoder.kv_events is not None
        found.publishers["decode-1"].is_mute = True
        await until(lambda: not decoder.kv_events.index.is_exact)  # type: ignore[union-attr]
        told = {one["name"]: one["kv_events"] for one in (await found.house.get("/status")).json()["fleet"]}
        assert told["decode-1"]["state"] == "approximate"
        assert "does not answer" in told["decode-1"]["why"]
        assert told["decode-0"]["state"] == "exact"
        assert way(await found.house.post(prompt=WORDS))[0] == "disaggregated"


@pytest.mark.parametrize("more", [{"cache_salt": "s"}, {"max_tokens": 1}, {"n": 2}])
async def test_requests_that_are_not_judged_by_their_ids(more: dict[str, Any]) -> None:
    async with fleet() as found:
        await found.store("decode-1", WORDS)
        await found.house.post(prompt=WORDS, **more)
        page = (await found.house.get("/metrics")).body.decode()
        assert f'reason="{CACHED}"' not in page


async def test_ids_that_no_tokenizer_has() -> None:
    async with fleet() as found:
        await found.store("decode-1", WORDS)
        answer = await found.house.post(prompt=[1, 2**40, 3, 4, 5, 6, 7, 8, 9])
        assert answer.headers["x-pdproxy-path"] == "disaggregated"


async def test_an_instance_that_goes_is_no_longer_followed() -> None:
    async with fleet() as found:
        await found.store("decode-1", WORDS)
        house = found.house
        gone = house.proxy.membership.retire("decode-1")
        await until(lambda: gone.kv_events is None)
        assert way(await house.post(prompt=WORDS))[0] == "disaggregated"


async def test_another_process_has_an_empty_cache() -> None:
    async with fleet() as found:
        await found.store("decode-1", WORDS)
        decoder = found.house.proxy.pool.find("decode-1")
        assert decoder is not None
        found.house.decoders[1].epoch = "another"
        await found.house.proxy.probe.look(decoder)
        assert decoder.kv_events is not None
        assert not decoder.kv_events.index.is_exact


async def test_the_metrics_of_what_is_known() -> None:
    async with fleet() as found:
        await found.store("decode-1", WORDS)
        page = (await found.house.get("/metrics")).body.decode()
        assert 'pdproxy_kv_index_blocks{instance="decode-1",role="decode"} 2.0' in page
        assert 'pdproxy_kv_index_state{instance="prefill-0",role="prefill",state="exact"} 1.0' in page
        assert 'pdproxy_kv_events_total{instance="decode-1",role="decode"} 2.0' in page
