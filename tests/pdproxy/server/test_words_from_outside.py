"""Words of clients and engines, wherever the proxy shows them: they are bounded, and can be printed."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from pdproxy.errors import MAX_MESSAGE_BYTES, LegFailed
from pdproxy.fleet.instance import MAX_TOLD_CHARS
from pdproxy.telemetry.log import Facts, JsonFormatter, TextFormatter
from tests.fakes.fake_engine import FakeEngine, error_reply
from tests.fakes.proxy_harness import Answer, proxy_in_front_of, until
from transfer.logs import MAX_LINE_BYTES

EVIL = "evil\n2026-01-01 ERROR pdproxy: \x1b[31m\u202e\x00"
MOST_CHARS = 4 * MAX_MESSAGE_BYTES


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, member in value.items():
            yield name
            yield from strings(member)
    elif isinstance(value, list):
        for member in value:
            yield from strings(member)


def check(text: str) -> None:
    assert text.isprintable(), repr(text)
    assert len(text) < MOST_CHARS


async def test_words_of_clients(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "pdproxy")
    async with proxy_in_front_of() as house:
        answers: list[Answer] = [
            await house.post(model=EVIL),
            await house.post(model="m" * 100_000),
            await house.post(**{EVIL * 1000: 10**400}),
            await house.post(max_tokens=EVIL * 1000),
            await house.post(headers={"x-request-id": EVIL.replace("\n", ""), "x-pdproxy-priority": EVIL * 100}),
            await house.call_raw("/" + "x" * 50_000, b"", {}, "GET").answer(),
            await house.call_raw("/v1/completions", b"\xff" * 1000, {}, "POST").answer(),
        ]
        for answer in answers:
            if answer.status >= 400:
                for text in strings(answer.error):
                    check(text)
            check(answer.headers["x-request-id"])
        assert sum(answer.status >= 400 for answer in answers) > 4
        page = (await house.get("/metrics")).body.decode()
        for line in page.splitlines():
            check(line)
    for record in caplog.records:
        for one in TextFormatter().format(record).splitlines()[:1]:
            check(one)
        line = JsonFormatter().format(record)
        assert len(line.encode()) < MAX_LINE_BYTES
        assert line.isprintable() or isinstance(record.msg, Facts)


@pytest.mark.parametrize("name", [EVIL, "m" * (MAX_TOLD_CHARS + 1)])
async def test_an_engine_that_tells_such_a_name_is_not_used(name: str) -> None:
    decoders = [FakeEngine("decode"), FakeEngine("decode")]
    decoders[1].model = name
    async with proxy_in_front_of(decoders=decoders, wait=False) as house:
        bad = house.proxy.pool.instances[-1]
        await until(lambda: "cannot be printed" in bad.why)
        assert not bad.is_ready
        for text in strings((await house.get("/status")).json()):
            check(text)
        for line in (await house.get("/metrics")).body.decode().splitlines():
            check(line)


async def test_what_an_engine_says_of_a_failure() -> None:
    async with proxy_in_front_of(retries=0) as house:
        house.prefiller.fail_at["prefill"] = error_reply(500, EVIL * 10_000)
        answer = await house.post()
        assert answer.status == 502
        for text in strings(answer.error):
            check(text)
        bad = house.proxy.pool.instances[0]
        bad.why = EVIL * 10_000
        for text in strings((await house.get("/status")).json()):
            check(text)


def test_every_error_is_bounded_where_it_is_made() -> None:
    error = LegFailed("prefill", "p", EVIL * 10_000)
    for text in (str(error), json.loads(json.dumps(error.body()))["error"]["message"]):
        check(text)
        assert "bytes missing" in text
