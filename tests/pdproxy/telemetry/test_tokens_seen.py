"""Tokens, models and keys of clients in the metrics, the status page and the log, of every kind of answer."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pdproxy.telemetry.record import Outcome, RequestRecord
from tests.fakes.connected_call import ConnectedCall
from tests.fakes.fake_engine import BROKEN, WORDS, FakeEngine, FakeReply, json_reply
from tests.fakes.fake_vllm import FakeNixl
from tests.fakes.fleet import Held
from tests.fakes.proxy_harness import Harness, proxy_in_front_of, until

CHAT = "/v1/chat/completions"
PROMPT = [5, 6, 7]
WITH_USAGE = {"stream": True, "stream_options": {"include_usage": True}}
N = len(WORDS)


async def series(house: Harness, name: str) -> dict[str, float]:
    """What the page says of `name`, by its labels."""
    page = (await house.get("/metrics")).body.decode()
    return {labels: float(value) for labels, value in re.findall(rf"^{name}(?:\{{(.*)\}})? (\S+)$", page, re.MULTILINE)}


async def output(house: Harness) -> dict[str, float]:
    return await series(house, "pdproxy_output_tokens_total")


async def prompts(house: Harness) -> dict[str, float]:
    return await series(house, "pdproxy_model_prompt_tokens_total")


def label(source: str, model: str = "tiny") -> str:
    return f'model="{model}",source="{source}"'


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("continue_streams", [True, False], ids=["kept", "as it comes"])
@pytest.mark.parametrize(
    ("path", "body", "source", "num"),
    [
        ("/v1/completions", {}, "usage", N),
        ("/v1/completions", WITH_USAGE, "usage", N),
        ("/v1/completions", {"max_tokens": 1}, "usage", 1),
        ("/v1/completions", {"max_tokens": 1, "stream": True}, "usage", 1),
        ("/v1/completions", {"n": 3, **WITH_USAGE}, "usage", N),  # as the scripted engine counts
        (CHAT, WITH_USAGE, "usage", N),
    ],
)
async def test_an_engines_usage_is_what_counts(
    path: str, body: dict[str, Any], source: str, num: int, continue_streams: bool
) -> None:
    async with proxy_in_front_of(continue_streams=continue_streams) as house:
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": "a b c"}]} if path == CHAT else {}
        assert (await house.post(path, **(asked or {"prompt": PROMPT}), **body)).status == 200
        assert await output(house) == {label(source): num}
        [(told_by, num_prompt)] = (await prompts(house)).items()
        assert told_by == label("usage")
        assert num_prompt == house.proxy.recent.facts()[0]["num_prompt_tokens"] >= 3
        tokens = (await house.get("/status")).json()["tokens"]
        assert tokens == {"prompt": num_prompt, "output": num}


@pytest.mark.usefixtures("both_ways")
async def test_ids_are_counted_where_a_stream_tells_no_usage() -> None:
    async with proxy_in_front_of() as house:
        await house.post(prompt=PROMPT, stream=True)
        assert await output(house) == {label("ids"): N}
        assert await prompts(house) == {label("usage"): len(PROMPT)}, "the prefiller told it"


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize(("path", "n"), [("/v1/completions", 1), ("/v1/completions", 3), (CHAT, 1), (CHAT, 2)])
async def test_events_are_counted_where_a_stream_tells_neither(path: str, n: int) -> None:
    engines = [FakeNixl("prefill")], [FakeNixl("decode")]
    async with proxy_in_front_of(*engines) as house:
        asked = {"messages": [{"role": "user", "content": "a b c"}]} if path == CHAT else {"prompt": PROMPT}
        await house.post(path, **asked, n=n, stream=True)
        assert await output(house) == {label("events"): n * N}
        assert len(await series(house, "pdproxy_time_per_output_token_seconds_count")) == (n == 1)


@pytest.mark.usefixtures("relay_way")
@pytest.mark.parametrize("usage", [{}, {"include_usage": True}])
async def test_a_client_that_leaves_in_mid_stream_has_had_the_tokens_so_far(usage: dict[str, Any]) -> None:
    async with proxy_in_front_of() as house:
        house.decoder.hang_at.add("middle")
        call = house.call(prompt=PROMPT, stream=True, stream_options=usage)
        assert isinstance(call, ConnectedCall)
        await house.decoder.reached("middle")
        await until(lambda: house.proxy.orchestrator.records()[0].num_output_tokens > 1)
        num_seen = sum(piece.count(b'"text"') for piece in call.pieces)
        assert (await house.get("/status")).json()["tokens"] == {"prompt": 0, "output": num_seen}
        call.leave()
        await call.done()
        assert 1 < num_seen < N
        assert await output(house) == {label("ids"): num_seen}
        assert (await house.get("/status")).json()["tokens"] == {"prompt": len(PROMPT), "output": num_seen}
        assert await series(house, "pdproxy_model_requests_total") == {'model="tiny",outcome="client_gone"': 1}


@asynccontextmanager
async def stream_that_moves(**options: Any) -> AsyncIterator[Harness]:
    """A proxy whose first decoder, to which all go, dies in the middle of streams."""
    decoders = [FakeEngine("decode"), FakeEngine("decode")]
    decoders[0].fail_at["middle"] = BROKEN
    async with proxy_in_front_of(decoders=decoders, **options) as house:
        lease = await Held(house.proxy.pool.of_role("decode")[1], 9).wait()
        yield house
        lease.release()


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize(
    ("body", "source"), [({"stream": True}, "ids"), (WITH_USAGE, "usage"), ({}, "usage"), ({"n": 1}, "usage")]
)
async def test_no_token_counts_twice_where_another_decoder_goes_on(body: dict[str, Any], source: str) -> None:
    async with stream_that_moves() as house:
        assert (await house.post(prompt=PROMPT, **body)).status == 200
        facts = house.proxy.recent.facts()[0]
        assert facts["attempts"] == 2
        assert facts["num_prompt_tokens"] == len(PROMPT), "what was shown is no prompt"
        assert await output(house) == {label(source): N}
        assert await prompts(house) == {label("usage"): len(PROMPT)}


@pytest.mark.usefixtures("both_ways")
async def test_the_prompt_of_a_stream_that_goes_on_locally_is_what_the_client_sent() -> None:
    """No prefiller tells it, and the second decoder reads more than that."""
    async with stream_that_moves(min_prompt_tokens=100) as house:
        assert (await house.post(prompt=PROMPT, stream=True)).text() == "".join(WORDS)
        facts = house.proxy.recent.facts()[0]
        assert (facts["attempts"], facts["path"], facts["num_prompt_tokens"]) == (2, "local", len(PROMPT))
        assert await output(house) == {label("ids"): N}
        assert await prompts(house) == {label("proxy"): len(PROMPT)}


@pytest.mark.usefixtures("both_ways")
async def test_a_usage_that_the_proxy_writes_itself_counts() -> None:
    async with proxy_in_front_of(retries=0) as house:
        last = {"index": 0, "text": "Once", "finish_reason": "stop", "token_ids": [100, 2]}
        chunk = b"data: " + json.dumps({"id": "i", "choices": [last]}).encode() + b"\n\n"
        house.decoder.fail_at["decode"] = FakeReply(200, [chunk, BROKEN], {"content-type": "text/event-stream"})
        answer = await house.post(prompt=PROMPT, **WITH_USAGE)
        assert answer.events()[-2]["usage"]["completion_tokens"] == 2
        assert await output(house) == {label("usage"): 2}


@pytest.mark.usefixtures("relay_way")
async def test_a_client_that_leaves_before_its_whole_answer_is_there_has_had_nothing() -> None:
    async with proxy_in_front_of() as house:
        house.decoder.hang_at.add("middle")
        call = house.call(prompt=PROMPT)
        await house.decoder.reached("middle")
        await until(lambda: house.proxy.orchestrator.records()[0].tokens.num_output > 1)
        call.leave()
        await call.done()
        assert "num_output_tokens" not in house.proxy.recent.facts()[0]
        assert (await house.get("/status")).json()["tokens"] == {"prompt": 0, "output": 0}
        assert await output(house) == await prompts(house) == {}


def test_a_request_that_is_over_holds_nothing_of_its_answer() -> None:
    """The status page keeps the last records."""
    body = json.dumps({"text": "x" * 1000, "usage": {"prompt_tokens": 1, "completion_tokens": 2}}).encode()
    record, num = RequestRecord("r", "/v1/completions"), sys.getrefcount(body)
    record.tokens.tell(body)
    assert sys.getrefcount(body) == num + 1
    record.end(Outcome.DONE)
    assert (sys.getrefcount(body), record.tokens.num_output) == (num, 2)


async def test_an_answer_that_begins_anew_is_counted_once() -> None:
    async with stream_that_moves() as house:
        for decoder in house.decoders:
            decoder.tells_ids = False  # so that nobody can go on
        assert (await house.post(prompt=PROMPT)).status == 200
        assert house.proxy.recent.facts()[0]["attempts"] == 2
        assert await output(house) == {label("usage"): N}


async def test_the_status_pages_tokens_never_decrease_though_a_usage_is_less_than_was_counted() -> None:
    async with proxy_in_front_of(continue_streams=False) as house:
        told = b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}\n\n'
        house.decoder.events = [b'data: {"choices": [{"text": "x"}]}\n\n'] * 4 + [told, b"data: [DONE]\n\n"]
        house.decoder.hang_at.add("middle")
        call = house.call(**WITH_USAGE)
        await house.decoder.reached("middle")
        await until(lambda: house.proxy.orchestrator.records()[0].num_output_tokens == 3)
        assert (await house.get("/status")).json()["tokens"]["output"] == 3
        house.decoder.let_go("middle")
        await call.answer()
        assert await output(house) == {label("usage"): 2}
        assert (await house.get("/status")).json()["tokens"]["output"] == 3


async def test_what_was_refused_has_no_tokens() -> None:
    async with proxy_in_front_of() as house:
        await house.post(prompt=3)
        await house.post(prompt=[1] * 100_000)
        assert await output(house) == await prompts(house) == {}
        assert (await house.get("/status")).json()["tokens"] == {"prompt": 0, "output": 0}
        refused = await series(house, "pdproxy_model_requests_total")
        assert refused == {'model="other",outcome="refused"': 1, 'model="tiny",outcome="refused"': 1}


@pytest.mark.parametrize("serves_any", [False, True], ids=["engines name their models", "they name none"])
async def test_ten_thousand_names_of_models_make_one_series(serves_any: bool) -> None:
    engines = FakeEngine("prefill"), FakeEngine("decode")
    if serves_any:
        for engine in engines:
            engine.fail_at["/v1/models"] = json_reply({"object": "list", "data": []})
    async with proxy_in_front_of([engines[0]], [engines[1]]) as house:
        await house.post(stream=True)
        observer, lines = house.proxy.orchestrator._observer, len((await house.get("/metrics")).body.splitlines())
        statuses = {(await house.post(model=f"attack-{number}", stream=True)).status for number in range(20)}
        assert statuses == ({200} if serves_any else {404})
        [record] = [record for record in house.proxy.recent._records if record.model == "attack-19"]
        for number in range(10_000):
            record.model = f"attack-{number}"
            observer.request_finished(record)
        page = (await house.get("/metrics")).body
        assert b"attack" not in page
        served = await series(house, "pdproxy_model_requests_total")
        assert served[f'model="{"other" if serves_any else "tiny"}",outcome="done"'] >= 1
        assert len(served) == 2 - serves_any
        assert sum(served.values()) == 10_021
        assert len(page.splitlines()) - lines < 100


async def test_a_request_that_names_no_model_counts_for_the_one_that_is_served() -> None:
    async with proxy_in_front_of() as house:
        await house.post(model=None, stream=True)
        assert await output(house) == {label("ids"): N}


async def test_times_between_tokens_are_of_streams_alone() -> None:
    async with proxy_in_front_of() as house:
        await house.post()
        names = ("pdproxy_time_per_output_token_seconds", "pdproxy_longest_token_gap_seconds")
        for name in (*names, "pdproxy_model_first_token_seconds"):
            assert await series(house, f"{name}_count") == {}
        await house.post(stream=True)
        for name in (*names, "pdproxy_model_first_token_seconds"):
            assert await series(house, f"{name}_count") == {'model="tiny"': 1}
        [(_, mean_s)] = (await series(house, f"{names[0]}_sum")).items()
        [(_, longest_s)] = (await series(house, f"{names[1]}_sum")).items()
        assert 0 < mean_s <= longest_s


# ── the log ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_the_line_of_a_request_tells_its_tokens_and_whose_key_it_was(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-blue name=team-blue\nsk-nameless\n")
    file.chmod(0o600)
    async with proxy_in_front_of(api_keys_file=file) as house:
        with caplog.at_level(logging.INFO, logger="pdproxy.requests"):
            await house.post(headers={"authorization": "Bearer sk-blue"}, prompt=PROMPT, stream=True)
            await house.post(headers={"x-api-key": "sk-nameless"}, prompt=PROMPT)
            await house.post(headers={"x-api-key": "sk-none"})
    texts = [record.getMessage() for record in caplog.records if record.name == "pdproxy.requests"]
    assert len(texts) == 3
    assert " key_name=team-blue model=tiny " in texts[0]
    assert " num_prompt_tokens=3 " in texts[0]
    assert texts[0].endswith(f" num_output_tokens={N} tokens_by=ids")
    assert texts[1].endswith(f" num_output_tokens={N} tokens_by=usage")
    assert "num_output_tokens" not in texts[2]
    assert "key_name" not in texts[1] + texts[2]
    assert "sk-" not in "".join(texts)
