"""The built-in engine's bodies, byte for byte."""

from __future__ import annotations

import msgspec
import pytest

from pdproxy.admission.room import UNKNOWN_CACHE, KvCache
from pdproxy.engines.adapter import AttemptInfo, Call, MalformedReply, ReleaseCall
from pdproxy.engines.builtin import BuiltinAdapter
from pdproxy.engines.info import Receiver
from pdproxy.openai.request import CHAT, COMPLETIONS, parse
from pdproxy.openai.usage import PromptUsage
from transfer.wire import BufferFacts, Endpoint

ADAPTER = BuiltinAdapter()
BODY = (
    b'{"model":"m","messages":[{"role":"user","content":"hi"}],"max_tokens":5,"stream":true,'
    b'"kv_transfer_params":{"x":1}}'
)
REQUEST = parse(CHAT, BODY)
FACTS = BufferFacts(
    epoch="e",
    role="decode",
    model="f",
    dtype="float32",
    chunk_size=256,
    bytes_per_token=1,
    page_bytes=256,
    num_pages=4,
    num_free=4,
    num_quarantined=0,
    max_model_len=100,
    receivers=[Endpoint(rank=0, host="h", port=1), Endpoint(rank=1, host="h", port=2)],
)
CARDS = b'{"data":[{"id":"m"}]}'
DECODER = ADAPTER.read_facts({"/kv_buffer": msgspec.json.encode(FACTS), "/v1/models": CARDS})
PASSAGE = AttemptInfo(
    attempt="a1", prefiller=DECODER, decoder=DECODER, timeout_s=9.5, notify="tcp://p:7500", prompt_ids=[1, 2]
)


@pytest.mark.parametrize(("free", "quarantined", "occupied"), [(4, 0, 0), (1, 0, 3), (1, 3, 3), (0, 0, 4), (9, 0, 0)])
def test_pages_that_are_not_free_are_occupied(free: int, quarantined: int, occupied: int) -> None:
    told = msgspec.structs.replace(FACTS, num_free=free, num_quarantined=quarantined)
    facts = ADAPTER.read_facts({"/kv_buffer": msgspec.json.encode(told), "/v1/models": CARDS})
    assert facts.num_occupied == occupied


def test_a_prefiller_has_no_buffer_to_tell_of() -> None:
    told = msgspec.structs.replace(FACTS, role="prefill", num_pages=0, num_free=0)
    facts = ADAPTER.read_facts({"/kv_buffer": msgspec.json.encode(told), "/v1/models": CARDS})
    assert facts.num_occupied is None


def test_an_engine_tells_of_the_kv_cache_in_which_it_writes() -> None:
    told = msgspec.structs.replace(FACTS, num_cache_pages=40, num_cache_free=30)
    waits = msgspec.structs.replace(told, num_cache_waiting=1)
    prefiller = msgspec.structs.replace(told, role="prefill")
    known = KvCache(10240, 256, 2560, False)
    expected = [known, KvCache(10240, 256, 2560, True), known, UNKNOWN_CACHE]
    for one, cache in zip((told, waits, prefiller, FACTS), expected, strict=True):
        answers = {"/kv_buffer": msgspec.json.encode(one), "/v1/models": CARDS}
        assert ADAPTER.read_facts(answers).cache == cache


def test_a_decoder_that_tells_less_is_understood() -> None:
    told = msgspec.to_builtins(FACTS)
    for name in ("num_reserved", "num_queued", "num_reservations_waited"):
        del told[name]
    facts = ADAPTER.read_facts({"/kv_buffer": msgspec.json.encode(told), "/v1/models": CARDS})
    assert facts.num_occupied == 0


def test_prefill_leg() -> None:
    assert ADAPTER.prefill_body(REQUEST, PASSAGE) == (
        b'{"model":"m","messages":[{"role":"user","content":"hi"}],"max_tokens":1,"stream":false,"kv_transfer_params":'
        b'{"attempt":"a1","receivers":[{"rank":0,"host":"h","port":1},{"rank":1,"host":"h","port":2}],'
        b'"timeout_s":9.5,"notify":"tcp://p:7500","prompt_token_ids":[1,2],"decoder_epoch":"e"}}'
    )


def test_min_tokens_holds_for_the_prefillers_token_as_well() -> None:
    request = parse(COMPLETIONS, b'{"model":"m","prompt":"hi","max_tokens":5,"min_tokens":3}')
    leg = msgspec.json.decode(ADAPTER.prefill_body(request, PASSAGE))
    assert (leg["max_tokens"], leg["min_tokens"]) == (1, 3)


def test_other_legs() -> None:
    head = b'{"model":"m","messages":[{"role":"user","content":"hi"}],'
    assert ADAPTER.one_token_body(REQUEST) == head + b'"max_tokens":1,"stream":false}'
    assert ADAPTER.local_body(REQUEST) == head + b'"max_tokens":5,"stream":true}'
    reply = ADAPTER.read_prefill(REQUEST, b'{"choices":[{}],"kv_transfer_params":{ "opaque" : 1 }}')
    expected = head + b'"max_tokens":5,"stream":true,"kv_transfer_params":{ "opaque" : 1 }}'
    decode = ADAPTER.decode_leg(REQUEST, PASSAGE, reply)
    assert (decode.body, decode.opening) == (expected, None)


def test_prefill_reply() -> None:
    reply = ADAPTER.read_prefill(
        REQUEST,
        b'{"id":"i","choices":[{"message":{"role":"assistant","content":"x"},"finish_reason":"length"}],'
        b'"usage":{"prompt_tokens":7},"kv_transfer_params":{ "attempt":"a1"}}',
    )
    assert reply.handoff is not None
    assert bytes(reply.handoff) == b'{ "attempt":"a1"}'
    assert not reply.is_whole
    assert (reply.usage, reply.has_text) == (PromptUsage(7), True)


def test_prefill_reply_that_ends_the_answer() -> None:
    body = b'{"choices":[{"text":"","finish_reason":"stop"}],"kv_transfer_params":null}'
    reply = ADAPTER.read_prefill(REQUEST, body)
    assert (reply.handoff, reply.is_whole, reply.usage, reply.has_text) == (None, True, None, False)


@pytest.mark.parametrize("reason", [b"null", b'"length"', b'"abort"'])
def test_prefill_replies_that_neither_end_the_answer_nor_hand_it_over(reason: bytes) -> None:
    with pytest.raises(MalformedReply, match="neither"):
        ADAPTER.read_prefill(REQUEST, b'{"choices":[{"text":"x","finish_reason":%s}]}' % reason)


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"choices":[]}', b'{"choices":[{},{}]}', b'{"choices":3}'])
def test_prefill_replies_that_are_none(body: bytes) -> None:
    with pytest.raises(MalformedReply):
        ADAPTER.read_prefill(REQUEST, body)


def test_an_abandoned_attempt_is_cancelled_at_the_decoder() -> None:
    errand = ADAPTER.abandon(REQUEST, PASSAGE, None, is_decode_sent=False)
    assert errand == ReleaseCall("decode", Call("/kv_transfer/cancel", b'{"attempt":"a1"}'))
    assert ADAPTER.read_errand(200, b'{"released": true}')
    assert not ADAPTER.read_errand(200, b'{"released": false}')
    for status, body in ((200, b"{}"), (500, b'{"released": true}')):
        with pytest.raises(MalformedReply):
            ADAPTER.read_errand(status, body)


def test_facts() -> None:
    assert (DECODER.epoch, DECODER.models, DECODER.num_pages) == ("e", {"m"}, 4)
    assert DECODER.agreement == {"model": "f", "dtype": "float32", "chunk_size": "256"}
    assert DECODER.receivers == (Receiver(rank=0, host="h", port=1), Receiver(rank=1, host="h", port=2))
    assert ADAPTER.ranks(DECODER) == {0, 1}
    for no_facts in (b"{}", b'{"epoch": "\xff"}'):
        with pytest.raises(MalformedReply):
            ADAPTER.read_facts({"/kv_buffer": no_facts, "/v1/models": CARDS})
    with pytest.raises(MalformedReply):
        ADAPTER.read_facts({"/kv_buffer": msgspec.json.encode(FACTS), "/v1/models": b"[]"})
