"""``/v1/messages`` and ``/v1/responses`` through both legs, with all that completions have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdproxy.engines.http.base import EngineBroken
from pdproxy.engines.vllm_transfer import VllmTransferAdapter
from pdproxy.errors import InvalidRequest
from pdproxy.openai.apis import parse_messages, parser_of
from pdproxy.openai.request import EQUALLY_URGENT, MESSAGES, RESPONSES
from tests.fakes.at_once_engine import AtOnceEngine, Meetings
from tests.fakes.fake_apis import FakeApis
from tests.fakes.fake_engine import WORDS, FakeEngine, error_reply, json_reply
from tests.fakes.fake_vllm import PARAMS
from tests.fakes.proxy_harness import WAYS, Harness, Way, proxy_in_front_of

TEXT = "".join(WORDS)
APIS = (MESSAGES, RESPONSES)
PROMPT: dict[str, dict[str, Any]] = {
    MESSAGES: {"messages": [{"role": "user", "content": "a b c"}], "max_tokens": 8},
    RESPONSES: {"input": "a b c", "max_output_tokens": 8},
}


def fleet(num: int = 1) -> dict[str, Any]:
    return {
        "prefillers": [FakeApis("prefill") for _ in range(num)],
        "decoders": [FakeApis("decode") for _ in range(num)],
    }


async def post(house: Harness, path: str, headers: dict[str, str] | None = None, **body: Any) -> Any:
    return await call(house, path, headers, **body).answer()


def call(house: Harness, path: str, headers: dict[str, str] | None = None, **body: Any) -> Any:
    given = {"model": "tiny"} | PROMPT[path] | body
    return house.call_raw(path, json.dumps(given).encode(), headers)


def events_of(answer: Any) -> list[dict[str, Any]]:
    blocks = [block for block in answer.body.decode().split("\n\n") if block]
    events = [json.loads(block.partition("data: ")[2]) for block in blocks]
    for block, event in zip(blocks, events, strict=True):
        assert block.startswith(f"event: {event['type']}\n"), block
    return events


def text_of(path: str, answer: Any, *, stream: bool) -> str:
    if not stream:
        told = answer.json()
        parts = told["content"] if path == MESSAGES else told["output"][0]["content"]
        return "".join(part["text"] for part in parts)
    events = events_of(answer)
    if path == MESSAGES:
        return "".join(one["delta"]["text"] for one in events if one["type"] == "content_block_delta")
    return "".join(one["delta"] for one in events if one["type"] == "response.output_text.delta")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", APIS)
async def test_both_legs(path: str, stream: bool, way: Way) -> None:
    async with proxy_in_front_of(**fleet(), way=way) as house:
        answer = await post(house, path, stream=stream, temperature=0.5)
        assert answer.status == 200, answer.body
        assert answer.headers["x-pdproxy-path"] == "disaggregated"
        assert text_of(path, answer, stream=stream) == TEXT
        [prefill], [decode] = house.prefiller.generations(), house.decoder.generations()
        limit = "max_tokens" if path == MESSAGES else "max_output_tokens"
        assert (prefill.path, prefill.body[limit], prefill.body["stream"]) == (path, 1, False)
        assert prefill.body[PARAMS] == {"do_remote_decode": True}
        assert "max_tokens" not in prefill.body or path == MESSAGES
        assert (decode.body[limit], decode.body["temperature"], decode.body.get("stream")) == (8, 0.5, stream)
        assert decode.body[PARAMS]["remote_request_id"] == prefill.headers["x-request-id"]
        [record] = house.proxy.recent.facts()
        assert (record["num_output_tokens"], record["tokens_by"], record["num_prompt_tokens"]) == (8, "usage", 3)
        if path == RESPONSES:
            assert prefill.body["store"] is False
            assert "request_id" not in prefill.body
            assert decode.body["request_id"].startswith("resp_")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", APIS)
async def test_the_usage_tells_what_the_prefiller_had_cached(path: str, stream: bool) -> None:
    async with proxy_in_front_of(**fleet()) as house:
        house.prefiller.num_cached_tokens, house.decoder.num_cached_tokens = 1, 3
        answer = await post(house, path, stream=stream)
        if stream:
            last = [one for one in events_of(answer) if one["type"] in ("message_delta", "response.completed")][-1]
            usage = last["usage"] if path == MESSAGES else last["response"]["usage"]
        else:
            usage = answer.json()["usage"]
        if path == MESSAGES:
            assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (2, 1, 8)
        else:
            assert (usage["input_tokens"], usage["input_tokens_details"]) == (3, {"cached_tokens": 1})
        [record] = house.proxy.recent.facts()
        assert record["num_prompt_tokens"] == 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("keeps_kv", [True, False])
async def test_an_answer_that_ends_with_its_first_token(path: str, stream: bool, keeps_kv: bool) -> None:
    async with proxy_in_front_of(**fleet()) as house:
        house.prefiller.finish_at_first = "stop"
        house.prefiller.keeps_kv = keeps_kv
        answer = await post(house, path, stream=stream)
        assert answer.status == 200
        assert text_of(path, answer, stream=stream) == TEXT
        assert (PARAMS in house.decoder.generations()[0].body) == keeps_kv


@pytest.mark.parametrize("path", APIS)
async def test_a_prefiller_that_keeps_nothing_is_a_fault(path: str) -> None:
    async with proxy_in_front_of(**fleet(), retries=0) as house:
        house.prefiller.keeps_kv = False
        answer = await post(house, path)
        assert answer.status == 502
        assert "kept no KV" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("point", ["prefill", "decode"])
async def test_another_pair_takes_over_before_the_first_byte(path: str, point: str) -> None:
    async with proxy_in_front_of(**fleet(2)) as house:
        failing = house.prefillers[0] if point == "prefill" else house.decoders[0]
        failing.fail_at[point] = error_reply(500, "broken")
        for _ in range(2):
            answer = await post(house, path, stream=True)
            assert text_of(path, answer, stream=True) == TEXT
        await house.settled()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("path", APIS)
async def test_a_stream_that_breaks_ends_with_the_apis_own_error(path: str, way: Way) -> None:
    async with proxy_in_front_of(**fleet(), way=way) as house:
        house.decoder.fail_at["middle"] = EngineBroken("reset")
        answer = await post(house, path, stream=True)
        assert answer.status == 200
        last = events_of(answer)[-1]
        assert last["type"] == "error"
        assert last["error"]["type"] == ("api_error" if path == MESSAGES else "upstream_error")
        assert house.proxy.recent.facts()[0]["outcome"] == "failed"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("path", APIS)
async def test_a_stream_without_its_last_event_is_no_whole_answer(path: str, way: Way) -> None:
    async with proxy_in_front_of(**fleet(), way=way) as house:
        house.decoder.num_to_break = 6
        answer = await post(house, path, stream=True)
        assert events_of(answer)[-1]["type"] == "error"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("path", APIS)
async def test_an_error_event_of_the_engines_own(path: str, way: Way) -> None:
    async with proxy_in_front_of(**fleet(), way=way, retries=0) as house:
        error = b'event: error\ndata: {"type":"error","error":{"type":"internal_error","message":"oh"}}\n\n'
        whole = house.decoder.stream(path, house.decoder._as_chat(path, {"model": "tiny"} | PROMPT[path]))
        house.decoder.events = [*whole[:6], error]
        answer = await post(house, path, stream=True)
        assert events_of(answer)[-1]["error"]["message"] == "oh"
        house.decoder.events = [*whole[:1], error]
        answer = await post(house, path, stream=True)  # before anything was said
        assert answer.status == 502


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", APIS)
async def test_a_client_that_leaves_frees_what_was_held(path: str, stream: bool) -> None:
    async with proxy_in_front_of(**fleet()) as house:
        for point, engine in (("prefill_done", house.prefiller), ("first", house.decoder)):
            engine.hang_at.add(point)
            leaving = call(house, path, stream=stream)
            await engine.reached(point)
            leaving.leave()
            await leaving.ended()
            engine.let_go(point)
            engine.forget()
            await house.settled()
            assert not house.prefiller.pages
        assert text_of(path, await post(house, path, stream=stream), stream=stream) == TEXT


@pytest.mark.parametrize("path", APIS)
async def test_abandoned_blocks_are_given_back_by_an_errand_in_the_same_api(path: str) -> None:
    async with proxy_in_front_of(**fleet(), retries=0) as house:
        house.decoder.fail_at["decode"] = EngineBroken("reset")
        await post(house, path)
        house.decoder.fail_at.clear()
        await house.settled()
        assert not house.prefiller.pages
        assert house.decoder.generations()[-1].body["model"] == "pdproxy-abandoned"


@pytest.mark.parametrize("path", APIS)
async def test_errors_have_the_apis_own_form(path: str) -> None:
    async with proxy_in_front_of(**fleet(), api_keys=("secret",)) as house:
        refused = await post(house, path)
        assert refused.status == 401
        shown = {"x-api-key": "secret"}
        unknown = await post(house, path, shown, model="nobody")
        assert unknown.status == 404
        bad = await house.call_raw(path, b"{", shown).answer()
        assert bad.status == 400
        empty = await post(house, path, shown, **{"messages" if path == MESSAGES else "input": []})
        house.proxy.orchestrator.stop_accepting()
        ending = await post(house, path, shown)
        types = [one.json()["error"]["type"] for one in (refused, unknown, bad, empty, ending)]
        if path == MESSAGES:
            assert all(one.json()["type"] == "error" for one in (refused, unknown, bad, empty, ending))
            assert types == [
                "authentication_error",
                "not_found_error",
                "invalid_request_error",
                "invalid_request_error",
                "overloaded_error",
            ]
        else:
            assert types[0] == "authentication_error"
            assert {frozenset(one.json()["error"]) for one in (refused, unknown, bad, ending)} == {
                frozenset({"message", "type", "param", "code"})
            }


async def test_an_openai_refusal_of_the_engines_server_is_told_as_anthropic_tells_it() -> None:
    async with proxy_in_front_of(**fleet()) as house:
        answer = await post(house, MESSAGES, temperature="hot")
        assert answer.status == 400
        assert answer.json() == {
            "type": "error",
            "error": {"type": "invalid_request_error", "message": "temperature: Input should be a valid number"},
        }


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "media"),
        (RESPONSES, {"tools": [{"type": "web_search"}]}, "engine_tools"),
    ],
)
async def test_what_the_decoder_serves_alone(path: str, body: dict[str, Any], reason: str) -> None:
    async with proxy_in_front_of(**fleet()) as house:
        answer = await post(house, path, **body)
        assert (answer.status, answer.headers["x-pdproxy-path"]) == (200, "local")
        assert house.proxy.recent.facts()[0]["reason"] == reason
        assert not house.prefiller.generations()


@pytest.mark.parametrize("path", APIS)
async def test_engines_that_do_not_serve_it(path: str) -> None:
    async with proxy_in_front_of([FakeEngine("prefill")], [FakeEngine("decode")]) as house:
        answer = await post(house, path)
        assert answer.status == 404
        assert path in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_decoder_that_keeps_a_response_is_asked_again(stream: bool) -> None:
    async with proxy_in_front_of(**fleet(3)) as house:
        for _ in range(4):
            first = await post(house, RESPONSES)
            response, decoder = first.json()["id"], first.headers["x-pdproxy-decoder"]
            second = await post(house, RESPONSES, previous_response_id=response, stream=stream)
            assert second.status == 200, second.body
            assert second.headers["x-pdproxy-decoder"] == decoder
            assert text_of(RESPONSES, second, stream=stream) == TEXT
            assert (await house.get(f"{RESPONSES}/{response}")).json()["id"] == response
            cancelled = await house.call_raw(f"{RESPONSES}/{response}/cancel", b"").answer()
            assert cancelled.json()["id"] == response
        assert house.proxy.recent.facts()[0]["reason"] == "kept_response"


@pytest.mark.parametrize("response", ["resp_somebodys", "resp_" + "0" * 40])
async def test_a_response_that_nobody_keeps(response: str) -> None:
    async with proxy_in_front_of(**fleet()) as house:
        answer = await post(house, RESPONSES, previous_response_id=response)
        assert (answer.status, answer.error["code"]) == (404, "response_not_found")
        assert (await house.get(f"{RESPONSES}/{response}")).status == 404


async def test_a_response_that_breaks_off_at_its_keeper() -> None:
    async with proxy_in_front_of(**fleet(), retries=2) as house:
        response = (await post(house, RESPONSES)).json()["id"]
        house.decoder.num_to_break = 6
        answer = await post(house, RESPONSES, previous_response_id=response, stream=True)
        assert events_of(answer)[-1]["type"] == "error"
        house.decoder.num_to_break = None


async def test_what_a_kept_response_is_asked_for_shows_the_clients_key_where_engines_are_to_see_it() -> None:
    shown = {"authorization": "Bearer mine"}
    async with proxy_in_front_of(**fleet()) as house:
        kept = f"{RESPONSES}/{(await post(house, RESPONSES, shown)).json()['id']}"
        await house.call_raw(kept, b"", shown, method="GET").answer()
        await house.call_raw(f"{kept}/cancel", b"", shown).answer()
        asked = [one for one in house.decoder.calls if one.path.startswith(kept)]
        assert [one.headers.get("authorization") for one in asked] == ["Bearer mine"] * 2
    async with proxy_in_front_of(**fleet(), api_keys=("mine",)) as house:
        kept = f"{RESPONSES}/{(await post(house, RESPONSES, shown)).json()['id']}"
        await house.call_raw(kept, b"", shown, method="GET").answer()
        assert "authorization" not in house.decoder.calls[-1].headers


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_is_not_shown_with_a_key_of_another_name(tmp_path: Path, stream: bool) -> None:
    file = tmp_path / "keys"
    file.write_text("a name=shop\nb name=shop\nc name=other\nd\n")
    file.chmod(0o600)
    async with proxy_in_front_of(**fleet(2), api_keys_file=file) as house:
        response = (await post(house, RESPONSES, {"x-api-key": "a"})).json()["id"]
        for key, status in (("a", 200), ("b", 200), ("c", 404), ("d", 404)):
            shown = {"x-api-key": key}
            assert (await house.call_raw(f"{RESPONSES}/{response}", b"", shown, method="GET").answer()).status == status
            assert (await house.call_raw(f"{RESPONSES}/{response}/cancel", b"", shown).answer()).status == status
            answer = await post(house, RESPONSES, shown, previous_response_id=response, stream=stream)
            assert answer.status == status
            again = None if stream or status != 200 else answer.json()["id"]
            if again is not None:  # it is kept under the same name
                assert (await post(house, RESPONSES, shown, previous_response_id=again)).status == 200


@pytest.mark.parametrize("kind", ["response.failed", "error"])
async def test_a_kept_responses_stream_ends_with_one_error(kind: str) -> None:
    async with proxy_in_front_of(**fleet(), retries=0) as house:
        response = (await post(house, RESPONSES)).json()["id"]
        told: dict[str, Any] = {"type": kind, "error": {"type": "internal_error", "message": "oh"}}
        error = f"event: {kind}\ndata: {json.dumps(told)}\n\n".encode()
        whole = house.decoder.stream(
            RESPONSES, house.decoder._as_chat(RESPONSES, {"model": "tiny"} | PROMPT[RESPONSES])
        )
        house.decoder.events = [*whole[:6], error]
        answer = await post(house, RESPONSES, previous_response_id=response, stream=True)
        kinds = [one["type"] for one in events_of(answer)]
        assert kinds[-1] == kind
        assert not {"error", "response.failed"} & set(kinds[:-1])
        assert house.proxy.recent.facts()[0]["outcome"] == "failed"
        house.decoder.events = [error]
        answer = await post(house, RESPONSES, previous_response_id=response, stream=True)
        assert answer.status == 502  # nothing was said before it


async def test_a_query_as_anthropics_clients_send_it() -> None:
    async with proxy_in_front_of(**fleet()) as house:
        body = json.dumps({"model": "tiny"} | PROMPT[MESSAGES]).encode()
        answer = await house.call_raw(f"{MESSAGES}?beta=true", body).answer()
        assert answer.status == 200


async def test_the_clients_own_key_goes_to_the_engines_where_the_proxy_asks_for_none() -> None:
    async with proxy_in_front_of(**fleet()) as house:
        await post(house, MESSAGES, {"x-api-key": "mine"})
        assert [one.headers["x-api-key"] for one in house.decoder.generations()] == ["mine"]


@pytest.mark.parametrize("path", APIS)
async def test_a_decoder_serves_alone_what_its_kind_does_not_divide(path: str) -> None:
    meetings = Meetings()
    prefiller, decoder = (AtOnceEngine("mooncake", role, meetings) for role in ("prefill", "decode"))
    async with proxy_in_front_of([prefiller], [decoder]) as house:
        told = FakeApis("decode")
        body = {"model": "tiny"} | PROMPT[path]
        decoder.fail_at[path] = json_reply(told.whole(path, told._as_chat(path, body)))
        answer = await post(house, path, kv_transfer_params={"do_remote_prefill": True})
        assert (answer.status, answer.headers["x-pdproxy-path"]) == (200, "local")
        assert text_of(path, answer, stream=False) == TEXT
        [asked] = decoder.bodies(path)
        assert "kv_transfer_params" not in asked
        assert not prefiller.bodies(path)


@pytest.mark.parametrize("path", APIS)
async def test_engines_that_cannot_serve_alone_refuse_it(path: str) -> None:
    meetings = Meetings()
    engines = [AtOnceEngine("sglang", role, meetings) for role in ("prefill", "decode")]
    async with proxy_in_front_of(engines[:1], engines[1:]) as house:
        answer = await post(house, path)
        assert answer.status == 404
        assert not engines[1].bodies(path)


async def test_thinking_is_not_divided_with_our_own_connector() -> None:
    adapter = VllmTransferAdapter(kv_url="http://127.0.0.1:1")
    for thinking, hands_over in (({}, True), ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, False)):
        body = json.dumps(PROMPT[MESSAGES] | thinking).encode()
        assert adapter.hands_over(parse_messages(MESSAGES, body, {}), None) is hands_over


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (MESSAGES, {"max_tokens": None}, "max_tokens"),
        (MESSAGES, {"max_tokens": 0}, "max_tokens"),
        (MESSAGES, {"messages": "a"}, "messages"),
        (MESSAGES, {"model": 5}, "model"),
        (RESPONSES, {"input": None}, "input"),
        (RESPONSES, {"input": {"a": 1}}, "input"),
        (RESPONSES, {"max_output_tokens": -1}, "max_output_tokens"),
        (RESPONSES, {"tools": [{"type": 5}]}, "tools[0].type"),
        (RESPONSES, {"previous_response_id": 5}, "previous_response_id"),
    ],
)
def test_bad_bodies_are_told_by_field(path: str, body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        parser_of(path)(path, json.dumps(PROMPT[path] | body).encode(), {}, EQUALLY_URGENT)
    assert error.value.param == param
    assert param in str(error.value)


@pytest.mark.parametrize("number", ["1e999", "9" * 400, str(2**64)])
@pytest.mark.parametrize("path", [*APIS, "/v1/embeddings", "/detokenize"])
def test_numbers_that_no_engine_can_read(path: str, number: str) -> None:
    given = json.dumps(PROMPT.get(path, {}) | {"tokens": [1]})
    for field in ("temperature", "tokens"):
        body = given[:-1] + f', "{field}": [{number}]}}'
        with pytest.raises(InvalidRequest, match="out of range") as error:
            parser_of(path)(path, body.encode(), {}, EQUALLY_URGENT)
        assert error.value.param == field
