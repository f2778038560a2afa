"""The module looks for cliffs: what a request costs pdproxy as one thing grows by orders of magnitude, and what a fleet
that is large or a crowd that waits costs while nothing happens.

Each size has a proxy and engines of its own. The load stands, and is looked at in the midst, some windows long. What
the proxy takes without any load, for its looks at instances, is measured before, subtracted, and told apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import statistics
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from pdproxy.launch.logs import FileLog
from pdproxy.launch.supervisor import Supervisor
from scripts.dev.bench_proxy.cores import Cores, on
from scripts.dev.bench_proxy.native import build, copies
from scripts.dev.bench_proxy.plan import KIB, Scenario
from scripts.dev.bench_proxy.samples import Sample
from scripts.dev.bench_proxy.stage import Stage
from scripts.dev.bench_proxy.targets import OURS
from scripts.dev.common.errors import BenchError
from transfer.descriptors import limit

GRACE_S = 5.0
SPARE_DESCRIPTORS = 200
CLIENTS = 32
FEW_WAITING = 200
SLOTS = 16
TOKENS_PER_S = 2000
ENDLESS = 200_000
"""More tokens than any stream of these loads comes to."""
ROOMY = 1 << 40
"""Blocks of a KV cache that has room for all answers."""
LARGE_FLEET = 500
"""The number of pairs from which on the proxy's looks at them count: their cost is measured over a whole round."""
SCRAPE_EVERY_S = 15.0
NUM_WATCHERS = 20
NUM_WAITING = 10_000
NUM_SLOW = 5_000
OTHERS = 64
"""The number of streams beside slow readers."""
BEGIN_S = 2.0
"""The seconds in which those who look at the page have got their first picture."""
CALM_CORES = 0.15
MOST_SHARE = 0.01
NOTHING = 0.005
EQUAL = 1.05
MOST_KIB = 256
PATIENT = ("--idle-timeout-s", "600", "--request-timeout-s", "3600")

Tell = Callable[[str], None]
Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Axis is one thing that grows."""

    name: str
    what: str
    unit: str
    """The thing that the CPU is told for: a request, a token, or a KiB."""
    sizes: tuple[int, ...]
    load: Callable[[int], Scenario]


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Extent says how much is measured."""

    windows: int
    window_s: float
    idle_s: float
    probing_s: float
    """The seconds for which a large fleet is looked at while it is idle."""
    most: int
    """The largest size of any axis."""


LARGE = Extent(windows=3, window_s=2.0, idle_s=2.0, probing_s=10.0, most=sys.maxsize)
SMALL = Extent(windows=1, window_s=0.5, idle_s=0.2, probing_s=1.0, most=10)


def _load(name: str, size: int, **fields: Any) -> Scenario:
    usual: dict[str, Any] = {"clients": CLIENTS, "requests": 400, "is_ours_alone": True, "is_standing": True}
    return Scenario(name=f"{name}-{size}", what="", is_warmed=False, **usual | fields)


def _instances(size: int) -> Scenario:
    return _load("instances", size, num_pairs=size // 2, requests=max(400, 2 * size))


def _waiting(size: int) -> Scenario:
    # Those who wait have all had an answer before.
    return _load("waiting", size, clients=SLOTS + size, requests=max(400, SLOTS + size), slots=SLOTS, prompt_bytes=0)


def _crowded(size: int) -> Scenario:
    pairs = size // 2
    return _load(
        "crowded", size, num_pairs=pairs, clients=pairs + FEW_WAITING, requests=400 + 2 * pairs, slots=1, prompt_bytes=0
    )


def _models(size: int) -> Scenario:
    return _load("models", size, num_models=size, requests=max(400, 2 * size))


def _apart(size: int) -> Scenario:
    return _load("models-apart", size, num_models=size, num_pairs=APART_PAIRS, requests=2 * APART_PAIRS)


def _streams(size: int) -> Scenario:
    return _load(
        "streams",
        size,
        clients=size,
        requests=size,
        tokens=ENDLESS,
        is_stream=True,
        is_held=True,
        num_blocks=ROOMY,
        token_delay_s=size / TOKENS_PER_S,
        spread_s=min(10.0, size / 1000),
        options=PATIENT,
    )


def _headers(size: int) -> Scenario:
    return _load("headers", size, num_headers=size)


def _body(size: int) -> Scenario:
    bodies = ("--max-prompt-bytes", "8MiB")
    return _load("body", size, clients=4, requests=100, prompt_bytes=size * KIB, options=bodies)


APART_PAIRS = 1000

AXES: tuple[Axis, ...] = (
    Axis(
        name="instances",
        what="instances, half of them prefillers",
        unit="request",
        sizes=(2, 10, 100, 1000, 2500),
        load=_instances,
    ),
    Axis(
        name="waiting",
        what=f"requests that wait for {SLOTS} slots",
        unit="request",
        sizes=(0, 1000, NUM_WAITING, 100_000),
        load=_waiting,
    ),
    Axis(
        name="crowded",
        what=f"instances with a slot for each pair, while {FEW_WAITING} more requests wait",
        unit="request",
        sizes=(2, 10, 100, 1000),
        load=_crowded,
    ),
    Axis(
        name="models",
        what="models, all served by the same pair",
        unit="request",
        sizes=(1, 10, 100, 1000),
        load=_models,
    ),
    Axis(
        name="models-apart",
        what=f"models, of which {APART_PAIRS:,} pairs serve one each",
        unit="request",
        sizes=(1, 10, 100, APART_PAIRS),
        load=_apart,
    ),
    Axis(
        name="streams",
        what=f"open streams, which get {TOKENS_PER_S:,} tokens a second together",
        unit="token",
        sizes=(1, 100, 1000, NUM_WAITING, 20_000),
        load=_streams,
    ),
    Axis(name="headers", what="more headers of a request", unit="request", sizes=(0, 10, 30, 100), load=_headers),
    Axis(name="body", what="KiB of a prompt", unit="KiB", sizes=(1, 16, 64, 256, 1024, 4096), load=_body),
)


def pick_axes(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the names of axes and of what is measured besides, all where none are given. Raises `ValueError`."""
    known = (*(axis.name for axis in AXES), *BESIDES)
    for name in names:
        if name not in known:
            raise ValueError(f"no cliff is called {name!r}; there are {', '.join(known)}")
    return tuple(name for name in known if not names or name in names)


def most_clients() -> int:
    """Returns how many clients the proxy can have here that each take an engine's connection as well."""
    return (limit() - SPARE_DESCRIPTORS) // 2


def sizes_of(axis: Axis, extent: Extent, most_clients: int) -> list[int]:
    """Returns the sizes that are measured. One that takes more descriptors than there are gives way to the largest that
    does not."""
    sizes = [min(size, extent.most) for size in axis.sizes]
    return list(dict.fromkeys(min(size, most_clients) if axis.load(size).clients > CLIENTS else size for size in sizes))


async def measure_cliffs(
    names: Sequence[str], extent: Extent, *, is_compiled: bool, logs: Path, work: Path, rows: list[Row], tell: Tell
) -> None:
    """Measures what is named, and fills in `rows`. Raises `BenchError`, and `LaunchError` when stopped from outside."""
    programs = {name: build(name) for name in ("engine", "client")}
    made = copies(work, is_compiled=is_compiled)
    theatre = _Theatre(programs, made.compiled or made.interpreted, logs, Cores.here())
    for axis in AXES:
        if axis.name not in names:
            continue
        found: list[Row] = []
        for size in sizes_of(axis, extent, most_clients()):
            row = await _point(theatre, axis, size, extent)
            found.append(row)
            rows.append(row | {"ratio": _ratio(row, found[0])})
            tell(f"{axis.name}: {say(rows[-1])}")
    for name, measure in BESIDES.items():
        if name in names:
            for row in await measure(theatre, extent):
                rows.append(row)
                tell(f"{name}: {say(row)}")


@dataclass(frozen=True, slots=True)
class _Theatre:
    """_Theatre has what every stage needs."""

    programs: dict[str, Path]
    package: Path
    logs: Path
    cores: Cores

    @contextlib.asynccontextmanager
    async def stage(self, scenario: Scenario) -> AsyncIterator[Stage]:
        """Starts one pdproxy with its engines; all instances get requests when the block begins."""
        with on(self.cores.helpers), FileLog(self.logs / scenario.name, ()) as log:
            async with Supervisor(log, grace_s=GRACE_S) as supervisor:
                stage = Stage(supervisor, scenario, self.cores, self.programs, {OURS: self.package})
                await stage.set([], has_ids=True)
                stage.check()
                await stage.until_routable(OURS)
                yield stage


def _idle_s(scenario: Scenario, extent: Extent) -> float:
    return extent.probing_s if scenario.num_pairs >= LARGE_FLEET else extent.idle_s


async def _point(theatre: _Theatre, axis: Axis, size: int, extent: Extent) -> Row:
    scenario = axis.load(size)
    scenario = replace(scenario, num_pairs=min(scenario.num_pairs, extent.most))
    async with theatre.stage(scenario) as stage:
        start_s = stage.usage(OURS).proxy
        idle_cores = await stage.cores(OURS, _idle_s(scenario, extent))
        async with stage.standing(OURS) as clients:
            taken = [await stage.window(OURS, clients, extent.window_s, idle_cores) for _ in range(extent.windows)]
    row = _row(taken, axis=axis.name, size=size, unit=axis.unit, idle_cores=idle_cores, start_s=start_s)
    row["cpu_us"] = statistics.median([_cpu_us(each, axis, size) for each in taken])
    return row


def _cpu_us(sample: Sample, axis: Axis, size: int) -> float:
    if axis.unit == "token":
        return sample.cpu_us_per_token or 0.0
    return sample.cpu_ms_per_req * 1e3 / (size if axis.unit == "KiB" else 1)


def _row(taken: Sequence[Sample], **fields: Any) -> Row:
    return {
        "rss_mb": taken[-1].rss_mb,
        "transit_p99_us": statistics.median(
            [one.transit_p99_us for one in taken if one.transit_p99_us is not None] or [0.0]
        ),
        "proxy_share": statistics.median([one.proxy_share for one in taken]),
        "elsewhere_cores": max(one.elsewhere_cores for one in taken),
        "errors": sum(one.num_errors for one in taken),
        "complaint": next((one.complaint for one in taken if one.complaint), ""),
        "unproven": sum(one.num_unproven for one in taken),
        **fields,
    }


def _ratio(row: Row, least: Row) -> float | None:
    return row["cpu_us"] / least["cpu_us"] if least["cpu_us"] else None


# ── what is no axis ─────────────────────────────────────────────────────────────────────────────────────────────────


async def _crowds(theatre: _Theatre, extent: Extent) -> list[Row]:
    """Returns the cores used while a crowd waits: for slots, because no decoder comes to its first token, and for KV,
    because no answer ends."""
    size, blocks = min(NUM_WAITING, most_clients() - SLOTS, extent.most), 64
    streams = {"tokens": 64, "clients": SLOTS + size, "is_stream": True, "token_delay_s": 600.0, "prompt_bytes": 0}
    options: tuple[str, ...] = (*PATIENT, "--max-queue", str(SLOTS + size), "--slot-timeout-s", "3600")
    options = (*options, "--first-byte-timeout-s", "3600", "--engine-lease-s", "3600")
    loads = {
        "slots": _load("crowd-slots", size, requests=0, is_late=True, slots=SLOTS, options=options, **streams),
        "KV": _load("crowd-kv", size, requests=1, is_held=True, num_blocks=blocks, options=options, **streams),
    }
    rows = []
    for what, scenario in loads.items():
        async with theatre.stage(scenario) as stage:
            idle = await stage.cores(OURS, extent.idle_s)
            async with stage.standing(OURS):
                await stage.until_waiting(OURS, size)
                waiting = await stage.num_waiting(OURS)
                cores = await stage.cores(OURS, extent.probing_s)
        about = f"{waiting:,} requests wait for {what}: cores beyond those of an idle proxy"
        rows.append(_fact(about, max(0.0, cores - idle), NOTHING, idle_cores=idle))
    return rows


async def _watchers(theatre: _Theatre, extent: Extent) -> list[Row]:
    """Returns what those cost who look at a large fleet that is at work: Prometheus, and people at the page."""
    size = min(1000, extent.most)
    streams = {"clients": 10, "tokens": 20, "is_stream": True, "token_delay_s": 0.05, "spread_s": 1.0}
    async with theatre.stage(_load("watchers", size, num_pairs=size // 2, requests=10, **streams)) as stage:
        idle = await stage.cores(OURS, _idle_s(stage.scenario, extent))
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=stage.url(OURS), trust_env=False, timeout=60, limits=limits) as http:
            async with stage.standing(OURS):
                alone = await stage.cores(OURS, extent.probing_s)
                async with _looking(http, NUM_WATCHERS) as seen:
                    before = sum(seen)
                    watched = await stage.cores(OURS, extent.probing_s)
                    seen_kib = (sum(seen) - before) / KIB / NUM_WATCHERS / extent.probing_s
            scrape_s, num_bytes = await _scrape(stage, http)
    scraped = f"{num_bytes >> 10:,} KiB in {scrape_s * 1e3:.0f} ms, every {SCRAPE_EVERY_S:g} s"
    return [
        _fact(
            f"/metrics of {size:,} instances, {scraped}: cores", scrape_s / SCRAPE_EVERY_S, MOST_SHARE, idle_cores=idle
        ),
        _fact(
            f"/ui of {size:,} instances, {NUM_WATCHERS} who look and get {seen_kib:.0f} KiB a second each: cores",
            max(0.0, watched - alone),
            MOST_SHARE,
        ),
    ]


async def _scrape(stage: Stage, http: httpx.AsyncClient) -> tuple[float, int]:
    """Returns the CPU seconds of one answer from ``/metrics``, looks at instances meanwhile included, and its size in
    bytes."""
    num_bytes, took = 0, []
    for _ in range(5):
        before = stage.usage(OURS)
        num_bytes = len((await http.get("/metrics")).content)
        took.append(stage.usage(OURS).since(before).proxy)
    return statistics.median(took), num_bytes


@contextlib.asynccontextmanager
async def _looking(http: httpx.AsyncClient, count: int) -> AsyncIterator[list[int]]:
    """Has so many look at the page while the block lasts. Yields the bytes that each has got so far."""
    seen = [0] * count

    async def look(number: int) -> None:
        async with http.stream("GET", "/ui/events") as reply:
            async for block in reply.aiter_raw():
                seen[number] += len(block)

    tasks = [asyncio.create_task(look(number)) for number in range(count)]
    try:
        await asyncio.sleep(BEGIN_S)
        if not all(seen):
            raise BenchError("somebody who looks at the page sees nothing")
        yield seen
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _slow(theatre: _Theatre, extent: Extent) -> list[Row]:
    """Returns what readers of one byte a second cost: memory for each, and how late the tokens of others come.

    The others' latency is compared with that through another pdproxy, which has engines and clients of its own, at the
    same time: the readers and their engines keep the machine busy, which is not the proxy's doing.
    """
    size = min(NUM_SLOW, extent.most, most_clients() - OTHERS)
    streams = {"is_stream": True, "token_delay_s": 0.02}
    slow: dict[str, Any] = {
        "tokens": ENDLESS,
        "is_held": True,
        "is_slow": True,
        "spread_s": size / 1000,
        "options": PATIENT,
    }
    slow["num_blocks"] = ROOMY
    others = _load("beside-slow", OTHERS, clients=OTHERS, requests=OTHERS, tokens=50, spread_s=1.0, **streams)

    async def p99_us(stage: Stage) -> list[float]:
        async with stage.standing(OURS, others) as clients:
            taken = [await stage.window(OURS, clients, extent.window_s, 0.0) for _ in range(extent.windows)]
        return [one.transit_p99_us or 0.0 for one in taken]

    async with (
        theatre.stage(_load("slow", size, clients=size, requests=size, **streams, **slow)) as stage,
        theatre.stage(others) as apart,
    ):
        await p99_us(stage)  # what is made at first use is there now
        before = stage.rss_mb(OURS), sockets_mb()
        async with stage.standing(OURS):
            await stage.until_calm(OURS, CALM_CORES)
            after = stage.rss_mb(OURS), sockets_mb()
            taken = [(place is stage, await p99_us(place)) for place in (stage, apart, apart, stage)]
    beside, elsewhere = (
        statistics.median(one for is_beside, p99 in taken if is_beside is wanted for one in p99)
        for wanted in (True, False)
    )
    rss, sockets = ((late - early) * KIB / size for early, late in zip(before, after, strict=True))
    return [
        _fact(f"{size:,} who read a byte a second: KiB of the proxy for each", rss, MOST_KIB, sockets_kib=sockets),
        _fact(f"{size:,} who read a byte a second: KiB of the system's sockets for each, all ends together", sockets),
        _fact(
            f"the same: token transit p99 of {OTHERS} others over that through another pdproxy",
            beside / elsewhere,
            EQUAL,
            p99_us=[beside, elsewhere],
        ),
    ]


def sockets_mb(stat: str | None = None) -> float:
    """Returns the MiB that the system keeps for all TCP connections. `stat` is ``/proc/net/sockstat``."""
    text = Path("/proc/net/sockstat").read_text() if stat is None else stat
    words = next(line for line in text.splitlines() if line.startswith("TCP:")).split()
    return int(words[words.index("mem") + 1]) * resource.getpagesize() / (1 << 20)


BESIDES: dict[str, Callable[[_Theatre, Extent], Coroutine[Any, Any, list[Row]]]] = {
    "crowd": _crowds,
    "watchers": _watchers,
    "slow": _slow,
}
"""The measurements besides the axes, by name."""


def _fact(what: str, value: float, most: float | None = None, **more: Any) -> Row:
    return {"what": what, "value": value, "most": most, **more}


def say(row: Row) -> str:
    """Returns one row as a line."""
    if "what" in row:
        return f"{row['what']}: {row['value']:.3g}"
    ratio = "" if row["ratio"] is None else f", {row['ratio']:.2f} times the smallest"
    wrong = f", {row['errors']} errors: {row['complaint']}" if row["errors"] else ""
    return f"{row['size']:,}: {row['cpu_us']:.1f} µs per {row['unit']}{ratio}{wrong}"
