"""SGLang's bodies, byte for byte, and what is read of its answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdproxy.admission.room import UNKNOWN_CACHE, KvCache
from pdproxy.engines.adapter import AttemptInfo, MalformedReply, ReleaseCall, ReleaseMode
from pdproxy.engines.info import EngineInfo
from pdproxy.engines.sglang import SglangAdapter
from pdproxy.errors import InvalidRequest
from pdproxy.openai.request import CHAT, COMPLETIONS, GenerationRequest, parse
from pdproxy.openai.usage import PromptUsage

ATTEMPT = "0123456789abcdef0123456789abcdef"
ROOM = int(ATTEMPT, 16) % 2**63
PREFILLER = SglangAdapter("prefill", bootstrap="10.0.0.1:8998")
DECODER = SglangAdapter("decode", bootstrap=None)
CHAT_BODY = (
    b'{"model":"m","messages":[{"role":"user","content":"hi"}],"max_tokens":5,"stream":true,'
    b'"stream_options":{"include_usage":true}}'
)


def info(prefiller: SglangAdapter = PREFILLER, attempt: str = ATTEMPT) -> AttemptInfo:
    return AttemptInfo(
        attempt=attempt,
        prefiller=prefiller.read_facts(answers()),
        decoder=EngineInfo(epoch=None),
        timeout_s=9.5,
        notify="tcp://p:7500",
        prompt_ids=None,
    )


def answers(**info: Any) -> dict[str, bytes]:
    """Of a server that tells what this test needs, and a hundred other things."""
    told: dict[str, Any] = {
        "model_path": "/models/m",
        "dtype": "auto",
        "page_size": 64,
        "kv_cache_dtype": "bfloat16",
        "dp_size": 1,
        "max_running_requests": None,
        "random_seed": 42,
        "startup_time": {"load_weight": 1.25, "scheduler_e2e": 9.75},
        "disaggregation_mode": "prefill",
        "disaggregation_bootstrap_port": 9001,
        "disaggregation_transfer_backend": "nixl",
        "disaggregation_decode_allocation_policy": "early",
        "internal_states": [{"disaggregation_mode": "prefill", "effective_max_running_requests_per_dp": 48}],
    }
    models = {"object": "list", "data": [{"id": "m", "max_model_len": 4096}, {"id": "m-lora", "parent": "m"}]}
    return {"/server_info": json.dumps(told | info).encode(), "/v1/models": json.dumps(models).encode()}


def completion(**fields: Any) -> GenerationRequest:
    return parse(COMPLETIONS, json.dumps({"model": "m", "prompt": "hi", "max_tokens": 5} | fields).encode())


def prefill_leg(request: GenerationRequest, **how: Any) -> dict[str, Any]:
    leg: dict[str, Any] = json.loads(PREFILLER.prefill_body(request, info(**how)))
    return leg


def decode_leg(request: GenerationRequest, **how: Any) -> dict[str, Any]:
    leg: dict[str, Any] = json.loads(DECODER.decode_leg(request, info(**how), None).body)
    return leg


# ── the legs ──


def test_both_legs_ask_for_the_same_in_the_same_room() -> None:
    request = parse(CHAT, CHAT_BODY)
    meeting = f'"bootstrap_host":"10.0.0.1","bootstrap_port":8998,"bootstrap_room":{ROOM},"rid":"{ATTEMPT}"'.encode()
    head = b'{"model":"m","messages":[{"role":"user","content":"hi"}],"max_tokens":5,'
    options = b'"stream":true,"stream_options":{"include_usage":true},'
    assert PREFILLER.prefill_body(request, info()) == head + meeting + b',"stream":false}'
    decode = DECODER.decode_leg(request, info(), None)
    assert (decode.body, decode.opening) == (head + options + meeting + b"}", None)


def test_a_room_has_63_bits_and_is_another_in_every_attempt() -> None:
    rooms = {prefill_leg(completion(), attempt=digit * 32)["bootstrap_room"] for digit in "0123456789abcdef"}
    assert len(rooms) == 16
    assert all(0 <= room < 2**63 for room in rooms)


def test_several_prompts_have_a_room_each_and_the_same_on_both_legs() -> None:
    request = completion(prompt=["a", "b", "c"])
    prefill, decode = prefill_leg(request, attempt="f" * 32), decode_leg(request, attempt="f" * 32)
    rooms = [2**63 - 1, 0, 1]
    assert prefill["bootstrap_room"] == decode["bootstrap_room"] == rooms
    assert (prefill["bootstrap_host"], prefill["bootstrap_port"]) == (["10.0.0.1"] * 3, [8998] * 3)
    assert "rid" not in prefill


@pytest.mark.parametrize("prompt", [["hi"], [1, 2], [[1, 2]]])
def test_one_prompt_in_a_list_is_one(prompt: Any) -> None:
    assert prefill_leg(completion(prompt=prompt))["bootstrap_room"] == ROOM


@pytest.mark.parametrize("name", ["n", "best_of"])
def test_several_answers_to_one_prompt_would_share_a_room_and_are_refused(name: str) -> None:
    request = completion(**{name: 2})
    with pytest.raises(InvalidRequest, match=f"{name} must be 1") as refused:
        PREFILLER.hands_over(request, None)
    assert refused.value.param == name
    assert PREFILLER.hands_over(completion(), None)


def test_a_client_chooses_neither_ids_nor_ranks_nor_rooms() -> None:
    theirs = {"rid": "x", "routed_dp_rank": 1, "data_parallel_rank": 1, "disagg_prefill_dp_rank": 1}
    rooms = {"bootstrap_room": 7, "bootstrap_host": "2.2.2.2", "bootstrap_pair_key": "k"}
    request = completion(**theirs, **rooms)
    assert prefill_leg(request) == prefill_leg(completion())
    assert decode_leg(request) == decode_leg(completion())


def test_data_parallel_ranks() -> None:
    prefiller = SglangAdapter("prefill", bootstrap="h:1", data_parallel_rank=3)
    decoder = SglangAdapter("decode", bootstrap=None, data_parallel_rank=1)
    way = info(prefiller)
    prefill = json.loads(prefiller.prefill_body(completion(), way))
    decode = json.loads(decoder.decode_leg(completion(), way, None).body)
    assert (prefill["routed_dp_rank"], prefill["disagg_prefill_dp_rank"]) == (3, 3)
    assert (decode["routed_dp_rank"], decode["disagg_prefill_dp_rank"]) == (1, 3)
    assert prefiller.leg_headers("r", ATTEMPT) == {"x-data-parallel-rank": "3"}
    assert PREFILLER.leg_headers("r", ATTEMPT) == {}


def test_ids_are_asked_for_where_they_are_wanted() -> None:
    leg = DECODER.decode_leg(completion(), info(), None, with_ids=True)
    assert json.loads(leg.body)["return_token_ids"] is True


# ── the prefiller's reply ──


@pytest.mark.parametrize("num_choices", [1, 3])
def test_a_prefill_reply_is_neither_handoff_nor_answer(num_choices: int) -> None:
    choice = {"text": "x", "finish_reason": "length"}
    body = {"id": "i", "choices": [choice] * num_choices, "usage": {"prompt_tokens": 7}}
    reply = PREFILLER.read_prefill(completion(), json.dumps(body).encode())
    assert (reply.handoff, reply.is_whole, reply.has_text, reply.usage) == (None, False, False, PromptUsage(7))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b'{"choices":[]}',
        b'{"choices":[{"finish_reason":"abort"}]}',
        b'{"choices":[{"finish_reason":"length"},{"finish_reason":"abort"}]}',
    ],
)
def test_prefill_replies_that_are_none(body: bytes) -> None:
    with pytest.raises(MalformedReply):
        PREFILLER.read_prefill(completion(), body)


# ── facts ──


def test_facts_of_a_prefiller() -> None:
    facts = PREFILLER.read_facts(answers())
    assert (facts.role, set(facts.models), facts.max_model_len) == ("prefill", {"m", "m-lora"}, 4096)
    assert (facts.num_pages, facts.chunk_size, facts.bootstrap) == (48, None, "10.0.0.1:8998")
    assert facts.agreement == {
        "page_size": "64",
        "kv_cache_dtype": "bfloat16",
        "transfer_backend": "nixl",
        "allocation_policy": "early",
    }


def test_facts_of_a_decoder() -> None:
    facts = DECODER.read_facts(answers(internal_states=[{"disaggregation_mode": "decode"}]))
    assert (facts.role, facts.num_pages, facts.bootstrap) == ("decode", 0, None)


@pytest.mark.parametrize(
    ("info", "rank", "cache"),
    [
        ({}, None, UNKNOWN_CACHE),
        ({"max_total_num_tokens": 6400}, None, KvCache(6400, 64)),
        ({"max_total_num_tokens": 6400, "dp_size": 4}, None, KvCache(25600, 64)),
        ({"max_total_num_tokens": 6400, "dp_size": 4}, 2, KvCache(6400, 64)),
        ({"max_total_num_tokens": 6400, "page_size": None}, None, KvCache(6400, 1)),
    ],
)
def test_the_kv_cache_of_a_decoder(info: dict[str, Any], rank: int | None, cache: KvCache) -> None:
    adapter = SglangAdapter("decode", bootstrap=None, max_rooms=None, data_parallel_rank=rank)
    told = answers(internal_states=[{"disaggregation_mode": "decode"}], **info)
    assert adapter.read_facts(told).cache == cache
    assert PREFILLER.read_facts(answers(**info)).cache == UNKNOWN_CACHE


def test_a_role_is_what_it_is_now() -> None:
    """An engine may be made the other while it runs; what it was started as is of no interest then."""
    switched = answers(internal_states=[{"disaggregation_mode": "decode", "effective_max_running_requests_per_dp": 8}])
    assert PREFILLER.read_facts(switched).role == "decode"
    assert PREFILLER.read_facts(answers(internal_states=[], max_running_requests=8)).role == "prefill"


def test_an_engine_without_a_role() -> None:
    with pytest.raises(MalformedReply, match="--disaggregation-mode null"):
        PREFILLER.read_facts(answers(disaggregation_mode="null", internal_states=[]))


@pytest.mark.parametrize(
    ("info", "max_rooms", "rank", "rooms"),
    [
        ({}, None, None, 48),
        ({}, 10, None, 10),
        ({}, 100, None, 48),
        ({"dp_size": 4}, None, None, 192),
        ({"dp_size": 4}, None, 2, 48),
        ({"internal_states": [], "max_running_requests": 20}, None, None, 20),
        ({"internal_states": []}, 5, None, 5),
    ],
)
def test_rooms(info: dict[str, Any], max_rooms: int | None, rank: int | None, rooms: int) -> None:
    adapter = SglangAdapter("prefill", bootstrap="h", max_rooms=max_rooms, data_parallel_rank=rank)
    facts = adapter.read_facts(answers(**info))
    assert (facts.num_pages, facts.data_parallel_rank) == (rooms, rank)


def test_a_number_of_ranks_that_is_not_the_engines() -> None:
    adapter = SglangAdapter("prefill", bootstrap="h", data_parallel_rank=1, data_parallel_size=2)
    assert adapter.read_facts(answers(dp_size=2)).num_ranks == 2
    with pytest.raises(MalformedReply, match="its dp_size is 4, and data_parallel_size is 2"):
        adapter.read_facts(answers(dp_size=4))


def test_a_prefiller_that_says_no_number_of_rooms() -> None:
    with pytest.raises(MalformedReply, match="set max_rooms"):
        PREFILLER.read_facts(answers(internal_states=[]))


@pytest.mark.parametrize(
    ("bootstrap", "told"),
    [("h", "h:9001"), ("h:8998", "h:8998"), ("[::1]", "[::1]:9001"), ("[::1]:8998", "[::1]:8998")],
)
def test_the_bootstrap_port_is_the_configured_or_the_told(bootstrap: str, told: str) -> None:
    adapter = SglangAdapter("prefill", bootstrap=bootstrap)
    assert adapter.read_facts(answers()).bootstrap == told
    host, _, port = told.rpartition(":")
    leg = json.loads(DECODER.decode_leg(completion(), info(adapter), None).body)
    assert (leg["bootstrap_host"], leg["bootstrap_port"]) == (host, int(port))


def test_an_epoch_is_a_process() -> None:
    first = PREFILLER.read_facts(answers()).epoch
    assert first == PREFILLER.read_facts(answers(last_gen_throughput=3.0)).epoch
    assert first != PREFILLER.read_facts(answers(random_seed=43)).epoch
    assert first != PREFILLER.read_facts(answers(startup_time={"load_weight": 1.5})).epoch
    assert PREFILLER.read_facts(answers(random_seed=None, startup_time=None)).epoch is None


@pytest.mark.parametrize("path", ["/server_info", "/v1/models"])
def test_facts_that_are_none(path: str) -> None:
    assert path in PREFILLER.looks
    with pytest.raises(MalformedReply):
        PREFILLER.read_facts(answers() | {path: b"[]"})


# ── an early end ──


def test_a_prompt_that_is_still_read_is_ended_by_its_id() -> None:
    errand = PREFILLER.abandon(completion(), info(), None, is_decode_sent=True)
    assert isinstance(errand, ReleaseCall)
    assert (errand.role, errand.call.path) == ("prefill", "/abort_request")
    assert json.loads(errand.call.body) == {"rid": prefill_leg(completion())["rid"]}
    assert PREFILLER.read_errand(200, b"")
    assert PREFILLER.read_errand(401, b'{"error":"Unauthorized"}')
    assert not PREFILLER.read_errand(503, b"")


def test_closed_rooms_and_several_prompts_need_no_errand() -> None:
    reply = PREFILLER.read_prefill(completion(), b'{"choices":[{"finish_reason":"length"}]}')
    assert PREFILLER.abandon(completion(), info(), reply, is_decode_sent=True) is ReleaseMode.FREE
    several = completion(prompt=["a", "b"])
    assert PREFILLER.abandon(several, info(), None, is_decode_sent=True) is ReleaseMode.FREE
