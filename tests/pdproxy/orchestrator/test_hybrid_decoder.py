"""Decoders whose layers are unlike, and prompts that pass through a buffer smaller than they are."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pdproxy.config.settings import Settings
from pdproxy.fleet.instance import Health
from pdproxy.fleet.page_count import longest_prompt, pages_leased, pages_needed
from tests.fakes.fake_engine import WORDS, FakeEngine
from tests.fakes.fleet import facts
from tests.fakes.proxy_harness import Call, Harness, proxy_in_front_of, until
from transfer.wire import PageGroupFacts

FULL = PageGroupFacts(kind="full", num_layers=2)
WINDOW = PageGroupFacts(kind="sliding", num_layers=2, window=33)
"""Keeps 32 tokens: with 16 in a page 2 pages, or 3 where they lie badly."""
CHUNKED = PageGroupFacts(kind="chunked", num_layers=2, window=64)
STATE = PageGroupFacts(kind="linear", num_layers=2, state_pages=2)


def hybrid(*groups: PageGroupFacts, num_pages: int = 20, windowed: bool = False) -> FakeEngine:
    decoder = FakeEngine("decode", num_pages=num_pages)
    decoder.groups = list(groups)
    decoder.windowed = windowed
    return decoder


def pages_of(answer: Any) -> int:
    return int(answer.headers["x-pdproxy-kv"].split(";")[0].removeprefix("pages="))


# ── counting ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("groups", "num_tokens", "pages"),
    [
        ([], 160, 10),
        ([FULL], 160, 10),
        ([FULL, WINDOW, WINDOW], 160, 10 + 2 * 2),
        ([FULL, WINDOW, WINDOW], 161, 11 + 2 * 3),
        ([FULL, WINDOW, WINDOW], 20, 3 * 2),
        ([FULL, CHUNKED], 63, 4 + 4),
        ([FULL, CHUNKED], 64, 4),
        ([FULL, STATE], 64, 4 + 2),
        ([WINDOW], 10_000, 2),
        ([CHUNKED], 64, 1),
        ([], 0, 1),
    ],
)
def test_an_exact_prompt_is_counted_as_the_decoder_counts(
    groups: list[PageGroupFacts], num_tokens: int, pages: int
) -> None:
    assert pages_needed(facts(groups=groups, chunk_size=16), num_tokens) == pages


def test_a_bound_is_enough_for_every_shorter_prompt() -> None:
    """64 tokens end with their chunk and keep nothing of it; 63 keep all of it."""
    told = facts(groups=[FULL, CHUNKED], chunk_size=16)
    assert pages_needed(told, 64) < pages_needed(told, 63) == pages_needed(told, 64, is_exact=False)
    for groups in ([], [FULL, WINDOW, WINDOW], [FULL, CHUNKED, STATE]):
        told = facts(groups=groups, chunk_size=16)
        for bound in range(1, 200):
            enough = pages_needed(told, bound, is_exact=False)
            assert all(pages_needed(told, num_tokens) <= enough for num_tokens in range(bound + 1))


def test_a_lease_is_of_the_whole_buffer_at_most_where_prompts_pass_through() -> None:
    told = facts(chunk_size=16, num_pages=8)
    assert (pages_leased(told, 128), pages_leased(told, 129)) == (8, 9)
    told = facts(chunk_size=16, num_pages=8, windowed=True)
    assert (pages_leased(told, 112), pages_leased(told, 128), pages_leased(told, 129)) == (7, 8, 8)
    assert pages_leased(told, 10_000, is_exact=False) == 8


def test_the_longest_prompt() -> None:
    assert longest_prompt(facts(chunk_size=16, num_pages=20)) == 320
    assert longest_prompt(facts(chunk_size=16, num_pages=20, groups=[FULL, WINDOW, WINDOW])) == (20 - 2 * 3) * 16
    assert longest_prompt(facts(chunk_size=16, num_pages=20, groups=[WINDOW])) is None


# ── a decoder with groups ───────────────────────────────────────────────────────────────────────────────────────────


async def test_windowed_layers_count_with_their_tail_only() -> None:
    """160 tokens are 10 blocks: 30 pages if all three groups kept them, 14 as they do. The buffer has 20."""
    async with proxy_in_front_of(decoders=[hybrid(FULL, WINDOW, WINDOW)]) as house:
        house.prefiller.hang_at.add("prefill")
        call = house.call(prompt=[1] * 160)
        await house.prefiller.reached("prefill")
        assert house.held == 14
        house.prefiller.let_go("prefill")
        answer = await call.answer()
        assert (answer.status, answer.headers["x-pdproxy-path"], pages_of(answer)) == (200, "disaggregated", 14)


@pytest.mark.parametrize(("oversized", "path"), [("local", "local"), ("window", "local"), ("refuse", None)])
async def test_a_prompt_longer_than_fits_is_counted_in_groups_too(oversized: str, path: str | None) -> None:
    async with proxy_in_front_of(decoders=[hybrid(FULL, WINDOW, WINDOW)], oversized=oversized) as house:
        assert (await house.post(prompt=[1] * 224)).headers["x-pdproxy-path"] == "disaggregated"
        answer = await house.post(prompt=[1] * 272)
        if path is None:
            assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
            assert "needs 21 pages" in answer.error["message"]
            assert "has 20" in answer.error["message"]
        else:
            assert (answer.status, answer.headers["x-pdproxy-path"]) == (200, path)
            assert house.proxy.recent.facts()[0]["reason"] == "oversized"


async def test_a_lease_for_a_bound_shrinks_to_what_the_prompt_has() -> None:
    """By its bytes the prompt has up to 99 tokens: 7 pages, and 3 of the window. It has 20 tokens: 2 and 2."""
    async with proxy_in_front_of(decoders=[hybrid(FULL, WINDOW)]) as house:
        house.prefiller.hang_at.add("prefill")
        house.decoder.hang_at.add("decode")
        call = house.call(prompt=" ".join(["word"] * 20))
        await house.prefiller.reached("prefill")
        assert house.held == 7 + 3
        house.prefiller.let_go("prefill")
        await house.decoder.reached("decode")
        assert house.held == 4
        house.decoder.let_go("decode")
        assert pages_of(await call.answer()) == 4


async def test_it_shrinks_when_the_prefiller_has_counted_and_not_only_when_the_kv_is_there() -> None:
    async with proxy_in_front_of(decoders=[hybrid(FULL, WINDOW)]) as house:
        house.decoder.signals = "lost"
        call = house.call(prompt=" ".join(["word"] * 20))
        await until(lambda: house.held == 4)
        call.leave()
        await call.done()


async def test_what_was_taken_by_a_bound_is_never_too_little() -> None:
    """64 bytes bound a prompt of 63 tokens, which has more pages than one of 64: those of its whole chunk."""
    async with proxy_in_front_of(decoders=[hybrid(FULL, CHUNKED)]) as house:
        house.prefiller.hang_at.add("prefill")
        call = house.call(prompt="x" * 62)  # with its quotes 64 bytes
        await house.prefiller.reached("prefill")
        assert house.held >= 8
        house.prefiller.let_go("prefill")
        await call.answer()


async def test_the_status_tells_how_a_decoder_counts() -> None:
    async with proxy_in_front_of(decoders=[hybrid(FULL, WINDOW, STATE, windowed=True)]) as house:
        decoder = (await house.get("/status")).json()["fleet"][1]
        assert (decoder["capacity"], decoder["windowed"], decoder["max_prompt_tokens"]) == (20, True, 15 * 16)
        assert decoder["page_groups"] == [
            {"kind": "full", "num_layers": 2},
            {"kind": "sliding", "num_layers": 2, "window": 33},
            {"kind": "linear", "num_layers": 2, "state_pages": 2},
        ]


@pytest.mark.parametrize(
    "group",
    [
        {"kind": "circular"},
        {"kind": "sliding"},
        {"kind": "sliding", "window": 0},
        {"kind": "chunked", "window": -1},
        {"kind": "full", "window": 8},
        {"kind": "linear", "state_pages": -1},
    ],
    ids=str,
)
async def test_groups_that_cannot_be_counted_with_are_refused(group: dict[str, Any]) -> None:
    async with proxy_in_front_of() as house:
        house.decoder.groups = [PageGroupFacts(num_layers=2, **group)]
        instance = house.proxy.pool.instances[1]
        await house.proxy.probe.look(instance)
        assert instance.health is Health.DOWN
        assert "its pages cannot be counted" in instance.why
        assert instance.known_facts.groups == (), "what was known before still is"


# ── through a buffer smaller than the prompt ────────────────────────────────────────────────────────────────────────


@pytest.fixture(params=["ready", "taken"])
def signals(request: pytest.FixtureRequest) -> str:
    """The pages are back when the decoder answers, or already with the word that the KV is there."""
    told: str = request.param
    return told


async def start_large(house: Harness, **more: Any) -> Call:
    """A prompt of 20 pages, prefilling."""
    house.prefiller.hang_at.add("prefill")
    call = house.call(prompt=[1] * 320, **more)
    await house.prefiller.reached("prefill")
    return call


@pytest.mark.parametrize("stream", [False, True])
async def test_a_larger_prompt_passes_through(signals: str, stream: bool) -> None:
    decoder = hybrid(num_pages=8, windowed=True)
    async with proxy_in_front_of(decoders=[decoder], oversized="window") as house:
        decoder.signals = signals
        call = await start_large(house, stream=stream)
        assert house.held == 8, "it has all pages that there are"
        house.prefiller.let_go("prefill")
        answer = await call.answer()
        assert (answer.status, answer.headers["x-pdproxy-path"]) == (200, "disaggregated")
        assert pages_of(answer) == 20, "so many have arrived"
        text = answer.text() if stream else answer.json()["choices"][0]["text"]
        assert text == "".join(WORDS)
        recent = house.proxy.recent.facts()[0]
        assert (recent["reason"], recent["custody"], recent["attempts"]) == ("window", "returned", 1)
        page = (await house.get("/metrics")).body.decode()
        assert 'pdproxy_requests_total{outcome="done",path="disaggregated",reason="window"} 1.0' in page


async def test_it_is_alone(signals: str) -> None:
    """What came before it goes first, what comes behind it waits."""
    decoder = hybrid(num_pages=8, windowed=True)
    async with proxy_in_front_of(decoders=[decoder], oversized="window", max_overtakes=0) as house:
        decoder.signals = signals
        house.prefiller.hang_at.add("prefill")
        first = house.call(prompt=[1] * 16)
        await until(lambda: house.held == 1)
        large = house.call(prompt=[2] * 320)
        admission = house.proxy.pool.instances[1].admission
        await until(lambda: admission.num_waiting == 1)
        last = house.call(prompt=[3] * 16)
        await until(lambda: admission.num_waiting == 2)
        house.prefiller.let_go("prefill")
        answers = await asyncio.gather(first.answer(), large.answer(), last.answer())
        assert [answer.status for answer in answers] == [200, 200, 200]
        order = [call.body["prompt"][0] for call in house.prefiller.generations()]
        assert order == [1, 2, 3]


@pytest.mark.parametrize("options", [{"concurrent_pages": 2}, {"admission": False}], ids=str)
async def test_with_a_smaller_budget_or_none(options: dict[str, Any]) -> None:
    decoder = hybrid(num_pages=8, windowed=True)
    async with proxy_in_front_of(decoders=[decoder], oversized="window", **options) as house:
        answer = await house.post(prompt=[1] * 320)
        assert (answer.status, answer.headers["x-pdproxy-path"], pages_of(answer)) == (200, "disaggregated", 20)


async def test_a_bound_that_was_too_large_gives_the_window_back() -> None:
    """129 bytes are up to 9 pages, of 8: admitted as larger than the buffer. It has 13 tokens: 1 page."""
    decoder = hybrid(num_pages=8, windowed=True)
    async with proxy_in_front_of(decoders=[decoder], oversized="window") as house:
        house.prefiller.hang_at.add("prefill")
        decoder.hang_at.add("decode")
        call = house.call(prompt=" ".join(["ten-letters"] * 13))
        await house.prefiller.reached("prefill")
        assert house.held == 8
        house.prefiller.let_go("prefill")
        await decoder.reached("decode")
        assert house.held == 1
        decoder.let_go("decode")
        assert pages_of(await call.answer()) == 1


@pytest.mark.parametrize("point", ["prefill", "prefill_done", "decode", "first"])
async def test_a_client_that_leaves_gives_everything_back(signals: str, point: str) -> None:
    decoder = hybrid(num_pages=8, windowed=True)
    async with proxy_in_front_of(decoders=[decoder], oversized="window") as house:
        decoder.signals = signals
        hanging = house.prefiller if point.startswith("prefill") else decoder
        hanging.hang_at.add(point)
        call = house.call(prompt=[1] * 320)
        await hanging.reached(point)
        call.leave()
        await call.done()
        await house.settled()
        assert house.held == 0
        hanging.let_go(point)
        house.prefiller.hang_at.clear()
        decoder.hang_at.clear()
        assert (await house.post(prompt=[1] * 320)).headers["x-pdproxy-path"] == "disaggregated"


async def test_kv_that_fails_on_its_way_is_tried_again() -> None:
    decoder = hybrid(num_pages=8, windowed=True)
    async with proxy_in_front_of(decoders=[decoder], oversized="window", retries=0) as house:
        decoder.signals = "failed"
        assert (await house.post(prompt=[1] * 320)).status == 502
        assert house.held == 0
        decoder.signals = "ready"
        assert (await house.post(prompt=[1] * 320)).status == 200


async def test_where_the_decoder_cannot_it_serves_alone() -> None:
    async with proxy_in_front_of(decoders=[hybrid(num_pages=8)], oversized="window") as house:
        answer = await house.post(prompt=[1] * 320)
        assert (answer.status, answer.headers["x-pdproxy-path"]) == (200, "local")


async def test_by_default_it_serves_alone_even_where_it_could() -> None:
    assert Settings(prefill=("http://p:1",), decode=("http://d:1",)).oversized == "local"
    async with proxy_in_front_of(decoders=[hybrid(num_pages=8, windowed=True)]) as house:
        assert (await house.post(prompt=[1] * 320)).headers["x-pdproxy-path"] == "local"


async def test_a_canary_passes_through_a_buffer_without_a_page_for_every_group() -> None:
    """3 groups and a state are 5 pages for the shortest prompt, of 2."""
    async with proxy_in_front_of(decoders=[hybrid(FULL, WINDOW, WINDOW, STATE, num_pages=2, windowed=True)]) as house:
        assert house.proxy.pool.is_ready


async def waiting_behind(house: Harness) -> tuple[Call, Call]:
    """A small request that holds a page of the decoder, and a large one that waits for all of them."""
    house.decoder.hang_at.add("first")
    house.decoder.consumed_signal = False
    running = house.call(prompt=[1] * 16)
    await house.decoder.reached("first")
    waiting = house.call(prompt=[1] * 320)
    await until(lambda: house.proxy.pool.instances[1].admission.num_waiting == 1)
    return running, waiting


async def test_a_decoder_that_comes_back_smaller_takes_the_prompt_through_its_new_window() -> None:
    """Who waited for 8 pages is not refused because there are 4 now: it is looked at anew."""
    decoder = hybrid(num_pages=8, windowed=True)
    async with proxy_in_front_of(decoders=[decoder], oversized="window", canary=False) as house:
        running, waiting = await waiting_behind(house)
        decoder.epoch, decoder.num_pages = "second", 4
        decoder.pages.clear()
        decoder.consumed_signal = True
        await house.proxy.probe.look(house.proxy.pool.instances[1])
        decoder.let_go("first")
        answer = await waiting.answer()
        assert (answer.status, answer.headers["x-pdproxy-path"], pages_of(answer)) == (200, "disaggregated", 20)
        await running.done()


async def test_who_waits_for_the_window_of_a_decoder_that_nobody_can_reach_is_served_when_it_is_back() -> None:
    async with proxy_in_front_of(decoders=[hybrid(num_pages=8, windowed=True)], oversized="window") as house:
        running, waiting = await waiting_behind(house)
        client = house.client_of(house.decoder)
        decoder = house.proxy.pool.instances[1]
        client.is_up = False
        decoder.suspected.set()
        await until(lambda: decoder.health is Health.DOWN)
        client.is_up = True
        house.decoder.let_go("first")
        await running.done()
        assert (await waiting.answer()).status == 200
