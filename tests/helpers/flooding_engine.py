"""A process that answers as one of vLLM's servers does, and floods the proxy with whatever a request's prompt names.

    python tests/helpers/flooding_engine.py NAME

It prints the ports of a prefiller and of a decoder, which both serve the model NAME, and ends with its input. A prompt
is the name of a flood and a number: how many tokens, bytes or seconds. Every other call gets a short answer.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

GAP_S = 0.01
BLOCK = 64 * 1024
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def token(text: str) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": None}
    return b"data: " + json.dumps({"id": "c", "object": "text_completion", "choices": [choice]}).encode() + b"\n\n"


TOKEN = HEAD + chunk(token("w "))
DONE = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def tokens(num: int) -> Iterator[bytes]:
    """A token every `GAP_S` seconds."""
    yield HEAD
    due = time.monotonic()
    for _ in range(num):
        yield chunk(token("w "))
        due += GAP_S
        time.sleep(max(0.0, due - time.monotonic()))
    yield DONE


def event(num_bytes: int) -> Iterator[bytes]:
    """A token, then one event of `num_bytes`."""
    yield TOKEN
    yield from large(num_bytes)


def first(num_bytes: int) -> Iterator[bytes]:
    """One event of `num_bytes`, which is the first."""
    yield HEAD
    yield from large(num_bytes)


def large(num_bytes: int) -> Iterator[bytes]:
    whole = token("y" * num_bytes)
    for start in range(0, len(whole), BLOCK):
        yield chunk(whole[start : start + BLOCK])
    yield DONE


def over(seconds: float, begin: bytes, block: bytes) -> Iterator[bytes]:
    """The same `block` at full speed for that time, between a beginning and an end."""
    yield begin
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        yield block
    yield DONE


COMMENTS, BLANKS = chunk(b": x\n\n" * (BLOCK // 5)), chunk(b"\n\n" * (BLOCK // 2))
HEADERS = b"x-more: and more\r\n" * (BLOCK // 18)
FLOODS: dict[str, Callable[[float], Iterator[bytes]]] = {
    "tokens": lambda num: tokens(int(num)),
    "event": lambda num_bytes: event(int(num_bytes)),
    "first": lambda num_bytes: first(int(num_bytes)),
    "comments": lambda seconds: over(seconds, TOKEN, COMMENTS),
    "only_comments": lambda seconds: over(seconds, HEAD, COMMENTS),
    "empty": lambda seconds: over(seconds, TOKEN, BLANKS),
    "chunks": lambda seconds: over(seconds, TOKEN, b"".join(map(chunk, (b":", b"x", b"\n", b"\n"))) * (BLOCK // 24)),
    "head": lambda seconds: over(seconds, b"HTTP/1.1 200 OK\r\n", HEADERS),
    "heads": lambda seconds: over(seconds, b"", b"HTTP/1.1 100 Continue\r\n\r\n" * (BLOCK // 25)),
}


def told(path: str, name: str) -> bytes:
    if path == "/metrics":
        config = 'vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="1001"} 1.0'
        return f'{config}\nvllm:kv_cache_usage_perc{{engine="0"}} 0.0\nprocess_start_time_seconds 1\n'.encode()
    if path == "/v1/models":
        card = {"id": name, "object": "model", "root": f"/{name}", "parent": None, "max_model_len": 10_000}
        return json.dumps({"object": "list", "data": [card]}).encode()
    return json.dumps({"version": "0.32.0"}).encode()


def serve(sock: socket.socket, name: str) -> None:
    """Answers one request after the other, until the proxy has gone."""
    stream = sock.makefile("rb")
    while line := stream.readline():
        path, length = line.split()[1].decode(), 0
        while (header := stream.readline().strip().lower()) != b"":
            if header.startswith(b"content-length:"):
                length = int(header[15:])
        body = stream.read(length)
        if path != "/v1/completions":
            status, answer = (b"200 OK", told(path, name)) if line.startswith(b"GET") else (b"404 Not Found", b"{}")
            sock.sendall(b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status, len(answer), answer))
            continue
        flood, number = json.loads(body)["prompt"].split()
        for piece in FLOODS[flood](float(number)):
            sock.sendall(piece)


def answer(sock: socket.socket, name: str) -> None:
    with sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            serve(sock, name)
        except OSError:
            return


def accept(listener: socket.socket, name: str) -> None:
    while True:
        sock, _ = listener.accept()
        threading.Thread(target=answer, args=(sock, name), daemon=True).start()


if __name__ == "__main__":
    listeners = [socket.create_server(("127.0.0.1", 0), backlog=64) for _ in range(2)]
    for one in listeners:
        threading.Thread(target=accept, args=(one, sys.argv[1]), daemon=True).start()
    print(*(one.getsockname()[1] for one in listeners), flush=True)
    sys.stdin.read()
