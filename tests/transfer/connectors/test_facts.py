"""The port at which the connector for vLLM answers a proxy: what it is asked, and what it bears."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from http.client import HTTPResponse

import pytest

from tests.e2e.cluster import free_ports
from tests.transfer.connectors.mini_vllm import HYBRID
from transfer import wire
from transfer.connectors.vllm import facts
from transfer.connectors.vllm.receiver_thread import ReceiverThread

GET = b"GET /kv_buffer HTTP/1.1\r\nhost: x\r\n\r\n"
LIMIT_S = 10.0


def a_prefillers_facts(receiver: object) -> wire.BufferFacts:
    numbers = dict.fromkeys(("bytes_per_token", "page_bytes", "num_pages", "num_free", "num_quarantined"), 0)
    names = {"epoch": "e", "role": "prefill", "model": "m", "dtype": "float32", "chunk_size": HYBRID.chunk_size}
    return wire.BufferFacts(**names, **numbers, max_model_len=9, receivers=[])  # type: ignore[arg-type]


@pytest.fixture
def port() -> Iterator[int]:
    (number,) = free_ports(1)
    thread = ReceiverThread(a_prefillers_facts, lambda: True, "127.0.0.1", number)
    thread.start()
    yield number
    thread.close()


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S)


def posted(port: int, body: bytes, announced: int | None = None) -> tuple[int, dict[str, object]]:
    """Posts the body, and returns the answer's status and JSON."""
    head = f"POST /kv_transfer/cancel HTTP/1.1\r\nhost: x\r\ncontent-length: {announced or len(body)}\r\n\r\n"
    with connect(port) as client:
        return answer_to(client, head.encode() + body)


def answer_to(client: socket.socket, request: bytes) -> tuple[int, dict[str, object]]:
    client.sendall(request)
    reply = HTTPResponse(client)
    reply.begin()
    return reply.status, json.loads(reply.read())


def test_what_is_wrong_with_a_body_is_said(port: int) -> None:
    assert posted(port, b'{"attempt": "a"}') == (200, {"released": True})
    for body, announced, status, word in (
        (b'{"attempt": 3}', None, 400, "attempt"),
        (b"{}", None, 400, "attempt is missing"),
        (b"\xff", None, 400, "not valid JSON"),
        (b'{"x": ' + b"[" * 50_000, None, 400, "not valid JSON"),
        (b"", facts.MAX_BODY_BYTES + 1, 413, "large"),
    ):
        found, answer = posted(port, body, announced)
        assert found == status
        assert word in str(answer["error"])


def test_more_connections_than_a_few_are_turned_away_and_leave_room_again(port: int) -> None:
    with ExitStack() as stack:
        idle = [stack.enter_context(connect(port)) for _ in range(facts.MAX_CONNECTIONS)]
        for client in idle:
            assert answer_to(client, GET)[0] == 200
        for _ in range(20):
            with connect(port) as late:
                assert late.recv(1 << 16).startswith(b"HTTP/1.1 503")
    deadline = time.monotonic() + LIMIT_S
    status = 0
    while status != 200:
        assert time.monotonic() < deadline, status
        with connect(port) as client, suppress(OSError):
            status = answer_to(client, GET)[0]


@pytest.mark.parametrize(
    "begun",
    [b"", GET[:9], b"POST /kv_transfer/cancel HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{"],
    ids=["nothing", "half a head", "half a body"],
)
def test_a_request_that_does_not_become_whole_is_cut(begun: bytes, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "REQUEST_LIMIT_S", 0.3)
    with connect(port) as client:
        client.sendall(begun)
        started = time.monotonic()
        with suppress(ConnectionResetError):
            assert client.recv(1) == b""
        assert 0.2 < time.monotonic() - started < 5
    with connect(port) as client:
        assert answer_to(client, GET)[0] == 200
        time.sleep(0.4)  # a connection that was answered stays as long as uvicorn keeps it
        assert answer_to(client, GET)[0] == 200
