"""The official clients get from the proxy what they get from an engine itself: the same answers, the same errors.

Each case is asked of a scripted vLLM and of a proxy in front of a pair of the same, over real sockets.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import anthropic
import httpx
import openai
import pytest
import pytest_asyncio

from pdproxy.assemble import Proxy, assemble
from pdproxy.config.instances import InstanceSettings
from pdproxy.config.settings import Settings
from pdproxy.serve import Server
from tests.fakes.fake_apis import FakeApis
from tests.fakes.proxy_harness import until
from tests.fakes.served_engine import port_of, served

pytestmark = pytest.mark.asyncio(loop_scope="module")

HELLO: list[Any] = [{"role": "user", "content": "a b c"}]
TALK: list[Any] = [*HELLO, {"role": "assistant", "content": "Once upon"}, {"role": "user", "content": "go on"}]
PARTS: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "a b"}, {"type": "text", "text": "c"}]}]
LONG = "word " * 5000
FOREIGN = "größe/日本 1%2F"
ADAPTERS = ("poet", FOREIGN)
TOOL: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}


@dataclass
class Clients:
    """The clients of one server."""

    openai: openai.AsyncOpenAI
    anthropic: anthropic.AsyncAnthropic
    http: httpx.AsyncClient


@dataclass
class Both:
    direct: Clients
    proxied: Clients
    proxy: Proxy
    decoder: FakeApis


def clients_of(url: str) -> Clients:
    http = httpx.AsyncClient(base_url=url, timeout=10)
    return Clients(
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0, timeout=10),
        anthropic.AsyncAnthropic(base_url=url, api_key="key", max_retries=0, timeout=10),
        http,
    )


async def close(clients: Clients) -> None:
    await clients.openai.close()
    await clients.anthropic.close()
    await clients.http.aclose()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def both() -> AsyncIterator[Both]:
    alone = FakeApis("decode", adapters=ADAPTERS)
    pair = [FakeApis("prefill", adapters=ADAPTERS, num_pages=4096), FakeApis("decode", adapters=ADAPTERS)]
    pair[1].prefillers = [pair[0]]
    async with AsyncExitStack() as stack:
        direct = await stack.enter_async_context(served(alone))  # type: ignore[arg-type]
        urls = [await stack.enter_async_context(served(one)) for one in pair]  # type: ignore[arg-type]
        instances = tuple(
            InstanceSettings(name=one.role, role=one.role, url=url, engine="vllm_nixl")
            for one, url in zip(pair, urls, strict=True)
        )
        proxy = assemble(Settings(port=0, proxy_port=0, drain_grace_s=0.0, instances=instances))
        server = Server(proxy)
        task = asyncio.create_task(server.serve())
        await until(lambda: server.started and proxy.pool.is_ready)
        made = Both(clients_of(direct), clients_of(f"http://127.0.0.1:{port_of(server)}"), proxy, pair[1])
        yield made
        await close(made.direct)
        await close(made.proxied)
        server.should_exit = True
        async with asyncio.timeout(10):
            await task
        proxy.check_integrity()


# ── the cases ───────────────────────────────────────────────────────────────────────────────────────────────────────

Case = Callable[[Clients], Awaitable[Any]]


def completion(**body: Any) -> Case:
    async def ask(clients: Clients) -> Any:
        given = {"model": "tiny", "prompt": "a b c", "max_tokens": 8} | body
        return await told(await clients.openai.completions.create(**given))

    return ask


def chat(**body: Any) -> Case:
    async def ask(clients: Clients) -> Any:
        given = {"model": "tiny", "messages": HELLO, "max_tokens": 8} | body
        return await told(await clients.openai.chat.completions.create(**given))

    return ask


def response(**body: Any) -> Case:
    async def ask(clients: Clients) -> Any:
        given = {"model": "tiny", "input": "a b c", "max_output_tokens": 8} | body
        return await told(await clients.openai.responses.create(**given))

    return ask


def follow_up(*, stream: bool = False) -> Case:
    async def ask(clients: Clients) -> Any:
        first = await clients.openai.responses.create(model="tiny", input="a b")
        again = await clients.openai.responses.retrieve(first.id)
        assert again.id == first.id
        body: dict[str, Any] = {"input": "c", "previous_response_id": first.id, "stream": stream}
        return await told(await clients.openai.responses.create(model="tiny", **body))

    return ask


def message(**body: Any) -> Case:
    async def ask(clients: Clients) -> Any:
        given = {"model": "tiny", "messages": HELLO, "max_tokens": 8} | body
        return await told(await clients.anthropic.messages.create(**given))

    return ask


async def message_helper(clients: Clients) -> Any:
    """The client's own helper puts the events together again."""
    async with clients.anthropic.messages.stream(model="tiny", messages=HELLO, max_tokens=8) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        return text, await told(await stream.get_final_message())


async def response_helper(clients: Clients) -> Any:
    async with clients.openai.responses.stream(model="tiny", input="a b c") as stream:
        kinds = [event.type async for event in stream]
        return kinds, await told(await stream.get_final_response())


async def chat_helper(clients: Clients) -> Any:
    async with clients.openai.chat.completions.stream(model="tiny", messages=HELLO) as stream:
        return [event.type async for event in stream]


def message_beta(**body: Any) -> Case:
    """The beta client puts a query behind the path."""

    async def ask(clients: Clients) -> Any:
        given = {"model": "tiny", "messages": HELLO, "max_tokens": 8} | body
        return await told(await clients.anthropic.beta.messages.create(**given))

    return ask


async def count_tokens(clients: Clients) -> Any:
    return await told(await clients.anthropic.messages.count_tokens(model="tiny", messages=TALK))


def embeddings(**body: Any) -> Case:
    async def ask(clients: Clients) -> Any:
        given = {"model": "tiny", "input": ["a", "b"], "encoding_format": "float"} | body
        return await told(await clients.openai.embeddings.create(**given))

    return ask


async def models(clients: Clients) -> Any:
    page = await clients.openai.models.list()
    return sorted((one.id, getattr(one, "parent", None)) for one in page.data)


def one_model(name: str) -> Case:
    async def ask(clients: Clients) -> Any:
        return (await clients.openai.models.retrieve(name)).id

    return ask


def raw(method: str, path: str, *, shows: bool = True, **given: Any) -> Case:
    """What no client sends. `shows` False: the words may be the proxy's own."""

    async def ask(clients: Clients) -> Any:
        answer = await clients.http.request(method, path, **given)
        return (answer.status_code, answer.json() if shows and answer.content else None)

    return ask


async def raw_post(clients: Clients) -> Any:
    answer = await clients.openai.completions.with_raw_response.create(model="tiny", prompt="a", max_tokens=2)
    return answer.headers["content-type"], answer.status_code


async def told(result: Any) -> Any:
    """The answer as plain values without its id; of a stream, each event."""
    if hasattr(result, "__aiter__") and not hasattr(result, "model_dump"):
        return [plain(event.model_dump()) async for event in result]
    return plain(result.model_dump())


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items() if name != "id" and not name.startswith("_")}
    return [plain(one) for one in value] if isinstance(value, list) else value


USAGE = {"include_usage": True}
CASES: dict[str, Case] = {
    # completions
    "completion": completion(),
    "completion, streamed": completion(stream=True),
    "completion, streamed with usage": completion(stream=True, stream_options=USAGE),
    "completion, one token": completion(max_tokens=1),
    "completion, two tokens": completion(max_tokens=2),
    "completion, ids": completion(prompt=[1, 2, 3]),
    "completion, logprobs": completion(logprobs=1),
    "completion, several answers": completion(n=2),
    "completion, an adapter": completion(model="poet"),
    "completion, unknown model": completion(model="nobody"),
    "completion, headers": completion(extra_headers={"x-request-id": "mine", "x-other": "1"}),
    "completion, raw": raw_post,
    # chats
    "chat": chat(),
    "chat, streamed": chat(stream=True),
    "chat, streamed with usage": chat(stream=True, stream_options=USAGE),
    "chat, one token": chat(max_tokens=1),
    "chat, in parts": chat(messages=PARTS),
    "chat, several turns": chat(messages=TALK),
    "chat, the client's helper": chat_helper,
    "chat, newer limit": chat(max_tokens=None, max_completion_tokens=3),
    "chat, unknown model": chat(model="nobody"),
    "chat, unknown model streamed": chat(model="nobody", stream=True),
    # responses
    "response": response(),
    "response, streamed": response(stream=True),
    "response, one token": response(max_output_tokens=1),
    "response, one token streamed": response(max_output_tokens=1, stream=True),
    "response, cut off": response(max_output_tokens=3),
    "response, no limit": response(max_output_tokens=None),
    "response, items": response(input=HELLO),
    "response, several turns": response(input=TALK),
    "response, instructions": response(instructions="Be short."),
    "response, metadata": response(metadata={"for": "me"}),
    "response, a function": response(tools=[{"type": "function", "name": "f", "parameters": TOOL, "strict": True}]),
    "response, a tool of the engine's": response(tools=[{"type": "web_search"}]),
    "response, not to be kept": response(store=False),
    "response, an adapter": response(model="poet"),
    "response, the client's helper": response_helper,
    "response, unknown model": response(model="nobody"),
    "response, unknown model streamed": response(model="nobody", stream=True),
    "response, no input": response(input=None),
    "response, too long": response(input=LONG),
    "response, too long streamed": response(input=LONG, stream=True),
    "response, a wrong type": response(temperature="hot"),
    "response, after another": follow_up(),
    "response, after another streamed": follow_up(stream=True),
    "response, after nobody's": response(previous_response_id="resp_nobodys"),
    # messages
    "message": message(),
    "message, streamed": message(stream=True),
    "message, one token": message(max_tokens=1),
    "message, one token streamed": message(max_tokens=1, stream=True),
    "message, cut off": message(max_tokens=3),
    "message, in parts": message(messages=PARTS),
    "message, several turns": message(messages=TALK),
    "message, a system prompt": message(system="Be short."),
    "message, a system prompt in parts": message(system=[{"type": "text", "text": "Be short."}]),
    "message, a tool": message(tools=[{"name": "f", "input_schema": TOOL}]),
    "message, an image": message(
        messages=[
            {
                "role": "user",
                "content": [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QQ=="}}],
            }
        ]
    ),
    "message, sampling": message(stop_sequences=["x"], extra_body={"temperature": 0.3, "top_p": 0.9, "top_k": 5}),
    "message, an adapter": message(model="poet"),
    "message, beta": message_beta(),
    "message, beta streamed": message_beta(stream=True),
    "message, headers": message(extra_headers={"anthropic-beta": "x", "x-request-id": "mine"}),
    "message, the client's helper": message_helper,
    "message, unknown model": message(model="nobody"),
    "message, unknown model streamed": message(model="nobody", stream=True),
    "message, too long": message(messages=[{"role": "user", "content": LONG}]),
    "message, too long streamed": message(messages=[{"role": "user", "content": LONG}], stream=True),
    "message, a wrong type": message(extra_body={"temperature": "hot"}),
    "message, no messages": message(messages=None),
    "message, tokens counted": count_tokens,
    # the rest
    "embeddings": embeddings(),
    "embeddings, one text": embeddings(input="a"),
    "models": models,
    "model": one_model("poet"),
    "model, a name of many kinds of letters": one_model(FOREIGN),
    "completion, a name of many kinds of letters": completion(model=FOREIGN),
    "response, a name of many kinds of letters": response(model=FOREIGN, stream=True),
    "message, a name of many kinds of letters": message(model=FOREIGN, stream=True),
    "version": raw("GET", "/version"),
    "tokenize": raw("POST", "/tokenize", json={"model": "tiny", "prompt": "a b"}),
    "detokenize": raw("POST", "/detokenize", json={"model": "tiny", "tokens": [1, 2]}),
    "rerank": raw("POST", "/v1/rerank", json={"model": "tiny", "query": "q", "documents": ["a"]}),
    "score": raw("POST", "/score", json={"model": "tiny", "text_1": "a", "text_2": "b"}),
    "classify": raw("POST", "/classify", json={"model": "tiny", "input": "a"}),
    "pooling": raw("POST", "/pooling", json={"model": "tiny", "input": "a"}),
    "bad JSON, completion": raw("POST", "/v1/completions", content=b"{", shows=False),
    "bad JSON, chat": raw("POST", "/v1/chat/completions", content=b'{"model": ', shows=False),
    "bad JSON, response": raw("POST", "/v1/responses", content=b"nonsense", shows=False),
    "bad JSON, message": raw("POST", "/v1/messages", content=b"{'a': 1}", shows=False),
    "bad JSON, tokenize": raw("POST", "/tokenize", content=b"{", shows=False),
    "a limit that is missing": raw("POST", "/v1/messages", json={"model": "tiny", "messages": HELLO}, shows=False),
}


async def outcome(case: Case, clients: Clients) -> Any:
    try:
        return await case(clients)
    except (openai.APIStatusError, anthropic.APIStatusError) as error:
        return type(error).__module__, type(error).__name__, error.status_code


@pytest.mark.parametrize("name", CASES)
async def test_the_proxy_answers_as_the_engine_does(both: Both, name: str) -> None:
    direct, proxied = await outcome(CASES[name], both.direct), await outcome(CASES[name], both.proxied)
    assert proxied == direct
    if "unknown" in name:
        assert direct[1:] == ("NotFoundError", 404)
    elif any(word in name for word in ("too long", "wrong type", "no messages", "no input")):
        assert direct[1:] == ("BadRequestError", 400)


@pytest.mark.parametrize("api", ["completion", "chat", "response", "message"])
async def test_a_client_that_stops_reading_leaves_nothing_behind(both: Both, api: str) -> None:
    clients = both.proxied
    stream: Any
    if api == "completion":
        stream = await clients.openai.completions.create(model="tiny", prompt="a", stream=True)
    elif api == "chat":
        stream = await clients.openai.chat.completions.create(model="tiny", messages=HELLO, stream=True)
    elif api == "response":
        stream = await clients.openai.responses.create(model="tiny", input="a", stream=True)
    else:
        stream = await clients.anthropic.messages.create(model="tiny", messages=HELLO, max_tokens=8, stream=True)
    async for _ in stream:
        break
    await stream.close()
    await until(lambda: both.proxy.orchestrator.num_requests == 0)
    await both.proxy.reaper.idle()
    assert not sum(one.held + one.num_legs for one in both.proxy.pool.instances)


async def test_the_clients_read_an_error_event_as_an_error(both: Both) -> None:
    """Whichever client: a stream that ends early raises, and is not a short answer."""
    both.decoder.num_to_break = 6
    try:
        with pytest.raises(anthropic.APIStatusError):
            async for _ in await both.proxied.anthropic.messages.create(
                model="tiny", messages=HELLO, max_tokens=8, stream=True
            ):
                pass
        with pytest.raises(openai.APIError):
            async for _ in await both.proxied.openai.responses.create(model="tiny", input="a", stream=True):
                pass
    finally:
        both.decoder.num_to_break = None
