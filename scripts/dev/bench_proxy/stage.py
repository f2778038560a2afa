"""The module runs one scenario's processes: all proxies, each with mock engines of its own, and one load on one of them
at a time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
import sysconfig
import time
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec

from pdproxy.launch.ports import free_ports
from pdproxy.launch.process import Process, Program
from pdproxy.launch.process_group import ProcessGroup
from pdproxy.launch.supervisor import Supervisor
from scripts.dev.bench_proxy.accounts import BUSY_ERROR_S, busy_s, cpu_s, rss_mb, sessions
from scripts.dev.bench_proxy.cores import Cores, on
from scripts.dev.bench_proxy.load import Clients, Reach, Told, clients_of
from scripts.dev.bench_proxy.plan import Scenario
from scripts.dev.bench_proxy.samples import Sample, make_sample
from scripts.dev.bench_proxy.targets import DIRECT, OTHER_PYTHON, WORKERS, Peer, Place, pdproxy_line
from scripts.dev.bench_proxy.texts import Texts
from scripts.dev.common.errors import BenchError

START_TIMEOUT_S = 60.0
ROUND_TIMEOUT_S = 120.0
PROBE_INTERVAL_S = 0.1
READY_TIMEOUT_S = 120.0
PAD_BYTES = 16 << 10
"""The bytes that a slow reader's tokens have besides the usual ones: so much fills what lies between in a moment."""
ENGINE_BUFFER_BYTES = 32 << 10
"""The bytes that the system keeps for an engine whose reader is slow: what counts is what the proxy keeps."""
CALM_WINDOW_S = 0.5
IN_LINE = "pdproxy_line_requests{"
SETTLE_S = 0.3
"""The seconds between two loads: connections are closed on all sides in that time."""
_HELLO = {"model": "bench", "prompt": "Hi.", "max_tokens": 2}


class Carried(msgspec.Struct):
    """Carried is what the engines say of the legs that they have had, counted since they were started."""

    decodes: int
    handed: int
    """Counts the decode legs with exactly what a prefill leg had given out, and for the first time."""
    unhanded: int
    forged: int

    def since(self, before: Carried) -> Carried:
        return Carried(*(getattr(self, name) - getattr(before, name) for name in self.__struct_fields__))


@dataclass(frozen=True, slots=True)
class Usage:
    """Usage holds the CPU seconds so far, by who used them, and when that was."""

    proxy: float
    engine: float
    clients: float
    ours: float
    """The CPU seconds of all that the benchmark runs."""
    machine: float
    at: float

    def since(self, before: Usage) -> Usage:
        return Usage(*(getattr(self, name) - getattr(before, name) for name in self.__slots__))


class Stage(ProcessGroup):
    """Stage holds one scenario's processes. It has to be used on the helpers' core.

    State: `_places` by target; `failures` says why a target cannot be measured here.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        scenario: Scenario,
        cores: Cores,
        programs: Mapping[str, Path],
        packages: Mapping[str, Path],
        texts: Texts | None = None,
        *,
        num_workers: int = 1,
        python: str | None = None,
    ) -> None:
        """Makes a stage. `packages` are folders with a pdproxy in them, by the target that each is. `texts` are there
        for a scenario that counts tokens, or has prompts beside. `num_workers` is the number of processes of
        `WORKERS`, and `python` is the command that runs `OTHER_PYTHON`, with the libraries of the Python that runs
        this."""
        super().__init__(supervisor)
        self.scenario = scenario
        self.failures: dict[str, str] = {}
        self._cores = cores
        self._programs = programs
        self._packages = packages
        self._texts = texts
        self._num_workers = num_workers
        self._python = python
        self._places: dict[str, Place] = {}

    async def set(self, peers: Sequence[Peer], *, has_ids: bool) -> None:
        """Starts everything. Raises `LaunchError` where the engines do not come up; a proxy may fail."""
        proxies = [*self._packages, *(peer.name for peer in peers)]
        ports = iter(free_ports(4 * (1 + len(proxies)), random.Random()))
        self._places = {
            name: Place(port=next(ports), metrics_port=next(ports), prefill_port=next(ports), decode_port=next(ports))
            for name in (*(() if self.scenario.is_ours_alone else (DIRECT,)), *proxies)
        }
        model = self._texts.model if self._texts and self.scenario.is_counted else None
        lines = {
            name: pdproxy_line(
                self._places[name],
                self.scenario,
                model,
                num_workers=self._num_workers if name == WORKERS else 1,
                python=self._python if name == OTHER_PYTHON and self._python else sys.executable,
            )
            for name in self._packages
        }
        lines |= {peer.name: peer.line(peer.command, self._places[peer.name], self.scenario) for peer in peers}
        at_home_with_sglang = {peer.name for peer in peers if peer.takes_sglang}
        for name, place in self._places.items():
            options = self._engine_options(place, has_ids=has_ids, is_sglang=name in at_home_with_sglang)
            command = (str(self._programs["engine"]), *options)
            self._start(_engine_of(name), command, ready_url=f"{place.prefill_url}/health")
        await asyncio.gather(*(self.until_healthy(_engine_of(name), START_TIMEOUT_S) for name in self._places))
        with on(self._cores.proxy):
            for name, line in lines.items():
                self._start(name, line)
        await asyncio.gather(*(self._until_serving(name) for name in lines))

    async def take(self, target: str) -> Sample:
        """Puts one load on one target, and returns the sample. Raises `BenchError` where that fails."""
        before_legs = await self._carried(target)
        program, reach = self._programs["client"], self._reach(target)
        async with clients_of(program, self.scenario, reach, ROUND_TIMEOUT_S) as clients:
            await clients.until("ready")
            along = [self.rss_mb(target)]
            before = self.usage(target, clients.pid)
            await clients.go_on()
            await clients.until("done", lambda: along.append(self.rss_mb(target)))
            used = self.usage(target, clients.pid).since(before)
            memory = self.rss_mb(target)
            await clients.go_on()
            told = await clients.tell()
        legs = (await self._carried(target)).since(before_legs)
        await asyncio.sleep(SETTLE_S)
        return self._sample(told, used, memory, along if self.scenario.num_marks else [], legs)

    # ── a load that stands, and is looked at for a while in the midst ───────────────────────────────────────────────

    @contextlib.asynccontextmanager
    async def standing(self, target: str, scenario: Scenario | None = None) -> AsyncIterator[Clients]:
        """Puts a load on `target` that lasts as long as the block; it is the stage's own scenario unless another one is
        given. Raises `BenchError`."""
        load = self.scenario if scenario is None else scenario
        async with clients_of(self._programs["client"], load, self._reach(target), ROUND_TIMEOUT_S) as clients:
            await clients.until("ready")
            await clients.go_on()
            await clients.until("done")
            yield clients

    async def window(self, target: str, clients: Clients, window_s: float, idle_cores: float) -> Sample:
        """Returns the sample of so many seconds of a load that stands. What the proxy takes when it is idle is not
        counted."""
        before_legs = await self._carried(target)
        await clients.go_on()
        await clients.tell()  # of what came before, which is nobody's concern
        before = self.usage(target, clients.pid)
        await asyncio.sleep(window_s)
        used = self.usage(target, clients.pid).since(before)
        await clients.go_on()
        told = await clients.tell()
        legs = (await self._carried(target)).since(before_legs)
        return self._sample(told, used, self.rss_mb(target), (), legs, idle_cores=idle_cores)

    async def cores(self, target: str, window_s: float) -> float:
        """Returns how many cores the proxy used in the next `window_s` seconds."""
        before = self.usage(target)
        await asyncio.sleep(window_s)
        used = self.usage(target).since(before)
        return used.proxy / used.at

    async def until_calm(self, target: str, most_cores: float) -> None:
        """Waits until the proxy uses no more than `most_cores`. Raises `BenchError`."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        while (cores := await self.cores(target, CALM_WINDOW_S)) > most_cores:
            if time.monotonic() > deadline:
                raise BenchError(f"{target} does not come to rest: it uses {cores:.2f} cores")

    async def until_routable(self, target: str) -> None:
        """Waits until pdproxy sends requests to every instance. Raises `BenchError`."""
        url, deadline = f"{self.url(target)}/status", time.monotonic() + READY_TIMEOUT_S
        async with httpx.AsyncClient(trust_env=False, timeout=READY_TIMEOUT_S) as client:
            while not all(one["routable"] for one in (await client.get(url)).json()["fleet"]):
                if time.monotonic() > deadline:
                    raise BenchError("some instances do not get ready")
                await asyncio.sleep(CALM_WINDOW_S)

    async def num_waiting(self, target: str) -> int:
        """Returns how many requests wait in pdproxy's line."""
        async with httpx.AsyncClient(trust_env=False, timeout=READY_TIMEOUT_S) as client:
            told = (await client.get(f"{self.url(target)}/metrics")).text
        return sum(int(float(line.rpartition(" ")[2])) for line in told.splitlines() if line.startswith(IN_LINE))

    async def until_waiting(self, target: str, count: int) -> None:
        """Waits until so many requests wait in pdproxy's line. Raises `BenchError`."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        while (waiting := await self.num_waiting(target)) < count:
            if time.monotonic() > deadline:
                raise BenchError(f"no more than {waiting} of {count} requests wait")
            await asyncio.sleep(PROBE_INTERVAL_S)

    def check(self) -> None:
        """Raises `BenchError` where a target did not come up."""
        for target, why in self.failures.items():
            raise BenchError(f"{target}: {why}")

    def url(self, target: str) -> str:
        return f"http://127.0.0.1:{self._places[target].port}"

    def _sample(
        self,
        told: Told,
        used: Usage,
        memory: float,
        along: Sequence[float],
        legs: Carried,
        *,
        idle_cores: float = 0.0,
    ) -> Sample:
        unproven = legs.unhanded + legs.forged
        if not self.scenario.is_standing:  # there, some are under way at both ends
            unproven += max(0, told.requests + told.beside - told.errors - legs.handed)
        return make_sample(
            told,
            counts_tokens=self.scenario.is_stream and (self.scenario.is_standing or not self.scenario.is_held),
            cpu_s=max(0.0, used.proxy - idle_cores * used.at),
            rss_mb=memory,
            rss_mb_along=along,
            proxy_share=used.proxy / used.at,
            engine_share=used.engine / used.at,
            clients_share=used.clients / used.at,
            elsewhere_cores=max(0.0, used.machine - used.ours - BUSY_ERROR_S) / used.at,
            num_unproven=unproven,
        )

    def _start(self, name: str, command: tuple[str, ...], *, ready_url: str | None = None) -> None:
        package = self._packages.get(name)
        path = [] if package is None else [str(package)]
        if name == OTHER_PYTHON:
            path += dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
        env = {"PYTHONPATH": os.pathsep.join(path)} if path else {}
        self.spawn(Program(name=name, command=command, env=env, ready_url=ready_url))

    def _engine_options(self, place: Place, *, has_ids: bool, is_sglang: bool) -> list[str]:
        scenario = self.scenario
        options = {
            "prefill_port": place.prefill_port,
            "decode_port": place.decode_port,
            "delay_us": round(scenario.token_delay_s * 1e6),
            "lockstep": int(scenario.is_lockstep),
            "late": int(scenario.is_late),
            "ids": int(has_ids),
            "sglang": int(is_sglang),
            "addresses": scenario.num_pairs,
            "models": scenario.num_models,
            "pad": PAD_BYTES,
            "buffer": ENGINE_BUFFER_BYTES if scenario.is_slow else 0,
        } | ({} if scenario.num_blocks is None else {"blocks": scenario.num_blocks})
        return [f"{name}={value}" for name, value in options.items()]

    def _reach(self, target: str) -> Reach:
        place = self._places[target]
        prompts = self._texts.prompts if self._texts else None
        if target == DIRECT:
            return Reach(port=place.prefill_port, decode_port=place.decode_port, prompts=prompts)
        return Reach(port=place.port, prompts=prompts)

    def rss_mb(self, target: str) -> float:
        """Returns the MiB of the target that are resident."""
        return 0.0 if target == DIRECT else rss_mb(sessions()[self.pid(target)])

    def usage(self, target: str, *clients: int) -> Usage:
        """Returns what has been used so far; `clients` are the processes of those at work."""
        pids = sessions()
        used = {name: cpu_s(pids.get(process.pid, ())) for name, process in self._running.items()}
        loading = cpu_s(clients)
        return Usage(
            proxy=used.get(target, 0.0),
            engine=used[_engine_of(target)],
            clients=loading,
            ours=sum(used.values()) + loading + time.process_time(),
            machine=busy_s(self._cores.both),
            at=time.monotonic(),
        )

    async def _carried(self, target: str) -> Carried:
        place = self._places[target]
        async with httpx.AsyncClient(trust_env=False, timeout=10) as client:
            return msgspec.json.decode((await client.get(f"{place.prefill_url}/bench")).content, type=Carried)

    async def _until_serving(self, name: str) -> None:
        """Waits until the proxy has answered a request; else it is among the failures."""
        process, deadline = self._running[name], time.monotonic() + START_TIMEOUT_S
        url = f"http://127.0.0.1:{self._places[name].port}/v1/completions"
        async with httpx.AsyncClient(trust_env=False, timeout=5) as client:
            while not await _is_ok(client.post(url, json=_HELLO)):
                if process.status is not None or time.monotonic() > deadline:
                    self.failures[name] = _last_words("it does not come up", process)
                    return
                await asyncio.sleep(PROBE_INTERVAL_S)


async def _is_ok(asking: Awaitable[httpx.Response]) -> bool:
    try:
        return (await asking).status_code == 200
    except httpx.TransportError:
        return False


def _engine_of(target: str) -> str:
    """Returns the name of the target's engines. Each target has engines of its own, so that it answers for all that
    they see."""
    return f"engine-{target}"


def _last_words(what: str, process: Process) -> str:
    return "\n  ".join([f"{what}; its last lines:", *(process.tail or ["(none)"])])
