"""A client's connection step by step, without a socket: what is written, in how many writes, and when nothing is."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from pdproxy.openai.request import CHAT, COMPLETIONS, GenerationRequest
from pdproxy.orchestrator.context import Client
from pdproxy.server.direct import DirectRoutes
from pdproxy.server.headers import ClientHeaders
from pdproxy.server.response_head import ResponseHeadWriter
from tests.fakes.front_door import FrontDoor, echo, make_door, post, stream_echo, wired
from transfer.bounded_connection import MAX_HEAD_BYTES, MAX_PIPELINED

CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: proxy\r\ntransfer-encoding: chunked\r\n\r\n"


async def turn(num: int = 5) -> None:
    """Of the loop: enough for whatever can happen by itself."""
    for _ in range(num):
        await asyncio.sleep(0)


@pytest.fixture
def door() -> FrontDoor:
    return make_door()


# ── the answer ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_whole_answer_is_one_write(door: FrontDoor) -> None:
    door.state.default_headers = [(b"date", b"today")]
    connection, wire = wired(door)
    for _ in range(2):
        connection.data_received(post("hi"))
        await turn()
    head = b"HTTP/1.1 200 OK\r\ndate: today\r\ncontent-type: text/plain\r\ncontent-length: 2\r\n\r\n"
    assert wire.written == [head + b"hi"] * 2
    assert door.state.total_requests == 2
    assert not wire.is_closed


async def test_the_head_of_a_stream_goes_with_its_first_piece(door: FrontDoor) -> None:
    door.play = stream_echo
    connection, wire = wired(door)
    connection.data_received(post("one two"))
    await turn()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ntransfer-encoding: chunked\r\n\r\n"
    assert wire.written == [head + b"3\r\none\r\n", b"3\r\ntwo\r\n", b"0\r\n\r\n"]


async def test_a_head_that_nothing_follows_goes_alone(door: FrontDoor) -> None:
    first = asyncio.Event()

    async def play(request: GenerationRequest, client: Client) -> None:
        await client.start(200, [])
        await first.wait()
        await client.send(b"")
        await client.send(b"piece")
        await client.end()

    door.play = play
    connection, wire = wired(door)
    connection.data_received(post())
    await turn()
    assert wire.written == [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"]
    first.set()
    await turn()
    assert wire.written[1:] == [b"5\r\npiece\r\n", b"0\r\n\r\n"]


async def test_a_stream_of_nothing(door: FrontDoor) -> None:
    async def play(request: GenerationRequest, client: Client) -> None:
        await client.start(200, [])
        await client.end()

    door.play = play
    connection, wire = wired(door)
    connection.data_received(post())
    await turn()
    assert wire.written == [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"]


async def test_the_outlet_writes_chunks(door: FrontDoor) -> None:
    large = (2048, 2049, 100_000)

    async def play(request: GenerationRequest, client: Client) -> None:
        assert client.outlet is None
        await client.start(200, [])
        assert client.outlet is not None
        for size in (26, 0, 1, *large):
            client.outlet.write(b"x" * size)
        await client.end()

    door.play = play
    connection, wire = wired(door)
    connection.data_received(post())
    await turn()
    assert wire.written[0].endswith(b"\r\n\r\n1a\r\n" + b"x" * 26 + b"\r\n")
    chunks = [f"{size:x}\r\n{'x' * size}\r\n".encode() for size in (1, *large)]
    assert wire.written[1:] == [*chunks, b"0\r\n\r\n"]


async def test_a_length_told_ahead(door: FrontDoor) -> None:
    async def play(request: GenerationRequest, client: Client) -> None:
        await client.start(200, [(b"content-length", b"4")])
        assert client.outlet is None
        await client.send(b"ab")
        await client.send(b"cd")
        await client.end()

    door.play = play
    connection, wire = wired(door)
    connection.data_received(post())
    await turn()
    assert wire.written == [b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nab", b"cd"]
    assert not wire.is_closed


@pytest.mark.parametrize("body", [b"abc", b"abcde"])
async def test_a_length_that_is_wrong_breaks_the_connection(door: FrontDoor, body: bytes) -> None:
    """Another request on it would be answered with the rest of this one."""

    async def play(request: GenerationRequest, client: Client) -> None:
        await client.start(200, [(b"content-length", b"4")])
        await client.send(body)
        await client.end()

    door.play = play
    connection, wire = wired(door)
    connection.data_received(post())
    await turn()
    assert wire.is_closed
    assert b"abcde" not in b"".join(wire.written)
    assert not door.state.tasks


async def test_an_answer_without_its_end_breaks_the_connection(door: FrontDoor) -> None:
    async def play(request: GenerationRequest, client: Client) -> None:
        await client.start(200, [])
        await client.send(b"half")

    door.play = play
    connection, wire = wired(door)
    connection.data_received(post())
    await turn()
    assert wire.written[-1].endswith(b"4\r\nhalf\r\n")
    assert wire.is_closed


@pytest.mark.parametrize("header", [(b"x", b"1\r\ny: 2"), (b"x", b"1\ny: 2"), (b"x\r", b"1"), (b"x\r\ny", b"1")])
def test_a_header_that_would_be_two(door: FrontDoor, header: tuple[bytes, bytes]) -> None:
    heads = ResponseHeadWriter(door.state)
    assert heads.write(200, [(b"x", b"1")], b"") == b"HTTP/1.1 200 OK\r\nx: 1\r\n\r\n"
    with pytest.raises(ValueError, match="line break"):
        heads.write(200, [header], b"")


async def test_the_servers_own_headers_may_change(door: FrontDoor) -> None:
    heads = ResponseHeadWriter(door.state)
    for date in (b"now", b"then"):
        door.state.default_headers = [(b"date", date)]
        assert heads.write(204, [], b"") == b"HTTP/1.1 204 No Content\r\ndate: %b\r\n\r\n" % date


# ── the request, in whatever pieces it comes ────────────────────────────────────────────────────────────────────────


async def test_a_request_split_at_every_byte(door: FrontDoor) -> None:
    data = post("hello", "x-request-id: mine")
    for split in range(1, len(data)):
        connection, wire = wired(door)
        connection.data_received(data[:split])
        await turn()
        assert wire.written == []
        connection.data_received(data[split:])
        await turn()
        assert wire.written[0].endswith(b"\r\n\r\nhello")
        assert door.finished[-1].request_id == "mine"
        connection.connection_lost(None)
    assert set(door.outcomes) == {"done"}


async def test_a_request_byte_by_byte(door: FrontDoor) -> None:
    connection, wire = wired(door)
    for byte in post("hello") * 2:
        connection.data_received(bytes([byte]))
        await turn()
    assert [data[-5:] for data in wire.written] == [b"hello"] * 2


async def test_a_body_in_chunks_split_at_every_byte(door: FrontDoor) -> None:
    data = CHUNKED + b'5;a=b\r\n{"pro\r\nC\r\nmpt":"hello"\r\n1\r\n}\r\n0\r\n\r\n'
    for split in range(1, len(data)):
        connection, wire = wired(door)
        for part in (data[:split], data[split:]):
            connection.data_received(part)
            await turn()
        assert wire.written[0].endswith(b"\r\n\r\nhello")
        connection.connection_lost(None)


async def test_trailers_are_no_headers() -> None:
    door = make_door(keys=("secret",))
    connection, wire = wired(door)
    connection.data_received(CHUNKED + b'e\r\n{"prompt":"a"}\r\n0\r\nx-api-key: secret\r\n\r\n')
    await turn()
    assert wire.written[0].startswith(b"HTTP/1.1 401 ")


async def test_of_a_body_that_is_too_large_nothing_beyond_the_limit_is_kept(door: FrontDoor) -> None:
    connection, wire = wired(door)
    connection.data_received(CHUNKED + b"190\r\n" + b"x" * 400 + b"\r\n")
    exchange: Any = connection.cycle
    connection.data_received(b"1000\r\n" + b"x" * 4096)
    assert len(exchange._body) + len(exchange._parts or b"") <= 1000
    await turn()
    assert wire.written[0].startswith(b"HTTP/1.1 413 ")
    connection.data_received(b"\r\n0\r\n\r\n" + post("next"))
    await turn()
    assert wire.written[1].endswith(b"next")


async def test_no_end_of_a_head(door: FrontDoor) -> None:
    connection, wire = wired(door)
    connection.data_received(b"POST /v1/completions HTTP/1.1\r\nx: ")
    for _ in range(MAX_HEAD_BYTES // 1024 + 1):  # the first read does not count: it may have been of something else
        assert not wire.is_closed
        connection.data_received(b"y" * 1024)
    assert wire.is_closed
    assert wire.written[0].startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("line", [b"y" * 1024, b"y: " + b"y" * 1019 + b"\r\n"], ids=["one line", "many lines"])
@pytest.mark.parametrize("path", [b"/v1/completions", b"/other"])
async def test_no_end_of_the_trailers(door: FrontDoor, path: bytes, line: bytes) -> None:
    connection, wire = wired(door)
    connection.data_received(CHUNKED.replace(b"/v1/completions", path) + b"1\r\n \r\n0\r\n")
    num_headers = len(connection.headers)
    for _ in range(MAX_HEAD_BYTES // 1024):
        connection.data_received(line)
        assert not wire.is_closed
    assert len(connection.headers) == num_headers, "trailers are not kept"
    connection.data_received(line)
    assert wire.is_closed
    assert wire.written[0].startswith(b"HTTP/1.1 400 ")
    connection.connection_lost(None)
    assert not door.memory.num_bytes


@pytest.mark.parametrize("num_bytes", [9, len(CHUNKED) + 1, -9, -2], ids=["head", "chunk", "trailers", "end"])
async def test_a_head_that_begins_behind_a_large_body(num_bytes: int) -> None:
    """The read in which it begins is as large as the body, which is no part of the head."""
    door = make_door(max_body_bytes=1 << 20)
    connection, wire = wired(door)
    following = CHUNKED + b'11\r\n{"prompt":"next"}\r\n0\r\nno: body\r\n\r\n'
    connection.data_received(post("x" * (MAX_HEAD_BYTES + 1)) + following[:num_bytes])
    await turn()
    assert not wire.is_closed
    connection.data_received(following[num_bytes:])
    await turn()
    assert wire.written[-1].endswith(b"next")


# ── requests that came together ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("waiting", [post("b"), b"GET /ready HTTP/1.1\r\nhost: proxy\r\n\r\n"])
@pytest.mark.parametrize("num_more", [0, 1, 1000])
async def test_no_end_of_the_pipeline(door: FrontDoor, waiting: bytes, num_more: int) -> None:
    gate = door.hold()
    connection, wire = wired(door)
    connection.data_received(post("a") + waiting * (MAX_PIPELINED + num_more))
    await turn()
    assert len(connection.pipeline) == MAX_PIPELINED
    assert wire.is_closed is (num_more > 0)
    if num_more:
        (said,) = wire.written
        assert said.startswith(b"HTTP/1.1 400 ")
        assert b"More than 100 requests wait" in said
    gate.set()
    connection.connection_lost(None)
    await turn()
    assert not door.state.tasks
    assert not door.memory.num_bytes


async def test_the_next_request_begins_when_the_last_is_answered(door: FrontDoor) -> None:
    gates = {name: asyncio.Event() for name in "abc"}

    async def play(request: GenerationRequest, client: Client) -> None:
        await gates[str(request.prompt_text)].wait()
        await echo(request, client)

    door.play = play
    connection, wire = wired(door)
    connection.data_received(post("a") + post("b") + post("c"))
    assert not wire.is_reading, "more of them would have to be kept"
    gates["b"].set()
    gates["c"].set()
    await turn()
    assert (door.prompts, wire.written) == (["a"], [])
    gates["a"].set()
    await turn(10)
    assert [data[-1:] for data in wire.written] == [b"a", b"b", b"c"]
    assert wire.is_reading


async def test_the_last_of_many_is_not_there_yet(door: FrontDoor) -> None:
    connection, wire = wired(door)
    connection.data_received(post("a") + post("b")[:-3])
    await turn()
    assert [data[-1:] for data in wire.written] == [b"a"]
    assert wire.is_reading
    connection.data_received(post("b")[-3:])
    await turn()
    assert wire.written[1].endswith(b"b")


@pytest.mark.parametrize("order", ["ours first", "ours last"])
async def test_in_turn_with_what_uvicorn_serves(door: FrontDoor, order: str) -> None:
    connection, wire = wired(door)
    pair = [post("a"), b"GET /health HTTP/1.1\r\nhost: proxy\r\n\r\n"]
    connection.data_received(b"".join(pair if order == "ours first" else pair[::-1]))
    await turn(20)
    said = b"".join(wire.written)
    assert said.count(b"HTTP/1.1 200 OK") == 2
    assert (said.index(b"GET proxy/health") > said.index(b"\r\n\r\na")) == (order == "ours first")
    assert not door.state.tasks


async def test_nothing_after_a_last_request(door: FrontDoor) -> None:
    connection, wire = wired(door)
    connection.data_received(post("a", "connection: close") + post("b"))
    await turn()
    assert (door.prompts, wire.is_closed) == (["a"], True)
    assert b"connection: close\r\n" in wire.written[0]


async def test_nothing_on_a_connection_that_is_being_closed(door: FrontDoor) -> None:
    gate = door.hold()
    connection, wire = wired(door)
    connection.data_received(post("a") + post("b"))
    await turn()
    wire.close()
    gate.set()
    await turn()
    assert door.prompts == ["a"]


async def test_a_request_with_garbage_behind_it(door: FrontDoor) -> None:
    connection, wire = wired(door)
    connection.data_received(post("a") + b"garbage\r\n\r\n")
    await turn()
    assert [data[:13] for data in wire.written] == [b"HTTP/1.1 400 "]
    assert door.prompts == []


async def test_who_leaves_leaves_what_waits_as_well(door: FrontDoor) -> None:
    door.play = hang
    connection, _ = wired(door)
    connection.data_received(post("a") + post("b"))
    await turn()
    connection.connection_lost(None)
    await turn()
    assert (door.prompts, door.outcomes) == (["a"], ["client_gone"])
    assert not door.state.tasks


# ── clients that leave in the same turn of the loop ─────────────────────────────────────────────────────────────────


async def hang(request: GenerationRequest, client: Client) -> None:
    await asyncio.Event().wait()


async def test_gone_before_the_head_is_there(door: FrontDoor) -> None:
    connection, _ = wired(door)
    connection.data_received(post()[:20])
    connection.connection_lost(None)
    await turn()
    assert door.finished == []


async def test_gone_before_the_body_is_there(door: FrontDoor) -> None:
    connection, _ = wired(door)
    connection.data_received(post()[:-1])
    exchange: Any = connection.cycle
    assert exchange._limit is not None
    connection.connection_lost(None)
    assert exchange._limit is None, "it would be refused as well"
    assert (door.outcomes, door.prompts) == (["client_gone"], [])


async def test_gone_before_its_task_begins(door: FrontDoor) -> None:
    connection, wire = wired(door)
    connection.data_received(post())
    connection.connection_lost(None)
    await turn()
    assert (door.outcomes, door.prompts) == (["client_gone"], [])
    assert wire.written == []
    assert not door.state.tasks


async def test_gone_before_it_is_refused(door: FrontDoor) -> None:
    connection, wire = wired(door)
    connection.data_received(b"POST /v1/completions HTTP/1.1\r\ncontent-length: 9999\r\n\r\n")
    connection.connection_lost(None)
    await turn()
    assert (door.outcomes, wire.written) == (["client_gone"], [])


@pytest.mark.parametrize("order", ["gone first", "end first"])
async def test_gone_in_the_turn_in_which_it_would_be_answered(door: FrontDoor, order: str) -> None:
    """Whoever has everything has not left; whoever left first is told nothing, and its request is cut short."""
    answered = asyncio.get_running_loop().create_future()

    async def play(request: GenerationRequest, client: Client) -> None:
        await answered
        await echo(request, client)
        await asyncio.sleep(0)  # something to be put away still

    door.play = play
    connection, wire = wired(door)
    connection.data_received(post())
    await turn()
    answered.set_result(None)
    if order == "end first":
        await asyncio.sleep(0)
    connection.connection_lost(None)
    await turn()
    assert len(wire.written) == (order == "end first")
    assert door.outcomes == ["done" if order == "end first" else "client_gone"]
    assert not door.state.tasks


async def test_gone_is_no_error_of_the_task(door: FrontDoor) -> None:
    door.play = hang
    connection, _ = wired(door)
    connection.data_received(post())
    await turn()
    [task] = door.state.tasks
    connection.connection_lost(None)
    await turn()
    assert task.done()
    assert not task.cancelled()


async def test_nothing_is_written_to_who_has_gone(door: FrontDoor) -> None:
    async def play(request: GenerationRequest, client: Client) -> None:
        with suppress(asyncio.CancelledError):
            await hang(request, client)
        await stream_echo(request, client)

    door.play = play
    connection, wire = wired(door)
    connection.data_received(post())
    await turn()
    connection.connection_lost(None)
    await turn()
    assert (wire.written, door.state.total_requests) == ([], 0)
    assert not door.state.tasks


async def test_gone_and_cancelled_in_one_turn(door: FrontDoor) -> None:
    """The server may cancel a task as well; that is not for the exchange to swallow."""
    door.play = hang
    connection, _ = wired(door)
    connection.data_received(post())
    await turn()
    [task] = door.state.tasks
    connection.connection_lost(None)
    task.cancel()
    await turn()
    assert task.cancelled()
    assert door.outcomes == ["client_gone"]
    assert not door.state.tasks


async def test_cancelled_by_the_server(door: FrontDoor) -> None:
    door.play = hang
    connection, wire = wired(door)
    connection.data_received(post())
    await turn()
    [task] = door.state.tasks
    task.cancel()
    await turn()
    assert task.cancelled()
    assert (wire.written, wire.is_closed) == ([], True)


async def test_a_bug_is_told_of(door: FrontDoor, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        raise KeyError("bug")

    connection, wire = wired(door)
    route: Any = connection._routes.find(b"/v1/completions", [])
    monkeypatch.setattr(route, "_parse", broken)
    connection.data_received(post())
    await turn()
    assert wire.written[0].startswith(b"HTTP/1.1 500 ")
    assert b"bug" not in wire.written[0]
    assert door.outcomes == ["failed"]


# ── full connections ────────────────────────────────────────────────────────────────────────────────────────────────


async def test_room_is_told_of_while_somebody_asks(door: FrontDoor) -> None:
    rooms: list[bool] = []

    async def play(request: GenerationRequest, client: Client) -> None:
        await client.start(200, [])
        outlet = client.outlet
        assert outlet is not None
        connection.pause_writing()
        assert outlet.is_full
        outlet.on_room(lambda: rooms.append(outlet.is_full))
        connection.resume_writing()
        outlet.on_room(None)
        connection.pause_writing()
        connection.resume_writing()
        await client.end()

    door.play = play
    connection, wire = wired(door)
    connection.data_received(post())
    await turn()
    assert rooms == [False]
    assert wire.written[-1].endswith(b"0\r\n\r\n")


@pytest.mark.parametrize("step", ["send", "end", "answer"])
async def test_whoever_sends_waits_for_room(door: FrontDoor, step: str) -> None:
    async def play(request: GenerationRequest, client: Client) -> None:
        if step == "answer":
            connection.pause_writing()
            await echo(request, client)
            return
        await client.start(200, [])
        connection.pause_writing()
        if step == "send":
            await client.send(b"piece")
        await client.end()

    door.play = play
    connection, wire = wired(door)
    connection.data_received(post())
    await turn()
    said = b"".join(wire.written)
    assert b"piece" not in said
    assert not said.endswith(b"0\r\n\r\n")
    assert door.finished == []
    connection.resume_writing()
    await turn()
    assert door.outcomes == ["done"]
    connection.data_received(post("next"))
    await turn()


async def test_gone_while_full(door: FrontDoor) -> None:
    async def play(request: GenerationRequest, client: Client) -> None:
        await client.start(200, [])
        connection.pause_writing()
        await client.send(b"piece")

    door.play = play
    connection, wire = wired(door)
    connection.data_received(post())
    await turn()
    connection.connection_lost(ConnectionResetError())
    await turn()
    assert door.outcomes == ["client_gone"]
    assert b"piece" not in b"".join(wire.written)
    assert not door.state.tasks


# ── which way a request goes ────────────────────────────────────────────────────────────────────────────────────────


async def test_what_is_left_to_uvicorn(door: FrontDoor) -> None:
    for request, asked in (
        (b"GET /v1/completions HTTP/1.1\r\nhost: proxy\r\n\r\n", b"GET proxy/v1/completions"),
        (post(path="/v1/models"), b"POST proxy/v1/models"),
        (post(path="/v1/completions?x=1"), b"POST proxy/v1/completions"),
        (post(path="/v1/%63ompletions"), b"POST proxy/v1/completions"),
        (post("hi", "connection: upgrade", "upgrade: h2c"), b"POST proxy/v1/completions"),
    ):
        connection, wire = wired(door)
        connection.data_received(request)
        await turn(20)
        assert wire.written[-1].endswith(asked), wire.written
        connection.connection_lost(None)
    assert door.prompts == []


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_pages_from_elsewhere(path: str) -> None:
    connection, _ = wired(make_door())
    route = connection._routes.find(path.encode(), [])
    assert route is not None
    origin = [(b"host", b"proxy"), (b"origin", b"https://shop.example")]
    for is_open in (False, True):
        routes = DirectRoutes({path: route}, may_be_asked_from_elsewhere=is_open)
        assert routes.find(path.encode(), origin) is (None if is_open else route)
        assert routes.find(path.encode(), origin[:1]) is route
        assert routes.find(b"/health", []) is None


def test_headers_are_decoded_when_asked_for() -> None:
    headers = ClientHeaders([(b"a", b"1"), (b"b", b"\xe9"), (b"a", b"2")])
    assert dict(headers) == {"a": "2", "b": "é"}
    assert (headers.get("a"), headers.get("c"), headers.get("c", "d")) == ("2", None, "d")
    assert "b" in headers
    assert "B" not in headers
    assert object() not in headers
    assert len(headers) == 2
    with pytest.raises(KeyError, match="c"):
        headers["c"]
