"""An engine that floods the proxy, and another one's stream beside it: `pdproxy serve` as a process, and real sockets.

What must hold: whatever one engine sends, the tokens of another come when they come, and no engine is blamed for what a
client asked for. A violation is a long time between two tokens of the innocent stream, or an instance that is left
alone.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.e2e.cluster import free_ports
from tests.pdproxy.server.test_serve_process import START_S, start

ENGINE = Path(__file__).parents[2] / "helpers" / "flooding_engine.py"
LIMIT_S = 30.0
SPARE_S = 0.25
"""Which a machine with other work may add. Without slices each flood here takes more than that, or many seconds."""
ROUNDS = 3
"""A machine may be busy for once; who is starved is starved each time."""


def ask(port: int, model: str, prompt: str, *, stream: bool = True) -> socket.socket:
    body = json.dumps({"model": model, "prompt": prompt, "stream": stream, "max_tokens": 100_000}).encode()
    sock = socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: proxy\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    sock.sendall(head % len(body) + body)
    return sock


@dataclass
class Innocent:
    """A stream of one token every 10 ms. Mutable state: when its tokens came."""

    sock: socket.socket
    came: list[float] = field(default_factory=list)

    def read(self) -> None:
        try:
            while data := self.sock.recv(65536):
                self.came += [time.monotonic()] * data.count(b'"w "')
        except OSError:
            return

    def worst_gap_s(self, began: float) -> float:
        """The longest time without a token from then until now."""
        ended, num_before = time.monotonic(), len(self.came)
        while len(self.came) == num_before:
            assert time.monotonic() < ended + LIMIT_S, "no token comes any more"
            time.sleep(0.001)
        came = [at for at in self.came if at > began]
        return max(after - before for before, after in zip([began, *came], came, strict=False))


@dataclass
class House:
    port: int
    innocent: Innocent

    def flood(self, prompt: str, *, stream: bool = True) -> tuple[int, bytes, int]:
        """Asks for a flood, takes all of it, and returns the status, the last bytes, and how many there were."""
        num_bytes, last = 0, b""
        with closing(ask(self.port, "bad", prompt, stream=stream)) as sock:
            status = int(sock.recv(12, socket.MSG_WAITALL).split()[1])
            while data := sock.recv(1 << 20):
                num_bytes += len(data)
                last = (last + data)[-1000:]
        return status, last, num_bytes

    def metrics(self, name: str) -> dict[str, float]:
        return samples(self.port, name)


def samples(port: int, name: str) -> dict[str, float]:
    """The samples of one metric that are not 0, by their labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=LIMIT_S) as page:
        lines = [line for line in page.read().decode().splitlines() if line.startswith(name)]
    told = (line.removeprefix(name).rsplit(" ", 1) for line in lines)
    return {labels: float(value) for labels, value in told if float(value)}


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with ExitStack() as stack:
        ports = {}
        for name in ("good", "bad"):
            command = [sys.executable, str(ENGINE), name]
            engine = stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            stack.callback(engine.kill)
            assert engine.stdout is not None
            ports[name] = engine.stdout.readline().split()
        urls = [",".join(f"http://127.0.0.1:{port}" for port in side) for side in zip(*ports.values(), strict=True)]
        (port,) = free_ports(1)
        options = ["--engine", "vllm_nixl", "--no-canary", "--min-prompt-tokens", "1000000"]
        command = [sys.executable, "-m", "pdproxy", "serve", "--port", str(port), *options]
        proxy = start([*command, "--prefill", urls[0], "--decode", urls[1]], tmp_path_factory.mktemp("floods") / "log")
        stack.enter_context(proxy)
        stack.callback(proxy.kill)
        wait_until_ready(port)
        with closing(ask(port, "good", "tokens 100000")) as sock:
            innocent = Innocent(sock)
            reader = threading.Thread(target=innocent.read)
            reader.start()
            yield House(port, innocent)
            sock.shutdown(socket.SHUT_RDWR)
            reader.join()


def wait_until_ready(port: int) -> None:
    started = time.monotonic()
    while True:
        try:
            if len(samples(port, "pdproxy_instance_ready{")) == 4:
                return
        except OSError:
            assert time.monotonic() < started + START_S
        time.sleep(0.05)


@pytest.fixture(scope="module")
def quiet_s(house: House) -> float:
    """The longest time without a token where nobody else asks for anything."""
    began = time.monotonic()
    time.sleep(0.5)
    return house.innocent.worst_gap_s(began)


@pytest.mark.parametrize(
    "flood",
    [
        "event 7000000",
        "first 7000000",
        "event 40000000",
        "comments 0.3",
        "only_comments 0.3",
        "empty 0.3",
        "chunks 0.3",
        "head 0.3",
        "heads 0.3",
    ],
)
def test_a_flood_from_one_engine_keeps_no_other_stream_waiting(house: House, quiet_s: float, flood: str) -> None:
    gaps_s: list[float] = []
    while len(gaps_s) < ROUNDS and (not gaps_s or gaps_s[-1] > quiet_s + SPARE_S):
        began = time.monotonic()
        house.flood(flood)
        gaps_s.append(house.innocent.worst_gap_s(began))
    print(f"quiet {quiet_s * 1000:.0f} ms; {flood}: {', '.join(f'{gap_s * 1000:.0f} ms' for gap_s in gaps_s)}")
    assert min(gaps_s) <= quiet_s + SPARE_S


def test_a_large_event_arrives_whole(house: House) -> None:
    for flood in ("event 7000000", "first 7000000"):
        status, last, num_bytes = house.flood(flood)
        assert status == 200
        assert num_bytes > 7_000_000
        assert b"data: [DONE]" in last


def test_an_event_that_is_too_large_is_told_and_is_no_reason_to_leave_an_engine_alone(house: House) -> None:
    """Nor is it tried again: the same prompt would bring it again."""
    legs = 'pdproxy_legs_total{instance="decode-1",leg="decode",outcome="too_large"}'
    before = sum(house.metrics(legs).values())
    for stream in (True, False) * 3:  # one more than the faults in a row that open a breaker
        status, last, num_bytes = house.flood("first 9000000", stream=stream)
        assert status == 502
        assert b'"code":"event_too_large"' in last
        assert num_bytes < 10_000
    status, last, _ = house.flood("event 9000000")
    assert status == 200
    assert b'"code":"event_too_large"' in last
    assert b"[DONE]" not in last
    assert sum(house.metrics(legs).values()) == before + 7
    assert house.metrics("pdproxy_breaker_opened_total") == {}
    assert len(house.metrics("pdproxy_instance_ready{")) == 4
    assert house.metrics("pdproxy_requests_in_flight") == {"": 1.0}, "the innocent one"


def test_an_engine_that_never_comes_to_its_first_token_has_failed(house: House) -> None:
    """Its bytes are counted, and its client is told within the time that so many take."""
    began = time.monotonic()
    status, last, _ = house.flood("only_comments 60")
    assert status == 502
    assert b"bytes before its first token" in last
    assert time.monotonic() - began < LIMIT_S
