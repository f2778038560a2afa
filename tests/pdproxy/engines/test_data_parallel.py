"""vLLM with several data-parallel ranks, and with several API servers, behind one address."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import pytest

from pdproxy.admission import orphans
from pdproxy.config.instances import InstanceSettings
from pdproxy.fleet.instance import Health, Instance
from pdproxy.inspection.running_proxy import fleet_of, read_page
from tests.fakes.fake_engine import BROKEN
from tests.fakes.fake_vllm import FakeNixl
from tests.fakes.proxy_harness import Harness, proxy_in_front_of, until

PAGE_TOKENS = 16


def ranked(role: Any, num_ranks: int, **options: Any) -> FakeNixl:
    engine = FakeNixl(role, **options)
    engine.num_ranks = num_ranks
    return engine


def canaries(engine: FakeNixl) -> list[str]:
    seen = [call.headers.get("x-request-id", "") for call in engine.calls]
    return [name for name in seen if name.startswith("canary")]


async def look(house: Harness, name: str) -> Instance:
    """Has the proxy look at an instance, and returns it when it has been looked at."""
    instance = next(one for one in house.proxy.pool.instances if one.name == name)
    before = instance.heard_at
    instance.suspected.set()
    await until(lambda: instance.heard_at != before)
    return instance


# ── data-parallel ranks ─────────────────────────────────────────────────────────────────────────────────────────────


async def test_one_table_is_an_instance_for_each_rank() -> None:
    prefiller, decoder = ranked("prefill", 3), ranked("decode", 2)
    async with proxy_in_front_of([prefiller], [decoder]) as house:
        names = [instance.name for instance in house.proxy.pool.instances]
        assert names == ["prefill-0/0", "prefill-0/1", "prefill-0/2", "decode-0/0", "decode-0/1"]
        assert [instance.capacity for instance in house.proxy.pool.of_role("prefill")] == [prefiller.num_pages] * 3
        checked = fleet_of(read_page("x", (await house.get("/status")).body), ())
        assert [(one.name, one.data_parallel_rank) for one in checked][1:4] == [
            ("prefill-0/1", 1),
            ("prefill-0/2", 2),
            ("decode-0/0", 0),
        ]
        for _ in range(6):
            assert (await house.post()).status == 200
        for engine in (prefiller, decoder):
            ranks = Counter(call.headers["x-data-parallel-rank"] for call in engine.generations())
            assert set(ranks) == set(map(str, range(engine.num_ranks)))


async def test_no_rank_gets_more_than_it_has_and_all_that_all_have_is_used() -> None:
    """30 requests of 20 pages each, in front of two ranks of 64."""
    prefiller, decoder = ranked("prefill", 2, num_pages=64), FakeNixl("decode", num_pages=1000)
    async with proxy_in_front_of([prefiller], [decoder], max_queue=100) as house:
        decoder.hang_at.add("decode")
        calls = [house.call(prompt=[1] * (20 * PAGE_TOKENS - 1)) for _ in range(30)]
        await until(lambda: len(prefiller.pages) == 6)
        assert [prefiller.occupied_at(rank) for rank in (0, 1)] == [60, 60]
        assert [instance.held for instance in house.proxy.pool.of_role("prefill")] == [60, 60]
        decoder.let_go("decode")
        assert [(await call.answer()).status for call in calls] == [200] * 30
        assert prefiller.most_pages <= prefiller.num_pages
        assert decoder.wrong_pulls == []


async def test_a_rank_that_is_full_with_what_others_sent_is_not_chosen() -> None:
    prefiller = ranked("prefill", 2, num_pages=64)
    async with proxy_in_front_of([prefiller], [FakeNixl("decode")]) as house:
        prefiller.pages["somebody"] = 60
        prefiller.rank_of["somebody"] = 1
        for _ in range(2):  # one look alone may come between an end and its effect
            await look(house, "prefill-0/1")
        for _ in range(4):
            assert (await house.post(prompt=[1] * (10 * PAGE_TOKENS))).status == 200
        assert {call.headers["x-data-parallel-rank"] for call in prefiller.generations()} == {"0"}
        prefiller.free("somebody")


async def test_a_number_of_ranks_that_is_not_the_engines(caplog: pytest.LogCaptureFixture) -> None:
    prefiller = ranked("prefill", 2)
    instances = tuple(
        InstanceSettings(name=role, role=role, url=url, engine="vllm_nixl", data_parallel_size=size)
        for role, url, size in (("prefill", "http://p0:1", 3), ("decode", "http://d0:1", None))
    )
    async with proxy_in_front_of([prefiller], [FakeNixl("decode")], wait=False, instances=instances) as house:
        ranks = house.proxy.pool.of_role("prefill")
        await until(lambda: all(instance.health is Health.DOWN for instance in ranks))
        assert {instance.why for instance in ranks} == {"it has 2 data-parallel ranks, and data_parallel_size is 3"}


async def test_ranks_that_are_not_named_have_one_ranks_pages_and_a_way_out(caplog: pytest.LogCaptureFixture) -> None:
    """The engine chooses among them by itself, and may choose one for all."""
    prefiller = ranked("prefill", 4)
    instances = tuple(
        InstanceSettings(name=role, role=role, url=url, engine="vllm_nixl")
        for role, url in (("prefill", "http://p0:1"), ("decode", "http://d0:1"))
    )
    with caplog.at_level(logging.WARNING):
        async with proxy_in_front_of([prefiller], [FakeNixl("decode")], instances=instances) as house:
            assert house.proxy.pool.instances[0].capacity == prefiller.num_pages
            assert (await house.post()).status == 200
    told = [record.getMessage() for record in caplog.records if "data-parallel" in record.getMessage()]
    assert len(told) == 1
    assert told[0].startswith("prefill has 4 data-parallel ranks")
    assert "--prefill-data-parallel-size 4" in told[0]


# ── several API servers ─────────────────────────────────────────────────────────────────────────────────────────────


def untold(role: Any, **options: Any) -> FakeNixl:
    """With several API servers vLLM's /metrics does not say when its process began."""
    engine = FakeNixl(role, **options)
    engine.tells_start = False
    return engine


async def test_several_api_servers_are_one_process_for_all_looks() -> None:
    prefiller, decoder = untold("prefill"), untold("decode")
    async with proxy_in_front_of([prefiller], [decoder]) as house:
        epochs = {instance.name: {instance.epoch} for instance in house.proxy.pool.instances}
        for _ in range(5):
            assert (await house.post()).status == 200
            for name in epochs:
                epochs[name].add((await look(house, name)).epoch)
        assert {len(seen) for seen in epochs.values()} == {1}
        assert all(instance.is_ready for instance in house.proxy.pool.instances)
        assert canaries(prefiller) == []


async def test_connections_that_are_lost_are_no_restart() -> None:
    prefiller, decoder = untold("prefill"), untold("decode")
    async with proxy_in_front_of([prefiller], [decoder], probe_successes=1) as house:
        instance = house.proxy.pool.instances[0]
        epoch = instance.epoch
        with house.client_of(prefiller).refusing():
            instance.suspected.set()
            await until(lambda: instance.health is Health.DOWN)
        await look(house, instance.name)
        assert instance.epoch == epoch
        await house.is_ready()


async def test_a_restart_is_noticed_by_what_was_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of the process that has ended come back at once, and the new one has to be proven."""
    monkeypatch.setattr(orphans, "FIRST_PAUSE_S", 0.001)
    prefiller, decoder = untold("prefill", lease_s=60.0), untold("decode", lease_s=60.0)
    async with proxy_in_front_of([prefiller], [decoder], probe_successes=1) as house:
        assert (await house.post()).status == 200
        instance = await look(house, "prefill-0")
        epochs = [instance.epoch]
        decoder.forget()
        decoder.hang_at.add("decode")
        decoder.fail_at["refuse"] = BROKEN
        call = house.call(prompt=[1] * 100)
        await decoder.reached("decode")
        assert instance.held > 0
        prefiller.restart()
        await look(house, "prefill-0")
        await until(lambda: len(canaries(prefiller)) == 1)
        assert instance.held == 1, "only the canary's page"
        epochs.append(instance.epoch)
        decoder.let_go("decode")
        await call.answer()
        decoder.fail_at.clear()
        await house.is_ready()
        for _ in range(3):
            epochs.append((await look(house, "prefill-0")).epoch)
        assert len(set(epochs)) == 2
        prefiller.restart()
        assert (await look(house, "prefill-0")).epoch not in epochs
        await house.is_ready()  # until then its canary may hold a page


async def test_each_rank_notices_a_restart_and_had_none_before() -> None:
    """A rank that has served nothing itself knows it by what the others had."""
    prefiller, decoder = ranked("prefill", 2), untold("decode")
    prefiller.tells_start = False
    async with proxy_in_front_of([prefiller], [decoder], probe_successes=1) as house:
        ranks = house.proxy.pool.of_role("prefill")
        for instance in ranks:
            await look(house, instance.name)
        before = [instance.epoch for instance in ranks]
        assert before == ["http://p0:1#0", "http://p0:1#1"]
        prefiller.restart()
        for instance in ranks:
            await look(house, instance.name)
        assert all(instance.epoch != epoch for instance, epoch in zip(ranks, before, strict=True))
        await house.is_ready()
