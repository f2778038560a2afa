"""Messages that nobody should send: made of chance (with a seed that is printed), and of valid ones, spoilt.

What is made here is bytes. Who sends them, and what must be left afterwards, is the tests' affair.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from transfer import wire

SEED_VARIABLE = "HOSTILE_SEED"
NAMES = ["a", "good", "unknown", "", "x" * 300]


def new_dice() -> random.Random:
    """Seeded anew for every test, or by the environment; the seed is in the output of a test that fails."""
    seed = int(os.environ.get(SEED_VARIABLE) or random.SystemRandom().randrange(1 << 32))
    print(f"{SEED_VARIABLE}={seed}")
    return random.Random(seed)


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


INTEGERS = [-1, 0, 1, 7, 2**31, 2**40, 2**53, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 1, -(2**63)]
FLOATS = [0.0, -0.0, -1.0, 1e-300, 1e308, float("nan"), float("inf"), float("-inf")]
TEXTS = ["", "x", "\0", "tcp://127.0.0.1:1", "ipc:///nowhere", "é" * 200, "x" * 70_000]
BLOBS = [b"", b"k", b"k" * 65, b"\xff" * 70_000]
LISTS = [[], [[]], [None], [0], [0, 0], [-1], [2**63], ["x"], [b""], [b"k", b"k"], [b"k" * 5_000] * 2, list(range(999))]
OTHERS: list[Any] = [None, True, False, {}, {"a": {}}, {"rank": 0}, nested(3), nested(200)]
WRONG = [*INTEGERS, *FLOATS, *TEXTS, *BLOBS, *LISTS, *OTHERS]
"""Values of every kind: whatever a field wants, most of these are not it."""


def plain(message: wire.Message) -> dict[str, Any]:
    """As a map, ``type`` included; bytes stay bytes."""
    fields = msgspec.to_builtins(message, builtin_types=(bytes,))
    assert isinstance(fields, dict)
    return fields


def truncated(message: wire.Message) -> Iterator[bytes]:
    """The message's bytes, ended too early, at every length; then with something behind them."""
    payload = wire.encode(message)
    yield from (payload[:length] for length in range(len(payload)))
    yield payload + b"\0"
    yield payload + payload


def spoilt(fields: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One field at a time, at any depth: missing, or with each value of `WRONG`; then one field too many."""
    for name, value in fields.items():
        yield {other: v for other, v in fields.items() if other != name}
        yield from ({**fields, name: wrong} for wrong in WRONG)
        if isinstance(value, dict):
            yield from ({**fields, name: inner} for inner in spoilt(value))
    yield {**fields, "surprise": nested(50)}


def with_two(fields: Mapping[str, Any], name: str, first: Any) -> bytes:
    """A msgpack map that has `name` twice, first with `first`."""
    pairs = [(name, first), *fields.items()]
    body = b"".join(msgspec.msgpack.encode(key) + msgspec.msgpack.encode(value) for key, value in pairs)
    return bytes([0x80 | len(pairs)]) + body


def noise(dice: random.Random, count: int) -> Iterator[bytes]:
    """Bytes of chance, and msgpack's own first bytes with chance behind them."""
    for _ in range(count):
        data = dice.randbytes(dice.choice([0, 1, 2, 5, 20, 300]))
        yield data
        yield bytes([dice.choice([0x81, 0x85, 0x91, 0xDC, 0xDE, 0xDF, 0xC6, 0xDB])]) + data
    yield b"\x91" * 20_000
    yield b"\x82\xa4type\xaaHeartbeat\0\xa5epoch" + b"\x91" * 20_000
    yield b"\xdf\xff\xff\xff\xff"
    yield b"\xdd\xff\xff\xff\xff"
    yield b"\xc6\xff\xff\xff\xff"
    yield b"\x82\xa4type\xa9Heartbeat\xa5epoch\xa2\xff\xfe"
    yield b"\x83\xa4type\xa9Heartbeat\xa5epoch\xa1x\xa1z" + b"\x91" * 20_000


def spoilt_payloads(messages: Sequence[wire.Message]) -> list[bytes]:
    """Everything of the above that comes from these messages."""
    payloads: list[bytes] = []
    for message in messages:
        fields = plain(message)
        payloads += truncated(message)
        payloads += (msgspec.msgpack.encode(wrong) for wrong in spoilt(fields))
        payloads += (with_two(fields, name, wrong) for name in fields for wrong in (None, "y", 7, fields[name]))
    return payloads


def senders_messages(epoch: str, layout: wire.Layout, chunk_size: int, notify: str) -> list[wire.Message]:
    """One valid message of every kind, about attempt ``a``."""
    return [
        wire.Hello(
            version=wire.PROTOCOL_VERSION,
            epoch="hostile",
            layout=layout,
            serial=2**53,
            process=wire.Process(pid=1, started=0, boot_id="b", pid_namespace=2**63 - 1),
        ),
        wire.Reserve(
            attempt="a",
            epoch=epoch,
            num_pages=2,
            num_now=2,
            num_tokens=2 * chunk_size,
            timeout_s=0.5,
            notify=notify,
            keys=[b"k" * 16, b""],
            capability="c" * 64,
        ),
        wire.PagesWritten(attempt="a", count=1),
        wire.WritesDone(attempt="a", num_bytes=64, transfer_s=0.1),
        wire.WritesEnded(attempt="a", reason="because"),
        wire.Heartbeat(epoch="hostile", serial=2**53, open=["a", "a", "good"]),
    ]


def receivers_messages(welcome: wire.Welcome) -> list[wire.Message]:
    """One valid message of every kind but `HelloRefused`, about attempt ``a``."""
    return [
        welcome,
        wire.Reserved(attempt="a", pages=[(0, 1)], present=[(0, 1)]),
        wire.PagesTaken(attempt="a", count=1),
        wire.Refusal(attempt="a", epoch=welcome.epoch, reason="because"),
        wire.Cancel(attempt="a"),
        wire.HeartbeatAck(epoch=welcome.epoch),
    ]


def signals() -> list[wire.Message]:
    """One valid message of every kind, about attempt ``a``."""
    return [
        wire.KvReady(attempt="a", rank=0, epoch="e", num_pages=2, num_bytes=64, transfer_s=0.1),
        wire.KvFailed(attempt="a", rank=0, epoch="e", reason="because"),
        wire.KvReleased(attempt="a", rank=0, epoch="e", num_pages=2, reason="consumed"),
        wire.ProxyNotif(req_id="a", rank=0, attempt="a", status="ready"),
    ]
