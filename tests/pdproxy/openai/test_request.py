"""Bodies: what is refused, by which name, and what the legs get of the rest."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdproxy.errors import InvalidRequest
from pdproxy.openai.numbers import may_overflow
from pdproxy.openai.request import CHAT, COMPLETIONS, GenerationRequest, PromptKind, encode, parse, prefill_fields

HELLO = [{"role": "user", "content": "hello"}]


def completion(**fields: Any) -> GenerationRequest:
    return parse(COMPLETIONS, json.dumps({"prompt": "hello"} | fields).encode())


def chat(**fields: Any) -> GenerationRequest:
    return parse(CHAT, json.dumps({"messages": HELLO} | fields).encode())


@pytest.mark.parametrize(
    ("endpoint", "body", "param", "says"),
    [
        (COMPLETIONS, b"", None, "not valid JSON"),
        (COMPLETIONS, b'{"prompt": "a"', None, "not valid JSON"),
        (COMPLETIONS, b'{"prompt": NaN}', None, "not valid JSON"),
        (COMPLETIONS, b'"text"', None, "must be a JSON object"),
        (COMPLETIONS, b'{"prompt": "\xc3"}', None, "UTF-8 (byte 12)"),
        (COMPLETIONS, b'{"prompt": "a", "user": "\\ud800 1e999"}', None, "not valid JSON"),
        (COMPLETIONS, b"{}", "prompt", "missing"),
        (COMPLETIONS, b'{"prompt": null}', "prompt", "missing"),
        (COMPLETIONS, b'{"prompt": {}}', "prompt", "expected"),
        (COMPLETIONS, b'{"prompt": []}', "prompt", "empty"),
        (COMPLETIONS, b'{"prompt": [[]]}', "prompt[0]", "empty"),
        (COMPLETIONS, b'{"prompt": [1, "a"]}', "prompt", "mixes"),
        (COMPLETIONS, b'{"prompt": [1.5]}', "prompt[0]", "float"),
        (COMPLETIONS, b'{"prompt": "a", "model": 3}', "model", "expected"),
        (COMPLETIONS, b'{"prompt": "a", "stream": 1}', "stream", "expected"),
        (COMPLETIONS, b'{"prompt": "a", "n": 0}', "n", "at least 1"),
        (COMPLETIONS, b'{"prompt": "a", "best_of": -1}', "best_of", "at least 1"),
        (COMPLETIONS, b'{"prompt": "a", "max_tokens": 0}', "max_tokens", "at least 1"),
        (COMPLETIONS, b'{"prompt": "a", "max_tokens": 1.5}', "max_tokens", "expected"),
        (COMPLETIONS, b'{"prompt": "a", "stream_options": {}}', "stream_options", "stream: true"),
        (
            COMPLETIONS,
            b'{"prompt": "a", "stream": true, "stream_options": {"include_usage": 3}}',
            "stream_options.include_usage",
            "expected",
        ),
        (CHAT, b"{}", "messages", "missing"),
        (CHAT, b'{"messages": []}', "messages", "empty"),
        (CHAT, b'{"messages": "hi"}', "messages", "expected"),
        (CHAT, b'{"messages": [{"content": "x"}]}', "messages[0]", "role"),
        (CHAT, b'{"messages": [{"role": "user", "content": 3}]}', "messages[0].content", "expected"),
        (CHAT, b'{"messages": [{"role": "user"}], "max_completion_tokens": 0}', "max_completion_tokens", "at least"),
        (COMPLETIONS, b'{"prompt": "a", "model": "' + b"m" * 257 + b'"}', "model", "length <= 256"),
        (COMPLETIONS, b'{"prompt": "a", "n": ' + b"[" * 2000 + b"]" * 2000 + b"}", None, ""),
    ],
)
def test_refusals(endpoint: str, body: bytes, param: str | None, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(endpoint, body)
    if says:
        assert caught.value.param == param
        assert says in caught.value.message


def test_a_model_name_of_256_characters() -> None:
    assert completion(model="m" * 256).model == "m" * 256


# ── numbers out of range ────────────────────────────────────────────────────────────────────────────────────────────

FIELDS_WITH_NUMBERS = ("temperature", "max_tokens", "n", "seed", "top_p", "priority", "timeout", "something_new")
TOO_LARGE = ("1e999", "-1e999", "1E+400", "1" + "0" * 400, "1" + "0" * 5000, str(2**64), str(-(2**63) - 1))


@pytest.mark.parametrize("field", FIELDS_WITH_NUMBERS)
@pytest.mark.parametrize("number", TOO_LARGE, ids=lambda number: number[:8] + f"…{len(number)}")
@pytest.mark.parametrize("padding", [0, 10_000])
def test_a_number_that_is_out_of_range_is_refused_by_name(field: str, number: str, padding: int) -> None:
    body = f'{{"prompt": "{"a" * (padding + 1)}", "{field}": {number}}}'
    with pytest.raises(InvalidRequest) as caught:
        parse(COMPLETIONS, body.encode())
    assert caught.value.param == field
    assert len(caught.value.message) < 200


@pytest.mark.parametrize("number", TOO_LARGE, ids=lambda number: number[:8] + f"…{len(number)}")
@pytest.mark.parametrize("value", ["[1, {}]", '{{"50256": {}}}', '[{{"function": {{"maximum": {}}}}}]'])
def test_a_number_that_is_out_of_range_deep_inside_a_field(value: str, number: str) -> None:
    body = f'{{"messages": [{{"role": "user", "content": "a"}}], "tools": {value.format(number)}}}'
    with pytest.raises(InvalidRequest) as caught:
        parse(CHAT, body.encode())
    assert (caught.value.param, caught.value.message) == ("tools", "tools: a number is out of range")


@pytest.mark.parametrize("prompt", ["[1, {}, 2]", "[[1, {}]]", "[[1], [{}]]"])
@pytest.mark.parametrize("number", [str(2**63), "9" * 400, "1e999"], ids=["2**63", "400 digits", "1e999"])
def test_a_token_id_that_is_out_of_range(prompt: str, number: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(COMPLETIONS, f'{{"prompt": {prompt.format(number)}}}'.encode())
    assert (caught.value.param or "").startswith("prompt[")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seed", str(2**64 - 1)),
        ("seed", str(-(2**63))),
        ("temperature", "1e300"),
        ("temperature", "0.7000000000000000000000001"),
        ("temperature", "1e-999"),
        ("temperature", "0.000001e310"),
        ("user", '"1e999"'),
        ("user", '"' + "9" * 400 + '"'),
        ("metadata", '{"id": "5f2a71e123-11111111111111111111111"}'),
    ],
)
def test_what_only_looks_out_of_range_is_passed_on_as_it_came(field: str, value: str) -> None:
    request = parse(COMPLETIONS, f'{{"prompt": "1e999 {"9" * 30}", "{field}": {value}}}'.encode())
    assert bytes(request.fields[field]) == value.encode()


def test_usual_bodies_are_not_read_twice() -> None:
    assert not may_overflow(b'{"prompt": "a", "temperature": 0.75, "seed": 123456789012345678, "top_p": 1e-5}')


def test_an_error_shows_no_more_than_the_start_of_a_field_name() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(COMPLETIONS, f'{{"prompt": "a", "{"f" * 3000}": 1e999}}'.encode())
    assert caught.value.param == "f" * 64


@pytest.mark.parametrize(
    ("prompt", "kind", "ids", "text"),
    [
        ("hello", PromptKind.TEXT, None, "hello"),
        (["hello"], PromptKind.TEXT, None, "hello"),
        ([1, 2], PromptKind.IDS, [1, 2], None),
        ([[1, 2]], PromptKind.IDS, [1, 2], None),
        (["a", "b"], PromptKind.BATCH, None, None),
        ([[1], [2]], PromptKind.BATCH, None, None),
    ],
)
def test_prompts(prompt: Any, kind: PromptKind, ids: list[int] | None, text: str | None) -> None:
    request = completion(prompt=prompt)
    assert (request.prompt_kind, request.prompt_ids, request.prompt_text) == (kind, ids, text)


@pytest.mark.parametrize(
    ("prompt", "number"),
    [
        ("[1, 2 ,\n3]", 3),
        ("[ [1,2] ]", 2),
        ("[7]", 1),
        ("[[7]]", 1),
        ("[-1,2]", 2),
        ('"1,2"', None),
        ('["1,2"]', None),
        ("[[1],[2]]", None),
    ],
)
def test_ids_are_counted(prompt: str, number: int | None) -> None:
    request = parse(COMPLETIONS, b'{"prompt":%s}' % prompt.encode())
    assert request.num_prompt_ids == number
    assert number is None or len(request.prompt_ids or ()) == number
    assert request.num_prompt_bytes == len(prompt)


@pytest.mark.parametrize("prompt", ["[[],1]", "[[1,2],3]", "[1,[2,3]]", "[[[1,2]]]", "[[1],[]]", "[1,null]"])
def test_what_only_looks_like_ids(prompt: str) -> None:
    body = b'{"prompt":%s}' % prompt.encode()
    with pytest.raises(InvalidRequest, match=r"mixes|expected|prompt\[1\] is empty"):
        parse(COMPLETIONS, body)


def test_how_many_answers_and_messages() -> None:
    assert (completion(n=3).num_sequences, completion(prompt=["a", "b"], n=3).num_sequences) == (3, 6)
    assert (chat(messages=HELLO * 4).num_messages, chat().is_chat, completion().is_chat) == (4, True, False)


def test_a_long_body_is_looked_at_as_a_short_one_is() -> None:
    text = "x" * 100_000
    request = completion(prompt=text, model="m", max_tokens=7, echo=True, priority=0, bootstrap_room=1)
    assert (request.model, request.max_tokens, request.reads_prompt, request.prompt_text) == ("m", 7, True, text)
    assert list(request.fields) == ["prompt", "model", "max_tokens", "echo"]
    for more, param in (({"n": "x"}, "n"), ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage")):
        with pytest.raises(InvalidRequest) as caught:
            completion(prompt=text, **more)
        assert caught.value.param == param


def test_what_routing_needs() -> None:
    request = completion(
        model="m", stream=True, stream_options={"include_usage": True}, n=2, best_of=5, max_tokens=7, stop="."
    )
    assert (request.model, request.stream, request.include_usage, request.n, request.max_tokens, request.has_stop) == (
        *("m", True, True, 5, 7),
        True,
    )
    assert chat(max_tokens=9, max_completion_tokens=3).max_tokens == 3
    assert chat().prompt_kind is PromptKind.CHAT
    assert completion(echo=True).reads_prompt
    assert completion(prompt_logprobs=1).reads_prompt
    assert not completion(echo=False, stop=[]).reads_prompt
    unset = completion(echo=None, prompt_logprobs=None, stop="", return_token_ids=False)
    assert (unset.reads_prompt, unset.has_stop, unset.wants_token_ids) == (False, False, False)
    assert completion(return_token_ids=True).wants_token_ids


def test_content_that_is_not_text() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    assert chat(messages=[{"role": "user", "content": [image]}]).has_media
    assert not chat(messages=[{"role": "user", "content": [{"type": "text", "text": "x"}]}]).has_media


@pytest.mark.parametrize(
    ("message", "has_text_only", "has_media"),
    [
        ({"role": "user", "content": "x"}, True, False),
        ({"role": "user", "content": "x", "name": "y"}, True, False),
        ({"role": "user", "content": [{"type": "text", "text": "x"}]}, True, False),
        ({"role": "user", "content": [{"type": "image_url", "text": "x"}]}, False, True),
        ({"role": "user", "content": [{"type": "refusal", "text": "x"}]}, False, False),
        ({"role": "user", "content": [{"type": "text", "text": "x", "cache": 1}]}, False, False),
        ({"role": "user", "content": ["x"]}, False, False),
        ({"role": "tool", "content": "x", "tool_call_id": "y"}, False, False),
        ({"role": "assistant", "content": None, "tool_calls": []}, False, False),
    ],
)
def test_what_a_template_gets_besides_text(message: dict[str, Any], has_text_only: bool, has_media: bool) -> None:
    told = chat(messages=[{"role": "user", "content": "x"}, message])
    assert (told.has_text_only, told.has_media, told.num_messages) == (has_text_only, has_media, 2)


def test_null_means_absent() -> None:
    request = completion(model=None, stream=None, n=None, max_tokens=None, stream_options=None)
    assert (request.model, request.stream, request.n, request.max_tokens) == (None, False, 1, None)


def test_prefill_leg_keeps_order_and_bytes() -> None:
    body = (
        b'{"model":"m","tools":[{"z":1,  "a":{"y":2.50}}],"max_tokens":9,"min_tokens":4,"stream":true,'
        b'"stream_options":{"include_usage":true},"n":1,"temperature":0.70,"messages":[{"role":"user","content":"\\u00e9"}]}'
    )
    leg = encode(prefill_fields(parse(CHAT, body).fields))
    assert leg == (
        b'{"model":"m","tools":[{"z":1,  "a":{"y":2.50}}],"max_tokens":1,"stream":false,"n":1,"temperature":0.70,'
        b'"messages":[{"role":"user","content":"\\u00e9"}]}'
    )


def test_prefill_leg_has_a_limit_where_the_client_gave_none() -> None:
    assert json.loads(encode(prefill_fields(completion().fields)))["max_tokens"] == 1
    limited = prefill_fields(chat(max_completion_tokens=5, max_output_tokens=3, min_completion_tokens=2).fields)
    assert json.loads(encode(limited)) == {
        "messages": HELLO,
        "max_completion_tokens": 1,
        "max_output_tokens": 1,
        "max_tokens": 1,
    }


def test_what_clients_may_not_set_is_gone() -> None:
    stolen = {"kv_transfer_params": {}, "bootstrap_host": "h", "bootstrap_port": 1, "bootstrap_room": 2}
    assert list(completion(**stolen).fields) == ["prompt"]


@pytest.mark.parametrize("name", ["kv_transfer_params", "kv\\u005ftransfer_params", "ec_transfer_params"])
def test_nor_by_vllms_back_door(name: str) -> None:
    """A text there, where the connector counts on an object, ends vLLM's process."""
    body = b'{"prompt":"hi","vllm_xargs":{"%s":"x","mine":1.50},"seed":1}' % name.encode()
    assert encode(parse(COMPLETIONS, body).fields) == b'{"prompt":"hi","vllm_xargs":{"mine":1.50},"seed":1}'


@pytest.mark.parametrize("more", [b'{"mine" : 1.50}', b"{}", b"null"])
def test_what_else_is_there_stays_as_it_is(more: bytes) -> None:
    body = b'{"prompt":"hi","vllm_xargs":%s}' % more
    assert encode(parse(COMPLETIONS, body).fields) == body
