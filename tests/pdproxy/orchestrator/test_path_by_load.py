"""Requests whose prefiller is behind: a decoder with room reads the prompt itself, where the operator lets it. And
those for which no decoder has room: then a prefiller writes the answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from pdproxy.admission.room import Room
from tests.fakes.fake_engine import FakeEngine, ScriptedEngine
from tests.fakes.fake_vllm import FakeNixl
from tests.fakes.fleet import Held
from tests.fakes.proxy_harness import WAYS, Harness, Way, proxy_in_front_of, until

KINDS: dict[str, Callable[..., ScriptedEngine]] = {"builtin": FakeEngine, "vllm_nixl": FakeNixl}
PROMPT = list(range(8))


def make_slow(house: Harness, *, num_queued: int = 1000) -> Callable[[], None]:
    """Lets the prefiller be one that reads 100 tokens a second and has `num_queued` to read. Returns what ends that."""
    prefiller = (house.leader or house.proxy).pool.of_role("prefill")[0]
    now = prefiller._clock()
    if prefiller.pace is not None:
        prefiller.pace.forget()
        prefiller.pace.queue_changed(100, 0, now - 1.0)
        prefiller.pace.queue_changed(0, 100, now)
    prefiller.queue(num_queued)
    return lambda: prefiller.queue(-num_queued)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("by_front", [False, True], ids=["one process", "by a front"])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_decoder_reads_a_prompt_itself_while_the_prefiller_is_behind(
    kind: str, by_front: bool, way: Way
) -> None:
    engines = [KINDS[kind](role) for role in ("prefill", "decode")]
    async with proxy_in_front_of(
        engines[:1], engines[1:], by_front=by_front, way=way, engine=kind, path_by_load=True
    ) as house:
        assert (await house.post(prompt=PROMPT)).headers["x-pdproxy-path"] == "disaggregated"
        catch_up = make_slow(house)
        for stream in (False, True):
            answer = await house.post(prompt=PROMPT, stream=stream)
            assert (answer.status, answer.headers["x-pdproxy-path"]) == (200, "local")
            assert answer.headers["x-pdproxy-decoder"] == "decode-0"
            assert "x-pdproxy-prefiller" not in answer.headers
        decoder = (house.leader or house.proxy).pool.of_role("decode")[0]
        await until(lambda: decoder.read_tokens_per_s is not None and not decoder.queued_tokens)
        records = list(house.proxy.recent._records)[-2:]
        assert [record.reason for record in records] == ["prefillers_behind"] * 2
        assert all(record.attempt.predicted_s < 1.0 for record in records)  # type: ignore[union-attr, operator]
        if not by_front:  # a front's figures reach its leader with its next report
            page = (await house.get("/metrics")).body.decode()
            assert 'pdproxy_requests_total{outcome="done",path="local",reason="prefillers_behind"} 2.0' in page
            assert 'pdproxy_path_actual_seconds_count{path="local"} 2.0' in page
            assert 'pdproxy_path_predicted_seconds_count{path="local"} 2.0' in page
        catch_up()
        assert (await house.post(prompt=PROMPT)).headers["x-pdproxy-path"] == "disaggregated"


@pytest.mark.parametrize(
    "options", [{}, {"path_by_load": True, "when_no_prefiller": "refuse"}], ids=["off", "decoders may not serve alone"]
)
async def test_nobody_does_where_the_operator_does_not_let_it(options: dict[str, Any]) -> None:
    async with proxy_in_front_of(**options) as house:
        catch_up = make_slow(house)
        assert (await house.post(prompt=PROMPT)).headers["x-pdproxy-path"] == "disaggregated"
        catch_up()


async def test_a_decoder_without_room_has_nobody_read_there() -> None:
    async with proxy_in_front_of(path_by_load=True) as house:
        decoder = house.proxy.pool.of_role("decode")[0]
        held = await Held(decoder, decoder.capacity).wait()
        catch_up = make_slow(house)
        call = house.call(prompt=PROMPT)
        await until(lambda: house.admission.num_waiting == 1)
        catch_up()
        held.release()
        assert (await call.answer()).headers["x-pdproxy-path"] == "disaggregated"


async def test_a_prompt_that_is_too_long_is_told_so_on_this_way_too() -> None:
    async with proxy_in_front_of(path_by_load=True) as house:
        decoder = house.proxy.pool.of_role("decode")[0]
        house.decoder.max_model_len = 8
        await house.proxy.probe.look(decoder)
        catch_up = make_slow(house)
        answer = await house.post(prompt=PROMPT)
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
        catch_up()


async def test_what_a_client_takes_away_with_it_was_not_read() -> None:
    decoder = FakeEngine("decode")
    async with proxy_in_front_of(decoders=[decoder], path_by_load=True) as house:
        catch_up = make_slow(house)
        decoder.hang_at.add("decode")
        call = house.call(prompt=PROMPT, stream=True)
        await decoder.reached("decode")
        seen = house.proxy.pool.of_role("decode")[0]
        assert seen.queued_tokens == len(PROMPT)
        call.leave()
        await call.done()
        await until(lambda: not seen.queued_tokens)
        assert seen.read_tokens_per_s is None
        catch_up()


def make_full(house: Harness) -> Callable[[], None]:
    """Lets the decoder have no room for another answer, and give 10 tokens a second back, and the prefiller be one that
    reads 1,000 a second. Returns what ends that."""
    pool = (house.leader or house.proxy).pool
    prefiller, decoder = (pool.of_role(role)[0] for role in ("prefill", "decode"))
    now, limit = prefiller._clock(), int(decoder.residency.limit)
    for pace in (prefiller.pace, decoder.pace):
        if pace is not None:
            pace.forget()
            pace.queue_changed(1000, 0, now - 1.0)
            pace.queue_changed(0, 1000, now)
            pace.residents_changed(limit + 10, now - 1.0)
            pace.residents_changed(limit, now, 10)
    decoder.admission.reside(decoder, "other", Room(limit))
    return lambda: decoder.admission.vacate(decoder, "other")


def with_caches(kind: str) -> list[ScriptedEngine]:
    """A prefiller and a decoder that tell of their KV caches."""
    engines = [KINDS[kind](role) for role in ("prefill", "decode")]
    for one in engines:
        if isinstance(one, FakeEngine):
            one.num_cache_pages = one.num_pages or 64
    return engines


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("by_front", [False, True], ids=["one process", "by a front"])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_prefiller_writes_the_answer_while_no_decoder_has_room(kind: str, by_front: bool, way: Way) -> None:
    prefill, decode = with_caches(kind)
    async with proxy_in_front_of(
        [prefill], [decode], by_front=by_front, way=way, engine=kind, path_by_load=True
    ) as house:
        first = await house.post(prompt=PROMPT, max_tokens=8)
        assert first.headers["x-pdproxy-path"] == "disaggregated"
        make_room = make_full(house)
        for stream in (False, True):
            answer = await house.post(prompt=PROMPT, max_tokens=8, stream=stream)
            assert (answer.status, answer.headers["x-pdproxy-path"]) == (200, "local")
            assert "prefill-0" in (answer.headers.get("x-pdproxy-prefiller"), answer.headers.get("x-pdproxy-decoder"))
        pool = (house.leader or house.proxy).pool
        await until(lambda: not pool.of_role("prefill")[0].residency.stays)
        records = list(house.proxy.recent._records)[-2:]
        assert [record.reason for record in records] == ["decoders_full"] * 2
        assert [record.attempt.waited_for for record in records] == ["kv_cache"] * 2  # type: ignore[union-attr]
        make_room()
        assert (await house.post(prompt=PROMPT, max_tokens=8)).headers["x-pdproxy-path"] == "disaggregated"


@pytest.mark.parametrize(
    "options", [{}, {"path_by_load": True, "when_no_decoder": "refuse"}], ids=["off", "prefillers may not serve alone"]
)
async def test_it_waits_where_the_operator_does_not_let_prefillers_write(options: dict[str, Any]) -> None:
    prefill, decode = with_caches("vllm_nixl")
    async with proxy_in_front_of([prefill], [decode], engine="vllm_nixl", **options) as house:
        make_room = make_full(house)
        call = house.call(prompt=PROMPT, max_tokens=8)
        await until(lambda: house.admission.num_waiting == 1)
        make_room()
        assert (await call.answer()).headers["x-pdproxy-path"] == "disaggregated"


async def test_memory_that_another_answer_gets_at_once_has_come_back_all_the_same() -> None:
    """How fast it does is what the wait for room is guessed by."""
    prefill, decode = with_caches("vllm_nixl")
    decode.num_pages = 4  # of 16 tokens: for one answer at a time
    async with proxy_in_front_of([prefill], [decode], engine="vllm_nixl", path_by_load=True) as house:
        decode.hang_at.add("middle")
        decoder = house.proxy.pool.of_role("decode")[0]
        calls = [house.call(prompt=PROMPT, max_tokens=32, stream=True) for _ in range(2)]
        await decode.reached("middle")
        await until(lambda: house.admission.num_waiting == 1)
        assert decoder.pace is not None
        assert decoder.pace.freed_per_s(decoder._clock()) == 0.0
        decode.let_go("middle")
        decode.hang_at.add("middle")
        assert (await calls[0].answer()).status == 200
        await until(lambda: len(decode.generations()) == 2)
        assert decoder.pace.freed_per_s(decoder._clock()) > 0.0
        decode.let_go("middle")
        assert (await calls[1].answer()).status == 200


async def test_a_client_that_leaves_makes_room_at_the_prefiller() -> None:
    prefill, decode = with_caches("vllm_nixl")
    async with proxy_in_front_of([prefill], [decode], engine="vllm_nixl", path_by_load=True) as house:
        make_room = make_full(house)
        prefill.hang_at.add("middle")
        call = house.call(prompt=PROMPT, max_tokens=8, stream=True)
        await prefill.reached("middle")
        residency = house.proxy.pool.of_role("prefill")[0].residency
        assert len(residency.stays) == 1
        call.leave()
        await call.done()
        await until(lambda: not residency.stays)
        make_room()


@pytest.mark.parametrize("by_front", [False, True], ids=["one process", "by a front"])
async def test_the_status_page_tells_how_fast_instances_are(by_front: bool) -> None:
    async with proxy_in_front_of(path_by_load=True, by_front=by_front) as house:
        for _ in range(3):
            await house.post(prompt=PROMPT, stream=True)
        leader = house.leader or house.proxy
        prefiller, decoder = (leader.pool.of_role(role)[0] for role in ("prefill", "decode"))
        await until(lambda: decoder.handoff_s is not None and not prefiller.queued_tokens)
        assert json.loads(json.dumps(prefiller.status()))["read_tokens_per_s"] > 0
        assert "read_tokens_per_s" not in decoder.status()
        assert decoder.status()["handoff_s"] >= 0
