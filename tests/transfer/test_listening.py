"""Sockets bind only where told: a receiver and a sender over NIXL, looked at from inside their own process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.sockets import listening

pytest.importorskip("nixl", reason="the KV transfer needs NIXL (extra: engine)")

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 60.0

PROCESS = """
import asyncio, json, os
from tests.helpers.transfer_process import ReceivingEnd, SendingEnd
from tests.helpers.sockets import listening

async def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    receiver, sender = ReceivingEnd(), SendingEnd()
    host, port = await receiver.start()
    await sender.start()
    await sender.open(host, port, "a", 2, 20.0)
    await sender.fill("a", [0, 1])
    await sender.finish("a")
    assert await receiver.read("a") == await sender.checksum([0, 1])
    print(json.dumps({"port": port, "listening": listening(os.getpid())}), file=answers, flush=True)
    await sender.close()
    await receiver.close()

asyncio.run(main())
"""


def listeners(**environment: str) -> tuple[int, list[tuple[str, int]]]:
    """(the receiver's port, all that listens)"""
    done = subprocess.run(
        [sys.executable, "-c", PROCESS],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    return answer["port"], [(address, port) for address, port in answer["listening"]]


@pytest.mark.engine
def test_everything_listens_on_loopback_where_that_is_said() -> None:
    """Our control socket, and whatever NIXL and UCX listen on: UCX goes by ``UCX_NET_DEVICES``."""
    port, found = listeners(UCX_NET_DEVICES="lo", UCX_TLS="tcp,sm,self")
    assert ("127.0.0.1", port) in found
    assert {address for address, _ in found} == {"127.0.0.1"}


@pytest.mark.engine
def test_ucx_binds_the_addresses_of_its_interfaces_and_never_all_of_them() -> None:
    """Without the setting it listens on every interface's own address; our own socket does not move."""
    port, found = listeners(UCX_NET_DEVICES="all", UCX_TLS="tcp,sm,self")
    assert [address for address, number in found if number == port] == ["127.0.0.1"]
    assert not [address for address, _ in found if address == "0.0.0.0" or ":" in address or len(address) > 15]


def test_the_look_finds_what_listens_elsewhere() -> None:
    with socket.create_server(("0.0.0.0", 0)) as server, socket.create_server(("127.0.0.2", 0)) as other:
        found = listening(os.getpid())
        assert ("0.0.0.0", server.getsockname()[1]) in found
        assert ("127.0.0.2", other.getsockname()[1]) in found
