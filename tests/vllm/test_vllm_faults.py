"""What goes wrong with real vLLM engines, and what the client gets, the slots and the prefiller's blocks then.

Blocks that nobody can ask for any more stay with vLLM for its lease; all others are free again at once.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import httpx
import pytest

from tests.vllm.engines import LEASE_S, MODEL, Engine, Fleet
from tests.vllm.proxy import Proxy, serving
from tests.vllm.questions import ids
from tests.vllm.relay import Relay, Stop, relayed

ENGINES = ("single", "prefill-0", "decode-0")
ALL_ENGINES = ("single", "prefill-0", "decode-0", "prefill-1", "decode-1")
AT_ONCE_S = 3.0
"""For blocks and slots that somebody gives back."""
FROZEN_S = 15.0
AFTER_LEASE_S = LEASE_S + 8.0
"""For blocks that vLLM frees by itself: its lease, and its next look at the clock."""
PROMPT = ids(random.Random(3), 700)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1000)]


@dataclass
class Pair:
    """A prefiller and a decoder of vLLM, a relay before each of them, and the proxy before both."""

    proxy: Proxy
    prefiller: Engine
    decoder: Engine
    to_prefiller: Relay
    to_decoder: Relay
    client: httpx.AsyncClient

    async def post(self, body: dict[str, Any], path: str = "/v1/completions") -> httpx.Response:
        return await self.client.post(path, json=body)

    async def all_is_free(self, within_s: float = AT_ONCE_S) -> None:
        """No slot is held, and no block taken, at both engines."""
        await self.proxy.settled(AT_ONCE_S)
        await asyncio.gather(self.prefiller.becomes_idle(within_s), self.decoder.becomes_idle(within_s))


@asynccontextmanager
async def pair(
    fleet: Fleet, *options: str, prefill: str = "prefill-0", decode: str = "decode-0"
) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        relays = [await stack.enter_async_context(relayed(fleet[name].port)) for name in (prefill, decode)]
        proxy = await stack.enter_async_context(serving(fleet, [relays[0].url], [relays[1].url], *options))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=proxy.url, timeout=60))
        yield Pair(proxy, fleet[prefill], fleet[decode], *relays, client)


def body(mark: str, **fields: Any) -> dict[str, Any]:
    """A completion whose legs a relay knows by `mark`, and whose prompt no engine has in its cache from another one."""
    prompt = [*(byte + 10 for byte in mark.encode()), *PROMPT]
    return {"model": MODEL, "prompt": prompt, "max_tokens": 8, "temperature": 0, "user": mark} | fields


def error_of(reply: httpx.Response) -> dict[str, Any]:
    """The OpenAI error object; nothing else may be in there."""
    whole = reply.json()
    assert list(whole) == ["error"]
    error: dict[str, Any] = whole["error"]
    assert {"message", "type", "code"} <= set(error)
    assert "Traceback" not in error["message"]
    return error


async def reached(stop: Stop) -> None:
    await asyncio.wait_for(stop.reached.wait(), 30)


# ── what clients send ───────────────────────────────────────────────────────────────────────────────────────────────


async def test_what_clients_may_not_say_and_what_the_engines_refuse(using: Fleet) -> None:
    async with pair(using) as two:
        plain = await two.post(body("plain"))
        evil = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 1, "remote_block_ids": [[1]]}
        served = await two.post(body("plain", kv_transfer_params=evil, bootstrap_room=1))
        assert served.status_code == 200
        assert served.json()["choices"][0]["text"] == plain.json()["choices"][0]["text"]
        assert not any(b'"remote_port":1,' in leg or b"bootstrap" in leg for leg in two.to_decoder.bodies)

        # Refused by the prefiller, and by the decoder only, which is the one to see how many tokens are wanted.
        for refused, role in ((body("a", temperature=-1), "prefill-0"), (body("b", max_tokens=99_999), "decode-0")):
            reply = await two.post(refused)
            own = await two.client.post(f"{using[role].url}/v1/completions", json=refused)
            assert (reply.status_code, reply.json()) == (400, own.json())
            await two.all_is_free()
        assert (await two.proxy.status())["fleet"][0]["breaker"]["num_faults"] == 0


async def test_a_prefiller_that_keeps_no_kv(using: Fleet, say: Callable[[str], None]) -> None:
    """Here because it was started without a connector: the decoder would read every prompt again, and nobody notice."""
    urls = [using["single"].url], [using["decode-0"].url]
    async with serving(using, *urls, "--no-canary") as proxy:
        async with httpx.AsyncClient(base_url=proxy.url, timeout=60) as client:
            reply = await client.post("/v1/completions", json=body("x"))
            legs = (await client.get("/metrics")).text
        assert reply.status_code == 502
        assert error_of(reply)["code"] == "kv_not_handed_over"
        assert 'outcome="no_handoff"' in legs
        say(f"no connector: {error_of(reply)['message']}")
        await proxy.settled(AT_ONCE_S)


# ── clients that leave ──────────────────────────────────────────────────────────────────────────────────────────────


class Asked(Protocol):
    """Engines behind a proxy, of whichever kind."""

    async def post(self, request: dict[str, Any], /) -> httpx.Response: ...


async def leave(two: Asked, request: dict[str, Any], stop: Stop) -> None:
    """The client goes when its leg has come to the stop; only then may that go on, if it is still wanted."""
    task = asyncio.create_task(two.post(request))
    await reached(stop)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.wait_for(stop.closed.wait(), AT_ONCE_S)
    stop.go.set()


async def test_clients_that_leave_in_each_phase(using: Fleet, say: Callable[[str], None]) -> None:
    async with pair(using, "--concurrent-pages", "30") as two:
        # Queued: one request has all the pages, and the next waits for them.
        stop = two.to_prefiller.stop("request", "holder")
        holder = asyncio.create_task(two.post(body("holder")))
        await reached(stop)
        waiting = asyncio.create_task(two.post(body("waiting")))
        while not (await two.proxy.status())["admission"]["prefill-0"]["num_waiting"]:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        waiting.cancel()
        while (await two.proxy.status())["admission"]["prefill-0"]["num_waiting"]:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        stop.go.set()
        assert (await holder).status_code == 200
        assert not any(b'"waiting"' in leg for leg in two.to_prefiller.bodies)
        await two.all_is_free()

        # While its prompt is on the way to the prefiller, and while the decoder has not answered.
        await leave(two, body("prefill"), two.to_prefiller.stop("request", "prefill"))
        await two.all_is_free()
        await leave(two, body("decode"), two.to_decoder.stop("reply", "decode"))
        await two.all_is_free()
        await leave(two, body("stream", stream=True), two.to_decoder.stop("reply", "stream"))
        await two.all_is_free()

        # While it is answered: for long, so that the decoder would be busy if nobody told it.
        await leave(two, body("event", stream=True, max_tokens=1200), two.to_decoder.stop("event", "event"))
        await two.all_is_free()

        # When the prefiller is done and its reply on the way: nobody knows what to give back. vLLM's lease does.
        await leave(two, body("reply"), two.to_prefiller.stop("reply", "reply"))
        await two.proxy.settled(AT_ONCE_S)
        waited = await two.prefiller.becomes_idle(AFTER_LEASE_S)
        say(f"a prefill reply that nobody read: blocks free after {waited:.1f} s")


# ── a frozen prefiller ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prefiller_that_freezes(using: Fleet, stream: bool, say: Callable[[str], None]) -> None:
    limits = ("--prefill-timeout-s", "3", "--first-byte-timeout-s", "4", "--retries", "0")
    async with pair(using, *limits, "--probe-misses", "2", "--probe-timeout-s", "1") as two:
        # Before it has read the prompt.
        two.prefiller.freeze()
        started = asyncio.get_running_loop().time()
        reply = await two.post(body("a", stream=stream))
        took = asyncio.get_running_loop().time() - started
        two.prefiller.thaw()
        assert (reply.status_code, error_of(reply)["code"]) == (504, "deadline_exceeded")
        assert took < 3 + AT_ONCE_S
        await two.all_is_free(AFTER_LEASE_S)
        await two.proxy.wait_ready()

        # When the decoder is about to pull. Where it can read the prefiller's memory as it is, it does so and answers;
        # where that takes the prefiller's help, it would wait for as long as that lasts.
        mark = f"frozen, streamed: {stream}"
        stop = two.to_decoder.stop("request", mark)
        task = asyncio.create_task(two.post(body(mark, stream=stream)))
        await reached(stop)
        two.prefiller.freeze()
        started = asyncio.get_running_loop().time()
        stop.go.set()
        reply = await task
        took = asyncio.get_running_loop().time() - started
        two.prefiller.thaw()
        assert took < 0.8 * LEASE_S + AT_ONCE_S
        say(f"frozen between the legs (stream={stream}): {reply.status_code} after {took:.1f} s: {reply.text[:200]}")
        if reply.status_code == 200:
            again = await two.post(body(mark, stream=stream))
            assert shown(reply) == shown(again)
        else:
            assert error_of(reply)["type"] in ("upstream_error", "timeout_error")
            assert reply.status_code in (502, 504)
        await two.proxy.settled(AFTER_LEASE_S)
        await two.prefiller.becomes_idle(AFTER_LEASE_S)
        await two.decoder.becomes_idle(AFTER_LEASE_S)
        await two.proxy.wait_ready()
        assert (await two.post(body("after"))).status_code == 200


async def test_the_only_prefiller_frozen_under_load_fails_no_request(using: Fleet, say: Callable[[str], None]) -> None:
    """The decoder answers alone until the prefiller goes on, also a stream whose KV it was about to pull."""
    async with pair(using, "--probe-misses", "2", "--probe-timeout-s", "1") as two:
        replies: list[httpx.Response] = []
        enough = asyncio.Event()

        async def ask(number: int) -> None:
            turn = 0
            while not enough.is_set():
                replies.append(await two.post(body(f"client {number}, turn {turn}", stream=bool(number % 2))))
                turn += 1

        async with asyncio.TaskGroup() as clients:
            for number in range(4):
                clients.create_task(ask(number))
            await asyncio.sleep(5)
            stop = two.to_decoder.stop("request", "about to be pulled")
            pulled = asyncio.create_task(two.post(body("about to be pulled", stream=True)))
            await reached(stop)
            two.prefiller.freeze()
            stop.go.set()
            await asyncio.sleep(FROZEN_S)
            two.prefiller.thaw()
            await two.proxy.wait_ready()
            replies.append(await pulled)
            num_before = len(replies)
            async with asyncio.timeout(10):
                while not any(reply.headers["x-pdproxy-path"] == "disaggregated" for reply in replies[num_before:]):
                    await two.client.get("/health")
            enough.set()
        statuses = Counter(reply.status_code for reply in replies)
        paths = Counter(reply.headers.get("x-pdproxy-path") for reply in replies)
        say(f"the only prefiller frozen for {FROZEN_S:g} s: {dict(statuses)}, {dict(paths)}")
        assert set(statuses) == {200}, [reply.text for reply in replies if reply.status_code != 200]
        assert paths["local"] > 0
        await two.all_is_free(AFTER_LEASE_S)


# ── engines that die ────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_prefiller_killed_between_the_legs(fleet: Fleet, say: Callable[[str], None]) -> None:
    """One decoder fails a request whose KV it cannot get; the other one reads the prompt itself, and nobody notices."""
    fleet.use("single", "prefill-0", "decode-0", "decode-1")
    options = ("--retries", "0")
    async with pair(fleet, *options) as failing, pair(fleet, *options, decode="decode-1") as computing:
        alone = f"{fleet['single'].url}/v1/completions"
        singles = [shown(await failing.client.post(alone, json=body(f"{stream}x"))) for stream in (False, True)]
        stops, tasks = [], []
        for two in (failing, computing):
            for stream in (False, True):
                stops.append(two.to_decoder.stop("request", f"{stream}x"))
                tasks.append(asyncio.create_task(two.post(body(f"{stream}x", stream=stream))))
                await reached(stops[-1])
        fleet["prefill-0"].kill()
        for stop in stops:
            stop.go.set()
        replies = await asyncio.gather(*tasks)
        for reply in replies[:2]:
            assert reply.status_code == 502, reply.text
            say(f"killed between the legs, policy fail: {reply.status_code} {error_of(reply)['message']}")
        assert [reply.status_code for reply in replies[2:]] == [200, 200]
        assert [shown(reply) for reply in replies[2:]] == singles
        for two in (failing, computing):
            await two.proxy.settled(AT_ONCE_S)
            await two.decoder.becomes_idle(AFTER_LEASE_S)
    fleet.start("prefill-0")


async def test_decoders_killed_before_and_after_the_first_byte(fleet: Fleet, say: Callable[[str], None]) -> None:
    fleet.use("prefill-1", "decode-0", "decode-1")
    options = ("--retries", "0")
    names: dict[str, Any] = {"prefill": "prefill-1"}
    async with pair(fleet, *options, **names) as early, pair(fleet, *options, **names, decode="decode-1") as late:
        # The one that takes longer to get where it is to be comes first: the others are not to wait for it there.
        after = late.to_decoder.stop("event", "after")
        streaming = asyncio.create_task(late.post(body("after", stream=True, max_tokens=500)))
        await reached(after)
        before = [early.to_decoder.stop("request", f"{stream}b") for stream in (False, True)]
        tasks = [asyncio.create_task(early.post(body(f"{stream}b", stream=stream))) for stream in (False, True)]
        await asyncio.gather(*(reached(stop) for stop in before))
        tasks.append(streaming)
        fleet["decode-0"].kill()
        fleet["decode-1"].kill()
        for stop in (*before, after):
            stop.go.set()
        *firsts, streamed = await asyncio.gather(*tasks)
        for reply in firsts:
            assert reply.status_code in (502, 503), reply.text
            say(f"decoder killed before its first byte: {reply.status_code} {error_of(reply)['message']}")
        assert streamed.status_code == 200
        last = [line for line in streamed.text.splitlines() if line.startswith("data: ")][-1]
        assert list(json.loads(last.removeprefix("data: "))) == ["error"]
        say(f"decoder killed after its first byte: {last}")
        # Nobody is left who could tell the prefiller: its lease does, and the slots are not given back before that.
        waited = await late.prefiller.becomes_idle(AFTER_LEASE_S)
        say(f"blocks for a decoder that died: free after {waited:.1f} s")
        for two in (early, late):
            await two.proxy.settled(AFTER_LEASE_S)
    fleet.start("decode-0", "decode-1")


def shown(reply: httpx.Response) -> str:
    """The text of an answer, streamed or not."""
    if "text/event-stream" in reply.headers["content-type"]:
        return text_of(reply.text)
    text: str = reply.json()["choices"][0]["text"]
    return text


def text_of(events: str) -> str:
    chunks = [line.removeprefix("data: ") for line in events.splitlines() if line.startswith("data: {")]
    return "".join(choice["text"] for chunk in chunks for choice in json.loads(chunk)["choices"])
