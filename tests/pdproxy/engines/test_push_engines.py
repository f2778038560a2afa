"""Engines that push KV by names made of its tokens (LMCache's PD connector), behind the whole proxy.

Leaving `lmcache_pair` checks that no page is left in a decoder's buffer, where only reading frees one.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pdproxy.engines import lmcache
from tests.fakes.fake_engine import BROKEN, FIRST_ID, WORDS, error_reply
from tests.fakes.fake_lmcache import CONFIG, FakeLMCache
from tests.fakes.proxy_harness import Answer, Harness, proxy_in_front_of, until

pytestmark = pytest.mark.usefixtures("relay_way")

CHAT = "/v1/chat/completions"
TEXT = "".join(WORDS)
IDS = list(range(1, 21))


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in memory has been written and read at once."""
    monkeypatch.setattr(lmcache, "WRITING_S", 0.005)
    monkeypatch.setattr(lmcache, "READING_S", 0.005)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder, without a tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@asynccontextmanager
async def lmcache_pair(
    model: Path, *, num_ranks: int = 1, num_decoders: int = 1, skip_last: int = 1, **options: Any
) -> AsyncIterator[Harness]:
    prefiller = FakeLMCache("prefill")
    decoders = [FakeLMCache("decode", num_ranks=num_ranks, skip_last=skip_last) for _ in range(num_decoders)]
    async with proxy_in_front_of([prefiller], decoders, model=model, **options) as house:
        yield house
        await house.settled()
        for decoder in decoders:
            assert (decoder.pages, decoder.running) == ({}, {})


def outcomes(house: Harness) -> dict[str, int]:
    statistics = house.proxy.reaper.statistics()
    return {name: number for name, number in statistics.items() if number and name != "adopted"}


@pytest.mark.parametrize(("role", "status"), [("prefill", 200), ("decode", 503)])
async def test_who_is_left_answers_alone_but_a_prefiller_of_lmcache_does_not(
    model: Path, role: str, status: int
) -> None:
    """A request that names no decoder would end it."""
    async with lmcache_pair(model) as house:
        number = 0 if role == "prefill" else 1
        house.clients[number].is_up = False
        house.proxy.pool.instances[number].lost("switched off")
        answer = await house.post(prompt="a b c d e")
        assert answer.status == status
        assert house.prefiller.generations() == []


# ── one answer of two engines ───────────────────────────────────────────────────────────────────────────────────────

WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "text, prefiller's token": ({}, {"prompt": "a b c d e"}),
    "ids, prefiller's token": ({"first_token": "prefiller"}, {"prompt": IDS}),
    "ids, decoder's token": ({}, {"prompt": IDS}),
    "ids of whole chunks": ({"first_token": "prefiller"}, {"prompt": IDS[:16]}),
    "text, read twice": ({"first_token": "decoder"}, {"prompt": "a b c d e"}),
}
ASKED: list[dict[str, Any]] = [
    {},
    {"logprobs": 1},
    {"return_token_ids": True, "logprobs": 1},
    {"max_tokens": 3, "logprobs": 1},
    {"max_tokens": 2},
]


def head_of(event: Any) -> dict[str, Any]:
    return {name: value for name, value in event.items() if name not in ("choices", "usage")}


def as_one(events: list[Any]) -> dict[str, Any]:
    """A stream's events put together as a client would."""
    assert events[-1] == "[DONE]"
    joined: dict[str, Any] = {"text": "", "token_ids": [], "logprobs": {}, "usage": None, "finish": None, "heads": []}
    for event in events[:-1]:
        if head_of(event) not in joined["heads"]:
            joined["heads"].append(head_of(event))
        joined["usage"] = event.get("usage") or joined["usage"]
        for choice in event["choices"]:
            joined["text"] += choice["text"]
            joined["token_ids"] += choice.get("token_ids") or []
            joined["finish"] = choice["finish_reason"] or joined["finish"]
            for name, values in (choice["logprobs"] or {}).items():
                joined["logprobs"].setdefault(name, []).extend(values)
    return joined


def without_prompt_ids(answer: dict[str, Any]) -> dict[str, Any]:
    choices = [{k: v for k, v in choice.items() if k != "prompt_token_ids"} for choice in answer["choices"]]
    return answer | {"choices": choices}


@pytest.mark.parametrize("asked", ASKED, ids=str)
@pytest.mark.parametrize("way", WAYS)
async def test_answers_are_those_of_one_engine(model: Path, way: str, asked: dict[str, Any]) -> None:
    options, prompt = WAYS[way]
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 8} | prompt | asked
    streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
    skip_last = 0 if options.get("first_token") == "decoder" else 1
    async with lmcache_pair(model, skip_last=skip_last, **options) as house:
        whole, stream = await house.post(**body), await house.post(**streamed)
        assert whole.headers["x-pdproxy-path"] == stream.headers["x-pdproxy-path"] == "disaggregated"
        alone = FakeLMCache("decode")
        assert without_prompt_ids(whole.json()) == without_prompt_ids(alone.whole("/v1/completions", body))
        reference = Answer(200, {}, b"".join(alone.stream("/v1/completions", streamed)))
        assert as_one(stream.events()) == as_one(reference.events())


@pytest.mark.parametrize("stream", [False, True])
async def test_each_of_several_prompts_is_pushed_by_itself(model: Path, stream: bool) -> None:
    async with lmcache_pair(model) as house:
        answer = await house.post(prompt=[[1, 2, 3], [4], [5, 6]], stream=stream)
        chunks = [one for one in answer.events() if one != "[DONE]"] if stream else [answer.json()]
        said = dict.fromkeys(range(3), "")
        for choice in (choice for chunk in chunks for choice in chunk["choices"]):
            said[choice["index"]] += choice["text"]
        assert said == dict.fromkeys(range(3), TEXT)
        assert [call.body["prompt"] for call in house.prefiller.generations()] == [[1, 2], [4], [5]]


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_is_the_decoders(model: Path, stream: bool) -> None:
    async with lmcache_pair(model, first_token="decoder", skip_last=0) as house:
        answer = await house.post(CHAT, messages=[{"role": "user", "content": "tell me"}], stream=stream)
        text = answer.text() if stream else answer.json()["choices"][0]["message"]["content"]
        assert text == TEXT
        assert house.decoder.generations()[0].body["kv_transfer_params"].keys() == {"prompt_token_ids"}


async def test_a_stream_without_usage_gets_none(model: Path) -> None:
    async with lmcache_pair(model) as house:
        events = (await house.post(stream=True)).events()
        assert not any("usage" in event for event in events[:-1])


async def test_legs_of_a_prompt_that_the_decoder_goes_on_with(model: Path) -> None:
    async with lmcache_pair(model, first_token="prefiller", num_ranks=2) as house:
        answer = await house.post(prompt=IDS, kv_transfer_params={"disagg_spec": 1}, bootstrap_room=3)
        [prefill], [decode] = house.prefiller.generations(), house.decoder.generations()
        spec = prefill.body["kv_transfer_params"]["disagg_spec"]
        assert spec["req_id"][:16] == answer.headers["x-pdproxy-attempt"]
        assert spec["req_id"] not in {*prefill.headers.values(), *decode.headers.values()}, (
            "vLLM shows what it gets there"
        )
        assert (spec["receiver_init_port"], spec["receiver_alloc_port"]) == ([7300, 7301], [7400, 7401])
        assert (decode.body["prompt"], decode.body["max_tokens"]) == ([*IDS, FIRST_ID], 7)
        assert not {"kv_transfer_params", "bootstrap_room"} & decode.body.keys()


async def test_slots_are_the_decoders_pages_until_its_first_event(model: Path) -> None:
    async with lmcache_pair(model) as house:
        prefiller, decoder = house.proxy.pool.instances
        assert not prefiller.is_owner
        assert decoder.known_facts.num_pages == house.decoder.num_pages
        house.prefiller.notifies = "held"
        house.decoder.hang_at |= {"first"}
        call = house.call(prompt=[1] * 41, stream=True)
        await until(lambda: bool(house.prefiller.held))
        assert decoder.held == sum(house.decoder.pages.values()) == 3
        house.prefiller.notify()
        await house.decoder.reached("first")
        assert decoder.held == 3
        house.decoder.let_go("first")
        assert (await call.answer()).text() == TEXT
        assert outcomes(house) == {}


# ── a first token that nobody goes on from ──────────────────────────────────────────────────────────────────────────


async def test_nothing_of_the_opening_is_sent_before_the_decoder_answers(model: Path) -> None:
    async with lmcache_pair(model, num_decoders=2, first_token="prefiller") as house:
        house.decoder.fail_at["first"] = BROKEN
        for number in range(2):
            answer = await house.post(prompt=[*IDS, number], stream=True, logprobs=1)
            assert (answer.status, answer.text()) == (200, TEXT)
            offsets = [event["choices"][0]["logprobs"]["text_offset"] for event in answer.events()[:-1]]
            assert offsets[0] == [0], "the opening comes once"
        assert max(record["attempts"] for record in house.proxy.recent.facts()[:2]) == 2
        house.decoder.fail_at.clear()


@pytest.mark.parametrize("stream", [False, True])
async def test_decoder_that_fails_before_its_first_event(model: Path, stream: bool) -> None:
    async with lmcache_pair(model, first_token="prefiller", retries=0) as house:
        house.decoder.hang_at.add("first")
        call = house.call(prompt=IDS, stream=stream)
        await house.decoder.reached("first")
        assert not call.is_started
        house.decoder.fail_at["first"] = BROKEN
        house.decoder.let_go("first")
        answer = await call.answer()
        assert (answer.status, answer.error["code"]) == (502, "leg_failed")
        house.decoder.fail_at.clear()


@pytest.mark.parametrize("prompt", ["a b c d e", IDS])
@pytest.mark.parametrize("first_text", [WORDS[0], ""])
async def test_answer_that_ends_at_its_first_token(model: Path, prompt: Any, first_text: str) -> None:
    """Whatever that token looks like, the pages that were pushed are taken out again."""
    async with lmcache_pair(model, first_token="prefiller") as house:
        house.prefiller.finish_at_first = "stop"
        one_token = house.prefiller.one_token

        def ending(path: str, body: dict[str, Any]) -> dict[str, Any]:
            answer: dict[str, Any] = one_token(path, body)
            answer["choices"][0]["text"] = first_text
            return answer

        house.prefiller.one_token = ending
        answer = await house.post(prompt=prompt)
        assert (answer.status, answer.headers["x-pdproxy-path"]) == (200, "prefill_only")
        assert answer.json()["choices"][0]["text"] == first_text
        await house.settled()
        assert outcomes(house) == {"dropped": 1}


# ── notifications ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("names_ranks", [False, True])
async def test_every_rank_notifies(model: Path, names_ranks: bool) -> None:
    async with lmcache_pair(model, num_ranks=2) as house:
        house.prefiller.names_ranks = names_ranks
        assert (await house.post(prompt=IDS)).status == 200
        assert house.proxy.board.statistics().num_duplicates == 0


async def test_ranks_are_a_set(model: Path) -> None:
    """One that says it twice is not two."""
    async with lmcache_pair(model, num_ranks=2) as house:
        house.prefiller.notifies = "twice"
        assert (await house.post(prompt=IDS)).status == 200
        statistics = house.proxy.board.statistics()
        assert statistics.num_duplicates + statistics.num_unexpected >= 2
        assert (await house.post(prompt=IDS)).status == 200


@pytest.mark.parametrize("notifies", ["lost", "one"])
async def test_lost_notification_ends_by_deadline(model: Path, notifies: str) -> None:
    async with lmcache_pair(model, num_ranks=2) as house:
        house.limit(kv_timeout_s=0.03)
        house.prefiller.notifies = notifies
        answer = await house.post(prompt=IDS)
        assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")
        assert house.held == 2, "nobody has taken the pages out yet"
        await house.settled()
        assert outcomes(house) == {"dropped": 1}
        [errand] = house.decoder.generations()
        assert (errand.body["max_tokens"], errand.body["prompt"]) == (1, IDS)


async def test_late_notification_is_only_counted(model: Path) -> None:
    async with lmcache_pair(model) as house:
        house.limit(kv_timeout_s=0.03)
        house.prefiller.notifies = "held"
        assert (await house.post(prompt=IDS)).status == 504
        await house.settled()
        house.prefiller.notify()
        assert house.proxy.board.statistics().num_unexpected == 1
        house.prefiller.notifies = "ready"
        assert (await house.post(prompt=IDS)).status == 200


async def test_notification_while_the_request_is_being_left(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody writes any more then: the pages need not wait for the time in which somebody might."""
    monkeypatch.setattr(lmcache, "WRITING_S", 60.0)
    async with lmcache_pair(model, num_ranks=2) as house:
        house.prefiller.notifies = "held"
        call = house.call(prompt=IDS)
        await until(lambda: bool(house.prefiller.held))
        call.leave()
        await call.done()
        assert house.held == 2
        house.prefiller.notify()
        await house.settled()
        assert outcomes(house) == {"dropped": 1}


async def test_failed_notification_is_a_failure_at_once(model: Path) -> None:
    async with lmcache_pair(model, retries=0) as house:
        house.prefiller.notifies = "failed"
        answer = await house.post(prompt=IDS)
        assert (answer.status, answer.error["code"]) == (502, "kv_transfer_failed")


async def test_pages_that_nobody_takes_out_cost_the_lease(model: Path) -> None:
    async with lmcache_pair(model, engine_lease_s=0.05) as house:
        house.limit(kv_timeout_s=0.01)
        house.prefiller.notifies = "lost"
        house.decoder.fail_at["decode"] = BROKEN
        assert (await house.post(prompt=IDS)).status == 504
        assert house.held == 2
        await house.settled()
        assert outcomes(house) == {"expired": 1}
        house.decoder.pages.clear()


async def test_pages_of_a_decoder_that_was_restarted_are_gone(model: Path) -> None:
    async with lmcache_pair(model, canary=False) as house:
        house.limit(kv_timeout_s=0.01)
        house.prefiller.notifies = "lost"
        house.decoder.fail_at["decode"] = BROKEN
        assert (await house.post(prompt=IDS)).status == 504
        assert house.held == 2
        house.decoder.pages.clear()
        house.decoder.epoch += "-again"
        house.proxy.pool.instances[1].suspected.set()
        await house.settled()
        assert outcomes(house) == {"void": 1}


# ── prompts that cannot be divided ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "a b c"}]}),
        ("/v1/completions", {"prompt": "a b c", "seed": 3}),
        ("/v1/completions", {"prompt": "a b c", "stop": ["zzz"]}),
        ("/v1/completions", {"prompt": IDS, "truncate_prompt_tokens": 8}),
    ],
    ids=["chat", "seed", "stop", "truncated"],
)
@pytest.mark.parametrize("status", [404, 500])
async def test_what_would_leave_a_page_behind_goes_to_the_decoder_alone(
    model: Path, path: str, body: dict[str, Any], status: int
) -> None:
    """The decoders look for all tokens but the last, and nobody tells the ids: no page could ever be taken out."""
    async with lmcache_pair(model) as house:
        for engine in (house.prefiller, house.decoder):
            engine.fail_at["/tokenize"] = error_reply(status, "not here")
        answer = await house.post(path, **body)
        assert (answer.status, answer.headers["x-pdproxy-path"]) == (200, "local")
        assert house.proxy.recent.facts()[0]["reason"] == "no_handover"
        assert not house.prefiller.generations()
    async with lmcache_pair(model, skip_last=0, first_token="decoder") as house:
        assert (await house.post(path, **body)).headers["x-pdproxy-path"] == "disaggregated"


@pytest.mark.parametrize(("skip_last", "first_token"), [(1, "auto"), (0, "decoder")])
async def test_both_legs_of_a_chat_get_the_ids_that_an_engine_told(
    model: Path, skip_last: int, first_token: str
) -> None:
    """However each of them would have rendered it: no page is left behind."""
    messages = [{"role": "user", "content": "a b c d"}]
    async with lmcache_pair(model, skip_last=skip_last, first_token=first_token) as house:
        house.prefiller.read_ids = lambda body: [5, 6, 7] if "messages" in body else [1]  # type: ignore[method-assign]
        answers = [await house.post(CHAT, messages=messages) for _ in range(2)]
        assert {answer.headers["x-pdproxy-path"] for answer in answers} == {"disaggregated"}
        legs = [engine.generations()[0].body["kv_transfer_params"] for engine in (house.prefiller, house.decoder)]
        assert [leg["prompt_token_ids"] for leg in legs] == [[5, 6, 7][: 3 - skip_last], [5, 6, 7]]
        assert len(house.prefiller.bodies("/tokenize")) == 1, "it was asked twice for the same"


@pytest.mark.parametrize("field", [{"response_format": {"type": "json_object"}}, {"reasoning_effort": "low"}])
async def test_a_chat_whose_ids_are_not_certain_does_not_go_through_the_buffer(
    model: Path, field: dict[str, Any]
) -> None:
    async with lmcache_pair(model) as house:
        answer = await house.post(CHAT, messages=[{"role": "user", "content": "a b"}], **field)
        assert (answer.status, answer.headers["x-pdproxy-path"]) == (200, "local")


@pytest.mark.parametrize(
    ("body", "way"),
    [({"prompt": IDS, "seed": 3}, "disaggregated"), ({"prompt": "a b c", "seed": 3, "max_tokens": 1}, "prefill_only")],
    ids=["ids", "one token"],
)
async def test_what_leaves_no_page_behind_does_not(model: Path, body: dict[str, Any], way: str) -> None:
    async with lmcache_pair(model) as house:
        answer = await house.post(**body)
        assert (answer.status, answer.headers["x-pdproxy-path"]) == (200, way)
