"""What clients send, and what they do not take, is counted from its first byte to its last, and has an end."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from pdproxy.openai.request import GenerationRequest
from pdproxy.orchestrator.context import Client
from tests.fakes.both_loops import on_both_loops
from tests.fakes.front_door import Answer, FrontDoor, RawClient, echo, front_door, make_door, post, stream_echo, wired
from tests.fakes.proxy_harness import LIMIT_S, until

KIB = 1024
BODY_BYTES = 100 * KIB
OPTIONS: dict[str, Any] = {"max_body_bytes": 1 << 20, "memory_budget": 800 * KIB}
"""There is room for three bodies of `BODY_BYTES`, which count twice, and for an eighth of it in small ones."""


def head(num_bytes: int, *more: str) -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", "host: proxy", f"content-length: {num_bytes}", *more, "", ""]
    return "\r\n".join(lines).encode()


def body(num_bytes: int = BODY_BYTES) -> bytes:
    return b'{"prompt":"%b"}' % (b"x" * (num_bytes - 13))


def is_refused(answer: Answer) -> bool:
    error = msgspec.json.decode(answer.body).get("error", {}) if answer.status == 503 else {}
    if error:
        assert error["code"] == "memory_budget_spent"
        assert "--memory-budget" in error["message"]
        assert answer.headers["retry-after"] == "1"
    return bool(error)


async def holders(door: FrontDoor, num: int = 3) -> list[RawClient]:
    """Clients that have sent all of a body but its last byte."""
    clients = [await door.connect() for _ in range(num)]
    for client in clients:
        client.send(head(BODY_BYTES) + body()[:-1])
    await until(lambda: door.memory.num_bytes == 2 * num * BODY_BYTES)
    return clients


@on_both_loops
async def test_a_body_whose_length_is_told_is_refused_before_it_is_read() -> None:
    async with front_door(**OPTIONS) as door:
        held = await holders(door)
        client = await door.connect()
        client.send(head(BODY_BYTES, "expect: 100-continue"))
        assert is_refused(await client.answer())
        assert door.memory.num_refused == 1
        held[0].send(b"}")
        assert (await held[0].answer()).status == 200
        client = await door.connect()
        client.send(head(BODY_BYTES) + body())
        assert (await client.answer()).status == 200, "what is over has made room"


@on_both_loops
async def test_a_body_in_chunks_is_refused_when_there_is_no_more_room() -> None:
    async with front_door(**OPTIONS) as door:
        await holders(door)
        client = await door.connect()
        client.send(b"POST /v1/completions HTTP/1.1\r\nhost: proxy\r\ntransfer-encoding: chunked\r\n\r\n")
        answering = asyncio.create_task(client.answer())
        num_sent = 0
        while not answering.done():
            client.send(b"%x\r\n%b\r\n" % (8 * KIB, b"x" * 8 * KIB))
            num_sent += 1
            await asyncio.sleep(0.001)
        assert is_refused(await answering)
        assert num_sent > 2, "there was room for some of it"
        assert door.memory.num_bytes == 6 * BODY_BYTES


@on_both_loops
async def test_small_requests_are_served_beside_large_ones() -> None:
    async with front_door(**OPTIONS) as door:
        await holders(door)
        for _ in range(20):
            client = await door.connect()
            client.send(post("hello"))
            assert (await client.answer()).body == b"hello"


async def test_tiny_chunks_make_one_block() -> None:
    door = make_door(max_body_bytes=1 << 20)
    connection, wire = wired(door)
    connection.data_received(b"POST /v1/completions HTTP/1.1\r\nhost: proxy\r\ntransfer-encoding: chunked\r\n\r\n")
    for _ in range(100):
        connection.data_received(b"2\r\n  \r\n" * 100)
    exchange: Any = connection.cycle
    assert not exchange._body
    assert isinstance(exchange._parts, bytearray)
    assert len(exchange._parts) == 20_000
    assert door.memory.num_bytes == 40_000
    connection.data_received(b'10\r\n{"prompt":"end"}\r\n0\r\n\r\n')
    await until(lambda: bool(wire.written))
    assert wire.written[0].endswith(b"\r\n\r\nend")
    assert not door.memory.num_bytes


async def test_a_client_that_leaves_before_its_task_has_begun() -> None:
    door = make_door(max_body_bytes=1 << 20)
    connection, _ = wired(door)
    connection.data_received(head(BODY_BYTES) + body())
    assert door.memory.num_bytes == 2 * BODY_BYTES
    connection.connection_lost(None)
    assert not door.memory.num_bytes
    await until(lambda: door.outcomes == ["client_gone"])


@pytest.mark.parametrize("is_served", [True, False])
async def test_a_body_counts_while_its_request_waits_in_the_pipeline(is_served: bool) -> None:
    door = make_door(max_body_bytes=1 << 20)
    gate = door.hold()
    connection, wire = wired(door)
    prompt = "x" * (200 * KIB)
    connection.data_received(post("first") + post(prompt))
    await until(lambda: door.prompts == ["first"])
    assert door.memory.num_bytes > 200 * KIB
    if is_served:
        gate.set()
        await until(lambda: len(wire.written) == 2)
        assert wire.written[1].endswith(prompt.encode())
        await until(lambda: not door.state.tasks)
    connection.connection_lost(None)
    await until(lambda: not door.state.tasks)
    assert not door.memory.num_bytes


@on_both_loops
async def test_what_a_client_has_not_taken_counts_until_it_is_let_go() -> None:
    async def play(request: GenerationRequest, client: Client) -> None:
        await asyncio.sleep(0.15)  # longer than a connection may rest
        await client.answer(200, [], b"y" * (20 << 20))

    async with front_door(keep_alive_s=0.1, **OPTIONS) as door:
        door.play = play
        for more in ((), ("connection: close",)):
            client = await door.connect()
            client.send(post("hi", *more))
            await until(lambda: door.memory.num_bytes > 4 << 20)
            assert not door.state.tasks, "its exchange is over"
            await door.is_empty()
            assert not door.memory.num_bytes


async def test_a_client_that_takes_its_time_gets_everything() -> None:
    async def play(request: GenerationRequest, client: Client) -> None:
        await client.answer(200, [], b"y" * (48 << 20))

    async with front_door(keep_alive_s=0.3, **OPTIONS) as door:
        door.play = play
        client = await door.connect()
        client.send(post("hi"))
        _, headers = await client.head()
        num_left = int(headers["content-length"])
        while num_left:
            num_left -= len(await client.read(min(num_left, 4 << 20)))
            await asyncio.sleep(0.05)


# ── whatever happens ────────────────────────────────────────────────────────────────────────────────────────────────


class Moods:
    """What becomes of a request that was read, by chance: an answer at once, a stream, a bug, a long wait."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice

    async def __call__(self, request: GenerationRequest, client: Client) -> None:
        for _ in range(self._dice.randrange(4)):
            await asyncio.sleep(0)
        mood = self._dice.randrange(5)
        if mood == 0:
            raise RuntimeError("a bug, as planned")
        if mood == 1:
            await asyncio.sleep(0.02)
        if mood == 2:
            client.memory.charge(self._dice.randrange(200 * KIB))
        if mood == 3 and client.memory.take(50 * KIB):
            client.memory.give_back(20 * KIB)
        await (stream_echo if mood == 4 else echo)(request, client)


async def ask(door: FrontDoor, dice: random.Random) -> int:
    """Sends a request as a client might, in pieces or not, to its end or not. Returns the status, or 0."""
    client = await door.connect()
    num_bytes = dice.choice((100, 5 * KIB, BODY_BYTES, 300 * KIB, 2 << 20))
    is_chunked, is_whole = dice.random() < 0.4, dice.random() < 0.7
    chunked = b"POST /v1/completions HTTP/1.1\r\nhost: proxy\r\ntransfer-encoding: chunked\r\n\r\n"
    client.send(chunked if is_chunked else head(num_bytes))
    sent = body(num_bytes)[: num_bytes if is_whole else dice.randrange(num_bytes)]
    while sent:
        size = dice.randint(1, len(sent))
        piece, sent = sent[:size], sent[size:]
        client.send(b"%x\r\n%b\r\n" % (size, piece) if is_chunked else piece)
        if dice.random() < 0.5:
            await asyncio.sleep(0.001)
    if is_chunked and is_whole:
        client.send(b"0\r\n\r\n")
    if dice.random() < 0.3:
        for _ in range(dice.randrange(20)):
            await asyncio.sleep(0)
        client.leave()
    status = 0
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        status = (await client.answer()).status
    client.leave()
    return status


@pytest.mark.parametrize("seed", range(3))
async def test_what_was_granted_is_always_given_back(seed: int) -> None:
    """Leaving the door checks that nothing is left of the budget, of tasks and of connections."""
    dice = random.Random(seed)
    print(f"seed {seed}")
    async with front_door(**{**OPTIONS, "body_timeout_s": 0.1}) as door:
        door.play = Moods(dice)
        async with asyncio.timeout(4 * LIMIT_S):
            statuses = await asyncio.gather(*(ask(door, dice) for _ in range(80)))
        assert {0, 200, 400, 408, 413, 500, 503} >= set(statuses)
        assert 503 in statuses, "the budget was never short: it proves little"
