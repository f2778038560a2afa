"""The Mooncake connector's bodies, byte for byte, and what is read of its engines' answers."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from pdproxy.engines.adapter import AttemptInfo, MalformedReply, NoHandoff, ReleaseCall, ReleaseMode
from pdproxy.engines.info import EngineInfo
from pdproxy.engines.mooncake import MooncakeAdapter
from pdproxy.openai.request import CHAT, COMPLETIONS, GenerationRequest, parse
from pdproxy.openai.usage import PromptUsage

QUERY = "http://10.0.0.1:8998/query"
PREFILLER = MooncakeAdapter("prefill", bootstrap="10.0.0.1:8998")
DECODER = MooncakeAdapter("decode", bootstrap=None)
METRICS = (
    b'vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="802"} 1.0\n'
    b'vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="1",num_gpu_blocks="602"} 1.0\n'
    b"process_start_time_seconds 1.7e+09\n"
)
ENGINES = {
    "0": {"engine_id": "engine-zero", "worker_addr": {"0": {"0": "tcp://10.0.0.1:5000"}}},
    "1": {"engine_id": "engine-one", "worker_addr": {"0": {"0": "tcp://10.0.0.1:5001"}}},
}
BODY = (
    b'{"model":"m","messages":[{"role":"user","content":"hi"}],"max_tokens":5,"stream":true,"stop":["x"],'
    b'"stream_options":{"include_usage":true},"min_tokens":2}'
)
REQUEST = parse(CHAT, BODY)


def answers(metrics: bytes = METRICS, engines: Any = None) -> dict[str, bytes]:
    models = {"object": "list", "data": [{"id": "m", "max_model_len": 2048}]}
    query = json.dumps({"0": ENGINES["0"]} if engines is None else engines).encode()
    return {"/health": b"", "/metrics": metrics, "/v1/models": json.dumps(models).encode(), QUERY: query}


def info() -> AttemptInfo:
    return AttemptInfo(
        attempt="0a1b",
        prefiller=PREFILLER.read_facts(answers()),
        decoder=EngineInfo(epoch=None),
        timeout_s=9.5,
        notify="tcp://p:7500",
        prompt_ids=None,
    )


def completion(**fields: Any) -> GenerationRequest:
    return parse(COMPLETIONS, json.dumps({"model": "m", "prompt": "hi", "max_tokens": 5} | fields).encode())


# ── the legs ──


def test_prefill_leg_whose_token_cannot_be_the_last() -> None:
    assert PREFILLER.prefill_body(REQUEST, info()) == (
        b'{"model":"m","messages":[{"role":"user","content":"hi"}],"max_tokens":1,"stream":false,"ignore_eos":true,'
        b'"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":"xfer-0a1b"}}'
    )


def test_decode_leg() -> None:
    params = (
        b',"kv_transfer_params":{"do_remote_decode":false,"do_remote_prefill":true,"remote_engine_id":"engine-zero",'
        b'"remote_bootstrap_addr":"http://10.0.0.1:8998","transfer_id":"xfer-0a1b"}}'
    )
    leg = DECODER.decode_leg(REQUEST, info(), None)
    assert (leg.body, leg.opening) == (BODY[:-1] + params, None)
    with_ids = json.loads(DECODER.decode_leg(REQUEST, info(), None, with_ids=True).body)
    assert with_ids["return_token_ids"] is True


def test_legs_of_one_instance_alone() -> None:
    assert PREFILLER.one_token_body(REQUEST) == (
        b'{"model":"m","messages":[{"role":"user","content":"hi"}],"max_tokens":1,"stream":false,"stop":["x"],'
        b'"min_tokens":2}'
    )
    assert DECODER.local_body(REQUEST) == BODY
    assert json.loads(DECODER.local_body(REQUEST, with_ids=True))["return_token_ids"] is True


def test_headers() -> None:
    assert PREFILLER.leg_headers("r", "0a1b") == {"x-request-id": "r-0a1b"}
    second = MooncakeAdapter("prefill", bootstrap="h:1", data_parallel_rank=1)
    assert second.leg_headers("r", "0a1b") == {"x-request-id": "r-0a1b", "x-data-parallel-rank": "1"}


# ── the prefiller's reply ──


@pytest.mark.parametrize("reason", ["length", "tool_calls"])
def test_a_prefill_reply_says_that_the_kv_is_kept(reason: str) -> None:
    body = {"choices": [{"text": "x", "finish_reason": reason}], "usage": {"prompt_tokens": 7}}
    reply = PREFILLER.read_prefill(REQUEST, json.dumps(body).encode())
    assert (reply.handoff, reply.is_whole, reply.has_text, reply.usage) == (None, False, False, PromptUsage(7))


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_one_token_may_end_an_answer_of_one(reason: str) -> None:
    request = replace(REQUEST, max_tokens=1)
    assert PREFILLER.read_prefill(request, json.dumps({"choices": [{"finish_reason": reason}]}).encode())
    with pytest.raises(NoHandoff):
        PREFILLER.read_prefill(request, b'{"choices":[{"finish_reason":"abort"}]}')


@pytest.mark.parametrize("reason", ["stop", "abort", None])
def test_kv_that_was_not_kept(reason: str | None) -> None:
    with pytest.raises(NoHandoff):
        PREFILLER.read_prefill(REQUEST, json.dumps({"choices": [{"finish_reason": reason}]}).encode())


def test_a_prefill_reply_that_is_none() -> None:
    with pytest.raises(MalformedReply):
        PREFILLER.read_prefill(REQUEST, b'{"choices":[]}')


# ── facts ──


def test_facts_of_a_prefiller() -> None:
    assert PREFILLER.looks == ("/health", "/metrics", "/v1/models", QUERY)
    facts = PREFILLER.read_facts(answers())
    assert (set(facts.models), facts.max_model_len, facts.epoch) == ({"m"}, 2048, "1.7e+09")
    assert (facts.num_pages, facts.chunk_size) == (400, 16)
    assert facts.num_occupied is None
    assert (facts.bootstrap, facts.engine_id) == ("10.0.0.1:8998", "engine-zero")
    assert facts.agreement == {"block_size": "16", "cache_dtype": "auto"}


def test_facts_of_a_decoder() -> None:
    assert DECODER.looks == ("/health", "/metrics", "/v1/models")
    facts = DECODER.read_facts({path: answers()[path] for path in DECODER.looks})
    assert (facts.num_pages, facts.bootstrap, facts.engine_id) == (0, None, None)


def test_blocks_in_use_are_told_of_the_memory_that_slots_guard() -> None:
    metrics = METRICS + b'vllm:kv_cache_usage_perc{engine="0"} 0.02\nvllm:kv_cache_usage_perc{engine="1"} 0.01\n'
    assert PREFILLER.read_facts(answers(metrics)).num_occupied == 8
    assert DECODER.read_facts(answers(metrics)).num_occupied is None
    adapter = MooncakeAdapter("prefill", bootstrap="10.0.0.1:8998", data_parallel_rank=1)
    assert adapter.read_facts(answers(metrics, ENGINES)).num_occupied == 3


def test_facts_of_one_rank_among_several() -> None:
    adapter = MooncakeAdapter("prefill", bootstrap="10.0.0.1:8998", data_parallel_rank=1)
    facts = adapter.read_facts(answers(engines=ENGINES))
    assert (facts.num_pages, facts.engine_id) == (300, "engine-one")


def test_an_engine_that_does_not_tell_when_it_began_is_known_by_its_id() -> None:
    metrics = METRICS.replace(b"process_start_time_seconds 1.7e+09\n", b"")
    assert PREFILLER.read_facts(answers(metrics)).epoch == "engine-zero"


@pytest.mark.parametrize(
    ("engines", "says"),
    [({}, "not ready"), (ENGINES, r"ranks \[0, 1\]: set data_parallel_rank"), ([], "not understood")],
)
def test_engines_that_are_not_known(engines: Any, says: str) -> None:
    with pytest.raises(MalformedReply, match=says):
        PREFILLER.read_facts(answers(engines=engines))


# ── an early end ──


def test_kv_that_no_decoder_has_heard_of_is_refused_by_one() -> None:
    reply = PREFILLER.read_prefill(REQUEST, b'{"choices":[{"finish_reason":"length"}]}')
    errand = PREFILLER.abandon(REQUEST, info(), reply, is_decode_sent=False)
    assert isinstance(errand, ReleaseCall)
    assert (errand.role, errand.call.path) == ("decode", CHAT)
    body = json.loads(errand.call.body)
    assert (body["model"], body["stream"], "stream_options" in body) == ("pdproxy-abandoned", False, False)
    decode = json.loads(DECODER.decode_leg(REQUEST, info(), None).body)
    assert body["kv_transfer_params"] == decode["kv_transfer_params"]
    assert PREFILLER.read_errand(404, b"")
    assert not PREFILLER.read_errand(200, b"")


def test_the_engines_settle_the_rest_among_themselves() -> None:
    reply = PREFILLER.read_prefill(REQUEST, b'{"choices":[{"finish_reason":"length"}]}')
    assert PREFILLER.abandon(REQUEST, info(), reply, is_decode_sent=True) is ReleaseMode.FREE
    assert PREFILLER.abandon(REQUEST, info(), None, is_decode_sent=False) is ReleaseMode.FREE


def test_another_attempt_has_another_transfer() -> None:
    bodies = [PREFILLER.prefill_body(REQUEST, replace(info(), attempt=attempt)) for attempt in ("0a", "0b")]
    ids = [json.loads(body)["kv_transfer_params"]["transfer_id"] for body in bodies]
    assert ids == ["xfer-0a", "xfer-0b"]
