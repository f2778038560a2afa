"""A client's connection over real sockets, on both event loops: what a client can do to it, and what it gets."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from pdproxy.openai.request import COMPLETIONS, GenerationRequest
from pdproxy.orchestrator.context import Client
from pdproxy.server.connection import ClientConnection
from tests.fakes.both_loops import on_both_loops
from tests.fakes.front_door import FrontDoor, Play, echo, front_door, post, stream_echo
from tests.fakes.proxy_harness import until
from transfer import bounded_connection

PIECE = b"x" * 65536


class Stage:
    """A play that stops at one named point. Mutable state: whether it got there."""

    def __init__(self, point: str) -> None:
        self._point = point
        self.reached = asyncio.Event()

    async def __call__(self, request: GenerationRequest, client: Client) -> None:
        await self._at("prefill")
        await client.start(200, [(b"content-type", b"text/event-stream")])
        await self._at("head")
        await client.send(b"data: 1\n\n")
        await self._at("first")
        while self._point == "full":
            await client.send(PIECE)
            if client.outlet is not None and client.outlet.is_full:
                self.reached.set()
        await client.end()

    async def _at(self, point: str) -> None:
        if point == self._point:
            self.reached.set()
            await asyncio.Event().wait()


def names(door: FrontDoor) -> list[str]:
    return [repr(connection.cycle) for connection in door.state.connections]  # type: ignore[union-attr]


# ── requests ────────────────────────────────────────────────────────────────────────────────────────────────────────


@on_both_loops
async def test_many_requests_on_one_connection() -> None:
    async with front_door() as door:
        client = await door.connect()
        for i in range(20):
            door.play = stream_echo if i % 2 else echo
            client.send(post(f"no.{i}", f"x-request-id: id-{i}"))
            answer = await client.answer()
            assert (answer.status, answer.body) == (200, f"no.{i}".encode())
        assert [record.request_id for record in door.finished] == [f"id-{i}" for i in range(20)]
        assert door.state.total_requests == 20


@on_both_loops
async def test_many_connections_at_once() -> None:
    async with front_door() as door:
        door.play = stream_echo
        clients = [await door.connect() for _ in range(50)]
        for i, client in enumerate(clients):
            client.send(post(f"no.{i}"))
        answers = await asyncio.gather(*(client.answer() for client in clients))
        assert [answer.body for answer in answers] == [f"no.{i}".encode() for i in range(50)]


@on_both_loops
async def test_a_large_body() -> None:
    async with front_door(max_body_bytes=3 << 20) as door:
        client = await door.connect()
        prompt = "long " * (1 << 19)
        client.send(post(prompt))
        assert (await client.answer()).body == prompt.encode()


def in_chunks(body: bytes, size: int, path: str = COMPLETIONS) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: proxy\r\ntransfer-encoding: chunked\r\n\r\n".encode()
    pieces = (body[start : start + size] for start in range(0, len(body), size))
    return head + b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


async def answer_by_turn(
    door: FrontDoor, request: bytes, measure: Callable[[bytes], int], monkeypatch: pytest.MonkeyPatch
) -> tuple[bytes, Counter[int]]:
    """Sends a request on a connection of its own. The answer's body, and the sum of what the pieces of the request's
    body measure, by the turn of the loop in which the parser told them."""
    turn, by_turn = 0, Counter[int]()
    on_body = ClientConnection.on_body

    def count(self: ClientConnection, body: bytes) -> None:
        by_turn[turn] += measure(body)
        on_body(self, body)

    def next_turn() -> None:
        nonlocal turn
        turn += 1
        if not door.finished:
            asyncio.get_running_loop().call_soon(next_turn)

    monkeypatch.setattr(ClientConnection, "on_body", count)
    client = await door.connect()
    client.send(request)
    next_turn()
    return (await client.answer()).body, by_turn


@on_both_loops
async def test_a_body_in_crumbs_has_its_turns_as_others_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read of 250 KiB has 40,000 chunks of a byte, and as many calls of the parser."""
    monkeypatch.setattr(bounded_connection, "TURN_S", 0.0)
    async with front_door(max_body_bytes=1 << 20) as door:
        prompt = b"crumbs" * 50_000
        crumbs = in_chunks(b'{"prompt":"%b"}' % prompt, 1)
        answer, by_turn = await answer_by_turn(door, crumbs, lambda body: 1, monkeypatch)
    assert answer == prompt
    # A turn reads after it has done what is due: the rest of what was read before, and the first of what is new.
    assert max(by_turn.values()) <= 2 * bounded_connection.SLICE_BYTES / len(b"1\r\nx\r\n")


@on_both_loops
async def test_one_large_read_is_a_turns_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """However little it costs. uvloop would go on reading in the same turn, as long as there is more."""
    monkeypatch.setattr(bounded_connection, "TURN_S", 60.0)
    async with front_door(max_body_bytes=16 << 20) as door:
        prompt = "large!" * (1 << 20)
        answer, by_turn = await answer_by_turn(door, post(prompt), len, monkeypatch)
    assert answer == prompt.encode()
    assert sum(by_turn.values()) > len(prompt)
    assert max(by_turn.values()) <= 256 * 1024


@on_both_loops
async def test_nothing_of_what_was_read_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that rests has nothing of its last request, whose body was one read."""
    monkeypatch.setattr(bounded_connection, "TURN_S", 0.0)
    async with front_door(max_body_bytes=1 << 20) as door:
        client = await door.connect()
        for prompt in ("x" * 50_000, "y" * 200_000):
            client.send(post(prompt))
            assert (await client.answer()).body == prompt.encode()
            (connection,) = door.state.connections
            assert not connection._unparsed.obj  # type: ignore[union-attr]


@on_both_loops
async def test_what_follows_an_upgrade_is_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where a slice begins like one."""
    monkeypatch.setattr(bounded_connection, "TURN_S", 0.0)
    async with front_door() as door:
        client = await door.connect()
        head = b"GET /elsewhere HTTP/1.1\r\nhost: proxy\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"
        filler = bytes(bounded_connection.SLICE_BYTES - len(head))
        client.send(head + filler + post("smuggled"))
        assert (await client.answer()).body == b"GET proxy/elsewhere"
        await asyncio.sleep(0.05)
        assert door.prompts == []
        client.leave()


@on_both_loops
async def test_a_bug_in_a_later_slice_costs_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_connection, "TURN_S", 0.0)
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))

    parse, num_slices = ClientConnection._parse, 0

    def meet_a_bug(self: ClientConnection, data: bytes) -> None:
        nonlocal num_slices
        num_slices += 1
        if num_slices == 2:
            raise ZeroDivisionError("a bug")
        parse(self, data)

    monkeypatch.setattr(ClientConnection, "_parse", meet_a_bug)
    async with front_door(max_body_bytes=1 << 20) as door:
        client = await door.connect()
        client.send(post("x" * 50_000))
        await until(lambda: num_slices == 2)
        await door.is_empty()
    assert [str(context["exception"]) for context in told] == ["a bug"]


@on_both_loops
async def test_shutdown_serves_what_was_read_and_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_connection, "TURN_S", 0.0)
    read = ClientConnection.data_received

    def read_and_shut_down(self: ClientConnection, data: bytes) -> None:
        read(self, data)
        if self._unparsed and len(data) > len(prompt):
            self.shutdown()

    monkeypatch.setattr(ClientConnection, "data_received", read_and_shut_down)
    async with front_door(max_body_bytes=1 << 20) as door:
        client = await door.connect()
        prompt = "x" * 30_000  # one read
        client.send(post(prompt))
        assert (await client.answer()).body == prompt.encode()
        await door.is_empty()


@pytest.mark.parametrize("seed", range(5))
@on_both_loops
async def test_requests_are_answered_in_turn_however_they_are_read(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """In slices that end anywhere, some of them in later turns, while earlier requests are served or are not."""
    dice = random.Random(seed)
    monkeypatch.setattr(bounded_connection, "SLICE_BYTES", dice.choice([1, 7, 50]))
    monkeypatch.setattr(bounded_connection, "LARGE_READ_BYTES", dice.choice([1, 100, 1 << 20]))
    monkeypatch.setattr(bounded_connection, "TURN_S", dice.choice([0.0, 1e-5, 60.0]))
    monkeypatch.setattr(bounded_connection, "MAX_PIPELINED", 300)  # all that was sent may be read in one go
    async with front_door() as door:

        async def play(request: GenerationRequest, client: Client) -> None:
            for _ in range(dice.choice([0, 0, 1, 20, 200])):
                await asyncio.sleep(0)
            await dice.choice([echo, stream_echo])(request, client)

        door.play = play
        client = await door.connect()
        expected: list[bytes] = []
        said = b""
        for number in range(300):
            body = f"{number}".ljust(dice.choice([3, 20, 300]), "x").encode()
            match dice.randrange(4):
                case 0:
                    said += post(body.decode())
                case 1:
                    said += in_chunks(b'{"prompt":"%b"}' % body, dice.choice([1, 10, 1000]))
                case 2:
                    said += in_chunks(b'{"prompt":"%b"}' % body, dice.choice([1, 10, 1000]), path="/elsewhere")
                    body = b"POST proxy/elsewhere"
                case _:
                    said += b"GET /elsewhere HTTP/1.1\r\nhost: proxy\r\n\r\n"
                    body = b"GET proxy/elsewhere"
            expected.append(body)
        while said:
            size = dice.choice([1, 30, 500, 2000])
            client.send(said[:size])
            said = said[size:]
            await asyncio.sleep(dice.choice([0, 0, 0.001]))
        assert [(await client.answer()).body for _ in expected] == expected


@on_both_loops
async def test_pipelined_requests_are_answered_in_turn() -> None:
    async with front_door() as door:
        slow = asyncio.Event()

        async def play(request: GenerationRequest, client: Client) -> None:
            if request.prompt_text == "slow":
                await slow.wait()
            await stream_echo(request, client)

        door.play = play
        client = await door.connect()
        client.send(post("slow") + post("fast"))
        await until(lambda: door.prompts == ["slow"])
        slow.set()
        assert [(await client.answer()).body for _ in range(2)] == [b"slow", b"fast"]


@on_both_loops
async def test_a_pipelined_client_that_leaves() -> None:
    async with front_door() as door:
        door.play = stage = Stage("first")
        client = await door.connect()
        client.send(post("a"))
        await stage.reached.wait()
        client.leave()
        await door.ended()
        assert door.outcomes == ["client_gone"]


@on_both_loops
async def test_http_1_0_knows_no_chunks() -> None:
    async with front_door() as door:
        outlets: list[Any] = []

        async def play(request: GenerationRequest, client: Client) -> None:
            await client.start(200, [])
            outlets.append(client.outlet)
            await client.send(b"one ")
            await client.send(b"two")
            await client.end()

        for more in ((), ("connection: keep-alive",)):
            door.play = play
            client = await door.connect()
            client.send(post("hi", *more, version="1.0"))
            answer = await client.answer()
            assert answer.body == b"one two"
            assert answer.headers["connection"] == "close"
            assert "transfer-encoding" not in answer.headers
            door.play = echo
            client = await door.connect()
            client.send(post("hi", *more, version="1.0"))
            assert (await client.answer()).body == b"hi"
            assert await client.rest() == b""
        assert outlets == [None, None]


@on_both_loops
async def test_connection_close() -> None:
    async with front_door() as door:
        for door.play in (echo, stream_echo):
            client = await door.connect()
            client.send(post("hi", "connection: close"))
            answer = await client.answer()
            assert (answer.body, answer.headers["connection"]) == (b"hi", "close")
            assert await client.rest() == b""


# ── what is refused ─────────────────────────────────────────────────────────────────────────────────────────────────


@on_both_loops
async def test_a_connection_goes_on_after_what_was_refused() -> None:
    async with front_door(keys=("secret",)) as door:
        client = await door.connect()
        key = "x-api-key: secret"
        large = b"POST /v1/completions HTTP/1.1\r\nx-api-key: secret\r\ncontent-length: 2000\r\n\r\n" + b"x" * 2000
        broken = b"POST /v1/completions HTTP/1.1\r\nx-api-key: secret\r\ncontent-length: 3\r\n\r\n{]}"
        for request, status in ((post("hi"), 401), (large, 413), (broken, 400), (post("hi", key), 200)):
            client.send(request)
            answer = await client.answer()
            assert answer.status == status
            if status != 200:
                assert answer.headers["x-request-id"].startswith("req-")
                assert set(json.loads(answer.body)["error"]) == {"message", "type", "param", "code"}
        assert door.outcomes == ["refused", "refused", "refused", "done"]


@on_both_loops
async def test_a_body_that_says_that_it_is_too_large_is_not_waited_for() -> None:
    async with front_door(max_body_bytes=1000) as door:
        client = await door.connect()
        client.send(b"POST /v1/completions HTTP/1.1\r\ncontent-length: 1001\r\n\r\n")
        assert (await client.answer()).status == 413
        client.send(b"x" * 1001 + post("next"))
        assert (await client.answer()).body == b"next"
        assert door.prompts == ["next"]


@on_both_loops
async def test_a_body_that_becomes_too_large() -> None:
    async with front_door(max_body_bytes=1000) as door:
        client = await door.connect()
        client.send(b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n")
        client.send(b"400\r\n" + b"x" * 1024 + b"\r\n")
        assert (await client.answer()).status == 413
        client.send(b"400\r\n" + b"x" * 1024 + b"\r\n0\r\n\r\n" + post("next"))
        assert (await client.answer()).body == b"next"


@on_both_loops
async def test_a_body_that_is_too_slow() -> None:
    async with front_door(body_timeout_s=0.05) as door:
        client = await door.connect()
        client.send(post("slow")[:-1])
        answer = await client.answer()
        assert (answer.status, json.loads(answer.body)["error"]["code"]) == (408, "body_timeout")
        client.send(b"}" + post("next"))
        assert (await client.answer()).body == b"next"
        slow = post("slow", "expect: 100-continue")
        client.send(slow[:-1])
        assert await client.head() == (100, {})
        assert (await client.answer()).headers.get("connection") is None, "it was told to go on"
        client.send(slow[-1:] + post("next"))
        assert (await client.answer()).body == b"next"
        assert door.outcomes == ["refused", "done"] * 2


@on_both_loops
async def test_a_client_that_waits_to_be_told_to_go_on() -> None:
    async with front_door() as door:
        client = await door.connect()
        for _ in range(2):
            whole = post("hi", "expect: 100-continue")
            client.send(whole[:-15])
            assert await client.head() == (100, {})
            client.send(whole[-15:])
            assert (await client.answer()).body == b"hi"
        client.send(whole)  # it has not waited: there is nothing to tell it
        assert (await client.answer()).body == b"hi"
        assert door.outcomes == ["done"] * 3


@on_both_loops
async def test_a_client_that_waits_in_vain_is_not_heard_any_more() -> None:
    """It may send the body all the same, or the next request: nobody can know."""
    async with front_door(keys=("secret",)) as door:
        client = await door.connect()
        client.send(b"POST /v1/completions HTTP/1.1\r\ncontent-length: 99\r\nexpect: 100-continue\r\n\r\n")
        answer = await client.answer()
        assert (answer.status, answer.headers["connection"]) == (401, "close")
        assert await client.rest() == b""


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}x",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nbad header: 1\r\n\r\n",
    ],
)
@on_both_loops
async def test_what_is_not_http(garbage: bytes) -> None:
    async with front_door() as door:
        client = await door.connect()
        client.send(garbage)
        answer = await client.answer()
        assert (answer.status, answer.headers["connection"]) == (400, "close")
        assert await client.rest() == b""
        assert door.prompts == []


def coded(codings: str, *, path: str = "/v1/completions", body: bytes = b'{"prompt":"in"}') -> bytes:
    """A chunked request with that value, or those values, of ``transfer-encoding``."""
    lines = "".join(f"transfer-encoding: {coding}\r\n" for coding in codings.split("|"))
    return f"POST {path} HTTP/1.1\r\nhost: p\r\n{lines}\r\n".encode() + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


@pytest.mark.parametrize("path", ["/v1/completions", "/admin/instances"])
@pytest.mark.parametrize(
    "codings", ["gzip, chunked", "GZIP,Chunked", "gzip|chunked", "identity, chunked", "x;q=1, chunked"]
)
@on_both_loops
async def test_a_body_that_is_coded_besides_being_chunked(codings: str, path: str) -> None:
    async with front_door() as door:
        client = await door.connect()
        client.send(coded(codings, path=path) + post("smuggled"))
        answer = await client.answer()
        assert (answer.status, answer.headers["connection"]) == (501, "close")
        assert json.loads(answer.body)["error"]["code"] == "unsupported_transfer_encoding"
        assert await client.rest() == b""
        assert door.prompts == []


@on_both_loops
async def test_a_coded_body_that_comes_after_the_answer_does_not_reset_the_connection() -> None:
    async with front_door() as door:
        client = await door.connect()
        client.send(b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: gzip, chunked\r\n\r\n")
        await until(lambda: bool(door.state.tasks))
        for _ in range(5):
            client.send(b"10000\r\n" + PIECE + b"\r\n")
        client.send(b"0\r\n\r\n")
        assert (await client.answer()).status == 501
        assert await client.rest() == b""


@on_both_loops
async def test_a_coded_body_without_end_is_not_read_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdproxy.server.codings.LINGER_S", 0.05)
    async with front_door() as door:
        client = await door.connect()
        client.send(b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: gzip, chunked\r\n\r\n")
        assert (await client.answer()).status == 501
        assert await client.rest() == b""


@on_both_loops
async def test_a_coded_body_is_refused_when_it_is_its_turn() -> None:
    async with front_door() as door:
        door.play = stream_echo
        client = await door.connect()
        client.send(post("first") + coded("gzip, chunked") + post("third"))
        assert (await client.answer()).body == b"first"
        assert (await client.answer()).status == 501
        assert await client.rest() == b""
        assert door.prompts == ["first"]


@pytest.mark.parametrize("codings", ["chunked", "Chunked", " chunked ", ", chunked"])
@on_both_loops
async def test_a_body_that_is_only_chunked(codings: str) -> None:
    async with front_door() as door:
        client = await door.connect()
        client.send(coded(codings))
        assert (await client.answer()).body == b"in"


@pytest.mark.parametrize("codings", ["gzip", "chunked, gzip", "chunked, chunked", "chunked|gzip", "xchunked"])
@on_both_loops
async def test_a_body_whose_end_cannot_be_found(codings: str) -> None:
    async with front_door() as door:
        client = await door.connect()
        client.send(coded(codings) + post("smuggled"))
        answer = await client.answer()
        assert (answer.status, answer.headers["connection"]) == (400, "close")
        assert await client.rest() == b""
        assert door.prompts == []


@on_both_loops
async def test_garbage_behind_a_request_cuts_its_answer_off() -> None:
    """It must not look like a part of it."""
    async with front_door() as door:
        door.play = stage = Stage("first")
        client = await door.connect()
        client.send(post())
        await stage.reached.wait()
        client.send(b"garbage\r\n\r\n")
        said = await client.rest()
        assert said.endswith(b"\r\n\r\n9\r\ndata: 1\n\n\r\n")
        await door.ended()
        assert door.outcomes == ["client_gone"]


# ── clients that leave, and that do not listen ──────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("way", ["leave", "half_close"])
@pytest.mark.parametrize("point", ["prefill", "head", "first"])
@on_both_loops
async def test_gone_while_it_is_served(point: str, way: str) -> None:
    """A half-closed connection is one whose client has gone, as it always was."""
    async with front_door() as door:
        door.play = stage = Stage(point)
        client = await door.connect()
        client.send(post())
        await stage.reached.wait()
        getattr(client, way)()
        await door.ended()
        assert door.outcomes == ["client_gone"]


@pytest.mark.parametrize("play", [echo, stream_echo])
@on_both_loops
async def test_who_stops_sending_with_the_request_gets_the_answer(play: Play) -> None:
    """Many at once, whose answers go out in a row: the loop closes a connection where it sees that no more comes."""
    async with front_door() as door:
        door.play = play
        for _ in range(2):  # in the first round it is learnt that there are many
            clients = [await door.connect() for _ in range(40)]
            for client in clients:
                client.send(post())
                client.half_close()
            answers = await asyncio.gather(*(client.rest() for client in clients))
            assert sum(b"hi" in answer for answer in answers) == 40
        await door.ended()


@pytest.mark.parametrize("play", [echo, stream_echo])
@on_both_loops
async def test_who_stops_sending_with_a_large_request_gets_the_answer(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end is there before the request is parsed, slice by slice."""
    monkeypatch.setattr(bounded_connection, "TURN_S", 0.0)
    async with front_door(max_body_bytes=1 << 20) as door:
        door.play = play
        for size, num_bytes in [(1, 5_000), (1, 20_000), (1000, 30_000), (1000, 150_000)]:
            client = await door.connect()
            client.send(in_chunks(b'{"prompt":"%b"}' % (b"x" * num_bytes), size))
            client.half_close()
            assert b"x" * num_bytes in await client.rest()


@pytest.mark.parametrize("way", ["leave", "half_close"])
@pytest.mark.parametrize("waiting", [post("b"), b"GET /ready HTTP/1.1\r\nhost: proxy\r\n\r\n"])
@on_both_loops
async def test_gone_while_another_request_waits_in_the_pipeline(
    waiting: bytes, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is read then, not even the end, and nothing is written."""
    monkeypatch.setattr("pdproxy.server.connection.LOOK_S", 0.05)
    async with front_door() as door:
        door.play = stage = Stage("prefill")
        client = await door.connect()
        client.send(post("a") + waiting)
        await stage.reached.wait()
        await asyncio.sleep(0.12)
        assert len(door.state.connections) == 1, "who is there stays"
        getattr(client, way)()
        await door.ended()
        assert door.outcomes == ["client_gone"]
        await door.is_empty()


@on_both_loops
async def test_gone_while_full() -> None:
    async with front_door() as door:
        door.play = stage = Stage("full")
        client = await door.connect()
        client.send(post())
        await stage.reached.wait()
        client.leave()
        await door.ended()
        assert door.outcomes == ["client_gone"]


@on_both_loops
async def test_gone_before_the_body_is_there() -> None:
    async with front_door() as door:
        client = await door.connect()
        client.send(post()[:-1])
        await until(lambda: names(door) == ["<Exchange received, 14 bytes of body>"])
        client.leave()
        await door.is_empty()
        assert (door.outcomes, door.prompts) == (["client_gone"], [])


@on_both_loops
async def test_gone_at_the_end() -> None:
    """As soon as it has read the last byte."""
    async with front_door() as door:
        for _ in range(20):
            door.play = stream_echo
            client = await door.connect()
            client.send(post())
            await client.answer()
            client.leave()
        await door.ended(20)
        assert set(door.outcomes) == {"done"}


@on_both_loops
async def test_a_client_that_reads_slowly_gets_it_all() -> None:
    async with front_door() as door:
        is_full = asyncio.Event()

        async def play(request: GenerationRequest, client: Client) -> None:
            await client.start(200, [])
            for _ in range(200):
                assert client.outlet is not None
                if client.outlet.is_full:
                    is_full.set()
                await client.send(PIECE)
            await client.end()

        door.play = play
        client = await door.connect()
        client.send(post())
        await is_full.wait()
        assert (await client.answer()).body == PIECE * 200
        assert door.outcomes == ["done"]


@on_both_loops
async def test_pieces_put_on_the_connection_when_there_is_room() -> None:
    """Past waiting: the one who writes is called back."""
    async with front_door() as door:
        num_waits = 0

        async def play(request: GenerationRequest, client: Client) -> None:
            nonlocal num_waits
            await client.start(200, [])
            outlet, room = client.outlet, asyncio.Event()
            assert outlet is not None
            for _ in range(200):
                outlet.write(PIECE)
                if outlet.is_full:
                    room.clear()
                    num_waits += 1
                    outlet.on_room(room.set)
                    await room.wait()
                    outlet.on_room(None)
            await client.end()

        door.play = play
        client = await door.connect()
        client.send(post())
        await until(lambda: num_waits > 0)
        assert (await client.answer()).body == PIECE * 200
        assert door.outcomes == ["done"]


# ── rests, and the end ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("said", [b"", b"POST /v1/comp", post("hi")])
@on_both_loops
async def test_a_connection_that_rests_too_long_is_closed(said: bytes) -> None:
    async with front_door(keep_alive_s=0.1) as door:
        client = await door.connect()
        client.send(said)
        if len(said) > 20:
            assert (await client.answer()).body == b"hi"
        assert await client.rest() == b""


@pytest.mark.parametrize("more", [(), ("connection: close",)])
@on_both_loops
async def test_a_client_that_does_not_take_the_last_bytes_is_let_go(more: tuple[str, ...]) -> None:
    """What is left is too little for the connection to be full, and nobody waits for it."""
    sizes = [32 << 20]

    async def play(request: GenerationRequest, client: Client) -> None:
        await client.answer(200, [], b"x" * sizes[-1])

    async with front_door(keep_alive_s=0.3) as door:
        door.play = play
        for _ in range(2):  # the first one tells how much the system takes
            with socket.socket() as deaf:
                deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                deaf.connect(("127.0.0.1", door.port))
                deaf.sendall(post("hi", *more))
                await until(lambda: len(door.finished) == len(sizes))
                await asyncio.sleep(0.05)
                (connection,) = door.state.connections
                assert isinstance(connection, ClientConnection)
                num_left = connection.transport.get_write_buffer_size()
                assert connection.rests_since() is None, "closing it would free nothing"
                assert num_left > 0
                assert connection.flow.write_paused is (len(sizes) == 1)
                await door.is_empty()
            sizes.append(sizes[-1] - num_left + 30_000)


@pytest.mark.parametrize("ends", [True, False])
@on_both_loops
async def test_a_client_that_takes_nothing_of_what_uvicorn_answers_is_let_go(ends: bool) -> None:
    """Neither where its next request waits for room, nor where the app has given up before its answer was whole."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * (32 << 20), "more_body": not ends})

    async with front_door(keep_alive_s=0.2, app=app) as door:
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect(("127.0.0.1", door.port))
            deaf.sendall(b"GET /ui HTTP/1.1\r\nhost: proxy\r\n\r\n" * 2)
            await until(lambda: bool(door.state.connections))
            await door.is_empty()


@on_both_loops
async def test_a_connection_that_is_served_does_not_rest() -> None:
    async with front_door(keep_alive_s=0.05) as door:

        async def play(request: GenerationRequest, client: Client) -> None:
            await client.start(200, [])
            for _ in range(4):
                await asyncio.sleep(0.04)
                await client.send(b"x")
            await client.end()

        door.play = play
        client = await door.connect()
        for _ in range(2):
            client.send(post())
            assert (await client.answer()).body == b"xxxx"
        assert await client.rest() == b""


@on_both_loops
async def test_shutdown_closes_who_rests_and_lets_the_others_finish() -> None:
    async with front_door() as door:
        gate, begun = asyncio.Event(), asyncio.Event()

        async def play(request: GenerationRequest, client: Client) -> None:
            await client.start(200, [])
            await client.send(b"one ")
            begun.set()
            await gate.wait()
            await client.send(b"two")
            await client.end()

        resting, busy, slow = [await door.connect() for _ in range(3)]
        resting.send(post("hi"))
        await resting.answer()
        door.play = play
        busy.send(post())
        slow.send(post()[:-1])
        await begun.wait()
        await until(lambda: len(door.state.connections) == 3 and all(c.cycle for c in door.state.connections))  # type: ignore[union-attr]
        for connection in list(door.state.connections):
            connection.shutdown()
        assert await resting.rest() == b""
        refused = await slow.answer()
        assert (refused.status, refused.headers["connection"]) == (503, "close")
        assert json.loads(refused.body)["error"]["code"] == "shutting_down"
        gate.set()
        assert (await busy.answer()).body == b"one two"
        assert await busy.rest() == b""
        await door.is_empty()
        assert sorted(door.outcomes) == ["done", "done", "shutdown"]


@on_both_loops
async def test_uvicorn_serves_the_rest_on_the_same_connection() -> None:
    async with front_door() as door:
        client = await door.connect()
        for _ in range(2):
            client.send(b"GET /health HTTP/1.1\r\nhost: proxy\r\n\r\n")
            assert (await client.answer()).body == b"GET proxy/health"
            client.send(post("hi"))
            assert (await client.answer()).body == b"hi"
            client.send(post(path="/elsewhere"))
            assert (await client.answer()).body == b"POST proxy/elsewhere"


@on_both_loops
async def test_an_exchange_says_where_it_is() -> None:
    async with front_door() as door:
        door.play = stage = Stage("first")
        client = await door.connect()
        client.send(post("hi"))
        await stage.reached.wait()
        assert names(door) == ["<Exchange served, 15 bytes of body>"]
