"""The built-in engine's bodies, byte for byte."""

from __future__ import annotations

import msgspec
import pytest

from pdproxy.engines.base import MalformedReply, Push
from pdproxy.engines.builtin import BuiltinAdapter
from pdproxy.reply.seam import PromptUsage
from pdproxy.request.openai import CHAT, COMPLETIONS, parse
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
PUSH = Push(attempt="a1", decoder=FACTS, timeout_s=9.5, notify="tcp://p:7500", prompt_ids=[1, 2])


def test_prefill_leg() -> None:
    assert ADAPTER.prefill_body(REQUEST, PUSH) == (
        b'{"model":"m","messages":[{"role":"user","content":"hi"}],"max_tokens":1,"stream":false,"kv_transfer_params":'
        b'{"attempt":"a1","receivers":[{"rank":0,"host":"h","port":1},{"rank":1,"host":"h","port":2}],'
        b'"timeout_s":9.5,"notify":"tcp://p:7500","prompt_token_ids":[1,2]}}'
    )


def test_min_tokens_holds_for_the_prefillers_token_as_well() -> None:
    request = parse(COMPLETIONS, b'{"model":"m","prompt":"hi","max_tokens":5,"min_tokens":3}')
    leg = msgspec.json.decode(ADAPTER.prefill_body(request, PUSH))
    assert (leg["max_tokens"], leg["min_tokens"]) == (1, 3)


def test_other_legs() -> None:
    head = b'{"model":"m","messages":[{"role":"user","content":"hi"}],'
    assert ADAPTER.one_token_body(REQUEST) == head + b'"max_tokens":1,"stream":false}'
    assert ADAPTER.local_body(REQUEST) == head + b'"max_tokens":5,"stream":true}'
    handoff = msgspec.Raw(b'{ "opaque" : 1 }')
    expected = head + b'"max_tokens":5,"stream":true,"kv_transfer_params":{ "opaque" : 1 }}'
    assert ADAPTER.decode_body(REQUEST, handoff) == expected


def test_prefill_reply() -> None:
    reply = ADAPTER.read_prefill(
        b'{"id":"i","choices":[{"message":{"role":"assistant","content":"x"},"finish_reason":"length"}],'
        b'"usage":{"prompt_tokens":7},"kv_transfer_params":{ "attempt":"a1"}}'
    )
    assert reply.handoff is not None
    assert bytes(reply.handoff) == b'{ "attempt":"a1"}'
    assert (reply.usage, reply.has_text, list(reply.fields)) == (PromptUsage(7), True, ["id", "choices", "usage"])


def test_prefill_reply_that_ends_the_answer() -> None:
    reply = ADAPTER.read_prefill(b'{"choices":[{"text":""}],"kv_transfer_params":null}')
    assert (reply.handoff, reply.usage, reply.has_text) == (None, None, False)


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"choices":[]}', b'{"choices":[{},{}]}', b'{"choices":3}'])
def test_prefill_replies_that_are_none(body: bytes) -> None:
    with pytest.raises(MalformedReply):
        ADAPTER.read_prefill(body)


def test_cancel() -> None:
    call = ADAPTER.cancel_call("a1")
    assert (call.path, call.body) == ("/kv_transfer/cancel", b'{"attempt":"a1"}')
    assert ADAPTER.read_cancel(b'{"released": true}')
    assert not ADAPTER.read_cancel(b'{"released": false}')
    with pytest.raises(MalformedReply):
        ADAPTER.read_cancel(b"{}")


def test_facts() -> None:
    assert ADAPTER.read_facts(msgspec.json.encode(FACTS)) == FACTS
    assert ADAPTER.ranks(FACTS) == {0, 1}
    with pytest.raises(MalformedReply):
        ADAPTER.read_facts(b"{}")
