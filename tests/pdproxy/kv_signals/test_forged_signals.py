"""Signals about an attempt from somebody who knows of it what everybody may see."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import zmq

from tests.fakes.proxy_harness import Harness, proxy_in_front_of, until
from transfer.wire import KvFailed, KvReady, KvReleased, Message, ProxyNotif, encode


@asynccontextmanager
async def speaking_to(house: Harness) -> AsyncIterator[zmq.SyncSocket]:
    with zmq.Context() as context, context.socket(zmq.PUSH) as sender:
        sender.connect(house.proxy.signal_address())
        yield sender
        sender.close(linger=1000)


def ready(house: Harness, attempt: str) -> KvReady:
    epoch = house.decoder.epoch
    return KvReady(attempt=attempt, rank=0, epoch=epoch, num_pages=1, num_bytes=1, transfer_s=0.1)


def everything_about(house: Harness, attempt: str) -> list[Message]:
    about = {"attempt": attempt, "rank": 0, "epoch": house.decoder.epoch}
    return [
        ready(house, attempt),
        KvFailed(**about, reason="forged"),  # type: ignore[arg-type]
        KvReleased(**about, num_pages=1, reason="consumed"),  # type: ignore[arg-type]
        ProxyNotif(req_id=attempt),
        ProxyNotif(req_id="x", attempt=attempt, rank=0, status="failed"),
    ]


async def test_the_id_that_is_shown_is_not_enough_to_speak_about_an_attempt() -> None:
    async with proxy_in_front_of() as house, speaking_to(house) as stranger:
        house.decoder.signals = "lost"
        call = house.call()
        await until(lambda: house.proxy.board.statistics().num_waiting == 1)
        [told] = [seen.body["kv_transfer_params"]["attempt"] for seen in house.prefiller.generations()]
        shown = told[:16]
        guesses = (shown, shown + "0" * 16, shown * 2)
        forged = [signal for guess in guesses for signal in everything_about(house, guess)]
        for signal in forged:
            stranger.send(encode(signal))
        await until(lambda: house.proxy.board.statistics().num_unexpected == len(forged))
        assert (house.proxy.board.statistics().num_waiting, house.held) == (1, 1)
        assert house.decoder.generations() == [], "nobody was taken in"
        stranger.send(encode(ready(house, told)))
        answer = await call.answer()
        assert (answer.status, answer.headers["x-pdproxy-attempt"]) == (200, shown)


async def test_what_engines_are_told_is_shown_to_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        async with proxy_in_front_of() as house:
            house.decoder.hang_at.add("decode")
            call = house.call(stream=True)
            await house.decoder.reached("decode")
            [told] = [seen.body["kv_transfer_params"]["attempt"] for seen in house.prefiller.generations()]
            pages = [(await house.get(page)).body for page in ("/status", "/metrics")]
            house.decoder.let_go("decode")
            answer = await call.answer()
            pages += [(await house.get("/status")).body, answer.body, json.dumps(answer.headers).encode()]
            [headers] = [seen.headers for seen in house.decoder.generations()]
    said = b"".join(pages).decode() + caplog.text + str(headers)
    assert told[16:] not in said
    assert told[:16] in said


async def test_an_engines_reason_tells_clients_no_more_of_the_id(monkeypatch: pytest.MonkeyPatch) -> None:
    async with proxy_in_front_of(retries=0) as house:
        house.decoder.signals = "lost"
        call = house.call()
        await until(lambda: house.proxy.board.statistics().num_waiting == 1)
        [told] = [seen.body["kv_transfer_params"]["attempt"] for seen in house.prefiller.generations()]
        reason = f"attempt {told}: the writer vanished"
        house.proxy.board.deliver(KvFailed(attempt=told, rank=0, epoch=house.decoder.epoch, reason=reason))
        answer = await call.answer()
        assert f"attempt {told[:16]}: the writer vanished" in answer.error["message"]
        house.decoder.release(told, "failed")
        await asyncio.sleep(0)
