"""When a program that failed is started again: in numbers, and with real processes that wait on nothing but events."""

from __future__ import annotations

import asyncio
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pdproxy.launch.errors import ProgramDied
from pdproxy.launch.process import Program
from pdproxy.launch.restarts import NEVER, RestartPolicy, Restarts
from pdproxy.launch.supervisor import Supervisor

PATIENCE_S = 20
SOON = RestartPolicy(limit=2, first_wait_s=0.01, longest_wait_s=0.02)

PARK = "import signal\nprint('parked', flush=True)\nsignal.pause()\n"
# Each start takes one line out of the file and does what it says.
BY_SCRIPT = f"""
import os, pathlib, signal, sys
script = pathlib.Path(sys.argv[1])
now, *later = script.read_text().splitlines()
script.write_text("\\n".join(later))
if now != "park":
    sys.exit(int(now))
{PARK}
"""


class TestInNumbers:
    def test_waits_double_up_to_the_longest(self) -> None:
        policy = RestartPolicy(limit=7, first_wait_s=1, longest_wait_s=30)
        assert [policy.wait_s(number) for number in range(8)] == [1, 2, 4, 8, 16, 30, 30, None]

    def test_by_default_nothing_is_started_again(self) -> None:
        assert Restarts(NEVER).next_wait_s(1, 1e6) is None

    def test_a_limit_is_for_a_row(self) -> None:
        restarts = Restarts(RestartPolicy(limit=2, steady_s=60))
        assert [restarts.next_wait_s(1, lived_s=59) for _ in range(3)] == [1, 2, None]

    def test_who_ran_steadily_has_recovered(self) -> None:
        restarts = Restarts(RestartPolicy(limit=2, steady_s=60))
        assert [restarts.next_wait_s(-9, lived_s) for lived_s in (5, 5, 60, 5, 5)] == [1, 2, 1, 2, None]

    def test_an_end_that_somebody_wanted_is_no_failure(self) -> None:
        restarts = Restarts(RestartPolicy(limit=9))
        assert restarts.next_wait_s(0, lived_s=1) is None
        assert restarts.num_in_a_row == 0


class WatchedSupervisor:
    """A supervisor's block, with what it said and what its programs printed; can be waited on."""

    def __init__(self, policy: RestartPolicy) -> None:
        self.said: list[str] = []
        self.printed: list[tuple[str, str]] = []
        self._changed = asyncio.Event()
        self.supervisor = Supervisor(self._print, restarts=policy, notice=self._say)

    def _print(self, name: str, line: str, /) -> None:
        self.printed.append((name, line))
        self._changed.set()

    def _say(self, text: str) -> None:
        self.said.append(text)
        self._changed.set()

    async def until(self, count: int, line: tuple[str, str]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while self.printed.count(line) < count:
                self._changed.clear()
                await self._changed.wait()

    async def until_said(self, words: str) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not any(words in text for text in self.said):
                self._changed.clear()
                await self._changed.wait()


def parked(name: str) -> Program:
    return Program(name=name, command=(sys.executable, "-c", PARK))


def scripted(name: str, folder: Path, *starts: str) -> Program:
    script = folder / f"{name}.txt"
    script.write_text("\n".join(starts))
    return Program(name=name, command=(sys.executable, "-c", BY_SCRIPT, str(script)))


class TestWithProcesses:
    async def test_who_is_killed_comes_back_and_the_rest_lives_on(self) -> None:
        watched = WatchedSupervisor(SOON)
        async with watched.supervisor as supervisor:
            supervisor.spawn(parked("engine"), parked("other"))
            await supervisor.until_ready(PATIENCE_S)
            await watched.until(1, ("engine", "parked"))
            await watched.until(1, ("other", "parked"))
            supervisor.processes[0].kill()
            await supervisor.while_all_live(watched.until(2, ("engine", "parked")))
            await supervisor.while_all_live(watched.until_said("engine is ready again after "))
            assert [(one.name, one.status) for one in supervisor.processes] == [
                ("engine", -signal.SIGKILL),
                ("other", None),
                ("engine", None),
            ]
        assert watched.said[0] == "engine was killed by SIGKILL; starting it again in 0.01 s (1 of 2)"
        assert all(process.status is not None for process in supervisor.processes)

    async def test_at_the_limit_everything_ends(self, tmp_path: Path) -> None:
        watched = WatchedSupervisor(SOON)

        async def launch() -> None:
            async with watched.supervisor as supervisor:
                supervisor.spawn(scripted("engine", tmp_path, "park", "3", "4"), parked("proxy"))
                await supervisor.until_ready(PATIENCE_S)
                await watched.until(1, ("engine", "parked"))
                supervisor.processes[0].kill()
                await supervisor.until_one_dies()

        with pytest.raises(ProgramDied, match="engine exited with status 4"):
            await launch()
        tried = [text.rpartition("(")[2] for text in watched.said if "starting it again" in text]
        assert tried == ["1 of 2)", "2 of 2)"]
        assert all(process.status is not None for process in watched.supervisor.processes)

    async def test_before_all_were_ready_a_death_is_a_death(self, tmp_path: Path) -> None:
        watched = WatchedSupervisor(SOON)

        async def launch() -> None:
            async with watched.supervisor as supervisor:
                supervisor.spawn(
                    Program(name="engine", command=(sys.executable, "-c", "exit(3)"), ready_url="http://127.0.0.1:9/")
                )
                await supervisor.until_ready(PATIENCE_S)

        with pytest.raises(ProgramDied, match="engine exited with status 3"):
            await launch()
        assert watched.said == []

    async def test_whoever_ends_one_properly_ends_all(self) -> None:
        watched = WatchedSupervisor(SOON)
        says_yes = "import signal\nsignal.signal(signal.SIGTERM, lambda *_: exit(0))\n" + PARK

        async def launch() -> None:
            async with watched.supervisor as supervisor:
                supervisor.spawn(Program(name="engine", command=(sys.executable, "-c", says_yes)))
                await supervisor.until_ready(PATIENCE_S)
                await watched.until(1, ("engine", "parked"))
                supervisor.processes[0].terminate()
                await supervisor.until_one_dies()

        with pytest.raises(ProgramDied, match="engine exited with status 0"):
            await launch()

    async def test_nothing_is_started_while_all_are_stopped(self) -> None:
        watched = WatchedSupervisor(RestartPolicy(limit=5, first_wait_s=0.0))
        async with watched.supervisor as supervisor:
            supervisor.spawn(parked("engine"))
            await supervisor.until_ready(PATIENCE_S)
            await watched.until(1, ("engine", "parked"))
            supervisor.processes[0].kill()
            await supervisor.processes[0].exited.wait()  # its return is due, and so is the end of the block
        await asyncio.sleep(0)
        assert [process.status for process in supervisor.processes] == [-signal.SIGKILL]

    async def test_one_that_does_not_get_ready_again_has_failed_again(self) -> None:
        """What answered for it is gone, so that it runs and is never ready."""
        watched = WatchedSupervisor(RestartPolicy(limit=2, first_wait_s=0.01))

        async def say_yes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            writer.close()

        async def launch() -> None:
            answering = await asyncio.start_server(say_yes, "127.0.0.1", 0)
            url = "http://{}:{}/health".format(*answering.sockets[0].getsockname())
            async with watched.supervisor as supervisor:
                supervisor.spawn(replace(parked("engine"), ready_url=url))
                await supervisor.until_ready(PATIENCE_S)
                await supervisor.until_ready(0.2)
                await watched.until(1, ("engine", "parked"))
                answering.close()
                await answering.wait_closed()
                supervisor.processes[0].kill()
                await supervisor.until_one_dies()

        with pytest.raises(ProgramDied, match="engine was killed by SIGKILL"):
            await launch()
        late = [text for text in watched.said if text.startswith("engine was not ready within 0.2 s (last answer: ")]
        assert len(late) == 2
