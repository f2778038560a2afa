"""Who waits names nobody: whatever happens to the fleet meanwhile, whoever can serve a request does, and none is lost.

Each decoder has room for one of these prompts, so that pages that somebody holds let everybody wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pdproxy.fleet.instance import Instance
from tests.fakes.calls import Answer, Call
from tests.fakes.fake_engine import BROKEN, WORDS, FakeEngine, ScriptedEngine, error_reply
from tests.fakes.fake_vllm import FakeNixl
from tests.fakes.fleet import Held
from tests.fakes.proxy_harness import Harness, proxy_in_front_of, until

PAGES = 4
PROMPT = [1] * (16 * PAGES - len(WORDS))
"""With its answer, it takes all the pages of a decoder."""
KEY = {"authorization": "Bearer operator"}
COOL_OFF_S = 0.15


def engines(role: str, num: int, **options: Any) -> list[FakeEngine]:
    return [FakeEngine(role, num_pages=PAGES, **options) for _ in range(num)]  # type: ignore[arg-type]


@asynccontextmanager
async def full_house(
    num_decoders: int = 2, num_prefillers: int = 1, **options: Any
) -> AsyncIterator[tuple[Harness, list[Held]]]:
    """No decoder has a page left; somebody holds them all, one by one."""
    options = {"admin_key": "operator", "probe_successes": 1, "retries": 0} | options
    prefillers, decoders = engines("prefill", num_prefillers), engines("decode", num_decoders)
    async with proxy_in_front_of(prefillers, decoders, **options) as house:
        held = [await Held(one, PAGES).wait() for one in house.proxy.pool.of_role("decode")]
        yield house, held
        for one in held:
            one.release()


async def waiting(house: Harness, num: int, **body: Any) -> list[Call]:
    before = house.admission.num_waiting
    calls = [house.call(**({"prompt": PROMPT} | body)) for _ in range(num)]
    await until(lambda: house.admission.num_waiting == before + num)
    return calls


async def answers(calls: Sequence[Call]) -> list[Answer]:
    """Of requests none of which may be lost."""
    told = [await call.answer() for call in calls]
    assert [one.status for one in told] == [200] * len(calls), [one.body for one in told if one.status != 200]
    return told


def by(told: Sequence[Answer], role: str = "decoder") -> set[str]:
    return {one.headers[f"x-pdproxy-{role}"] for one in told}


async def some_turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def admin(house: Harness, method: str, path: str, body: str = "") -> None:
    answer = await house.call_raw(f"/admin/instances{path}", body.encode(), KEY, method).answer()
    assert answer.status < 300, answer.body


def instance(house: Harness, name: str) -> Instance:
    found = house.proxy.pool.find(name)
    assert found is not None
    return found


# ── room elsewhere ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("freed", [0, 1])
async def test_whoever_gets_free_serves_all_who_wait(freed: int) -> None:
    async with full_house() as (house, held):
        calls = await waiting(house, 3)
        held[freed].release()
        assert by(await answers(calls)) == {f"decode-{freed}"}


async def test_one_that_comes_up_serves_those_who_have_waited_before_it_was_there() -> None:
    decoders = engines("decode", 2)
    async with proxy_in_front_of(decoders=decoders, wait=False, probe_successes=1) as house:
        house.client_of(decoders[1]).is_up = False
        await until(lambda: house.proxy.pool.is_ready and instance(house, "decode-1").health == "down")
        held = await Held(instance(house, "decode-0"), PAGES).wait()
        calls = await waiting(house, 3)
        house.client_of(decoders[1]).is_up = True
        assert by(await answers(calls)) == {"decode-1"}
        held.release()


# ── what happens to an instance while requests wait ─────────────────────────────────────────────────────────────────


async def down(house: Harness) -> None:
    house.decoder.fail_at["/health"] = house.decoder.fail_at["/kv_buffer"] = error_reply(500, "broken")
    instance(house, "decode-0").lost("it answers nonsense")


async def refused(house: Harness) -> None:
    house.client_of(house.decoder).is_up = False
    instance(house, "decode-0").suspect("nobody listens", is_lost=True)


async def drained(house: Harness) -> None:
    await admin(house, "POST", "/decode-0/drain")


async def removed(house: Harness) -> None:
    await admin(house, "DELETE", "/decode-0?force=true")


async def broken(house: Harness) -> None:
    one = instance(house, "decode-0")
    for _ in range(5):
        one.leg_finished(one.leg_started(), "failed")


@pytest.mark.parametrize("event", [down, refused, drained, removed, broken])
async def test_who_waits_goes_where_room_is_and_never_to_one_that_gets_nothing_new(
    event: Callable[[Harness], Awaitable[None]],
) -> None:
    async with full_house(breaker_cool_off_s=60.0) as (house, held):
        calls = await waiting(house, 3)
        await event(house)
        held[0].release()
        await some_turns()
        assert house.admission.num_waiting == 3, "it has room, and gets nothing new"
        held[1].release()
        assert by(await answers(calls)) == {"decode-1"}


async def test_the_last_one_that_is_left_serves_everybody() -> None:
    async with full_house(3) as (house, held):
        calls = await waiting(house, 5)
        for name in ("decode-0", "decode-1"):
            await admin(house, "DELETE", f"/{name}?force=true")
        held[0].release()
        held[1].release()
        await some_turns()
        assert house.admission.num_waiting == 5
        held[2].release()
        assert by(await answers(calls)) == {"decode-2"}


async def test_where_nobody_is_left_who_waits_is_told_at_once() -> None:
    async with full_house(1, when_no_decoder="refuse") as (house, held):
        calls = await waiting(house, 3)
        await admin(house, "DELETE", "/decode-0?force=true")
        held[0].release()
        told = [await call.answer() for call in calls]
        assert {(one.status, one.error["code"]) for one in told} == {(503, "no_ready_instance")}


async def test_a_new_process_is_empty_and_serves_those_who_have_waited_for_the_old_one() -> None:
    async with full_house() as (house, _):
        calls = await waiting(house, 3)
        house.decoder.restart()
        instance(house, "decode-0").suspected.set()
        assert by(await answers(calls)) == {"decode-0"}
        assert instance(house, "decode-1").held == PAGES


async def test_under_another_name_it_has_the_pages_that_it_had() -> None:
    async with full_house() as (house, held):
        calls = await waiting(house, 3)
        await admin(house, "DELETE", "/decode-0?force=true")
        await admin(house, "POST", "", '{"name": "decode-9", "role": "decode", "url": "http://d0:1"}')
        await until(lambda: instance(house, "decode-9").health == "alive")
        await some_turns()
        assert instance(house, "decode-9").held == PAGES, "it is the same process"
        assert house.admission.num_waiting >= 3
        held[0].release()
        assert by(await answers(calls)) == {"decode-9"}


async def test_what_a_renamed_one_still_holds_is_dropped_under_its_new_name() -> None:
    """The request was bound to the place by its old name, and is over when that has left."""
    async with proxy_in_front_of(decoders=engines("decode", 1), admin_key="operator") as house:
        house.decoder.hang_at.add("decode")
        call = house.call(prompt=PROMPT)
        await house.decoder.reached("decode")
        house.decoder.pages["of another"] = 0
        await admin(house, "DELETE", "/decode-0?force=true")
        await admin(house, "POST", "", '{"name": "decode-9", "role": "decode", "url": "http://d0:1"}')
        call.leave()
        await call.done()
        house.decoder.let_go("decode")
        await house.settled()
        assert house.proxy.reaper.statistics()["dropped"] == 1
        assert len(house.decoder.cancelled) == 1
        del house.decoder.pages["of another"]
        await until(lambda: instance(house, "decode-9").is_ready)


async def test_a_breaker_that_opens_and_cools_off_lets_one_of_those_who_wait_try() -> None:
    async with full_house(breaker_cool_off_s=COOL_OFF_S) as (house, held):
        calls = await waiting(house, 4, prompt=[1])
        await broken(house)
        held[0].release()
        house.decoder.hang_at.add("decode")
        house.prefiller.hang_at.add("prefill")
        await some_turns()
        assert house.admission.num_waiting == 4
        await house.prefiller.reached("prefill")
        await asyncio.sleep(COOL_OFF_S / 4)
        assert house.admission.num_waiting == 3, "there would be room for all of them"
        house.prefiller.let_go("prefill")
        await house.decoder.reached("decode")
        await asyncio.sleep(COOL_OFF_S / 4)
        assert len(house.decoder.generations()) == 1, "the one that tries has not told yet how it went"
        assert house.admission.num_waiting == 3
        house.decoder.let_go("decode")
        assert by(await answers(calls)) == {"decode-0"}


async def test_who_tries_a_half_open_one_and_fails_leaves_the_others_in_line() -> None:
    async with full_house(breaker_cool_off_s=COOL_OFF_S) as (house, held):
        calls = await waiting(house, 3, prompt=[1])
        await broken(house)
        house.decoder.fail_at["decode"] = BROKEN
        held[0].release()
        trying = await next_done(calls)
        assert (await trying.answer()).status == 502, "nothing was to be tried again"
        assert len(house.decoder.generations()) == 1
        assert house.admission.num_waiting == 2
        held[1].release()
        assert by(await answers([call for call in calls if call is not trying])) == {"decode-1"}
        house.decoder.fail_at.clear()


async def next_done(calls: Sequence[Call]) -> Call:
    await until(lambda: any(call.task.done() for call in calls))
    return next(call for call in calls if call.task.done())


# ── prefillers ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("how", ["refused", "silent"])
async def test_no_leg_goes_to_a_prefiller_that_is_known_to_be_down(how: str) -> None:
    async with full_house(1, 2) as (house, held):
        calls = await waiting(house, 40)
        house.client_of(house.prefiller).is_up = False
        prefiller = instance(house, "prefill-0")
        prefiller.suspect("nobody listens", is_lost=True) if how == "refused" else prefiller.lost("no answer")
        held[0].release()
        assert by(await answers(calls), "prefiller") == {"prefill-1"}
        assert house.prefiller.generations() == []
        house.client_of(house.prefiller).is_up = True


async def test_a_drained_prefiller_is_idle_however_many_wait_and_leaves_without_force() -> None:
    async with full_house(1, 2) as (house, held):
        calls = await waiting(house, 40)
        await admin(house, "POST", "/prefill-0/drain")
        assert instance(house, "prefill-0").is_idle
        await admin(house, "DELETE", "/prefill-0")
        held[0].release()
        assert by(await answers(calls), "prefiller") == {"prefill-1"}
        assert house.prefiller.generations() == []


# ── slots at prefillers ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("full", [0, 1])
async def test_a_prefiller_without_a_free_block_is_passed_by(full: int) -> None:
    prefillers: list[ScriptedEngine] = [FakeNixl("prefill"), FakeNixl("prefill")]
    async with proxy_in_front_of(prefillers, [FakeNixl("decode")], retries=0) as house:
        one = house.proxy.pool.of_role("prefill")[full]
        held = await Held(one, one.capacity).wait()
        calls = [house.call(prompt=PROMPT) for _ in range(6)]
        assert by(await answers(calls), "prefiller") == {f"prefill-{1 - full}"}
        held.release()


async def test_blocks_that_come_back_at_either_prefiller_serve_who_waits() -> None:
    prefillers: list[ScriptedEngine] = [FakeNixl("prefill"), FakeNixl("prefill")]
    async with proxy_in_front_of(prefillers, [FakeNixl("decode")], retries=0) as house:
        held = [await Held(one, one.capacity).wait() for one in house.proxy.pool.of_role("prefill")]
        calls = await waiting(house, 3)
        held[1].release()
        assert by(await answers(calls), "prefiller") == {"prefill-1"}
        held[0].release()


# ── sessions ────────────────────────────────────────────────────────────────────────────────────────────────────────

AFFINITY: dict[str, Any] = {"decode_policy": "session_affinity", "session_header": "X-User"}
ME = {"x-user": "me"}


async def test_a_session_waits_for_its_home_for_a_while() -> None:
    decoders = engines("decode", 3)
    async with proxy_in_front_of(decoders=decoders, affinity_wait_s=30.0, **AFFINITY) as house:
        [home] = by(await answers([house.call(headers=ME)]))
        held = await Held(instance(house, home), PAGES).wait()
        call = house.call(headers=ME, prompt=PROMPT)
        await until(lambda: house.admission.num_waiting == 1)
        assert (await house.post(prompt=PROMPT)).status == 200, "others go on meanwhile"
        assert house.admission.num_waiting == 1
        held.release()
        assert by(await answers([call])) == {home}


async def test_a_session_whose_home_stays_full_is_served_elsewhere() -> None:
    wait_s = 0.1
    async with proxy_in_front_of(decoders=engines("decode", 3), affinity_wait_s=wait_s, **AFFINITY) as house:
        [home] = by(await answers([house.call(headers=ME)]))
        held = await Held(instance(house, home), PAGES).wait()
        began = asyncio.get_running_loop().time()
        told = await answers([house.call(headers=ME, prompt=PROMPT) for _ in range(4)])
        assert asyncio.get_running_loop().time() - began >= wait_s
        assert home not in by(told)
        held.release()
        assert by(await answers([house.call(headers=ME, prompt=PROMPT)])) == {home}


async def test_a_session_whose_home_goes_away_is_served_elsewhere_at_once() -> None:
    options = AFFINITY | {"admin_key": "operator"}
    async with proxy_in_front_of(decoders=engines("decode", 3), affinity_wait_s=30.0, **options) as house:
        [home] = by(await answers([house.call(headers=ME)]))
        held = await Held(instance(house, home), PAGES).wait()
        call = house.call(headers=ME, prompt=PROMPT)
        await until(lambda: house.admission.num_waiting == 1)
        await admin(house, "POST", f"/{home}/drain")
        assert home not in by(await answers([call]))
        held.release()


# ── what was let in before ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("is_begun", [False, True], ids=["retry", "continuation"])
async def test_what_is_tried_again_keeps_its_age_and_no_full_queue_keeps_it_out(is_begun: bool) -> None:
    """One decoder dies under the oldest request; all others are full, and others wait already."""
    point = "middle" if is_begun else "decode"
    async with full_house(retries=2, retry_min_per_s=100, max_queue=1, breaker_faults=100) as (house, held):
        held[0].release()
        house.decoder.hang_at.add(point)
        oldest = house.call(prompt=PROMPT, stream=True, headers={"x-request-id": "oldest"})
        await house.decoder.reached(point)
        taken = Held(instance(house, "decode-0"), PAGES, priority=9)
        younger = await waiting(house, 2)
        assert (await house.post(prompt=PROMPT)).status == 429, "the queue is full"
        house.decoder.fail_at[point] = BROKEN
        house.decoder.let_go(point)
        await taken.wait()
        await until(lambda: house.admission.num_waiting == 3)
        house.decoder.fail_at.clear()
        for engine in (*house.prefillers, *house.decoders):
            engine.forget()
        held[1].release()
        [first, *others] = await answers([oldest, *younger])
        assert first.text() == "".join(WORDS)
        assert house.prefiller.generations()[0].headers["x-request-id"] == "oldest"
        assert len(others) == 2
        taken.release()
