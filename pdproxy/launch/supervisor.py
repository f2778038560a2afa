"""The module starts programs, waits until they are ready, and stops every one of them however the block that uses it
ends."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Never, Protocol, Self, TypeVar

import httpx

from pdproxy.aio.signals import catching
from pdproxy.launch.errors import Interrupted, NotReadyInTime, ProgramDied, describe
from pdproxy.launch.process import Process, Program, Sink
from pdproxy.launch.restarts import NEVER, RestartPolicy, Restarts

PROBE_INTERVAL_S = 0.1
PROBE_TIMEOUT_S = 5.0
KILL_TIMEOUT_S = 5.0

T = TypeVar("T")


class OnReady(Protocol):
    """OnReady is told of each program as it becomes ready."""

    def __call__(self, name: str, seconds: float, /) -> None: ...


class Supervisor:
    """Supervisor is the owner of processes; use it with `async with`, in the main thread.

    Leaving the block stops them: the last stage comes first. Each process is asked with SIGTERM and killed after
    `grace_s`, or its own. Inside the block, SIGINT, SIGTERM and SIGHUP cancel its task and come out of it as
    `Interrupted`; a second one kills at once.

    Once all were ready, a service that fails is started again as `restarts` says, and `notice` is told. Before that, or
    where the policy is at its end, a service that dies is a death of the launch.

    State: `_stages` holds every process ever started, in order; `_death` is done once a service has died for good;
    `_signum` is the first signal; `_restarts` counts by program's name; `_returning` are those started again that
    nobody has seen ready yet; `_timeout_s` is what they are given for it, None before all were ready.
    """

    def __init__(
        self,
        sink: Sink,
        *,
        grace_s: float = 10.0,
        restarts: RestartPolicy = NEVER,
        notice: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._sink = sink
        self._grace_s = grace_s
        self._policy = restarts
        self._notice = notice
        self._stages: list[list[Process]] = []
        self._restarts: dict[str, Restarts] = {}
        self._returning: asyncio.Queue[Process] = asyncio.Queue()
        self._timeout_s: float | None = None
        self._is_stopping = False
        self._signum: int | None = None
        self._signals = ExitStack()

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._death: asyncio.Future[Process] = self._loop.create_future()
        self._task = asyncio.current_task()
        self._signals.enter_context(catching(self._on_signal))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_stopping = True
        stopping = asyncio.ensure_future(self._stop())
        try:
            await asyncio.shield(stopping)
        except asyncio.CancelledError:
            self.kill()
            await stopping
            raise
        finally:
            self._signals.close()
        if self._signum is not None and isinstance(error, asyncio.CancelledError):
            assert self._task is not None
            self._task.uncancel()
            raise Interrupted(self._signum) from None

    def __repr__(self) -> str:
        return f"<Supervisor {self.processes}>"

    @property
    def processes(self) -> list[Process]:
        """Returns all processes that were started, first to last."""
        return [process for stage in self._stages for process in stage]

    def spawn(self, *programs: Program) -> None:
        """Starts services as one stage. They are expected to run until they are stopped."""
        stage: list[Process] = []
        self._stages.append(stage)
        for program in programs:
            stage.append(Process(program, self._sink, self._on_service_exit))

    async def run(self, program: Program) -> Process:
        """Starts a program that ends by itself, and returns its process after that. Raises `ProgramDied` if a service
        dies meanwhile."""
        process = Process(program, self._sink, lambda process: None)
        self._stages.append([process])
        await self.while_all_live(process.exited.wait())
        return process

    async def until_ready(self, timeout_s: float, on_ready: OnReady = lambda name, seconds: None) -> None:
        """Returns once every service is ready. Raises `ProgramDied` at once when one dies, and `NotReadyInTime` after
        `timeout_s` seconds."""
        await self.while_all_live(self._probe_all(timeout_s, on_ready))
        self._timeout_s = timeout_s

    async def until_one_dies(self) -> None:
        """Waits, and never returns: it raises `ProgramDied`, or is cancelled by a signal."""
        await self.while_all_live(asyncio.Event().wait())

    async def while_all_live(self, work: Coroutine[Any, Any, T]) -> T:
        """Returns what `work` returns. Raises `ProgramDied` if a service dies meanwhile, and cancels `work` then."""
        task, welcome = asyncio.ensure_future(work), asyncio.ensure_future(self._welcome())
        try:
            watched: tuple[asyncio.Future[Any], ...] = (task, welcome, self._death)
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            if self._death.done():
                dead = self._death.result()
                assert dead.status is not None
                raise ProgramDied(dead.name, dead.status, dead.tail)
            return welcome.result() if welcome.done() else task.result()
        finally:
            task.cancel()
            welcome.cancel()
            await asyncio.gather(task, welcome, return_exceptions=True)

    def kill(self) -> None:
        """Kills everything now. Leaving the block still waits until it is gone."""
        for process in self.processes:
            process.kill()

    def _on_signal(self, signum: int) -> None:
        if self._signum is not None or self._is_stopping:
            self.kill()
            return
        self._signum = signum
        self._notice(f"stopping all at {signal.Signals(signum).name}; a second one kills")
        assert self._task is not None
        self._task.cancel()

    # ── a service that ended by itself ──────────────────────────────────────────────────────────────────────────────

    def _on_service_exit(self, process: Process) -> None:
        if self._is_stopping or self._death.done():
            return
        wait_s = self._wait_before_restart(process)
        if wait_s is None:
            self._death.set_result(process)
            return
        self._loop.call_later(wait_s, self._restart, process)

    def _wait_before_restart(self, process: Process) -> float | None:
        """Returns the seconds to wait before a process is started again, or None if it stays down."""
        assert process.status is not None
        if self._timeout_s is None:
            return None
        restarts = self._restarts.setdefault(process.name, Restarts(self._policy))
        wait_s = restarts.next_wait_s(process.status, time.monotonic() - process.started_at)
        if wait_s is not None:
            which = f"{restarts.num_in_a_row} of {self._policy.limit}"
            self._notice(f"{process.name} {describe(process.status)}; starting it again in {wait_s:g} s ({which})")
        return wait_s

    def _restart(self, process: Process) -> None:
        """Starts the program again, in the same stage, so that it is stopped together with the others of that stage."""
        if self._is_stopping or self._death.done():
            return
        stage = next(stage for stage in self._stages if process in stage)
        try:
            successor = Process(process.program, self._sink, self._on_service_exit)
        except OSError as error:
            self._notice(f"{process.name} cannot be started again: {error.strerror}")
            self._death.set_result(process)
            return
        stage.append(successor)
        self._returning.put_nowait(successor)

    async def _welcome(self) -> Never:
        """Notes each process that was started again once it is ready, until it is cancelled."""
        async with probing_client() as client, asyncio.TaskGroup() as group:
            while True:
                group.create_task(self._until_back(client, await self._returning.get()))

    async def _until_back(self, client: httpx.AsyncClient, process: Process) -> None:
        """Waits until a process is ready again. A process that does not become ready in time has failed once more, and
        is killed; a process that dies before that has failed once more as well."""
        assert self._timeout_s is not None
        try:
            await probe(client, process, process.started_at + self._timeout_s, self._timeout_s)
        except NotReadyInTime as error:
            self._notice(str(error).partition(";")[0])
            process.kill()
            return
        except asyncio.CancelledError:
            # Whoever looks next wants to know of it as well.
            self._returning.put_nowait(process)
            raise
        if process.status is None:
            self._notice(f"{process.name} is ready again after {time.monotonic() - process.started_at:.1f} s")

    # ── ready, and stopped ──────────────────────────────────────────────────────────────────────────────────────────

    async def _probe_all(self, timeout_s: float, on_ready: OnReady) -> None:
        async with probing_client() as client:
            started = time.monotonic()
            for process in self.processes:
                if process.status is None:
                    await probe(client, process, started + timeout_s, timeout_s)
                if process.status is None:
                    on_ready(process.name, time.monotonic() - started)

    async def _stop(self) -> None:
        for stage in reversed(self._stages):
            for process in stage:
                process.terminate()
            if not await _all_gone(stage, max([self._grace_s, *(process.program.grace_s for process in stage)])):
                for process in stage:
                    process.kill()
                await _all_gone(stage, KILL_TIMEOUT_S)
        self._death.cancel()


def probing_client() -> httpx.AsyncClient:
    """Returns a client that asks processes of this machine. It uses no HTTP proxy from the environment and checks no
    certificate: this machine has started the processes."""
    return httpx.AsyncClient(trust_env=False, verify=False, timeout=PROBE_TIMEOUT_S)


async def _all_gone(stage: list[Process], timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            for process in stage:
                await process.exited.wait()
    except TimeoutError:
        return False
    return True


async def probe(client: httpx.AsyncClient, process: Process, deadline: float, timeout_s: float) -> None:
    """Waits until a process is ready, or has ended. `deadline` is on the monotonic clock; `timeout_s` is only for the
    message. Raises `NotReadyInTime`."""
    answer = "none"
    while process.program.ready_url is not None and process.status is None:
        try:
            reply = await client.get(process.program.ready_url)
            if reply.status_code == 200:
                return
            answer = f"{reply.status_code} {reply.text[:200].strip()}".strip()
        except httpx.TransportError as error:
            answer = str(error) or type(error).__name__
        if time.monotonic() > deadline:
            raise NotReadyInTime(process.name, timeout_s, answer, process.tail)
        # HTTP offers nothing to wait on, so it is asked again.
        await asyncio.sleep(PROBE_INTERVAL_S)
