"""Where signals may go: patterns, and addresses that only look as if they fitted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer.errors import TransferError
from transfer.roles.allowed_hosts import EVERYWHERE, THIS_MACHINE, AllowedHosts

HERE = AllowedHosts(THIS_MACHINE)


@pytest.mark.parametrize(
    ("pattern", "fits", "fails"),
    [
        ("proxy.local", ["proxy.local:1", "PROXY.local.:2"], ["a.proxy.local:1", "proxy.local.evil:1", "10.0.0.1:1"]),
        ("proxy.local:7500", ["proxy.local:7500"], ["proxy.local:7501", "proxy.local:75000"]),
        ("*.local", ["a.local:1", "a.b.local:1"], ["local:1", ".local:1", "alocal:1", "a.local.evil:1"]),
        ("10.0.0.7", ["10.0.0.7:1"], ["10.0.0.70:1", "10.0.0.7.evil:1", "proxy:1"]),
        ("10.0.0.0/8:7500", ["10.1.2.3:7500"], ["10.1.2.3:7501", "11.0.0.1:7500", "10.evil:7500", "10.1:7500"]),
        ("[fd00::]/8", ["[fd00::1]:1"], ["[fe80::1]:1", "10.0.0.1:1"]),
        ("[::1]:7500", ["[::1]:7500", "[0:0::1]:7500"], ["[::1]:7501", "[::2]:7500"]),
        ("*:7500", ["anybody:7500", "10.0.0.1:7500", "[::1]:7500"], ["anybody:7501"]),
        ("*", ["anybody:1", "10.0.0.1:1", "[::1]:65535"], []),
    ],
)
def test_patterns(pattern: str, fits: list[str], fails: list[str]) -> None:
    allowed = AllowedHosts(["nobody.invalid", pattern])
    assert [address for address in fits if not allowed.allows(f"tcp://{address}")] == []
    assert [address for address in fails if allowed.allows(f"tcp://{address}")] == []


@pytest.mark.parametrize(
    "address",
    [
        *("tcp://127.0.0.1:1", "tcp://127.8.9.10:65535", "tcp://localhost:7500", "tcp://LocalHost:7500"),
        "tcp://[::1]:7500",
    ],
)
def test_this_machine(address: str) -> None:
    assert HERE.allows(address)


@pytest.mark.parametrize(
    "address",
    [
        *("tcp://127.example.com:1", "tcp://127.0.0.1.example.com:1", "tcp://localhost.example.com:1", "tcp://0:1"),
        *("tcp://127.1:1", "tcp://2130706433:1", "tcp://0x7f.0.0.1:1", "tcp://0177.0.0.1:1", "tcp://0.0.0.0:1"),
        *("tcp://[::ffff:10.0.0.1]:1", "tcp://[::ffff:127.0.0.1]:1", "tcp://192.0.2.1:1", "tcp://[fe80::1]:1"),
    ],
)
def test_what_only_looks_like_this_machine(address: str) -> None:
    assert not HERE.allows(address)


@pytest.mark.parametrize(
    "address",
    [
        *("", "nonsense", "tcp://", "tcp://a", "tcp://a:", "tcp://:1", "tcp://a:x", "tcp://a:123456", "tcp://a:-1"),
        *("TCP://a:1", "ipc:///tmp/x", "inproc://x", "udp://a:1", "tcp://a:1 ", " tcp://a:1", "tcp://a:1\n"),
        *("tcp://a:1;b:2", "tcp://lo;a:1", "tcp://a@b:1", "tcp://a/b:1", "tcp://a\0:1", "tcp://a:\u0663", "tcp://é:1"),
        *("tcp://::1:1", "tcp://[::1:1", "tcp://[a:1", "tcp://*:1"),
    ],
)
def test_what_is_no_address_is_allowed_nowhere(address: str) -> None:
    """ZMQ reads more out of such a text than one host and one port."""
    assert not AllowedHosts([EVERYWHERE]).allows(address)


@given(st.text(max_size=40))
def test_any_text(text: str) -> None:
    """Neither raises, nor is anything allowed that does not begin as it must."""
    for address in (text, f"tcp://{text}", f"tcp://{text}:1"):
        assert not HERE.allows(address) or address.lower().startswith(("tcp://127.", "tcp://localhost", "tcp://[::1"))


@pytest.mark.parametrize(
    "pattern",
    [
        *("", " ", "a b", "http://a", "tcp://a:1", "a:x", "a:1:2", "::1", "[::1", "10.0.0.1/8", "10.0.0.0/33", "127.1"),
        *("*a", "a.*", "*.*.a", "**", "a/b", "[fd00::]/200", "300.1.1.1"),
    ],
)
def test_patterns_that_are_none(pattern: str) -> None:
    with pytest.raises(TransferError, match="is no host or host:port"):
        AllowedHosts([pattern])
