"""``pdproxy status`` and ``pdproxy check --url`` read a proxy's pages, and say clearly what is none."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pdproxy.cli import app
from pdproxy.config.instances import InstanceSettings
from pdproxy.inspection.running_proxy import AskFailed, fleet_of, read_page
from pdproxy.inspection.status_tables import print_status
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.proxy_harness import proxy_in_front_of
from transfer.command_line.commands import exit_status

PAGE: dict[str, Any] = {
    "version": "9.9",
    "ready": False,
    "fleet": [
        {
            "name": "decode-0",
            "role": "decode",
            "url": "http://127.0.0.1:1",
            "engine": "builtin",
            "state": "down",
            "why": "[bold]it \x1b[2J is gone",
            "routable": False,
            "foreign": 2,
        },
        {"name": "prefill-0", "role": "prefill", "url": "http://127.0.0.1:2", "engine": "builtin", "state": "ready"},
    ],
    "replica": {"name": "east", "leads": True, "term": 4, "fronts": [{"replica": "east", "pid": 7, "silent_s": 0.1}]},
    "workers": [{"worker": 0, "pid": 9, "state": "serving", "attempts": 3}],
}


@contextmanager
def serving(pages: dict[str, tuple[int, bytes]]) -> Iterator[str]:
    """A server of these pages in a thread, and its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = pages.get(self.path, (404, b"not here"))
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def pages(page: Any = PAGE, **more: tuple[int, bytes]) -> dict[str, tuple[int, bytes]]:
    models = (200, b'{"object": "list", "data": [{"id": "tiny"}]}')
    return {"/status": (200, json.dumps(page).encode()), "/v1/models": models} | more


async def test_the_page_of_a_real_proxy_is_read_and_drawn() -> None:
    decoder = FakeEngine("decode")
    decoder.hang_at.add("middle")
    async with proxy_in_front_of([FakeEngine("prefill")], [decoder]) as house:
        call = house.call(stream=True)
        await decoder.reached("middle")
        status = read_page("x", (await house.get("/status")).body)
        assert [(one.name, one.state) for one in status.fleet] == [("prefill-0", "ready"), ("decode-0", "ready")]
        assert status.fleet[1].capacity == 64
        assert len(status.in_flight) == 1
        drawn = io.StringIO()
        print_status(status, Console(file=drawn, width=200))
        assert "1 in flight" in drawn.getvalue()
        assert "decode-0" in drawn.getvalue()
        decoder.let_go("middle")
        await call.answer()


def test_a_page_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(pages()) as url:
        assert exit_status(app, "pdproxy", ["status", "--url", url]) == 0
        told = capsys.readouterr().out
        for word in ("pdproxy 9.9: not ready", "decode-0", "[bold]it", "east leads, term 4", "serving"):
            assert word in told
        assert "\x1b[2J" not in told
        assert exit_status(app, "pdproxy", ["status", "--url", url, "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == PAGE


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ((404, b"not found"), "HTTP 404"),
        ((200, b"<html>"), "another server"),
        ((200, b'{"ok": true}'), "another release"),
        ((200, b'{"version": 1, "ready": true, "fleet": []}'), "version"),
        ((200, b"[" * 100_000), "another server"),
    ],
)
@pytest.mark.parametrize("command", ["status", "check"])
def test_another_server_is_told(
    command: str, page: tuple[int, bytes], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving({"/status": page}) as url:
        assert exit_status(app, "pdproxy", [command, "--url", url]) == 2
    told = capsys.readouterr().err
    assert words in told
    assert told.count("\n") == 1


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "nonsense", "http://"])
def test_nobody_is_there(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status(app, "pdproxy", ["status", "--url", url]) == 2
    assert "--url" in capsys.readouterr().err


def test_a_check_of_a_running_fleet(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    with serving(pages()) as url:
        assert exit_status(app, "pdproxy", ["check", "--url", url, "--json", str(found)]) == 1
    report = json.loads(found.read_text())
    told = {(one["problem"], tuple(one["instances"])) for one in report["findings"]}
    assert not report["ok"]
    assert ("proxy", ("decode-0",)) in told
    assert ("unreachable", ("decode-0",)) in told
    assert ("unreachable", ("prefill-0",)) in told
    assert "to be put right" in capsys.readouterr().out


def test_a_check_of_a_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    engines = ["--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:2"]
    assert exit_status(app, "pdproxy", ["check", *engines, "--json"]) == 1
    out = capsys.readouterr().out
    assert {one["problem"] for one in json.loads(out)["findings"]} == {"unreachable"}
    assert exit_status(app, "pdproxy", ["check", "--prefill", "http://127.0.0.1:1"]) == 2
    assert "--decode URL" in capsys.readouterr().err
    assert exit_status(app, "pdproxy", ["check", "--prefil", "http://127.0.0.1:1"]) == 2
    assert "--prefill" in capsys.readouterr().err
    assert exit_status(app, "pdproxy", ["check", "--help"]) == 0
    told = capsys.readouterr().out
    assert "--max-pairs" in told
    assert "--attempt-key-file" in told


def test_mistakes_in_a_configuration_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    """The command's log tells errors alone, and what it would warn of is in the report."""
    engines = ["--prefill", "http://169.254.1.1:1", "--decode", "http://127.0.0.1:2", "--connect-timeout-s", "0.2"]
    assert exit_status(app, "pdproxy", ["check", *engines, "--probe-timeout-s", "0.2", "--json"]) == 1
    told = capsys.readouterr()
    assert "configuration" in {one["problem"] for one in json.loads(told.out)["findings"]}
    assert told.err.count("link-local") == 1


def test_a_fleet_takes_from_the_options_what_the_page_does_not_tell() -> None:
    known = InstanceSettings(name="prefill-0", role="prefill", url="http://127.0.0.1:2/", chunk_size=16)
    fleet = fleet_of(read_page("x", json.dumps(PAGE).encode()), (known,))
    assert fleet[1] is known
    assert fleet[0].name == "decode-0"
    with pytest.raises(AskFailed):
        read_page("x", b"")
