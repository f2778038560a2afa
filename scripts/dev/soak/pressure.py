"""The module measures what ordinary requests notice of a proxy's other clients and engines that use up whatever can run
out: descriptors, memory, the event loop, the log's pipe, all at once.

The proxy may have few descriptors and little memory for bodies, nobody reads its log, and two hundred of its instances
are not there. First ordinary clients are alone with it, then come the attackers, then the calm in which everything must
be as it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec

from pdproxy.launch.ports import free_ports
from pdproxy.launch.process import Program
from pdproxy.launch.process_group import ProcessGroup
from pdproxy.launch.supervisor import Supervisor
from scripts.dev.common.errors import BenchError
from scripts.dev.common.events import data_in
from scripts.dev.common.vitals import Vitals, read_vitals
from scripts.dev.soak.attackers import Attackers
from transfer.command_line.tables import Table

NUM_CLIENTS = 6
LOG = "stderr"
NUM_ABSENT = 200
MAX_DESCRIPTORS = 768
MEMORY_BUDGET_MIB = 256
QUIET_SHARE = 0.2
"""The share of the time in which the ordinary clients are alone."""
LEASE_S = 10.0
"""The seconds after which engines drop KV that nobody fetches. Until then the proxy may hold its pages."""
CALM_S = 2 * LEASE_S
"""The seconds after the attack in which everything has to be as before."""
START_TIMEOUT_S, REQUEST_LIMIT_S = 60.0, 60.0
MAX_RATIO = 1.5
"""The most that an ordinary request's p99 may be, in quiet p99s."""
MAX_RSS_GROWTH_MB, MAX_RSS_LEFT_MB, MAX_FD_GROWTH = MEMORY_BUDGET_MIB + 200.0, 100.0, 8


@dataclass(slots=True)
class Ordinary:
    """`Ordinary` are the requests of ordinary clients in one part of the run; times are in seconds."""

    durations_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    """The longest time between two tokens of each request."""
    complaints: list[str] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        return {
            "requests": len(self.durations_s) + len(self.complaints),
            "failed": len(self.complaints),
            "p50_s": round(statistics.median(self.durations_s), 4) if self.durations_s else None,
            "p99_s": round(_p99(self.durations_s), 4) if self.durations_s else None,
            "longest_gap_p99_s": round(_p99(self.gaps_s), 4) if self.gaps_s else None,
            "longest_gap_s": round(max(self.gaps_s, default=0.0), 4),
        }


@dataclass(slots=True)
class PressureFindings:
    """`PressureFindings` is what was seen; a list of complaints is empty where all is well."""

    seed: int
    quiet: Ordinary = field(default_factory=Ordinary)
    pressed: Ordinary = field(default_factory=Ordinary)
    before: Vitals | None = None
    after: Vitals | None = None
    peak_rss_mb: float = 0.0
    most_fds: int = 0
    longest_status_s: float = 0.0
    judged_down: set[str] = field(default_factory=set)
    num_held: int = 0
    in_flight: list[dict[str, Any]] = field(default_factory=list)
    """The requests and orphans that are left at the end."""
    attacks: dict[str, dict[str, int]] = field(default_factory=dict)
    is_complete: bool = False


class Fleet(ProcessGroup):
    """A `Fleet` is a pair of engines that are well, a pair that is not, many that are not there, and the proxy."""

    def __init__(self, supervisor: Supervisor, work_dir: Path, seed: int) -> None:
        super().__init__(supervisor)
        self._work_dir = work_dir
        self.port, *self._ports = free_ports(6, random.Random(seed))

    async def start(self) -> None:
        """Returns when a request would be served. Raises `LaunchError`."""
        for number, model in enumerate(("well", "hostile")):
            ports = self._ports[2 * number : 2 * number + 2]
            command = (sys.executable, "-m", "scripts.dev.soak.hostile_engine", model, *map(str, ports))
            self.spawn(Program(name=model, command=command, ready_url=f"http://127.0.0.1:{ports[1]}/health"))
        await self._supervisor.until_ready(START_TIMEOUT_S)
        config = self._work_dir / "fleet.toml"
        config.write_text("".join(self._tables()))
        serving = (sys.executable, "-P", "-m", "pdproxy", "serve", "--config", str(config), "--log-level", "debug")
        limits = ("--memory-budget", f"{MEMORY_BUDGET_MIB}MiB", "--port", str(self.port), "--proxy-port", "0")
        grace = ("--drain-grace-s", "0")
        lease = ("--engine-lease-s", str(LEASE_S))
        limited = f'ulimit -Sn 256; ulimit -Hn {MAX_DESCRIPTORS}; log=$1; shift; exec "$@" 2>"$log"'
        url = f"http://127.0.0.1:{self.port}"
        command = ("sh", "-c", limited, "sh", str(self._work_dir / LOG), *serving, *limits, *grace, *lease)
        self.spawn(Program(name="pdproxy", command=command, ready_url=f"{url}/ready"))
        await self._supervisor.until_ready(START_TIMEOUT_S)

    def _tables(self) -> Iterator[str]:
        ports = iter(self._ports)
        for model in ("well", "hostile"):
            for role in ("prefill", "decode"):
                yield _table(f"{model}-{role}", role, next(ports), model)
        for number in range(NUM_ABSENT // 2):
            for role in ("prefill", "decode"):
                yield _table(f"absent-{role}-{number}", role, 1 + number + (role == "decode") * 500, "absent")


@contextlib.contextmanager
def _unread(pipe: Path) -> Iterator[None]:
    """Returns a context manager with a pipe at this path whose reading end is open, and never read."""
    os.mkfifo(pipe)
    end = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        yield
    finally:
        os.close(end)


def _table(name: str, role: str, port: int, model: str) -> str:
    return (
        f'[[instances]]\nname = "{name}"\nrole = "{role}"\nurl = "http://127.0.0.1:{port}"\n'
        f'engine = "vllm_nixl"\nmodel = "{model}"\n\n'
    )


async def press(supervisor: Supervisor, findings: PressureFindings, work_dir: Path, duration_s: float) -> None:
    """Fills in `findings`. Raises `LaunchError` for what does not come up, and `httpx.HTTPError` where the proxy does
    not tell how it is."""
    with _unread(work_dir / LOG):
        await _press(supervisor, findings, work_dir, duration_s)


async def _press(supervisor: Supervisor, findings: PressureFindings, work_dir: Path, duration_s: float) -> None:
    fleet = Fleet(supervisor, work_dir, findings.seed)
    await fleet.start()
    limits = httpx.Limits(max_connections=None)
    url = f"http://127.0.0.1:{fleet.port}"
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=REQUEST_LIMIT_S, limits=limits) as http:
        pid = fleet.pid("pdproxy")
        await _ordinary(http, 2.0, Ordinary())  # what is made at first use is there now
        findings.before = read_vitals(pid, 0)
        await _ordinary(http, duration_s * QUIET_SHARE, findings.quiet)
        attackers = Attackers(fleet.port, pid, findings.seed)
        attacking, watching = asyncio.create_task(attackers.run()), asyncio.create_task(_watch(http, pid, findings))
        try:
            await _ordinary(http, duration_s * (1 - QUIET_SHARE), findings.pressed)
        finally:
            for task in (attacking, watching):
                task.cancel()
            ended = await asyncio.gather(attacking, watching, return_exceptions=True)
        for one in ended:
            if isinstance(one, Exception):
                raise one
        findings.attacks = {name: dict(outcomes) for name, outcomes in attackers.statuses.items()}
        await _until_calm(http, pid, findings)
    findings.is_complete = True


async def _ordinary(http: httpx.AsyncClient, seconds: float, found: Ordinary) -> None:
    end = time.monotonic() + seconds

    async def ask(number: int) -> None:
        await asyncio.sleep(number * 0.1)
        while time.monotonic() < end:
            await _ask(http, found, is_stream=number % 3 != 2)

    async with asyncio.TaskGroup() as clients:
        for number in range(NUM_CLIENTS):
            clients.create_task(ask(number))


async def _ask(http: httpx.AsyncClient, found: Ordinary, *, is_stream: bool) -> None:
    body = {"model": "well", "prompt": "Hi.", "max_tokens": 25, "stream": is_stream}
    began = at = time.monotonic()
    gap_s, num_events, last = 0.0, 0, b""
    try:
        async with http.stream("POST", "/v1/completions", json=body) as reply:
            if reply.status_code != 200:
                raise BenchError(f"HTTP {reply.status_code}: {(await reply.aread())[:300]!r}")
            if is_stream:
                async for data in data_in(reply):
                    last, now = data, time.monotonic()
                    gap_s, at, num_events = max(gap_s, now - at) if num_events else 0.0, now, num_events + 1
                if last != b"[DONE]":
                    raise BenchError(f"the stream ended with {last[:300]!r}")
            else:
                msgspec.json.decode(await reply.aread())
    except (httpx.HTTPError, BenchError, msgspec.DecodeError) as error:
        found.complaints.append(f"{type(error).__name__}: {error}")
        return
    found.durations_s.append(time.monotonic() - began)
    if is_stream:
        found.gaps_s.append(gap_s)


async def _watch(http: httpx.AsyncClient, pid: int, findings: PressureFindings) -> None:
    """Looks at the proxy twice a second, until it is cancelled."""
    while True:
        began = time.monotonic()
        status = (await http.get("/status")).json()
        findings.longest_status_s = max(findings.longest_status_s, time.monotonic() - began)
        findings.judged_down |= {
            f"{one['name']}: {one['state']}"
            for one in status["fleet"]
            if one["name"].startswith("well") and one["state"] != "ready"
        }
        vitals = read_vitals(pid, 0)
        findings.peak_rss_mb = max(findings.peak_rss_mb, vitals.rss_mb)
        findings.most_fds = max(findings.most_fds, vitals.num_fds)
        await asyncio.sleep(0.5)


async def _until_calm(http: httpx.AsyncClient, pid: int, findings: PressureFindings) -> None:
    """Waits until nothing is under way, and notes what is left then or after `CALM_S`."""
    deadline = time.monotonic() + CALM_S
    while True:
        status = (await http.get("/status")).json()
        findings.num_held = sum(book["held"] for book in status["ledger"].values())
        findings.in_flight = status["in_flight"]
        findings.after = read_vitals(pid, 0)
        assert findings.before is not None
        is_calm = not findings.num_held and not findings.in_flight
        if is_calm and findings.after.num_fds <= findings.before.num_fds + MAX_FD_GROWTH:
            return
        if time.monotonic() > deadline:
            return
        await asyncio.sleep(0.5)


def make_pressure_report(findings: PressureFindings) -> dict[str, Any]:
    before, after = findings.before, findings.after
    return {
        "seed": findings.seed,
        "is_complete": findings.is_complete,
        "quiet": findings.quiet.facts(),
        "pressed": findings.pressed.facts(),
        "ratio": _ratio(findings),
        "judged_down": sorted(findings.judged_down),
        "longest_status_s": round(findings.longest_status_s, 3),
        "peak_rss_mb": findings.peak_rss_mb,
        "most_fds": findings.most_fds,
        "before": None if before is None else before.facts(),
        "after": None if after is None else after.facts(),
        "held_at_end": findings.num_held,
        "in_flight_at_end": findings.in_flight,
        "attacks": findings.attacks,
        "complaints": findings.pressed.complaints[:20],
    }


def pressure_problems(findings: PressureFindings) -> list[str]:
    """Returns what is wrong, in words; nothing where all is well."""
    before, after = findings.before, findings.after
    if not findings.is_complete or before is None or after is None:
        return ["it was not finished"]
    ratio = _ratio(findings)
    found = [
        (bool(findings.quiet.complaints), f"ordinary requests failed in the quiet: {findings.quiet.complaints[:3]}"),
        (
            bool(findings.pressed.complaints),
            f"ordinary requests failed under pressure: {findings.pressed.complaints[:5]}",
        ),
        (ratio is None or ratio > MAX_RATIO, f"ordinary requests' p99 is {ratio} times that of the quiet"),
        (bool(findings.judged_down), f"engines that are well were judged down: {sorted(findings.judged_down)}"),
        (findings.peak_rss_mb > before.rss_mb + MAX_RSS_GROWTH_MB, f"memory rose to {findings.peak_rss_mb} MiB"),
        (after.rss_mb > before.rss_mb + MAX_RSS_LEFT_MB, f"memory stays at {after.rss_mb} MiB, from {before.rss_mb}"),
        (after.num_fds > before.num_fds + MAX_FD_GROWTH, f"{after.num_fds} descriptors are left, of {before.num_fds}"),
        (bool(findings.num_held), f"{findings.num_held} pages are held at the end"),
        (
            bool(findings.in_flight),
            f"{len(findings.in_flight)} requests are in flight at the end: {findings.in_flight[:2]}",
        ),
    ]
    return [words for is_wrong, words in found if is_wrong]


def make_pressure_table(findings: PressureFindings) -> Table:
    table = Table("", "requests", "failed", "p50 s", "p99 s", "longest gap p99 s", "longest gap s")
    for name, part in (("quiet", findings.quiet), ("under pressure", findings.pressed)):
        table.add_row(name, *("–" if value is None else str(value) for value in part.facts().values()))
    return table


def _ratio(findings: PressureFindings) -> float | None:
    quiet, pressed = findings.quiet.durations_s, findings.pressed.durations_s
    return round(_p99(pressed) / _p99(quiet), 3) if quiet and pressed else None


def _p99(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * 0.99))]
