"""An answer as it comes: what counts as a piece of it, when each came, and how it ended."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any

import pytest

from pdproxy.engines.http.base import EngineBroken
from pdproxy.loadtest.answer import Answer
from pdproxy.loadtest.headers import NOWHERE, Way, read_way


class Time:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def fresh(time: Time, **options: Any) -> Answer:
    return Answer(time, asyncio.get_running_loop().create_future(), **options)


def event(content: Any) -> bytes:
    return b"data: " + (content if isinstance(content, bytes) else json.dumps(content).encode()) + b"\n\n"


def said(text: str, finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish}]})


def delta(finish: str | None = None, **part: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": part, "finish_reason": finish}]})


DONE = event(b"[DONE]")
USAGE = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}


async def heard(chunks: Iterable[bytes], step_s: float = 0.1, **options: Any) -> Answer:
    """One chunk each `step_s`, then the end."""
    time = Time()
    answer = await fresh(time, **options)
    for chunk in chunks:
        time.now_s += step_s
        answer.feed(chunk)
    answer.end()
    return answer


async def test_when_its_pieces_came() -> None:
    usage = event({"choices": [], "usage": USAGE})
    answer = await heard([said("a"), said("b") + said("c"), said("", "length"), usage, DONE])
    assert answer.first_token_s == pytest.approx(0.1)
    assert answer.last_token_s == pytest.approx(0.2)
    assert answer.num_chunks == 3
    assert answer.gaps is not None
    assert (answer.gaps.count, answer.gaps.max_s, answer.gaps.sum_s) == (2, pytest.approx(0.1), pytest.approx(0.1))
    assert answer.over_s == pytest.approx(0.5)
    assert (answer.finish_reason, answer.error) == ("length", "")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.cached_tokens) == (9, 3, 4)


@pytest.mark.parametrize("size", [1, 2, 7, 64])
async def test_however_it_is_cut(size: int) -> None:
    stream = said("one") + b": a comment\n\n" + said(" two", "stop").replace(b"\n", b"\r\n") + DONE
    answer = await heard([stream[at : at + size] for at in range(0, len(stream), size)], keeps_text=True)
    assert answer.text == "one two"
    assert answer.num_chunks == 2
    assert not answer.error


async def test_what_is_no_piece_of_a_chat() -> None:
    """A role, and an empty beginning; but thoughts and calls of tools are."""
    head = delta(role="assistant", content="")
    answer = await heard([head, delta(reasoning_content="hm"), delta(content="yes"), DONE])
    assert answer.first_token_s == pytest.approx(0.2)
    assert answer.num_chunks == 2
    answer = await heard([delta(role="assistant"), delta(tool_calls=[{"index": 0}]), delta("tool_calls"), DONE])
    assert answer.num_chunks == 1


async def test_an_answer_without_text_begins_where_it_ends() -> None:
    answer = await heard([said("", "stop"), DONE])
    assert answer.first_token_s == answer.last_token_s == pytest.approx(0.1)


async def test_the_digest_is_of_the_text_alone() -> None:
    streamed = await heard([said("ein Fluß, "), said("breit"), DONE])
    cut_otherwise = await heard([delta(content="ein Fl"), delta(content="uß, breit"), DONE])
    whole = await fresh(Time())
    message = {"role": "assistant", "content": "ein Fluß, breit"}
    whole.take_whole(200, json.dumps({"choices": [{"message": message}]}).encode())
    other = await heard([said("ein Fluß, breiter"), DONE])
    assert streamed.digest == cut_otherwise.digest == whole.digest != other.digest


@pytest.mark.parametrize(
    ("chunks", "error"),
    [
        ([said("a")], "cut"),
        ([], "cut"),
        ([said("a", "stop")], ""),
        ([said("a"), event({"error": {"message": "lost", "code": "kv_transfer_failed"}}), DONE], "kv_transfer_failed"),
        ([event({"error": {"message": "lost", "code": None, "type": "server_error"}})], "server_error"),
        ([event({"error": "lost"})], "error_event"),
        ([event(b"{")], "malformed"),
        ([event(b'{"choices": [{"text": "\xff"}]}')], "malformed"),
        ([event({"choices": 3}), DONE], "malformed"),
        ([DONE], "malformed"),
        ([event({"choices": [], "usage": {"completion_tokens": 3}}), DONE], "malformed"),
    ],
)
async def test_how_a_stream_ends(chunks: list[bytes], error: str) -> None:
    answer = await heard(chunks)
    assert answer.error == error
    assert answer.over.done()


async def test_a_connection_that_breaks() -> None:
    answer = await fresh(Time())
    answer.feed(said("a"))
    answer.fail(EngineBroken("reset"))
    assert (answer.error, answer.complaint) == ("broken", "reset")
    whole = await fresh(Time())
    whole.feed(said("a", "stop") + DONE)
    whole.fail(EngineBroken("reset"))
    assert not whole.error


async def test_a_client_that_has_seen_enough() -> None:
    answer = await fresh(Time(), leaves_at=2)
    answer.feed(said("a"))
    assert not answer.over.done()
    answer.feed(said("b") + said("c") + said("d"))
    assert answer.over.done()
    assert answer.has_left
    assert answer.num_chunks == 2


@pytest.mark.parametrize(
    ("status", "body", "error", "complaint"),
    [
        (503, b'{"error": {"message": "full", "code": "queue_full", "type": "x"}}', "queue_full", "full"),
        (429, b'{"error": {"message": "slow down", "code": 429, "type": "busy"}}', "busy", "slow down"),
        (400, b'{"object": "error", "message": "no", "code": 400}', "http_400", "no"),
        (422, b'{"detail": "field missing"}', "http_422", "field missing"),
        (502, b"<html>Bad gateway", "http_502", "<html>Bad gateway"),
        (500, b"", "http_500", ""),
        (500, b'"\xff"', "http_500", '"\ufffd"'),
        (200, b"hello", "malformed", "b'hello'"),
        (200, b'{"error": {"message": "m"}}', "error", "m"),
        (200, b'{"status": "ok"}', "malformed", "no choice"),
        (200, b'{"choices": []}', "malformed", "no choice"),
    ],
)
async def test_what_is_no_answer(status: int, body: bytes, error: str, complaint: str) -> None:
    answer = await fresh(Time())
    answer.take_whole(status, body)
    assert answer.error == error
    assert complaint in answer.complaint
    assert answer.over.done()


async def test_a_whole_answer() -> None:
    answer = await fresh(Time(), keeps_text=True)
    usage = USAGE | {"prompt_tokens_details": None}
    content = {"choices": [{"text": "abc", "finish_reason": "length"}], "usage": usage}
    answer.take_whole(200, json.dumps(content).encode())
    assert (answer.text, answer.finish_reason, answer.error) == ("abc", "length", "")
    assert answer.first_token_s is None
    assert answer.usage is not None
    assert answer.usage.cached_tokens is None


# ── the head ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_proxys_word_for_the_way_it_went() -> None:
    told = {
        "x-pdproxy-path": "disaggregated",
        "x-pdproxy-prefiller": "prefill-0",
        "x-pdproxy-decoder": "decode-1",
        "x-pdproxy-attempt": "4c",
        "x-pdproxy-kv": "pages=5;bytes=327680;transfer_ms=2.900",
        "server-timing": "tokenize;dur=12.2, slot_wait;dur=0.1, prefill;dur=21.3, kv_wait;dur=0.8, first_byte;dur=3.5",
    }
    assert read_way(told.get) == Way(
        path="disaggregated",
        prefiller="prefill-0",
        decoder="decode-1",
        attempt="4c",
        phases={
            name: pytest.approx(value)
            for name, value in (
                ("tokenize", 0.0122),
                ("slot_wait", 0.0001),
                ("prefill", 0.0213),
                ("kv_wait", 0.0008),
                ("first_byte", 0.0035),
            )
        },
        num_pages=5,
        num_kv_bytes=327680,
        transfer_s=pytest.approx(0.0029),
    )


def test_the_head_of_somebody_elses_answer() -> None:
    assert read_way({"server-timing": "cdn;dur=3"}.get) is NOWHERE
    assert read_way({"x-pdproxy-path": "local", "server-timing": "cdn;dur=3, decode;desc=x"}.get).phases == {}
