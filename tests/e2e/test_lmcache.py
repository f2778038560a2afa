"""LMCache's prefillers and decoders behind the proxy: wire-faithful stand-ins, each a process with its own sockets.

What must hold in every case: the answer is what one engine would have said, nothing is held at the end, and no page is
left in any decoder's buffer, since LMCache itself never drops one.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pdproxy.engines import lmcache
from tests.e2e.lmcache_cluster import (
    CHUNK,
    Engine,
    Here,
    LmcacheCluster,
    is_free,
    proxy_here,
    proxy_process,
    standins,
    start_engine,
)
from tests.fakes.proxy_harness import Answer
from tests.helpers.lmcache_standin import Control
from tests.helpers.standin_words import rendered, text_of, written

PROMPT = [11, 7, 5, 3, 2, 1, 9, 13, 17]
CHAT = "/v1/chat/completions"


def said(ids: list[int], max_tokens: int) -> str:
    """What one engine would say."""
    return "".join(text_of(token) for token in written(ids, max_tokens))


def texts(answer: Answer) -> list[str]:
    return [choice.get("text", choice.get("message", {}).get("content")) for choice in answer.json()["choices"]]


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a proxy in this process."""
    monkeypatch.setattr(lmcache, "WRITING_S", 0.3)
    monkeypatch.setattr(lmcache, "READING_S", 0.1)


@asynccontextmanager
async def running(
    first_token: str = "auto", *, kv_timeout_s: float = 20.0, **options: Any
) -> AsyncIterator[tuple[Here, LmcacheCluster]]:
    """A proxy and its engines. On the way out nothing is held by either."""
    async with standins(skip=int(first_token != "decoder"), **options) as cluster:
        async with proxy_here(cluster.flags, first_token=first_token, kv_timeout_s=kv_timeout_s) as here:
            yield here, cluster
        await cluster.emptied()


# ── as a process ────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_the_proxys_own_process(tmp_path: Path) -> None:
    """By the reference proxy's flags: right answers with late and double notifications, then a decoder dies."""
    async with standins() as cluster, proxy_process(cluster.flags, tmp_path, PDPROXY_PROBE_INTERVAL_S="1") as proxy:
        body = {"model": "m", "prompt": PROMPT, "max_tokens": 6}
        for notify in ({"notify_after_s": 0.2}, {"notify": "twice", "notify_after_s": 0.0}):
            await cluster.prefiller.control(**notify)
            reply = await proxy.client.post("/v1/completions", json=body)
            assert reply.json()["choices"][0]["text"] == said(PROMPT, 6)
            assert reply.headers["x-pdproxy-path"] == "disaggregated"
        one = await proxy.client.post("/v1/completions", json=body | {"max_tokens": 1})
        assert one.json()["choices"][0]["text"] == said(PROMPT, 1)
        await cluster.emptied()
        cluster.decoder.kill()
        lost = await proxy.client.post("/v1/completions", json=body)
        assert lost.status_code in (502, 503, 504), lost.text  # 503: its end was noticed before it was asked
        assert (await cluster.prefiller.books())["closed"] == 0, "the prefiller says 200 all the same"
        assert cluster.prefiller.child.poll() is None  # pages of the dead one may stay in the ledger: nothing is proven


REFERENCE = (
    "--host localhost --port 9487 --prefiller-host localhost --prefiller-port 7100 --num-prefillers 1 "
    "--decoder-host localhost --decoder-port 7200 --decoder-init-port 7300 --decoder-alloc-port 7400 "
    "--proxy-host localhost --proxy-port 7500 --num-decoders 1"
)
"""As in LMCache's ``1p1d/disagg_example_1p1d.sh``; all lines are read in ``test_reference_command_lines.py``."""


async def test_the_reference_proxys_line_word_for_word(tmp_path: Path) -> None:
    ports = [int(word) for word in REFERENCE.split() if word.isdecimal() and len(word) == 4]
    if taken := [port for port in ports if not is_free(port)]:
        pytest.skip(f"somebody has its ports {taken}")
    prefiller = Engine(start_engine("prefiller", 7100, "--notify", "localhost:7500", chunk=256), 7100)
    options = ["--init-ports", "7300", "--alloc-ports", "7400", "--skip-last-n-tokens", "1"]
    decoder = Engine(start_engine("decoder", 7200, *options, chunk=256), 7200)
    cluster, body = LmcacheCluster([prefiller], [decoder], []), {"model": "m", "prompt": PROMPT, "max_tokens": 6}
    try:
        async with proxy_process(REFERENCE.split(), tmp_path, url="http://localhost:9487") as proxy:
            reply = await proxy.client.post("/v1/completions", json=body)
            assert reply.json()["choices"][0]["text"] == said(PROMPT, 6)
            assert reply.headers["x-pdproxy-path"] == "disaggregated"
            await cluster.emptied()
        said_at_start = proxy.log.read_text()
        assert "PYTHONHASHSEED" in said_at_start
        assert "no --pd-buffer-size: taking 2,147,483,648 bytes" in said_at_start
    finally:
        await cluster.aclose()


# ── whose first token ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("first_token", ["auto", "prefiller", "decoder"])
async def test_the_same_answer_whoever_says_the_first_word(first_token: str) -> None:
    async with running(first_token) as (here, cluster):
        before = (await cluster.decoder.books())["read_tokens"]
        for length in range(2, 2 * CHUNK + 2):
            ids = PROMPT[:length]
            whole = await here.ask(prompt=ids, max_tokens=5)
            assert texts(whole) == [said(ids, 5)]
            usage = {"prompt_tokens": length, "completion_tokens": 5, "total_tokens": length + 5}
            assert {name: num for name, num in whole.json()["usage"].items() if num is not None} == usage
            stream = await here.ask(prompt=ids, max_tokens=5, stream=True, stream_options={"include_usage": True})
            assert stream.text() == said(ids, 5)
            assert stream.events()[-2]["usage"] == usage
            await cluster.emptied()
        read = (await cluster.decoder.books())["read_tokens"] - before
        num_last = 0 if first_token == "decoder" else 2 * len(range(2, 2 * CHUNK + 2))
        assert read == num_last, "the KV of every other token came from the prefiller"


MATTERS: list[dict[str, Any]] = [{"stop": [" w82"]}, {"seed": 1, "temperature": 0.5}, {"min_tokens": 2}]


async def test_where_the_first_token_matters() -> None:
    full = said(PROMPT, 5)
    async with running("prefiller") as (here, cluster):
        for fields in MATTERS:
            answer = await here.ask(prompt=PROMPT, max_tokens=5, **fields)
            assert texts(answer) == [full.split(" w82")[0] if "stop" in fields else full]
            await cluster.emptied()


async def test_text_whose_ids_only_the_prefiller_knows() -> None:
    async with running() as (here, cluster):
        answer = await here.ask(prompt="w11 w7 w5", max_tokens=4)
        assert texts(answer) == [said([11, 7, 5], 4)]
        assert answer.json()["choices"][0]["token_ids"] is None
        await one_token_never_reaches_the_decoder(here, cluster)


async def one_token_never_reaches_the_decoder(here: Here, cluster: LmcacheCluster) -> None:
    before = (await cluster.decoder.books())["requests"]
    answer = await here.ask(prompt=PROMPT, max_tokens=1)
    assert (texts(answer), answer.headers["x-pdproxy-path"]) == ([said(PROMPT, 1)], "prefill_only")
    assert (await cluster.decoder.books())["requests"] == before


async def test_chat_stays_chat() -> None:
    messages = [{"role": "user", "content": "w4 w5 w6 w7"}]
    ids = rendered(messages)
    async with running("decoder") as (here, _):
        whole = await here.ask(CHAT, messages=messages, max_tokens=4)
        stream = await here.ask(CHAT, messages=messages, max_tokens=4, stream=True)
        assert (texts(whole), stream.text()) == ([said(ids, 4)], said(ids, 4))


async def test_a_chat_whose_ids_an_engine_tells() -> None:
    """An engine told them. The prefiller is handed them, less the last; the decoder gets all, and finds every page."""
    messages = [{"role": "user", "content": "w4 w5 w6 w7"}]
    async with standins() as cluster:
        async with proxy_here(cluster.flags) as here:
            before = await cluster.decoder.books()
            answer = await here.ask(CHAT, messages=messages, max_tokens=4)
            after = await cluster.decoder.books()
        assert texts(answer) == [said(rendered(messages), 4)]
        assert answer.json()["usage"]["prompt_tokens"] == 5
        assert (after["found_tokens"] - before["found_tokens"], after["read_tokens"] - before["read_tokens"]) == (4, 1)
        ids = {"prompt_token_ids": rendered(messages)}
        as_stream = {"stream": True, "stream_options": {"include_usage": True}}
        asked = {"model": "m", "messages": messages, "max_tokens": 4, "kv_transfer_params": ids}
        assert after["bodies"][-1] == asked | as_stream
        await cluster.emptied()


async def test_an_answer_that_ends_with_its_first_token() -> None:
    """Its KV was pushed, and is taken out again though nobody decodes."""
    ids = next(ids for last in range(200) if written(ids := [*PROMPT, last], 1) == [0])
    async with running("prefiller") as (here, _):
        answer = await here.ask(prompt=ids, max_tokens=5)
        assert (texts(answer), answer.json()["choices"][0]["finish_reason"]) == ([""], "stop")


# ── notifications ───────────────────────────────────────────────────────────────────────────────────────────────────


async def test_every_rank_has_to_notify() -> None:
    async with running(tp=2, kv_timeout_s=0.5) as (here, cluster):
        for silent in ([1], [0, 1], []):
            await cluster.prefiller.control(silent_ranks=silent)
            answer = await here.ask(prompt=PROMPT, max_tokens=5)
            if silent:
                assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")
                assert f"{2 - len(silent)} of 2 ranks have it" in answer.error["message"]
                assert here.held, "somebody may still be writing"
            else:
                assert texts(answer) == [said(PROMPT, 5)]
            await here.settled()
            await cluster.emptied()


async def test_kv_is_waited_for_until_it_is_written() -> None:
    """A page has its name long before: whoever looked for it then would find nonsense."""
    async with running() as (here, cluster):
        for slow in ({"write_s": 0.2}, {"write_s": 0.0, "notify_after_s": 0.2}, {"notify": "twice"}):
            await cluster.prefiller.control(**slow)
            assert texts(await here.ask(prompt=PROMPT, max_tokens=5)) == [said(PROMPT, 5)]


async def test_a_decoder_that_is_silent_then_dead() -> None:
    """The prefiller answers 200 all the while, and nobody is told that its KV never arrived."""
    async with standins() as cluster, proxy_here(cluster.flags, kv_timeout_s=0.8) as here:
        cluster.decoder.child.send_signal(signal.SIGSTOP)
        answer = await here.ask(prompt=PROMPT, max_tokens=5)
        assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")
        cluster.decoder.child.send_signal(signal.SIGCONT)
        await here.settled()
        await cluster.emptied()
        cluster.decoder.kill()
        answer = await here.ask(prompt=PROMPT, max_tokens=5)
        assert answer.status in (502, 503, 504), answer.body
        assert here.held > 0, "who knows what it holds: its death is not proven"
        gone = here.proxy.pool.find("decoder-0")
        assert gone is not None
        here.proxy.pool.admission.discard(gone)
        assert (await cluster.prefiller.books())["closed"] == 0


# ── several decoders ────────────────────────────────────────────────────────────────────────────────────────────────


async def test_every_decoder_has_its_own_budget() -> None:
    """Prompts of three pages, buffers of four: without a budget for each, pushes would wait for each other's pages."""
    prompts = [[number, *PROMPT] for number in range(24)]
    async with running(num_prefillers=2, num_decoders=2, num_pages=4) as (here, _):
        answers = await asyncio.gather(*(here.ask(prompt=ids, max_tokens=3) for ids in prompts))
        assert [texts(answer) for answer in answers] == [[said(ids, 3)] for ids in prompts]
        assert {answer.headers["x-pdproxy-decoder"] for answer in answers} == {"decoder-0", "decoder-1"}
        assert {answer.headers["x-pdproxy-prefiller"] for answer in answers} == {"prefiller-0", "prefiller-1"}


# ── early ends ──────────────────────────────────────────────────────────────────────────────────────────────────────

PHASES: dict[str, tuple[str, dict[str, Any]]] = {
    "before anything is pushed": ("prefiller", {"prefill_s": 30.0}),
    "while it is pushed piece by piece": ("prefiller", {"prefill_s": 30.0, "early_chunks": 1}),
    "while it is written": ("prefiller", {"write_s": 0.2}),
    "while the notification is under way": ("prefiller", {"notify_after_s": 0.2}),
    "while the decoder's queue is long": ("decoder", {"queue_s": 30.0}),
    "while the answer is streamed": ("decoder", {"token_s": 0.2}),
}
NOTHING = vars(Control())


async def test_a_client_that_leaves() -> None:
    async with running() as (here, cluster):
        for phase, (role, control) in PHASES.items():
            engine = cluster.prefiller if role == "prefiller" else cluster.decoder
            await engine.control(**control)
            await leave(here, engine, is_streaming=phase == "while the answer is streamed")
            await engine.control(**NOTHING)
            await here.settled()
            await cluster.emptied()
            assert texts(await here.ask(prompt=PROMPT, max_tokens=5)) == [said(PROMPT, 5)], phase


async def leave(here: Here, engine: Engine, *, is_streaming: bool) -> None:
    """A client does, once its request is at `engine`."""
    num_asked = (await engine.books())["requests"]
    call = here.call(prompt=PROMPT, max_tokens=5, stream=True)
    await engine.until("requests", num_asked + 1)
    if is_streaming:
        await call.first_byte.wait()
    call.leave()
    await call.done()
