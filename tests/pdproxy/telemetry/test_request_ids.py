"""`x-request-id` in and out, and in every line that is written meanwhile."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator

import pytest

from pdproxy.telemetry import request_id
from pdproxy.telemetry.log import Facts, JsonFormatter, LogFormat, TextFormatter, configure
from tests.fakes.fail_once import fail_once
from tests.fakes.proxy_harness import proxy_in_front_of
from transfer import logs

HARMLESS = ["a", "req-0123", "550e8400-e29b-41d4-a716-446655440000", "a/b:c=d+e@f#g~h.i_j", "x" * 128]
HARMFUL = ["", "x" * 129, "a b", 'a"b', "a\\b", "a\nb", "a,b", "a;b", "é", "a\x00"]


@pytest.mark.parametrize("given", HARMLESS)
async def test_a_harmless_id_is_kept(given: str) -> None:
    async with proxy_in_front_of() as house:
        answer = await house.post(headers={"x-request-id": given})
        assert answer.headers["x-request-id"] == given
        assert {call.headers["x-request-id"] for call in house.decoder.generations()} == {given}


@pytest.mark.parametrize("given", HARMFUL)
def test_a_harmful_id_is_replaced(given: str) -> None:
    made = request_id.accept(given)
    assert made != given
    assert made.startswith("req-")
    assert made != request_id.accept(given)


async def test_every_answer_has_one() -> None:
    async with proxy_in_front_of() as house:
        for path, method, status in (
            ("/health", "GET", 200),
            ("/v1/models", "GET", 200),
            ("/status", "GET", 200),
            ("/nothing", "GET", 404),
            ("/v1/completions", "GET", 405),
            ("/v1/completions", "POST", 400),
        ):
            kept = await house.call_raw(path, b"", {"x-request-id": "mine"}, method).answer()
            made = await house.call_raw(path, b"", {}, method).answer()
            assert (kept.status, kept.headers["x-request-id"]) == (status, "mine")
            assert made.headers["x-request-id"].startswith("req-")


# ── logs ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    before = root.level, root.handlers[:], sys.excepthook
    yield
    logs.flush()
    root.setLevel(before[0])
    root.handlers[:] = before[1]
    sys.excepthook = before[2]
    logging.captureWarnings(False)


def made(message: object, *arguments: object, **more: object) -> logging.LogRecord:
    return logging.LogRecord("some.logger", logging.WARNING, "file", 1, message, arguments, None, **more)  # type: ignore[arg-type]


def test_text_line_of_a_request() -> None:
    token = request_id.current.set("mine")
    try:
        text = TextFormatter().format(made("%d pages", 3))
        assert text.endswith("WARNING some.logger: 3 pages request_id=mine")
        assert TextFormatter().format(made(Facts({"request_id": "mine"}))).endswith(": request_id=mine")
    finally:
        request_id.current.reset(token)
    assert TextFormatter().format(made("%d pages", 3)).endswith("3 pages")


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("plain-text_1:/#[]~", "plain-text_1:/#[]~"),
        ("", '""'),
        ("a b", '"a b"'),
        ("a=b", '"a=b"'),
        ('a"b', '"a\\"b"'),
        ("a\\b", '"a\\\\b"'),
        ("a\nb", '"a\\nb"'),
        ("a\x7fb", '"a\\u007fb"'),
        ("größe", '"gr\\u00f6\\u00dfe"'),
        (3, "3"),
        (True, "True"),
    ],
)
def test_text_that_could_look_like_another_field_is_quoted(value: object, written: str) -> None:
    assert str(Facts({"model": value})) == f"model={written}"


def test_seconds_are_written_in_milliseconds() -> None:
    facts = Facts({"total_s": 0.10949, "earlier_s": 12.0, "started_at": 17.125, "num_s": 3})
    assert str(facts) == "total_ms=109.5 earlier_ms=12000.0 started_at=17.125 num_s=3"
    assert facts.members == {"total_ms": 109.5, "earlier_ms": 12000.0, "started_at": 17.125, "num_s": 3}


def test_json_lines() -> None:
    token = request_id.current.set("mine")
    try:
        plain = json.loads(JsonFormatter().format(made("a\n%s", {1})))
        request = json.loads(
            JsonFormatter().format(made(Facts({"request_id": "mine", "total_s": 0.25, "stream": True})))
        )
    finally:
        request_id.current.reset(token)
    assert (plain["message"], plain["request_id"], plain["level"], plain["logger"]) == (
        "a\n{1}",
        "mine",
        "warning",
        "some.logger",
    )
    assert plain["time"].endswith("+00:00")
    del request["time"]
    assert request == {
        "level": "warning",
        "logger": "some.logger",
        "message": "request",
        "request_id": "mine",
        "total_ms": 250.0,
        "stream": True,
    }


def test_json_line_with_an_exception() -> None:
    record = made("it met a bug")
    try:
        raise ValueError("on purpose")
    except ValueError as error:
        record.exc_info = (ValueError, error, error.__traceback__)
    text = JsonFormatter().format(record)
    assert "\n" not in text
    assert "ValueError: on purpose" in json.loads(text)["exception"]


def test_a_json_line_that_is_too_long_is_still_json() -> None:
    record = made("a" + '"\n\x00' * 20_000 + "z")
    record.exc_info = (ValueError, ValueError("ö" * 20_000 + "at its end"), None)
    line = JsonFormatter().format(record)
    assert len(line.encode()) < logs.MAX_LINE_BYTES
    told = json.loads(line)
    assert told["message"].startswith('a"')
    assert told["message"].endswith("z")
    assert " bytes missing …]" in told["message"]
    assert told["exception"].endswith("at its end")
    facts = json.loads(JsonFormatter().format(made(Facts({"model": "m" * 100_000, "status": 200}))))
    assert facts["model"].startswith("mmm")
    assert facts["status"] == 200


def written(capfd: pytest.CaptureFixture[str]) -> list[str]:
    logs.flush()
    return capfd.readouterr().err.splitlines()


@pytest.mark.usefixtures("logging_as_before")
@pytest.mark.parametrize("log_format", ["text", "json"])
async def test_every_line_of_a_request_has_its_id(log_format: LogFormat, capfd: pytest.CaptureFixture[str]) -> None:
    configure("debug", log_format)
    async with proxy_in_front_of() as house:
        written(capfd)
        await house.post(headers={"x-request-id": "mine"})
        lines = [line for line in written(capfd) if "pdproxy" in line]
    assert len(lines) == 3  # two legs and the request
    for line in lines:
        if log_format == "json":
            assert json.loads(line)["request_id"] == "mine"
        else:
            assert line.count("request_id=mine") == 1


@pytest.mark.usefixtures("logging_as_before")
async def test_the_times_of_a_request_add_up(capfd: pytest.CaptureFixture[str]) -> None:
    """With a failed attempt before the one that served it."""
    configure("info", "json")
    async with proxy_in_front_of() as house:
        fail_once(house.prefiller, "prefill")
        written(capfd)
        assert (await house.post()).status == 200
        [facts] = [json.loads(line) for line in written(capfd) if '"pdproxy.requests"' in line]
    assert facts["attempts"] == 2
    parts = ("receive", "earlier", "slot_wait", "prefill", "kv_wait", "first_byte", "decode")
    told_ms = sum(facts[f"{part}_ms"] for part in parts)
    assert told_ms == pytest.approx(facts["total_ms"], abs=5)
