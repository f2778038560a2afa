"""The module asks a target what a workload says, and writes down what comes of it.

In an open loop a session begins when it is due, whatever became of the sessions before it, and its latency counts from
then. If a target stands still for two seconds, everything that was due meanwhile waits for up to two seconds, as its
users would. (A generator that waits for answers before it asks again sees one slow answer there. It misses nearly all
that was slow; this is called "coordinated omission".)
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping

from pdproxy.engines.http.base import EngineClient
from pdproxy.loadtest.clock import Clock
from pdproxy.loadtest.corpus import Scale
from pdproxy.loadtest.event_log import Alongside, EventLog
from pdproxy.loadtest.generator_health import LATE_LIMIT_S, Meter, calm_collector
from pdproxy.loadtest.live import Live, Progress
from pdproxy.loadtest.record import FORMAT, Head, Record, Run, Setting
from pdproxy.loadtest.request_runner import Call, RequestRunner
from pdproxy.loadtest.stopping import Stopped, beside, unless_stopped
from pdproxy.loadtest.target import Target
from pdproxy.loadtest.watch import WATCH_S, Watch
from pdproxy.loadtest.workload import Closed, Session, Workload
from pdproxy.loadtest.writer import Writer, make_writer

Tell = Callable[[Progress], None]
AFTER_FAILURE_S = 1.0
"""The least seconds that a closed loop's client waits after a failure. Otherwise it would ask a target that refuses, or
is not there, as fast as it can, and the generator would have time for nothing else."""


async def run(
    workload: Workload,
    target: Target,
    *,
    stop: asyncio.Event | None = None,
    progress: Tell | None = None,
    alongside: Alongside | None = None,
    scale: Scale | None = None,
    settings: Mapping[str, Setting] | None = None,
    late_limit_s: float = LATE_LIMIT_S,
) -> Run:
    """Makes one run, and returns it when every answer has ended. `stop` ends the run at once: then the function returns
    what was measured until then, with the requests under way as ``interrupted``; if nothing was asked yet, it raises
    `Stopped`.

    `progress` is called a few times a second, from within the event loop: it has to be quick. `alongside` runs beside
    the load; it is a fault schedule. `scale` is how the target counts words, where that is known already. `settings`
    are added to the workload's own. Raises `TargetError` where the target does not answer at all, and whatever
    `alongside` raises.
    """
    client = target.client()
    stop = stop or asyncio.Event()
    try:
        writer = await unless_stopped(make_writer(client, workload, target, scale), stop)
        test = _Test(client, workload, target, writer)
        with calm_collector():
            is_interrupted = await test.run(stop, progress or _tell_nobody, alongside)
        return test.result(is_interrupted, {**writer.settings(), **(settings or {})}, late_limit_s)
    finally:
        await client.aclose()


class _Test:
    """_Test makes one run.

    Mutable state: that of its parts; when it began, on the wall clock; how long it took.
    """

    def __init__(self, client: EngineClient, workload: Workload, target: Target, writer: Writer) -> None:
        self._workload = workload
        self._target = target
        self._clock = Clock()
        self._meter = Meter(self._clock)
        self._events = EventLog(self._clock)
        self._live = Live(self._clock.now_s, num_expected=workload.num_requests, duration_s=workload.duration_s)
        self._watch = Watch(client, self._clock, lambda: self._live.num_open)
        self._runner = RequestRunner(
            client, target, self._clock, live=self._live, meter=self._meter,
            is_warmup=lambda due_s: due_s < workload.warmup_s,
        )  # fmt: skip
        self._load = _Load(workload, writer, self._runner, self._clock)
        self._started_at = time.time()
        self._wall_s = 0.0

    async def run(self, stop: asyncio.Event, tell: Tell, alongside: Alongside | None) -> bool:
        """Runs the load to its end or until `stop`, and tells whether it was stopped."""
        works = [self._meter.pulse(), self._watch.run(WATCH_S, lambda: tell(self._live.progress()))]
        if alongside is not None:
            works.append(_as_coroutine(alongside, self._events))
        self._started_at = time.time()
        self._clock.start()
        self._meter.start()
        async with beside(*works):
            is_interrupted = await _is_stopped(self._load.run(), stop)
            self._wall_s = self._clock.now_s()
            self._meter.stop()
        await _is_stopped(self._watch.look(), stop)
        tell(self._live.progress())
        return is_interrupted

    def result(self, is_interrupted: bool, settings: Mapping[str, Setting], late_limit_s: float) -> Run:
        head = Head(
            format=FORMAT,
            target=self._target.url,
            model=self._target.model,
            seed=self._workload.seed,
            started_at=self._started_at,
            wall_s=self._wall_s,
            warmup_s=self._workload.warmup_s,
            is_interrupted=is_interrupted,
            settings={**self._workload.settings(), "endpoint": self._target.endpoint, **settings},
        )
        return Run(
            head=head,
            health=self._meter.health(self._wall_s, late_limit_s),
            records=sorted(self._runner.records, key=lambda record: (record.due_s, record.index)),
            moments=self._watch.moments,
            events=self._events.events,
        )


class _Load:
    """_Load sends sessions on their way."""

    def __init__(self, workload: Workload, writer: Writer, runner: RequestRunner, clock: Clock) -> None:
        self._workload = workload
        self._writer = writer
        self._runner = runner
        self._clock = clock
        self._end_s = math.inf if workload.duration_s is None else workload.duration_s

    async def run(self) -> None:
        async with asyncio.TaskGroup() as clients:
            if isinstance(self._workload.pace, Closed):
                sessions = self._workload.sessions()
                for number in range(self._workload.pace.num_clients):
                    clients.create_task(self._client(number, sessions))
            else:
                await self._open(clients)

    async def _open(self, clients: asyncio.TaskGroup) -> None:
        """Starts each session when it is due. Its first request is written before that."""
        for at_s, session in zip(self._workload.due_times(), self._workload.sessions(), strict=False):
            call = self._writer.first(session)
            due_s = await self._clock.sleep_until(at_s)
            clients.create_task(self._serve(call, due_s))

    async def _client(self, number: int, sessions: Iterator[Session]) -> None:
        """Plays one client of a closed loop: it asks when it has its answer and has thought."""
        pause_s = 0.0
        for think_s in self._workload.think_times(number):
            at_s = self._clock.now_s() + max(think_s, pause_s)
            if at_s >= self._end_s or (session := next(sessions, None)) is None:
                return
            call = self._writer.first(session)
            last = await self._serve(call, await self._clock.sleep_until(max(at_s, self._clock.now_s())))
            pause_s = AFTER_FAILURE_S if last.error else 0.0

    async def _serve(self, call: Call, due_s: float) -> Record:
        """Serves a session to its end, or to the first request without a whole answer. Returns the last record."""
        said: list[str] = []
        while True:
            record, text = await self._runner.ask(call, due_s)
            at_s = record.done_s
            if not record.is_ok or not call.has_next:
                return record
            call = self._writer.following(call, said, text)
            at_s += call.ask.think_s
            if at_s >= self._end_s:
                return record
            due_s = await self._clock.sleep_until(at_s)


async def _is_stopped(work: Awaitable[None], stop: asyncio.Event) -> bool:
    """Tells whether `work` was stopped before it had ended."""
    try:
        await unless_stopped(work, stop)
    except Stopped:
        return True
    return False


async def _as_coroutine(alongside: Alongside, events: EventLog) -> None:
    await alongside(events)


def _tell_nobody(progress: Progress) -> None:
    """Does nothing: it stands for a `progress` that nobody passed."""
