"""Event borders, wherever the network cuts."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from pdproxy.reply.sse import DONE, EventBuffer, data_of, event, has_done, split

STREAM = event({"a": "é"}) + b": comment\n\n" + b"data: x\r\ndata: y\r\n\r\n" + DONE


def test_split() -> None:
    assert [data_of(raw) for raw in split(STREAM)] == ['{"a":"é"}'.encode(), None, b"x\ny", b"[DONE]"]
    assert split(b"data: half") == []


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


def test_half_an_event_stays_behind() -> None:
    buffer = EventBuffer()
    assert buffer.feed(b"data: a\n\ndata: b") == b"data: a\n\n"
    assert buffer.num_pending_bytes == 7
