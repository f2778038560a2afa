"""`pdproxy serve --workers` as processes: how they end, and who may have their port."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path

import pytest

from pdproxy.fronts.forward import MAX_BODY_BYTES
from tests.pdproxy.server.test_serve_process import BODY, Proxy, command, hold, process, start

WORKERS = ("--workers", "2", "--drain-timeout-s", "20")


async def pids_of(proxy: Proxy) -> list[int]:
    """Returns the fronts' processes, once all of them serve."""
    async with asyncio.timeout(20):
        while True:
            workers = (await proxy.client.get("/status")).json()["workers"]
            if [one["state"] for one in workers] == ["serving", "serving"]:
                return [one["pid"] for one in workers]
            await asyncio.sleep(0.05)


async def test_a_signal_to_all_processes_lets_streams_finish(tmp_path: Path) -> None:
    """Process managers tell every process of a service to end, and the leader tells its fronts once more."""
    async with process(tmp_path, *WORKERS) as proxy:
        gate = hold(proxy.decoder, "middle")
        pids = await pids_of(proxy)
        async with proxy.client.stream("POST", "/v1/completions", json=BODY) as stream:
            lines = stream.aiter_lines()
            got = [await anext(lines)]
            await proxy.decoder.reached("middle")
            for pid in (*pids, proxy.child.pid):
                os.kill(pid, signal.SIGTERM)
            await asyncio.sleep(1.5)  # whatever they tell each other was told
            gate.set()
            got += [line async for line in lines if line]
        assert got[-1] == "data: [DONE]", (got, proxy.said())
        assert await proxy.ended(10) == 0
        for pid in (*pids, proxy.child.pid):
            assert f"Finished server process [{pid}]" in proxy.said(), "a front is killed before it has logged its end"


async def test_nobody_waits_at_a_proxy_that_drains(tmp_path: Path) -> None:
    async with process(tmp_path, *WORKERS) as proxy:
        gate = hold(proxy.decoder, "middle")
        async with proxy.client.stream("POST", "/v1/completions", json=BODY) as stream:
            await proxy.decoder.reached("middle")
            proxy.child.send_signal(signal.SIGTERM)
            await asyncio.sleep(1.5)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", proxy.client.base_url.port or 0), timeout=1).close()
            gate.set()
            await stream.aread()
        assert await proxy.ended(10) == 0


async def test_a_page_that_follows_the_proxy_ends_with_it(tmp_path: Path) -> None:
    async with process(tmp_path, *WORKERS) as proxy:
        too_large = await proxy.client.post("/admin/instances", content=b"x" * (MAX_BODY_BYTES + 1))
        assert (too_large.status_code, too_large.json()["error"]["type"]) == (413, "invalid_request_error")
        async with proxy.client.stream("GET", "/ui/events") as stream:
            pieces = stream.aiter_raw()
            await anext(pieces)
            proxy.child.send_signal(signal.SIGTERM)
            assert await proxy.ended(10) == 0
        assert "Traceback" not in proxy.said()


async def test_a_port_is_for_one_proxy(tmp_path: Path) -> None:
    async with process(tmp_path, *WORKERS) as proxy:
        port = proxy.client.base_url.port or 0
        nobody = [f"http://127.0.0.1:{number}" for number in (8, 9)]
        second = start(command(port, 0, *nobody, *WORKERS), tmp_path / "second.log")
        try:
            status = await asyncio.wait_for(asyncio.to_thread(second.wait, 10), 12)
        finally:
            second.kill()
            second.wait()
        assert status
        assert str(port) in (tmp_path / "second.log").read_text()
