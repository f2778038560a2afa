"""vLLM's bodies and replies under its NixlConnector, byte for byte."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from pdproxy.engines.adapter import AttemptInfo, MalformedReply, NoHandoff, ReleaseCall, ReleaseMode
from pdproxy.engines.info import EngineInfo
from pdproxy.engines.traits import KvReady, ReleaseSignal
from pdproxy.engines.vllm_nixl import VllmNixlAdapter
from pdproxy.openai.request import CHAT, COMPLETIONS, GenerationRequest, parse
from pdproxy.openai.usage import PromptUsage

PREFILLER = VllmNixlAdapter("prefill")
DECODER = VllmNixlAdapter("decode")
FACTS = EngineInfo(epoch="e", agreement={"vllm": "0.32.0"})
PASSAGE = AttemptInfo(
    attempt="a1", prefiller=FACTS, decoder=FACTS, timeout_s=9.5, notify="tcp://p:7500", prompt_ids=[7, 8, 9]
)
HEAD = b'{"model":"m","messages":[{"role":"user","content":"hi"}],"tools":[{"z":1,"a":{"c":1,"b":2}}],'
CHAT_REQUEST = parse(
    CHAT,
    HEAD + b'"min_tokens":2,"stream":true,"stream_options":{"include_usage":true},"max_tokens":5,"seed":1,'
    b'"kv_transfer_params":{"remote_host":"evil"}}',
)
TEXT = parse(COMPLETIONS, b'{"prompt":"hi","model":"m","stream":true,"max_tokens":5}')
IDS = parse(COMPLETIONS, b'{"model":"m","prompt":[4,5,6]}')
PARAMS = b'{ "remote_block_ids":[[1, 2]],"x":1.50,"do_remote_prefill" : true}'


def chat_reply(params: bytes = PARAMS, finish: str = "length", extra: bytes = b"") -> bytes:
    return (
        b'{"id":"chatcmpl-1","choices":[{"index":0,"message":{"role":"assistant","content":"x"},"logprobs":'
        b'{"content":[{"logprob":-1.50}]},"finish_reason":"%s","token_ids":[9]}],"usage":{"prompt_tokens":3,'
        b'"prompt_tokens_details":{"cached_tokens":2}},"prompt_token_ids":[1, 2,3],"kv_transfer_params":%s%s}'
        % (finish.encode(), params, extra)
    )


def text_reply(params: bytes = PARAMS, finish: str = "length") -> bytes:
    return (
        b'{"choices":[{"index":0,"text":"x","finish_reason":"%s","token_ids":[9],"prompt_token_ids":[1, 2,3]}],'
        b'"kv_transfer_params":%s}' % (finish.encode(), params)
    )


def decode_body(request: GenerationRequest, reply: bytes, **options: Any) -> bytes:
    leg = DECODER.decode_leg(request, PASSAGE, PREFILLER.read_prefill(request, reply), **options)
    assert leg.opening is None
    return leg.body


# ── the prefill leg ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_chat_is_prefilled_with_what_it_came_with_and_tells_its_ids() -> None:
    assert PREFILLER.prefill_body(CHAT_REQUEST, PASSAGE) == HEAD + (
        b'"stream":false,"max_tokens":1,"seed":1,"return_token_ids":true,'
        b'"kv_transfer_params":{"do_remote_decode":true}}'
    )


def test_text_stays_text_and_ids_stay_ids() -> None:
    keep = b',"kv_transfer_params":{"do_remote_decode":true}}'
    text = b'{"prompt":"hi","model":"m","stream":false,"max_tokens":1,"return_token_ids":true'
    assert PREFILLER.prefill_body(TEXT, PASSAGE) == text + keep
    assert PREFILLER.prefill_body(IDS, PASSAGE) == b'{"model":"m","prompt":[4,5,6],"max_tokens":1' + keep


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (COMPLETIONS, b'{"prompt":"hi","suffix":"s"}'),
        (CHAT, b'{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"u"}}]}]}'),
    ],
)
def test_no_ids_are_asked_for_where_they_are_not_the_prompt(endpoint: str, body: bytes) -> None:
    assert b"return_token_ids" not in PREFILLER.prefill_body(parse(endpoint, body), PASSAGE)


def test_a_prefill_leg_that_nothing_follows() -> None:
    assert PREFILLER.one_token_body(TEXT) == b'{"prompt":"hi","model":"m","stream":false,"max_tokens":1}'
    at_least_one = parse(COMPLETIONS, b'{"prompt":"hi","max_tokens":1,"min_tokens":1}')
    assert PREFILLER.one_token_body(at_least_one) == b'{"prompt":"hi","max_tokens":1,"min_tokens":1}'


def test_headers_are_new_for_each_attempt_and_name_the_rank() -> None:
    assert PREFILLER.leg_headers("r", "a1") == {"x-request-id": "r-a1"}
    ranked = VllmNixlAdapter("prefill", data_parallel_rank=0)
    assert ranked.leg_headers("r", "a2") == {"x-request-id": "r-a2", "x-data-parallel-rank": "0"}


# ── its reply, and the decode leg made of it ────────────────────────────────────────────────────────────────────────


def test_the_handoff_goes_on_as_it_came_with_chats_ids_behind_it() -> None:
    assert decode_body(CHAT_REQUEST, chat_reply()) == HEAD + (
        b'"min_tokens":2,"stream":true,"stream_options":{"include_usage":true},"max_tokens":5,"seed":1,'
        b'"kv_transfer_params":{ "remote_block_ids":[[1, 2]],"x":1.50,"do_remote_prefill" : true,'
        b'"prompt_token_ids":[1, 2,3]}}'
    )


def test_a_texts_ids_are_its_prompt_at_the_decoder() -> None:
    assert decode_body(TEXT, text_reply(b'{"a":1}')) == (
        b'{"prompt":[1, 2,3],"model":"m","stream":true,"max_tokens":5,"kv_transfer_params":{"a":1}}'
    )


def test_a_prompt_of_ids_is_left_alone() -> None:
    assert decode_body(IDS, text_reply()) == b'{"model":"m","prompt":[4,5,6],"kv_transfer_params":' + PARAMS + b"}"


def test_an_answer_that_is_to_tell_its_ids() -> None:
    expected = b'{"model":"m","prompt":[4,5,6],"kv_transfer_params":' + PARAMS + b',"return_token_ids":true}'
    assert decode_body(IDS, text_reply(), with_ids=True) == expected


@pytest.mark.parametrize(
    "params", [b'[ 1,"a"]', b'"opaque"', b'{"prompt_token_ids":[5]}', b'{"prompt_token_ids":null}']
)
def test_a_handoff_of_another_kind_is_not_touched(params: bytes) -> None:
    assert decode_body(CHAT_REQUEST, chat_reply(params)).endswith(b'"kv_transfer_params":' + params + b"}")


def test_an_empty_handoff_is_one() -> None:
    assert decode_body(CHAT_REQUEST, chat_reply(b"{}")).endswith(b'{"prompt_token_ids":[1, 2,3]}}')


@pytest.mark.parametrize("ids", [b"null", b"[]", b'"none"', b'["1"]'])
def test_a_reply_that_tells_no_ids(ids: bytes) -> None:
    body = text_reply().replace(b"[1, 2,3]", ids)
    assert decode_body(TEXT, body).startswith(b'{"prompt":"hi",')


def test_what_is_read_of_a_reply() -> None:
    reply = PREFILLER.read_prefill(CHAT_REQUEST, chat_reply(extra=b',"metrics":null'))
    assert (reply.is_whole, reply.has_text) == (False, True)
    assert reply.usage == PromptUsage(3, msgspec.Raw(b'{"cached_tokens":2}'))
    assert PREFILLER.prompt_ids(reply) == [1, 2, 3]


def test_no_client_gets_ids_that_it_did_not_ask_for() -> None:
    """Of an answer that is the whole one; of another, the client gets the decoder's."""
    request = parse(CHAT, b'{"messages":[{"role":"user","content":"hi"}]}')
    fields = PREFILLER.read_prefill(request, chat_reply(finish="stop", extra=b',"metrics":null')).fields
    assert list(fields) == ["id", "choices", "usage", "prompt_token_ids", "kv_transfer_params", "metrics"]
    assert bytes(fields["prompt_token_ids"]) == b"null"
    assert bytes(fields["choices"]) == (
        b'[{"index":0,"message":{"role":"assistant","content":"x"},"logprobs":{"content":[{"logprob":-1.50}]},'
        b'"finish_reason":"stop","token_ids":null}]'
    )
    asking = parse(COMPLETIONS, b'{"prompt":"hi","return_token_ids":true}')
    assert b'"token_ids":[9],"prompt_token_ids":[1, 2,3]' in bytes(
        PREFILLER.read_prefill(asking, text_reply(finish="stop")).fields["choices"]
    )


@pytest.mark.parametrize("finish", ["stop", "repetition"])
@pytest.mark.parametrize("params", [b"null", PARAMS])
def test_an_answer_that_ends_with_its_first_token(finish: str, params: bytes) -> None:
    reply = PREFILLER.read_prefill(TEXT, text_reply(params, finish))
    assert reply.is_whole
    assert (reply.handoff is None) == (params == b"null")


@pytest.mark.parametrize("finish", ["length", "abort", "error", "tool_calls"])
@pytest.mark.parametrize("missing", [b"null", b""])
def test_kv_that_was_not_kept_is_an_error(finish: str, missing: bytes) -> None:
    body = text_reply(b"null", finish)
    if not missing:
        body = body.replace(b',"kv_transfer_params":null', b"")
    with pytest.raises(NoHandoff, match=f"finish_reason '{finish}'"):
        PREFILLER.read_prefill(TEXT, body)


def test_an_answer_that_must_be_longer_has_not_ended() -> None:
    assert not PREFILLER.read_prefill(CHAT_REQUEST, chat_reply(finish="stop")).is_whole
    with pytest.raises(NoHandoff):
        PREFILLER.read_prefill(CHAT_REQUEST, chat_reply(b"null", finish="stop"))


def test_a_call_that_was_cut_off_is_no_end() -> None:
    """vLLM says ``tool_calls`` of whatever has one in it."""
    request = parse(CHAT, b'{"messages":[{"role":"user","content":"hi"}],"max_tokens":5}')
    assert not PREFILLER.read_prefill(request, chat_reply(finish="tool_calls")).is_whole


def test_a_single_token_is_all_that_was_wanted() -> None:
    request = replace(TEXT, max_tokens=1)
    assert PREFILLER.read_prefill(request, text_reply()).is_whole


@pytest.mark.parametrize("reason", ["stop", "tool_calls"])
def test_a_single_token_needs_no_kv_whatever_ended_it(reason: str) -> None:
    request = parse(CHAT, b'{"messages":[{"role":"user","content":"hi"}],"max_tokens":1,"min_tokens":1}')
    assert PREFILLER.read_prefill(request, chat_reply(b"null", finish=reason)).is_whole


def test_a_reply_that_is_none() -> None:
    with pytest.raises(MalformedReply):
        PREFILLER.read_prefill(TEXT, b'{"choices":[]}')


def test_the_decoder_alone() -> None:
    assert DECODER.local_body(TEXT) == b'{"prompt":"hi","model":"m","stream":true,"max_tokens":5}'
    assert DECODER.local_body(TEXT, with_ids=True).endswith(b',"return_token_ids":true}')


# ── an early end ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_closing_the_legs_frees_what_the_decoder_has_heard_of_and_what_is_not_prefilled() -> None:
    reply = PREFILLER.read_prefill(TEXT, text_reply())
    assert PREFILLER.abandon(TEXT, PASSAGE, None, is_decode_sent=False) is ReleaseMode.FREE
    assert PREFILLER.abandon(TEXT, PASSAGE, reply, is_decode_sent=True) is ReleaseMode.FREE
    kept = replace(reply, handoff=None)
    assert PREFILLER.abandon(TEXT, PASSAGE, kept, is_decode_sent=False) is ReleaseMode.FREE


def test_a_decoder_that_has_not_heard_of_the_kv_is_sent_a_leg_to_refuse() -> None:
    reply = PREFILLER.read_prefill(CHAT_REQUEST, chat_reply())
    errand = PREFILLER.abandon(CHAT_REQUEST, PASSAGE, reply, is_decode_sent=False)
    assert isinstance(errand, ReleaseCall)
    assert (errand.role, errand.call.path) == ("decode", CHAT)
    assert errand.call.body == HEAD.replace(b'"m"', b'"pdproxy-abandoned"') + (
        b'"stream":false,"max_tokens":1,"seed":1,"kv_transfer_params":{ "remote_block_ids":[[1, 2]],"x":1.50,'
        b'"do_remote_prefill" : true,"prompt_token_ids":[1, 2,3]}}'
    )


@pytest.mark.parametrize("version", ["0.31.9", "0.9.1", "dev", None])
def test_an_older_decoder_pulls_it_for_a_single_token(version: str | None) -> None:
    facts = replace(FACTS, agreement={} if version is None else {"vllm": version})
    reply = PREFILLER.read_prefill(IDS, text_reply())
    errand = PREFILLER.abandon(IDS, replace(PASSAGE, decoder=facts), reply, is_decode_sent=False)
    assert isinstance(errand, ReleaseCall)
    assert errand.call.body == b'{"model":"m","prompt":[4,5,6],"kv_transfer_params":%s,"max_tokens":1}' % PARAMS


@pytest.mark.parametrize("version", ["0.32.0", "0.33.1rc2", "1.0"])
def test_versions_that_free_by_refusing(version: str) -> None:
    facts = replace(FACTS, agreement={"vllm": version})
    reply = PREFILLER.read_prefill(IDS, text_reply())
    errand = PREFILLER.abandon(IDS, replace(PASSAGE, decoder=facts), reply, is_decode_sent=False)
    assert isinstance(errand, ReleaseCall)
    assert b'"pdproxy-abandoned"' in errand.call.body


@pytest.mark.parametrize(("status", "is_free"), [(200, True), (404, True), (400, False), (429, False), (500, False)])
def test_how_the_errand_went(status: int, is_free: bool) -> None:
    assert PREFILLER.read_errand(status, b"") is is_free


# ── facts ───────────────────────────────────────────────────────────────────────────────────────────────────────────

CARDS = (
    b'{"object":"list","data":[{"id":"tiny","object":"model","root":"/m/tiny","parent":null,"max_model_len":2048},'
    b'{"id":"lora","object":"model","root":"/m/lora","parent":"tiny","max_model_len":null}]}'
)


def answers(config: str = 'num_gpu_blocks="400",kv_cache_size_tokens="12800"', **others: bytes) -> dict[str, bytes]:
    pages = {
        "/health": b"",
        "/metrics": b"process_start_time_seconds 1.5e+09\n"
        b'vllm:cache_config_info{block_size="32",cache_dtype="auto",engine="0",%s} 1.0\n' % config.encode(),
        "/v1/models": CARDS,
        "/version": b'{"version":"0.32.0"}',
    }
    return pages | {"/" + name: body for name, body in others.items()}


def test_what_a_prefiller_tells() -> None:
    assert PREFILLER.looks == tuple(answers())
    facts = PREFILLER.read_facts(answers())
    assert (facts.num_pages, facts.chunk_size, facts.max_model_len, facts.epoch) == (399, 32, 2048, "1.5e+09")
    assert facts.models == {"tiny", "lora"}
    assert facts.agreement == {"vllm": "0.32.0", "model": "/m/tiny", "cache_dtype": "auto"}


def test_a_decoders_memory_is_not_guarded() -> None:
    assert DECODER.read_facts(answers()).num_pages == 0


def test_blocks_in_use_are_told_of_the_memory_that_slots_guard() -> None:
    assert PREFILLER.read_facts(answers()).num_occupied is None
    metrics = answers()["/metrics"] + b'vllm:kv_cache_usage_perc{engine="0"} 0.01\n'
    assert PREFILLER.read_facts(answers(metrics=metrics)).num_occupied == 3
    assert DECODER.read_facts(answers(metrics=metrics)).num_occupied is None


def test_a_model_that_takes_several_blocks_for_as_many_tokens() -> None:
    facts = PREFILLER.read_facts(answers('num_gpu_blocks="400",kv_cache_size_tokens="6400"'))
    assert facts.num_pages == 199


def test_a_version_that_tells_no_tokens() -> None:
    assert PREFILLER.read_facts(answers('num_gpu_blocks="400"')).num_pages == 399


def test_only_its_own_rank_counts() -> None:
    ranked = VllmNixlAdapter("prefill", data_parallel_rank=1)
    with pytest.raises(MalformedReply, match="it has 1 data-parallel rank, and data_parallel_rank is 1"):
        ranked.read_facts(answers())


@pytest.mark.parametrize("others", [{"version": b"0.32"}, {"v1/models": b"{}"}, {"metrics": b""}])
def test_answers_that_are_not_understood(others: dict[str, bytes]) -> None:
    with pytest.raises(MalformedReply):
        PREFILLER.read_facts(answers(**others))


def test_its_manner() -> None:
    traits = VllmNixlAdapter("prefill", lease_s=12.0).traits
    assert (traits.ready, traits.page_owner, traits.freed) == (
        KvReady.PREFILL_REPLY,
        "prefill",
        ReleaseSignal.FIRST_EVENT,
    )
    assert (traits.lease_s, traits.is_lease_strict, traits.resumes) == (12.0, True, False)
