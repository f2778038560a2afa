"""Heads and bodies of replies as bytes: read alike wherever they are cut, and refused where they can be misread."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from pdproxy.engines.http.base import EngineBroken
from pdproxy.engines.http.http1.chunked import MAX_LINE_BYTES, Chunked
from pdproxy.engines.http.http1.framing import Counted, Framing, UntilClose
from pdproxy.engines.http.http1.head import MAX_HEAD_BYTES, Head, find_head
from pdproxy.engines.http.http1.request_head import HeadWriter

END = b"0\r\n\r\n"
WELL_FORMED = {
    "empty": (END, b""),
    "two chunks": (b"3\r\nabc\r\n2\r\nde\r\n" + END, b"abcde"),
    "extensions": (b'3;a=b\r\nabc\r\n2;c="d e"\r\nde\r\n0;x\r\n\r\n', b"abcde"),
    "trailers": (b"3\r\nabc\r\n0\r\nx-y: z\r\nempty:\r\n\r\n", b"abc"),
    "capitals and zeros": (b"00B\r\nabcdefghijk\r\n000\r\n\r\n", b"abcdefghijk"),
    "line ends in the body": (b"8\r\n\r\n0\r\n\r\n1\r\n" + END, b"\r\n0\r\n\r\n1"),
}
MALFORMED = {
    "no size": b"\r\nabc\r\n",
    "negative size": b"-3\r\nabc\r\n",
    "signed size": b"+3\r\nabc\r\n",
    "size with a space": b"3 \r\nabc\r\n",
    "size with a prefix": b"0x3\r\nabc\r\n",
    "size with an underscore": b"1_0\r\n",
    "endless size": b"0" * 17,
    "bare line end": b"3\nabc\r\n",
    "two carriage returns": b"3\r\r\nabc",
    "body too long": b"3\r\nabcd\r\n",
    "body's line end is bare": b"3\r\nabc\n2\r\n",
    "body's line end is half": b"3\r\nabc\r2\r\n",
    "null in an extension": b"3;\0\r\nabc\r\n",
    "extension without end": b"3;" + b"x" * MAX_LINE_BYTES,
    "trailer that is none": b"0\r\nabc\r\n\r\n",
    "trailer on a second line": b"0\r\na: b\r\n c\r\n\r\n",
    "endless trailers": b"0\r\n" + b"a: b\r\n" * MAX_LINE_BYTES,
}


def cuts(data: bytes) -> Iterator[list[bytes]]:
    """In one piece, byte by byte, and in two pieces cut at every place."""
    yield [data]
    yield [data[i : i + 1] for i in range(len(data))]
    yield from ([data[:i], data[i:]] for i in range(1, len(data)))


# ── chunked ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", WELL_FORMED)
def test_chunks_stripped(name: str) -> None:
    data, body = WELL_FORMED[name]
    for pieces in cuts(data):
        chunked = Chunked()
        assert b"".join(map(chunked.strip, pieces)) == body
        assert (chunked.is_complete, chunked.has_surplus) == (True, False)
        chunked.closed()


@pytest.mark.parametrize("name", MALFORMED)
def test_chunks_that_are_none(name: str) -> None:
    data = MALFORMED[name]
    for pieces in cuts(data) if len(data) < 100 else ([data],):
        strip = Chunked().strip
        with pytest.raises(EngineBroken):
            list(map(strip, pieces))


def test_chunked_body_cut_off() -> None:
    data = b"3\r\nabc\r\n2\r\nde\r\n0\r\nx: y\r\n\r\n"
    for length in range(len(data)):
        chunked = Chunked()
        chunked.strip(data[:length])
        assert not chunked.is_complete
        with pytest.raises(EngineBroken):
            chunked.closed()


def test_chunked_body_with_something_behind_it() -> None:
    for pieces in ([b"3\r\nabc\r\n" + END + b"HTTP"], [b"3\r\nabc\r\n0\r\n", b"\r\nH"]):
        chunked = Chunked()
        for piece in pieces:
            chunked.strip(piece)
        assert (chunked.is_complete, chunked.has_surplus) == (True, True)


def test_chunks_of_all_sizes_and_cuts() -> None:
    """By chance, with the seed shown: against what they were made of."""
    seed = random.SystemRandom().randrange(1 << 32)
    print("seed", seed)
    dice = random.Random(seed)
    for _ in range(300):
        bodies = [dice.randbytes(dice.choice([1, 2, 15, 16, 300, 2047, 2048, 2049, 5000])) for _ in range(5)]
        data = b"".join(b"%x\r\n%b\r\n" % (len(body), body) for body in bodies) + END
        places = sorted(dice.sample(range(1, len(data)), dice.randrange(6)))
        chunked = Chunked()
        pieces = [chunked.strip(data[a:b]) for a, b in zip([0, *places], [*places, len(data)], strict=True)]
        assert b"".join(pieces) == b"".join(bodies)
        assert chunked.is_complete


# ── the other two ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_counted() -> None:
    for pieces in cuts(b"abcde"):
        counted = Counted(5)
        assert b"".join(map(counted.strip, pieces)) == b"abcde"
        assert (counted.is_complete, counted.has_surplus) == (True, False)
    assert Counted(0).is_complete
    Counted(0).closed()


def test_counted_too_short_or_too_long() -> None:
    short, long = Counted(5), Counted(3)
    assert short.strip(b"abcd") == b"abcd"
    with pytest.raises(EngineBroken, match="1 bytes before"):
        short.closed()
    assert long.strip(b"abcd") == b"abc"
    assert (long.is_complete, long.has_surplus) == (True, True)


def test_until_close() -> None:
    body = UntilClose()
    assert (body.strip(b"abc"), body.is_complete) == (b"abc", False)
    body.closed()
    assert body.is_complete


# ── heads ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def read(pieces: list[bytes]) -> tuple[Head, Framing, bytes]:
    """A head that ends in the last piece, how its body is framed, and what has come of that."""
    *begun, last = pieces
    head, rest = find_head(read_begun(begun) + last)
    assert head is not None
    return head, head.framing(), rest


def read_begun(pieces: list[bytes]) -> bytes:
    """What is left of a head that does not end in them."""
    begun = b""
    for piece in pieces:
        head, begun = find_head(begun + piece)
        assert head is None
    return begun


def test_head_wherever_it_is_cut() -> None:
    data = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nx-y: z\r\nX-Y: a\r\nempty:\r\n\r\n"
    for pieces in cuts(data):
        head, framing, rest = read(pieces)
        assert (head.status, head.keeps_alive, rest) == (200, True, b"")
        assert [head.header(name) for name in ("content-LENGTH", "x-y", "empty", "nope")] == ["2", "z, a", "", None]
        assert isinstance(framing, Counted)


def test_interim_heads_are_passed_over() -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n"
    for pieces in cuts(interim + b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"):
        head, framing, _ = read(pieces)
        assert (head.status, head.header("link"), framing.is_complete) == (404, None, True)
    many = interim * 10_000 + b"HTTP/1.1 200 OK\r\n\r\n"
    assert read([many])[0].status == 200


def test_what_follows_a_head_is_body() -> None:
    assert read([b"HTTP/1.1 200 OK\r\n\r\nab\n\n\r\n\r\n"])[2] == b"ab\n\n\r\n\r\n"


@pytest.mark.parametrize(
    ("head", "framing", "keeps_alive"),
    [
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: Chunked\r\n\r\n", Chunked, True),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n", Counted, True),
        (b"HTTP/1.1 200 OK\r\ncontent-length:  5 \r\nconnection: x, Close\r\n\r\n", Counted, False),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 5\r\n\r\n", Counted, False),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 5\r\nconnection: keep-alive\r\n\r\n", Counted, True),
        (b"HTTP/1.1 200\r\n\r\n", UntilClose, False),
        (b"HTTP/1.1 204 No Content\r\n\r\n", Counted, True),
        (b"HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n", Counted, False),
        (b"HTTP/1.1 304 Not Modified\r\ncontent-length: 5\r\n\r\n", Counted, True),
    ],
)
def test_framing(head: bytes, framing: type, keeps_alive: bool) -> None:
    found, how, _ = read([head])
    assert (type(how), found.keeps_alive) == (framing, keeps_alive)
    assert how.is_complete == (found.status in (204, 304))


@pytest.mark.parametrize(
    "head",
    [
        b"<html>\r\n\r\n",
        b"H2TP/1.1 200 OK\r\n\r\n",
        b"\r\n\r\n",
        b"HTTP/2.0 200 OK\r\n\r\n",
        b"HTTP/1.1 99 OK\r\n\r\n",
        b"HTTP/1.1 1000 OK\r\n\r\n",
        b"HTTP/1.1 OK\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
        b"HTTP/1.1 200 OK\ncontent-length: 2\n\nhi",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\n\r\nhi",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\nhi",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nhi",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 2\r\n\r\nhi",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2, 2\r\n\r\nhi",
        b"HTTP/1.1 200 OK\r\ncontent-length: -2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: +2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: \r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999999999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\n",
        b"HTTP/1.0 200 OK\r\ntransfer-encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\na : b\r\n\r\n",
        b"HTTP/1.1 200 OK\r\na: b\r\n c\r\n\r\n",
        b"HTTP/1.1 200 OK\r\na: \0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n: b\r\n\r\n",
    ],
)
def test_heads_that_are_none(head: bytes) -> None:
    for pieces in cuts(head):
        with pytest.raises(EngineBroken):
            read_begun(pieces)


def test_huge_heads() -> None:
    start = b"HTTP/1.1 200 OK\r\na: "
    begun = read_begun([start + b"x" * (MAX_HEAD_BYTES - len(start))])
    with pytest.raises(EngineBroken, match="larger"):
        find_head(begun + b"x")
    with pytest.raises(EngineBroken, match="larger"):
        find_head(start + b"x" * MAX_HEAD_BYTES + b"\r\n\r\n")


# ── heads of requests ───────────────────────────────────────────────────────────────────────────────────────────────

HEADS = HeadWriter("engine:8000", {"authorization": "Bearer ours"})


def test_head_of_a_post() -> None:
    assert HEADS.post("/v1/x", {"x-request-id": "r1"}, 12) == (
        b"POST /v1/x HTTP/1.1\r\nhost: engine:8000\r\naccept: */*\r\naccept-encoding: identity\r\n"
        b"authorization: Bearer ours\r\ncontent-type: application/json\r\n"
        b"x-request-id: r1\r\ncontent-length: 12\r\n\r\n"
    )


def test_head_of_a_get() -> None:
    head = HEADS.get("/a b/ü?c=%20d")
    assert head.startswith(b"GET /a%20b/%C3%BC?c=%20d HTTP/1.1\r\nhost: engine:8000\r\n")
    assert head.endswith(b"authorization: Bearer ours\r\n\r\n")
    assert HEADS.get("").startswith(b"GET / HTTP/1.1\r\n")


def test_a_calls_own_headers_take_the_place_of_others() -> None:
    head = HEADS.post("/", {"authorization": "Bearer theirs", "content-type": "text/plain"}, 0)
    assert head.count(b"authorization") == head.count(b"content-type") == 1
    assert b"Bearer theirs" in head
    assert b"text/plain" in head


@pytest.mark.parametrize("value", ["a\r\nb: c", "a\nb", "a\r", "\0", "\u20ac"])
def test_a_header_is_one_header(value: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        HEADS.post("/", {"a": value}, 0)
    with pytest.raises(ValueError, match=r"."):
        HEADS.post("/", {"a" + value: "b"}, 0)


def test_a_target_stays_in_its_line() -> None:
    assert HEADS.get("/a\r\nb: c").startswith(b"GET /a%0D%0Ab:%20c HTTP/1.1\r\n")
