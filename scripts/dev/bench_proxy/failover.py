"""The module measures how long requests are held up when an engine freezes: one process is stopped under load, and all
that it had goes on elsewhere.

A request is held up by how much longer it takes than those of the same round that were over before the freeze. vLLM
cannot go on in the middle of an answer: the proxy asks for a whole one anew, and breaks a stream off with an error
event. Then the client asks anew here, so that both lose the same.
"""

from __future__ import annotations

import asyncio
import random
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec

from pdproxy.launch.logs import FileLog
from pdproxy.launch.ports import free_ports
from pdproxy.launch.process import Program
from pdproxy.launch.process_group import ProcessGroup
from pdproxy.launch.supervisor import Supervisor
from pdproxy.openai.answer import Chunk
from scripts.dev.bench_proxy.native import build
from scripts.dev.common.errors import BenchError
from scripts.dev.common.events import DONE, data_in
from transfer.command_line.tables import Table

TOKEN_S = 0.02
AFTER_S = 1.0
"""The seconds after the freeze in which a request that is sent still counts."""
HELD_UP_S = 0.5
"""The seconds by which a request must take longer than others to count as held up: others vary by less."""
REQUEST_LIMIT_S = START_TIMEOUT_S = 60.0
GRACE_S = 5.0
HEADINGS = (
    "frozen",
    "answers",
    "requests",
    "held up",
    "failed",
    "broken off",
    "delay p50 s",
    "delay max s",
    "whole/streamed",
)


@dataclass(frozen=True, slots=True)
class Size:
    """Size says how many clients ask for how many tokens each time, and how often the proxy looks at an engine."""

    clients: int
    tokens: int
    probe_interval_s: float
    probe_timeout_s: float

    @property
    def options(self) -> list[str]:
        """Returns the proxy's options, as far as they are not its defaults. Prefillers take turns: by default, one that
        is silent would get hardly a request before it is found to be down."""
        looks = ["--probe-interval-s", str(self.probe_interval_s), "--probe-timeout-s", str(self.probe_timeout_s)]
        cooling = ["--breaker-cool-off-s", str(self.probe_timeout_s), "--slow-start-s", "0"]
        return [*looks, *cooling, "--prefill-policy", "round_robin"]


LARGE, SMALL = Size(16, 100, 0.5, 1.0), Size(6, 25, 0.2, 0.2)


@dataclass(slots=True)
class Asked:
    """Asked is a request and its end. Times are in seconds, `sent_at` and `ended_at` on the monotonic clock."""

    sent_at: float
    ended_at: float = 0.0
    num_broken_off: int = 0
    complaint: str = ""
    """The reason for which the request failed."""
    delay_s: float = 0.0


class Client:
    """Client asks again and again until `is_over`, and notes each request in `asked`."""

    def __init__(self, http: httpx.AsyncClient, size: Size, *, is_stream: bool) -> None:
        self.asked: list[Asked] = []
        self.is_over = False
        self._http = http
        self._body = {"model": "bench", "prompt": "Hi.", "max_tokens": size.tokens, "stream": is_stream}
        self._expected = re.compile(rf"(@\d{{19}}){{{size.tokens}}}")

    async def run(self, wait_s: float) -> None:
        """Asks, beginning after `wait_s` seconds, until `is_over`."""
        await asyncio.sleep(wait_s)
        while not self.is_over:
            asked = Asked(time.monotonic())
            try:
                async with asyncio.timeout(REQUEST_LIMIT_S):
                    while (text := await (self._stream() if self._body["stream"] else self._whole())) is None:
                        asked.num_broken_off += 1
                if not self._expected.fullmatch(text):
                    asked.complaint = f"it is another text: {text[:60]!r}"
            except (httpx.HTTPError, TimeoutError, BenchError, LookupError, ValueError) as error:
                asked.complaint = f"{type(error).__name__}: {error}"
            asked.ended_at = time.monotonic()
            self.asked.append(asked)

    async def _whole(self) -> str:
        reply = await self._http.post("/v1/completions", json=self._body)
        if reply.status_code != 200:
            raise BenchError(f"HTTP {reply.status_code}: {reply.text[:200]}")
        return msgspec.json.decode(reply.content, type=Chunk).choices[0].said

    async def _stream(self) -> str | None:
        """Returns the text of a streamed answer, or None if the stream was broken off, and said so. Raises `BenchError`
        where it ends without a word."""
        text = ""
        async with self._http.stream("POST", "/v1/completions", json=self._body) as reply:
            if reply.status_code != 200:
                raise BenchError(f"HTTP {reply.status_code}: {(await reply.aread())[:200]!r}")
            async for data in data_in(reply):
                if data == DONE:
                    return text
                chunk = msgspec.json.decode(data, type=Chunk)
                if chunk.error is not None:
                    return None
                text += chunk.choices[0].said
        raise BenchError(f"the stream ended silently after {len(text)} characters")


class Fleet(ProcessGroup):
    """Fleet is two prefillers, two decoders and a proxy; the engines have the names by which the proxy calls them."""

    def __init__(self, supervisor: Supervisor, size: Size) -> None:
        super().__init__(supervisor)
        self._size = size

    async def start(self) -> str:
        """Starts everything, and returns the proxy's URL, once it is ready. Raises `BenchError`, and `LaunchError` for
        what does not come up."""
        port, *ports = free_ports(9, random.Random())
        engine, urls = str(build("engine")), {}
        for number, name in enumerate(("prefill-0", "prefill-1", "decode-0", "decode-1")):
            prefill, decode = ports[2 * number : 2 * number + 2]
            urls[name] = f"http://127.0.0.1:{decode if name.startswith('decode') else prefill}"
            words = (f"prefill_port={prefill}", f"decode_port={decode}", f"delay_us={TOKEN_S * 1e6:.0f}")
            self._spawn(name, (engine, *words), f"{urls[name]}/health")
        fleet = [word for name, url in urls.items() for word in (f"--{name.partition('-')[0]}", url)]
        own = ("--port", str(port), "--proxy-port", "0", "--drain-grace-s", "0")
        serving = ("--engine", "vllm_nixl", *own, *self._size.options)
        url = f"http://127.0.0.1:{port}"
        self._spawn("pdproxy", (sys.executable, "-P", "-m", "pdproxy", "serve", *serving, *fleet), f"{url}/ready")
        await self._supervisor.until_ready(START_TIMEOUT_S)
        return url

    def _spawn(self, name: str, command: tuple[str, ...], ready_url: str) -> None:
        self.spawn(Program(name=name, command=command, ready_url=ready_url))


async def measure_failover(
    size: Size, rounds: int, logs: Path, rows: list[dict[str, Any]], tell: Callable[[str], None]
) -> None:
    """Fills in `rows` once all rounds are over: one for each kind of engine that freezes and of answers. Raises as
    `Fleet.start` does, and `BenchError` where the proxy is not well without a freeze."""
    found: dict[tuple[str, bool], list[Asked]] = {}
    with FileLog(logs, ()) as log:
        async with Supervisor(log, grace_s=GRACE_S) as supervisor:
            fleet = Fleet(supervisor, size)
            url = await fleet.start()
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=None, limits=limits) as http:
                for number in range(rounds):
                    for role, is_stream in (("decode", True), ("decode", False), ("prefill", True), ("prefill", False)):
                        name = f"{role}-{number % 2}"
                        taken = await supervisor.while_all_live(_round(http, size, fleet, name, is_stream=is_stream))
                        found.setdefault((role, is_stream), []).extend(taken)
                        longest = max(asked.delay_s for asked in taken)
                        form = "streamed" if is_stream else "whole"
                        tell(f"round {number + 1} of {rounds}: {name} froze, {form}: at most {longest:.2f} s longer")
    rows += make_rows(found)


async def _round(http: httpx.AsyncClient, size: Size, fleet: Fleet, name: str, *, is_stream: bool) -> list[Asked]:
    """Returns the requests that were under way when `name` was stopped, or sent soon after. Raises `BenchError` where
    one failed before."""
    await _until_up(http)
    client, answer_s = Client(http, size, is_stream=is_stream), size.tokens * TOKEN_S
    try:
        async with asyncio.TaskGroup() as clients:
            for number in range(size.clients):
                clients.create_task(client.run(answer_s * number / size.clients))
            await asyncio.sleep(2.5 * answer_s)
            fleet.freeze(name)
            frozen_at = time.monotonic()
            await asyncio.sleep(AFTER_S)
            client.is_over = True
    finally:
        fleet.thaw(name)
    before = [asked for asked in client.asked if asked.ended_at < frozen_at]
    for asked in before:
        if asked.complaint or asked.num_broken_off:
            raise BenchError(f"a request failed while all was well: {asked.complaint or 'its stream was broken off'}")
    usual_s = statistics.median(asked.ended_at - asked.sent_at for asked in before)
    taken = [asked for asked in client.asked if asked.ended_at >= frozen_at]
    for asked in taken:
        asked.delay_s = asked.ended_at - asked.sent_at - usual_s
        if asked.num_broken_off and not name.startswith("decode"):
            asked.complaint = asked.complaint or "its stream was broken off, and no decoder was frozen"
    return taken


async def _until_up(http: httpx.AsyncClient) -> None:
    """Waits until the proxy sends requests to every engine. Raises `BenchError`."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while not all(one["routable"] for one in (await http.get("/status", timeout=REQUEST_LIMIT_S)).json()["fleet"]):
        if time.monotonic() > deadline:
            raise BenchError("the proxy does not take an engine back that goes on again")
        # HTTP offers nothing to wait on, so it is asked again.
        await asyncio.sleep(0.1)


def make_rows(found: dict[tuple[str, bool], list[Asked]]) -> list[dict[str, Any]]:
    """Returns one row for each role and way of answering, streamed ones first. Delays, in seconds, are those of
    requests that were held up and did not fail."""
    rows: list[dict[str, Any]] = []
    for (role, is_stream), taken in found.items():
        delays = [asked.delay_s for asked in taken if asked.delay_s > HELD_UP_S and not asked.complaint]
        failures = [asked.complaint for asked in taken if asked.complaint]
        row = {
            "frozen": {"decode": "decoder", "prefill": "prefiller"}[role],
            "answers": "streamed" if is_stream else "whole",
            "requests": len(taken),
            "held_up": len(delays),
            "failed": len(failures),
            "broken_off": sum(asked.num_broken_off for asked in taken),
            "delay_p50_s": statistics.median(delays) if delays else None,
            "delay_max_s": max(delays, default=None),
            "ratio": None,
            "complaint": next(iter(failures), ""),
        }
        if not is_stream and delays and (streamed := rows[-1]["delay_max_s"]):
            row["ratio"] = row["delay_max_s"] / streamed
        rows.append(row)
    return rows


def make_table(rows: list[dict[str, Any]]) -> Table:
    """Returns a table of what `measure_failover` has filled in; delays are in seconds, of the requests that were held
    up."""
    table = Table(*HEADINGS, names=2, words=(0, 1))
    for row in rows:
        figures = ("" if row[name] is None else f"{row[name]:.2f}" for name in ("delay_p50_s", "delay_max_s", "ratio"))
        counts = (str(row[name]) for name in ("requests", "held_up", "failed", "broken_off"))
        table.add_row(row["frozen"], row["answers"], *counts, *figures)
    return table
