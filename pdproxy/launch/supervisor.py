"""Starts programs, waits until they are ready, and stops every one of them however the block that uses it ends."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import httpx

from pdproxy.launch.errors import Interrupted, NotReadyInTime, ProgramDied
from pdproxy.launch.process import Process, Program, Sink

PROBE_INTERVAL_S = 0.1
PROBE_TIMEOUT_S = 5.0
KILL_TIMEOUT_S = 5.0

T = TypeVar("T")


class OnReady(Protocol):
    """Told of each program as it becomes ready."""

    def __call__(self, name: str, seconds: float, /) -> None: ...


class Supervisor:
    """The owner of processes; use with `async with`, in the main thread.

    Leaving the block stops them: the last stage first, each asked with SIGTERM and killed after `grace_s`. Inside the
    block, SIGINT, SIGTERM and SIGHUP cancel its task and come out of it as `Interrupted`; a second one kills at once.

    State: `_stages` holds every process ever started, in order; `_death` is done once a service has died by itself;
    `_signum` is the first signal.
    """

    def __init__(self, sink: Sink, *, grace_s: float = 10.0) -> None:
        self._sink = sink
        self._grace_s = grace_s
        self._stages: list[list[Process]] = []
        self._is_stopping = False
        self._signum: int | None = None

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._death: asyncio.Future[Process] = self._loop.create_future()
        self._task = asyncio.current_task()
        self._caught = [signal.SIGINT, signal.SIGTERM]
        # Whoever ignores it (nohup) means it.
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            self._caught.append(signal.SIGHUP)
        for signum in self._caught:
            self._loop.add_signal_handler(signum, self._on_signal, signum)
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
            for signum in self._caught:
                self._loop.remove_signal_handler(signum)
        if self._signum is not None and isinstance(error, asyncio.CancelledError):
            assert self._task is not None
            self._task.uncancel()
            raise Interrupted(self._signum) from None

    def __repr__(self) -> str:
        return f"<Supervisor {self.processes}>"

    @property
    def processes(self) -> list[Process]:
        """All that were started, first to last."""
        return [process for stage in self._stages for process in stage]

    def spawn(self, *programs: Program) -> None:
        """Start services as one stage. They are expected to run until they are stopped."""
        stage: list[Process] = []
        self._stages.append(stage)
        for program in programs:
            stage.append(Process(program, self._sink, self._on_service_exit))

    async def run(self, program: Program) -> Process:
        """Start a program that ends by itself and wait for that. Raises `ProgramDied` if a service dies meanwhile."""
        process = Process(program, self._sink, lambda process: None)
        self._stages.append([process])
        await self._while_all_live(process.exited.wait())
        return process

    async def until_ready(self, timeout_s: float, on_ready: OnReady = lambda name, seconds: None) -> None:
        """Return once every service is ready. Raises `ProgramDied` at once when one dies, else `NotReadyInTime`."""
        await self._while_all_live(self._probe_all(timeout_s, on_ready))

    async def until_one_dies(self) -> None:
        """Never returns: raises `ProgramDied`, or is cancelled by a signal."""
        await self._while_all_live(asyncio.Event().wait())

    def kill(self) -> None:
        """Everything, now. Leaving the block still waits until it is gone."""
        for process in self.processes:
            process.kill()

    def _on_signal(self, signum: int) -> None:
        if self._signum is not None or self._is_stopping:
            self.kill()
            return
        self._signum = signum
        assert self._task is not None
        self._task.cancel()

    def _on_service_exit(self, process: Process) -> None:
        if not self._is_stopping and not self._death.done():
            self._death.set_result(process)

    async def _while_all_live(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.ensure_future(work)
        try:
            watched: tuple[asyncio.Future[Any], ...] = (task, self._death)
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            if self._death.done():
                dead = self._death.result()
                assert dead.status is not None
                raise ProgramDied(dead.name, dead.status, dead.tail)
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _probe_all(self, timeout_s: float, on_ready: OnReady) -> None:
        # An HTTP proxy from the environment has no business between processes of one machine.
        async with httpx.AsyncClient(trust_env=False, timeout=PROBE_TIMEOUT_S) as client:
            started = time.monotonic()
            for process in self.processes:
                if process.status is None:
                    await _probe(client, process, started + timeout_s, timeout_s)
                    on_ready(process.name, time.monotonic() - started)

    async def _stop(self) -> None:
        for stage in reversed(self._stages):
            for process in stage:
                process.terminate()
            if not await _all_gone(stage, self._grace_s):
                for process in stage:
                    process.kill()
                await _all_gone(stage, KILL_TIMEOUT_S)
        self._death.cancel()


async def _all_gone(stage: list[Process], timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            for process in stage:
                await process.exited.wait()
    except TimeoutError:
        return False
    return True


async def _probe(client: httpx.AsyncClient, process: Process, deadline: float, timeout_s: float) -> None:
    """Until it is ready. `deadline` is on the monotonic clock; `timeout_s` is only for the message."""
    answer = "none"
    while process.program.ready_url is not None:
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
