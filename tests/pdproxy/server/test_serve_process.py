"""`pdproxy serve` as a process: what it says when it cannot start, and how it ends."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq

from pdproxy.serve import REPEATED_S
from tests.e2e.cluster import free_ports
from tests.fakes.fake_engine import WORDS, FakeEngine
from tests.fakes.served_engine import served
from transfer.wire import Signal, encode

START_S = 30.0
BODY = {"model": "tiny", "prompt": "a b", "stream": True}
PROGRAM = (sys.executable, "-m", "pdproxy")


def command(
    port: int, notify: int, prefill: str, decode: str, *more: str, program: Sequence[str] = PROGRAM
) -> list[str]:
    flags = ["--port", str(port), "--proxy-port", str(notify), "--prefill", prefill, "--decode", decode]
    return [*program, "serve", "--drain-grace-s", "0", *flags, *more]


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("PDPROXY_", "OTEL_"))}


def start(command: list[str], log: Path, stderr: int | None = None) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=stderr or output, env=environment())


@dataclass
class Proxy:
    child: subprocess.Popen[bytes]
    client: httpx.AsyncClient
    decoder: FakeEngine
    log: Path

    def said(self) -> str:
        return self.log.read_text()

    async def ended(self, within_s: float) -> int:
        """Its exit status."""
        return await asyncio.wait_for(asyncio.to_thread(self.child.wait), within_s)


@asynccontextmanager
async def process(
    folder: Path,
    *options: str,
    stderr: int | None = None,
    num_descriptors: int | None = None,
    most_descriptors: int | None = None,
    program: Sequence[str] = PROGRAM,
) -> AsyncIterator[Proxy]:
    """Ready, in front of two scripted engines in this process. With `num_descriptors` the process gets that many, and
    may have `most_descriptors`, by default no more."""
    limited = []
    if num_descriptors is not None:
        limit = f"ulimit -Sn {num_descriptors} && ulimit -Hn {most_descriptors or num_descriptors}"
        limited = ["sh", "-c", f'{limit} && exec "$@"', "sh"]
    prefiller, decoder = FakeEngine("prefill"), FakeEngine("decode")
    prefiller.decoders = [decoder]
    port, notify = free_ports(2)
    context = zmq.Context()
    sender = context.socket(zmq.PUSH)
    sender.connect(f"tcp://127.0.0.1:{notify}")

    def tell(said: Signal) -> None:
        sender.send(encode(said))

    decoder.sink = tell
    log = folder / "proxy.log"
    async with served(prefiller) as prefill, served(decoder) as decode:
        child = start([*limited, *command(port, notify, prefill, decode, *options, program=program)], log, stderr)
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
                proxy = Proxy(child, client, decoder, log)
                assert await is_ready(child, client), proxy.said()
                decoder.forget()
                yield proxy
        finally:
            child.kill()
            child.wait()
            await asyncio.sleep(0.02)  # for the engines: to accept what it has left behind, and find it closed
            sender.close(0)
            context.term()


async def is_ready(child: subprocess.Popen[bytes], client: httpx.AsyncClient) -> bool:
    """Waits for it."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and child.poll() is None:
        with suppress(httpx.TransportError):
            if (await client.get("/ready")).status_code == 200:
                return True
        await asyncio.sleep(0.05)  # a process that starts tells nobody
    return False


def hold(decoder: FakeEngine, point: str, *, is_once: bool = False) -> asyncio.Event:
    """It waits at `point` until the event is set; with `is_once` only who comes there first."""
    gate, passed = asyncio.Event(), decoder.pass_point
    num_waited = 0

    async def pass_or_wait(name: str) -> None:
        nonlocal num_waited
        await passed(name)
        if name == point and not (is_once and num_waited):
            num_waited += 1
            await gate.wait()

    decoder.pass_point = pass_or_wait  # type: ignore[method-assign]
    return gate


async def test_first_signal_lets_a_stream_finish_and_takes_nothing_new(tmp_path: Path) -> None:
    async with process(tmp_path, "--drain-timeout-s", "20") as proxy:
        gate = hold(proxy.decoder, "middle")
        async with proxy.client.stream("POST", "/v1/completions", json=BODY) as stream:
            lines = stream.aiter_lines()
            got = [await anext(lines)]
            await proxy.decoder.reached("middle")
            proxy.child.send_signal(signal.SIGTERM)
            await until_refused(proxy)
            proxy.child.send_signal(signal.SIGTERM)
            assert proxy.child.poll() is None
            gate.set()
            got += [line async for line in lines]
        events = [line.removeprefix("data: ") for line in got if line]
        assert events.pop() == "[DONE]"
        assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == "".join(WORDS)
        assert await proxy.ended(10) == 0
        assert "Traceback" not in proxy.said()


async def until_refused(proxy: Proxy) -> None:
    """Nobody new is let in."""
    address = proxy.client.base_url
    async with asyncio.timeout(10):
        while True:
            try:
                _, writer = await asyncio.open_connection(address.host, address.port)
            except ConnectionRefusedError:
                return
            except ConnectionResetError:  # the port was closed in that very moment
                continue
            writer.close()
            await asyncio.sleep(0.02)  # the signal's handling tells nobody


async def test_second_signal_ends_a_stream_at_once(tmp_path: Path) -> None:
    async with process(tmp_path, "--drain-timeout-s", "60") as proxy:
        hold(proxy.decoder, "middle")
        async with proxy.client.stream("POST", "/v1/completions", json=BODY) as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            await proxy.decoder.reached("middle")
            asked = time.monotonic()
            proxy.child.send_signal(signal.SIGTERM)
            await until_refused(proxy)
            await asyncio.sleep(asked + REPEATED_S + 0.1 - time.monotonic())
            proxy.child.send_signal(signal.SIGTERM)
            started = time.monotonic()
            rest = [line async for line in lines if line]
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert await proxy.ended(10) == 0
        assert time.monotonic() - started < 5
        assert "Traceback" not in proxy.said()


async def test_a_second_ctrl_c_ends_a_stream_at_once_however_soon_it_comes(tmp_path: Path) -> None:
    async with process(tmp_path, "--drain-timeout-s", "60") as proxy:
        hold(proxy.decoder, "middle")
        async with proxy.client.stream("POST", "/v1/completions", json=BODY) as stream:
            await proxy.decoder.reached("middle")
            proxy.child.send_signal(signal.SIGINT)
            await until_refused(proxy)
            proxy.child.send_signal(signal.SIGINT)
            rest = [line async for line in stream.aiter_lines() if line]
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert await proxy.ended(10) == 0


async def test_signals_that_ask_cut_no_stream(tmp_path: Path) -> None:
    """SIGUSR1 tells what runs, SIGHUP reads the file again, and SIGQUIT drains."""
    file = tmp_path / "fleet.toml"
    file.write_text("max_queue = 7")
    async with process(tmp_path, "--config", str(file), "--no-watch-config", "--log-level", "warning") as proxy:
        gate = hold(proxy.decoder, "middle")
        headers = {"x-request-id": "the-stream"}
        async with proxy.client.stream("POST", "/v1/completions", json=BODY, headers=headers) as stream:
            lines = stream.aiter_lines()
            got = [await anext(lines)]
            await proxy.decoder.reached("middle")
            proxy.child.send_signal(signal.SIGUSR1)
            told = await until_said(proxy, "places of ")
            assert "1 requests in flight:" in told
            assert "the-stream of " in told
            assert ": decode for " in told
            assert "0 lines in which requests wait" in told
            assert "1 memories with pages:" in told
            assert "0 orphans" in told
            assert "request_id=" not in told
            assert "fleet/probe.py:" in await until_said(proxy, "file_watch.py:")
            file.write_text('[[instances]]\nname = "new"\nrole = "decode"\nurl = "http://127.0.0.1:1"\nbad = 1')
            proxy.child.send_signal(signal.SIGHUP)
            assert "there is no such option" in await until_said(proxy, "the fleet stays as it is")
            file.write_text('[[instances]]\nname = "new"\nrole = "decode"\nurl = "http://127.0.0.1:1"')
            proxy.child.send_signal(signal.SIGHUP)
            await until_member(proxy, "new")
            assert proxy.said().count("max_queue has changed; that needs a start") == 1
            proxy.child.send_signal(signal.SIGQUIT)
            await until_refused(proxy)
            assert proxy.child.poll() is None
            gate.set()
            got += [line async for line in lines]
        assert [line for line in got if line][-1] == "data: [DONE]"
        assert await proxy.ended(10) == 0


async def until_said(proxy: Proxy, what: str) -> str:
    """Waits until it is in the log, and returns all that is there."""
    async with asyncio.timeout(10):
        while True:
            if what in (said := proxy.said()):
                return said
            await asyncio.sleep(0.02)


async def until_member(proxy: Proxy, name: str) -> None:
    async with asyncio.timeout(10):
        while True:
            if name in [one["name"] for one in (await proxy.client.get("/status")).json()["fleet"]]:
                return
            await asyncio.sleep(0.02)  # the signal's handling tells nobody


async def test_a_reload_without_a_file_says_so_and_does_nothing(tmp_path: Path) -> None:
    async with process(tmp_path) as proxy:
        proxy.child.send_signal(signal.SIGHUP)
        await until_said(proxy, "all instances were given by flags")
        assert (await proxy.client.post("/v1/completions", json=BODY)).status_code == 200


async def test_drain_time_that_is_over(tmp_path: Path) -> None:
    async with process(tmp_path, "--drain-timeout-s", "0.3") as proxy:
        hold(proxy.decoder, "middle")
        async with proxy.client.stream("POST", "/v1/completions", json=BODY) as stream:
            await proxy.decoder.reached("middle")
            proxy.child.send_signal(signal.SIGTERM)
            rest = [line async for line in stream.aiter_lines() if line]
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert await proxy.ended(15) == 0


# ── the grace, for load balancers ───────────────────────────────────────────────────────────────────────────────────


async def until_leaving(proxy: Proxy) -> float:
    """Waits until `/ready` says so, on a new connection each time; returns the seconds that it took."""
    started = time.monotonic()
    async with asyncio.timeout(10), httpx.AsyncClient(base_url=proxy.client.base_url) as others:
        while True:
            if (answer := await others.get("/ready")).status_code != 200:
                break
            await asyncio.sleep(0.01)  # the signal's handling tells nobody
    assert answer.status_code == 503
    assert "leaving" in answer.json()["error"]["message"]
    assert answer.headers["connection"] == "close"
    return time.monotonic() - started


async def test_in_the_grace_new_connections_are_served_and_ready_says_503(tmp_path: Path) -> None:
    grace_s = 1.5
    async with process(tmp_path, "--drain-grace-s", str(grace_s)) as proxy:
        gate = hold(proxy.decoder, "middle", is_once=True)
        idle = socket.create_connection((proxy.client.base_url.host, proxy.client.base_url.port))
        async with proxy.client.stream("POST", "/v1/completions", json=BODY) as stream:
            lines = stream.aiter_lines()
            got = [await anext(lines)]
            await proxy.decoder.reached("middle")
            asked = time.monotonic()
            proxy.child.send_signal(signal.SIGTERM)
            assert await until_leaving(proxy) < grace_s / 2
            proxy.child.send_signal(signal.SIGTERM)  # the same wish once more
            async with httpx.AsyncClient(base_url=proxy.client.base_url) as others:
                for _ in range(2):  # the second one needs a connection of its own
                    answer = await others.post("/v1/completions", json=BODY | {"stream": False})
                    assert answer.json()["choices"][0]["text"] == "".join(WORDS)
                    assert answer.headers["connection"] == "close"
                assert (await others.get("/health")).json() == {"status": "ok"}
                assert (await others.get("/status")).json()["leaving"] is True
            assert time.monotonic() - asked < grace_s
            await until_refused(proxy)
            assert time.monotonic() - asked >= grace_s - 0.05
            gate.set()
            got += [line async for line in lines]
        assert [line for line in got if line][-1] == "data: [DONE]"
        assert await proxy.ended(10) == 0
        idle.close()
        assert "Traceback" not in proxy.said()


async def test_ctrl_c_skips_the_grace(tmp_path: Path) -> None:
    async with process(tmp_path, "--drain-grace-s", "60") as proxy:
        proxy.child.send_signal(signal.SIGINT)
        await until_refused(proxy)
        assert await proxy.ended(10) == 0


async def test_a_second_signal_ends_the_grace_and_all_that_runs(tmp_path: Path) -> None:
    async with process(tmp_path, "--drain-grace-s", "60", "--drain-timeout-s", "60") as proxy:
        hold(proxy.decoder, "middle")
        async with proxy.client.stream("POST", "/v1/completions", json=BODY) as stream:
            await proxy.decoder.reached("middle")
            proxy.child.send_signal(signal.SIGTERM)
            await until_leaving(proxy)
            await asyncio.sleep(REPEATED_S)
            proxy.child.send_signal(signal.SIGTERM)
            rest = [line async for line in stream.aiter_lines() if line]
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert await proxy.ended(10) == 0


async def test_a_log_that_nobody_reads_holds_up_neither_requests_nor_the_end(tmp_path: Path) -> None:
    reader, end = os.pipe()
    fcntl.fcntl(end, fcntl.F_SETPIPE_SZ, 4096)
    try:
        async with process(tmp_path, "--log-level", "debug", stderr=end) as proxy:
            for _ in range(30):  # each tells more than a hundred bytes
                answer = await proxy.client.post("/v1/completions", json=BODY)
                assert answer.status_code == 200
            page = (await proxy.client.get("/metrics")).text
            assert "pdproxy_log_records_dropped_total 0.0" in page.splitlines()
            proxy.child.send_signal(signal.SIGTERM)
            assert await proxy.ended(10) == 0
    finally:
        os.close(reader)
        os.close(end)


async def test_a_client_that_leaves_has_its_tokens_and_its_keys_name_in_log_and_metrics(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-secret name=shop\n")
    keys.chmod(0o600)
    async with process(tmp_path, "--api-keys-file", str(keys), "--log-format", "json") as proxy:
        shown = {"authorization": "Bearer sk-secret"}
        gate = hold(proxy.decoder, "middle")
        async with proxy.client.stream("POST", "/v1/completions", json=BODY, headers=shown) as stream:
            lines = stream.aiter_lines()
            got = [await anext(lines)]
            await proxy.decoder.reached("middle")
            while len(got) < len(WORDS) // 2:
                got += [line for line in [await anext(lines)] if line]
        told: list[dict[str, Any]] = []
        async with asyncio.timeout(5):
            while not told:
                await asyncio.sleep(0.02)  # another process writes it
                told = [json.loads(line) for line in proxy.said().splitlines() if '"message":"request"' in line]
        gate.set()
        assert told[0]["outcome"] == "client_gone"
        assert (told[0]["key_name"], told[0]["model"], told[0]["num_prompt_tokens"]) == ("shop", "tiny", 2)
        assert len(got) <= told[0]["num_output_tokens"] < len(WORDS)
        assert told[0]["tokens_by"] == "ids"
        page = (await proxy.client.get("/metrics")).text
        num = told[0]["num_output_tokens"]
        assert f'pdproxy_output_tokens_total{{model="tiny",source="ids"}} {num}.0' in page
        assert "sk-secret" not in proxy.said() + page + (await proxy.client.get("/status")).text


SETTLED = """
import asyncio, gc, sys
from pdproxy.config import settings as config
from pdproxy.server import process_memory as memory
from pdproxy import serve as server
from pdproxy.assemble import assemble

class Server(server.Server):
    async def startup(self, sockets=None):
        assert gc.get_freeze_count() == 0
        await super().startup(sockets)
        print(type(asyncio.get_running_loop()).__module__, gc.get_freeze_count() > 10_000)
        print(gc.get_threshold() == memory.THRESHOLDS)
        self.should_exit = True

Server(assemble(config.load(sys.argv[1:]))).run()
"""


def test_the_fast_loop_and_memory_that_is_not_looked_through_again() -> None:
    options = command(0, 0, "http://127.0.0.1:1", "http://127.0.0.1:2")[4:]
    result = subprocess.run(
        [sys.executable, "-c", SETTLED, *options], env=environment(), capture_output=True, text=True, timeout=60
    )
    assert result.stdout.split() == ["uvloop", "True", "True"], result.stderr


@pytest.mark.parametrize("which", ["port", "proxy_port"])
def test_a_port_that_is_taken(which: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ports = (port, 0) if which == "port" else (0, port)
        result = subprocess.run(
            command(*ports, "http://127.0.0.1:1", "http://127.0.0.1:2", "--log-level", "warning"),
            env=environment(),
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert result.returncode == 2
    [line] = result.stderr.splitlines()
    host = "host" if which == "port" else "proxy_host"
    assert line.startswith(f"pdproxy: {host}, {which}: cannot listen on 127.0.0.1:{port}: ")
    assert "in use" in line


BROKEN = """
from pdproxy.fleet.probe import Probe

async def run(self):
    raise RuntimeError("a bug that nobody expected")

Probe.run = run
from pdproxy.cli import main
main()
"""


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_a_process_ends_where_what_runs_behind_requests_has_failed(tmp_path: Path, workers: str) -> None:
    """Whoever started it starts it again; else it would serve without a look at its engines."""
    flags = ["--prefill", "http://127.0.0.1:9", "--decode", "http://127.0.0.2:9", "--port", "0", "--workers", workers]
    log = tmp_path / "log"
    child = start([sys.executable, "-c", BROKEN, "serve", "--drain-grace-s", "0", *flags], log)
    try:
        assert await asyncio.to_thread(child.wait, START_S) == 1
    finally:
        child.kill()
    said = log.read_text()
    assert "a bug that nobody expected" in said
    assert "this process ends, to be started again" in said
