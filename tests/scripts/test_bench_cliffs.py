"""The proxy's benchmark looks for cliffs: its loads, its sums, what it writes down, and that it runs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from pdproxy.config.settings import load
from pdproxy.launch.ports import free_ports
from scripts.dev.bench_proxy import cliff_words, command, native
from scripts.dev.bench_proxy.cliffs import (
    AXES,
    BESIDES,
    LARGE,
    SMALL,
    Axis,
    pick_axes,
    sizes_of,
    sockets_mb,
)
from scripts.dev.bench_proxy.load import Clients, Reach, Told, clients_of
from scripts.dev.bench_proxy.markdown import fill
from scripts.dev.bench_proxy.plan import Scenario
from scripts.dev.bench_proxy.targets import Place, pdproxy_line

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 20.0
STANDING = Scenario(name="standing", what="", clients=3, requests=6, is_standing=True, is_warmed=False)


def axis(name: str) -> Axis:
    (found,) = (one for one in AXES if one.name == name)
    return found


# ── plans ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_measured_is_picked_by_name() -> None:
    assert pick_axes([]) == (*(one.name for one in AXES), *BESIDES)
    assert pick_axes(["slow", "headers"]) == ("headers", "slow")
    with pytest.raises(ValueError, match="no cliff is called 'edge'; there are instances, "):
        pick_axes(["edge"])


def test_a_size_that_takes_too_many_descriptors_gives_way_to_the_largest_that_does_not() -> None:
    assert sizes_of(axis("streams"), LARGE, 9900) == [1, 100, 1000, 9900]
    assert sizes_of(axis("streams"), LARGE, 100_000) == [1, 100, 1000, 10_000, 20_000]
    assert sizes_of(axis("headers"), LARGE, 5) == [0, 10, 30, 100]
    assert sizes_of(axis("waiting"), SMALL, 9900) == [0, 10]


@pytest.mark.parametrize("one", AXES, ids=lambda one: str(one.name))
def test_pdproxy_understands_the_line_of_each_size(one: Axis) -> None:
    place = Place(port=1000, metrics_port=1001, prefill_port=1002, decode_port=1003)
    for size in one.sizes:
        scenario = one.load(size)
        line = pdproxy_line(place, scenario)
        assert max(map(len, line)) < 128 << 10, "the system takes no longer argument"
        settings = load(list(line[line.index("serve") + 1 :]))
        assert len(settings.prefill) == len(settings.decode) == len(set(settings.decode)) == scenario.num_pairs
        assert settings.concurrent_pages == scenario.slots


# ── engines and clients ─────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def engine(**options: int) -> Iterator[Place]:
    port, metrics, prefill, decode = free_ports(4, random.Random())
    words = {"prefill_port": prefill, "decode_port": decode} | options
    process = subprocess.Popen(
        [str(native.build("engine")), *(f"{name}={value}" for name, value in words.items())], stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield Place(port=port, metrics_port=metrics, prefill_port=prefill, decode_port=decode)
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def http() -> Iterator[httpx.Client]:
    with httpx.Client(trust_env=False, timeout=PATIENCE_S) as client:
        yield client


@pytest.mark.parametrize(
    ("num_addresses", "num_models", "expected"),
    [
        (1, 3, [{"bench", "bench-1", "bench-2"}]),
        (3, 1, [{"bench"}] * 3),
        (3, 2, [{"bench"}, {"bench-1"}, {"bench"}]),
        (2, 3, [{"bench", "bench-2"}, {"bench-1"}]),
    ],
)
def test_each_address_has_an_engine_with_its_share_of_the_models(
    http: httpx.Client, num_addresses: int, num_models: int, expected: list[set[str]]
) -> None:
    with engine(addresses=num_addresses, models=num_models) as place:
        urls = place.urls(place.prefill_port, num_addresses).split(",")
        assert len(urls) == num_addresses
        for url, names in zip(urls, expected, strict=True):
            assert {card["id"] for card in http.get(f"{url}/v1/models").json()["data"]} == names
            for number in range(num_models + 1):
                name = f"bench-{number}" if number else "bench"
                body = {"model": name, "prompt": "Hello.", "max_tokens": 1}
                status = http.post(f"{url}/v1/completions", json=body).status_code
                assert status == (200 if name in names else 404)


def reach(place: Place) -> Reach:
    return Reach(port=place.prefill_port, decode_port=place.decode_port)


async def looked_at(clients: Clients) -> Told:
    await clients.go_on()
    return await clients.tell()


@contextlib.asynccontextmanager
async def begun(scenario: Scenario, to: Reach) -> Any:
    async with clients_of(native.build("client"), scenario, to, PATIENCE_S) as clients:
        await clients.until("ready")
        await clients.go_on()
        await clients.until("done")
        yield clients


async def test_a_load_that_stands_goes_on_and_is_told_piece_by_piece() -> None:
    with engine() as place:
        async with begun(STANDING, reach(place)) as clients:
            looks = []
            for _ in range(3):
                looks.append(await looked_at(clients))
                await asyncio.sleep(0.1)  # for what is to be seen at the next look
            first, second, third = looks
    assert first.requests >= STANDING.requests
    for told in (second, third):
        assert told.requests > 0
        assert (told.errors, told.complaint) == (0, "")
        assert abs(told.tokens - told.requests) <= STANDING.clients, "of one short answer each"
        assert 0 < told.wall_ns < first.wall_ns + PATIENCE_S * 1e9


async def test_all_clients_begin_however_few_requests_there_are(http: httpx.Client) -> None:
    held = replace(STANDING, clients=7, requests=1, is_stream=True, is_held=True)
    with engine(delay_us=60_000_000) as place:
        async with begun(held, reach(place)) as clients:
            await looked_at(clients)
            deadline = time.monotonic() + PATIENCE_S
            while num_handed(http, place) < 7:
                assert time.monotonic() < deadline


def num_handed(http: httpx.Client, place: Place) -> int:
    return int(http.get(f"{place.prefill_url}/bench").json()["handed"])


async def test_models_and_headers_are_in_the_requests() -> None:
    seen: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        scenario = replace(STANDING, clients=3, requests=3, num_models=3, num_headers=40, is_standing=False)
        port = server.getsockname()[1]
        async with clients_of(native.build("client"), scenario, Reach(port=port), PATIENCE_S) as clients:
            await clients.until("ready")
            await clients.go_on()
            for _ in range(3):
                one, _ = server.accept()
                with one:
                    one.settimeout(PATIENCE_S)
                    got = b""
                    while b"false}" not in got:
                        got += one.recv(1 << 16)
                    seen.append(got)
            await clients.until("done")
    models = {json.loads(one.partition(b"\r\n\r\n")[2])["model"] for one in seen}
    assert models == {"bench", "bench-1", "bench-2"}
    for one in seen:
        lines = one.partition(b"\r\n\r\n")[0].split(b"\r\n")
        assert len({line for line in lines if line.startswith(b"x-bench-")}) == 40


async def test_a_slow_reader_takes_a_byte_a_second(http: httpx.Client) -> None:
    slow = replace(STANDING, clients=2, requests=2, is_stream=True, is_held=True, is_slow=True, tokens=100_000)
    with engine(pad=16 << 10, buffer=32 << 10) as place:
        async with begun(slow, reach(place)) as clients:
            await looked_at(clients)
            later = await looked_at(clients)
        assert (later.tokens, later.errors, later.complaint) == (0, 0, "")


# ── what is told ────────────────────────────────────────────────────────────────────────────────────────────────────


def point(name: str, size: int, cpu_us: float, **fields: Any) -> dict[str, Any]:
    usual = {"unit": axis(name).unit, "ratio": 1.0, "idle_cores": 0.01, "start_s": 1.0, "rss_mb": 80.0}
    return {"axis": name, "size": size, "cpu_us": cpu_us, "elsewhere_cores": 0.0, "errors": 0} | usual | fields


def report(*rows: dict[str, Any]) -> dict[str, Any]:
    machine = {"cores": 2, "cpu": "a CPU", "kernel": "6", "python": "3.11", "compiled": True}
    return {"date": "2026-01-01T00:00:00+00:00", "is_complete": True, "machine": machine, "rows": list(rows)}


@pytest.mark.parametrize(
    ("figures", "expected"), [([10, 10, 11], 1.1), ([10, 30, 20], 3.0), ([50, 10, 15], 1.5), ([30, 20, 10], 1.0)]
)
def test_a_rise_is_over_the_least_of_all_smaller_sizes(figures: list[float], expected: float) -> None:
    found = [point("headers", size, figure) for size, figure in enumerate(figures)]
    assert cliff_words.rise(found) == pytest.approx(expected)


def test_documents_get_a_line_for_each_axis_and_fact() -> None:
    places = "".join(f"<!-- bench_proxy: {name} -->\n<!-- /bench_proxy -->\n" for name in ("cliffs", "cliffs-facts"))
    goals = "<!-- bench_proxy: goals -->\nas they were\n<!-- /bench_proxy -->\n"
    rows = [point("headers", 0, 100.0), point("headers", 100, 250.0, elsewhere_cores=1.0)]
    facts = [{"what": "cores while all wait", "value": 0.001, "most": 0.005}, {"what": "a | b", "value": 7, "most": 5}]
    filled = fill(places + goals, report(*rows, *facts))
    assert "| 0 · 100 | request | 100.0 · 250.0* | 2.50 **not flat** | 0.010 |" in filled
    assert "| cores while all wait | 0.001 | at most 0.005: reached |" in filled
    assert "| a \\| b | 7 | at most 5: **missed** |" in filled
    assert goals in filled, "those places are for other reports"


def test_the_document_has_places_for_cliffs() -> None:
    text = fill((ROOT / "docs/speed.md").read_text(), report(point("headers", 0, 123.0)))
    assert "| 0 | request | 123.0 | 1.00 | 0.010 |" in text
    assert "2 cores of a CPU, Linux 6" in text


def test_a_request_that_failed_is_told_and_ends_badly() -> None:
    wrong = report(point("headers", 0, 1.0, errors=2, complaint="HTTP 503"))
    assert cliff_words.is_wrong(wrong)
    assert not cliff_words.is_wrong(report(point("headers", 0, 1.0)))
    (row,) = cliff_words.make_table(wrong).rows
    assert row[-1] == "2 errors: HTTP 503"


def test_the_memory_of_sockets() -> None:
    told = "sockets: used 150\nTCP: inuse 7 orphan 0 tw 3 alloc 9 mem 512\nUDP: inuse 1 mem 9\n"
    assert sockets_mb(told) == 512 * os.sysconf("SC_PAGE_SIZE") / (1 << 20)
    assert sockets_mb() >= 0


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [point(one.name, size, 100.0) for one in AXES for size in one.sizes]
    cliff_words.plot(report(*rows), tmp_path / "cliffs.png")
    assert (tmp_path / "cliffs.png").stat().st_size > 1000


# ── the command ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("words", [("--peers", "smg"), ("--rounds", "2"), ("--scenarios", "edge")])
def test_what_it_does_not_take(words: tuple[str, str]) -> None:
    result = CliRunner().invoke(command.app, ["--cliffs", *words], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert words[1] in result.output or words[0] in result.output


def test_what_was_found_before_is_shown_and_written_down_again(tmp_path: Path) -> None:
    for name, cpu_us in (("a", 100.0), ("b", 200.0)):
        rows = [point("headers", 0, cpu_us), *([point("headers", 10, 300.0)] if name == "a" else [])]
        (tmp_path / name).write_text(json.dumps(report(*rows)))
    (tmp_path / "page.md").write_text("<!-- bench_proxy: cliffs -->\n<!-- /bench_proxy -->\n")
    words = ("--cliffs", "--from", f"{tmp_path / 'a'},{tmp_path / 'b'}", "--markdown", str(tmp_path / "page.md"))
    result = CliRunner().invoke(command.app, list(words), env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "| 0 · 10 | request | 200.0 · 300.0 |" in (tmp_path / "page.md").read_text()


@pytest.mark.parametrize(
    ("name", "num_points", "num_facts"), [("headers", 2, 0), *((name, 0, None) for name in BESIDES)]
)
def test_a_quick_run(tmp_path: Path, name: str, num_points: int, num_facts: int | None) -> None:
    words = ("--cliffs", "--quick", "--no-compile", "--scenarios", name, "--json", str(tmp_path / "report.json"))
    script = ROOT / "scripts" / "bench_proxy.py"
    ran = subprocess.run([sys.executable, str(script), *words], capture_output=True, text=True, timeout=150, cwd="/")
    assert ran.returncode == 0, ran.stderr
    told = json.loads((tmp_path / "report.json").read_text())
    points = [row for row in told["rows"] if "axis" in row]
    assert len(points) == num_points
    for row in points:
        assert row["cpu_us"] > 0
        assert (row["errors"], row["unproven"]) == (0, 0)
    facts = [row["value"] for row in told["rows"] if "what" in row]
    assert len(facts) == num_facts if num_facts is not None else facts
    assert "what grows" in ran.stdout
