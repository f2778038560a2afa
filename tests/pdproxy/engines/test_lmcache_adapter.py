"""LMCache's bodies, byte for byte, and what is read out of its replies."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pdproxy.config.values import FirstToken
from pdproxy.engines.adapter import AttemptInfo, MalformedReply, PrefillReply, ReleaseCall
from pdproxy.engines.info import EngineInfo, Receiver
from pdproxy.engines.lmcache import READING_S, WRITING_S, LMCacheAdapter, LMCacheBuffer
from pdproxy.openai.answer import ModelCard
from pdproxy.openai.request import CHAT, COMPLETIONS, GenerationRequest, parse
from pdproxy.openai.usage import PromptUsage

BUFFER = LMCacheBuffer(
    host="d.example",
    init_ports=(7300, 7301),
    alloc_ports=(7400, 7401),
    num_pages=64,
    page_bytes=9,
    chunk_size=256,
)
AUTO, PREFILLER, DECODER = (
    LMCacheAdapter("prefill", buffer=None, first_token=mode) for mode in ("auto", "prefiller", "decoder")
)
CARDS = b'{"object":"list","data":[{"id":"m","max_model_len":2048},{"id":"lora","max_model_len":2048}]}'
METRICS = (
    b'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0\n'
    b"process_start_time_seconds 1.76e+09\n"
)
ANSWERS = {"/health": b"", "/v1/models": CARDS, "/metrics": METRICS}
FACTS = LMCacheAdapter("decode", buffer=BUFFER).read_facts(ANSWERS)
SPEC = (
    b'"disagg_spec":{"req_id":"a1","receiver_host":"d.example",'
    b'"receiver_init_port":[7300,7301],"receiver_alloc_port":[7400,7401]}'
)
IDS = [5, 6, 7, 8]
TEXT = b'{"model":"m","prompt":"hi there","max_tokens":9,"stream":true,"stream_options":{"include_usage":true}}'
CHATTED = b'{"model":"m","messages":[{"role":"user","content":"hi"}],"max_tokens":5,"stream":true}'
CHATTED_WITH_IDS = CHATTED[:-1] + b',"kv_transfer_params":{"prompt_token_ids":[5,6,7,8]}}'


def completion(**fields: Any) -> GenerationRequest:
    return parse(COMPLETIONS, msgspec.json.encode({"model": "m", "prompt": IDS, "max_tokens": 9} | fields))


def chat() -> GenerationRequest:
    return parse(CHAT, CHATTED)


def info(prompt_ids: list[int] | None = None) -> AttemptInfo:
    prefiller = EngineInfo(epoch="p")
    return AttemptInfo(
        attempt="a1", prefiller=prefiller, decoder=FACTS, timeout_s=9.5, notify="tcp://p:7500", prompt_ids=prompt_ids
    )


def answer(text: str = " so", finish: str = "length", tok: int | None = 42, **choice: Any) -> bytes:
    choices = [{"index": 0, "text": text, "logprobs": None, "finish_reason": finish} | choice]
    told = None if tok is None else {"first_tok": tok}
    usage = {"prompt_tokens": 4, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 3}}
    return msgspec.json.encode({"id": "c", "choices": choices, "usage": usage, "kv_transfer_params": told})


def decoded(body: bytes) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.json.decode(body)
    return fields


# ── looking at it ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_decoders_buffer_is_its_operators_word() -> None:
    assert (
        EngineInfo(
            epoch="1.76e+09",
            role="decode",
            models=frozenset({"m", "lora"}),
            cards=tuple(ModelCard(name, max_model_len=2048) for name in ("m", "lora")),
            num_pages=64,
            chunk_size=256,
            page_bytes=9,
            max_model_len=2048,
            receivers=(
                Receiver(rank=0, host="d.example", port=7300, alloc_port=7400),
                Receiver(rank=1, host="d.example", port=7301, alloc_port=7401),
            ),
        )
        == FACTS
    )
    assert AUTO.ranks(FACTS) == {0, 1}


def test_a_prefiller_has_no_buffer() -> None:
    facts = AUTO.read_facts(ANSWERS)
    assert (facts.role, facts.num_pages, facts.chunk_size, facts.receivers) == ("prefill", 0, None, ())


def test_vllms_own_metrics_are_not_needed() -> None:
    assert AUTO.read_facts(ANSWERS | {"/metrics": b"python_info 1\n"}).epoch is None


def test_models_that_are_none() -> None:
    with pytest.raises(MalformedReply, match="/v1/models"):
        AUTO.read_facts(ANSWERS | {"/v1/models": b"[]"})


# ── the reference proxy's bodies: the prefiller's token ─────────────────────────────────────────────────────────────


def test_prefill_leg_as_the_reference_proxy_sends_it() -> None:
    request = parse(COMPLETIONS, TEXT)
    assert PREFILLER.prefill_body(request, info(IDS)) == (
        b'{"model":"m","prompt":[5,6,7,8],"max_tokens":1,"stream":false,'
        b'"kv_transfer_params":{"ret_first_tok":true,' + SPEC + b"}}"
    )


def test_decode_leg_as_the_reference_proxy_sends_it() -> None:
    request = parse(COMPLETIONS, TEXT)
    reply = PREFILLER.read_prefill(request, answer())
    leg = PREFILLER.decode_leg(request, info(IDS), reply)
    assert leg.body == (
        b'{"model":"m","prompt":[5,6,7,8,42],"max_tokens":8,"stream":true,"stream_options":{"include_usage":true}}'
    )
    assert leg.opening is not None
    assert leg.opening.fields is reply.fields
    assert not reply.is_whole


@pytest.mark.parametrize(("given", "left"), [({"max_tokens": 2}, 1), ({"max_tokens": None}, None), ({}, 15)])
def test_the_budget_is_one_less(given: dict[str, Any], left: int | None) -> None:
    request = parse(COMPLETIONS, msgspec.json.encode({"prompt": IDS} | given))
    leg = PREFILLER.decode_leg(request, info(), PREFILLER.read_prefill(request, answer()))
    assert decoded(leg.body)["max_tokens"] == left


def test_ids_that_only_the_prefiller_knows() -> None:
    request = parse(COMPLETIONS, TEXT)
    sent = decoded(AUTO.prefill_body(request, info()))
    assert (sent["prompt"], sent["return_token_ids"]) == ("hi there", True)
    reply = AUTO.read_prefill(request, answer(token_ids=[42], prompt_token_ids=IDS))
    leg = AUTO.decode_leg(request, info(), reply)
    assert decoded(leg.body)["prompt"] == [*IDS, 42]
    assert AUTO.prompt_ids(reply) == IDS
    assert b"token_ids" not in bytes(reply.fields["choices"])


def test_ids_that_the_client_asked_for_stay_in_its_answer() -> None:
    request = completion(return_token_ids=True)
    reply = PREFILLER.read_prefill(request, answer(token_ids=[42], prompt_token_ids=IDS))
    assert b'"token_ids":[42]' in bytes(reply.fields["choices"])


OTHERWISE = [
    {"stop": ["."]},
    {"seed": 1},
    {"presence_penalty": 0.5},
    {"frequency_penalty": -1},
    {"min_tokens": 2},
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"regex": "a+"}},
    {"guided_json": {}, "guided_regex": "a"},
    {"bad_words": ["x"]},
    {"use_beam_search": True},
    {"something_new": 7},
]


@pytest.mark.parametrize("fields", OTHERWISE, ids=lambda fields: next(iter(fields)))
def test_where_the_token_makes_a_difference_it_is_the_decoders(fields: dict[str, Any]) -> None:
    request = completion(**fields)
    sent = decoded(PREFILLER.prefill_body(request, info()))
    assert (sent["prompt"], "ret_first_tok" in sent["kv_transfer_params"]) == (IDS[:-1], False)
    reply = PREFILLER.read_prefill(request, answer(tok=None))
    leg = PREFILLER.decode_leg(request, info(), reply)
    assert (leg.body, leg.opening) == (msgspec.json.encode(request.fields), None)


@pytest.mark.parametrize(
    "fields",
    [{"stop": None}, {"seed": None}, {"presence_penalty": 0}, {"frequency_penalty": 0.0}, {"bad_words": []}],
    ids=lambda fields: next(iter(fields)),
)
def test_what_does_nothing_makes_no_difference(fields: dict[str, Any]) -> None:
    assert decoded(PREFILLER.prefill_body(completion(**fields), info()))["kv_transfer_params"]["ret_first_tok"]


@pytest.mark.parametrize("text", ["", "\ufffd", " \ufffd\ufffd"])
def test_a_token_that_is_no_text_by_itself_is_not_shown(text: str) -> None:
    request = completion()
    leg = PREFILLER.decode_leg(request, info(), PREFILLER.read_prefill(request, answer(text)))
    assert (decoded(leg.body)["prompt"], leg.opening) == (IDS, None)


def test_a_prefiller_that_does_not_tell_its_token() -> None:
    request = completion()
    leg = PREFILLER.decode_leg(request, info(), PREFILLER.read_prefill(request, answer(tok=None)))
    assert (decoded(leg.body), leg.opening) == (decoded(msgspec.json.encode(request.fields)), None)


# ── the decoder's token ─────────────────────────────────────────────────────────────────────────────────────────────


def test_the_prefiller_reads_all_but_the_last_token() -> None:
    request = parse(COMPLETIONS, TEXT)
    assert AUTO.prefill_body(request, info(IDS)) == (
        b'{"model":"m","prompt":[5,6,7],"max_tokens":1,"stream":false,"kv_transfer_params":{' + SPEC + b"}}"
    )
    reply = AUTO.read_prefill(request, answer("garbage", "stop", tok=None))
    assert AUTO.decode_leg(request, info(IDS), reply).body == TEXT.replace(b'"hi there"', b"[5,6,7,8]")
    assert (reply.is_whole, reply.has_text) == (False, False)
    assert reply.handoff is not None
    assert reply.usage == PromptUsage(5, msgspec.Raw(b'{"cached_tokens":3}'))


def test_chat_stays_chat() -> None:
    assert AUTO.prefill_body(chat(), info(IDS)) == (
        b'{"model":"m","messages":[{"role":"user","content":"hi"}],"max_tokens":1,"stream":false,'
        b'"kv_transfer_params":{' + SPEC + b',"prompt_token_ids":[5,6,7]}}'
    )
    reply = AUTO.read_prefill(chat(), answer(tok=None))
    assert AUTO.decode_leg(chat(), info(IDS), reply).body == CHATTED_WITH_IDS


@pytest.mark.parametrize("adapter", [AUTO, PREFILLER], ids=["auto", "prefiller"])
def test_a_chat_whose_ids_nobody_knows(adapter: LMCacheAdapter) -> None:
    assert adapter.prefill_body(chat(), info()) == (
        b'{"model":"m","messages":[{"role":"user","content":"hi"}],"max_tokens":1,"stream":false,'
        b'"kv_transfer_params":{"ret_first_tok":true,' + SPEC + b"}}"
    )
    reply = adapter.read_prefill(chat(), answer())
    assert adapter.decode_leg(chat(), info(), reply).body == CHATTED


def test_a_prompt_that_the_engine_cuts_by_itself_is_left_to_it() -> None:
    request = completion(truncate_prompt_tokens=2)
    assert decoded(AUTO.prefill_body(request, info()))["prompt"] == IDS


def test_one_token_cannot_be_read_but_the_last() -> None:
    request = completion(prompt=[5])
    assert decoded(AUTO.prefill_body(request, info()))["prompt"] == [5]
    leg = AUTO.decode_leg(request, info(), AUTO.read_prefill(request, answer()))
    assert decoded(leg.body)["prompt"] == [5, 42]


@pytest.mark.parametrize("body", [TEXT, CHATTED])
def test_decoders_that_compute_the_last_token_again(body: bytes) -> None:
    request = parse(CHAT if body is CHATTED else COMPLETIONS, body)
    sent = decoded(DECODER.prefill_body(request, info(IDS)))
    kept = {name: value for name, value in sent.items() if name in ("prompt", "messages")}
    assert kept.items() <= decoded(body).items()
    reply = DECODER.read_prefill(request, answer())
    assert DECODER.decode_leg(request, info(IDS), reply).body == (CHATTED_WITH_IDS if body is CHATTED else body)
    assert (reply.has_text, reply.usage) == (True, PromptUsage(4, msgspec.Raw(b'{"cached_tokens":3}')))


def test_a_decoder_needs_no_word_of_the_first_token() -> None:
    reply = DECODER.read_prefill(chat(), answer(tok=None))
    assert reply.handoff is not None
    assert (reply.usage, reply.is_whole) == (PromptUsage(4, msgspec.Raw(b'{"cached_tokens":3}')), False)


# ── other legs and replies ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("adapter", [PREFILLER, DECODER], ids=["prefiller", "decoder"])
def test_a_token_that_ends_the_answer(adapter: LMCacheAdapter) -> None:
    reply = adapter.read_prefill(completion(), answer(finish="stop"))
    assert reply.is_whole
    assert reply.handoff is not None, "the KV was pushed and has to be taken out again"
    assert b"kv_transfer_params" not in msgspec.json.encode(reply.fields)


def test_one_token_is_for_the_prefiller_alone_and_pushes_nothing() -> None:
    request = completion(max_tokens=1)
    assert AUTO.one_token_body(request) == (
        b'{"model":"m","prompt":[5,6,7,8],"max_tokens":1,"kv_transfer_params":{"lmcache.skip_save":true}}'
    )
    reply = AUTO.read_prefill(request, answer(tok=None))
    assert (reply.is_whole, reply.handoff) == (True, None)
    assert reply.usage == PromptUsage(4, msgspec.Raw(b'{"cached_tokens":3}'))


@pytest.mark.parametrize("reply", [b"", b"{}", b'{"choices":[]}', answer()[:-2], answer(tok="x")])  # type: ignore[arg-type]
def test_replies_that_are_none(reply: bytes) -> None:
    with pytest.raises(MalformedReply):
        AUTO.read_prefill(completion(), reply)


def test_the_decoder_alone_gets_what_the_client_sent() -> None:
    assert AUTO.local_body(chat()) == CHATTED
    assert AUTO.local_body(chat(), with_ids=True) == CHATTED[:-1] + b',"return_token_ids":true}'


def test_vllm_never_sees_an_id_twice() -> None:
    assert AUTO.leg_headers("r", "a1") == {"x-request-id": "r-a1"}


# ── an early end ────────────────────────────────────────────────────────────────────────────────────────────────────


def errand_of(
    adapter: LMCacheAdapter, request: GenerationRequest, ids: list[int] | None, reply: PrefillReply | None
) -> dict[str, Any]:
    errand = adapter.abandon(request, info(ids), reply, is_decode_sent=True)
    assert isinstance(errand, ReleaseCall)
    assert (errand.role, errand.call.path) == ("decode", request.endpoint)
    return decoded(errand.call.body)


def test_pages_are_taken_out_by_a_request_that_hashes_alike() -> None:
    request = completion(stream=True, stream_options={"include_usage": True}, logprobs=2, ignore_eos=True)
    told, untold = answer(), answer(tok=None)
    for adapter, body, prompt in ((PREFILLER, told, [*IDS, 0]), (AUTO, untold, IDS), (DECODER, told, IDS)):
        errand = errand_of(adapter, request, None, adapter.read_prefill(request, body))
        assert errand == {"model": "m", "prompt": prompt, "max_tokens": 1}


def test_any_token_will_do_in_place_of_the_prefillers() -> None:
    assert errand_of(PREFILLER, completion(), None, None)["prompt"] == [*IDS, 0]
    text = parse(COMPLETIONS, TEXT)
    reply = AUTO.read_prefill(text, answer("", "stop", token_ids=[42], prompt_token_ids=IDS))
    assert errand_of(AUTO, text, None, reply)["prompt"] == [*IDS, 0]
    assert errand_of(AUTO, text, None, None)["prompt"] == "hi there"


def test_a_chats_pages_are_taken_out_by_the_chat() -> None:
    errand = errand_of(AUTO, chat(), IDS, AUTO.read_prefill(chat(), answer(tok=None)))
    assert (errand["messages"], errand["max_tokens"]) == ([{"role": "user", "content": "hi"}], 1)
    assert errand["kv_transfer_params"] == {"prompt_token_ids": IDS}


def test_a_chat_goes_to_a_pair_only_with_its_ids() -> None:
    """The two engines might render it differently, and then its pages stay."""
    for adapter in (AUTO, PREFILLER, DECODER):
        assert [adapter.hands_over(chat(), ids) for ids in (None, IDS)] == [False, True]


@pytest.mark.parametrize(("status", "is_free"), [(200, True), (503, False), (400, False), (500, False)])
def test_they_are_free_when_that_was_answered(status: int, is_free: bool) -> None:
    assert AUTO.read_errand(status, b"") is is_free


def test_pages_that_may_still_be_written_or_read_are_not_touched() -> None:
    writing = AUTO.abandon(completion(), info(), None, is_decode_sent=False)
    reading = AUTO.abandon(completion(), info(), None, is_decode_sent=True)
    assert isinstance(writing, ReleaseCall)
    assert isinstance(reading, ReleaseCall)
    assert (writing.delay_s, writing.or_ready) == (WRITING_S, True)
    assert (reading.delay_s, reading.or_ready) == (READING_S, False)


@pytest.mark.parametrize("mode", ["auto", "prefiller", "decoder"])
def test_manner(mode: FirstToken) -> None:
    traits = LMCacheAdapter("decode", buffer=BUFFER, first_token=mode, lease_s=7.0).traits
    assert (traits.page_owner, traits.lease_s, traits.is_lease_strict, traits.resumes) == ("decode", 7.0, False, False)
