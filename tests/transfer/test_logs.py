"""The log of a process: who reads it never holds the process up, and no record goes without being counted."""

from __future__ import annotations

import fcntl
import logging
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from transfer import logs
from transfer.logs import MAX_LINE_BYTES, MAX_RECORD_BYTES, LineFormatter, LogWriter, printable, shortened

PROMPT_S = 0.25
"""Much more than a record takes, and much less than any wait for a reader."""


@contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    """One of 4 KiB."""
    reader, end = os.pipe()
    fcntl.fcntl(end, fcntl.F_SETPIPE_SZ, 4096)
    try:
        yield reader, end
    finally:
        os.close(reader)
        os.close(end)


@contextmanager
def written(**options: int) -> Iterator[tuple[int, LogWriter]]:
    """A pipe's reader, and a writer to it."""
    reader, end = os.pipe()
    fcntl.fcntl(end, fcntl.F_SETPIPE_SZ, 4096)
    writer = LogWriter(end, **options)
    try:
        yield reader, writer
    finally:
        os.close(reader)
        writer.flush()
        os.close(end)


def say(writer: LogWriter, *texts: str) -> None:
    for text in texts:
        writer.handle(logging.LogRecord("some.logger", logging.INFO, "file.py", 1, text, (), None))


def read_all(reader: int, until: bytes) -> list[str]:
    """Every line that there is, up to the one that has `until` in it."""
    got = b""
    while until not in got or not got.endswith(b"\n"):
        piece = os.read(reader, 65536)
        assert piece, got
        got += piece
    return got.decode().splitlines()


def test_a_reader_that_does_not_read_never_holds_up_who_logs() -> None:
    with written(max_lines=100) as (reader, writer):
        started = time.monotonic()
        say(writer, *(f"line {n} {'x' * 200}" for n in range(1000)))
        assert time.monotonic() - started < PROMPT_S
        dropped = writer.num_dropped
        assert 800 < dropped < 900  # some are in the pipe, and some in the thread's hands
        lines = read_all(reader, b"dropped")
        say(writer, "room again")
        lines += read_all(reader, b"room again")
    numbers = [int(line.split()[1]) for line in lines if line.startswith("line")]
    assert numbers == list(range(1000 - dropped))
    assert lines[len(numbers) :] == [f"{dropped} log records were dropped: stderr took no more", "room again"]


def test_bytes_that_wait_are_bounded_too() -> None:
    with written(max_bytes=100_000) as (_, writer):
        say(writer, *(["x" * 1000] * 1000))
        assert 800 < writer.num_dropped < 960


def test_every_record_is_written_once_in_order_or_counted() -> None:
    """A reader that stops and goes on at random, beside threads that log."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng, got, last = random.Random(seed), b"", b"the end of it\n"
    with written(max_lines=50) as (reader, writer):

        def tell(who: int) -> None:
            for n in range(1500):
                say(writer, f"told {who} {n} {'x' * (n % 300)}")
                if n % 100 == 0:
                    time.sleep(0.001)

        def tell_all() -> None:
            threads = [threading.Thread(target=tell, args=(who,)) for who in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            writer.flush(10)
            say(writer, last.decode().strip())

        telling = threading.Thread(target=tell_all)
        telling.start()
        while not got.endswith(last):
            got += os.read(reader, rng.randint(1, 8000))
            if rng.random() < 0.02:
                time.sleep(0.002)
        telling.join()
    lines = got.decode().splitlines()
    seen = [line.split()[1:3] for line in lines if line.startswith("told")]
    for who in range(3):
        numbers = [int(n) for one, n in seen if int(one) == who]
        assert numbers == sorted(set(numbers))
    told = sum(int(line.split()[0]) for line in lines if "were dropped" in line)
    assert told == writer.num_dropped
    assert len(seen) + told == 4500


def test_a_descriptor_that_somebody_has_made_non_blocking_loses_nothing() -> None:
    with written() as (reader, writer):
        os.set_blocking(writer._descriptor, False)
        say(writer, *(f"line {n} {'x' * 200}" for n in range(300)), "last")
        time.sleep(0.05)
        lines = read_all(reader, b"last")
        assert [line.split()[1] for line in lines[:-1]] == [str(n) for n in range(300)]
        assert writer.num_dropped == 0


def test_a_reader_that_has_gone_costs_nothing_and_is_told_when_there_is_one_again(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    end = os.open(fifo, os.O_WRONLY)
    os.close(reader)
    writer = LogWriter(end)
    before = time.thread_time()
    say(writer, *(["nobody"] * 100))
    writer.flush()
    assert writer.num_dropped == 100
    assert time.thread_time() - before < PROMPT_S
    spent = time.process_time()
    time.sleep(0.1)
    assert time.process_time() - spent < 0.05, "it spins"
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    say(writer, "somebody")
    writer.flush()
    assert os.read(reader, 4096).decode().splitlines() == [
        "100 log records were dropped: stderr took no more",
        "somebody",
    ]
    os.close(reader)
    os.close(end)


def test_a_descriptor_that_is_none_raises_into_nobody() -> None:
    writer = LogWriter(-1)
    say(writer, "one", "two")
    writer.flush()
    assert writer.num_dropped == 2


FULL = """
import logging, resource, signal, sys, time
from transfer import logs
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
writer = logs.configure("info")
logs._FULL |= {27}  # EFBIG: a limit stands for a full disk
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
for n in range(20):
    logging.info("line %d %s", n, "x" * 100)
time.sleep(0.2)
spent = time.process_time()
time.sleep(0.3)
assert time.process_time() - spent < 0.1, "it spins"
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
writer.flush(5)
"""


def test_lines_wait_while_the_disk_is_full(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        subprocess.run([sys.executable, "-c", FULL, "500"], stderr=log, check=True, timeout=30)
    lines = (tmp_path / "log").read_text().splitlines()
    assert [line.split()[5] for line in lines] == [str(n) for n in range(20)]


ENDS = """
import logging, sys
from transfer import logs
logs.configure("info")
for n in range(3000):
    logging.info("line %d", n)
{}
"""


@pytest.mark.parametrize(
    ("last", "status", "told"),
    [
        ("", 0, ""),
        ("import logging.config; logging.config.dictConfig({'version': 1}); logging.info('line 3000')", 0, "line 3000"),
        ("sys.exit(3)", 3, ""),
        ("raise ValueError('on\\npurpose')", 1, "ValueError: on"),
        ("logs.end_with(ValueError('it'))", 1, "error: it"),
    ],
)
def test_nothing_is_lost_at_the_end(last: str, status: int, told: str) -> None:
    result = subprocess.run([sys.executable, "-c", ENDS.format(last)], capture_output=True, text=True, timeout=30)
    lines = result.stderr.splitlines()
    assert result.returncode == status
    assert [line.split(" line ")[1] for line in lines[:3000]] == [str(n) for n in range(3000)]
    assert told in "\n".join(lines[3000:])
    assert bool(lines[3000:]) == bool(told)


def test_a_pipe_that_nobody_reads_does_not_hold_the_end() -> None:
    with pipe() as (_, end):
        started = time.monotonic()
        child = subprocess.Popen([sys.executable, "-c", ENDS.format("raise ValueError")], stderr=end)
        try:
            child.wait(20)
        finally:
            child.kill()
            child.wait()
    assert time.monotonic() - started < 2 * logs.FLUSH_S + 3
    assert child.returncode == 1


def test_a_second_flush_does_not_wait_for_what_the_first_has_given_up() -> None:
    with written() as (reader, writer):
        say(writer, *(["x" * 1000] * 20))
        writer.flush(0.1)
        started = time.monotonic()
        writer.flush(10)
        assert time.monotonic() - started < 1
        os.read(reader, 8000)
        writer.flush(0.1)
        reading = threading.Thread(target=read_all, args=(reader, b"last"))
        reading.start()
        say(writer, "last")
        reading.join(10)
        assert not reading.is_alive()


def test_no_line_is_too_long_and_each_says_what_is_missing() -> None:
    with written() as (reader, writer):
        say(writer, "a" + "ö" * 20_000 + "z", "x" * (MAX_LINE_BYTES - 1), "\n".join(["y" * 10_000] * 20), "last")
        lines = read_all(reader, b"last")
    assert max(len(line.encode()) for line in lines) < MAX_LINE_BYTES
    assert lines[0].startswith("aö")
    assert lines[0].endswith("öz")
    [missing] = [int(word) for word in lines[0].split() if word.isdigit()]
    assert missing == 40_002 - len(lines[0].replace(f"[… {missing} bytes missing …]", "").encode())
    assert lines[1] == "x" * (MAX_LINE_BYTES - 1)
    assert sum(len(line) + 1 for line in lines[2:-1]) <= MAX_RECORD_BYTES


def test_a_message_is_one_line_whatever_is_in_it() -> None:
    record = logging.LogRecord(
        "some.logger", logging.INFO, "file.py", 1, "a\n2026 ERROR \x1b[31m\u2028%s", ("ö",), None
    )
    assert LineFormatter().format(record).endswith("some.logger: a\\n2026 ERROR \\x1b[31m\\u2028ö")


def test_a_record_that_cannot_be_formatted_raises_into_nobody() -> None:
    with written() as (reader, writer):
        writer.handle(logging.LogRecord("some.logger", logging.INFO, "file.py", 7, "%d", ("text",), None))
        assert "file.py:7 cannot be formatted: TypeError" in read_all(reader, b"formatted")[0]


def test_texts_that_are_shown() -> None:
    assert printable("größe 1", 100) == "größe 1"
    assert printable("a\x00b", 100) == "a\\x00b"
    assert len(printable("\x00" * 10_000, 400)) <= 4 * 400
    assert shortened("x" * 100, 100) == "x" * 100
    assert shortened("x" * 101, 100) == f"{'x' * 18}[… 65 bytes missing …]{'x' * 18}"
