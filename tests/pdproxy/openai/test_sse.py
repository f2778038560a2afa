"""Event borders, wherever the network cuts."""

from __future__ import annotations

import re
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.openai.sse import DONE, EventBuffer, data_of, event, has_done, split

STREAM = event({"a": "é"}) + b": comment\n\n" + b"data: x\r\ndata: y\r\n\r\n" + DONE


def test_split() -> None:
    assert [data_of(raw) for raw in split(STREAM)] == ['{"a":"é"}'.encode(), None, b"x\ny", b"[DONE]"]
    assert split(b"data: half") == []


@pytest.mark.parametrize(
    ("raw", "data"),
    [
        (b"data: a\n\n", b"a"),
        (b"data:a\n\n", b"a"),
        (b"data:  a\n\n", b" a"),
        (b"data: a\r\n\r\n", b"a"),
        (b"data: a\rdata: b\n\n", b"a\nb"),
        (b"data: a\ndata: b\n\n", b"a\nb"),
        (b"data: a\nid: 1\n\n", b"a"),
        (b"event: x\ndata: a\n\n", b"a"),
        (b"data: \n\n", b""),
        (b"data\n\n", None),
        (b": data: a\n\n", None),
    ],
)
def test_what_an_event_carries(raw: bytes, data: bytes | None) -> None:
    assert data_of(raw) == data


def test_events_end_at_the_first_blank_line_of_either_kind() -> None:
    events = [
        b"data: 1\r\n\r\n",
        b"data: 2\n\n",
        b"data: 3\r\n\r\n",
        b"data: 4\r\n\r\n",
        b"data: 5\n\n",
        b"data: 6\n\n",
    ]
    assert split(b"".join(events) + b"data: 7\r\n") == events


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_whatever_the_cuts_whole_events_come_out(cuts: list[int]) -> None:
    borders = {0}
    for raw in split(STREAM):
        borders.add(max(borders) + len(raw))
    buffer, out = EventBuffer(), b""
    edges = [0, *sorted(cuts), len(STREAM)]
    for start, end in pairwise(edges):
        out += buffer.feed(STREAM[start:end])
        assert len(out) in borders
    assert out == STREAM
    assert buffer.num_pending_bytes == 0


def test_the_end_is_told_from_a_quotation_of_it() -> None:
    assert has_done(b"data: a\n\ndata: [DONE]\n\n")
    assert has_done(b"data: [DONE]\r\n\r\n")
    assert not has_done(event({"text": "data: [DONE]\n\n"}))


@given(st.lists(st.sampled_from([b"\n\n", b"\r\n\r\n", b"\n", b"\r\n", b"\r", b"a", b"data: b"]), max_size=30))
def test_events_are_those_that_end_at_each_blank_line(parts: list[bytes]) -> None:
    whole = b"".join(parts)
    assert split(whole) == re.findall(rb"(?s).*?(?:\r\n\r\n|\n\n)", whole)


@pytest.mark.parametrize("border", [b"\n\n", b"\r\n\r\n"], ids=["lf", "crlf"])
def test_the_work_for_an_event_grows_with_its_bytes_alone(border: bytes) -> None:
    """What is copied or searched again with each piece takes thousands of times as long."""
    piece, num_pieces = b"x" * 1023 + b"\n", 16 * 1024
    buffer, started = EventBuffer(), time.process_time()
    for _ in range(num_pieces):
        assert buffer.feed(piece) == b""
    event = buffer.feed(b"x" + border)
    assert len(event) == num_pieces * len(piece) + 1 + len(border)
    assert time.process_time() - started < 2.0


@pytest.mark.parametrize("raw", [b"data:{}\r\n\r\n", b"data:\r{}\n\n"], ids=["crlf", "lf"])
def test_many_events_with_carriage_returns_are_split_in_one_go(raw: bytes) -> None:
    started = time.process_time()
    assert len(split(raw * 100_000)) == 100_000
    assert time.process_time() - started < 2.0


class TooLargeError(Exception):
    """What a buffer raises here."""


@pytest.mark.parametrize("size", [1, 3, 7, 64])
def test_an_event_may_be_as_large_as_the_limit_and_not_larger(size: int) -> None:
    def feed(data: bytes) -> bytes:
        buffer = EventBuffer(100, TooLargeError)
        return b"".join(buffer.feed(data[start : start + size]) for start in range(0, len(data), size))

    largest = b"data: " + b"x" * 92 + b"\n\n"
    assert feed(largest * 3) == largest * 3
    with pytest.raises(TooLargeError):
        feed(largest * 2 + b"x" + largest)
    with pytest.raises(TooLargeError):
        feed(b"x" * 101)
    with pytest.raises(TooLargeError):
        feed(b": \n" * 40)


def test_half_an_event_stays_behind() -> None:
    buffer = EventBuffer()
    assert buffer.feed(b"data: a\n\ndata: b") == b"data: a\n\n"
    assert buffer.num_pending_bytes == 7
