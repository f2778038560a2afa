"""A prefiller is restarted: the built-in decoders are told that the process before it writes nothing more."""

from __future__ import annotations

import json

from pdproxy.engines.base import EngineUnreachable
from pdproxy.engines.builtin import sender_ended_call
from pdproxy.fleet.sender_endings import SenderEndings
from tests.fakes.fleet import make_instance, make_ready


class Leg:
    status = 200

    async def read(self) -> bytes:
        return b"{}"

    def close(self) -> None:
        pass


class Client:
    """Keeps what it is asked, and cannot be reached at first."""

    def __init__(self, num_failures: int = 0) -> None:
        self.num_failures = num_failures
        self.calls: list[tuple[str, object]] = []

    async def post(self, path: str, body: bytes, headers: object) -> Leg:
        if self.num_failures:
            self.num_failures -= 1
            raise EngineUnreachable("nobody there")
        self.calls.append((path, json.loads(body)))
        return Leg()


WORD = ("/kv_transfer/sender_ended", {"epoch": "p-1"})


async def test_every_decoder_is_told_until_it_has_heard() -> None:
    clients = Client(), Client(num_failures=1)
    decoders = [
        make_ready(make_instance(name, client=client))  # type: ignore[arg-type]
        for name, client in zip(("d0", "d1"), clients, strict=True)
    ]
    endings = SenderEndings(lambda: decoders, sender_ended_call, call_timeout_s=1.0)
    endings.ended("p-1")
    await endings.say_all()
    assert [client.calls for client in clients] == [[WORD], []]
    await endings.say_all()
    await endings.say_all()
    assert [client.calls for client in clients] == [[WORD], [WORD]]
    assert repr(endings) == "<SenderEndings 0 owed>"


async def test_a_decoder_that_is_another_process_or_gone_is_owed_nothing() -> None:
    clients = Client(num_failures=1), Client(num_failures=1)
    decoders = [
        make_ready(make_instance(name, client=client))  # type: ignore[arg-type]
        for name, client in zip(("d0", "d1"), clients, strict=True)
    ]
    endings = SenderEndings(lambda: decoders, sender_ended_call, call_timeout_s=1.0)
    endings.ended("p-1")
    await endings.say_all()
    make_ready(decoders[0], epoch="another")
    del decoders[1]
    await endings.say_all()
    assert [client.calls for client in clients] == [[], []]
    assert repr(endings) == "<SenderEndings 0 owed>"


def test_only_built_in_engines_are_told() -> None:
    assert sender_ended_call(object(), "p-1") is None  # type: ignore[arg-type]
