"""The supervisor of a launch: how its children start and end, and what is checked before. The children are small Python
programs; each test waits on what they print or on their end, never on time."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdproxy.launch.errors import NotReadyInTime, PreflightError, ProgramDied
from pdproxy.launch.preflight import PortUse, check_buffer, check_model, check_ports, config_of, tiny_config_of
from pdproxy.launch.process import Program
from pdproxy.launch.supervisor import Supervisor
from transfer.geometry import kv_geometry

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 20

PARK = "import signal\nprint('parked', flush=True)\nsignal.pause()\n"
STUBBORN = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + PARK
WITH_GRANDCHILD = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {STUBBORN!r}], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
{PARK}
"""
SERVE = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(int(sys.argv[2]))
        self.end_headers()
        self.wfile.write(b"the reason")
    def log_message(self, *args):
        pass
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
print("listening", flush=True)
server.serve_forever()
"""
# Starts a child that never becomes ready, and says so: for tests that end this process in the middle of start-up.
STARTING = """
import asyncio, sys
from pdproxy.launch.errors import Interrupted
from pdproxy.launch.process import Program
from pdproxy.launch.supervisor import Supervisor

async def main():
    def show(name, line):
        print(supervisor.processes[0].pid, line, flush=True)
    def notice(text):
        print(text, flush=True)
    async with Supervisor(show, grace_s=0.2, notice=notice) as supervisor:
        supervisor.spawn(Program(name="slow", command=(sys.executable, "-c", sys.argv[1]), ready_url="http://127.0.0.1:9/"))
        await supervisor.until_ready(60)

try:
    asyncio.run(main())
except Interrupted as stop:
    sys.exit(128 + stop.signum)
"""


class Lines:
    """A sink that remembers, and can be waited on."""

    def __init__(self) -> None:
        self.all: list[tuple[str, str]] = []
        self._changed = asyncio.Condition()
        self._wakers: set[asyncio.Task[None]] = set()

    def __call__(self, name: str, line: str, /) -> None:
        self.all.append((name, line))
        waker = asyncio.ensure_future(self._wake())
        self._wakers.add(waker)
        waker.add_done_callback(self._wakers.discard)

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def until(self, name: str, line: str) -> None:
        async with asyncio.timeout(PATIENCE_S), self._changed:
            await self._changed.wait_for(lambda: (name, line) in self.all)


def program(name: str, code: str, *arguments: str, url: str | None = None) -> Program:
    return Program(name=name, command=(sys.executable, "-c", code, *arguments), ready_url=url)


def server(name: str, port: int, status: int) -> Program:
    return program(name, SERVE, str(port), str(status), url=f"http://127.0.0.1:{port}/health")


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def lines() -> Lines:
    return Lines()


class Watched:
    """A process known by its id; can be waited for though it is nobody's child here."""

    def __init__(self, pid: int) -> None:
        self._pid, self._pidfd = pid, os.pidfd_open(pid)

    def assert_ends(self) -> None:
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        assert poll.poll(PATIENCE_S * 1000), f"process {self._pid} is still there"
        os.close(self._pidfd)


class TestReadiness:
    async def test_ready_once_health_answers_200(self, lines: Lines, port: int) -> None:
        ready: list[str] = []
        async with Supervisor(lines) as supervisor:
            supervisor.spawn(server("engine", port, 200))
            await supervisor.until_ready(PATIENCE_S, lambda name, seconds: ready.append(name))
            assert ready == ["engine"]
            assert supervisor.processes[0].status is None
        assert supervisor.processes[0].status == -signal.SIGTERM

    async def test_what_never_gets_ready_is_named_with_its_last_answer(self, lines: Lines, port: int) -> None:
        supervisor = Supervisor(lines)

        async def launch() -> None:
            async with supervisor:
                supervisor.spawn(server("engine", port, 503))
                await lines.until("engine", "listening")
                await supervisor.until_ready(0.5)

        with pytest.raises(NotReadyInTime, match=r"engine was not ready within 0\.5 s \(last answer: .*") as caught:
            await launch()
        assert "503 the reason" in str(caught.value)

    async def test_death_before_ready_fails_at_once_with_the_last_lines(self, lines: Lines) -> None:
        supervisor = Supervisor(lines)

        async def launch() -> None:
            async with supervisor:
                supervisor.spawn(program("engine", "print('no such model'); exit(3)", url="http://127.0.0.1:9/"))
                supervisor.spawn(program("proxy", PARK))
                await supervisor.until_ready(PATIENCE_S)

        with pytest.raises(ProgramDied, match="engine exited with status 3") as caught:
            await launch()
        assert "no such model" in str(caught.value)
        assert ("engine", "no such model") in lines.all
        assert all(process.status is not None for process in supervisor.processes)

    async def test_a_command_that_does_not_exist_is_a_death(self, lines: Lines) -> None:
        supervisor = Supervisor(lines)

        async def launch() -> None:
            async with supervisor:
                supervisor.spawn(Program(name="engine", command=("/nowhere/engine",)))
                await supervisor.until_one_dies()

        with pytest.raises(ProgramDied, match="cannot run /nowhere/engine: No such file"):
            await launch()


class TestStopping:
    async def test_death_of_one_ends_all(self, lines: Lines) -> None:
        supervisor = Supervisor(lines)

        async def launch() -> None:
            async with supervisor:
                supervisor.spawn(program("prefill", PARK), program("decode", PARK))
                await lines.until("decode", "parked")
                supervisor.processes[1].kill()
                await supervisor.until_one_dies()

        with pytest.raises(ProgramDied, match="decode was killed by SIGKILL"):
            await launch()
        assert all(process.status is not None for process in supervisor.processes)

    async def test_last_stage_goes_first(self, lines: Lines) -> None:
        say_end = "import signal\nsignal.signal(signal.SIGTERM, lambda *_: exit(print('ends')))\n" + PARK
        async with Supervisor(lines) as supervisor:
            supervisor.spawn(program("engine", say_end))
            supervisor.spawn(program("proxy", say_end))
            await lines.until("engine", "parked")
            await lines.until("proxy", "parked")
        assert [name for name, line in lines.all if line == "ends"] == ["proxy", "engine"]

    async def test_who_ignores_sigterm_is_killed_after_the_grace_time(self, lines: Lines) -> None:
        async with Supervisor(lines, grace_s=0.05) as supervisor:
            supervisor.spawn(program("engine", STUBBORN))
            await lines.until("engine", "parked")
        assert supervisor.processes[0].status == -signal.SIGKILL

    async def test_who_has_more_to_finish_is_given_longer(self, lines: Lines) -> None:
        finishing = "import signal, time\nsignal.signal(signal.SIGTERM, lambda *_: exit(time.sleep(0.2)))\n" + PARK
        async with Supervisor(lines, grace_s=0.01) as supervisor:
            supervisor.spawn(replace(program("proxy", finishing), grace_s=PATIENCE_S))
            await lines.until("proxy", "parked")
        assert supervisor.processes[0].status == 0

    async def test_a_log_that_takes_nothing_does_not_hide_an_end(self) -> None:
        told: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))

        def full(name: str, line: str, /) -> None:
            raise OSError("no space left on device")

        async with Supervisor(full) as supervisor, asyncio.timeout(PATIENCE_S):
            running = asyncio.ensure_future(
                supervisor.run(program("command", "print('a line and'); print('half', end='')"))
            )
            await asyncio.sleep(0)
            # Nobody looks at its output before it has ended.
            os.waitid(os.P_PID, supervisor.processes[0].pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222
            assert (await running).status == 0
        assert told

    async def test_a_childs_own_children_end_with_it(self, lines: Lines) -> None:
        async with Supervisor(lines) as supervisor:
            supervisor.spawn(program("engine", WITH_GRANDCHILD))
            await lines.until("engine", "parked")
            grandchild = Watched(int(lines.all[0][1]))
        grandchild.assert_ends()

    async def test_an_exception_in_the_block_stops_everything_and_goes_on(self, lines: Lines) -> None:
        supervisor = Supervisor(lines)

        async def launch() -> None:
            async with supervisor:
                supervisor.spawn(program("engine", PARK))
                raise LookupError

        with pytest.raises(LookupError):
            await launch()
        assert supervisor.processes[0].status is not None

    async def test_run_returns_the_status_and_the_service_lives_on(self, lines: Lines) -> None:
        async with Supervisor(lines) as supervisor:
            supervisor.spawn(program("engine", PARK))
            finished = await supervisor.run(program("command", "print('half a line', end=''); exit(5)"))
            assert finished.status == 5
            assert ("command", "half a line") in lines.all
            assert supervisor.processes[0].status is None

    async def test_a_service_that_dies_during_run_ends_the_command(self, lines: Lines) -> None:
        supervisor = Supervisor(lines)

        async def launch() -> None:
            async with supervisor:
                supervisor.spawn(program("engine", "exit(1)"))
                await supervisor.run(program("command", PARK))

        with pytest.raises(ProgramDied, match="engine exited with status 1"):
            await launch()
        assert all(process.status is not None for process in supervisor.processes)


@pytest.fixture
def _hears_hangups() -> Iterator[None]:
    """Also where the tests themselves run under nohup, which its children inherit."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("_hears_hangups")
class TestEndOfTheSupervisor:
    """The supervisor is a process of its own here, in the middle of start-up."""

    @pytest.fixture
    def starting(self, child: str) -> Iterator[tuple[subprocess.Popen[str], Watched]]:
        command = [sys.executable, "-c", STARTING, child]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
            try:
                assert process.stdout is not None
                pid, word = process.stdout.readline().split()
                assert word == "parked"
                yield process, Watched(int(pid))
            finally:
                process.kill()

    @pytest.mark.parametrize("child", [PARK, STUBBORN], ids=["willing", "stubborn"])
    @pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    def test_a_signal_stops_the_children(
        self, starting: tuple[subprocess.Popen[str], Watched], signum: signal.Signals
    ) -> None:
        supervisor, child = starting
        supervisor.send_signal(signum)
        child.assert_ends()
        assert supervisor.wait(PATIENCE_S) == 128 + signum
        assert supervisor.stdout is not None
        assert supervisor.stdout.read() == f"stopping all at {signum.name}; a second one kills\n"

    @pytest.mark.parametrize("child", [STUBBORN])
    def test_kill_9_leaves_no_children(self, starting: tuple[subprocess.Popen[str], Watched]) -> None:
        supervisor, child = starting
        supervisor.kill()
        child.assert_ends()


class TestPreflight:
    def test_taken_port_is_named_with_its_holder_and_the_option(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as holder:
            taken = holder.getsockname()[1]
            with pytest.raises(PreflightError) as caught:
                check_ports("127.0.0.1", [PortUse(taken, "decoder", "--decode-port")])
        message = str(caught.value)
        assert message.startswith(f"port {taken} (decoder) is taken by pid {os.getpid()} (")
        assert message.endswith("choose another with --decode-port")
        assert "\n" not in message

    def test_free_ports_pass_and_stay_free(self, port: int) -> None:
        uses = [PortUse(port, "proxy", "--port")]
        check_ports("127.0.0.1", uses)
        check_ports("127.0.0.1", uses)

    @pytest.mark.parametrize(
        ("ports", "message"),
        [((70000, 7100), "--port 70000 is not a port"), ((7100, 7100), "--prefill-port and --port are both 7100")],
    )
    def test_ports_that_cannot_be(self, ports: tuple[int, int], message: str) -> None:
        uses = [PortUse(ports[0], "proxy", "--port"), PortUse(ports[1], "prefiller", "--prefill-port")]
        with pytest.raises(PreflightError, match=message):
            check_ports("127.0.0.1", uses)

    def test_model_folder(self, tmp_path: Path) -> None:
        with pytest.raises(PreflightError, match="there is no model folder"):
            check_model(tmp_path / "nowhere")
        with pytest.raises(PreflightError, match=r"has no config\.json"):
            check_model(tmp_path)

    def test_a_buffer_below_one_page(self, tmp_path: Path) -> None:
        config = '{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}'
        (tmp_path / "config.json").write_text(config.replace("{", '{"model_type": "none-such", "dtype": "float32", '))
        config = config_of(tmp_path)
        check_buffer(config, "1MiB", 256)
        with pytest.raises(PreflightError, match="smaller than one page"):
            check_buffer(config, "1KiB", 256)
        with pytest.raises(PreflightError, match="is not a size"):
            check_buffer(config, "much", 256)
        with pytest.raises(PreflightError, match="--chunk-size 0"):
            check_buffer(config, "1MiB", 0)

    def test_the_tiny_models_config_leaves_nothing_to_its_class(self, tiny_model: Callable[..., Path]) -> None:
        model = tiny_model()
        assert kv_geometry(tiny_config_of(model)) == kv_geometry(config_of(model))

    @pytest.mark.parametrize("text", ["{", None])
    def test_a_tiny_model_that_somebody_has_spoiled(self, tmp_path: Path, text: str | None) -> None:
        if text is not None:
            (tmp_path / "config.json").write_text(text)
        with pytest.raises(PreflightError, match=r"config\.json cannot be read: .*; remove .*, and it is made again"):
            tiny_config_of(tmp_path)
