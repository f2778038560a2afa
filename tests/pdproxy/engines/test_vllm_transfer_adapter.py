"""vLLM's bodies and replies under pdproxy's own connector, and what the connector tells."""

from __future__ import annotations

import json

import pytest

from pdproxy.engines.adapter import AttemptInfo, MalformedReply, NobodyReached, NoHandoff, ReleaseCall
from pdproxy.engines.info import EngineInfo, Receiver
from pdproxy.engines.traits import KvReady, ReleaseSignal
from pdproxy.engines.vllm_transfer import VllmTransferAdapter
from pdproxy.fleet.page_count import pages_needed
from pdproxy.openai.request import COMPLETIONS, parse
from transfer.trust import AttemptKey, new_key

KV_URL = "http://d:5701"
KEY = AttemptKey.parse(new_key())
PREFILLER = VllmTransferAdapter(kv_url="http://p:5700", attempt_key=KEY)
DECODER = VllmTransferAdapter(kv_url=KV_URL)
FACTS = EngineInfo(epoch="e", receivers=(Receiver(rank=0, host="d", port=7300),), kv_url=KV_URL)
INFO = AttemptInfo(
    attempt="a1", prefiller=FACTS, decoder=FACTS, timeout_s=9.5, notify="tcp://p:7500", prompt_ids=[7, 8]
)
IDS = parse(COMPLETIONS, b'{"model":"m","prompt":[4,5,6],"stream":true,"max_tokens":5}')
BUFFER = {
    "epoch": "process",
    "role": "decode",
    "model": "llama",
    "dtype": "bfloat16",
    "chunk_size": 16,
    "bytes_per_token": 64,
    "page_bytes": 1024,
    "num_pages": 100,
    "num_free": 40,
    "num_quarantined": 3,
    "max_model_len": 4096,
    "receivers": [{"rank": 0, "host": "d", "port": 7300}],
    "groups": [{"kind": "sliding", "num_layers": 2, "window": 8}],
}


def reply(params: object, finish: str = "length") -> bytes:
    choices = [{"index": 0, "text": "x", "finish_reason": finish}]
    return json.dumps({"choices": choices, "kv_transfer_params": params}).encode()


def test_the_prefill_leg_says_where_the_kv_goes_and_who_says_so() -> None:
    body = json.loads(PREFILLER.prefill_body(IDS, INFO))
    assert body.pop("kv_transfer_params") == {
        "attempt": "a1",
        "receivers": [{"rank": 0, "host": "d", "port": 7300}],
        "timeout_s": 9.5,
        "notify": "tcp://p:7500",
        "capability": KEY.sign("a1", "tcp://p:7500"),
        "decoder_epoch": "e",
    }
    assert body == {"model": "m", "prompt": [4, 5, 6], "stream": False, "max_tokens": 1}


def test_the_decode_leg_passes_the_handoff_on_as_it_came() -> None:
    read = PREFILLER.read_prefill(IDS, reply({"attempt": "a1"}))
    leg = json.loads(DECODER.decode_leg(IDS, INFO, read).body)
    assert leg["kv_transfer_params"] == {"attempt": "a1"}
    assert (leg["stream"], leg["max_tokens"]) == (True, 5)


def test_kv_that_was_not_sent_is_no_handoff_unless_the_answer_is_over() -> None:
    lost = {"attempt": "a1", "failure": "the decoder fell silent"}
    with pytest.raises(NoHandoff, match="its KV did not reach the decoder: the decoder fell silent"):
        PREFILLER.read_prefill(IDS, reply(lost))
    assert PREFILLER.read_prefill(IDS, reply(lost, "stop")).is_whole
    with pytest.raises(NobodyReached):
        PREFILLER.read_prefill(IDS, reply(lost | {"is_receiver_lost": True}))
    with pytest.raises(NoHandoff):
        PREFILLER.read_prefill(IDS, reply(None))


def test_its_connector_is_asked_for_its_buffer_at_a_port_of_its_own() -> None:
    assert DECODER.looks == ("/health", f"{KV_URL}/kv_buffer", "/v1/models")
    answers = {f"{KV_URL}/kv_buffer": json.dumps(BUFFER).encode(), "/v1/models": b'{"data":[{"id":"llama"}]}'}
    facts = DECODER.read_facts(answers)
    assert (facts.num_pages, facts.num_occupied, facts.chunk_size) == (100, 60, 16)
    assert (facts.epoch, facts.kv_url, facts.receivers) == ("process", KV_URL, FACTS.receivers)
    assert [pages_needed(facts, num_tokens) for num_tokens in (1, 17, 23, 24, 25)] == [1, 1, 2, 1, 1]
    assert facts.agreement == {"model": "llama", "dtype": "bfloat16", "chunk_size": "16"}
    with pytest.raises(MalformedReply, match="/kv_buffer is not understood"):
        DECODER.read_facts(answers | {f"{KV_URL}/kv_buffer": b"{}"})


def test_an_abandoned_attempt_is_cancelled_at_the_decoders_connector() -> None:
    for is_decode_sent in (False, True):
        call = PREFILLER.abandon(IDS, INFO, None, is_decode_sent=is_decode_sent)
        assert isinstance(call, ReleaseCall)
        assert (call.role, call.call.path) == ("decode", f"{KV_URL}/kv_transfer/cancel")
        assert json.loads(call.call.body) == {"attempt": "a1"}
    assert DECODER.read_errand(200, b'{"released":true}')
    assert not DECODER.read_errand(200, b'{"released":false}')
    with pytest.raises(MalformedReply):
        DECODER.read_errand(404, b"")


def test_its_slots_guard_the_decoder_and_come_back_by_its_word() -> None:
    traits = DECODER.traits
    assert (traits.page_owner, traits.ready, traits.freed) == ("decode", KvReady.SIGNALS, ReleaseSignal.SIGNALS)
    assert traits.peer_ended_path == f"{KV_URL}/kv_transfer/sender_ended"
    assert DECODER.ranks(FACTS) == {0}
