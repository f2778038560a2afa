"""Both clients of engines tell what this machine lacks from what an engine does. The descriptors are really gone."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pdproxy.aio.descriptors import DescriptorBudget
from pdproxy.engines.http.base import EngineClient, EngineRefused, LocalFault, local_fault
from pdproxy.engines.http.http1 import origin
from pdproxy.engines.http.http1.client import Http1Client
from pdproxy.engines.http.httpx_client import HttpxClient
from tests.fakes.both_loops import on_both_loops
from tests.helpers.standin_http import Reply, serve

CLIENTS = pytest.mark.parametrize("make", [Http1Client, HttpxClient], ids=["http1", "httpx"])


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Within the block this process can open nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def ok(method: str, path: str, body: bytes) -> Reply:
    return Reply(b"{}")


async def call(client: EngineClient, way: str) -> object:
    if way == "get":
        return await client.get("/health", timeout_s=2)
    leg = await client.post("/v1/completions", b"{}", {})
    try:
        return await leg.read()
    finally:
        leg.close()


@CLIENTS
@pytest.mark.parametrize("way", ["get", "post"])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
@on_both_loops
async def test_no_descriptor_is_left(make: Any, way: str, host: str) -> None:
    async with await serve(ok, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        descriptors = DescriptorBudget()
        client = make(f"http://{host}:{port}", connect_timeout_s=2, descriptors=descriptors)
        await asyncio.to_thread(int)  # names are looked up in a thread, which is there by then
        with no_descriptors():
            for _ in range(2):
                with pytest.raises(LocalFault):
                    await call(client, way)
        assert descriptors.local_errors["EMFILE"] == 2
        assert descriptors.num_opened == 0
        await call(client, way)
        await client.aclose()
        await asyncio.sleep(0.05)
        assert descriptors.num_opened == 0, "what was opened is counted off when it is closed"


@CLIENTS
@pytest.mark.parametrize("number", [errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL])
async def test_whatever_else_this_machine_lacks(make: Any, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def lacks(*arguments: Any, **options: Any) -> Any:
        raise OSError(number, os.strerror(number))

    descriptors = DescriptorBudget()
    client = make("http://127.0.0.1:1", connect_timeout_s=2, descriptors=descriptors)
    with monkeypatch.context() as patch:
        patch.setattr(asyncio.get_running_loop(), "create_connection", lacks)
        patch.setattr(origin, "dial", lacks)
        with pytest.raises(LocalFault):
            await call(client, "post")
    assert descriptors.local_errors[errno.errorcode[number]] == 1
    with pytest.raises(EngineRefused):
        await call(client, "post")
    await client.aclose()


@pytest.mark.parametrize(
    ("errors", "is_local"),
    [
        ([], False),
        ([OSError(errno.EMFILE, "")], True),
        ([ConnectionRefusedError(errno.ECONNREFUSED, ""), OSError(errno.EMFILE, "")], True),
        ([OSError(errno.EADDRNOTAVAIL, "")], True),
        ([OSError(errno.EADDRNOTAVAIL, ""), ConnectionRefusedError(errno.ECONNREFUSED, "")], False),
        ([OSError(errno.EADDRNOTAVAIL, ""), TimeoutError()], False),
        ([OSError(errno.EHOSTUNREACH, "")], False),
        ([socket.gaierror(socket.EAI_MEMORY, "")], True),
        ([socket.gaierror(socket.EAI_NONAME, "")], False),
    ],
)
def test_what_is_this_machines_own(errors: list[OSError], is_local: bool) -> None:
    assert (local_fault(errors) is not None) == is_local


def test_a_name_that_is_not_found_because_no_file_could_be_opened() -> None:
    with no_descriptors():
        assert local_fault([socket.gaierror(socket.EAI_NONAME, "")]) is not None
