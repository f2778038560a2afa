"""One-token answers, and when one of them is all that there is to say."""

from __future__ import annotations

import pytest

from pdproxy.engines.adapter import MalformedReply
from pdproxy.engines.one_token import is_whole, read_one_token
from pdproxy.openai.request import COMPLETIONS, encode, parse
from pdproxy.openai.usage import PromptUsage


def test_what_is_read() -> None:
    reply = read_one_token(
        b'{"id":"i","choices":[{"message":{"role":"assistant","content":"x"},"finish_reason":"length","n":[1]}],'
        b'"usage":{"prompt_tokens":7,"prompt_tokens_details":{ "cached_tokens":4}},"kv_transfer_params":{ "a":"1"}}'
    )
    assert list(reply.fields) == ["id", "choices", "usage", "kv_transfer_params"]
    assert bytes(reply.fields["kv_transfer_params"]) == b'{ "a":"1"}'
    assert reply.choice["n"] == [1]
    assert reply.usage is not None
    assert (reply.usage.tokens, bytes(reply.usage.details or b"")) == (7, b'{ "cached_tokens":4}')
    assert (reply.has_text, reply.finish_reason) == (True, "length")


@pytest.mark.parametrize(
    ("choice", "has_text"),
    [
        ('{"text":"x"}', True),
        ('{"text":""}', False),
        ('{"message":{"role":"assistant","content":""}}', False),
        ('{"message":{"role":"assistant","content":null,"tool_calls":[]}}', False),
        ('{"message":{"role":"assistant","content":null,"reasoning":"h"}}', True),
        ("{}", False),
    ],
)
def test_whether_it_shows(choice: str, has_text: bool) -> None:
    assert read_one_token(b'{"choices":[%s]}' % choice.encode()).has_text is has_text


@pytest.mark.parametrize("usage", [b"", b',"usage":null', b',"usage":{}', b',"usage":{"prompt_tokens":null}'])
def test_no_usage(usage: bytes) -> None:
    assert read_one_token(b'{"choices":[{}]' + usage + b"}").usage is None


def test_no_details() -> None:
    body = b'{"choices":[{}],"usage":{"prompt_tokens":3,"prompt_tokens_details":null}}'
    assert read_one_token(body).usage == PromptUsage(3, None)


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{}", b'{"choices":[]}', b'{"choices":[{},{}]}', b'{"choices":3}', b'{"choices":[{}],"\xff":1}'],
)
def test_replies_that_are_none(body: bytes) -> None:
    with pytest.raises(MalformedReply, match=r"is not a one-token answer|has \d choices"):
        assert read_one_token(body).fields is None


def test_the_prompts_ids_are_found_where_either_kind_of_answer_tells_them() -> None:
    in_choice, beside = b'{"choices":[{"prompt_token_ids":[1, 2]}]}', b'{"choices":[{}],"prompt_token_ids":[3]}'
    assert bytes(read_one_token(in_choice).prompt_ids or b"") == b"[1, 2]"
    assert bytes(read_one_token(beside).prompt_ids or b"") == b"[3]"
    assert read_one_token(b'{"choices":[{"prompt_token_ids":null}]}').prompt_ids is None


LONG = b"[" + b", ".join(b"%d" % number for number in range(4000)) + b"]"


@pytest.mark.parametrize(
    ("body", "ids"),
    [
        (b'{"choices":[{"prompt_token_ids":%b,"text":"]"}],"kv_transfer_params":{"a":[1]}}' % LONG, LONG),
        (b'{"choices":[{"text":"]"}],"prompt_token_ids":%b,"kv_transfer_params":{"a":[1]}}' % LONG, LONG),
        (b'{"choices":[{"prompt_token_ids": %b}],"kv_transfer_params":{"a":[1]}}' % LONG, LONG),
        (b'{"choices":[{"text":"]","a\\"prompt_token_ids":%b}],"kv_transfer_params":{"a":[1]}}' % LONG, None),
        (b'{"choices":[{}],"x":{"prompt_token_ids":%b},"kv_transfer_params":{"a":[1]}}' % LONG, None),
        (
            b'{"x":{"prompt_token_ids":%b},"choices":[{"prompt_token_ids":[7]}],"kv_transfer_params":{"a":[1]}}' % LONG,
            b"[7]",
        ),
        (b'{"choices":[{"prompt_token_ids":[%b]}],"kv_transfer_params":{"a":[1]}}' % LONG, b"[%b]" % LONG),
    ],
)
def test_a_long_prompts_ids_are_found_too_and_nothing_else_is_taken_for_them(body: bytes, ids: bytes | None) -> None:
    reply = read_one_token(body)
    assert (None if reply.prompt_ids is None else bytes(reply.prompt_ids)) == ids
    assert bytes(reply.params or b"") == b'{"a":[1]}'
    assert encode(reply.fields) == body


def test_a_handoff_keeps_the_ids_that_it_has() -> None:
    handoff = b'{"prompt_token_ids":%b}' % LONG
    reply = read_one_token(b'{"kv_transfer_params":%b,"choices":[{}]}' % handoff)
    assert (bytes(reply.params or b""), reply.prompt_ids) == (handoff, None)


@pytest.mark.parametrize("ids", [b"[1" * 4000, b'[1,"]",' + b"2," * 4000 + b"2]"])
def test_a_long_reply_that_is_none(ids: bytes) -> None:
    with pytest.raises(MalformedReply, match="is not a one-token answer"):
        read_one_token(b'{"choices":[{"prompt_token_ids":%b}]}' % ids)


@pytest.mark.parametrize(
    ("wanted", "reason", "expected"),
    [
        ('"max_tokens":5', "length", False),
        ('"max_tokens":1', "length", True),
        ('"max_tokens":9,"max_completion_tokens":1', "length", True),
        ('"n":1', "length", False),
        ('"max_tokens":5', "stop", True),
        ('"max_tokens":5', "tool_calls", True),
        ('"max_tokens":5,"min_tokens":0', "stop", True),
        ('"max_tokens":5,"min_tokens":2', "stop", False),
        ('"max_tokens":5,"min_completion_tokens":2', "stop", False),
        ('"max_tokens":5', "error", False),
        ('"max_tokens":5', "abort", False),
        ('"max_tokens":5', None, False),
        ('"max_tokens":1', None, False),
        ('"max_tokens":1', "abort", False),
        ('"max_tokens":1,"min_tokens":1', "stop", True),
    ],
)
def test_when_it_is_all(wanted: str, reason: str | None, expected: bool) -> None:
    request = parse(COMPLETIONS, b'{"prompt":"hi",%s}' % wanted.encode())
    assert is_whole(request, reason) is expected
