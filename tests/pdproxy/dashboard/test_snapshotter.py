"""How an instance is, in a word, and what a look takes with it."""

from __future__ import annotations

import pytest

from pdproxy.dashboard.cards import card, word
from pdproxy.dashboard.traffic import MAX_MODEL_CHARACTERS, NUM_SLOWEST
from tests.fakes.calls import Call
from tests.fakes.eyes import picture_of, told
from tests.fakes.proxy_harness import proxy_in_front_of, until


async def test_the_worst_is_what_is_said() -> None:
    async with proxy_in_front_of() as house:
        decoder = house.proxy.pool.instances[1]
        assert word(decoder) == "ready"
        for _ in range(5):
            decoder.leg_finished(decoder.leg_started(), "failed")
        assert word(decoder) == "breaker open"
        decoder.drain()
        assert word(decoder) == "draining"
        decoder.lost("it answers nonsense")
        assert (word(decoder), card(decoder)["why"]) == ("down", "it answers nonsense")
        assert card(decoder)["breaker"] == "open"


async def test_nothing_is_said_of_what_is_not_known() -> None:
    async with proxy_in_front_of(wait=False) as house:
        told_of = card(house.proxy.pool.instances[1])
        assert told_of["word"] == "unknown"
        assert None not in told_of.values()
        assert "epoch" not in told_of
        assert "capacity" not in told_of
        await house.is_ready()


@pytest.mark.parametrize("num", [NUM_SLOWEST + 3])
async def test_the_longest_under_way_come_first_and_not_all_of_them(num: int) -> None:
    async with proxy_in_front_of() as house:
        house.prefiller.hang_at.add("prefill")
        calls: list[Call] = []
        for number in range(num):
            calls.append(house.call(headers={"x-request-id": f"number-{number}"}, model="tiny"))
            await until(lambda: house.proxy.orchestrator.num_requests == len(calls))
        looking = house.call_raw("/ui/events", b"", method="GET")
        await until(lambda: bool(told(b"".join(looking.pieces))))
        picture = picture_of(told(b"".join(looking.pieces)))
        assert [row["id"] for row in picture["slow"]] == [f"number-{number}" for number in range(NUM_SLOWEST)]
        assert picture["flow"]["in_flight"] == num
        assert sum(picture["flow"]["now"].values()) == num
        looking.leave()
        await looking.ended()
        house.prefiller.let_go("prefill")
        for call in calls:
            await call.done()


async def test_a_clients_words_are_cut_short() -> None:
    async with proxy_in_front_of() as house:
        house.prefiller.model = house.decoder.model = "m" * 200
        for instance in house.proxy.pool.instances:
            instance.suspected.set()
        await until(lambda: house.proxy.pool.models() == ["m" * 200])
        house.prefiller.hang_at.add("prefill")
        call = house.call(model="m" * 200)
        await house.prefiller.reached("prefill")
        looking = house.call_raw("/ui/events", b"", method="GET")
        await until(lambda: bool(told(b"".join(looking.pieces))))
        [row] = picture_of(told(b"".join(looking.pieces)))["slow"]
        assert row["model"] == "m" * MAX_MODEL_CHARACTERS
        looking.leave()
        await looking.ended()
        house.prefiller.let_go("prefill")
        await call.done()
