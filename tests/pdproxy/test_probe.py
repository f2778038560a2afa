"""When an instance is ready, when it no longer is, and what a restart means."""

from __future__ import annotations

import logging

import pytest

from pdproxy.engines.base import EngineBroken
from pdproxy.fleet.instance import Health
from pdproxy.fleet.probe import MAX_MISSES, ExpectedBuffer
from tests.fakes.fake_engine import BROKEN, FakeEngine, error_reply
from tests.fakes.proxy_harness import Harness, proxy_in_front_of


async def look(house: Harness, number: int = 0) -> None:
    await house.proxy.probe.look(house.proxy.pool.instances[number])


def health(house: Harness) -> list[Health]:
    return [instance.health for instance in house.proxy.pool.instances]


async def test_ready_after_a_canary_and_the_canary_does_not_count() -> None:
    async with proxy_in_front_of() as house:
        assert house.proxy.pool.is_ready
        assert house.proxy.recent.facts() == []
        assert house.held == 0


async def test_not_ready_while_no_canary_goes_through() -> None:
    prefiller = FakeEngine("prefill")
    prefiller.fail_at["prefill"] = error_reply(500, "broken")
    async with proxy_in_front_of([prefiller], wait=False) as house:
        await look(house)
        await look(house, 1)
        assert health(house) == [Health.ALIVE, Health.ALIVE]
        assert "canary" in house.proxy.pool.instances[1].why
        assert (await house.get("/ready")).status == 503
        prefiller.fail_at.clear()
        await look(house)
        assert health(house) == [Health.READY, Health.READY]


async def test_without_canary_an_answer_is_enough() -> None:
    async with proxy_in_front_of(canary=False) as house:
        assert house.prefiller.calls == []


async def test_an_instance_that_cannot_be_reached_is_down_at_once() -> None:
    async with proxy_in_front_of() as house:
        client = house.client_of(house.prefiller)
        client.is_up = False
        await look(house)
        assert health(house) == [Health.DOWN, Health.READY]
        client.is_up = True
        await look(house)
        assert health(house) == [Health.READY, Health.READY]


async def test_a_late_answer_is_forgiven_a_few_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    async with proxy_in_front_of() as house:

        async def late(path: str, *, timeout_s: float) -> tuple[int, bytes]:
            raise EngineBroken("too late")

        monkeypatch.setattr(house.client_of(house.prefiller), "get", late)
        for _ in range(MAX_MISSES - 1):
            await look(house)
            assert health(house)[0] is Health.READY
        await look(house)
        assert health(house)[0] is Health.DOWN


async def test_restarted_decoder_is_proven_anew_and_resized() -> None:
    async with proxy_in_front_of() as house:
        house.decoder.epoch = "second"
        house.decoder.num_pages = 5
        house.prefiller.fail_at["prefill"] = BROKEN
        await look(house, 1)
        assert health(house) == [Health.READY, Health.ALIVE]
        house.prefiller.fail_at.clear()
        await look(house, 1)
        assert health(house) == [Health.READY, Health.READY]
        assert (await house.get("/status")).json()["fleet"][1]["capacity"] == 5
        assert (await house.post()).status == 200


@pytest.mark.parametrize(
    ("attribute", "value", "says"),
    [("role", "prefill", "says it is for prefill"), ("num_pages", 0, "0 pages"), ("num_ranks", 0, "0 receivers")],
)
async def test_decoder_that_is_none(attribute: str, value: object, says: str) -> None:
    async with proxy_in_front_of() as house:
        setattr(house.decoder, attribute, value)
        await look(house, 1)
        instance = house.proxy.pool.instances[1]
        assert instance.health is Health.DOWN
        assert says in instance.why


async def test_receivers_elsewhere_than_configured() -> None:
    async with proxy_in_front_of() as house:
        house.proxy.pool.instances[1]._receiver_ports = (7301,)
        house.decoder.epoch = "second"
        await look(house, 1)
        assert "receivers listen on (7300,)" in house.proxy.pool.instances[1].why


async def test_a_buffer_other_than_configured_is_told(caplog: pytest.LogCaptureFixture) -> None:
    async with proxy_in_front_of() as house:
        house.proxy.probe._expected = ExpectedBuffer(pages=99, page_bytes=1024, chunk_size=16)
        house.decoder.epoch = "second"
        with caplog.at_level(logging.WARNING):
            await look(house, 1)
        assert "decode-0 says 64 pages; the options make it 99" in caplog.text
        assert house.proxy.pool.is_ready, "its own word counts"


async def test_what_was_proven_stays_proven_while_its_process_lives() -> None:
    """A busy engine that was out of reach for a moment need not find room for another canary."""
    async with proxy_in_front_of() as house:
        house.proxy.pool.instances[0].lost("for a moment")
        house.prefiller.fail_at["prefill"] = error_reply(503, "busy")
        await look(house)
        assert health(house) == [Health.READY, Health.READY]
