"""A proxy of several processes on one machine: fronts that share the port, and this process, their leader.

What must hold: a front that ends, however it does, is replaced, and its part of the port's line of clients goes to its
successor; a front that is restarted in turn cuts off nobody. A violation would be seen as clients that are refused, or
that wait at a listener whose process has gone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio

from pdproxy.assemble import Proxy
from pdproxy.config.settings import Settings
from pdproxy.fronts import messages
from pdproxy.fronts.channel import Channel
from pdproxy.fronts.hub import Hub, Session
from pdproxy.serve import ABORT_S, Program, Server, listeners
from pdproxy.telemetry.figures import Elsewhere, Figures

log = logging.getLogger(__name__)

REPORT_S = 1.0
"""Seconds between two times that fronts are asked for their figures."""
REFRESH_S = 0.5
"""The longest time in seconds that somebody waits for figures who looks at a page."""
MAX_UNANSWERED = 10
"""The number of times in a row without an answer after which a front counts as frozen. They are counted and not timed,
so that a leader that stood still itself blames nobody."""
START_S = 60.0
"""The longest time in seconds that a front may take until it serves."""
FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 10.0
"""The pause before a front is replaced that has ended: it doubles each time one ends within `STEADY_S`."""
STEADY_S = 30.0
LAST_WORDS_S = 1.0
"""The longest time in seconds for which the leader reads what a front has said whose process has ended."""
END_S = 3.0
"""Seconds beyond their own limits after which fronts that do not end are killed."""
_NOT_FOR_FRONTS = {"instances", "prefill", "decode", "config", "coordinator"}
PYTHON = (sys.executable, *(("-P",) if sys.flags.safe_path else ()), "-m", "pdproxy.fronts")


class Worker:
    """Worker is one process that runs a front, with its end of the connection.

    Mutable state: the process; how far it has come; its figures, and how often it was asked for them in vain.
    """

    def __init__(self, number: int, hub: Hub | None, on_change: Callable[[], None]) -> None:
        """Takes the hub, where this process is the front's leader. Calls `on_change` when the front begins to serve or
        tells its figures, and when its process has ended."""
        self.number = number
        self.pid: int | None = None
        self.started_at = time.monotonic()
        self.is_serving = False
        self.is_retired = False
        self.has_ended = False
        self.num_unanswered = 0
        self.reported = 0
        self.figures: Figures | None = None
        self._hub = hub
        self._on_change = on_change
        self._session: Session | None = None
        self._is_known = False
        self._followed: messages.Lead | None = None
        self._process: asyncio.subprocess.Process | None = None
        self.channel = Channel(messages.FromFront, self._lost)
        self._is_lost = asyncio.Event()

    async def start(self, ends: Sequence[socket.socket], welcome: messages.Welcome) -> None:
        """Starts the process, which takes clients from the sockets `ends`."""
        ours, theirs = socket.socketpair()
        with theirs:
            fds = [theirs.fileno(), *(end.fileno() for end in ends)]
            environment = {name: value for name, value in os.environ.items() if not name.upper().startswith("PDPROXY_")}
            self._process = await asyncio.create_subprocess_exec(
                *PYTHON,
                *map(str, fds),
                pass_fds=fds,
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
            )
        self.pid = self._process.pid
        ours.setblocking(False)
        await asyncio.get_running_loop().create_connection(lambda: self.channel, sock=ours)
        self.channel.handlers = {messages.Hello: self._hello}
        self.channel.send(welcome)

    def _hello(self, message: messages.Hello) -> None:
        handlers: dict[type, Callable[[Any], object]] = {
            messages.Report: self._report,
            messages.Serving: self._serving,
        }
        self._is_known = True
        if self._hub is not None:
            self._session = session = self._hub.open(self.channel.send)
            handlers |= session.handlers
        self.channel.handlers = handlers
        self._on_change()

    def tell(self, message: Any) -> None:
        """Sends a message to a front that has said who it is: before that it knows of nothing but its welcome."""
        if self._is_known:
            self.channel.send(message)

    def follow(self, lead: messages.Lead) -> None:
        """Tells the front who leads, unless it knows."""
        if self._is_known and lead is not self._followed:
            self._followed = lead
            self.channel.send(lead)

    def _report(self, message: messages.Report) -> None:
        self.num_unanswered = 0
        self.reported = message.number
        self.figures = message.figures
        self._on_change()

    def _serving(self, message: messages.Serving) -> None:
        self.is_serving = True
        self._on_change()

    def _lost(self, why: str) -> None:
        """Answers for what the front has left behind. Its process has ended, or is ended now: nobody may go on with
        what others take for over. One that has said its last writes its log to the end."""
        self._is_lost.set()
        session, self._session = self._session, None
        self._is_known = False
        if self.reported != messages.LAST:
            self.kill()
        if session is not None:
            session.close()

    def ask_for_report(self, number: int) -> bool:
        """Asks for the front's figures. Returns False where it has not told any for too long."""
        self.num_unanswered += 1
        self.tell(messages.ReportNow(number))
        return self.num_unanswered <= MAX_UNANSWERED

    def kill(self) -> None:
        """Ends the process at once."""
        self.signal(signal.SIGKILL)

    def signal(self, number: int) -> None:
        """Sends a signal to the process, while there is one."""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def wait(self) -> int:
        """Waits for the end of the process. Returns its exit status; -1 where there was none."""
        if self._process is None:
            self.has_ended = True
            self._on_change()
            return -1
        status = await self._process.wait()
        with anyio.move_on_after(LAST_WORDS_S):  # what it said last is on its way
            await self._is_lost.wait()
        self.channel.close("its process has ended")
        self.has_ended = True
        self._on_change()
        return status

    @property
    def num_attempts(self) -> int:
        return 0 if self._session is None else self._session.num_attempts

    def status(self) -> dict[str, Any]:
        """Returns what the status page shows."""
        state = "leaving" if self.is_retired else "serving" if self.is_serving else "starting"
        return {
            "worker": self.number,
            "pid": self.pid,
            "state": state,
            "attempts": self.num_attempts,
        }


class Workers:
    """Workers keeps fronts running, which take clients from `ends`: sockets for each of them.

    Mutable state: the present worker of each number; all that have not ended; who leads; whether all shall end.
    """

    def __init__(
        self,
        settings: Settings,
        elsewhere: Elsewhere,
        ends: Sequence[Sequence[socket.socket]],
        operators: str,
        *,
        hub: Hub | None = None,
        replica: str | None = None,
    ) -> None:
        """Takes the hub, where this process leads the fronts itself; else the name of this replica, whose fronts follow
        whom `follow` names."""
        self._settings = settings
        self._elsewhere = elsewhere
        self._hub = hub
        self._ends = ends
        self._welcome = messages.Welcome(
            messages.PROTOCOL,
            settings.model_dump(mode="json", exclude_unset=True, exclude=_NOT_FOR_FRONTS),
            len(ends),
            operators,
            replica,
        )
        self._lead: messages.Lead | None = None
        self._present: list[Worker | None] = [None] * len(ends)
        self._alive: dict[Worker, None] = {}
        self._number = 0
        self._pauses_s = [FIRST_PAUSE_S / 2] * len(ends)
        self._is_leaving = False
        self._is_ending = False
        self._tasks: anyio.abc.TaskGroup | None = None
        self._stirred = asyncio.Event()
        self._to_restart = asyncio.Event()

    async def run(self) -> None:
        """Keeps the fronts running, until cancelled or ended."""
        async with anyio.create_task_group() as self._tasks:
            for number in range(len(self._ends)):
                await self._take_up(number)
            self._tasks.start_soon(self._ask)
            self._tasks.start_soon(self._restart)

    async def serving(self) -> None:
        """Waits until every front takes clients."""
        await self._until(lambda: all(worker is not None and worker.is_serving for worker in self._present))

    def _stir(self) -> None:
        """Wakes all who wait for a change. An event can be set only once, so that the next ones get a new one."""
        elsewhere = self._elsewhere
        elsewhere.latest.update({one: one.figures for one in self._alive if one.figures is not None})
        if self._is_leaving:
            self.leave()
        self._tell_leader()
        self._stirred.set()
        self._stirred = asyncio.Event()

    def follow(self, lead: messages.Lead) -> None:
        """Tells all fronts who leads from now on."""
        self._lead = lead
        self._tell_leader()

    def _tell_leader(self) -> None:
        if self._lead is not None:
            for worker in self._alive:
                worker.follow(self._lead)

    async def _until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            await self._stirred.wait()

    async def _start(self, number: int) -> Worker:
        """Starts a front, which is watched from then on. One for which the system has no room ends at once."""
        assert self._tasks is not None
        worker = Worker(number, self._hub, self._stir)
        self._alive[worker] = None
        try:
            await worker.start(self._ends[number], self._welcome)
        except OSError as error:
            log.error("front %d cannot be started: %s", number, error)
        if self._is_ending:
            worker.signal(signal.SIGINT)
        self._tasks.start_soon(self._watch, worker)
        return worker

    async def _take_up(self, number: int) -> None:
        self._present[number] = await self._start(number)
        self._stir()

    async def _watch(self, worker: Worker) -> None:
        """Waits for the end of a front, and replaces it where no other has taken its place."""
        number = worker.number
        try:
            status = await worker.wait()
        finally:
            self._alive.pop(worker, None)
            self._elsewhere.end(worker)
            self._stir()
        if self._is_ending or self._present[number] is not worker:
            return
        self._elsewhere.num_lost += 1
        is_steady = time.monotonic() - worker.started_at > STEADY_S
        pause_s = self._pauses_s[number] = FIRST_PAUSE_S if is_steady else min(2 * self._pauses_s[number], MAX_PAUSE_S)
        log.error("front %d (process %s) has ended, status %d; another takes its place", number, worker.pid, status)
        await anyio.sleep(pause_s)
        if not self._is_ending and self._present[number] is worker:  # a restart may have been faster
            await self._take_up(number)

    async def _ask(self) -> None:
        """Asks all fronts for their figures, again and again, and ends those that do not answer."""
        while True:
            await anyio.sleep(REPORT_S)
            self._number += 1
            for worker in list(self._alive):
                if worker.is_serving and not worker.ask_for_report(self._number):
                    log.error("front %d (process %s) does not answer, and is ended", worker.number, worker.pid)
                    worker.kill()
                elif not worker.is_serving and time.monotonic() - worker.started_at > START_S:
                    log.error("front %d (process %s) does not begin to serve, and is ended", worker.number, worker.pid)
                    worker.kill()

    async def refresh(self) -> None:
        """Has all fronts tell their figures. Waits for those that do so at once."""
        self._number += 1
        number = self._number
        asked = [worker for worker in self._alive if worker.is_serving]
        for worker in asked:
            worker.tell(messages.ReportNow(number))
        with anyio.move_on_after(REFRESH_S):
            await self._until(lambda: all(one.reported >= number or one.has_ended for one in asked))

    # ── all of them ─────────────────────────────────────────────────────────────────────────────────────────────────

    def restart(self) -> None:
        """Replaces one front after the other. Each new one serves before the one before stops to take clients. May be
        called from anywhere on the event loop."""
        self._to_restart.set()

    async def _restart(self) -> None:
        while True:
            await self._to_restart.wait()
            self._to_restart.clear()
            if all([await self._renew(number) for number in range(len(self._ends))]):
                log.info("all %d fronts were replaced", len(self._ends))

    async def _renew(self, number: int) -> bool:
        """Replaces one front. Returns False, and leaves it where it is, where the new one does not come to serve."""
        if self._is_ending:
            return False
        new = await self._start(number)
        with anyio.move_on_after(START_S):
            await self._until(lambda: new.is_serving or new.has_ended)
        if not new.is_serving:
            log.error("a new front %d does not begin to serve; the one before stays", number)
            new.kill()
            return False
        old, self._present[number] = self._present[number], new
        if old is not None:
            old.is_retired = True
            old.channel.send(messages.Retire())
        return True

    def leave(self) -> None:
        """Has the fronts tell their clients to go elsewhere."""
        self._is_leaving = True
        for worker in self._alive:
            worker.tell(messages.Leave())

    async def end(self) -> None:
        """Ends all fronts, which finish what they have within their own limits."""
        self._is_ending = True
        self.signal(signal.SIGINT)
        with anyio.move_on_after(self._settings.drain_timeout_s + 2 * ABORT_S + END_S):
            await self._all_ended()
        for worker in self._alive:
            log.error("front %d (process %s) does not end, and is killed", worker.number, worker.pid)
            worker.kill()
        with anyio.move_on_after(END_S):
            await self._all_ended()
        if self._tasks is not None:
            self._tasks.cancel_scope.cancel()

    def signal(self, number: int) -> None:
        """Sends a signal to all fronts."""
        for worker in self._alive:
            worker.signal(number)

    async def _all_ended(self) -> None:
        await self._until(lambda: not self._alive)

    def tell_signal(self, frame: bytes) -> None:
        """Tells all fronts a KV signal. Where it is for none of them, one tells the leader of it."""
        teller = next((one for one in self._alive if one.is_serving and one.num_unanswered <= 1), None)
        for worker in self._alive:
            worker.tell(messages.Signal(frame, worker is teller))

    def status(self) -> list[dict[str, Any]]:
        """Returns what the status page shows."""
        return [worker.status() for worker in self._alive]


class FrontsServer(Server):
    """FrontsServer is the server of a process whose fronts take the clients. It answers them at a Unix socket what they
    do not know."""

    def __init__(self, program: Program, num_workers: int) -> None:
        super().__init__(program)
        self._scheme = "https" if self.config.is_ssl else "http"
        self.config.ssl_certfile = self.config.ssl_keyfile = self.config.ssl = None  # fronts speak TLS, with clients
        self._program = program
        self._num_workers = num_workers
        self._workers: Workers | None = None
        self._running: asyncio.Task[None] | None = None
        self._ends: list[list[socket.socket]] = []
        self._folder = ""

    def _make_workers(self, operators: str) -> Workers:
        """Returns what keeps the fronts running, and makes ready what they need."""
        raise NotImplementedError

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serves until the end. Raises `ConfigError` where a port is taken, before anything is started."""
        self._folder = tempfile.mkdtemp(prefix="pdproxy-")
        path = str(Path(self._folder) / "leader")
        try:
            self._ends = shared_listeners(self._program.settings, self._num_workers)
            with socket.socket(socket.AF_UNIX) as operators:
                operators.bind(path)
                self._workers = self._make_workers(path)
                await super().serve([operators])
        finally:
            for ends in self._ends:
                for end in ends:
                    end.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    def tell_address(self, sockets: list[socket.socket]) -> None:
        """Says nothing yet: no front serves."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        assert self._workers is not None
        self._running = asyncio.create_task(self._workers.run())
        serving = asyncio.ensure_future(self._workers.serving())
        await asyncio.wait([serving, self._running], timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        serving.cancel()
        if self._running.done():
            self._running.result()  # raises the reason why no front can be started
        self.tell_place(self._scheme, self._ends[0])

    def _leave(self, grace_s: float) -> None:
        super()._leave(grace_s)
        if self._workers is not None:
            self._workers.leave()

    def _tell_what_runs(self) -> None:
        super()._tell_what_runs()
        if self._workers is not None:
            self._workers.signal(signal.SIGUSR1)

    def _abort(self) -> None:
        super()._abort()
        if self._workers is not None:
            self._workers.signal(signal.SIGINT)

    def _reload(self) -> None:
        if self._program.reload is not None:
            self._program.reload()
        if self._workers is not None:
            log.info("SIGHUP: the fronts are replaced one after the other")
            self._workers.restart()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends the fronts, and then itself."""
        self._program.orchestrator.stop_accepting()  # which ends the pages that follow it, by way of fronts
        for ends in self._ends:  # so that clients are refused from when the fronts take no more, and do not wait here
            for end in ends:
                end.close()
        if self._workers is not None and self._running is not None:
            await self._workers.end()
            await asyncio.wait([self._running])
        await super().shutdown(sockets)


class WorkersServer(FrontsServer):
    """WorkersServer is the server of a proxy whose fronts are all on this machine. This process leads them."""

    def __init__(self, proxy: Proxy, num_workers: int) -> None:
        super().__init__(proxy, num_workers)
        self._leader = proxy

    def _make_workers(self, operators: str) -> Workers:
        leader = self._leader
        leader.listen()
        hub = Hub(leader.pool, leader.pool.admission, leader.reaper, leader.counts)
        leader.pool.on_membership = hub.follow
        workers = Workers(leader.settings, leader.elsewhere, self._ends, operators, hub=hub)
        leader.board.pass_on = hub.pass_on
        leader.elsewhere.workers = workers.status
        leader.elsewhere.refresh = workers.refresh
        return workers


def shared_listeners(settings: Settings, num: int) -> list[list[socket.socket]]:
    """Returns sockets for `num` processes that share one port, each with a line of clients of its own. Raises
    `ConfigError`."""
    for one in listeners(settings.host, settings.port):  # which nobody else may have, though others could share it
        one.close()
    first = listeners(settings.host, settings.port, is_shared=True)
    port = first[0].getsockname()[1]
    return [first, *(listeners(settings.host, port, is_shared=True) for _ in range(num - 1))]
