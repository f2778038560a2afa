"""Sockets bind only where told: a receiver and a sender over NIXL, looked at from inside their own process."""

from __future__ import annotations

import os
import socket

import pytest

from tests.helpers.sockets import listening
from tests.helpers.zygote import Zygote

pytest.importorskip("nixl", reason="the KV transfer needs NIXL (extra: engine)")


def listeners(zygote: Zygote, **environment: str) -> tuple[int, list[tuple[str, int]]]:
    """(the receiver's port, all that listens)"""
    process = zygote.fork("both", **environment)
    port, found = process.ask("listeners")
    process.close()
    return port, [(address, number) for address, number in found]


@pytest.mark.engine
def test_everything_listens_on_loopback_where_that_is_said(zygote: Zygote) -> None:
    """Our control socket, and whatever NIXL and UCX listen on: UCX goes by ``UCX_NET_DEVICES``."""
    port, found = listeners(zygote, UCX_NET_DEVICES="lo", UCX_TLS="tcp,sm,self")
    assert ("127.0.0.1", port) in found
    assert {address for address, _ in found} == {"127.0.0.1"}


@pytest.mark.engine
def test_ucx_binds_the_addresses_of_its_interfaces_and_never_all_of_them(zygote: Zygote) -> None:
    """Without the setting it listens on every interface's own address; our own socket does not move."""
    port, found = listeners(zygote, UCX_NET_DEVICES="all", UCX_TLS="tcp,sm,self")
    assert [address for address, number in found if number == port] == ["127.0.0.1"]
    assert not [address for address, _ in found if address == "0.0.0.0" or ":" in address or len(address) > 15]


def test_the_look_finds_what_listens_elsewhere() -> None:
    with socket.create_server(("0.0.0.0", 0)) as server, socket.create_server(("127.0.0.2", 0)) as other:
        found = listening(os.getpid())
        assert ("0.0.0.0", server.getsockname()[1]) in found
        assert ("127.0.0.2", other.getsockname()[1]) in found
