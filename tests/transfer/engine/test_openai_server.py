"""The engine's HTTP face against a scripted core: OpenAI's shapes, the legs of an attempt, and every refusal."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from openai import AsyncOpenAI, BadRequestError, NotFoundError

from tests.fakes.engine_core import ENTERING, ScriptedCore
from transfer.engine.api import EngineBusy, GenerationJob, JobTooLarge, ModelFacts, RankLost
from transfer.engine.sampling import SampledToken
from transfer.engine.server import ServerSettings, build_app
from transfer.engine.tiny import make_tiny_tokenizer
from transfer.errors import AttemptLost, PeerLost

END = 1
TEXT = "Hello wörld, it rains."


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"), "bytes")


@pytest.fixture
def script(tokenizer: Any) -> list[SampledToken]:
    """`TEXT` and end-of-sequence, every token with the same two candidates beside it."""
    ids = [*tokenizer.encode(TEXT, add_special_tokens=False), END]
    return [SampledToken(token_id, -0.25, [(token_id, -0.25), (50, -3.0)]) for token_id in ids]


@pytest.fixture
def core(script: list[SampledToken]) -> ScriptedCore:
    return ScriptedCore(lambda job: script[1:] if job.handoff else script)


@pytest.fixture
async def client(core: ScriptedCore, tokenizer: Any) -> AsyncIterator[httpx.AsyncClient]:
    app = build_app(core, tokenizer, ServerSettings(max_body_bytes=20_000))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine") as client:
        yield client
    assert core.num_lent == 0


@asynccontextmanager
async def openai_client(core: ScriptedCore, tokenizer: Any) -> AsyncIterator[AsyncOpenAI]:
    """The official client, against a real server on a loopback port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(build_app(core, tokenizer), lifespan="off", log_level="error")
        server = uvicorn.Server(config)
        config.load()
        server.lifespan = config.lifespan_class(config)
        await server.startup(sockets=[listener])
        host, port = listener.getsockname()
        async with AsyncOpenAI(base_url=f"http://{host}:{port}/v1", api_key="none", max_retries=0) as client:
            yield client
        await server.shutdown(sockets=[listener])


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "Say hello", "max_tokens": 100} | fields


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "Say hello"}]} | fields


def events(response: httpx.Response) -> list[Any]:
    """The JSON of every event; ``[DONE]`` as None."""
    assert response.headers["content-type"].startswith("text/event-stream")
    data = [block.removeprefix("data: ") for block in response.text.split("\n\n") if block]
    return [None if text == "[DONE]" else json.loads(text) for text in data]


# ── the official client ─────────────────────────────────────────────────────────────────────────────────────────────


async def test_official_client_completion(core: ScriptedCore, tokenizer: Any) -> None:
    async with openai_client(core, tokenizer) as client:
        reply = await client.completions.create(model="tiny", prompt="Say hello", max_tokens=100, logprobs=2)
    choice = reply.choices[0]
    assert (choice.text, choice.finish_reason, reply.object) == (TEXT, "stop", "text_completion")
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == [-0.25] * (len(choice.logprobs.tokens or []))
    assert reply.usage is not None
    num_prompt_tokens = len(tokenizer.encode("Say hello"))
    num_answer_tokens = len(tokenizer.encode(TEXT))
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (num_prompt_tokens, num_answer_tokens)


async def test_official_client_completion_stream(core: ScriptedCore, tokenizer: Any) -> None:
    async with openai_client(core, tokenizer) as client:
        stream = await client.completions.create(
            model="tiny",
            prompt="Say hello",
            max_tokens=100,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == TEXT
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1


async def test_official_client_chat(core: ScriptedCore, tokenizer: Any) -> None:
    async with openai_client(core, tokenizer) as client:
        reply = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hi"}], logprobs=True, top_logprobs=2
        )
    choice = reply.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", TEXT, "stop")
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert bytes(byte for token in choice.logprobs.content for byte in token.bytes or []) == TEXT.encode()
    assert [len(token.top_logprobs) for token in choice.logprobs.content] == [2] * len(choice.logprobs.content)
    assert core.jobs[0].max_tokens == core.model.max_model_len - len(core.jobs[0].prompt_token_ids)


async def test_official_client_chat_stream(core: ScriptedCore, tokenizer: Any) -> None:
    async with openai_client(core, tokenizer) as client:
        stream = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hi"}], stream=True
        )
        chunks = [chunk async for chunk in stream]
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == TEXT
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]


async def test_official_client_sees_errors_as_its_own(core: ScriptedCore, tokenizer: Any) -> None:
    async with openai_client(core, tokenizer) as client:
        with pytest.raises(NotFoundError, match="does not exist"):
            await client.completions.create(model="other", prompt="Hi")
        with pytest.raises(BadRequestError) as caught:
            await client.completions.create(model="tiny", prompt="Hi", max_tokens=10_000)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "max_tokens")


# ── shapes ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_completion_reply(client: httpx.AsyncClient, core: ScriptedCore, tokenizer: Any) -> None:
    core.num_cached_tokens = 3
    reply = (await client.post("/v1/completions", json=completion())).json()
    assert reply.pop("id").startswith("cmpl-")
    assert reply.pop("created") > 0
    num_prompt_tokens, num_answer_tokens = len(tokenizer.encode("Say hello")), len(tokenizer.encode(TEXT))
    assert reply == {
        "object": "text_completion",
        "model": "tiny",
        "choices": [{"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_answer_tokens,
            "total_tokens": num_prompt_tokens + num_answer_tokens,
            "prompt_tokens_details": {"cached_tokens": 3},
        },
    }


async def test_completion_logprobs_name_parts_of_characters(client: httpx.AsyncClient) -> None:
    reply = (await client.post("/v1/completions", json=completion(logprobs=1))).json()
    logprobs = reply["choices"][0]["logprobs"]
    assert list(logprobs) == ["tokens", "token_logprobs", "top_logprobs", "text_offset"]
    position = logprobs["tokens"].index("bytes:\\xc3")
    assert logprobs["tokens"][position + 1] == "bytes:\\xb6"
    assert logprobs["text_offset"][position] == TEXT.index("ö")
    assert logprobs["top_logprobs"][position]["bytes:\\xc3"] == -0.25
    assert len({len(column) for column in logprobs.values()}) == 1


async def test_minus_infinity_is_a_number_in_json(client: httpx.AsyncClient, core: ScriptedCore) -> None:
    core.script = lambda job: [SampledToken(60, -0.1, [(60, -0.1), (61, float("-inf"))])]
    body = chat(max_tokens=1, logprobs=True, top_logprobs=2)
    reply = (await client.post("/v1/chat/completions", json=body)).json()
    top = reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    assert [entry["logprob"] for entry in top] == [-0.1, -9999.0]


@pytest.mark.parametrize(("path", "body"), [("completions", completion), ("chat/completions", chat)])
async def test_stream_carries_what_the_reply_carries(client: httpx.AsyncClient, path: str, body: Any) -> None:
    options = {"logprobs": 2} if path == "completions" else {"logprobs": True, "top_logprobs": 2}
    whole = (await client.post(f"/v1/{path}", json=body(**options))).json()
    streamed = await client.post(
        f"/v1/{path}", json=body(**options, stream=True, stream_options={"include_usage": True})
    )
    *chunks, usage, done = events(streamed)
    assert done is None
    assert (usage["choices"], usage["usage"]) == ([], whole["usage"])
    assert all(chunk["usage"] is None for chunk in chunks)
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    for column, values in whole["choices"][0]["logprobs"].items():
        joined = [value for part in parts for value in part[column] or []]
        assert (joined or None) == values, column


async def test_without_include_usage_no_chunk_mentions_it(client: httpx.AsyncClient) -> None:
    *chunks, _ = events(await client.post("/v1/completions", json=completion(stream=True)))
    assert all("usage" not in chunk for chunk in chunks)


async def test_stop_string_ends_the_sequence_in_the_core(client: httpx.AsyncClient, core: ScriptedCore) -> None:
    core.fail_at = {len(TEXT): AssertionError("read on after the stop string")}
    reply = (await client.post("/v1/completions", json=completion(stop=["never", "rld"]))).json()
    assert (reply["choices"][0]["text"], reply["choices"][0]["finish_reason"]) == ("Hello wö", "stop")


async def test_max_tokens_ends_with_length(client: httpx.AsyncClient, core: ScriptedCore) -> None:
    reply = (await client.post("/v1/completions", json=completion(max_tokens=2))).json()
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 2


async def test_ignore_eos_goes_on(client: httpx.AsyncClient, core: ScriptedCore) -> None:
    core.script = lambda job: [SampledToken(END)] * 3
    reply = (await client.post("/v1/completions", json=completion(max_tokens=3, ignore_eos=True))).json()
    assert (reply["choices"][0]["text"], reply["choices"][0]["finish_reason"]) == ("", "length")
    assert core.jobs[0].eos_token_ids == frozenset()


@pytest.mark.parametrize("stream", [False, True])
async def test_several_sequences(client: httpx.AsyncClient, core: ScriptedCore, tokenizer: Any, stream: bool) -> None:
    words = ["red", "green", "blue"]
    core.script = lambda job: [
        SampledToken(i) for i in [*tokenizer.encode(words[(job.sampling.seed or 0) - 7], add_special_tokens=False), END]
    ]
    response = await client.post("/v1/chat/completions", json=chat(n=3, seed=7, stream=stream))
    texts = dict.fromkeys(range(3), "")
    if stream:
        *chunks, done = events(response)
        assert done is None
        for choice in (chunk["choices"][0] for chunk in chunks):
            texts[choice["index"]] += choice["delta"].get("content", "")
        assert sum(chunk["choices"][0]["delta"].get("role") == "assistant" for chunk in chunks) == 3
    else:
        texts = {choice["index"]: choice["message"]["content"] for choice in response.json()["choices"]}
    assert list(texts.values()) == words
    assert len({job.request_id for job in core.jobs}) == 3


async def test_sampling_fields_reach_the_core(client: httpx.AsyncClient, core: ScriptedCore) -> None:
    wishes = {"temperature": 0, "top_p": 0.5, "top_k": 4, "seed": 9, "logit_bias": {"12": -1}, "min_tokens": 2}
    await client.post("/v1/completions", json=completion(**wishes, frequency_penalty=1, presence_penalty=-1, user="me"))
    sampling = core.jobs[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0, 0.5, 4, 9)
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (1, -1)
    assert sampling.logit_bias == {12: -1}
    assert (core.jobs[0].min_tokens, core.jobs[0].sampling.logprobs) == (2, None)


async def test_a_request_without_a_seed_gets_one(client: httpx.AsyncClient, core: ScriptedCore) -> None:
    for _ in range(2):
        await client.post("/v1/completions", json=completion())
    seeds = [job.sampling.seed for job in core.jobs]
    assert None not in seeds
    assert seeds[0] != seeds[1]


# ── prompts ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("prompt", ["Say hello", ["Say hello"]])
async def test_text_prompts(client: httpx.AsyncClient, core: ScriptedCore, tokenizer: Any, prompt: Any) -> None:
    await client.post("/v1/completions", json=completion(prompt=prompt))
    assert core.jobs[0].prompt_token_ids == tokenizer.encode("Say hello")


@pytest.mark.parametrize("prompt", [[9, 8, 7], [[9, 8, 7]]])
async def test_id_prompts(client: httpx.AsyncClient, core: ScriptedCore, prompt: Any) -> None:
    await client.post("/v1/completions", json=completion(prompt=prompt))
    assert core.jobs[0].prompt_token_ids == [9, 8, 7]


async def test_long_prompts_are_tokenized_like_short_ones(
    client: httpx.AsyncClient, core: ScriptedCore, tokenizer: Any
) -> None:
    core.model = ModelFacts(name="tiny", max_model_len=100_000, vocab_size=512, eos_token_ids=frozenset())
    text = "The lighthouse keeper counted. " * 300
    await client.post("/v1/completions", json=completion(prompt=text))
    assert core.jobs[0].prompt_token_ids == tokenizer.encode(text)


async def test_chat_is_rendered_by_the_models_template(
    client: httpx.AsyncClient, core: ScriptedCore, tokenizer: Any
) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": parts}]
    await client.post("/v1/chat/completions", json=chat(messages=messages, chat_template_kwargs={"chat_template": "x"}))
    rendered = "<|begin|><|system|>Be kind.<|end|><|user|>one\ntwo<|end|><|assistant|>"
    assert tokenizer.decode(core.jobs[0].prompt_token_ids) == rendered


async def test_tools_and_calls_reach_the_template(
    client: httpx.AsyncClient, core: ScriptedCore, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "{{ tools[0].function.name }}:{{ messages[0].tool_calls[0].function.arguments.city }}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    call = {"id": "1", "type": "function", "function": {"name": "rain", "arguments": '{"city": "Rome"}'}}
    body = chat(
        messages=[{"role": "assistant", "content": None, "tool_calls": [call]}],
        tools=[{"type": "function", "function": {"name": "rain", "parameters": {}}}],
        tool_choice="auto",
    )
    await client.post("/v1/chat/completions", json=body)
    assert tokenizer.decode(core.jobs[0].prompt_token_ids) == "rain:Rome"


AGENTS_TEMPLATE = """\
{%- for one in documents or [] %}[{{ one.text }}]{% endfor %}
{%- if reasoning_effort %}effort={{ reasoning_effort }};{% endif %}
{%- if enable_thinking is defined %}thinking={{ enable_thinking }};{% endif %}
{%- if mood is defined %}mood={{ mood }};{% endif %}
{%- for message in messages %}<{{ message.role }}>{{ message.content or "" }}
{%- for call in message.tool_calls or [] %}{{ call.function.name }}(
{%- for name, value in call.function.arguments.items() %}{{ name }}={{ value }};{% endfor %}){% endfor %}
{%- if not loop.last %}</>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<go>{% endif %}"""
"""Goes through the arguments of calls one by one, as Qwen's templates do, and shows all that a client can set."""
CALL = {"id": "1", "type": "function", "function": {"name": "rain", "arguments": '{"city": "Rome", "days": 2}'}}
AGENT = [
    {"role": "user", "content": "Rain?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "No"},
]
AGENTS_START = "<user>Rain?</><assistant>rain(city=Rome;days=2;)</><tool>No"


@pytest.mark.parametrize(
    ("fields", "rendered"),
    [
        ({}, f"{AGENTS_START}<go>"),
        ({"add_generation_prompt": False}, AGENTS_START),
        ({"add_generation_prompt": False, "continue_final_message": True}, AGENTS_START),
        ({"documents": [{"title": "t", "text": "dry"}]}, f"[dry]{AGENTS_START}<go>"),
        ({"reasoning_effort": "low"}, f"effort=low;thinking=True;{AGENTS_START}<go>"),
        ({"reasoning_effort": "none"}, f"effort=none;thinking=False;{AGENTS_START}<go>"),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
            f"effort=low;thinking=False;{AGENTS_START}<go>",
        ),
        ({"chat_template_kwargs": {"mood": "gay", "return_dict": True}}, f"mood=gay;{AGENTS_START}<go>"),
        ({"chat_template_kwargs": {"chat_template": "{{ 7 * 6 }}"}}, f"{AGENTS_START}<go>"),
        ({"chat_template": "{{ 7 * 6 }}"}, f"{AGENTS_START}<go>"),
        ({"add_special_tokens": True}, f"<|begin|>{AGENTS_START}<go>"),
    ],
)
async def test_every_leg_and_tokenize_read_a_chat_alike(
    tokenizer: Any, script: list[SampledToken], monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], rendered: str
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", AGENTS_TEMPLATE)
    told = []
    for role in ("prefill", "decode"):
        core = ScriptedCore(lambda job: script, role=role)
        app = build_app(core, tokenizer)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine") as client:
            answer = await client.post("/v1/chat/completions", json=chat(messages=AGENT, max_tokens=99) | fields)
            assert answer.status_code == 200, answer.text
            reply = (await client.post("/tokenize", json={"model": "tiny", "messages": AGENT} | fields)).json()
        told += [core.jobs[0].prompt_token_ids, reply["tokens"]]
        assert (reply["count"], answer.json()["usage"]["prompt_tokens"]) == (len(reply["tokens"]),) * 2
    assert [tokenizer.decode(ids) for ids in told] == [rendered] * 4


async def test_a_message_cannot_be_both_continued_and_answered(client: httpx.AsyncClient) -> None:
    fields = {"messages": AGENT, "continue_final_message": True}
    for path, body in (("/v1/chat/completions", chat()), ("/tokenize", {})):
        answer = await client.post(path, json=body | fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "continue_final_message")


async def test_a_text_without_special_tokens(client: httpx.AsyncClient, core: ScriptedCore, tokenizer: Any) -> None:
    await client.post("/v1/completions", json=completion(add_special_tokens=False))
    assert core.jobs[0].prompt_token_ids == tokenizer.encode("Say hello", add_special_tokens=False)


# ── the legs of an attempt ──────────────────────────────────────────────────────────────────────────────────────────


def push_params(**fields: Any) -> dict[str, Any]:
    receiver = {"rank": 0, "host": "127.0.0.1", "port": 7300}
    return {"attempt": "a-1", "receivers": [receiver], "timeout_s": 5.0} | fields


def handoff(script: list[SampledToken], **fields: Any) -> dict[str, Any]:
    first = {"first_token_id": script[0].token_id, "num_pages": 3}
    return {"attempt": "a-1", "prompt_token_ids": [9, 8, 7]} | first | fields


@pytest.fixture
def prefiller(core: ScriptedCore) -> ScriptedCore:
    core.role = "prefill"
    return core


@pytest.fixture
async def prefill_client(prefiller: ScriptedCore, client: httpx.AsyncClient) -> httpx.AsyncClient:
    """Depends on the order of fixtures: the role is read when the app is built."""
    return client


@pytest.mark.parametrize(("path", "body"), [("completions", completion), ("chat/completions", chat)])
async def test_prefill_leg_answers_one_token_and_the_handoff(
    prefill_client: httpx.AsyncClient, core: ScriptedCore, script: list[SampledToken], path: str, body: Any
) -> None:
    leg = body(max_tokens=1, kv_transfer_params=push_params(prompt_token_ids=[9, 8, 7]))
    reply = (await prefill_client.post(f"/v1/{path}", json=leg)).json()
    assert reply["kv_transfer_params"] == handoff(
        script, first_token_logprobs={"logprob": -0.25, "top_logprobs": [list(pair) for pair in script[0].top_logprobs]}
    )
    assert reply["choices"][0]["finish_reason"] == "length"
    assert (reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]) == (3, 1)
    assert core.jobs[0].prompt_token_ids == [9, 8, 7]
    assert (core.kept, core.dropped) == (["a-1"], [])


@pytest.mark.parametrize("fields", [{"ignore_eos": False}, {"stop": "H"}])
async def test_prefill_leg_that_finishes_the_answer_drops_the_kv(
    prefill_client: httpx.AsyncClient, core: ScriptedCore, script: list[SampledToken], fields: dict[str, Any]
) -> None:
    first = script if "stop" in fields else [SampledToken(END)]
    core.script = lambda job: first
    leg = completion(max_tokens=1, kv_transfer_params=push_params(), **fields)
    reply = (await prefill_client.post("/v1/completions", json=leg)).json()
    assert "kv_transfer_params" not in reply
    assert (reply["choices"][0]["text"], reply["choices"][0]["finish_reason"]) == ("", "stop")
    assert (core.kept, core.dropped) == ([], ["a-1"])


@pytest.mark.parametrize("fields", [{"stream": True}, {"n": 2}])
async def test_prefill_leg_is_one_whole_sequence(prefill_client: httpx.AsyncClient, fields: dict[str, Any]) -> None:
    leg = completion(kv_transfer_params=push_params(), **fields)
    response = await prefill_client.post("/v1/completions", json=leg)
    assert (response.status_code, response.json()["error"]["param"]) == (400, next(iter(fields)))


@pytest.mark.parametrize(("path", "body"), [("completions", completion), ("chat/completions", chat)])
async def test_decode_leg_streams_the_first_token_before_any_decode_step(
    tokenizer: Any, core: ScriptedCore, script: list[SampledToken], path: str, body: Any
) -> None:
    core.hang_at = 0
    async with openai_client(core, tokenizer) as client:
        leg = body(stream=True, kv_transfer_params=handoff(script))
        url = f"{client.base_url}{path}"
        async with httpx.AsyncClient() as plain, plain.stream("POST", url, json=leg) as response:
            choices = (
                json.loads(line.removeprefix("data: "))["choices"][0] async for line in response.aiter_lines() if line
            )
            if path == "completions":
                assert (await anext(choices))["text"] == "H"
            else:
                assert (await anext(choices))["delta"] == {"role": "assistant", "content": ""}
                assert (await anext(choices))["delta"] == {"content": "H"}
            await core.reached.wait()
            assert core.jobs[0].prompt_token_ids == [9, 8, 7]


@pytest.mark.parametrize("stream", [False, True])
async def test_decode_leg_counts_and_scores_the_first_token(
    client: httpx.AsyncClient, script: list[SampledToken], stream: bool
) -> None:
    scores = {"logprob": -1.5, "top_logprobs": [[script[0].token_id, -1.5]]}
    leg = completion(logprobs=1, stream=stream, stream_options={"include_usage": True})
    leg["kv_transfer_params"] = handoff(script, first_token_logprobs=scores)
    response = await client.post("/v1/completions", json=leg)
    chunks = [chunk for chunk in events(response) if chunk] if stream else [response.json()]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["text"] for choice in choices) == TEXT
    scored = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    assert scored[0]["token_logprobs"][0] == -1.5
    assert chunks[-1]["usage"]["completion_tokens"] == len(script)
    assert chunks[-1]["usage"]["prompt_tokens"] == 3


async def test_decode_leg_finished_by_the_first_token_asks_for_no_other(
    client: httpx.AsyncClient, core: ScriptedCore, script: list[SampledToken]
) -> None:
    core.fail_at = {0: AssertionError("asked for a second token")}
    leg = completion(max_tokens=1, kv_transfer_params=handoff(script))
    reply = (await client.post("/v1/completions", json=leg)).json()
    assert (reply["choices"][0]["text"], reply["choices"][0]["finish_reason"]) == ("H", "length")
    assert len(core.jobs) == 1  # it was entered, and left: the core has dropped the pages


async def test_stop_string_straddling_the_first_token(client: httpx.AsyncClient, script: list[SampledToken]) -> None:
    leg = completion(stop=["Hello"], kv_transfer_params=handoff(script))
    reply = (await client.post("/v1/completions", json=leg)).json()
    assert (reply["choices"][0]["text"], reply["choices"][0]["finish_reason"]) == ("", "stop")


@pytest.mark.parametrize(
    "params",
    [{}, [], "text", {"attempt": 5}, {"first_token_id": 9_999}, {"prompt_token_ids": []}, {"prompt_token_ids": [-1]}],
)
async def test_decode_leg_with_broken_params(
    client: httpx.AsyncClient, core: ScriptedCore, script: list[SampledToken], params: Any
) -> None:
    if isinstance(params, dict) and params:
        params = handoff(script) | params
    response = await client.post("/v1/completions", json=completion(kv_transfer_params=params))
    assert (response.status_code, response.json()["error"]["param"]) == (400, "kv_transfer_params")
    assert core.jobs == []


async def test_engine_of_both_roles_takes_both_legs(
    core: ScriptedCore, tokenizer: Any, script: list[SampledToken]
) -> None:
    core.role = "both"
    app = build_app(core, tokenizer)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine") as client:
        for params in (push_params(), handoff(script)):
            await client.post("/v1/completions", json=completion(kv_transfer_params=params))
    assert [(job.push is None, job.handoff is None) for job in core.jobs] == [(False, True), (True, False)]


# ── several prompts in one body ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["texts", "ids"])
async def test_several_prompts_are_answered_as_if_each_were_asked_alone(
    client: httpx.AsyncClient, core: ScriptedCore, tokenizer: Any, kind: str, stream: bool
) -> None:
    """Every answer depends on its prompt and its seed, so that no two of the six are alike."""
    core.num_cached_tokens = 2

    def script_of(job: GenerationJob) -> list[SampledToken]:
        text = f"{len(job.prompt_token_ids)} and {job.sampling.seed}"
        ids = [*tokenizer.encode(text, add_special_tokens=False), END]
        return [SampledToken(token_id, -0.5, [(token_id, -0.5)]) for token_id in ids]

    core.script = script_of
    texts = ["Say hello", "Say it", "Hi"]
    prompts = texts if kind == "texts" else [tokenizer.encode(text) for text in texts]
    fields = {"n": 2, "seed": 7, "logprobs": 1, "stream": stream, "stream_options": {"include_usage": True}}
    alone = [await answered(client, completion(prompt=prompt, **fields)) for prompt in prompts]
    choices, usage = await answered(client, completion(prompt=prompts, **fields))

    assert choices == [choice for one, _ in alone for choice in one]
    assert len({text for text, *_ in choices}) == 6
    assert usage == {
        **{name: sum(one[name] for _, one in alone) for name in ("prompt_tokens", "completion_tokens", "total_tokens")},
        "prompt_tokens_details": {"cached_tokens": 6},
    }
    assert len({job.request_id for job in core.jobs}) == len(core.jobs)


async def answered(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The choices in order of their index, each (text, finish reason, tokens, offsets), and the usage."""
    response = await client.post("/v1/completions", json=body)
    parts = [event for event in events(response) if event] if body["stream"] else [response.json()]
    told: dict[int, list[Any]] = {}
    for choice in (choice for part in parts for choice in part["choices"]):
        text, finish, tokens, offsets = told.setdefault(choice["index"], ["", None, [], []])
        scores = choice["logprobs"] or {"tokens": [], "text_offset": []}
        tokens, offsets = tokens + scores["tokens"], offsets + scores["text_offset"]
        told[choice["index"]] = [text + choice["text"], finish or choice["finish_reason"], tokens, offsets]
    assert sorted(told) == list(range(len(told)))
    return [tuple(map(str, told[index])) for index in sorted(told)], parts[-1]["usage"]


async def test_equal_prompts_without_a_seed_get_answers_of_their_own(
    client: httpx.AsyncClient, core: ScriptedCore
) -> None:
    await client.post("/v1/completions", json=completion(prompt=["Say hello"] * 3, n=2))
    assert len({job.sampling.seed for job in core.jobs}) == 6


async def test_an_error_in_one_of_several_prompts_gives_all_others_back(
    client: httpx.AsyncClient, core: ScriptedCore
) -> None:
    core.fail_at[3] = AttemptLost("the decoder lost it")
    response = await client.post("/v1/completions", json=completion(prompt=["one", "two", "three"]))
    assert response.status_code == 502
    assert core.num_lent == 0


# ── refusals ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["one", ""]}, "prompt"),
        ({"prompt": ["one", [2]]}, "prompt"),
        ({"prompt": [1, [2]]}, "prompt"),
        ({"prompt": [[1], [512]]}, "prompt[1]"),
        ({"prompt": [[1], [2] * 157], "max_tokens": 100}, "max_tokens"),
        ({"prompt": [[1], [2] * 256]}, "prompt[1]"),
        ({"prompt": ["one"] * 43, "n": 3}, "prompt"),
        ({"prompt": ["one", "two"], "kv_transfer_params": {"prompt_token_ids": [1], "num_answer_tokens": 1}}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [1, 512]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"model": None}, "model"),
        ({"max_tokens": "10"}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"min_tokens": 101}, "min_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"logit_bias": {"512": 1}}, "logit_bias"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": 5}, "stop"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": 1}}, "stream_options"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
async def test_completion_refusals_name_the_field(
    client: httpx.AsyncClient, core: ScriptedCore, fields: dict[str, Any], param: str
) -> None:
    response = await client.post("/v1/completions", json=completion(**fields))
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert core.jobs == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"content": "hello"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": [{"role": "wizard", "content": "the template refuses this"}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]}, "messages"),
        ({"tools": {}}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "rain"}}}, "tool_choice"),
        ({"function_call": {"name": "rain"}}, "function_call"),
        ({"logprobs": 5}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_completion_tokens": 0}, "max_tokens"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
    ],
)
async def test_chat_refusals_name_the_field(
    client: httpx.AsyncClient, core: ScriptedCore, fields: dict[str, Any], param: str
) -> None:
    response = await client.post("/v1/chat/completions", json=chat(**fields))
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert core.jobs == []


async def test_harmless_fields_are_accepted(client: httpx.AsyncClient) -> None:
    nothing = dict.fromkeys(["temperature", "stop", "n", "stream", "stream_options", "logit_bias", "tools", "seed"])
    fields: dict[str, Any] = {"response_format": {"type": "text"}, "tool_choice": "none", "unheard_of": [{}]}
    assert (await client.post("/v1/chat/completions", json=chat(**nothing, **fields))).status_code == 200


@pytest.mark.parametrize(
    ("body", "num_tokens"), [(completion(prompt=[9] * 256), 256), (completion(prompt=[9] * 200), 200)]
)
async def test_what_does_not_fit_the_context(
    client: httpx.AsyncClient, core: ScriptedCore, body: dict[str, Any], num_tokens: int
) -> None:
    response = await client.post("/v1/completions", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert error["param"] == ("prompt" if num_tokens == 256 else "max_tokens")
    assert "256" in error["message"]
    assert core.jobs == []


async def test_a_body_without_a_model(client: httpx.AsyncClient) -> None:
    error = (await client.post("/v1/completions", json={"prompt": [1]})).json()["error"]
    assert (error["message"], error["param"]) == ("model is missing", "model")


async def test_unknown_model(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/completions", json=completion(model="other"))
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b'{"model": "tiny", "prompt": "\xff"}',
        b'{"other": "\xff", "model": "tiny", "prompt": "x"}',
        b'{"model": "tiny", "prompt": "\\ud800"}',
        b'{"model": "tiny", "prompt": "x", "other": ' + b"[" * 9_000,
    ],
)
async def test_bodies_that_are_no_json_object(client: httpx.AsyncClient, body: bytes) -> None:
    for path in (
        "/v1/completions",
        "/v1/chat/completions",
        "/tokenize",
        "/kv_transfer/cancel",
        "/kv_transfer/sender_ended",
    ):
        response = await client.post(path, content=body)
        assert response.status_code == 400
        assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("announced", [True, False])
async def test_body_too_large(client: httpx.AsyncClient, announced: bool) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b" " * 10_000

    for path in ("/v1/completions", "/tokenize"):
        response = await client.post(path, content=b" " * 30_000 if announced else pieces())
        assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")


@pytest.mark.parametrize("announced", [True, False])
async def test_bodies_have_one_budget(core: ScriptedCore, tokenizer: Any, announced: bool) -> None:
    """One body is under way for as long as it likes; what the others then find is the rest of the budget."""
    app = build_app(core, tokenizer, ServerSettings(max_body_bytes=200_000, memory_budget=250_000))
    may_end, has_begun = asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b"{" + b" " * 150_000
        has_begun.set()
        await may_end.wait()
        yield json.dumps(completion()).encode()[1:]

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(10):
            yield b" " * 10_000

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine") as client:
        slowly = asyncio.create_task(client.post("/v1/completions", content=slow()))
        await has_begun.wait()
        for path in ("/v1/completions", "/tokenize"):
            response = await client.post(path, content=b" " * 100_000 if announced else pieces())
            assert (response.status_code, response.json()["error"]["code"]) == (503, "memory_budget_spent")
            assert response.headers["retry-after"] == "1"
            assert "--memory-budget" in response.json()["error"]["message"]
        assert (await client.post("/v1/completions", json=completion())).status_code == 200, "small ones find room"
        may_end.set()
        assert (await slowly).status_code == 200
        response = await client.post("/v1/completions", json=completion() | {"user": "u" * 150_000})
        assert response.status_code == 200, "what is over has made room"


async def test_unknown_routes_and_methods_answer_error_objects(client: httpx.AsyncClient) -> None:
    for response in (await client.get("/v1/nothing"), await client.get("/v1/completions")):
        assert response.status_code in (404, 405)
        assert response.json()["error"]["type"] == "invalid_request_error"


# ── errors of the core ──────────────────────────────────────────────────────────────────────────────────────────────

CORE_ERRORS = [
    (AttemptLost("attempt a-1 is unknown"), 502, "kv_transfer_failed"),
    (EngineBusy("64 sequences are waiting", retry_after_s=1.2), 503, "engine_busy"),
    (JobTooLarge("needs 12 pages, there are 8"), 400, "context_length_exceeded"),
    (RankLost("rank 1 of this engine is gone"), 500, "rank_lost"),
    (RuntimeError("secret"), 500, None),
]


@pytest.mark.parametrize("point", [ENTERING, 0])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("error", "status", "code"), CORE_ERRORS)
async def test_error_before_the_first_byte_is_a_real_status(
    client: httpx.AsyncClient,
    core: ScriptedCore,
    point: int,
    stream: bool,
    error: Exception,
    status: int,
    code: str | None,
) -> None:
    core.fail_at = {point: error}
    response = await client.post("/v1/chat/completions", json=chat(stream=stream))
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert "secret" not in response.text
    assert response.headers.get("retry-after") == ("2" if status == 503 else None)


@pytest.mark.parametrize("n", [1, 2])
async def test_error_after_the_first_byte_is_an_event_and_the_end(
    client: httpx.AsyncClient, core: ScriptedCore, n: int
) -> None:
    core.fail_at = {3: AttemptLost("the KV is gone")}
    response = await client.post("/v1/completions", json=completion(stream=True, n=n))
    assert response.status_code == 200
    *chunks, last = events(response)
    assert last["error"]["message"] == "the KV is gone"
    assert chunks
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)


async def test_a_core_that_stops_too_early_is_never_a_short_answer(
    client: httpx.AsyncClient, core: ScriptedCore, script: list[SampledToken]
) -> None:
    core.script = lambda job: script[:3]
    response = await client.post("/v1/completions", json=completion())
    assert response.status_code == 500


# ── the small routes ────────────────────────────────────────────────────────────────────────────────────────────────


async def test_models(client: httpx.AsyncClient) -> None:
    card = (await client.get("/v1/models")).json()["data"][0]
    assert (card["id"], card["object"], card["max_model_len"]) == ("tiny", "model", 256)


async def test_tokenize(client: httpx.AsyncClient, tokenizer: Any) -> None:
    ids = tokenizer.encode("Say hello")
    reply = (await client.post("/tokenize", json={"model": "tiny", "prompt": "Say hello"})).json()
    assert reply == {"tokens": ids, "count": len(ids), "max_model_len": 256}
    reply = (await client.post("/tokenize", json={"prompt": "Say hello", "add_special_tokens": False})).json()
    assert reply["tokens"] == ids[1:]
    reply = (await client.post("/tokenize", json={"messages": [{"role": "user", "content": "Hi"}]})).json()
    assert tokenizer.decode(reply["tokens"]) == "<|begin|><|user|>Hi<|end|><|assistant|>"


@pytest.mark.parametrize("body", [{}, {"prompt": "x", "messages": []}])
async def test_tokenize_wants_one_of_two(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    assert (await client.post("/tokenize", json=body)).status_code == 400


async def test_kv_routes(client: httpx.AsyncClient, core: ScriptedCore) -> None:
    facts = (await client.get("/kv_buffer")).json()
    assert (facts["role"], facts["num_pages"], facts["receivers"][0]["port"]) == ("decode", 8, 7300)
    assert (await client.post("/kv_transfer/cancel", json={"attempt": "a-1"})).json() == {"released": True}
    assert core.cancelled == ["a-1"]
    refused = await client.post("/kv_transfer/cancel", json={})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "attempt")
    assert (await client.post("/kv_transfer/sender_ended", json={"epoch": "e-1"})).json() == {"released": True}
    assert core.ended_senders == ["e-1"]
    refused = await client.post("/kv_transfer/sender_ended", json={})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "epoch")


async def test_small_routes_translate_the_cores_errors(
    client: httpx.AsyncClient, core: ScriptedCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def cancel(attempt: str) -> bool:
        raise PeerLost("the receiver does not answer")

    monkeypatch.setattr(core, "cancel", cancel)
    response = await client.post("/kv_transfer/cancel", json={"attempt": "a-1"})
    assert (response.status_code, response.json()["error"]["code"]) == (502, "kv_transfer_failed")


async def test_health_and_statistics(client: httpx.AsyncClient, core: ScriptedCore) -> None:
    assert (await client.get("/health")).status_code == 200
    assert (await client.get("/statistics")).json() == {"num_lent": 0}
    core.healthy = False
    answer = await client.get("/health")
    assert (answer.status_code, answer.json()) == (503, {"status": "failed", "reason": "its thread has ended"})
